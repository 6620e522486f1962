"""Two traces side by side: which tokens and which taps both have, and their rows in one order.

A diagnosis needs of it `taps()`, `has`, `rows`, `pick`, `routing` and `inputs_agree`; how either run was cut into
passes never shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.difference.result import Values
from colibri_lab.difference.taps import Tap, parse
from colibri_lab.errors import ArgumentError, TapError, nearest
from colibri_lab.trace import Trace, trace_of

__all__ = ["Block", "Pair", "trace_from", "widened"]

Array = NDArray[Any]
Ints = NDArray[np.int64]

_BLOCK = 1 << 20  # numbers of either side worked on at a time: 16 MB in float64
_SHOWN = 8  # ids listed in a sentence
_SAMPLE = 4096  # rows looked at to tell probabilities from logits


@dataclass(frozen=True)
class Block:
    """Some consecutive rows of a tap of both runs, widened; `first` is the number of the first among all rows."""

    first: int
    tokens: Ints
    experts: Ints | None
    a: Array
    b: Array


class Pair:
    """Traces A and B over their common prefix of tokens.

    `n` is the number of aligned tokens: rows 0 to n − 1 of either side belong together. `notes` says what cannot be
    compared, and why, one sentence each. Raises ArgumentError when the two have no first token, or no tap, in common.
    """

    def __init__(self, a: Trace, b: Trace) -> None:
        self.a, self.b = a, b
        self.notes: list[str] = []
        self.n = self._align()
        self._taps = self._match()
        self._by_path = {tap.path: tap for tap in self._taps}
        self._probabilities = self._find_probabilities()
        self._normalised = self._find_log_probabilities()
        self._index: dict[int, tuple[Ints, Ints, Ints, Ints]] = {}

    # ---- what there is ----

    def taps(self) -> list[Tap]:
        """The taps that both have in the same shape, in the order in which they are computed."""
        return list(self._taps)

    def has(self, path: str) -> bool:
        """Whether both have it; of experts under any number: "layers.0.moe.experts.3.output" or "….*.output"."""
        tap = parse(path)
        return tap is not None and tap.path in self._by_path

    def tap(self, path: str) -> Tap:
        """The tap of a path. Raises TapError when it is not among those that both have."""
        tap = parse(path) if isinstance(path, str) else None
        if tap is None or tap.path not in self._by_path:
            raise TapError(f"'{path}' is not in both runs{nearest(str(path), self._by_path)}")
        return self._by_path[tap.path]

    # ---- rows ----

    def count(self, path: str) -> int:
        """How many rows `rows` gives: tokens, or (token, expert) pairs that both have."""
        tap = self.tap(path)
        return len(self._rows_of(tap)[0])

    def rows(self, path: str) -> Values:
        """All rows of a tap, in the dtype in which either side stores them.

        Rows go by token. Rows of experts ("layers.2.moe.experts.*.output") go by token, then expert, and are those that
        both sent to the same expert; with a number for `*` only those of that expert. `gates` have one row per token
        with the same set of experts on both sides, and their columns go by expert number. Raises TapError.
        """
        tap = self.tap(path)
        part = path.split(".")[4] if tap.of_experts and ".experts." in path else "*"
        tokens, experts, at_a, at_b = self._rows_of(tap)
        if part != "*":
            if int(part) >= self.a.num_experts:
                raise TapError(f"there is no expert {int(part)}; this layer has 0 to {self.a.num_experts - 1}")
            mine = experts == int(part)
            tokens, experts, at_a, at_b = tokens[mine], experts[mine], at_a[mine], at_b[mine]
        a, b = self._read(tap, "a", at_a), self._read(tap, "b", at_b)
        return Values(path, tokens, experts if tap.of_experts else None, *_same_shape(tap, a, b, self.n))

    def pick(self, path: str, tokens: Ints) -> tuple[Array, Array]:
        """(a, b): the rows of these tokens of a tap with one row per token, in float64. Raises TapError."""
        tap = self.tap(path)
        tokens = np.asarray(tokens, np.int64)
        a, b = self._read(tap, "a", tokens), self._read(tap, "b", tokens)
        a, b = _same_shape(tap, a, b, self.n)
        return widened(a), widened(b)

    def blocks(self, path: str) -> Iterator[Block]:
        """The rows of `rows(path)` piece by piece, widened exactly to a common number type: memory stays bounded."""
        tap = self.tap(path)
        tokens, experts, at_a, at_b = self._rows_of(tap)
        width = max(1, self._width(tap))
        step = max(1, _BLOCK // width)
        for first in range(0, len(tokens), step):
            part = slice(first, first + step)
            a, b = self._read(tap, "a", at_a[part]), self._read(tap, "b", at_b[part])
            a, b = _same_shape(tap, a, b, self.n)
            common = np.result_type(_wide(a.dtype), _wide(b.dtype))
            yield Block(
                first,
                tokens[part],
                experts[part] if tap.of_experts else None,
                a.astype(common, copy=False),
                b.astype(common, copy=False),
            )

    def routing(self, layer: int) -> tuple[Array, Array] | None:
        """Expert ids (n, k) of A and of B in a layer, each row in ascending order; None when one side has none."""
        path = f"layers.{layer}.moe.expert_ids"
        if path not in self._by_path:
            return None
        rows = slice(0, self.n)
        a, b = (self._chosen(trace, path, rows).astype(np.int64, copy=False) for trace in (self.a, self.b))
        return a, b

    def as_probabilities(self, path: str) -> str:
        """Which side's router "logits" hold probabilities already, "a" or "b"; "" where both hold the same kind.

        Rows of such a tap are probabilities on both sides: the softmax was taken of the logits of the other.
        """
        return self._probabilities.get(path, "")

    @cached_property
    def dtypes(self) -> dict[str, tuple[str, str]]:
        """The stored dtypes of every common tap."""
        return {tap.path: (self.a[tap.stored].dtype.name, self.b[tap.stored].dtype.name) for tap in self._taps}

    # ---- alignment ----

    def _align(self) -> int:
        ids_a, ids_b = self.a.ids, self.b.ids
        n = 0
        for one, other in zip(ids_a, ids_b, strict=False):
            if one != other and one >= 0 <= other:
                break
            n += 1
        unknown = [name for name, ids in (("A", ids_a), ("B", ids_b)) if any(i < 0 for i in ids[:n])]
        if unknown:
            hold = f"{' and '.join(unknown)} hold{'s' * (len(unknown) == 1)}"
            self.notes.append(f"{hold} no token ids; rows are matched by their number.")
        empty = [name for name, ids in (("A", ids_a), ("B", ids_b)) if not ids]
        if empty:
            hold = f"{' and '.join(empty)} hold{'s' * (len(empty) == 1)}"
            raise ArgumentError(f"{hold} no token, so there is nothing to compare")
        if n == len(ids_a) == len(ids_b):
            return n
        seen = _where_they_part(ids_a, ids_b, n)
        if n == 0:
            raise ArgumentError(f"these two runs have no first token in common, so no row can be compared: {seen}")
        self.notes.append(f"Only the first {n} token{'s' * (n != 1)} can be compared: {seen}.")
        return n

    def _match(self) -> list[Tap]:
        of_a, of_b = _taps_of(self.a), _taps_of(self.b)
        self._note_models()
        common, odd = [], []
        same_experts = self.a.num_experts == self.b.num_experts
        for path in sorted(of_a.keys() & of_b.keys(), key=lambda path: of_a[path].rank):
            tap = of_a[path]
            if tap.by_expert and not same_experts:
                continue  # the same number means nothing in a model with more or fewer of them
            one, other = _row_shape(self.a[tap.stored], tap), _row_shape(self.b[tap.stored], tap)
            if one == other or (np.prod(one) == np.prod(other) and tap.kind.startswith("attn.")):
                common.append(tap)
            elif tap.kind == "attn.weights" and one[0] == other[0]:
                common.append(tap)  # keys beyond the common prefix are left out
            elif tap.kind == "moe.expert_ids":
                common.append(tap)  # sets of another size
            else:
                odd.append(f"{path} ({_shown(one)} and {_shown(other)} per row)")
        if odd:
            more = f" and {len(odd) - 3} more" if len(odd) > 3 else ""
            self.notes.append(f"Of another shape on either side, so not compared: {'; '.join(odd[:3])}{more}.")
        for name, mine, theirs in (("A", of_a, of_b), ("B", of_b, of_a)):
            missing = theirs.keys() - mine.keys()
            if missing:
                self.notes.append(f"{name} does not hold {_kinds(missing)}.")
        if not common:
            shapes = f"; {self.notes[-1]}" if odd else ""
            raise ArgumentError(
                f"these two runs have no tap in common: A holds {_kinds(of_a)}, and B holds {_kinds(of_b)}{shapes}"
            )
        return common

    def _note_models(self) -> None:
        names = ("num_hidden_layers", "num_experts", "top_k", "model_type", "gate_rule")
        for name in names:
            one, other = self.a.meta[name], self.b.meta[name]
            if one != other and "" not in (one, other):
                self.notes.append(f"The two differ in {name}: A has {one}, B has {other}.")
        if list(self.a.moe_layers) != list(self.b.moe_layers):
            self.notes.append(
                f"The two differ in which layers have experts: A {list(self.a.moe_layers)}, B {self.b.moe_layers}."
            )

    def _find_probabilities(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for tap in self._taps:
            if tap.kind == "moe.router_logits":
                a, b = (_are_probabilities(trace[tap.stored][:_SAMPLE]) for trace in (self.a, self.b))
                if a != b:
                    found[tap.path] = "a" if a else "b"
        for side in "ab":
            layers = [tap.layer for tap in self._taps if found.get(tap.path) == side]
            if layers:
                where = f"layer{'s' * (len(layers) > 1)} {_runs(layers)}"
                self.notes.append(
                    f"What {side.upper()} names router_logits are probabilities (each row adds up to 1) in {where}: "
                    "they are compared with the softmax of the other's logits."
                )
        return found

    def _find_log_probabilities(self) -> bool:
        """Whether one side's logits are log probabilities: then both are compared as such."""
        if "logits" not in self._by_path:
            return False
        rows = self._with_logits()[:_SAMPLE]
        a, b = (_are_log_probabilities(trace["logits"][_span(rows)]) for trace in (self.a, self.b))
        if a == b:
            return False
        self.notes.append(f"The logits of {'A' if a else 'B'} are log probabilities; both are compared as those.")
        return True

    def _with_logits(self) -> Ints:
        """Rows whose logits both recorded: a `logits.recorded` (T,) bool beside them says which."""
        kept = np.ones(self.n, np.bool_)
        for trace in (self.a, self.b):
            if "logits.recorded" in trace:
                kept &= trace["logits.recorded"][: self.n].astype(np.bool_)
        return np.flatnonzero(kept)

    # ---- rows, inside ----

    def _rows_of(self, tap: Tap) -> tuple[Ints, Ints, Ints, Ints]:
        """(tokens, experts, rows of A, rows of B); experts mean something for rows of experts only."""
        if tap.of_experts:
            return self._expert_rows(tap.layer)
        tokens = self._with_logits() if tap.kind == "logits" else np.arange(self.n)
        routing = self.routing(tap.layer) if tap.kind == "moe.gates" else None
        if routing is not None and routing[0].shape == routing[1].shape:
            tokens = np.flatnonzero((routing[0] == routing[1]).all(axis=1))
        return tokens, tokens, tokens, tokens

    def _expert_rows(self, layer: int) -> tuple[Ints, Ints, Ints, Ints]:
        if layer not in self._index:
            keys_a, rows_a = _keys(self.a, layer, self.n)
            keys_b, rows_b = _keys(self.b, layer, self.n)
            both, at_a, at_b = np.intersect1d(keys_a, keys_b, return_indices=True)
            self._index[layer] = (both // _EXPERTS, both % _EXPERTS, rows_a[at_a], rows_b[at_b])
        return self._index[layer]

    def _read(self, tap: Tap, side: str, rows: Ints) -> Array:
        trace = self.a if side == "a" else self.b
        array = trace[tap.stored]
        if tap.kind == "attn.weights":  # (heads, T, S): rows go first
            return np.moveaxis(array[:, _span(rows), : self.n], 1, 0)
        taken = array[_span(rows)]
        ids_path = f"layers.{tap.layer}.moe.expert_ids"
        if tap.kind == "moe.gates" and ids_path in self._by_path:  # by expert number, whatever the order of the slots
            order = np.argsort(trace[ids_path][_span(rows)], axis=1, kind="stable")
            taken = np.take_along_axis(taken, order, axis=1)
        elif tap.kind == "moe.expert_ids":
            taken = self._chosen(trace, tap.stored, _span(rows))
        elif self._probabilities.get(tap.path, side) != side:
            taken = _softmax(taken)
        elif tap.kind == "logits" and self._normalised:
            wide = taken.astype(np.float64)
            taken = wide - _log_sum_exp(wide)
        return taken

    def _chosen(self, trace: Trace, path: str, rows: slice | Ints) -> Array:
        """Expert ids in ascending order, as many columns as the run with more of them has: −1 first."""
        slots = max(self.a[path].shape[1], self.b[path].shape[1])
        ids = trace[path][rows].astype(np.int64)
        return np.sort(np.pad(ids, ((0, 0), (0, slots - ids.shape[1])), constant_values=-1), axis=1)

    def _width(self, tap: Tap) -> int:
        array = self.a[tap.stored]
        return int(np.prod(_row_shape(array, tap), dtype=np.int64))


_EXPERTS = 1 << 21  # above any number of experts: token and expert make one key


def _keys(trace: Trace, layer: int, n: int) -> tuple[Ints, Ints]:
    """One number per (token, expert) that has a row, for the first n tokens, and where the row stands."""
    tokens = trace[f"layers.{layer}.moe.dispatch.tokens"].astype(np.int64)
    offsets = trace[f"layers.{layer}.moe.dispatch.offsets"].astype(np.int64)
    owner = np.full(len(tokens), -1, np.int64)
    for row in offsets:
        owner[row[0] : row[-1]] = np.repeat(np.arange(len(row) - 1), np.diff(row))
    rows = np.flatnonzero((owner >= 0) & (tokens >= 0) & (tokens < n))
    return tokens[rows] * _EXPERTS + owner[rows], rows


def _are_probabilities(rows: Array) -> bool:
    """Whether no number is negative and every row adds up to 1, within the roundings of bfloat16."""
    values = rows.astype(np.float64)
    values = values[np.isfinite(values).all(axis=1)]
    if values.shape[1] < 2 or not len(values):
        return False
    return bool((values >= 0).all() and (np.abs(values.sum(axis=1) - 1) < 0.01).all())


def _are_log_probabilities(rows: Array) -> bool:
    """Whether the exponentials of every row add up to 1, within what 16 bits over a range of 16 keep."""
    values = rows.astype(np.float64)
    values = values[np.isfinite(values).all(axis=1)]
    return bool(len(values)) and bool((np.abs(_log_sum_exp(values)) < 0.01).all())


def _log_sum_exp(values: Array) -> Array:
    largest = values.max(axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):
        return np.asarray(largest + np.log(np.exp(values - largest).sum(axis=1, keepdims=True)))


def _softmax(z: Array) -> Array:
    with np.errstate(invalid="ignore"):
        e = np.exp(z.astype(np.float64) - z.max(axis=1, keepdims=True))
        return np.asarray(e / e.sum(axis=1, keepdims=True))


def _taps_of(trace: Trace) -> dict[str, Tap]:
    found = {}
    for path in trace:
        tap = parse(path)
        if tap is not None and tap.stored == path:
            found[tap.path] = tap
    return found


def _row_shape(array: Array, tap: Tap) -> tuple[int, ...]:
    if tap.kind == "attn.weights":
        return array.shape[0], array.shape[2]
    return array.shape[1:]


def _span(rows: Ints) -> slice | Ints:
    """Consecutive rows as a slice, so that reading them copies nothing."""
    if len(rows) and rows[-1] - rows[0] == len(rows) - 1 and (np.diff(rows) == 1).all():
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows


def _same_shape(tap: Tap, a: Array, b: Array, n: int) -> tuple[Array, Array]:
    """Heads and channels may be one axis or two."""
    if tap.kind == "attn.weights":
        keys = min(a.shape[2], b.shape[2], n)
        return a[:, :, :keys], b[:, :, :keys]
    return (a, b) if a.shape == b.shape else (a, b.reshape(a.shape))


def _wide(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """float32 for every float of 16 bits or fewer, which it holds exactly; float64 for whole numbers."""
    if dtype.name in ("float32", "float64"):
        return dtype
    return np.dtype(np.float64 if dtype.kind in "iu" else np.float32)


def trace_from(source: Any) -> Trace:
    """A trace, that of a session, or that of a file. Raises ArgumentError, and what `load_trace` raises."""
    if isinstance(source, str | PathLike):
        import colibri_lab as lab

        return lab.load_trace(source)
    return trace_of(source)


def widened(array: Array) -> Array:
    """The array in float64, exactly."""
    return array.astype(np.float64)


def _kinds(paths: Sequence[str] | set[str] | dict[str, Tap]) -> str:
    """Tap paths in few words: layers joined where they have the same tap."""
    layers: dict[str, list[int]] = {}
    for tap in sorted(filter(None, map(parse, paths)), key=lambda tap: tap.rank):
        layers.setdefault(tap.kind, []).append(tap.layer)
    if not layers:
        return "none that is compared"
    out = []
    for kind, where in layers.items():
        out.append(kind if where == [-1] else f"{kind} (layer{'s' * (len(where) > 1)} {_runs(where)})")
    return ", ".join(out) if len(out) <= _SHOWN else f"{', '.join(out[:_SHOWN])} and {len(out) - _SHOWN} more"


def _runs(numbers: list[int]) -> str:
    """[0, 1, 2, 5] as "0–2, 5"."""
    out: list[list[int]] = []
    for number in numbers:
        if out and number == out[-1][1] + 1:
            out[-1][1] = number
        else:
            out.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in out)


def _shown(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape)) or "one number"


def _where_they_part(a: list[int], b: list[int], n: int) -> str:
    """In words: why the ids of two runs are not the same."""
    for name, long, short, other in (("B", b, a, "A"), ("A", a, b, "B")):
        pad = next((i for i, token in enumerate(long) if token != long[0]), len(long))
        if n == 0 and pad and long[pad : pad + len(short)] == short[: len(long) - pad] and pad < len(long):
            return (
                f"{name} begins with {pad} token{'s' * (pad != 1)} of id {long[0]} (padding?), after which {other}'s "
                "tokens follow; record it without them"
            )
    if n == len(a) or n == len(b):
        longer, ids, whole = ("B", b, n == len(a)) if len(b) > len(a) else ("A", a, n == len(b))
        times = len(ids) // n if n and len(ids) % n == 0 else 0
        if times > 1 and ids == ids[:n] * times:
            return f"{longer} repeats these {n} tokens {times} times (a batch laid end to end, batch · tokens?)"
        if whole:
            return f"{longer} goes on for {len(ids) - n} tokens that the other does not have"
    return (
        f"at row {n} A has {a[n : n + _SHOWN]} and B has {b[n : n + _SHOWN]}"
        if n < len(a) or n < len(b)
        else "they are the same"
    )
