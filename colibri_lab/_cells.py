"""Values of which some are unknown: the arithmetic under `colibri_lab.conditions`.

A `Cells` is one value for all token rows (shape ()), one a row (n,), or several entries a row (n, m), and beside each
value its state. Operations work entry by entry, repeat what is smaller, and follow SQL: what meets an unknown is
unknown, except that a known False decides an `and` and a known True an `or`. Numbers are worked out in float64 as IEEE
says: x / 0 is an infinity or NaN, and NaN equals nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

ABSENT, UNKNOWN, KNOWN = np.int8(0), np.int8(1), np.int8(2)  # the least state of the operands is the result's
UNUSED = -1  # the id in a slot of `experts` that was given no expert


@dataclass(frozen=True)
class Cells:
    """Values and their states, of one shape: (), (n,) or (n, m). A value that is not KNOWN means nothing."""

    values: NDArray[Any]
    """Any number dtype, bool for yes or no, object for text."""
    states: NDArray[np.int8]
    """KNOWN; UNKNOWN; or ABSENT: an unused slot, which reductions pass over."""

    @property
    def known(self) -> NDArray[np.bool_]:
        """Where the value is known."""
        return np.asarray(self.states == KNOWN)


def from_value(value: object, text: bool = False, slots: bool = False) -> Cells:
    """A scalar, or an array whose first axis is the rows; further axes become one. None within is unknown; with `slots`
    the number -1 is absent.
    """
    values = np.asarray(value, dtype=object if text else None)
    if values.ndim > 1:
        values = values.reshape(len(values), prod(values.shape[1:]))  # -1 would not do for no rows
    states = np.full(values.shape, KNOWN)
    if values.dtype == object:
        missing = np.array([item is None for item in values.flat], dtype=bool).reshape(values.shape)
        states[missing] = UNKNOWN
        values = np.where(missing, "" if text else np.nan, values)
        values = values if text else values.astype(np.float64)
    if slots:
        states[values == UNUSED] = ABSENT
    return Cells(values, states)


def to_value(cells: Cells) -> Any:
    """What a person is shown: a Python scalar, or a new array; None when nothing is known. Among numbers a single
    unknown is NaN, among texts and truths None.
    """
    values, missing = cells.values, ~cells.known
    if missing.size and (cells.states == UNKNOWN).all():
        return None
    if values.ndim == 0:
        return values.item()
    if not missing.any() or values.dtype.kind in "iu":  # ids keep the -1 of their unused slots
        return values.copy()
    gap: Any = np.nan if values.dtype.kind == "f" else None
    return np.where(missing, gap, values)


# ---- entry by entry ----------------------------------------------------------------------------------------------


def _aligned(parts: Sequence[Cells]) -> list[Cells]:
    """One value a row stands beside each entry of that row."""
    entries = any(part.values.ndim == 2 for part in parts)
    return [
        Cells(part.values[:, None], part.states[:, None]) if entries and part.values.ndim == 1 else part
        for part in parts
    ]


def _numbers(cells: Cells) -> NDArray[np.float64]:
    return cells.values.astype(np.float64)


def arithmetic(operation: Callable[..., Any], *parts: Cells) -> Cells:
    """`operation` on float64 arrays. Raises ValueError when rows of different lengths meet."""
    parts = tuple(_aligned(parts))
    values = np.asarray(operation(*map(_numbers, parts)))
    return Cells(values, _least(values.shape, parts))


def compare(operation: Callable[[Any, Any], Any], a: Cells, b: Cells) -> Cells:
    """`operation` such as operator.lt on two of one kind; texts compare as Python's. Raises ValueError as above."""
    a, b = _aligned((a, b))
    if a.values.dtype == object:
        values = np.asarray(np.frompyfunc(operation, 2, 1)(a.values, b.values), dtype=bool)
    else:
        values = np.asarray(operation(_numbers(a), _numbers(b)))
    return Cells(values, _least(values.shape, (a, b)))


