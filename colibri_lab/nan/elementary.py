"""The engine's float32 arithmetic in NumPy, operation by operation, and where one of them stopped being finite.

A dot product has 16 partial sums: element i enters sum i mod 16 by a fused multiply-add, in index order; then the sums
fold 16 → 8 → 4 → 2 → 1. A weighted sum is one chain of fused multiply-adds. Both can be told to round every partial sum
to a smaller format (`accumulation`), as an emulation does. Arrays are float32; sums run over the last axis.

Cosines and sines come from NumPy and the powers behind the rotary frequencies too: they may differ from the engine's in
the last bit, which moves no number across the end of a format but for one that stands at the very edge.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from colibri_lab.numerics import format_of, spacing

__all__ = [
    "Break", "chain", "chain_break", "dot", "dot_break", "exp", "fma", "product", "rms_norm", "root_of", "rotate",
    "rounded", "sigmoid", "silu", "softmax",
]  # fmt: skip

Array = NDArray[Any]
F32 = NDArray[np.float32]

LANES = 16
_BLOCK = 1 << 16  # partial sums that are worked on at a time: they stay in the caches


def rounded(x: Array, dtype: str | None, flush: bool = False, saturate: bool = False) -> F32:
    """float32 values rounded to the nearest number of a format, ties to even, and widened again.

    Beyond the end comes Inf, as IEEE 754 says; of float8_e4m3fn, which has none, NaN; or, with `saturate`, the largest
    number, then for ±Inf as well. `flush`: subnormal numbers of the format become zero.
    """
    single = np.asarray(x, np.float32)
    if (dtype is None or dtype == "float32") and not flush and not saturate:
        return single
    dtype = dtype or "float32"
    kind = format_of(dtype)
    with np.errstate(invalid="ignore"):
        wide = single.astype(np.float64)
    finite = np.isfinite(wide)
    step = np.asarray(spacing(np.where(finite, np.minimum(np.abs(wide), kind.largest), 0.0), kind))
    near = np.where(finite, np.rint(np.where(finite, wide, 0.0) / step) * step, wide)  # a power of two: both are exact
    beyond = np.abs(near) > kind.largest
    edge = np.nan if kind.name == "float8_e4m3fn" else np.inf
    if saturate:
        edge = kind.largest
    if flush:
        near = np.where(np.abs(near) < 2.0**kind.lowest, np.copysign(0.0, near), near)
    return cast(F32, np.where(beyond, np.copysign(edge, near), near).astype(np.float32))


def fma(a: Array, b: Array, c: Array) -> F32:
    """a · b + c with one rounding.

    The product of two float32 numbers is exact in float64. Rounding the float64 sum to float32 differs from rounding
    the exact one only where the float64 sum lies half way between two float32 numbers and is inexact itself; there it
    is first moved one step towards the exact value.
    """
    with np.errstate(all="ignore"):
        wide = np.multiply(a, b, dtype=np.float64)
        total = np.asarray(np.add(wide, c, dtype=np.float64))
        half_way = total.view(np.int64) & _DROPPED == _HALF
        half_way |= np.abs(total) < _SUBNORMAL  # where float32 has fewer digits
        places = np.nonzero(half_way)
        if len(places[0]):
            _moved(total, places, np.broadcast_to(wide, total.shape), np.broadcast_to(c, total.shape))
        return total.astype(np.float32)


_DROPPED, _HALF, _SUBNORMAL = (1 << 29) - 1, 1 << 28, 2.0**-126  # the bits that float32 lacks, the first of them alone


def _moved(total: Array, places: tuple[Array, ...], wide: Array, c: Array) -> None:
    """Rounds inexact sums to odd, in place: one step towards the exact value where the last bit is even."""
    some, one, other = total[places], wide[places], c[places].astype(np.float64)
    shadow = some - one
    error = (one - (some - shadow)) + (other - shadow)
    bits = some.view(np.int64)
    odd = (error != 0) & (bits & 1 == 0) & np.isfinite(some)
    bits[odd] += np.where((error > 0) == (some > 0), 1, -1)[odd]
    total[places] = some


def _folded(sums: F32, accumulation: str | None) -> F32:
    """Lane j plus lane j + n/2, for n = 16, 8, 4, 2."""
    with np.errstate(all="ignore"):
        while sums.shape[-1] > 1:
            half = sums.shape[-1] // 2
            sums = rounded(sums[..., :half] + sums[..., half:], accumulation)
    return sums[..., 0]


def _lanes(x: Array, w: Array, accumulation: str | None) -> F32:
    """The 16 partial sums (…, 16) before they fold."""
    n = x.shape[-1]
    sums = np.zeros((*np.broadcast_shapes(x.shape[:-1], w.shape[:-1]), LANES), np.float32)
    for start in range(0, n, LANES):
        width = min(LANES, n - start)
        a, b = x[..., start : start + width], w[..., start : start + width]
        sums[..., :width] = rounded(fma(a, b, sums[..., :width]), accumulation)
    return sums


def dot(x: Array, w: Array, accumulation: str | None = None) -> F32:
    """Dot products over the last axis; the others broadcast."""
    return _folded(_lanes(x, w, accumulation), accumulation)


def product(x: Array, weight: Array, bias: Array | None = None, accumulation: str | None = None) -> F32:
    """(T, R) of x (T, n) and weight (R, n) in any float dtype; a bias (R,) is added after the fold."""
    wide, rows = np.asarray(x, np.float32), weight.shape[0]
    out = np.empty((len(wide), rows), np.float32)
    some = max(1, _BLOCK // (LANES * max(1, len(wide))))
    for first in range(0, rows, some):
        part = np.asarray(weight[first : first + some]).astype(np.float32)
        out[:, first : first + some] = dot(wide[:, None], part[None], accumulation)
    if bias is not None:
        with np.errstate(all="ignore"):
            out = rounded(out + np.asarray(bias).astype(np.float32), accumulation)
    return out


def chain(factors: Array, values: Array, accumulation: str | None = None) -> F32:
    """Σ factors[…, j] · values[…, j, c] as one chain from j = 0; (…, c)."""
    shape = np.broadcast_shapes(factors.shape[:-1], values.shape[:-2])
    out = np.zeros((*shape, values.shape[-1]), np.float32)
    for j in range(factors.shape[-1]):
        out = rounded(fma(factors[..., j, None], values[..., j, :], out), accumulation)
    return out


# exp(x) = 2^n · e^r, n = round(x log2 e): the polynomial and the limits of the engine's float32.h.
_LOWEST, _HIGHEST, _LOG2E, _ROUND = np.asarray([-104.0, 89.0, 1.44269504, 12582912.0], np.float32)
_LN2_HIGH, _LN2_LOW = np.asarray([0.693359375, float.fromhex("-0x1.bd0106p-13")], np.float32)
_TERMS = ("0x1.6d10fcp-10", "0x1.120b62p-7", "0x1.55551ap-5", "0x1.5554dep-3", "0x1p-1")
_POLYNOMIAL = np.asarray([float.fromhex(term) for term in _TERMS], np.float32)


def exp(x: Array) -> F32:
    """e^x, the same bits as the engine's."""
    with np.errstate(all="ignore"):
        inside = np.clip(np.asarray(x, np.float32), _LOWEST, _HIGHEST)  # NaN stays
        shifted = fma(inside, _LOG2E, _ROUND)
        n = shifted - _ROUND
        r = fma(n, -_LN2_LOW, fma(n, -_LN2_HIGH, inside))
        q = np.full_like(r, _POLYNOMIAL[0])
        for term in _POLYNOMIAL[1:]:
            q = fma(q, r, term)
        e = np.float32(1) + fma(r * r, q, r)
        whole = np.where(np.isfinite(n), n, 0).astype(np.int32)
        first = whole >> 1
        return cast(F32, np.ldexp(np.ldexp(e, first), whole - first))


