"""One token's choice: how undecided the router was, and how nearly another expert was chosen.

Three entropies go by the name of router entropy elsewhere. Here they are `entropy` (of one token's probabilities over
all experts), `gate_entropy` (of one token's gates over its chosen experts) and `usage_entropy` (of the load).
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from colibri_lab.errors import ArgumentError
from colibri_lab.numerics import format_of, spacing
from colibri_lab.routing.measured import Measured, Ratios
from colibri_lab.routing.streaming import BLOCK, Accumulator, in_blocks, tiles
from colibri_lab.trace import HasTrace, Trace, trace_of

__all__ = [
    "MeanEntropy",
    "Ties",
    "entropy",
    "gate_entropy",
    "margin",
    "mean_entropy",
    "probabilities",
    "row_entropy",
    "row_margin",
    "tie_share",
    "ties",
]

_ROWS = 4096  # tokens worked on at a time: a block of 128 experts in float64 stays in cache


def entropy(trace: Trace | HasTrace, normalised: bool = False) -> NDArray[np.float64]:
    """How undecided the router was: H = −Σ p ln p over all experts, p = softmax(router logits), (Lm, T) in nats.

    `normalised` divides by ln E. A flat router has ln E (normalised 1), a router with one favourite 0; exp(H) reads as
    a number of experts. With one expert the normalised value is 0. A row that holds a NaN or +Inf has NaN; −Inf
    excludes an expert. This is the entropy of one token's choice; the entropy of the *load* is another thing. Raises
    NotCapturedError when the trace has no router logits.
    """
    trace = trace_of(trace)
    out = np.empty((len(trace.moe_layers), trace.n_tokens))
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


def gate_entropy(trace: Trace | HasTrace, normalised: bool = False) -> NDArray[np.float64]:
    """How evenly a token's gates are spread over its chosen experts: −Σ q ln q, q = gates / their sum, (Lm, T) nats.

    `normalised` divides by ln k (0 for k = 1): equal gates have 1, one gate that is all has 0. A gate of 0 adds
    nothing. NaN for a token without a positive gate, and for one with a negative or non-finite gate. Raises
    NotCapturedError when the trace has no gates.
    """
    trace = trace_of(trace)
    out = np.empty((len(trace.moe_layers), trace.n_tokens))
    for row, layer in enumerate(trace.moe_layers):
        out[row] = _gate_entropy(trace[f"layers.{layer}.moe.gates"], normalised)
    return out


def _gate_entropy(gates: NDArray[Any], normalised: bool) -> NDArray[np.float64]:
    with np.errstate(divide="ignore", invalid="ignore"):
        g = gates.astype(np.float64)
        q = g / g.sum(axis=1, keepdims=True)
        h = -np.where(q > 0, q * np.log(q), 0.0).sum(axis=1) + 0.0
    odd = ~np.isfinite(q).all(axis=1) | (g < 0).any(axis=1)
    scale = np.log(gates.shape[1]) if normalised and gates.shape[1] > 1 else 1.0
    return np.asarray(np.where(odd, np.nan, h / scale))


def probabilities(trace: Trace, layer: int, rows: slice = slice(None)) -> NDArray[np.float64]:
    """(rows, E) what the router's logits mean as a distribution over all experts: their softmax.

    Where the trace's gate rule is a sigmoid, the sigmoids divided by their sum. A row that holds a NaN or +Inf is NaN.
    """
    z = trace[f"layers.{layer}.moe.router_logits"][rows].astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        if "sigmoid" in trace.meta["gate_rule"]:
            odd = np.isnan(z).any(axis=1, keepdims=True) | np.isposinf(z).any(axis=1, keepdims=True)
            p = 1 / (1 + np.exp(-z))
            return np.asarray(np.where(odd, np.nan, p / p.sum(axis=1, keepdims=True)))
        p = np.exp(z - z.max(axis=1, keepdims=True, initial=-np.inf))
        return np.asarray(p / p.sum(axis=1, keepdims=True))


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
    tap = _tap(of)
    trace = trace_of(trace)
    out = np.empty((len(trace.moe_layers), trace.n_tokens))
    for row, layer in enumerate(trace.moe_layers):
        out[row], _ = row_margin(trace[f"layers.{layer}.moe.{tap}"], trace.top_k)
    return out


def _tap(of: str) -> str:
    taps = {"scores": "scores", "logits": "router_logits"}
    if of not in taps:
        raise ArgumentError(f"a margin is of 'scores' or of 'logits', not {of!r}")
    return taps[of]


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


def ties(trace: Trace | HasTrace, dtype: Any = None, of: Literal["logits", "scores"] = "logits") -> NDArray[np.bool_]:
    """Which choices a number format can not tell from a tie, (Lm, T): margin < spacing at the larger of the two values.

    Between 8 and 16 the spacing is 0.0625 for bfloat16 and 0.0078 for float16. `dtype`: the format in which the router
    computed; None takes the trace's `arithmetic`, or float32. False where every expert is chosen, where the runner-up
    is excluded, and for a row with a NaN. There is no chance value: it depends on the scale of the logits. Raises
    NotCapturedError when the trace has no router logits (or scores).
    """
    trace = trace_of(trace)
    kind = format_of(trace.meta.get("arithmetic", "float32") if dtype is None else dtype)
    out = np.zeros((len(trace.moe_layers), trace.n_tokens), bool)
    for row, layer in enumerate(trace.moe_layers):
        gap, size = row_margin(trace[f"layers.{layer}.moe.{_tap(of)}"], trace.top_k)
        with np.errstate(invalid="ignore"):
            out[row] = gap < np.where(np.isnan(spacing(size, kind)), 0.0, spacing(size, kind))
    return out


class MeanEntropy(Accumulator):
    """The mean over tokens of `entropy` (of="router") or `gate_entropy` (of="gates"), normalised; (Lm,) each.

    Chance: 1, a router that knows nothing. Rows without a finite value are left out.
    """

    def __init__(self, of: Literal["router", "gates"] = "router", block: int = BLOCK) -> None:
        super().__init__(block)
        if of not in ("router", "gates"):
            raise ArgumentError(
                f"a mean entropy is of 'router' or of 'gates', not {of!r:.80} (of the load: usage_entropy)"
            )
        self.of = of

    def options(self) -> dict[str, Any]:
        """What was asked for at the start."""
        return {"of": self.of, **super().options()}

    def _taps(self, trace: Trace) -> tuple[str, ...]:
        return ("router_logits" if self.of == "router" else "gates",)

    def _add(self, trace: Trace, *more: Any) -> None:
        sums = self.sums["h"] = Ratios((len(trace.moe_layers),), (len(trace.moe_layers),))
        tap = self._taps(trace)[0]
        for row, layer in enumerate(trace.moe_layers):
            values = trace[f"layers.{layer}.moe.{tap}"]
            for rows in tiles(len(values), self.block, values.shape[1]):
                if self.of == "router" and "sigmoid" not in trace.meta["gate_rule"]:
                    h = row_entropy(values[rows], normalised=True)
                elif self.of == "router":
                    h = _gate_entropy(probabilities(trace, layer, rows), normalised=True)
                else:
                    h = _gate_entropy(values[rows], normalised=True)
                known = np.isfinite(h)
                sums.add(in_blocks(np.where(known, h, 0.0), self.block), in_blocks(known, self.block), row)

    def result(self, level: float = 0.95) -> Measured:
        """Mean entropy per layer."""
        level = self._checked(level)
        words = "Mean normalised entropy of the router's probabilities; chance: a flat router."
        if self.of == "gates":
            words = "Mean normalised entropy of the chosen experts' gates; chance: equal gates."
        chance = float(self.num_experts > 1) if self.of == "router" else float(self.top_k > 1)
        measured: Measured = self.sums["h"].mean(level, chance, words)
        return measured


def mean_entropy(trace: Trace | HasTrace, of: Literal["router", "gates"] = "router", level: float = 0.95) -> Measured:
    """`MeanEntropy` of one trace."""
    return MeanEntropy(of).add(trace).result(level)


class Ties(Accumulator):
    """The share of tokens whose choice is a tie in a number format, (Lm,); see `ties`. No chance value."""

    def __init__(self, dtype: Any = None, of: Literal["logits", "scores"] = "logits", block: int = BLOCK) -> None:
        super().__init__(block)
        self.dtype, self.of = None if dtype is None else format_of(dtype).name, of
        _tap(of)

    def options(self) -> dict[str, Any]:
        """What was asked for at the start."""
        return {"dtype": self.dtype, "of": self.of, **super().options()}

    def _taps(self, trace: Trace) -> tuple[str, ...]:
        return (_tap(self.of),)

    def _add(self, trace: Trace, *more: Any) -> None:
        sums = self.sums["ties"] = Ratios((len(trace.moe_layers),), (1,))
        found = in_blocks(ties(trace, self.dtype, self.of).T, self.block)
        sums.add(found, in_blocks(np.ones((trace.n_tokens, 1), np.int64), self.block))

    def result(self, level: float = 0.95) -> Measured:
        """Share of ties per layer."""
        level = self._checked(level)
        words = "Share of tokens whose margin is below the format's spacing; no chance value."
        measured: Measured = self.sums["ties"].share(level, np.nan, words)
        return measured


def tie_share(
    trace: Trace | HasTrace, dtype: Any = None, of: Literal["logits", "scores"] = "logits", level: float = 0.95
) -> Measured:
    """`Ties` of one trace."""
    return Ties(dtype, of).add(trace).result(level)