def _least(shape: tuple[int, ...], parts: Sequence[Cells]) -> NDArray[np.int8]:
    states = np.full(shape, KNOWN)
    for part in parts:
        states = np.minimum(states, part.states)
    return np.asarray(states)


def contains(a: Cells, b: Cells) -> Cells:
    """Whether text `a` is a part of text `b`."""
    return compare(lambda part, whole: part in whole, a, b)


def is_one_of(item: Cells, *choices: Cells) -> Cells:
    """Whether an item equals one of the choices; False for none. Raises ValueError as above."""
    equal = [compare(operator.eq, item, choice) for choice in choices]
    return reduce(either, equal, from_value(False))


def negate(a: Cells) -> Cells:
    """Three-valued not."""
    return Cells(~a.values, a.states)


def both(a: Cells, b: Cells) -> Cells:
    """Three-valued and. Raises ValueError when rows of different lengths meet."""
    a, b = _aligned((a, b))
    values = np.asarray(a.values & b.values)
    states = _least(values.shape, (a, b))
    decided = (a.known & ~a.values) | (b.known & ~b.values)
    return Cells(values, np.where(decided & (states != ABSENT), KNOWN, states))


def either(a: Cells, b: Cells) -> Cells:
    """Three-valued or, by De Morgan."""
    return negate(both(negate(a), negate(b)))


# ---- one value a row ---------------------------------------------------------------------------------------------


def _joined(parts: Sequence[Cells]) -> tuple[Cells, tuple[int, ...]]:
    """All entries of all parts, (rows, entries), and the shape of a result: () when no part has rows."""
    shape = np.broadcast_shapes(*(part.values.shape[:1] for part in parts))

    def spread(array: NDArray[Any]) -> NDArray[Any]:
        entries = array[:, None] if array.ndim == 1 else np.atleast_2d(array)
        return np.broadcast_to(entries, (*shape, entries.shape[1]) if shape else (1, 1))

    values = np.concatenate([spread(part.values) for part in parts], axis=1)
    return Cells(values, np.concatenate([spread(part.states) for part in parts], axis=1)), shape


def _extreme(operation: np.ufunc, start: float, parts: Sequence[Cells]) -> Cells:
    joined, shape = _joined(parts)
    values = operation.reduce(_numbers(joined), axis=1, where=joined.known, initial=start)
    certain = joined.known.any(axis=1) & ~(joined.states == UNKNOWN).any(axis=1)
    return Cells(values.reshape(shape), np.where(certain, KNOWN, UNKNOWN).reshape(shape))


def largest(*parts: Cells) -> Cells:
    """The largest of all entries of a row; NaN if one is NaN, unknown if one is unknown or there is none."""
    return _extreme(np.maximum, -np.inf, parts)


def smallest(*parts: Cells) -> Cells:
    """The smallest of all entries of a row, likewise."""
    return _extreme(np.minimum, np.inf, parts)


def some(*parts: Cells) -> Cells:
    """Three-valued or of all entries of a row; False for none."""
    joined, shape = _joined(parts)
    values = (joined.values & joined.known).any(axis=1)
    doubt = ~values & (joined.states == UNKNOWN).any(axis=1)
    return Cells(values.reshape(shape), np.where(doubt, UNKNOWN, KNOWN).reshape(shape))


def every(*parts: Cells) -> Cells:
    """Three-valued and of all entries of a row; True for none."""
    return negate(some(*map(negate, parts)))


def is_in(item: Cells, collection: Cells) -> Cells:
    """Whether a row's `item` equals some entry of the row."""
    return some(compare(operator.eq, item, collection))


def statistic(of_rows: Callable[[NDArray[np.float64]], NDArray[Any]], rows: Cells) -> Cells:
    """A function of float64 rows (n, m) with one value a row; unknown for unknown rows and rows without entries."""
    shape = rows.values.shape[:1]
    if shape == () or rows.values.shape[1] == 0:
        return Cells(np.zeros(shape), np.full(shape, UNKNOWN))
    return Cells(of_rows(_numbers(rows)), np.full(shape, KNOWN))
