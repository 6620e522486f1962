"""Pairing the neurons of two experts: the assignment with the largest sum, exactly or quickly."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from colibri_lab.errors import ArgumentError

__all__ = ["assignment", "greedy_assignment", "pairing"]

Align = Literal["exact", "greedy"]


def pairing(gain: NDArray[np.float64], align: Align) -> NDArray[np.int64]:
    """(n,) the column of each row. Raises ArgumentError for another `align`."""
    if align == "exact":
        return assignment(gain)
    if align == "greedy":
        return greedy_assignment(gain)
    raise ArgumentError(f"neurons are aligned 'exact', 'greedy' or None, not {align!r:.80}")


def assignment(gain: NDArray[np.float64]) -> NDArray[np.int64]:
    """The column of each row that makes the sum of gain[row, column] largest, each column once; (n, n) finite numbers.

    Shortest augmenting paths with potentials (the Hungarian method in the form of Jonker and Volgenant), O(n³): a
    second for some hundred neurons, minutes for two thousand.
    """
    cost = -np.asarray(gain, np.float64)
    n = len(cost)
    row_of = np.full(n + 1, -1, np.int64)  # the row that holds a column; column n stands for "none yet"
    u, v = np.zeros(n), np.zeros(n + 1)
    for row in range(n):
        row_of[n] = row
        shortest, before = np.full(n, np.inf), np.full(n, n, np.int64)
        done = np.zeros(n + 1, bool)
        column = n
        while row_of[column] >= 0:
            done[column] = True
            here = row_of[column]
            reduced = cost[here] - u[here] - v[:n]
            better = ~done[:n] & (reduced < shortest)
            shortest[better], before[better] = reduced[better], column
            following = int(np.where(done[:n], np.inf, shortest).argmin())
            step = shortest[following]
            u[row_of[done]] += step
            v[done] -= step
            shortest[~done[:n]] -= step
            column = following
        while column != n:
            row_of[column] = row_of[before[column]]
            column = int(before[column])
    out = np.empty(n, np.int64)
    out[row_of[:n]] = np.arange(n)
    return out


def greedy_assignment(gain: NDArray[np.float64]) -> NDArray[np.int64]:
    """The best pair first, then the best of what is left: O(n² log n), at least half of the best sum for gains ≥ 0."""
    n = len(gain)
    out, free_rows, free_columns = np.full(n, -1, np.int64), np.ones(n, bool), np.ones(n, bool)
    for flat in np.argsort(-gain, axis=None, kind="stable").tolist():
        row, column = divmod(flat, n)
        if free_rows[row] and free_columns[column]:
            out[row], free_rows[row], free_columns[column] = column, False, False
    return out
