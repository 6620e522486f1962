"""One tap of both runs side by side, small enough to travel: figures, points to scatter, a histogram, the worst rows.

A tap may be far larger than what a view can show: it is gone through in blocks of rows, and points and histogram are of
a sample that always holds the worst rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.difference.flips import flipped
from colibri_lab.difference.pair import Pair
from colibri_lab.difference.taps import Tap

__all__ = ["BINS", "Figures", "figures", "rerouted"]

BINS = 31  # odd, so that equal values have a bin of their own
_SAMPLE = 100_000  # values that the histogram counts
_BLOCK = 1 << 20  # values of one block
_LARGEST = 1 << 26  # values looked at; of a larger tap evenly spaced tokens
_WORST = 5  # rows listed
_LISTED = 200  # re-routed tokens listed

Array = NDArray[Any]
Figures = tuple[dict[str, Any], dict[str, Array]]
"""Facts for JSON, and arrays."""


@dataclass
class _Rows:
    """The paired rows of a tap, or of one expert of it, or of evenly spaced tokens of one that is too large."""

    pair: Pair
    tap: Tap
    expert: int | None
    always: list[int]  # tokens that are looked at in any case

    def __post_init__(self) -> None:
        self.count = self.pair.count(self.tap.path)
        first = next(self.pair.blocks(self.tap.path), None)
        self.shape = () if first is None else first.a.shape[1:]
        self.width = max(1, math.prod(self.shape))
        most = max(1, _LARGEST // self.width)
        self.spaced: Array | None = None
        if self.count > most and not self.tap.of_experts:
            spaced = np.linspace(0, self.count - 1, most).astype(np.int64)
            self.spaced = np.unique([*spaced, *(t for t in self.always if t < self.count)])

    def blocks(self) -> Iterator[tuple[Array, Array | None, Array, Array]]:
        """(tokens, experts, A, B), the values (rows, width) in float64."""
        if self.spaced is not None:
            step = max(1, _BLOCK // self.width)
            for start in range(0, len(self.spaced), step):
                tokens = self.spaced[start : start + step]
                a, b = self.pair.pick(self.tap.path, tokens)
                yield tokens, None, a.reshape(len(a), -1), b.reshape(len(b), -1)
            return
        for block in self.pair.blocks(self.tap.path):
            rows = np.arange(len(block.tokens))
            if self.expert is not None and block.experts is not None:
                rows = np.flatnonzero(block.experts == self.expert)
            experts = None if block.experts is None else block.experts[rows]
            a, b = (x[rows].reshape(len(rows), -1).astype(np.float64) for x in (block.a, block.b))
            yield block.tokens[rows], experts, a, b


@dataclass
class _Errors:
    """What one look at all rows leaves."""

    tokens: Array  # (r,)
    experts: Array | None
    worst: Array  # (r,) largest |B − A|; infinite where one side alone is no number
    place: Array  # (r,) where in the row
    nonfinite: list[int]  # values that are no numbers, in A and in B
    largest: float  # |A|


def figures(
    pair: Pair,
    path: str,
    expert: int | None,
    token: int | None,
    points: int,
    tolerance: float,
    always: list[int],
    largest: float | None = None,
) -> Figures:
    """What the view shows of a tap, of all its experts or of one.

    Arrays: `a`, `b` (p,) float32, at most `points` values to scatter, the worst among them; `bins` (BINS,) uint32 of
    B − A from −`range` to `range`, what lies beyond counted at the ends; `worst` (r, 4) float32 of the worst rows and
    those of `token`: largest difference over the tap's largest value, A and B there, where in the row; `row_token`,
    `row_expert` (r,) int32; and for all experts `expert_rows`, `expert_beyond` (E,) uint32. Of a tap that is too large
    only some tokens are looked at, those of `always` and `token` among them. `largest` is the |A| that counts as 1,
    None: the largest that is seen here.
    """
    tap = pair.tap(path)
    rows = _Rows(pair, tap, expert, [*always, *(() if token is None else (token,))])
    found = _look(rows)
    largest = found.largest if largest is None else largest
    scale = largest if largest > 0 else 1.0
    bad = np.argsort(-found.worst, kind="stable")
    rng = np.random.default_rng(0)
    span, counts, clipped, sampled, a, b = _sample(rows, found, bad, points, rng)
    own = np.flatnonzero(found.tokens == token)
    worst = bad[:_WORST][found.worst[bad[:_WORST]] > 0]
    listed = np.concatenate([worst, own[~np.isin(own, worst)][:_WORST]])
    experts = np.full(len(listed), -1) if found.experts is None else found.experts[listed]
    arrays = {
        "a": a.astype(np.float32), "b": b.astype(np.float32), "bins": counts.astype(np.uint32),
        "worst": _rows_listed(rows, found, listed, scale), "row_token": found.tokens[listed].astype(np.int32),
        "row_expert": experts.astype(np.int32),
    }  # fmt: skip
    beyond = found.worst > tolerance * scale
    if found.experts is not None and expert is None:
        number = pair.a.num_experts
        arrays["expert_rows"] = np.bincount(found.experts, minlength=number).astype(np.uint32)
        arrays["expert_beyond"] = np.bincount(found.experts[beyond], minlength=number).astype(np.uint32)
    count = len(found.tokens) if rows.spaced is None else rows.count
    facts = {
        "path": path, "expert": expert, "rows": count, "looked": len(found.tokens), "shape": list(rows.shape),
        "range": span, "clipped": clipped, "sampled": sampled, "nonfinite": found.nonfinite, "largest": largest,
        "beyond": int(beyond.sum()), "of_token": token,
    }  # fmt: skip
    return facts, arrays


def _look(rows: _Rows) -> _Errors:
    none = np.empty(0, np.int64)
    tokens, experts, worst, place = [none], [none], [np.empty(0)], [none]
    nonfinite, largest, named = [0, 0], 0.0, False
    for of, by, a, b in rows.blocks():
        d = _difference(a, b)
        tokens.append(of)
        named |= by is not None
        experts.append(none if by is None else by)
        worst.append(d.max(axis=1, initial=0.0))
        place.append(d.argmax(axis=1) if d.size else np.zeros(len(d), np.int64))
        nonfinite = [nonfinite[0] + int((~np.isfinite(a)).sum()), nonfinite[1] + int((~np.isfinite(b)).sum())]
        largest = max(largest, float(np.where(np.isfinite(a), np.abs(a), 0.0).max(initial=0.0)))
    joined = [np.concatenate(part) for part in (tokens, worst, place)]
    return _Errors(joined[0], np.concatenate(experts) if named else None, joined[1], joined[2], nonfinite, largest)


def _difference(a: Array, b: Array) -> Array:
    """|B − A|; 0 where both are the same NaN or infinity, infinite where only one is such."""
    with np.errstate(invalid="ignore", over="ignore"):
        d = np.abs(b - a)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    return np.where(same, 0.0, np.where(np.isnan(d), np.inf, d))


def _gather(rows: _Rows, row: Array, column: Array) -> tuple[Array, Array]:
    """A and B at single places, by one more walk through the blocks."""
    a, b = np.zeros(len(row)), np.zeros(len(row))
    first = 0
    for tokens, _, of_a, of_b in rows.blocks():
        here = np.flatnonzero((row >= first) & (row < first + len(tokens)))
        a[here], b[here] = (x[row[here] - first, column[here]] for x in (of_a, of_b))
        first += len(tokens)
    return a, b


def _sample(
    rows: _Rows, found: _Errors, bad: Array, points: int, rng: np.random.Generator
) -> tuple[float, Array, list[int], int, Array, Array]:
    """Range and counts of B − A, how many lie below and above the range, how many were counted, and A and B of the
    points. Nearly all differences lie within the range; the end bins hold the rest.
    """
    total = len(found.tokens) * rows.width
    flat = np.arange(total) if total <= _SAMPLE else np.unique(rng.integers(0, total, _SAMPLE))
    worst = bad[: points // 4]
    row = np.concatenate([flat // rows.width, worst])
    a, b = _gather(rows, row, np.concatenate([flat % rows.width, found.place[worst]]))
    good = np.isfinite(a) & np.isfinite(b)
    ours = np.flatnonzero(good[: len(flat)])
    some = ours if len(ours) <= points else np.sort(rng.choice(ours, points - len(worst), replace=False))
    if len(some) < len(ours):
        some = np.concatenate([some, len(flat) + np.flatnonzero(good[len(flat) :])])
    d = b[ours] - a[ours]
    size = np.abs(d)
    span = float(np.quantile(size, 0.995)) if len(size) else 0.0
    if span == 0.0 or size.max() <= 1.25 * span:
        span = float(size.max(initial=0.0))
    if span == 0.0:
        return 0.0, np.bincount([BINS // 2], weights=[len(d)], minlength=BINS), [0, 0], len(d), a[some], b[some]
    at = np.clip(((d / span + 1) / 2 * BINS).astype(np.int64), 0, BINS - 1)
    clipped = [int((d < -span).sum()), int((d > span).sum())]
    return span, np.bincount(at, minlength=BINS), clipped, len(d), a[some], b[some]


def _rows_listed(rows: _Rows, found: _Errors, listed: Array, scale: float) -> Array:
    a, b = _gather(rows, listed, found.place[listed])
    columns = [found.worst[listed] / scale, a, b, found.place[listed].astype(np.float64)]
    return np.stack(columns, axis=1).astype(np.float32)


def rerouted(pair: Pair, path: str) -> Figures:
    """The tokens that the two runs sent to other experts in one layer. Arrays: `moved_tokens` (m,) int32, and `ids_a`,
    `ids_b` (m, k) int32.
    """
    moved = flipped(pair, pair.tap(path).layer)
    shown = moved[:_LISTED]
    ids_a, ids_b = (trace[path][shown].astype(np.int32) for trace in (pair.a, pair.b))
    facts = {"path": path, "expert": None, "rows": pair.n, "moved": len(moved), "shape": [ids_a.shape[1]]}
    return facts, {"moved_tokens": shown.astype(np.int32), "ids_a": ids_a, "ids_b": ids_b}
