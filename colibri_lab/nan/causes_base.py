"""An operation of a pass at some token rows: what it made, what it had read, and why a value of its own broke."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.nan.causes_words import Reason, number, stored
from colibri_lab.nan.elementary import F32, rounded
from colibri_lab.nan.result import Operand

__all__ = ["Operation", "Weight", "Where", "finite", "nonfinite", "weight_reason"]

Array = NDArray[Any]
Where = tuple[NDArray[np.intp], ...]
"""Places of values as `np.nonzero` gives them: rows, then one array for each axis of a row."""

_EXPONENT = {"float16": (np.uint16, 0x7C00), "bfloat16": (np.uint16, 0x7F80), "float32": (np.uint32, 0x7F800000)}


def nonfinite(array: Array) -> NDArray[np.bool_]:
    """NaN and Inf, by their bits: no conversion touches a signalling NaN."""
    word, exponent = _EXPONENT[array.dtype.name]
    bits = np.ascontiguousarray(array).view(word)
    return np.asarray((bits & word(exponent)) == exponent)


def finite(x: Array, axes: int | tuple[int, ...] | None = None) -> NDArray[np.bool_]:
    """Whether elements are finite; over `axes`, which are kept with length 1, whether all are."""
    each: Any = np.isfinite(x)
    return np.asarray(each if axes is None else each.all(axes, keepdims=True))


def word_of(array: Array, index: tuple[int, ...]) -> int:
    """The bits of one element."""
    return int(np.ascontiguousarray(array[index]).reshape(1).view(_EXPONENT[array.dtype.name][0])[0])


class Weight:
    """A weight as it is stored, and which of its elements are not finite."""

    def __init__(self, name: str, array: Array) -> None:
        self.name, self.array = name, array

    @cached_property
    def bad(self) -> NDArray[np.bool_]:
        """Elements that are NaN or Inf."""
        return nonfinite(self.array)

    @cached_property
    def first_bad(self) -> NDArray[np.int64]:
        """Of each row the flat number of its first bad element, −1 for none. A vector has rows of one element."""
        rows = self.bad.reshape(len(self.bad), -1)
        flat = np.arange(len(rows)) * rows.shape[1] + rows.argmax(1)
        return np.where(rows.any(1), flat, -1).astype(np.int64)

    def operand(self, index: tuple[int, ...]) -> Operand:
        """The element with the bits that are stored."""
        value = float(np.asarray(self.array[index]).astype(np.float32))
        return Operand(f"{self.name}[{', '.join(map(str, index))}]", value, self.array.dtype.name,
                       word_of(self.array, index))  # fmt: skip


def weight_reason(weight: Weight, flat: int, met: float, met_name: str, came: float) -> Reason:
    """A value that is not finite because a weight is not. `met`: the finite number it was multiplied with."""
    index = tuple(int(i) for i in np.unravel_index(flat, weight.array.shape))
    operand = weight.operand(index)
    note = ""
    if math.isinf(operand.value) and math.isnan(came):
        inf = number(operand.value)
        note = f"{inf} × 0 = NaN" if met == 0 else f"{inf} met an infinity of the other sign in the sum"
    return Reason("weight value", note, (operand, Operand(met_name, met)), weight=(weight.name, index))


class Operation(ABC):
    """What every operation tells. `point` names what it makes, `words` says how, `dtype` is what that is stored in.

    Rows are token rows in ascending order; `value` has one row for each.
    """

    def __init__(self, point: str, words: str, dtype: str = "float32") -> None:
        self.point, self.words, self.dtype = point, words, dtype
        self.flush = self.saturate = False

    @abstractmethod
    def raw(self) -> F32:
        """What the arithmetic gives before it is rounded to `dtype`."""

    @abstractmethod
    def ready(self) -> NDArray[np.bool_]:
        """Where all that was read is finite; broadcasts to the shape of `value`."""

    @abstractmethod
    def cause(self, place: tuple[int, ...], came: float) -> Reason | None:
        """Why `raw` is not finite at a place (row, then the index in it); `came`: what did come out."""

    @cached_property
    def unrounded(self) -> F32:
        """`raw`, worked out once."""
        return self.raw()

    @cached_property
    def value(self) -> F32:
        """What is stored."""
        return self.kept(self.unrounded)

    def kept(self, raw: F32) -> F32:
        """As the run stores it."""
        return rounded(raw, self.dtype, self.flush, self.saturate)

    def at(self, where: Where) -> tuple[F32, F32]:
        """(before, after rounding) at some places."""
        return self.unrounded[where], self.value[where]

    def culprits(self, where: Where) -> NDArray[np.int64]:
        """Values of equal numbers have the same weight element as their culprit; −1: no weight is."""
        return np.full(len(where[0]), -1, np.int64)

    def why(self, place: tuple[int, ...], came: float) -> Reason | None:
        """The reason at a place; None when the arithmetic gives a finite value there."""
        raw, kept = (float(each[0]) for each in self.at(tuple(np.asarray([i]) for i in place)))
        if math.isfinite(kept):
            return None
        if not math.isfinite(raw):
            return self.cause(place, came)
        return self.beyond(place, raw)

    def beyond(self, place: tuple[int, ...], raw: float) -> Reason:
        """Why a finite result does not fit into the format that it is stored in."""
        return stored(self.words.split(" = ")[0], raw, self.dtype)
