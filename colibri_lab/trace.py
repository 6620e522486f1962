"""Trace: what one run left behind, as a mapping from tap path to array.

A trace is the only thing that analyses and widgets see. It comes from a live session (`session.trace()`, zero-copy
views), from a file (`load_trace`), from another program's recording, or from `colibri_lab.testing.synthetic_trace`; a
reader cannot tell which.

T tokens, H hidden size, E experts, k chosen experts. Expert rows are stored packed, one run of rows per pass and
expert:

    layers.{l}.moe.dispatch.tokens    (N,) int32          absolute token rows, N = T·k; −1 and zero rows at the end of
                                                          a pass for its slots without an expert
    layers.{l}.moe.dispatch.offsets   (passes, E+1) int64 absolute positions into N
    layers.{l}.moe.dispatch.input     (N, H), likewise .gate .up .hidden .output

and `trace["layers.3.moe.experts.5.input"]` is the slice of them that expert 5 received in the last pass.

A recording that counted and kept no tokens has no `ids` and, of each MoE layer, `layers.{l}.moe.load` (E,) int64:
tokens sent to each expert.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from mmap import mmap
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from colibri_lab.errors import ArgumentError, FileError, FormatError, NotCapturedError, TapError, is_whole, nearest
from colibri_lab.utf8_texts import Utf8Texts

__all__ = ["CAPTURE_LEVELS", "EXPERT_TAPS", "HasTrace", "Trace", "check_values", "trace_of"]

Array = NDArray[Any]

EXPERT_TAPS = ("tokens", "input", "gate", "up", "hidden", "output")
"""Taps of one expert; each is stored as `layers.{l}.moe.dispatch.{tap}`."""

_META: dict[str, type | tuple[type, ...]] = {
    "producer": str, "producer_version": str, "model_type": str, "num_hidden_layers": int, "moe_layers": (list, tuple),
    "num_experts": int, "top_k": int, "gate_rule": str, "passes": (list, tuple), "edits": (list, tuple),
}  # fmt: skip

CAPTURE_LEVELS = {
    "embed": "all", "norm": "all", "logits": "all",
    "layers.{l}.attn.norm": "all", "layers.{l}.attn.q": "all", "layers.{l}.attn.out": "all", "layers.{l}.output": "all",
    "layers.{l}.attn.k": "none", "layers.{l}.attn.v": "none", "layers.{l}.attn.weights": "layers.{l}.attn.weights",
    "layers.{l}.mlp.input": "all", "layers.{l}.mlp.output": "all",
    "layers.{l}.moe.router_logits": "routing", "layers.{l}.moe.scores": "routing",
    "layers.{l}.moe.expert_ids": "routing", "layers.{l}.moe.gates": "routing", "layers.{l}.moe.load": "routing",
    "layers.{l}.moe.input": "moe", "layers.{l}.moe.routed": "moe", "layers.{l}.moe.output": "moe",
    "layers.{l}.moe.shared.output": "moe", "layers.{l}.moe.shared.gate": "moe",
    "layers.{l}.moe.dispatch.tokens": "moe", "layers.{l}.moe.dispatch.offsets": "moe",
    "layers.{l}.moe.dispatch.input": "moe", "layers.{l}.moe.dispatch.output": "moe",
    "layers.{l}.moe.dispatch.gate": "all", "layers.{l}.moe.dispatch.up": "all", "layers.{l}.moe.dispatch.hidden": "all",
}  # fmt: skip
"""The lowest capture that keeps a tap, by the path with its layer number taken out."""

_LIMIT = 1 << 20  # far above any model; below what would make a small file ask for gigabytes
_NUMBER = "(0|[1-9][0-9]{0,18})"  # as Python writes it: no sign, no leading zero, ASCII
_LAYER = re.compile(rf"layers\.{_NUMBER}\.")
_EXPERT = re.compile(rf"layers\.{_NUMBER}\.moe\.experts\.{_NUMBER}\.(\w+)")
_DISPATCH = re.compile(rf"layers\.{_NUMBER}\.moe\.dispatch\.(\w+)")


class Trace(Mapping[str, Array]):
    """Read-only arrays by tap path, the tokens they belong to, and where they come from.

    `arrays` maps tap paths to arrays (expert rows in packed form only); they are not copied. `meta` holds at least
    `producer`, `producer_version`, `model_type`, `num_hidden_layers`, `moe_layers` (layer numbers), `num_experts`,
    `top_k`, `gate_rule`, `passes` (pairs [start, stop] of token rows) and `edits`. `texts` may be empty: then every
    token's text is "". Ids that come as an int64 array (not copied) and texts that come as bytes stay so until `ids`
    and `texts` are asked for: an analysis of a long trace makes no lists of its tokens.

    Iteration and `len` list the stored paths; `trace[path]` also resolves `layers.{l}.moe.experts.{e}.{tap}`. An expert
    id of −1 marks a slot that was not used or not recorded; its gate is 0, and no analysis counts it. A token id of −1
    is one that the recording does not tell.

    Raises FormatError when an array's shape contradicts the number of tokens, experts or passes, when its dtype is none
    for its tap, or when an expert id names no expert; ArgumentError for what is no array, id or text at all.
    `check_values` looks at the other numbers that steer an analysis.
    """

    def __init__(
        self,
        arrays: Mapping[str, Array],
        *,
        ids: Sequence[int] | NDArray[np.int64],
        texts: Sequence[str] | Utf8Texts,
        meta: Mapping[str, Any],
    ) -> None:
        self._ids = _ids(ids)
        self._texts = _texts(texts) or Utf8Texts.empty(self.n_tokens)
        self.meta: dict[str, Any] = dict(meta)
        self.model: Any = None  # the open lab.Model, when the trace comes from a live session; it is not saved
        self.mapped: mmap | None = None  # the file that the arrays lie in
        self._arrays = {path: _read_only(path, array) for path, array in arrays.items()}
        if len(self._texts) != self.n_tokens:
            raise FormatError(
                f"a trace of {self.n_tokens} tokens has {len(self._texts)} texts; give one text per token, or none"
            )
        _check_meta(self.meta, self.n_tokens)
        self._moe = frozenset(self.moe_layers)  # asked for every array
        for path, array in self._arrays.items():
            self._check_array(path, array)

    # ---- what it is of ----

    @property
    def n_tokens(self) -> int:
        """T, tokens; 0 in a recording that counted and kept none."""
        return len(self._ids)

    @property
    def ids(self) -> list[int]:
        """The id of every token (T), always the same list; made when it is asked for first."""
        if not isinstance(self._ids, list):
            made: list[int] = self._ids.tolist()
            self._ids = made
        return self._ids

    @property
    def texts(self) -> list[str]:
        """The text of every token (T), always the same list; made when it is asked for first."""
        if not isinstance(self._texts, list):
            self._texts = self._texts.strings()
        return self._texts

    def token_ids(self, start: int = 0, stop: int | None = None) -> NDArray[np.int64]:
        """The ids of tokens [start, stop), as of a slice; makes no list."""
        return np.asarray(self._ids[start:stop], np.int64)

    def utf8_texts(self) -> Utf8Texts:
        """The texts of all tokens as UTF-8; see `Utf8Texts.of` for those that are none."""
        return Utf8Texts.of(self._texts) if isinstance(self._texts, list) else self._texts

    @property
    def layers(self) -> range:
        """All layer numbers, dense ones included."""
        return range(int(self.meta["num_hidden_layers"]))

    @property
    def moe_layers(self) -> list[int]:
        """The layers that have a router, in order: axis 0 (Lm) of every analysis."""
        return [int(layer) for layer in self.meta["moe_layers"]]

    @property
    def num_experts(self) -> int:
        """E, experts per MoE layer."""
        return int(self.meta["num_experts"])

    @property
    def top_k(self) -> int:
        """k, experts chosen per token and layer."""
        return int(self.meta["top_k"])

    @property
    def passes(self) -> list[tuple[int, int]]:
        """Token rows [start, stop) of each pass."""
        return [(int(start), int(stop)) for start, stop in self.meta["passes"]]

    @property
    def edits(self) -> list[Any]:
        """Changes made by hand during the run; empty for an untouched one."""
        return list(self.meta["edits"])

    # ---- arrays ----

    def __getitem__(self, path: str) -> Array:
        if not isinstance(path, str):
            raise TapError(f"a tap path is a text such as 'layers.0.moe.gates'; this is {path!r:.80}")
        if self.mapped is not None and self.mapped.size() < len(self.mapped):
            raise FileError(
                "the file of this trace has become shorter since it was opened, so its rows are gone; open a whole one "
                "again (lab.load_trace), and replace a file by renaming another, which leaves open traces alone"
            )
        if path in self._arrays:
            return self._arrays[path]
        expert = _EXPERT.fullmatch(path)
        if expert is None:
            raise self._missing(path)
        layer, number, tap = int(expert[1]), int(expert[2]), expert[3]
        if tap not in EXPERT_TAPS:
            raise TapError(f"an expert has no tap '{tap}'; it has {', '.join(EXPERT_TAPS)}")
        packed = self._arrays.get(f"layers.{layer}.moe.dispatch.{tap}")
        spans = self._expert_spans(layer, number)
        if packed is None:
            ask = CAPTURE_LEVELS[f"layers.{{l}}.moe.dispatch.{tap}"]
            raise NotCapturedError(f"'{path}' was not recorded; record again with capture=\"{ask}\"")
        start, stop = spans[-1] if spans else (0, 0)
        return packed[start:stop]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __contains__(self, path: object) -> bool:
        return isinstance(path, str) and self.get(path) is not None

    def get(self, path: str, default: Any = None) -> Any:
        """`trace[path]`, or `default` when the trace does not hold it."""
        try:
            return self[path]
        except (TapError, NotCapturedError):
            return default

    def expert_rows(self, layer: int, expert: int) -> dict[str, Array]:
        """All rows that `expert` of `layer` received, joined over passes in token order (a copy).

        Returns a dict with `tokens` (n,) int32 and every stored expert tap, (n, …) float32.
        Raises TapError for a layer or expert that does not exist, NotCapturedError when expert rows were not kept.
        """
        spans = self._expert_spans(layer, expert)
        rows = np.concatenate([np.arange(start, stop) for start, stop in spans] or [np.empty(0, np.int64)]).astype(
            np.intp
        )
        prefix = f"layers.{layer}.moe.dispatch."
        return {tap: self._arrays[prefix + tap][rows] for tap in EXPERT_TAPS if prefix + tap in self._arrays}

    def stack(self, tap: str) -> Array:
        """`layers.{l}.moe.{tap}` of all MoE layers as one array (Lm, T, …): a copy, so not for a long trace."""
        return np.stack([self[f"layers.{layer}.moe.{tap}"] for layer in self.moe_layers])

    def save(self, path: Any) -> None:
        """Writes the trace to `path` in the compact safetensors form; see `colibri_lab.trace_file.save_trace`."""
        from colibri_lab.trace_file import save_trace

        save_trace(self, path)

    def export(self, path: Any, format: str) -> None:
        """Writes the routing for other programs: "route_trace", "vllm", "parquet"; see `colibri_lab.exports.export`."""
        from colibri_lab.exports import export

        export(self, path, format)

    def __repr__(self) -> str:
        moe, every = len(self.moe_layers), len(self.layers)
        layers = f"{every} layers" if moe == every else f"{every} layers, {moe} with experts"
        edited = f", {len(self.edits)} edits" if self.edits else ""
        passes = f"{len(self.passes)} pass{'es' * (len(self.passes) != 1)}"
        return (
            f"<Trace of {self.n_tokens} tokens in {passes}: {self.meta['model_type']}, {layers}, "
            f"{self.num_experts} experts, {self.top_k} chosen, {len(self)} arrays{edited}>"
        )

    # ---- inside ----

    def _expert_spans(self, layer: int, expert: int) -> list[tuple[int, int]]:
        """Rows [start, stop) of one expert in the packed arrays, pass by pass."""
        self._require_moe_layer(layer)
        if not (is_whole(expert) and 0 <= expert < self.num_experts):
            raise TapError(f"there is no expert {expert!r:.80}; experts are 0 to {self.num_experts - 1}")
        offsets = self._arrays.get(f"layers.{layer}.moe.dispatch.offsets")
        if offsets is None:
            raise NotCapturedError(f'layer {layer} has no expert rows in this trace; record again with capture="moe"')
        return [(int(row[expert]), int(row[expert + 1])) for row in offsets]

    def _require_moe_layer(self, layer: int) -> None:
        if layer not in self.layers:
            raise TapError(f"there is no layer {layer}; layers are 0 to {len(self.layers) - 1}")
        if layer not in self._moe:
            closest = min(self.moe_layers, key=lambda other: abs(other - layer), default=None)
            hint = (
                "; no layer of this model has any"
                if closest is None
                else f"; the nearest layer with experts is {closest}"
            )
            raise TapError(f"layer {layer} is dense and has no experts{hint}")

    def _missing(self, path: str) -> TapError | NotCapturedError:
        """The error for a path that is not stored: unknown, or known and not kept."""
        kind = _LAYER.sub("layers.{l}.", path)
        capture = CAPTURE_LEVELS.get(kind)
        if capture is None:
            known = [*self._arrays, *(k.replace("{l}", "0") for k in CAPTURE_LEVELS)]
            return TapError(f"no tap has the path '{path}'{nearest(path, dict.fromkeys(known))}")
        number = _LAYER.match(path)
        if number is not None:
            try:
                if ".moe." in path:
                    self._require_moe_layer(int(number[1]))
                elif int(number[1]) not in self.layers:
                    raise TapError(f"there is no layer {number[1]}; layers are 0 to {len(self.layers) - 1}")
            except TapError as error:
                return error
        if kind in (
            "layers.{l}.moe.shared.output",
            "layers.{l}.moe.shared.gate",
            "layers.{l}.mlp.input",
            "layers.{l}.mlp.output",
        ):
            return NotCapturedError(
                f"'{path}' is not in this trace: its layer has no such part, or it was not recorded"
            )
        ask = path if capture.startswith("layers") else capture
        return NotCapturedError(f"'{path}' was not recorded; record again with capture=\"{ask}\"")

    def _check_array(self, path: str, array: Array) -> None:
        tokens, layer = self.n_tokens, _LAYER.match(path)
        kind = _LAYER.sub("layers.{l}.", path)
        if kind not in CAPTURE_LEVELS:
            return  # a producer may store more than we know
        if layer is not None and int(layer[1]) not in (self._moe if ".moe." in path else self.layers):
            raise FormatError(f"'{path}' belongs to no {'MoE ' if '.moe.' in path else ''}layer of this model")
        whole = kind.endswith((".expert_ids", ".moe.load", ".dispatch.tokens", ".dispatch.offsets"))
        if array.dtype.kind not in ("iu" if whole else "fiu") and (whole or array.dtype.name != "bfloat16"):
            raise FormatError(f"'{path}' holds {array.dtype}; {'whole numbers' if whole else 'numbers'} are needed")
        dispatch = _DISPATCH.fullmatch(path)
        if dispatch is not None:
            expected = self._dispatch_shape(int(dispatch[1]), dispatch[2])
            if array.ndim < len(expected) or array.shape[: len(expected)] != expected:
                raise FormatError(f"'{path}' has the shape {array.shape}; expected {_shown(expected, array.ndim)}")
            return
        if kind == "layers.{l}.moe.load":
            if array.shape != (self.num_experts,) or (array < 0).any():
                raise FormatError(f"'{path}' must be {self.num_experts} counts, none negative; it has {array.shape}")
            return
        width = {
            "router_logits": self.num_experts,
            "scores": self.num_experts,
            "expert_ids": self.top_k,
            "gates": self.top_k,
        }
        columns = width.get(path.rpartition(".")[2]) if ".moe." in path else None
        if columns is not None and array.shape != (tokens, columns):
            raise FormatError(f"'{path}' has the shape {array.shape}; {tokens} tokens need {(tokens, columns)}")
        if kind.endswith(".expert_ids") and array.size and not -1 <= array.min() <= array.max() < self.num_experts:
            token = int(np.flatnonzero(((array < -1) | (array >= self.num_experts)).any(axis=1))[0])
            raise FormatError(
                f"'{path}', token {token}: expert ids {array[token].tolist()!s:.80} have one outside 0 to "
                f"{self.num_experts - 1} (−1 marks a slot without an expert)"
            )
        leading = array.shape[1:2] if kind == "layers.{l}.attn.weights" else array.shape[:1]
        if leading != (tokens,):
            raise FormatError(f"'{path}' has the shape {array.shape}, but the trace has {tokens} tokens")

    def _dispatch_shape(self, layer: int, tap: str) -> tuple[int, ...]:
        rows = self._arrays.get(f"layers.{layer}.moe.dispatch.tokens")
        if rows is None or f"layers.{layer}.moe.dispatch.offsets" not in self._arrays:
            raise FormatError(
                f"layer {layer} has expert rows ('dispatch.{tap}') but not both dispatch.tokens and dispatch.offsets"
            )
        return (len(self.passes), self.num_experts + 1) if tap == "offsets" else (rows.shape[0],)


class HasTrace(Protocol):
    """A session, as far as an analysis needs one."""

    def trace(self) -> Trace:
        """What was captured so far."""


def trace_of(source: Trace | HasTrace) -> Trace:
    """The trace itself, or that of a session as it stands. Raises ArgumentError for anything else."""
    if isinstance(source, Trace):
        return source
    trace = source.trace() if hasattr(source, "tape") and hasattr(source, "trace") else None
    if isinstance(trace, Trace):
        return trace
    raise ArgumentError(f"a trace or a session is needed; this is a {type(source).__name__}: {source!r:.80}")


def _ids(ids: Sequence[int] | NDArray[np.int64]) -> list[int] | NDArray[np.int64]:
    if isinstance(ids, np.ndarray) and ids.dtype == np.int64 and ids.ndim == 1:
        return _read_only("ids", ids)
    if not all(map(is_whole, ids)):
        raise ArgumentError(f"a trace takes whole numbers as ids, not {ids!r:.60}")
    return [int(i) for i in ids]


def _texts(texts: Sequence[str] | Utf8Texts) -> list[str] | Utf8Texts:
    if isinstance(texts, Utf8Texts):
        return texts
    if not all(isinstance(text, str) for text in texts):
        raise ArgumentError(f"a trace takes strings as texts, not {texts!r:.60}")
    return list(texts)


def _read_only(path: Any, array: Any) -> Array:
    if not isinstance(path, str):
        raise ArgumentError(f"the arrays of a trace go by tap paths, which are texts; this is {path!r:.80}")
    try:
        view = np.asarray(array).view()
    except ValueError:
        raise ArgumentError(f"'{path}' is no array: its rows differ in length") from None
    view.flags.writeable = False
    return view


def _shown(expected: tuple[int, ...], ndim: int) -> str:
    more = ", …" if ndim > len(expected) else ""
    return f"({', '.join(map(str, expected))}{more or (',' if len(expected) == 1 else '')})"


def _check_meta(meta: Mapping[str, Any], tokens: int) -> None:
    """Raises ArgumentError for an absent entry, FormatError for one of a wrong type or that contradicts another."""
    for name, kind in _META.items():
        if name not in meta:
            raise ArgumentError(f"a trace's meta needs '{name}'; it has {', '.join(sorted(meta)) or 'nothing'}")
        if not isinstance(meta[name], kind) or isinstance(meta[name], bool):
            raise FormatError(f"meta['{name}'] is a {type(meta[name]).__name__}: {meta[name]!r:.80}")
    layers, moe, experts, chosen = (
        meta["num_hidden_layers"],
        list(meta["moe_layers"]),
        meta["num_experts"],
        meta["top_k"],
    )
    if (
        any(not isinstance(x, int) or isinstance(x, bool) for x in moe)
        or moe != sorted(set(moe))
        or (moe and not 0 <= moe[0] <= moe[-1] < layers)
    ):
        raise FormatError(f"meta['moe_layers'] must be ascending layer numbers below {layers}; it is {moe!r:.80}")
    if not (0 <= layers <= _LIMIT and experts <= _LIMIT):
        raise FormatError(f"{layers} layers with {experts} experts: more than {_LIMIT} of either is no model")
    if not (1 <= chosen <= experts or (chosen == experts == 0 and not moe)):
        raise FormatError(f"{chosen} experts chosen of {experts} is impossible")
    position = 0
    for entry in meta["passes"]:
        if not isinstance(entry, list | tuple) or len(entry) != 2 or any(not isinstance(x, int) for x in entry):
            raise FormatError(f"meta['passes'] must hold pairs [start, stop]; it holds {entry!r:.80}")
        if entry[0] != position or entry[1] <= entry[0]:
            raise FormatError(
                f"meta['passes'] must follow one another from 0 without a gap; {entry!r} comes after {position}"
            )
        position = entry[1]
    if position != tokens:
        raise FormatError(f"meta['passes'] end at token {position}, but the trace has {tokens} tokens")


def check_values(trace: Trace) -> None:
    """Looks at the numbers that steer every analysis and raises FormatError for the first one that is wrong.

    Expert ids of a token must be distinct (−1 apart); dispatch offsets must rise and cover all rows but those of token
    −1, which slots without an expert leave; dispatch tokens must lie in the pass that they belong to. One read of the
    ids; float data are not touched.
    """
    for layer in trace.moe_layers:
        ids = trace.get(f"layers.{layer}.moe.expert_ids")
        if ids is not None:
            _check_ids(layer, ids)
        offsets = trace.get(f"layers.{layer}.moe.dispatch.offsets")
        if offsets is not None:
            _check_dispatch(layer, offsets, trace[f"layers.{layer}.moe.dispatch.tokens"], trace.passes)


def _check_ids(layer: int, ids: Array) -> None:
    for start in range(0, len(ids), 1 << 16):
        block = np.sort(ids[start : start + (1 << 16)], axis=1)
        twice = ((block[:, 1:] == block[:, :-1]) & (block[:, 1:] >= 0)).any(axis=1)
        if twice.any():
            token = start + int(np.flatnonzero(twice)[0])
            raise FormatError(
                f"layer {layer}, token {token}: expert ids {ids[token].tolist()!s:.80} have one named twice (an "
                "all-zero row is a dense layer or a failed recording)"
            )


def _check_dispatch(layer: int, offsets: Array, tokens: Array, passes: list[tuple[int, int]]) -> None:
    name = f"layers.{layer}.moe.dispatch"
    flat = offsets.astype(np.int64).ravel()
    if flat.size and (flat[0] < 0 or (np.diff(flat) < 0).any() or flat[-1] > len(tokens)):
        raise FormatError(f"{name}.offsets must rise from 0 to {len(tokens)}, each pass where the one before it ended")
    unused = np.ones(len(tokens), bool)
    for (start, stop), row in zip(passes, offsets, strict=True):
        used = slice(int(row[0]), int(row[-1]))
        rows, unused[used] = tokens[used], False
        if rows.size and (rows.min() < start or rows.max() >= stop):
            raise FormatError(f"{name}.tokens name rows outside their pass [{start}, {stop})")
    if (tokens[unused] != -1).any():
        raise FormatError(
            f"{name}.offsets must cover the {len(tokens)} rows of dispatch.tokens without a gap; they leave out row "
            f"{int(np.flatnonzero(unused & (tokens != -1))[0])}, and only a row of token −1 (of a slot without an "
            "expert) can be left out"
        )
