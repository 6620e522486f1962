"""How evenly the experts are used: load, its entropy, its largest excess."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.errors import ArgumentError, is_whole
from colibri_lab.routing.measured import Measured, Moments, Ratios
from colibri_lab.routing.nulls import largest_count, usage_entropy_chance
from colibri_lab.routing.streaming import Accumulator, expert_ids, hot, in_blocks, tiles
from colibri_lab.trace import HasTrace, Trace, trace_of

__all__ = [
    "BatchViolation",
    "Usage",
    "balancedness",
    "batch_violation",
    "load",
    "max_violation",
    "usage",
    "usage_entropy",
]


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
        out[row] = np.bincount(ids_from_1(trace, layer).ravel(), minlength=trace.num_experts + 1)[1:]
    return out


def counted(trace: Trace) -> bool:
    """Whether a trace holds counts and no ids."""
    tap = "layers.{}.moe.{}".format
    return any(tap(n, "load") in trace and tap(n, "expert_ids") not in trace for n in trace.moe_layers)


def ids_from_1(trace: Trace, layer: int) -> NDArray[np.int64]:
    """(T, k) expert ids counted from 1, so that 0 is a slot without an expert and can be counted and dropped."""
    return expert_ids(trace, layer) + 1


class Usage(Accumulator):
    """Load of the experts over any number of traces, and what follows from it.

    `result`: share of the tokens that each expert received, (Lm, E); chance k/E. `entropy`, `violation` and
    `balancedness` are (Lm,). A token without any expert is no token of that layer. A trace that counted and kept no
    tokens is one block of as many tokens as fill its counts.
    """

    def _taps(self, trace: Trace) -> tuple[str, ...]:
        return () if counted(trace) else ("expert_ids",)

    def _add(self, trace: Trace, *more: Any) -> None:
        layers, experts = len(trace.moe_layers), trace.num_experts
        share = self.sums["share"] = Ratios((layers, experts), (layers, 1))
        slots = self.sums["slots"] = Moments((layers,), experts)
        if counted(trace):
            counts = load(trace)
            share.add(counts[None], counts.sum(axis=1, keepdims=True)[None] / trace.top_k)
            slots.add(counts[None])
            return
        for row, layer in enumerate(trace.moe_layers):
            for rows in tiles(trace.n_tokens, self.block, max(experts, experts * experts // self.block)):
                chosen = hot(expert_ids(trace, layer, rows), experts)
                counts = in_blocks(chosen, self.block)
                share.add(counts, in_blocks(np.asarray(chosen.any(axis=1, keepdims=True)), self.block), row)
                slots.add(counts, row)

    @property
    def counts(self) -> NDArray[np.int64]:
        """(Lm, E) tokens per expert."""
        return np.asarray(np.rint(self.sums["share"].sums[0]), np.int64)

    def result(self, level: float = 0.95) -> Measured:
        """Share of the tokens sent to each expert, (Lm, E)."""
        level = self._checked(level)
        words = "Share of tokens sent to the expert; chance: k/E."
        measured: Measured = self.sums["share"].share(level, self.top_k / self.num_experts, words)
        return measured

    def entropy(self, normalised: bool = True, level: float = 0.95) -> Measured:
        """Entropy of f, the shares of all used slots: −Σ f ln f, `normalised` by ln E; (Lm,). Even use has 1.

        Chance: what blind tokens of the same number give, a little below 1.
        """
        level = self._checked(level)
        f, n = self._shares()
        with np.errstate(divide="ignore", invalid="ignore"):
            log = np.where(f > 0, np.log(f), 0.0)
            h = -(f * log).sum(axis=1) + 0.0
            gradient = np.where(f > 0, -(log + h[:, None]) / n, 0.0)
        scale = np.log(self.num_experts) if normalised and self.num_experts > 1 else 1.0
        chance = [usage_entropy_chance(t, self.top_k, self.num_experts) / scale for t in self._tokens()]
        return self._measured(
            h / scale, gradient / scale, level, chance,
            "Entropy of the load's shares; chance: blind tokens of this number.",
        )  # fmt: skip

    def violation(self, level: float = 0.95) -> Measured:
        """MaxVio: (largest load − mean load) / mean load over all tokens, (Lm,); 0 is perfect balance.

        Chance: the mean of 400 simulated blind runs of as many tokens (it falls with their number), accurate to a
        twentieth of their spread.
        """
        level = self._checked(level)
        f, n = self._shares()
        value, gradient = self._largest(f, n)
        return self._measured(value, gradient, level, self._blind(), _VIOLATION)

    def balancedness(self, level: float = 0.95) -> Measured:
        """Mean load / largest load, (Lm,), as serving engines report it: 1 / (1 + MaxVio). 1 is perfect balance."""
        level = self._checked(level)
        f, n = self._shares()
        violation, gradient = self._largest(f, n)
        value = 1 / (1 + violation)
        blind = 1 / (1 + self._blind())
        return self._measured(value, -gradient * value[:, None] ** 2, level, blind, _BALANCEDNESS)

    def _shares(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        counts = self.sums["slots"].sums
        n = counts.sum(axis=1, keepdims=True)
        with np.errstate(invalid="ignore"):
            return np.where(n > 0, counts / n, np.nan), n

    def _largest(
        self, f: NDArray[np.float64], n: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """MaxVio = E · max f − 1, and its gradient by the counts."""
        most = f.max(axis=1, initial=-np.inf, keepdims=True) if len(f) else np.zeros((0, 1))
        first = np.arange(f.shape[1]) == (f.argmax(axis=1)[:, None] if len(f) else 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            gradient = self.num_experts * (first - most) / n
        return self.num_experts * most[:, 0] - 1, gradient

    def _tokens(self) -> list[int]:
        return [int(t) for t in self.sums["share"].sums[1][:, 0]]

    def _blind(self) -> NDArray[np.float64]:
        return np.array([blind_violation(t, self.top_k, self.num_experts) for t in self._tokens()], np.float64)

    def _measured(self, value: Any, gradient: Any, level: float, chance: Any, words: str) -> Measured:
        measured: Measured = self.sums["slots"].measured(value, gradient, level, chance, words)
        return measured


_VIOLATION = "(largest − mean) / mean load; chance: simulated blind tokens of this number."
_BALANCEDNESS = "Mean / largest load; chance: at the MaxVio of simulated blind tokens of this number."


def blind_violation(tokens: int, top_k: int, experts: int) -> float:
    """Expected MaxVio of `tokens` that choose blindly; NaN for none."""
    return largest_count(tokens, top_k, experts) * experts / top_k - 1


def usage(trace: Trace | HasTrace, level: float = 0.95) -> Measured:
    """Share of the tokens that each expert received, (Lm, E); chance k/E. `load` gives the counts."""
    return Usage().add(trace).result(level)


def usage_entropy(trace: Trace | HasTrace, normalised: bool = True, level: float = 0.95) -> Measured:
    """Entropy of the load's shares, (Lm,); see `Usage.entropy`."""
    return Usage().add(trace).entropy(normalised, level)


