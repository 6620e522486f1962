"""Measured: a number with its interval and the value that chance gives; and the sums over blocks behind it.

Tokens of a text depend on one another, so the spread of a metric is not that of independent tokens. A trace is cut into
*blocks* of consecutive tokens; what is kept are sums over blocks of what was seen, of its squares and products. A
metric is a smooth function of the sums, so its variance follows from its gradient (the linearised variance of a ratio
under cluster sampling: Cochran, Sampling Techniques, chapter 6). Nothing is drawn at random, memory does not
grow with the number of tokens, and sums of two parts add up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.routing.intervals import score_interval, student_quantile

__all__ = ["Measured", "Moments", "Ratios", "Total"]

Floats = NDArray[np.float64]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Measured:
    """A metric with its uncertainty and what chance alone would give."""

    value: Floats  # NaN where there was nothing to measure
    low: Floats  # the interval at `level`, cell by cell, of value's shape; NaN where there are too few blocks for one
    high: Floats
    chance: Floats  # the null value, of a shape that broadcasts to value's; NaN where a metric has none
    level: float  # 0.95
    words: str  # how the interval was made and what the null is, in a sentence or two

    def __repr__(self) -> str:
        if self.value.size == 1:
            numbers = (x.ravel()[0] for x in (self.value, self.low, self.high, self.chance))
            shown = "{:.4g} [{:.4g}, {:.4g}], chance {:.4g}".format(*numbers)
        else:
            chance = f"{self.chance.ravel()[0]:.4g}" if self.chance.size == 1 else "by cell"
            shown = f"{self.value.shape} values, chance {chance}"
        return f"<Measured: {shown}, {self.level:.0%} interval. {self.words}>"


class Total:
    """A float64 sum that carries its own rounding error (Neumaier), so that the order of adding does not show."""

    def __init__(self, shape: Shape) -> None:
        self._high, self._low = np.zeros(shape), np.zeros(shape)

    def add(self, x: Any, at: Any = ...) -> None:
        """Adds `x` to the cells `at`."""
        old = self._high[at]
        new = old + x
        self._low[at] += np.where(np.abs(old) >= np.abs(x), (old - new) + x, (x - new) + old)
        self._high[at] = new

    def merge(self, other: Total) -> None:
        """Adds another sum."""
        self.add(other._high)
        self.add(other._low)

    @property
    def value(self) -> Floats:
        """The sum."""
        return np.asarray(self._high + self._low)


class Ratios:
    """Cells a / b, each the ratio of two sums over tokens: a share (b counts tokens) or a mean.

    `cells` is the shape of a; `over`, of as many axes, that of b, which broadcasts to it.
    """

    def __init__(self, cells: Shape, over: Shape) -> None:
        self._a, self._aa, self._ab = Total(cells), Total(cells), Total(cells)
        self._b, self._bb, self._blocks = Total(over), Total(over), Total(over)

    def add(self, a: NDArray[Any], b: NDArray[Any], at: Any = ...) -> None:
        """Block sums (blocks, …) of the cells `at`, as a whole."""
        a, b = a.astype(np.float64, copy=False), b.astype(np.float64, copy=False)
        self._a.add(a.sum(axis=0), at)
        self._aa.add(np.einsum("b...,b...->...", a, a), at)
        self._ab.add(np.einsum("b...,b...->...", a, np.broadcast_to(b, a.shape)), at)
        self._b.add(b.sum(axis=0), at)
        self._bb.add(np.einsum("b...,b...->...", b, b), at)
        self._blocks.add((b != 0).sum(axis=0), at)

    def merge(self, other: Ratios) -> None:
        """Adds what another one has seen."""
        for name, total in vars(self).items():
            total.merge(getattr(other, name))

    @property
    def sums(self) -> tuple[Floats, Floats]:
        """Σa of the cells' shape, Σb of its own."""
        return self._a.value, self._b.value

    @property
    def blocks(self) -> Floats:
        """How many blocks had anything in b, of b's shape."""
        return self._blocks.value

    @property
    def value(self) -> Floats:
        """Σa / Σb; NaN where Σb is 0."""
        a, b = self.sums
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(a / b)

    def variance(self) -> Floats:
        """Of `value`: blocks/(blocks − 1) · Σ (a − r b)² / (Σb)², the sum over blocks; NaN below two blocks."""
        r, b, n = self.value, self._b.value, self._blocks.value
        with np.errstate(divide="ignore", invalid="ignore"):
            square = self._aa.value - 2 * r * self._ab.value + r * r * self._bb.value
            return np.asarray(np.where(n >= 2, n / (n - 1), np.nan) * np.maximum(square, 0.0) / (b * b))

    def mean(self, level: float, chance: Any, words: str) -> Measured:
        """Value ± t · standard error."""
        value = self.value
        reach = student_quantile(self._blocks.value - 1, level) * np.sqrt(self.variance())
        return Measured(value, value - reach, value + reach, np.asarray(chance, np.float64), level, words + _MEAN)

    def share(self, level: float, chance: Any, words: str) -> Measured:
        """Wilson's interval at the number of independent tokens that would spread as the blocks do, at most Σb.

        Where blocks tell nothing (a share of 0 or 1, a single block) tokens are taken as independent.
        """
        value, b = self.value, self._b.value
        with np.errstate(divide="ignore", invalid="ignore"):
            alike = value * (1 - value) / self.variance()
        size = np.where(np.isfinite(alike) & (alike > 0), np.minimum(alike, b), np.where(b > 0, b, np.nan))
        freedom = np.where(self._blocks.value >= 2, self._blocks.value - 1, 10**9)
        low, high = score_interval(value, size, student_quantile(freedom, level))
        return Measured(value, low, high, np.asarray(chance, np.float64), level, words + _SHARE)


