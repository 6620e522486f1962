"""Emulation: a run on this CPU whose values are kept, and whose sums are made, in a narrower number format.

The names of points are those of everything a pass computes, taps and what lies between them; `POINTS` lists them.
The experts of a layer have one format: their number is written `*`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab._paths import matcher
from colibri_lab.config import Config
from colibri_lab.errors import ArgumentError, nearest
from colibri_lab.numerics import format_of

__all__ = ["FORMATS", "POINTS", "SUMS", "Emulation", "emulation_of"]

FORMATS = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
"""Formats that can be emulated, in the engine's order."""

POINTS = (
    "embed",
    *(
        "layers.*." + name
        for name in (
            "attn.norm", "attn.q.product", "attn.k.product", "attn.v.product", "attn.q", "attn.k", "attn.v",
            "attn.scores", "attn.weights", "attn.context", "attn.out", "middle",
            "moe.input", "moe.router_logits", "moe.scores", "moe.gates",
            "moe.experts.*.gate", "moe.experts.*.up", "moe.experts.*.hidden", "moe.experts.*.output",
            "moe.shared.inner.gate", "moe.shared.inner.up", "moe.shared.inner.hidden", "moe.shared.output",
            "moe.shared.gate.product", "moe.shared.gate", "moe.routed", "moe.output",
            "mlp.input", "mlp.inner.gate", "mlp.inner.up", "mlp.inner.hidden", "mlp.output", "output",
        )
    ),
    "norm", "logits",
)  # fmt: skip
"""Every point, with * for layer and expert, in the engine's order."""

_SUM_NAMES = (
    "attn.q.product", "attn.k.product", "attn.v.product", "attn.scores", "attn.context", "attn.out",
    "moe.router_logits", "moe.experts.*.gate", "moe.experts.*.up", "moe.experts.*.output", "moe.shared.inner.gate",
    "moe.shared.inner.up", "moe.shared.output", "moe.shared.gate.product", "moe.routed", "moe.output",
    "mlp.inner.gate", "mlp.inner.up", "mlp.output",
)  # fmt: skip
SUMS = frozenset({*("layers.*." + name for name in _SUM_NAMES), "logits"})
"""Points whose values are sums of products: with a weight, of q and k, of probabilities or gates and rows."""

Formats = str | Mapping[str, str]