def max_violation(trace: Trace | HasTrace, level: float = 0.95) -> Measured:
    """Global MaxVio, (Lm,): over all tokens; see `Usage.violation`. `batch_violation` is the other version."""
    return Usage().add(trace).violation(level)


def balancedness(trace: Trace | HasTrace, level: float = 0.95) -> Measured:
    """Mean / largest load, (Lm,); see `Usage.balancedness`."""
    return Usage().add(trace).balancedness(level)


class BatchViolation(Accumulator):
    """MaxVio of one batch, averaged over batches of `batch` consecutive tokens, (Lm,).

    A trace's last batch is left out when it is short, for small batches are never in balance. Chance: simulated blind
    batches of this size.
    """

    def __init__(self, batch: int = 256) -> None:
        if not (is_whole(batch) and batch >= 1):
            raise ArgumentError(f"a batch is a whole number of tokens, 1 or more, not {batch!r:.80}")
        super().__init__(batch)

    def options(self) -> dict[str, Any]:
        """What was asked for at the start."""
        return {"batch": self.block}

    def _add(self, trace: Trace, *more: Any) -> None:
        sums = self.sums["violation"] = Ratios((len(trace.moe_layers),), (len(trace.moe_layers),))
        whole = trace.n_tokens // self.block * self.block
        for row, layer in enumerate(trace.moe_layers):
            for rows in tiles(whole, self.block, trace.num_experts):
                counts = in_blocks(hot(expert_ids(trace, layer, rows), trace.num_experts), self.block)
                mean = counts.mean(axis=1, dtype=np.float64)
                used = mean > 0
                excess = np.where(used, counts.max(axis=1) / np.where(used, mean, 1.0) - 1, 0.0)
                sums.add(excess, used, row)

    def result(self, level: float = 0.95) -> Measured:
        """Mean MaxVio of a batch, per layer."""
        level = self._checked(level)
        chance = blind_violation(self.block, self.top_k, self.num_experts)
        words = "MaxVio of a batch, mean over batches; chance: simulated blind batches."
        measured: Measured = self.sums["violation"].mean(level, chance, words)
        return measured


def batch_violation(trace: Trace | HasTrace, batch: int = 256, level: float = 0.95) -> Measured:
    """`BatchViolation` of one trace."""
    return BatchViolation(batch).add(trace).result(level)
