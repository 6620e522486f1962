"""Which experts go together: in one layer (co-activation) and from layer to layer.

Two public scripts count fewer pairs than the definition: only neighbours by rank in a layer, only equal ranks between
layers. Both variants are here under names of their own, each with its own chance value.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from colibri_lab.errors import ArgumentError, is_whole
from colibri_lab.routing.measured import Measured, Ratios
from colibri_lab.routing.nulls import adjacent_chance, coactivation_chance
from colibri_lab.routing.streaming import BLOCK, Accumulator, expert_ids, hot, in_blocks, tiles
from colibri_lab.routing.usage import ids_from_1
from colibri_lab.trace import HasTrace, Trace, trace_of

Ids = NDArray[np.int64]

__all__ = ["Coactivation", "CrossLayer", "adjacent_coactivation", "coactivation", "cross_layer"]


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
        ids, side = ids_from_1(trace, layer), experts + 1
        pairs = np.zeros(side * side, np.int64)
        for slot in range(k):  # slot with every slot, itself included: the diagonal is N_i
            keys = ids[:, slot, None] * side + ids
            pairs += np.bincount(keys.ravel(), minlength=side * side)
        counts = pairs.reshape(side, side)[1:, 1:]
        with np.errstate(invalid="ignore"):
            out[row] = counts / counts.diagonal()[:, None]
    return out


class Coactivation(Accumulator):
    """N_ij / N_i, the share of expert i's tokens that also went to j, (Lm, E, E); see `coactivation`.

    pairs="all": every pair of a token's experts; chance (k − 1)/(E − 1). pairs="adjacent": only neighbours by rank, as
    OLMoE's script counts; k/2 times smaller, chance 2 (k − 1)/(k (E − 1)). The chance of the diagonal is 1 (all) or
    0 (adjacent).
    """

    def __init__(self, pairs: Literal["all", "adjacent"] = "all", block: int = BLOCK) -> None:
        super().__init__(block)
        if pairs not in ("all", "adjacent"):
            raise ArgumentError(f"pairs are 'all' or 'adjacent', not {pairs!r:.80}")
        self.pairs = pairs

    def options(self) -> dict[str, Any]:
        """What was asked for at the start."""
        return {"pairs": self.pairs, **super().options()}

    def _add(self, trace: Trace, *more: Any) -> None:
        layers, experts = trace.moe_layers, trace.num_experts
        sums = self.sums["pairs"] = Ratios((len(layers), experts, experts), (len(layers), experts, 1))
        for row, layer in enumerate(layers):
            for rows in tiles(trace.n_tokens, self.block, _width(experts, trace.top_k, self.block)):
                ids = expert_ids(trace, layer, rows)
                chosen = hot(ids, experts)
                if self.pairs == "all":
                    counts = _together(*_every(ids, ids), experts, self.block)
                else:
                    counts = _together(ids[:, :-1], ids[:, 1:], experts, self.block)
                    counts = counts + counts.transpose(0, 2, 1)
                sums.add(counts, in_blocks(chosen, self.block)[:, :, None], row)

    def result(self, level: float = 0.95) -> Measured:
        """Shares of common tokens; the row of an expert that no token chose is NaN."""
        level = self._checked(level)
        k, experts = self.top_k, self.num_experts
        off, on = (coactivation_chance(k, experts), 1.0) if self.pairs == "all" else (adjacent_chance(k, experts), 0.0)
        chance = np.where(np.eye(experts, dtype=bool), on, off)
        words = {
            "all": "Share of expert i's tokens that also went to j; chance: (k−1)/(E−1).",
            "adjacent": "Share of expert i's tokens with j next to it by rank; chance: 2(k−1)/(k(E−1)).",
        }[self.pairs]
        measured: Measured = self.sums["pairs"].share(level, chance, words)
        return measured


def adjacent_coactivation(trace: Trace | HasTrace, level: float = 0.95) -> Measured:
    """Co-activation as OLMoE's script counts it: neighbours by rank only, (Lm, E, E).

    k/2 times smaller than `coactivation`, with a chance value of its own: 2 (k − 1)/(k (E − 1)), 0.0278 for OLMoE.
    """
    return Coactivation("adjacent").add(trace).result(level)


class CrossLayer(Accumulator):
    """How often expert i of a layer and j of the layer `step` MoE layers later serve the same token, (Lm − step, E, E).

    Shares of all slot pairs, so that each layer adds up to 1; chance 1/E². pairs="all" counts each slot of one layer
    with each of the other; "zipped" only slots of equal rank, as OLMoE's script does (same chance, fewer pairs).
    """

    def __init__(self, step: int = 1, pairs: Literal["all", "zipped"] = "all", block: int = BLOCK) -> None:
        super().__init__(block)
        if not (is_whole(step) and step >= 1):
            raise ArgumentError(f"a step is a whole number of MoE layers, 1 or more, not {step!r:.80}")
        if pairs not in ("all", "zipped"):
            raise ArgumentError(f"pairs are 'all' or 'zipped', not {pairs!r:.80}")
        self.step, self.pairs = int(step), pairs

    def options(self) -> dict[str, Any]:
        """What was asked for at the start."""
        return {"step": self.step, "pairs": self.pairs, **super().options()}

    def _add(self, trace: Trace, *more: Any) -> None:
        layers, experts, k = trace.moe_layers, trace.num_experts, trace.top_k
        steps = list(zip(layers, layers[self.step :], strict=False))
        sums = self.sums["pairs"] = Ratios((len(steps), experts, experts), (len(steps), 1, 1))
        for row, (layer, later) in enumerate(steps):
            for rows in tiles(trace.n_tokens, self.block, _width(experts, k, self.block)):
                ids, ids_later = expert_ids(trace, layer, rows), expert_ids(trace, later, rows)
                pairs = _every(ids, ids_later) if self.pairs == "all" else (ids, ids_later)
                counts = _together(*pairs, experts, self.block)
                sums.add(counts, counts.sum(axis=(1, 2), keepdims=True), row)

    def result(self, level: float = 0.95) -> Measured:
        """Shares of slot pairs."""
        level = self._checked(level)
        words = "Share of the slot pairs of two layers; chance: 1/E²."
        if self.pairs == "zipped":
            words = "Share of the slot pairs of equal rank of two layers; chance: 1/E²."
        measured: Measured = self.sums["pairs"].share(level, 1 / self.num_experts**2, words)
        return measured


def cross_layer(
    trace: Trace | HasTrace, step: int = 1, pairs: Literal["all", "zipped"] = "all", level: float = 0.95
) -> Measured:
    """`CrossLayer` of one trace."""
    return CrossLayer(step, pairs).add(trace).result(level)


def _width(experts: int, slots: int, block: int) -> int:
    """Numbers per token of a step: its pairs, and its part of the (E, E) counts of a block."""
    return max(slots * slots, experts * experts // block)


def _every(one: Ids, other: Ids) -> tuple[Ids, Ids]:
    """All pairs of a slot of `one` with a slot of `other`, (rows, slots · slots) each."""
    pairs = np.broadcast_arrays(one[:, :, None], other[:, None, :])
    return pairs[0].reshape(len(one), -1), pairs[1].reshape(len(one), -1)


def _together(one: Ids, other: Ids, experts: int, block: int) -> Ids:
    """(blocks, E, E) how often i stands in `one` and j at the same place of `other` (rows, pairs); −1 is nobody."""
    side, blocks = experts + 1, -(-len(one) // block)
    numbers = (np.arange(len(one)) // block)[:, None]
    keys = (numbers * side + one + 1) * side + other + 1
    counts = np.bincount(keys.ravel(), minlength=blocks * side * side)
    return np.asarray(counts.reshape(blocks, side, side)[:, 1:, 1:])