class Moments:
    """Sums over blocks of vectors x, and of x xᵀ: for metrics that are functions of several sums.

    `rows` is the shape of the cells that each have a vector of `size` numbers.
    """

    def __init__(self, rows: Shape, size: int) -> None:
        self._x, self._xx, self._blocks = Total((*rows, size)), Total((*rows, size, size)), Total(rows)

    def add(self, x: NDArray[Any], at: Any = ...) -> None:
        """Block sums (blocks, …, size) of the cells `at`; a block of zeros alone is none."""
        x = x.astype(np.float64, copy=False)
        self._x.add(x.sum(axis=0), at)
        rows = np.moveaxis(x, 0, -2)  # (…, blocks, size)
        self._xx.add(np.matmul(rows.swapaxes(-1, -2), rows), at)
        self._blocks.add((x != 0).any(axis=-1).sum(axis=0), at)

    def merge(self, other: Moments) -> None:
        """Adds what another one has seen."""
        for name, total in vars(self).items():
            total.merge(getattr(other, name))

    @property
    def sums(self) -> Floats:
        """Σx, (…, size)."""
        return self._x.value

    @property
    def blocks(self) -> Floats:
        """How many blocks had anything."""
        return self._blocks.value

    def variance(self, gradient: Floats, blocks: Floats | None = None) -> Floats:
        """Of a function of Σx with this gradient (…, size); it must not change when all of Σx grows by a factor."""
        n = self.blocks if blocks is None else blocks
        with np.errstate(divide="ignore", invalid="ignore"):
            square = np.einsum("...i,...ij,...j->...", gradient, self._xx.value, gradient)
            return np.asarray(np.where(n >= 2, n / (n - 1), np.nan) * np.maximum(square, 0.0))

    def measured(self, value: Floats, gradient: Floats, level: float, chance: Any, words: str) -> Measured:
        """Value ± t · standard error."""
        reach = student_quantile(self.blocks - 1, level) * np.sqrt(self.variance(gradient))
        return Measured(value, value - reach, value + reach, np.asarray(chance, np.float64), level, words + _MEAN)


_MEAN = " Interval: Student's t on the spread between blocks of tokens."
_SHARE = " Interval: Wilson's score, for as many independent tokens as spread like its blocks of tokens."
