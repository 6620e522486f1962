"""Counts of what is not finite, subnormal or near the limit in each tap of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.difference.taps import Tap, parse
from colibri_lab.nan.result import MAP
from colibri_lab.nan.source import Source
from colibri_lab.numerics import FORMATS

__all__ = ["bad", "census", "first_rows", "taps_of"]

Array = NDArray[Any]
Bools = NDArray[np.bool_]

_PIECE = 1 << 20  # numbers worked on at a time
_NEAR = 2.0  # bits left below which a tap is near its limit
_MANY = 0.05  # share of subnormal numbers that is worth a mark


def taps_of(source: Source) -> list[Tap]:
    """The recorded taps that hold numbers, in the order of the data's way; the experts of a layer are one."""
    known = {path: parse(path) for path in source.trace}
    taps = [tap for path, tap in known.items() if tap is not None and source.trace[path].dtype.kind not in "iu"]
    return sorted(taps, key=lambda tap: tap.rank)


def bad(values: Array, path: str, recorded: Bools | None = None) -> Bools:
    """Which values are neither finite nor −Inf on purpose: a selection score of −Inf is that of a masked group.

    `recorded`: which of the rows hold anything (None: all).
    """
    wrong = ~np.isfinite(values)
    if path.endswith(".moe.scores") and wrong.any():
        wrong &= values != -np.inf
    if recorded is not None:
        wrong[~recorded] = False
    return wrong


def first_rows(source: Source, report: Callable[[float], object] | None = None) -> dict[str, int]:
    """The first token row with a value that is not finite, of each tap that has one. Reads each value at most once.

    `report` is called with the fraction done.
    """
    taps, found = taps_of(source), {}
    total = sum(source.trace[tap.stored].size for tap in taps) or 1
    done = 0
    for tap in taps:
        array = source.trace[tap.stored]
        tokens = source.trace[tap.stored.rpartition(".")[0] + ".tokens"] if tap.of_experts else None
        first: int | None = None
        recorded = source.recorded(tap.stored)
        for start, piece in _pieces(array, 1 if tap.kind == "attn.weights" else 0):
            wrong = bad(piece, tap.path, None if recorded is None else recorded[start : start + len(piece)])
            if wrong.any():
                axes = tuple(axis for axis in range(wrong.ndim) if axis != (tap.kind == "attn.weights"))
                rows = start + np.flatnonzero(wrong.any(axis=axes))
                if tokens is None:
                    first = int(rows[0])
                    break
                mine = tokens[rows]
                first = min(mine[mine >= 0].tolist() + ([] if first is None else [first]), default=None)
            if report is not None:
                report(min((done + start * (array.size // max(len(array), 1))) / total, 1.0))
        done += array.size
        if first is not None:
            found[tap.path] = first
    return found


def census(source: Source) -> NDArray[Any]:
    """One row per recorded tap (dtype MAP); `state` tells "passed" where something is not finite: who looks for origins
    marks them.
    """
    rows = []
    for tap in taps_of(source):
        kind = FORMATS[source.format(tap.path)]
        smallest = math.ldexp(1.0, kind.lowest)
        n = n_nan = n_inf = n_negative = n_subnormal = n_wrong = 0
        absmax = 0.0
        recorded = source.recorded(tap.stored)
        for start, piece in _pieces(source.trace[tap.stored], 0):
            if recorded is not None:
                piece = piece[recorded[start : start + len(piece)]]
            values = piece if piece.dtype.kind == "f" and piece.itemsize >= 4 else piece.astype(np.float32)
            size = np.abs(values)
            finite = size < np.inf  # False for NaN
            n += values.size
            if not finite.all():
                nan = int(np.isnan(values).sum())
                n_nan += nan
                n_inf += int(values.size - finite.sum()) - nan
                n_negative += int((values == -np.inf).sum())
                n_wrong += int(bad(values, tap.path).sum())
                size = size[finite]
            if size.size:
                absmax = max(absmax, float(size.max()))
                n_subnormal += int(((size < smallest) & (size > 0)).sum())
        left = math.log2(kind.largest / absmax) if absmax else math.inf
        state = "finite"
        if n_wrong:
            state = "passed"
        elif left < _NEAR:
            state = "near"
        elif n_subnormal and n_subnormal >= _MANY * n:
            state = "subnormal"
        rows.append((
            tap.path, tap.layer, tap.stage, n, n_nan, n_inf, n_negative, n_subnormal, absmax, left, state,
        ))  # fmt: skip
    return np.array(rows, MAP)


def _pieces(array: Array, axis: int) -> Iterator[tuple[int, Array]]:
    """(first row, rows) along an axis, each of about `_PIECE` numbers."""
    rows = array.shape[axis]
    step = max(1, _PIECE * rows // max(array.size, 1))
    for start in range(0, rows, step):
        part = slice(start, start + step)
        yield start, array[part] if axis == 0 else array[:, part]
