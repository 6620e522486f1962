"""Which values of a run's taps are not finite, by token row, read in blocks and remembered by row."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.nan.source import Source
from colibri_lab.trace import EXPERT_TAPS

__all__ = ["Packed", "Taps"]

Array = NDArray[Any]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]

_BLOCK = 1 << 20  # values looked at in one go


class Packed:
    """The rows of a layer's experts as they are stored: `tokens` and `experts` (−1: nobody's) by row."""

    def __init__(self, source: Source, layer: int) -> None:
        self._trace, self._prefix = source.trace, f"layers.{layer}.moe.dispatch."
        self.tokens, self.experts = source.dispatch(layer)
        self.output = f"layers.{layer}.moe.experts.*.output"
        self._bad: dict[str, Bools] = {}

    def has(self, tap: str) -> bool:
        """Whether this tap of experts was recorded."""
        return self._prefix + tap in self._trace

    def bad(self, tap: str) -> Bools:
        """(N,) which rows hold something that is not finite."""
        if tap not in self._bad:
            rows = self._trace[self._prefix + tap]
            parts = [~np.isfinite(rows[part]).all(axis=1) for part in _blocks(len(rows), rows.shape[1])]
            self._bad[tap] = np.concatenate(parts or [np.zeros(0, np.bool_)]) & (self.experts >= 0)
        return self._bad[tap]

    def values(self, tap: str, rows: Array) -> Array:
        """Rows of a tap, float32; `rows` are numbers or a mask."""
        return np.asarray(self._trace[self._prefix + tap][rows], np.float32)

    def mask(self, tap: str, rows: Array) -> Bools:
        """Which of their values are not finite."""
        return np.asarray(~np.isfinite(self.values(tap, rows)))


class Taps:
    """`bad` by tap path. `born`: by path the token rows in which something was born, which are all that is known of a
    tap that was not recorded. Token rows before the first of them are not looked at.
    """

    def __init__(self, source: Source, born: Mapping[str, Collection[int]]) -> None:
        self.source, self.born = source, born
        self._first = min((min(tokens) for tokens in born.values()), default=0)
        self._bad: dict[str, Bools] = {}
        self._packed: dict[int, Packed | None] = {}

    def packed(self, layer: int) -> Packed | None:
        """The rows of a layer's experts; None when they were not recorded."""
        if layer not in self._packed:
            known = any(self.source.has(f"layers.{layer}.moe.experts.*.{tap}") for tap in EXPERT_TAPS[1:])
            self._packed[layer] = Packed(self.source, layer) if known else None
        return self._packed[layer]

    def bad(self, path: str) -> Bools:
        """(T,) which token rows hold something that is not finite; of experts: in any row of the token."""
        if path not in self._bad:
            self._bad[path] = self._look(path)
        return self._bad[path]

    def _look(self, path: str) -> Bools:
        out = np.zeros(self.source.trace.n_tokens, np.bool_)
        if not self.source.has(path):
            out[list(self.born.get(path, ()))] = True
            return out
        expert = _expert(path)
        if expert is not None:
            layer, number, tap = expert
            packed = self.packed(layer)
            if packed is not None and packed.has(tap):
                rows = packed.bad(tap) if number is None else packed.bad(tap) & (packed.experts == number)
                out[packed.tokens[rows]] = True
            return out
        count = len(out) - self._first
        width = self.flat(path, np.arange(self._first, self._first + min(count, 1))).size or 1
        for part in _blocks(count, width):
            rows = np.arange(self._first + part.start, self._first + part.stop)
            out[rows] = ~np.isfinite(self.flat(path, rows)).all(axis=1)
        return out

    def flat(self, path: str, tokens: Array) -> Array:
        """(n, values) rows of these tokens, whatever shape a row of the tap has; not for experts."""
        rows = self.source.rows(path, tokens)
        assert rows is not None, path
        return rows.reshape(len(rows), int(np.prod(rows.shape[1:])))

    def expert_values(self, path: str, token: int) -> Array | None:
        """The row of one token in a tap of one expert (`*`: of the first that has something not finite)."""
        expert = _expert(path)
        packed = None if expert is None else self.packed(expert[0])
        if expert is None or packed is None or not packed.has(expert[2]):
            return None
        rows = packed.tokens == token
        rows &= packed.bad(expert[2]) if expert[1] is None else packed.experts == expert[1]
        places = np.flatnonzero(rows)
        return packed.values(expert[2], places[0]) if len(places) else None

    def row(self, path: str, token: int) -> Array | None:
        """The row of a token, flat; None when there is none."""
        if _expert(path) is not None:
            return self.expert_values(path, token)
        return self.flat(path, np.array([token]))[0] if self.source.has(path) else None

    def mask(self, path: str, tokens: Ints) -> Bools:
        """(n, values) which values of these token rows are not finite; of experts: in any row of the token."""
        expert = _expert(path)
        if expert is None:
            return np.asarray(~np.isfinite(self.flat(path, tokens)))
        layer, number, tap = expert
        packed = self.packed(layer)
        assert packed is not None
        chosen = np.flatnonzero(self._chosen(packed, number) & packed.bad(tap) & np.isin(packed.tokens, tokens))
        values = packed.mask(tap, chosen)
        out = np.zeros((len(tokens), values.shape[1]), np.bool_)
        np.logical_or.at(out, np.searchsorted(tokens, packed.tokens[chosen]), values)
        return out

    @staticmethod
    def _chosen(packed: Packed, number: int | None) -> Bools:
        return packed.experts >= 0 if number is None else packed.experts == number

    def counts(self, path: str, tokens: Ints, through: str | None) -> tuple[int, int, float]:
        """(values not finite, of these NaN, the first) in these rows; with `through` only where that tap is not finite
        either.
        """
        lost: list[Array] = []
        width = self.flat(path, tokens[:1]).size or 1
        for part in _blocks(len(tokens), width):
            rows = self.flat(path, tokens[part])
            bad = ~np.isfinite(rows)
            if through is not None and self.source.has(through):
                bad &= self.mask(through, tokens[part])
            lost.append(rows[bad])
        every = np.concatenate(lost)
        return int(every.size), int(np.isnan(every).sum()), float(every[0]) if every.size else float("nan")

    def first_value(self, path: str, token: int) -> float:
        """The first value of a token's row that is not finite."""
        row = self.row(path, token)
        lost = np.empty(0) if row is None else row[~np.isfinite(row)]
        return float(lost[0]) if lost.size else float("nan")


def _expert(path: str) -> tuple[int, int | None, str] | None:
    """(layer, expert, None for all, tap) of a tap of experts."""
    part = path.split(".")
    if len(part) != 6 or part[3] != "experts":
        return None
    return int(part[1]), None if part[4] == "*" else int(part[4]), part[5]


def _blocks(count: int, width: int) -> Iterator[slice]:
    step = max(_BLOCK // max(width, 1), 1)
    return (slice(start, min(start + step, count)) for start in range(0, count, step))