def sigmoid(x: Array) -> F32:
    """1 / (1 + e^−x)."""
    with np.errstate(all="ignore"):
        return cast(F32, np.float32(1) / (np.float32(1) + exp(-np.asarray(x, np.float32))))


def silu(x: Array) -> F32:
    """x / (1 + e^−x)."""
    single = np.asarray(x, np.float32)
    with np.errstate(all="ignore"):
        return cast(F32, single / (np.float32(1) + exp(-single)))


def softmax(x: Array) -> F32:
    """Over the last axis; element i adds into lane i mod 16."""
    single = np.asarray(x, np.float32)
    with np.errstate(all="ignore"):
        e = exp(single - single.max(-1, keepdims=True))
        lanes = np.zeros((*e.shape[:-1], LANES), np.float32)
        for i in range(e.shape[-1]):
            lanes[..., i % LANES] += e[..., i]
        return cast(F32, e / _folded(lanes, None)[..., None])


def root_of(x: Array, eps: float) -> F32:
    """(…, 1): sqrt(mean of x² + eps), what a norm divides by."""
    single = np.asarray(x, np.float32)
    with np.errstate(all="ignore"):
        mean = dot(single, single) / np.float32(single.shape[-1])
        return cast(F32, np.sqrt(mean + np.float32(eps))[..., None])


