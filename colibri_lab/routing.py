"""How tokens are spread over experts: functions of a Trace that return plain arrays.

One row per entry of `trace.moe_layers` (Lm); T tokens, E experts, k chosen per token. Nothing here needs the engine.
Each docstring gives the value that chance alone would produce, for a number without it says little.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from colibri_lab.errors import ArgumentError
from colibri_lab.trace import Trace

__all__ = ["chance_band", "coactivation", "entropy", "load", "margin"]

_ROWS = 4096  # tokens worked on at a time: a block of 128 experts in float64 stays in cache


def load(trace: Trace) -> NDArray[np.int64]:
    """Tokens per expert, (Lm, E) int64. Every row adds up to T·k.

    Chance: T·k/E each; `chance_band` tells how far a count may stray from it.
    Raises NotCapturedError when the trace has no expert ids.
    """
    out = np.zeros((len(trace.moe_layers), trace.num_experts), np.int64)
    for row, layer in enumerate(trace.moe_layers):
        ids = trace[f"layers.{layer}.moe.expert_ids"]
        out[row] = np.bincount(ids.ravel(), minlength=trace.num_experts)
    return out


def entropy(trace: Trace, normalised: bool = False) -> NDArray[np.float64]:
    """How undecided the router was: H = −Σ p ln p over all experts, p = softmax(router logits), (Lm, T) in nats.

    `normalised` divides by ln E. A flat router has ln E (normalised 1), a router with one favourite 0; exp(H) reads as
    a number of experts. With one expert the normalised value is 0. A row that holds a NaN or +Inf has NaN; −Inf
    excludes an expert. This is the entropy of one token's choice; the entropy of the *load* is another thing. Raises
    NotCapturedError when the trace has no router logits.
    """
    out = np.empty((len(trace.moe_layers), len(trace.ids)))
    for row, layer in enumerate(trace.moe_layers):
        logits = trace[f"layers.{layer}.moe.router_logits"]
        for start in range(0, len(logits), _ROWS):
            out[row, start : start + _ROWS] = _row_entropy(logits[start : start + _ROWS].astype(np.float64))
    if not normalised:
        return out
    return out / np.log(trace.num_experts) if trace.num_experts > 1 else out * 0


def _row_entropy(z: NDArray[np.float64]) -> NDArray[np.float64]:
    """H of softmax(z) per row. With d = z − max and S = Σ e^d it is ln S − Σ d e^d / S: no logarithm of a small p."""
    with np.errstate(invalid="ignore"):
        d = z - z.max(axis=1, keepdims=True)
        weight = np.exp(d)
        total = weight.sum(axis=1)
        spread = np.where(weight > 0, d * weight, 0.0).sum(axis=1)  # an excluded expert adds nothing: 0 ln 0 = 0
        h = np.log(total) - spread / total
    return np.where(np.isnan(total), np.nan, np.maximum(h, 0.0))


def margin(trace: Trace) -> NDArray[np.float64]:
    """How nearly another expert was chosen: s(k) − s(k+1) on the selection scores, (Lm, T), never negative.

    If no score moves by half of it, the chosen set stays. 0 is an exact tie. +Inf where every expert is chosen (k = E)
    or the runner-up is excluded (−Inf); NaN for a row that holds a NaN. There is no chance value: it depends on the
    scores' scale, which the gate rule decides. Raises NotCapturedError when the trace has no scores.
    """
    k, experts = trace.top_k, trace.num_experts
    out = np.full((len(trace.moe_layers), len(trace.ids)), np.inf)
    for row, layer in enumerate(trace.moe_layers):
        scores = trace[f"layers.{layer}.moe.scores"]
        for start in range(0, len(scores), _ROWS):
            block = scores[start : start + _ROWS].astype(np.float64)
            nan = np.isnan(block).any(axis=1)
            if k < experts:
                block.partition((experts - k - 1, experts - k), axis=1)
                with np.errstate(invalid="ignore"):
                    gap = block[:, experts - k] - block[:, experts - k - 1]
                # Two equal infinities are a tie, not a NaN.
                out[row, start : start + _ROWS] = np.where(np.isnan(gap), 0.0, gap)
            out[row, start : start + _ROWS][nan] = np.nan
    return out


def coactivation(trace: Trace) -> NDArray[np.float64]:
    """Who is chosen together: N_ij / N_i, the share of expert i's tokens that also went to j, (Lm, E, E), not
    symmetric.

    All pairs of a token's k experts count, whatever their order. The diagonal is 1. Chance: (k−1)/(E−1) off the
    diagonal (Mixtral 14.3 %, OLMoE 11.1 %). The row of an expert that no token chose is NaN: there is nothing to take a
    share of. (Definition: OLMoE, section 5.2.) Raises NotCapturedError when the trace has no expert ids.
    """
    layers, experts, k = trace.moe_layers, trace.num_experts, trace.top_k
    out = np.empty((len(layers), experts, experts))
    for row, layer in enumerate(layers):
        ids = trace[f"layers.{layer}.moe.expert_ids"].astype(np.int64)
        pairs = np.zeros(experts * experts, np.int64)
        for slot in range(k):  # slot with every slot, itself included: the diagonal is N_i
            keys = ids[:, slot, None] * experts + ids
            pairs += np.bincount(keys.ravel(), minlength=experts * experts)
        counts = pairs.reshape(experts, experts)
        with np.errstate(invalid="ignore"):
            out[row] = counts / counts.diagonal()[:, None]
    return out


def chance_band(tokens: int, top_k: int, experts: int, level: float = 0.95) -> tuple[float, float]:
    """(low, high): shares of `tokens` between which an expert's load lies with probability `level` if experts were
    drawn blindly.

    Blind drawing gives each token to an expert with probability k/E, so its count is binomial(T, k/E); the band holds
    the exact central quantiles, as shares of T. Tokens of one text are not independent, so the band is the least that
    chance does, not the most. Raises ArgumentError for sizes that contradict each other.
    """
    if not (tokens >= 0 and 1 <= top_k <= experts and 0 < level < 1):
        raise ArgumentError(f"no band for {tokens} tokens, {top_k} of {experts} experts and level {level}")
    if tokens == 0:
        return 0.0, 1.0
    cumulative = np.cumsum(_binomial(tokens, top_k / experts))
    tail = (1 - level) / 2
    low = int(np.searchsorted(cumulative, tail))
    high = int(np.searchsorted(cumulative, 1 - tail))
    return low / tokens, min(high, tokens) / tokens


def _binomial(n: int, p: float) -> NDArray[np.float64]:
    """P(0 … n) of binomial(n, p), built outwards from the mode so that nothing over- or underflows before it is
    negligible.
    """
    if p >= 1:
        return np.concatenate([np.zeros(n), [1.0]])
    mode = min(int((n + 1) * p), n)
    out = np.zeros(n + 1)
    count = np.arange(n + 1, dtype=np.float64)
    odds = p / (1 - p)
    out[mode] = 1.0
    out[mode + 1 :] = np.cumprod((n - count[mode:n]) / (count[mode:n] + 1) * odds)
    out[:mode] = np.cumprod((count[1 : mode + 1] / (n - count[1 : mode + 1] + 1) / odds)[::-1])[::-1]
    total: float = out.sum()
    return np.asarray(out / total, np.float64)
