"""One run with all that is known about it: what a search for NaN and Inf reads.

Token rows are rows of the session. Values are given as they are stored, narrower floats widened to float32, which
changes nothing about which of them are finite.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from os import PathLike
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.difference.formulas import settings_of
from colibri_lab.errors import ArgumentError
from colibri_lab.numerics import FORMATS
from colibri_lab.trace import Trace

__all__ = ["Birth", "Source", "opened"]

Array = NDArray[Any]
Ints = NDArray[np.int64]

_HEADS = (".attn.q", ".attn.k", ".attn.v")


@dataclass(frozen=True)
class Birth:
    """Values of one recorded tap that are not finite although all that their operation read is."""

    path: str  # of the tap; of an expert with its number
    layer: int | None
    stage: str
    expert: int | None
    tokens: Ints  # token rows in which values are born, ascending
    mask: NDArray[np.bool_]  # (len(tokens), *row shape): which values


class Source:
    """A run: its trace, the model when there is one (`model`, else the open one of the trace), and the watch table of
    the run when it was watched.

    `settings` are those of the configuration that the trace carries, else of the model; `known_config` is False when
    neither tells one.
    """

    def __init__(self, trace: Trace, model: Any = None, watch: Any = None) -> None:
        self.trace, self.watch = trace, watch
        self.model = trace.model if model is None else model
        config = trace.meta.get("config") or (self.model.config if self.model is not None else {})
        self.known_config = bool(config)
        self.config: Mapping[str, Any] = config
        # the rule of the run, which is not the checkpoint's when the session was made with another
        self.settings = replace(settings_of(config, trace), gate_rule=str(trace.meta["gate_rule"]))
        self._stored = frozenset(trace)
        self._packed: dict[int, tuple[Ints, Ints, Ints]] = {}

    # ---- taps ----

    def has(self, path: str) -> bool:
        """Whether the trace stores it; `layers.{l}.moe.experts.{e}.{tap}` (or `*`) when it stores the layer's rows."""
        part = path.split(".")
        if len(part) == 6 and part[3] == "experts":
            prefix = f"layers.{part[1]}.moe.dispatch."
            return {prefix + "offsets", prefix + "tokens", prefix + part[5]} <= self._stored
        return path in self._stored

    def rows(self, path: str, tokens: Any = None) -> Array | None:
        """Token rows of a tap (None: all), or None when it was not recorded.

        `tokens` are row numbers or a slice; a slice of float32 rows gives a view. q, k and v have the shape
        (n, heads, head_dim), `attn.weights` (n, heads, S).
        """
        if path not in self._stored:
            return None
        array = self.trace[path]
        pick = slice(None) if tokens is None else tokens if isinstance(tokens, slice) else np.asarray(tokens, np.intp)
        if path.endswith(".attn.weights"):
            return _wide(array[:, pick].swapaxes(0, 1))
        value = array[pick]
        if value.ndim == 2 and path.endswith(_HEADS) and self.settings.head_dim:
            value = value.reshape(len(value), -1, self.settings.head_dim)
        return _wide(value)

    def recorded(self, path: str) -> NDArray[np.bool_] | None:
        """(T,) which rows of a tap hold anything, where its recording tells (`logits.recorded`); None: all."""
        told = path + ".recorded"
        return np.asarray(self.trace[told], np.bool_) if told in self._stored else None

    def expert_rows(self, layer: int, expert: int, tap: str) -> tuple[Ints, Array] | None:
        """(tokens ascending, rows) of one expert over all passes, or None when the layer's rows were not recorded.

        The rows of an expert that lie together are a view.
        """
        if not self.has(f"layers.{layer}.moe.experts.{expert}.{tap}"):
            return None
        where = self.places(layer, expert)
        packed = self.trace[f"layers.{layer}.moe.dispatch.{tap}"]
        together = len(where) and where[-1] - where[0] + 1 == len(where) and bool((np.diff(where) == 1).all())
        rows = packed[where[0] : where[-1] + 1] if together else packed[where]
        return self.dispatch(layer)[0][where], _wide(rows)

    def dispatch(self, layer: int) -> tuple[Ints, Ints]:
        """(token, expert) of each packed row of a layer; both −1 for a row that no expert had. Needs dispatch rows."""
        return self._dispatched(layer)[:2]

    def places(self, layer: int, expert: int) -> Ints:
        """The packed rows of one expert, by token. Needs dispatch rows."""
        _, experts, order = self._dispatched(layer)
        low, high = np.searchsorted(experts, [expert, expert + 1], sorter=order)
        return order[low:high]

    def _dispatched(self, layer: int) -> tuple[Ints, Ints, Ints]:
        if layer not in self._packed:
            prefix = f"layers.{layer}.moe.dispatch."
            tokens = self.trace[prefix + "tokens"].astype(np.int64)
            offsets = self.trace[prefix + "offsets"].astype(np.int64)
            experts = np.full(len(tokens), -1, np.int64)
            counts = np.diff(offsets, axis=1)
            inside = np.concatenate([np.arange(row[0], row[-1]) for row in offsets] or [np.empty(0, np.int64)])
            experts[inside] = np.repeat(np.tile(np.arange(counts.shape[1]), len(counts)), counts.ravel())
            self._packed[layer] = tokens, experts, np.lexsort((tokens, experts))
        return self._packed[layer]

    # ---- model ----

    def weight(self, name: str) -> Array | None:
        """A weight in its stored dtype; None without a model, or when the model has none of that name."""
        if self.model is None:
            return None
        weights = self.model.weights
        if name == "lm_head" and name not in weights:
            name = "embed"  # tied
        return np.asarray(weights[name]) if name in weights else None

    @property
    def dtype(self) -> str:
        """The format of the run: that of its arithmetic, else the narrowest in which floats were recorded."""
        said = str(self.trace.meta.get("arithmetic", "")).removeprefix("torch.")
        if said in FORMATS:
            return said
        kinds = {str(self.trace[path].dtype) for path in self._stored} & set(FORMATS)
        return min(kinds, key=lambda name: (FORMATS[name].largest, FORMATS[name].fraction), default="float32")

    def format(self, point: str) -> str:
        """The number format in which the values of a point are kept: what decides where overflow begins."""
        return self._emulated("storage", point) or ("float32" if "storage" in self._emulation else self.dtype)

    def accumulation(self, point: str) -> str | None:
        """The format to which partial sums are rounded in the operation that makes a point; None: they are not."""
        return self._emulated("accumulation", point)

    @property
    def flushes(self) -> bool:
        """Whether subnormal numbers become zero when a point is stored."""
        return bool(self._emulation.get("flush_subnormals"))

    def saturates(self, point: str) -> bool:
        """Whether what is too large becomes the largest number there."""
        return any(_names(pattern, point) for pattern in self._emulation.get("saturate") or ())

    def _emulated(self, what: str, point: str) -> str | None:
        said = self._emulation.get(what)
        if isinstance(said, Mapping):
            named = [kind for pattern, kind in said.items() if _names(pattern, point)]
            said = named[-1] if named else None
        return None if said is None else str(said)

    @cached_property
    def _emulation(self) -> Mapping[str, Any]:
        said = self.trace.meta.get("emulation") or {}
        said = json.loads(said) if isinstance(said, str) else said
        return said if isinstance(said, Mapping) else {}

    # ---- shape of the run ----

    def visible(self, layer: int, token: int) -> range:
        """The keys that a query sees, itself included."""
        window = self.window(layer)
        return range(0 if window is None else max(0, token - window + 1), token + 1)

    def window(self, layer: int) -> int | None:
        """How many keys a query of a layer sees, itself included; None: all before it."""
        windows = self.settings.windows
        return windows[layer] if layer < len(windows) else None


def opened(model: Any) -> Any:
    """The model, opened if it is a path; None stays None. Raises ArgumentError for anything else, and what `lab.open`
    raises.
    """
    if isinstance(model, str | PathLike):
        import colibri_lab as lab

        return lab.open(model)
    if not (model is None or hasattr(model, "weights")):
        raise ArgumentError(f"model= takes a lab.Model or its path; this is a {type(model).__name__}: {model!r:.80}")
    return model


def _names(pattern: str, point: str) -> bool:
    """Whether a pattern of an emulation names a point; the experts of a layer are `*` there."""
    part = point.split(".")
    return fnmatchcase(".".join([*part[:4], "*", *part[5:]]) if part[3:4] == ["experts"] else point, pattern)


def _wide(array: Array) -> Array:
    """Floats narrower than float32 widened; all else as it is."""
    return array.astype(np.float32) if array.dtype.name in ("float16", "bfloat16") else array
