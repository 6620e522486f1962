"""One tap of both runs side by side, small enough to travel: figures, points to scatter, a histogram, the worst rows.

Rows are paired by token, expert rows by (token, expert), gates by expert id. A tap may be far larger than what a view
can show: everything is computed in blocks of rows, points and histogram from a sample that always holds the worst
rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.difference.result import Diff
from colibri_lab.trace import Trace

__all__ = ["BINS", "Figures", "figures", "layer_of", "rerouted"]

BINS = 31  # odd, so that equal values have a bin of their own
_SAMPLE = 100_000  # values that the histogram counts
_BLOCK = 1 << 20  # values of one block
_LARGEST = 1 << 26  # values looked at; of a larger tap evenly spaced rows
_WORST = 5  # rows listed
_LISTED = 200  # re-routed tokens listed
_EXPERTS = re.compile(r"layers\.(\d+)\.moe\.experts\.\*\.(\w+)")

Array = NDArray[Any]
Figures = tuple[dict[str, Any], dict[str, Array]]
"""Facts for JSON, and arrays."""


def layer_of(path: str) -> int | None:
    """The layer in a tap path, or None outside the layers."""
    found = re.match(r"layers\.(\d+)\.", path)
    return int(found[1]) if found else None


class _Pair:
    """The rows of one tap that both traces hold, paired: `token` (n,), `expert` (n,) or None; values block by block."""

    def __init__(self, diff: Diff, path: str, expert: int | None) -> None:
        self.expert: Array | None = None
        dispatched = _EXPERTS.fullmatch(path)
        if dispatched:
            prefix, tap = f"layers.{dispatched[1]}.moe.dispatch.", dispatched[2]
            self._a, self._b = diff.a[prefix + tap], diff.b[prefix + tap]
            one, other = (_slots(trace, prefix, diff.n_tokens) for trace in (diff.a, diff.b))
            _, at, to = np.intersect1d(one[0], other[0], assume_unique=True, return_indices=True)
            self._rows = one[1][at], other[1][to]
            self.token, self.expert = one[0][at] // diff.a.num_experts, one[0][at] % diff.a.num_experts
            if expert is not None:
                self._keep(self.expert == expert)
        elif path.endswith(".moe.gates"):
            self._gates(diff, path)
        else:
            self._a, self._b = diff.a[path], diff.b[path]
            if path.endswith(".attn.weights"):  # (heads, T, context) -> rows of tokens
                n = diff.n_tokens
                self._a, self._b = (np.moveaxis(x, 1, 0)[:, :, :n] for x in (self._a, self._b))
            self.token = np.arange(min(diff.n_tokens, len(self._a), len(self._b)))
            self._rows = self.token, self.token
        self.shape = self._a.shape[1:]
        self.width = math.prod(self.shape)

    def _gates(self, diff: Diff, path: str) -> None:
        """Gates of experts that both runs chose, one row for each token and expert."""
        ids_a, ids_b = (trace[path.replace(".gates", ".expert_ids")][: diff.n_tokens] for trace in (diff.a, diff.b))
        same = (ids_a[:, :, None] == ids_b[:, None, :]) & (ids_a >= 0)[:, :, None]
        token, slot, other = np.nonzero(same)
        self.token, self.expert = token, ids_a[token, slot].astype(np.int64)
        self._a = diff.a[path].reshape(-1, 1)
        self._b = diff.b[path].reshape(-1, 1)
        self._rows = token * ids_a.shape[1] + slot, token * ids_b.shape[1] + other

    def _keep(self, rows: Array) -> None:
        self.token = self.token[rows]
        self.expert = None if self.expert is None else self.expert[rows]
        self._rows = self._rows[0][rows], self._rows[1][rows]

    def thin(self, always: set[int]) -> int:
        """Keeps evenly spaced rows of a tap that is too large, and the tokens `always`; how many rows there were."""
        total = len(self.token)
        most = max(1, _LARGEST // max(1, self.width))
        if total > most:
            spaced = np.zeros(total, bool)
            spaced[np.linspace(0, total - 1, most).astype(np.int64)] = True
            self._keep(spaced | np.isin(self.token, sorted(always)))
        return total

    def of(self, rows: Array) -> tuple[Array, Array]:
        """(r, width) float64 of A and of B."""
        a, b = self._a[self._rows[0][rows]], self._b[self._rows[1][rows]]
        return a.reshape(len(rows), -1).astype(np.float64), b.reshape(len(rows), -1).astype(np.float64)

    def blocks(self) -> Iterator[tuple[Array, Array, Array]]:
        """All rows, a few at a time: (row numbers, A, B)."""
        step = max(1, _BLOCK // max(1, self.width))
        for start in range(0, len(self.token), step):
            rows = np.arange(start, min(start + step, len(self.token)))
            yield rows, *self.of(rows)


def _slots(trace: Trace, prefix: str, tokens: int) -> tuple[Array, Array]:
    """The expert rows of tokens below `tokens`: a key token · E + expert, and where the row is stored."""
    offsets, of_token = trace[prefix + "offsets"], trace[prefix + "tokens"].astype(np.int64)
    expert = np.full(len(of_token), -1, np.int64)
    for run in offsets:
        for number, (start, stop) in enumerate(pairwise(run)):
            expert[int(start) : int(stop)] = number
    rows = np.flatnonzero((expert >= 0) & (of_token >= 0) & (of_token < tokens))
    return of_token[rows] * trace.num_experts + expert[rows], rows


def figures(diff: Diff, path: str, expert: int | None, token: int | None, points: int) -> Figures:
    """What the view shows of a tap: facts for JSON, and arrays.

    Arrays: `a`, `b` (p,) float32, at most `points` values to scatter, the worst among them; `bins` (BINS,) uint32 of
    B − A from −`range` to `range`, what lies beyond counted at the ends; `worst` (r, 4) float32 of the worst rows and
    those of `token`: largest difference over the tap's largest value, A and B there, where in the row; `row_token`,
    `row_expert` (r,) int32; and for expert rows `expert_rows`, `expert_beyond` (E,) uint32.
    """
    pair = _Pair(diff, path, expert)
    at_first = {diff.first_divergence.token} if diff.first_divergence is not None else set()
    total = pair.thin(at_first | ({token} if token is not None else set()))
    worst, place, nonfinite, largest = _errors(pair)
    scale = largest if largest > 0 else 1.0
    rng = np.random.default_rng(0)
    bad = np.argsort(-worst, kind="stable")
    a, b = _points(pair, bad, place, points, rng)
    span, counts, sampled = _histogram(pair, bad, rng)
    tolerance = diff.tolerance.of(path)
    own = np.flatnonzero(pair.token == token) if token is not None else np.zeros(0, np.int64)
    listed = np.concatenate([bad[:_WORST], own[~np.isin(own, bad[:_WORST])][:_WORST]])
    experts = np.full(len(listed), -1) if pair.expert is None else pair.expert[listed]
    arrays = {
        "a": a.astype(np.float32), "b": b.astype(np.float32), "bins": counts.astype(np.uint32),
        "worst": _rows(pair, listed, worst, place, scale), "row_token": pair.token[listed].astype(np.int32),
        "row_expert": experts.astype(np.int32),
    }  # fmt: skip
    if pair.expert is not None and expert is None and _EXPERTS.fullmatch(path):
        number = diff.a.num_experts
        arrays["expert_rows"] = np.bincount(pair.expert, minlength=number).astype(np.uint32)
        beyond = pair.expert[worst > tolerance * scale]
        arrays["expert_beyond"] = np.bincount(beyond, minlength=number).astype(np.uint32)
    facts = {
        "path": path, "expert": expert, "rows": total, "looked": len(pair.token), "shape": list(pair.shape),
        "range": span, "sampled": sampled, "nonfinite": nonfinite, "largest": largest,
        "beyond": int((worst > tolerance * scale).sum()), "of_token": token,
    }  # fmt: skip
    return facts, arrays


def _difference(a: Array, b: Array) -> Array:
    """|B − A|; 0 where both are the same NaN or infinity, infinite where only one is such."""
    with np.errstate(invalid="ignore", over="ignore"):
        d = np.abs(b - a)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    return np.where(same, 0.0, np.where(np.isnan(d), np.inf, d))


def _errors(pair: _Pair) -> tuple[Array, Array, list[int], float]:
    """Per row the largest difference and where; values that are no numbers in A and in B; the largest |A|."""
    worst, place = np.zeros(len(pair.token)), np.zeros(len(pair.token), np.int64)
    nonfinite, largest = [0, 0], 0.0
    for rows, a, b in pair.blocks():
        d = _difference(a, b)
        place[rows] = d.argmax(axis=1) if pair.width else 0
        worst[rows] = d.max(axis=1, initial=0.0)
        finite = np.isfinite(a)
        nonfinite = [nonfinite[0] + int((~finite).sum()), nonfinite[1] + int((~np.isfinite(b)).sum())]
        largest = max(largest, float(np.abs(a, where=finite, out=np.zeros_like(a)).max(initial=0.0)))
    return worst, place, nonfinite, largest


def _pick(pair: _Pair, count: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """(row, column) of `count` values, all when there are fewer, in order."""
    total = len(pair.token) * pair.width
    flat = np.arange(total) if total <= count else np.unique(rng.integers(0, total, count))
    return flat // max(1, pair.width), flat % max(1, pair.width)


def _gather(pair: _Pair, row: Array, column: Array) -> tuple[Array, Array]:
    """A and B at single places."""
    a, b = np.zeros(len(row)), np.zeros(len(row))
    names, inverse = np.unique(row, return_inverse=True)
    step = max(1, _BLOCK // max(1, pair.width))
    for start in range(0, len(names), step):
        here = np.flatnonzero((inverse >= start) & (inverse < start + step))
        if len(here):
            some_a, some_b = pair.of(names[start : start + step])
            a[here], b[here] = some_a[inverse[here] - start, column[here]], some_b[inverse[here] - start, column[here]]
    return a, b


def _points(pair: _Pair, bad: Array, place: Array, most: int, rng: np.random.Generator) -> tuple[Array, Array]:
    row, column = _pick(pair, most - most // 4, rng)
    if len(row) < len(pair.token) * pair.width:
        row, column = np.concatenate([row, bad[: most // 4]]), np.concatenate([column, place[bad[: most // 4]]])
    a, b = _gather(pair, row, column)
    good = np.isfinite(a) & np.isfinite(b)
    return a[good], b[good]


def _histogram(pair: _Pair, bad: Array, rng: np.random.Generator) -> tuple[float, Array, int]:
    """The range, counts of B − A, and how many values were counted. Nearly all lie inside; the ends hold the rest."""
    row, column = _pick(pair, _SAMPLE, rng)
    a, b = _gather(pair, row, column)
    good = np.isfinite(a) & np.isfinite(b)
    d = b[good] - a[good]
    size = np.abs(d)
    span = float(np.quantile(size, 0.995)) if len(size) else 0.0
    if size.max(initial=0.0) <= 1.25 * span or span == 0.0:
        span = float(size.max(initial=0.0))
    if span == 0.0:
        return 0.0, np.bincount([BINS // 2], weights=[len(d)], minlength=BINS), len(d)
    at = np.clip(((d / span + 1) / 2 * BINS).astype(np.int64), 0, BINS - 1)
    return span, np.bincount(at, minlength=BINS), len(d)


def _rows(pair: _Pair, listed: Array, worst: Array, place: Array, scale: float) -> Array:
    if not len(listed) or not pair.width:
        return np.zeros((0, 4), np.float32)
    a, b = _gather(pair, listed, place[listed])
    return np.stack([worst[listed] / scale, a, b, place[listed].astype(np.float64)], axis=1).astype(np.float32)


def rerouted(diff: Diff, path: str) -> Figures:
    """The tokens that the two runs sent to other experts in one layer. Arrays: `moved_tokens` (m,) int32, and `ids_a`,
    `ids_b` (m, k) int32.
    """
    ids_a, ids_b = (trace[path][: diff.n_tokens].astype(np.int32) for trace in (diff.a, diff.b))
    k = max(ids_a.shape[1], ids_b.shape[1])
    ids_a, ids_b = (np.pad(ids, ((0, 0), (0, k - ids.shape[1])), constant_values=-1) for ids in (ids_a, ids_b))
    moved = np.flatnonzero((np.sort(ids_a, axis=1) != np.sort(ids_b, axis=1)).any(axis=1))
    facts = {"path": path, "expert": None, "rows": len(ids_a), "moved": len(moved), "shape": [k]}
    shown = moved[:_LISTED]
    return facts, {"moved_tokens": shown.astype(np.int32), "ids_a": ids_a[shown], "ids_b": ids_b[shown]}