def rms_norm(x: Array, weight: Array, eps: float) -> F32:
    """weight · (x / sqrt(mean of x² + eps))."""
    with np.errstate(all="ignore"):
        return cast(F32, np.asarray(weight).astype(np.float32) * (np.asarray(x, np.float32) / root_of(x, eps)))


def rotate(x: F32, cos: F32, sin: F32) -> F32:
    """(T, heads, d): channel j turns with channel j + d/2; cos, sin (T, d/2). Products are rounded before the sum."""
    half = cos.shape[-1]
    a, b = x[..., :half], x[..., half : 2 * half]
    c, s = cos[:, None], sin[:, None]
    with np.errstate(all="ignore"):
        return cast(F32, np.concatenate([a * c - b * s, b * c + a * s, x[..., 2 * half :]], axis=-1))


@dataclass(frozen=True)
class Break:
    """Where a sum stopped being finite."""

    step: Literal["product", "sum", "fold", "bias", "opposite"]
    place: int  # element of the row ("product", "sum"), partial sum ("fold", "opposite")
    other: int  # the partial sum that the element enters; the second one of a fold; −1 of a chain
    before: float  # what was there
    a: float  # the factors of the product, or what was added and NaN
    b: float
    exact: float  # before + a · b without rounding


def dot_break(x: Array, w: Array, bias: float | None = None, accumulation: str | None = None) -> Break | None:
    """The first step of one dot product x · w (n,) of finite numbers that gives Inf or NaN; None when none does.

    When the sum ends as NaN, because partial sums overflowed with opposite signs, that fold is told ("opposite").
    """
    a, b = np.asarray(x, np.float32), np.asarray(w).astype(np.float32)
    sums = np.zeros(LANES, np.float32)
    first: Break | None = None
    for start in range(0, len(a), LANES):
        width = min(LANES, len(a) - start)
        part = slice(start, start + width)
        after = rounded(fma(a[part], b[part], sums[:width]), accumulation)
        broken = np.flatnonzero(~np.isfinite(after))
        if first is None and broken.size:
            lane = int(broken[0])
            first = _step(start + lane, lane, sums[lane], a[start + lane], b[start + lane], accumulation)
        sums[:width] = after
    signs = sums.copy()
    while len(sums) > 1:
        half = len(sums) // 2
        with np.errstate(all="ignore"):
            after = rounded(sums[:half] + sums[half:], accumulation)
        for j in range(half):
            if np.isnan(after[j]) and np.isinf(sums[j]) and np.isinf(sums[j + half]):
                up, down = (_lane_of(signs, sums[at], at, 2 * half) for at in (j, j + half))
                return Break("opposite", up, down, float(sums[j]), float(sums[j + half]), math.nan, math.nan)
            if first is None and not np.isfinite(after[j]):
                exact = float(sums[j]) + float(sums[j + half])
                first = Break("fold", j, j + half, float(sums[j]), float(sums[j + half]), math.nan, exact)
        sums = after
    if first is None and bias is not None:
        with np.errstate(all="ignore"):
            after = rounded(sums[:1] + np.float32(bias), accumulation)
        if not np.isfinite(after[0]):
            first = Break("bias", 0, 0, float(sums[0]), float(bias), math.nan, float(sums[0]) + float(bias))
    return first


def _lane_of(lanes: F32, value: Any, at: int, width: int) -> int:
    """The first of the lanes folded into sum `at` of `width` that had this infinite value itself, or `at`."""
    same = [int(lane) for lane in np.flatnonzero(lanes == value) if lane % width == at]
    return same[0] if same else at


def _step(place: int, other: int, before: Any, a: Any, b: Any, accumulation: str | None) -> Break:
    """The fused multiply-add that broke: by its product alone, or by the sum."""
    alone = float(a) * float(b)
    largest = format_of(accumulation or "float32").largest
    step: Literal["product", "sum"] = "product" if abs(alone) > largest else "sum"
    return Break(step, place, other, float(before), float(a), float(b), float(before) + alone)


def chain_break(factors: Array, values: Array, accumulation: str | None = None) -> Break | None:
    """The first step of one chain Σ factors[j] · values[j] of finite numbers that gives Inf or NaN."""
    total = np.zeros(1, np.float32)
    for j in range(len(factors)):
        after = rounded(fma(factors[j : j + 1], values[j : j + 1], total), accumulation)
        if not np.isfinite(after[0]):
            return _step(j, -1, total[0], factors[j], values[j], accumulation)
        total = after
    return None
