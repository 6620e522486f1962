"""What chance alone gives: the null line of each metric, for tokens that choose k of E experts blindly."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from colibri_lab.errors import ArgumentError, is_number, is_whole

__all__ = [
    "adjacent_chance",
    "blind_counts",
    "chance_band",
    "coactivation_chance",
    "largest_count",
    "overlap_chance",
    "usage_entropy_chance",
]

_MOST_TOKENS = 10**12  # of a chance band: its arrays have some million numbers then
_DRAWS = 400  # of a simulated null: its standard error is a twentieth of one draw's spread
_EXACT = 1 << 16  # tokens × experts up to which subsets are drawn one by one


def coactivation_chance(top_k: int, experts: int) -> float:
    """(k − 1) / (E − 1): the share of an expert's tokens that also go to a given other one; NaN for one expert."""
    return (top_k - 1) / (experts - 1) if experts > 1 else math.nan


def adjacent_chance(top_k: int, experts: int) -> float:
    """2 (k − 1) / (k (E − 1)): as above when only neighbours by rank count, k/2 times smaller. A slot has two
    neighbours, the first and the last have one.
    """
    return 2 / top_k * coactivation_chance(top_k, experts)


def overlap_chance(top_k: int, experts: int) -> float:
    """1 − C(E − k, k) / C(E, k): that two blind sets have an expert in common."""
    return 1 - math.comb(experts - top_k, top_k) / math.comb(experts, top_k)


def usage_entropy_chance(tokens: float, top_k: int, experts: int) -> float:
    """ln E − (E − k) / (2 T k): the expected entropy of the shares of T blind tokens, to first order in 1/T."""
    return math.log(experts) - (experts - top_k) / (2 * tokens * top_k) if tokens else math.nan


@lru_cache(maxsize=65536)
def largest_count(tokens: int, top_k: int, experts: int) -> float:
    """The expected largest load of T blind tokens, as a share of T: well above k/E while T is small. Simulated."""
    if tokens == 0:
        return math.nan
    return float(blind_counts(tokens, top_k, experts).max(axis=1).mean()) / tokens


def blind_counts(tokens: int, top_k: int, experts: int, draws: int = _DRAWS, seed: int = 0) -> NDArray[np.float64]:
    """(draws, E) loads of `tokens` that choose blindly, the same at every call.

    Exact for k = 1, and while T·E ≤ 65,536; beyond that normal with the exact mean and covariance.
    """
    rng = np.random.default_rng((seed, tokens, top_k, experts))
    if top_k == experts:
        out = np.full((draws, experts), float(tokens))
    elif top_k == 1:
        out = rng.multinomial(tokens, np.full(experts, 1 / experts), size=draws).astype(np.float64)
    elif tokens * experts <= _EXACT:
        out = np.empty((draws, experts))
        for draw in range(draws):
            keys = rng.random((tokens, experts), np.float32).argpartition(top_k - 1, axis=1)[:, :top_k]
            out[draw] = np.bincount(keys.ravel(), minlength=experts)
    else:
        p = top_k / experts
        g = rng.standard_normal((draws, experts))
        spread = math.sqrt(tokens * p * (1 - p) * experts / (experts - 1))
        out = tokens * p + spread * (g - g.mean(axis=1, keepdims=True))
    return out


def chance_band(tokens: int, top_k: int, experts: int, level: float = 0.95) -> tuple[float, float]:
    """(low, high): shares of `tokens` between which an expert's load lies with probability `level` if experts were
    drawn blindly.

    Blind drawing gives each token to an expert with probability k/E, so its count is binomial(T, k/E); the band holds
    the exact central quantiles, as shares of T. Tokens of one text are not independent, so the band is the least that
    chance does, not the most. Raises ArgumentError for what is no number, and for sizes that contradict each other.
    """
    sizes = (tokens, top_k, experts)
    if not (all(map(is_whole, sizes)) and is_number(level)):
        raise ArgumentError(f"chance_band takes three whole numbers and a level, not {(*sizes, level)!r:.80}")
    if not (0 <= tokens <= _MOST_TOKENS and 1 <= top_k <= experts and 0 < level < 1):
        raise ArgumentError(
            f"no band for {tokens} tokens, {top_k} of {experts} experts and level {level}; it takes 0 to "
            f"{_MOST_TOKENS:,} tokens, as many experts as are chosen or more, and a level between 0 and 1"
        )
    if tokens == 0:
        return 0.0, 1.0
    first, mass = _binomial(int(tokens), top_k / experts)
    cumulative = np.cumsum(mass)
    low, high = np.searchsorted(cumulative, ((1 - level) / 2, (1 + level) / 2)) + first
    return int(low) / tokens, min(int(high), tokens) / tokens


def _binomial(n: int, p: float) -> tuple[int, NDArray[np.float64]]:
    """(first, P(first), P(first + 1) …) of binomial(n, p), as far as float64 can tell the rest from 0.

    Built outwards from the mode, so that nothing over- or underflows before it is negligible. With variance v, the
    chance to lie further than t from the mean is at most 2 exp(−t² / (2v + 2t/3)) (Bernstein), and t = 12 √v + 60 makes
    that less than 1e-30.
    """
    if p >= 1:
        return n, np.ones(1)
    mode = min(int((n + 1) * p), n)
    reach = int(12 * (n * p * (1 - p)) ** 0.5) + 61  # the mode lies within 1 of the mean
    first, last = max(mode - reach, 0), min(mode + reach, n)
    odds = p / (1 - p)
    above = np.arange(mode, last, dtype=np.float64)
    below = np.arange(mode, first, -1, dtype=np.float64)
    rising = np.cumprod((n - above) / (above + 1) * odds)
    falling = np.cumprod(below / (n - below + 1) / odds)
    out = np.concatenate([falling[::-1], [1.0], rising])
    return first, out / out.sum()
