"""How tokens are spread over experts: functions of a Trace that return plain arrays.

One row per entry of `trace.moe_layers` (Lm); T tokens, E experts, k chosen per token. Nothing here needs the engine. A
session may stand in for its trace; anything else raises ArgumentError.
Each docstring gives the value that chance alone would produce, for a number without it says little.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from colibri_lab.errors import ArgumentError, is_number, is_whole
from colibri_lab.trace import HasTrace, Trace, trace_of

__all__ = ["chance_band", "coactivation", "entropy", "load", "margin", "row_entropy", "row_margin"]

_MOST_TOKENS = 10**12  # of a chance band: its arrays have some million numbers then
_ROWS = 4096  # tokens worked on at a time: a block of 128 experts in float64 stays in cache


def load(trace: Trace | HasTrace) -> NDArray[np.int64]:
    """Tokens per expert, (Lm, E) int64. Every row adds up to T·k, less the slots without an expert.

    Chance: T·k/E each; `chance_band` tells how far a count may stray from it. A trace that counted and kept no tokens
    gives what it counted.
    Raises NotCapturedError when the trace has neither expert ids nor counts.
    """
    trace = trace_of(trace)
    out = np.zeros((len(trace.moe_layers), trace.num_experts), np.int64)
    for row, layer in enumerate(trace.moe_layers):
        counted = trace.get(f"layers.{layer}.moe.load")
        if counted is not None:
            out[row] = counted
            continue
        out[row] = np.bincount(_ids_from_1(trace, layer).ravel(), minlength=trace.num_experts + 1)[1:]
    return out


def _ids_from_1(trace: Trace, layer: int) -> NDArray[np.int64]:
    """(T, k) expert ids counted from 1, so that 0 is a slot without an expert and can be counted and dropped."""
    return trace[f"layers.{layer}.moe.expert_ids"].astype(np.int64) + 1


def entropy(trace: Trace | HasTrace, normalised: bool = False) -> NDArray[np.float64]:
    """How undecided the router was: H = −Σ p ln p over all experts, p = softmax(router logits), (Lm, T) in nats.

    `normalised` divides by ln E. A flat router has ln E (normalised 1), a router with one favourite 0; exp(H) reads as
    a number of experts. With one expert the normalised value is 0. A row that holds a NaN or +Inf has NaN; −Inf
    excludes an expert. This is the entropy of one token's choice; the entropy of the *load* is another thing. Raises
    NotCapturedError when the trace has no router logits.
    """
    trace = trace_of(trace)
    out = np.empty((len(trace.moe_layers), len(trace.ids)))
    for row, layer in enumerate(trace.moe_layers):
        out[row] = row_entropy(trace[f"layers.{layer}.moe.router_logits"], normalised)
    return out


def row_entropy(logits: NDArray[Any], normalised: bool = False) -> NDArray[np.float64]:
    """`entropy` of rows of logits (T, E) of any number type, worked out in float64; (T,)."""
    out = np.empty(len(logits))
    for start in range(0, len(logits), _ROWS):
        out[start : start + _ROWS] = _entropy(logits[start : start + _ROWS].astype(np.float64))
    if not normalised:
        return out
    return out / np.log(logits.shape[1]) if logits.shape[1] > 1 else out * 0


def _entropy(z: NDArray[np.float64]) -> NDArray[np.float64]:
    """H of softmax(z) per row. With d = z − max and S = Σ e^d it is ln S − Σ d e^d / S: no logarithm of a small p."""
    with np.errstate(invalid="ignore"):
        d = z - z.max(axis=1, keepdims=True)
        weight = np.exp(d)
        total = weight.sum(axis=1)
        spread = np.where(weight > 0, d * weight, 0.0).sum(axis=1)  # an excluded expert adds nothing: 0 ln 0 = 0
        h = np.log(total) - spread / total
    return np.where(np.isnan(total), np.nan, np.maximum(h, 0.0))


def margin(trace: Trace | HasTrace, of: Literal["scores", "logits"] = "scores") -> NDArray[np.float64]:
    """How nearly another expert was chosen: s(k) − s(k+1) on the selection scores, (Lm, T), never negative.

    `of="logits"` takes the router logits instead: the margin that the explorer shows, except where a bias or a mask
    makes scores rank the experts differently; there it shows scores and says so. If no score moves by half of it, the
    chosen set stays. 0 is an exact tie. +Inf where every expert is chosen (k = E) or the runner-up is excluded (−Inf);
    NaN for a row that holds a NaN. There is no chance value: it depends on the scale, which the gate rule decides for
    scores. Raises NotCapturedError when the trace has no scores (or no router
    logits), and ArgumentError for another `of`.
    """
    taps = {"scores": "scores", "logits": "router_logits"}
    if of not in taps:
        raise ArgumentError(f"a margin is of 'scores' or of 'logits', not {of!r}")
    trace = trace_of(trace)
    out = np.empty((len(trace.moe_layers), len(trace.ids)))
    for row, layer in enumerate(trace.moe_layers):
        out[row], _ = row_margin(trace[f"layers.{layer}.moe.{taps[of]}"], trace.top_k)
    return out


def row_margin(values: NDArray[Any], k: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """`margin` of rows of values (T, E) of any number type, and the larger magnitude of the two that it compares; (T,)
    each, worked out in float64.
    """
    experts = values.shape[1]
    gap, size = np.full(len(values), np.inf), np.full(len(values), np.inf)
    for start in range(0, len(values), _ROWS):
        rows = slice(start, start + _ROWS)
        block = values[rows].astype(np.float64)
        nan = np.isnan(block).any(axis=1)
        if k < experts:
            block.partition((experts - k - 1, experts - k), axis=1)
            last, following = block[:, experts - k], block[:, experts - k - 1]
            with np.errstate(invalid="ignore", over="ignore"):
                difference = last - following
            # Two equal infinities are a tie, not a NaN.
            gap[rows] = np.where(np.isnan(difference), 0.0, difference)
            size[rows] = np.maximum(np.abs(last), np.abs(following))
        gap[rows][nan] = np.nan
    return gap, size


def coactivation(trace: Trace | HasTrace) -> NDArray[np.float64]:
    """Who is chosen together: N_ij / N_i, the share of expert i's tokens that also went to j, (Lm, E, E), not
    symmetric.

    All pairs of a token's k experts count, whatever their order. The diagonal is 1. Chance: (k−1)/(E−1) off the
    diagonal (Mixtral 14.3 %, OLMoE 11.1 %). The row of an expert that no token chose is NaN: there is nothing to take a
    share of. (Definition: OLMoE, section 5.2.) Raises NotCapturedError when the trace has no expert ids.
    """
    trace = trace_of(trace)
    layers, experts, k = trace.moe_layers, trace.num_experts, trace.top_k
    out = np.empty((len(layers), experts, experts))
    for row, layer in enumerate(layers):
        ids, side = _ids_from_1(trace, layer), experts + 1
        pairs = np.zeros(side * side, np.int64)
        for slot in range(k):  # slot with every slot, itself included: the diagonal is N_i
            keys = ids[:, slot, None] * side + ids
            pairs += np.bincount(keys.ravel(), minlength=side * side)
        counts = pairs.reshape(side, side)[1:, 1:]
        with np.errstate(invalid="ignore"):
            out[row] = counts / counts.diagonal()[:, None]
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
