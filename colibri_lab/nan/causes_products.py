"""Products with weights, and the embedding."""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from colibri_lab.nan.causes_base import Array, Operation, Weight, Where, finite, weight_reason
from colibri_lab.nan.causes_weights import coarse
from colibri_lab.nan.causes_words import Reason, break_reason
from colibri_lab.nan.elementary import F32, dot, dot_break, product, rounded

__all__ = ["Embed", "Product"]

_CHECKED = 1 << 24  # products of two numbers that a check of single values may take; beyond, the record is believed


class Product(Operation):
    """x (rows, n) times weight (R, n), and a bias."""

    def __init__(
        self, point: str, words: str, dtype: str, x: F32, weight: Weight, bias: Weight | None = None,
        x_name: str = "x", accumulation: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(point, words, dtype)
        self.x, self.weight, self.bias, self.x_name, self.accumulation = x, weight, bias, x_name, accumulation

    def raw(self) -> F32:
        """(rows, R)."""
        return product(self.x, self.weight.array, None if self.bias is None else self.bias.array, self.accumulation)

    def ready(self) -> NDArray[np.bool_]:
        """A product reads the whole row."""
        return finite(self.x, -1)

    def at(self, where: Where) -> tuple[F32, F32]:
        """Only these dot products; NaN, as was found, for those beyond what can be checked."""
        if "unrounded" in self.__dict__:
            return super().at(where)
        rows, outputs = where
        free = self.culprits(where) < 0  # a bad weight needs no arithmetic
        n, some = self.x.shape[1], 1 << 12
        raw = np.full(len(rows), np.nan, np.float32)
        asked = np.flatnonzero(free)[: max(1, _CHECKED // n)]
        for start in range(0, len(asked), some):
            part = asked[start : start + some]
            raw[part] = dot(self.x[rows[part]], self.weight.array[outputs[part]].astype(np.float32), self.accumulation)
        if self.bias is not None:
            with np.errstate(all="ignore"):
                raw = rounded(raw + self.bias.array[outputs].astype(np.float32), self.accumulation)
        return raw, self.kept(raw)

    @cached_property
    def _first(self) -> NDArray[np.int64]:
        """Of each output its first bad element: of the weight, or (counted on from there) of the bias; −1 for none."""
        first = self.weight.first_bad
        if self.bias is not None:
            first = np.where((first < 0) & self.bias.bad, self.weight.array.size + np.arange(len(first)), first)
        return first

    def culprits(self, where: Where) -> NDArray[np.int64]:
        """By output."""
        first, size = self._first[where[1]], self.weight.array.size
        return np.where(first < size, coarse(np.where(first < size, first, -1), self.x.shape[1]), first)

    def cause(self, place: tuple[int, ...], came: float) -> Reason | None:
        """A bad weight, else the step of the sum that broke."""
        row, output = place
        flat, columns = int(self._first[output]), self.x.shape[1]
        x, weights = self.x[row], self.weight.array[output]
        if flat >= self.weight.array.size and self.bias is not None:
            return weight_reason(self.bias, output, 1.0, "1", came)
        if flat >= 0:
            return weight_reason(self.weight, flat, float(x[flat % columns]), self.x_name, came)
        bias = None if self.bias is None else float(self.bias.array[output])
        broke = dot_break(x, weights, bias, self.accumulation)
        if broke is None:
            return None
        wide = x.astype(np.float64) * weights.astype(np.float64)
        total = math.fsum(wide) + (bias or 0.0)
        names = self.x_name, f"{self.weight.name}[{output}, {broke.place}]"
        return break_reason(broke, names, self.accumulation or "float32", total)


class Embed(Operation):
    """The rows of the embedding, widened."""

    def __init__(self, point: str, dtype: str, ids: Array, weight: Weight) -> None:
        super().__init__(point, "embed = row of the token's id", dtype)
        self.ids, self.weight = ids, weight

    def raw(self) -> F32:
        """(rows, H)."""
        with np.errstate(invalid="ignore"):
            return np.asarray(self.weight.array[self.ids]).astype(np.float32)

    def ready(self) -> NDArray[np.bool_]:
        """An id is always finite."""
        return np.ones((len(self.ids), 1), bool)

    def culprits(self, where: Where) -> NDArray[np.int64]:
        """Each element stands for itself, unless there are too many."""
        rows = self.ids[where[0]]
        bad = self.weight.bad[rows, where[1]]
        width = self.weight.array.shape[1]
        return coarse(np.where(bad, rows * width + where[1], -1).astype(np.int64), width)

    def cause(self, place: tuple[int, ...], came: float) -> Reason | None:
        """The element of the table."""
        index = (int(self.ids[place[0]]), place[1])
        return Reason("embedding", "", (self.weight.operand(index),), weight=(self.weight.name, index))
