"""How far B strays from A in one tap.

NaN at the same place on both sides, or the same infinity, counts as equal; a NaN or an infinity on one side only is an
error of inf. Largest values and cosines are of the places where both are finite. All is worked out in float64, where
every stored number and every difference of two float32 numbers of like size is exact.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.difference.pair import Block

__all__ = ["TapError", "steps", "tap_error"]

Array = NDArray[Any]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class TapError:
    """One tap of both runs compared; the rows are those of `Pair.rows`."""

    max_abs: float  # largest |B - A|
    largest: float  # largest |A|
    cosine: float  # NaN when one is all zeros
    ulp: float  # largest distance in float32 steps
    same_bits: bool
    tokens: NDArray[np.int64]  # (rows,)
    experts: NDArray[np.int64] | None
    by_row: Floats  # (rows,) largest |B - A| of each row
    sums: Floats  # (3, rows) Σ A·B, Σ A² and Σ A⁴ of each row

    @property
    def max_rel(self) -> float:
        """Largest |B - A| over the largest |A| of the tap; inf beside an A that is all zeros."""
        return float(self.relative_by_row.max(initial=0.0))

    @property
    def relative_by_row(self) -> Floats:
        """(rows,) the same of each row, over the largest |A| of the whole tap."""
        if self.largest:
            return self.by_row / self.largest
        return np.where(self.by_row > 0, np.inf, 0.0)

    def drift(self, rows: NDArray[np.bool_]) -> tuple[float, float]:
        """(f − 1, n) over some rows: f · A is as near to B as a multiple of A can be, and n tells of how many numbers
        of like size that speaks: (Σ A²)² / Σ A⁴.

        Roundings have either sign, so f − 1 shrinks with √n, while a constant that differs shows in full. (0, 0) where
        A is all zeros.
        """
        dot, square, fourth = self.sums[:, rows].sum(axis=1)
        return (float((dot - square) / square), float(square**2 / fourth)) if fourth > 0 else (0.0, 0.0)

    def beyond(self, relative: float) -> NDArray[np.bool_]:
        """(rows,) which rows are beyond a tolerance."""
        return self.by_row > relative * self.largest


def steps(x: Array, y: Array) -> Floats:
    """How many float32 numbers lie between two, as float64; both zeros are one place, NaN beside NaN is none apart."""
    distance = np.abs(_ordered(x) - _ordered(y)).astype(np.float64)
    nan_x, nan_y = np.isnan(x), np.isnan(y)
    return np.where(nan_x | nan_y, np.where(nan_x & nan_y, 0.0, np.inf), distance)


def _ordered(x: Array) -> NDArray[np.int64]:
    with np.errstate(over="ignore"):
        bits = np.ascontiguousarray(x, np.float32).view(np.int32).astype(np.int64)
    return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def tap_error(blocks: Iterable[Block]) -> TapError:
    """Compares the blocks of a tap (`Pair.blocks`), one after another."""
    max_abs, largest, ulp, same = 0.0, 0.0, 0.0, True
    square_b = 0.0
    tokens, experts, by_row, sums = [], [], [], []
    for block in blocks:
        rows = len(block.tokens)
        a, b = block.a.reshape(rows, -1), block.b.reshape(rows, -1)
        bits = bool(((a == b) & (np.signbit(a) == np.signbit(b)) | (np.isnan(a) & np.isnan(b))).all())
        wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
        fine = np.isfinite(wide_a) & np.isfinite(wide_b)
        if not fine.all():
            equal = (wide_a == wide_b) | (np.isnan(wide_a) & np.isnan(wide_b))
            odd = np.where(equal | fine, 0.0, np.inf)
            size_a = np.where(np.isfinite(wide_a), np.abs(wide_a), 0.0)
            wide_a, wide_b = np.where(fine, wide_a, 0.0), np.where(fine, wide_b, 0.0)
            error = np.abs(wide_b - wide_a) + odd
        else:
            size_a, error = np.abs(wide_a), np.abs(wide_b - wide_a)
        rows_error = error.max(axis=1, initial=0.0)
        max_abs = max(max_abs, float(rows_error.max(initial=0.0)))
        largest = max(largest, float(size_a.max(initial=0.0)))
        if not bits:
            ulp = max(ulp, float(steps(a, b).max(initial=0.0)))
        same &= bits
        squares = wide_a * wide_a
        sums.append(np.stack([(wide_a * wide_b).sum(axis=1), squares.sum(axis=1), (squares * squares).sum(axis=1)]))
        square_b += float(np.vdot(wide_b, wide_b))
        tokens.append(block.tokens)
        if block.experts is not None:
            experts.append(block.experts)
        by_row.append(rows_error)
    every = np.concatenate([np.empty((3, 0)), *sums], axis=1)
    dot, square_a = float(every[0].sum()), float(every[1].sum())
    scale = np.sqrt(square_a) * np.sqrt(square_b)
    none = np.empty(0, np.int64)
    return TapError(
        max_abs=max_abs,
        largest=largest,
        cosine=float(np.clip(dot / scale, -1.0, 1.0)) if scale > 0 else np.nan,
        ulp=ulp,
        same_bits=same,
        tokens=np.concatenate([none, *tokens]),
        experts=np.concatenate(experts) if experts else None,
        by_row=np.concatenate([np.empty(0), *by_row]),
        sums=every,
    )
