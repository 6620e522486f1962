"""Agreement of two runs over the same tokens: router saturation when they are a checkpoint and the final model."""

from __future__ import annotations

from typing import Any, Self

import numpy as np

from colibri_lab.errors import ArgumentError, is_whole
from colibri_lab.routing.measured import Measured, Ratios
from colibri_lab.routing.streaming import BLOCK, Accumulator, expert_ids, hot, in_blocks, tiles
from colibri_lab.trace import HasTrace, Trace, trace_of

__all__ = ["Agreement", "agreement"]


class Agreement(Accumulator):
    """Mean over tokens of |A ∩ B| / top: A and B the experts that two runs chose for the same token, (Lm,).

    `top`: how many of the k, by rank; None is k, 1 compares first choices. Chance: top/E. Between a checkpoint and the
    final model this is OLMoE's router saturation (arXiv 2409.02060, section 5.1). Tokens with an empty slot among the
    top of either run are left out.
    """

    def __init__(self, top: int | None = None, block: int = BLOCK) -> None:
        super().__init__(block)
        if not (top is None or (is_whole(top) and top >= 1)):
            raise ArgumentError(f"an agreement is of the top 1 or more experts, not {top!r:.80}")
        self.top = top

    def options(self) -> dict[str, Any]:
        """What was asked for at the start."""
        return {"top": self.top, **super().options()}

    def add(self, trace: Trace | HasTrace, other: Trace | HasTrace | None = None) -> Self:
        """Counts a pair of traces of the same token ids; the longer one is cut to the length of the shorter.

        Raises ArgumentError when their ids, MoE layers, experts or k differ.
        """
        if other is None:
            raise ArgumentError("an agreement is of two traces: add(a, b)")
        one, two = trace_of(trace), trace_of(other)
        sizes = [(t.moe_layers, t.num_experts, t.top_k) for t in (one, two)]
        if sizes[0] != sizes[1]:
            raise ArgumentError(f"two traces need the same MoE layers, experts and k; these have {sizes!s:.200}")
        length = min(one.n_tokens, two.n_tokens)
        for rows in tiles(length, 1, 1):
            ids = one.token_ids(rows.start, rows.stop), two.token_ids(rows.start, rows.stop)
            apart = np.flatnonzero(ids[0] != ids[1])
            if apart.size:
                first = int(apart[0])
                raise ArgumentError(
                    f"the traces part at token {rows.start + first} (ids {ids[0][first]} and {ids[1][first]}); "
                    "routing after different tokens can not be compared"
                )
        if self.top is not None and self.top > one.top_k:
            raise ArgumentError(f"the top {self.top} of {one.top_k} chosen experts were asked for")
        return self._take(one, two, length)

    def _add(self, trace: Trace, *more: Any) -> None:
        other, length = more
        top = trace.top_k if self.top is None else self.top
        self.tokens = length
        sums = self.sums["common"] = Ratios((len(trace.moe_layers),), (len(trace.moe_layers),))
        for row, layer in enumerate(trace.moe_layers):
            for rows in tiles(length, self.block, trace.num_experts):
                one, two = expert_ids(trace, layer, rows)[:, :top], expert_ids(other, layer, rows)[:, :top]
                known = (one >= 0).all(axis=1) & (two >= 0).all(axis=1)
                common = np.asarray((hot(one, trace.num_experts) * hot(two, trace.num_experts)).sum(axis=1))
                sums.add(
                    in_blocks(np.where(known, common, 0), self.block),
                    in_blocks(np.where(known, top, 0), self.block),
                    row,
                )

    def result(self, level: float = 0.95) -> Measured:
        """Mean share of common experts, per layer."""
        level = self._checked(level)
        top = self.top_k if self.top is None else self.top
        words = f"Share of the top {top} experts that both runs chose; chance: {top}/{self.num_experts}."
        measured: Measured = self.sums["common"].share(level, top / self.num_experts, words)
        return measured


def agreement(a: Trace | HasTrace, b: Trace | HasTrace, top: int | None = None, level: float = 0.95) -> Measured:
    """`Agreement` of two traces."""
    return Agreement(top).add(a, b).result(level)
