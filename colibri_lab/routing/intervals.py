"""Intervals: Student's t and the score interval of a share, without SciPy."""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["holm", "score_interval", "student_quantile", "student_tail"]

Floats = NDArray[np.float64]

_NORMAL_FROM = 100_000  # degrees of freedom from which t is the normal distribution to 1e-5 of its quantiles


_erfc = np.vectorize(math.erfc, otypes=[np.float64])


def student_tail(t: Any, freedom: int) -> Floats:
    """P(|T| > |t|) of Student's t: I_x(ν/2, 1/2) at x = ν / (ν + t²); NaN stays NaN."""
    t = np.abs(np.asarray(t, np.float64))
    if freedom >= _NORMAL_FROM:
        return np.asarray(_erfc(t / math.sqrt(2)))
    with np.errstate(over="ignore", invalid="ignore"):
        x = np.where(np.isinf(t), 0.0, freedom / (freedom + t * t))
    return _incomplete_beta(x, freedom / 2, 0.5)


def student_quantile(freedom: Any, level: float) -> Floats:
    """The t with P(|T| ≤ t) = `level`, for every entry of `freedom`; NaN below one degree of freedom."""
    freedom = np.asarray(freedom, np.int64)
    kinds, places = np.unique(freedom, return_inverse=True)
    found = np.array([_quantile(int(n), level) for n in kinds], np.float64)
    return found[places].reshape(freedom.shape)


@lru_cache(maxsize=65536)
def _quantile(freedom: int, level: float) -> float:
    """Newton's steps on the tail, which is convex: from the normal quantile, which lies below, they only rise."""
    if freedom < 1:
        return math.nan
    if freedom == 1:
        return math.tan(math.pi * level / 2)
    t = NormalDist().inv_cdf((1 + level) / 2)
    log_scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - math.log(freedom * math.pi) / 2
    for _ in range(200 if freedom < _NORMAL_FROM else 0):
        density = math.exp(log_scale - (freedom + 1) / 2 * math.log1p(t * t / freedom))
        step = (float(student_tail(t, freedom)) - (1 - level)) / (2 * density)
        t += step
        if step <= 1e-14 * t:
            break
    return t


def _incomplete_beta(x: Floats, a: float, b: float) -> Floats:
    """I_x(a, b) by its continued fraction (Lentz), taken on the side where that converges fast."""
    swap = x > (a + 1) / (a + b + 2)
    near, p, q = np.where(swap, 1 - x, x), np.where(swap, b, a), np.where(swap, a, b)
    front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    with np.errstate(divide="ignore", invalid="ignore"):
        part = np.exp(front + p * np.log(near) + q * np.log1p(-near)) * _fraction(near, p, q) / p
    return np.asarray(np.clip(np.where(swap, 1 - part, part), 0.0, 1.0))


def _fraction(x: Floats, a: Floats, b: Floats) -> Floats:
    c, d = np.ones_like(x), 1 / _not_zero(1 - (a + b) * x / (a + 1))
    h = d
    for m in range(1, 2000):
        for factor in (
            m * (b - m) / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d, c = 1 / _not_zero(1 + factor * x * d), _not_zero(1 + factor * x / c)
            h = h * d * c
        if not (np.abs(d * c - 1) > 1e-15).any():
            break
    return np.asarray(h)


def _not_zero(x: Floats) -> Floats:
    return np.asarray(np.where(np.abs(x) < 1e-300, 1e-300, x))


def score_interval(share: Floats, size: Any, quantile: Any) -> tuple[Floats, Floats]:
    """Wilson's interval of a share seen in `size` independent draws: within [0, 1], and not a point at 0 or 1."""
    with np.errstate(divide="ignore", invalid="ignore"):
        z = np.asarray(quantile, np.float64) ** 2 / size
        middle = (share + z / 2) / (1 + z)
        reach = np.sqrt(z * share * (1 - share) + z * z / 4) / (1 + z)
    return np.clip(middle - reach, 0.0, share), np.clip(middle + reach, share, 1.0)


def holm(p: Floats) -> Floats:
    """p values corrected for their number (Holm 1979): the chance of any false finding stays below the level.

    NaN is no test and stays NaN.
    """
    flat = p.ravel()
    order = np.argsort(flat, kind="stable")[: int((~np.isnan(flat)).sum())]
    out = np.full(flat.shape, np.nan)
    out[order] = np.minimum(np.maximum.accumulate(flat[order] * (len(order) - np.arange(len(order)))), 1.0)
    return out.reshape(p.shape)