@dataclass(frozen=True)
class Emulation:
    """Number formats to emulate: "float32", "float16", "bfloat16", "float8_e4m3fn" or "float8_e5m2".

    `storage`: a format for every point, or a dict from patterns over point names (`*` for any run of characters) to
    formats, of which the last one that matches counts; points that none names stay float32. After each operation the
    values of the point are rounded to the nearest number of its format, ties to even, and kept widened in float32. What
    is too large becomes Inf, as IEEE 754 says (float16: from 65520 on); float8_e4m3fn has no Inf, so NaN, as ml_dtypes
    does. Sums inside an operation stay float32, as in the matrix units of GPUs.

    `accumulation`: the same for the sums: in products with weights, q·k scores and weighted sums each of the 16 partial
    sums is rounded after every fused multiply-add, and so is every addition that folds them and the bias; a weighted
    sum is one chain, rounded at each step. None: float32. Slow: a plain loop.

    `flush_subnormals`: what is subnormal in the storage format becomes zero of its sign. `saturate`: patterns of points
    at which ±Inf and what is too large become the largest number of the format instead; NaN stays.

    Where a layer has no shared expert, `moe.routed` and `moe.output` are the same rows, which both formats then round.
    Weights are used as the file holds them: they are not rounded, embeddings are as they enter at the point `embed`.
    The KV cache holds the rounded k and v. The floating-point mode of the process is not touched, and the bytes are the
    same on every code path and for any number of threads.

    Raises ArgumentError for a format or pattern that does not exist, with the nearest one.
    """

    storage: Formats = "float32"
    accumulation: Formats | None = None
    flush_subnormals: bool = False
    saturate: str | Iterable[str] = ()

    def __post_init__(self) -> None:
        storage, accumulation = _formats("storage", self.storage), None
        if self.accumulation is not None:
            accumulation = _formats("accumulation", self.accumulation)
        if not isinstance(self.flush_subnormals, bool):
            raise ArgumentError(f"flush_subnormals is True or False; this is {self.flush_subnormals!r:.80}")
        saturate = (self.saturate,) if isinstance(self.saturate, str) else self.saturate
        if not isinstance(saturate, Iterable) or isinstance(saturate, Mapping | bytes):
            raise ArgumentError(
                f"saturate takes patterns of points such as ('layers.*.middle',); this is {saturate!r:.80}"
            )
        object.__setattr__(self, "storage", storage)
        object.__setattr__(self, "accumulation", accumulation)
        object.__setattr__(self, "saturate", tuple(saturate))
        for name, pattern in self._patterns():
            _must_match(name, pattern, POINTS, _any_layer)

    # ---- of a point ----

    def storage_of(self, point: str) -> str:
        """The format in which the values of a point ("layers.2.attn.out") are kept. An expert's number counts as *."""
        return _format_at(self.storage, point)

    def accumulation_of(self, point: str) -> str:
        """The format in which its sums are made; "float32" where there are none."""
        summed = self.accumulation is not None and _any_layer(_any_expert(point)) in SUMS
        return _format_at(self.accumulation, point) if summed else "float32"

    def saturates(self, point: str) -> bool:
        """Whether what is too large becomes the largest number there."""
        return any(matcher(pattern).fullmatch(_any_expert(point)) for pattern in self.saturate)

    @property
    def arithmetic(self) -> str:
        """The storage format where it is the same at every point; else "float32"."""
        if isinstance(self.storage, str):
            return self.storage
        kinds = {self.storage.get("*", "float32")} | set(self.storage.values())
        return kinds.pop() if len(kinds) == 1 else "float32"

    # ---- for the engine ----

    def check(self, config: Config) -> None:
        """Raises ArgumentError for a pattern that names no point of this model."""
        layers = range(config.num_hidden_layers)
        points = [_in_layer(point, layer) for layer in layers for point in POINTS if _exists(point, layer, config)]
        for name, pattern in self._patterns():
            _must_match(name, pattern, points)

    def table(self, config: Config) -> NDArray[np.uint8]:
        """(layers, points, 4): number of the storage format, flush, saturate, number of the accumulation format."""
        rows = np.zeros((config.num_hidden_layers, len(POINTS), 4), np.uint8)
        for layer in range(len(rows)):
            for number, kind in enumerate(POINTS):
                point = _in_layer(kind, layer)
                kept, summed = FORMATS.index(self.storage_of(point)), FORMATS.index(self.accumulation_of(point))
                rows[layer, number] = kept, self.flush_subnormals, self.saturates(point), summed
        return rows

    # ---- as data ----

    def record(self) -> dict[str, Any]:
        """As it stands in a trace's `meta["emulation"]`."""
        return {
            "storage": _plain(self.storage),
            "accumulation": _plain(self.accumulation),
            "flush_subnormals": self.flush_subnormals,
            "saturate": list(self.saturate),
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Emulation:
        """What `record` wrote. Raises ArgumentError for anything else."""
        try:
            return cls(**record)
        except TypeError as error:
            raise ArgumentError(f"this is no record of an emulation: {dict(record)!r:.200}") from error

    def __str__(self) -> str:
        """ "float16, sums in bfloat16, subnormals flushed"."""
        parts = [_words(self.storage)]
        if self.accumulation is not None:
            parts.append(f"sums in {_words(self.accumulation)}")
        if self.flush_subnormals:
            parts.append("subnormals flushed")
        if self.saturate:
            parts.append(f"saturating at {', '.join(self.saturate)}")
        return ", ".join(parts)

    def _patterns(self) -> Iterator[tuple[str, str]]:
        """(parameter, pattern) of all that are given."""
        for name, value in (("storage", self.storage), ("accumulation", self.accumulation)):
            yield from ((name, pattern) for pattern in (value if isinstance(value, Mapping) else ()))
        yield from (("saturate", pattern) for pattern in self.saturate)


def emulation_of(value: str | Emulation | None) -> Emulation | None:
    """What `model.session(emulate=...)` takes: nothing, a storage format for every point, or an Emulation.

    Raises ArgumentError for anything else.
    """
    if value is None or isinstance(value, Emulation):
        return value
    if isinstance(value, str):
        return Emulation(value)
    raise ArgumentError(f'emulate takes a format such as "float16", a lab.Emulation, or None; this is {value!r:.80}')


def _formats(name: str, value: Any) -> str | dict[str, str]:
    """Checked, under their full names."""
    if isinstance(value, Mapping):
        return {pattern: _format(name, kind) for pattern, kind in value.items()}
    return _format(name, value)


def _format(name: str, value: Any) -> str:
    try:
        kind = "None" if value is None else format_of(value).name
    except ArgumentError:
        kind = str(value)
    if kind not in FORMATS:
        near = nearest(kind, FORMATS) or f"; there are {', '.join(FORMATS)}"
        raise ArgumentError(f"{name}: {kind!r:.80} is no number format that can be emulated{near}")
    return kind


def _format_at(formats: Formats | None, point: str) -> str:
    """The format that the last matching pattern gives to a point."""
    if not isinstance(formats, Mapping):
        return formats or "float32"
    fitting = (kind for pattern, kind in [*formats.items()][::-1] if matcher(pattern).fullmatch(_any_expert(point)))
    return next(fitting, "float32")


def _must_match(name: str, pattern: Any, points: Iterable[str], general: Callable[[str], str] = str) -> None:
    """Raises ArgumentError unless the pattern matches a point; for an accumulation: one where something is summed."""
    if not isinstance(pattern, str):
        raise ArgumentError(f"{name} takes patterns of points such as 'layers.*.attn.out'; this is {pattern!r:.80}")
    fits = matcher(general(pattern)).fullmatch
    found = [point for point in points if fits(point)]
    if not found:
        raise ArgumentError(f"{name}: {pattern!r:.80} names no point{nearest(general(pattern), points)}")
    if name == "accumulation" and not any(_any_layer(point) in SUMS for point in found):
        raise ArgumentError(
            f"accumulation: {pattern!r:.80} names no point where something is summed{nearest(pattern, SUMS)}"
        )


def _any_layer(path: str) -> str:
    """layers.3.attn.out -> layers.*.attn.out"""
    return re.sub(r"^layers\.[0-9*]+(?=\.|$)", "layers.*", path)


def _any_expert(path: str) -> str:
    """layers.3.moe.experts.7.gate -> layers.3.moe.experts.*.gate"""
    return re.sub(r"\.experts\.[0-9]+\.", ".experts.*.", path)


def _in_layer(point: str, layer: int) -> str:
    return point.replace("layers.*.", f"layers.{layer}.", 1)


def _exists(point: str, layer: int, config: Config) -> bool:
    """Whether a layer of the model has the point; those outside layers are everywhere."""
    if point.startswith("layers.*.mlp."):
        return layer not in config.moe_layers
    if point.startswith("layers.*.moe.shared."):
        return layer in config.shared_layers
    return layer in config.moe_layers or not point.startswith("layers.*.moe.")


def _plain(formats: Formats | None) -> Any:
    return dict(formats) if isinstance(formats, Mapping) else formats


def _words(formats: Formats) -> str:
    """ "float16", or "float16 at layers.*.attn.*, bfloat16 at norm"."""
    if isinstance(formats, str):
        return formats
    return ", ".join(f"{kind} at {pattern}" for pattern, kind in formats.items()) or "float32"
