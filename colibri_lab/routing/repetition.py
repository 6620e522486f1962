"""Whether neighbouring tokens go to the same experts."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from colibri_lab.errors import ArgumentError
from colibri_lab.routing.measured import Measured, Ratios
from colibri_lab.routing.nulls import overlap_chance
from colibri_lab.routing.streaming import BLOCK, Accumulator, expert_ids, hot, in_blocks, tiles
from colibri_lab.trace import HasTrace, Trace

__all__ = ["Repetition", "repetition"]


class Repetition(Accumulator):
    """How often tokens t and t+1 of a text share their first choice (of="first") or any expert (of="set"), (Lm,).

    Chance: 1/E, or 1 − C(E − k, k)/C(E, k) (Mixtral 12.5 % and 46.4 %). A pair with a token whose first slot is empty,
    or for "set" any slot, is left out. (Mixtral's paper, arXiv 2401.04088, table 5.)
    """

    def __init__(self, of: Literal["first", "set"] = "first", block: int = BLOCK) -> None:
        super().__init__(block)
        if of not in ("first", "set"):
            raise ArgumentError(f"a repetition is of the 'first' choice or of the 'set', not {of!r:.80}")
        self.of = of

    def options(self) -> dict[str, Any]:
        """What was asked for at the start."""
        return {"of": self.of, **super().options()}

    def _add(self, trace: Trace, *more: Any) -> None:
        sums = self.sums["pairs"] = Ratios((len(trace.moe_layers),), (len(trace.moe_layers),))
        for row, layer in enumerate(trace.moe_layers):
            for rows in tiles(max(trace.n_tokens - 1, 0), self.block, trace.num_experts):
                ids = expert_ids(trace, layer, slice(rows.start, rows.stop + 1))
                if self.of == "first":
                    same, known = np.asarray(ids[1:, 0] == ids[:-1, 0]), np.asarray(ids[:, 0] >= 0)
                else:
                    chosen = hot(ids, trace.num_experts)
                    same = np.asarray((chosen[1:] * chosen[:-1]).any(axis=1))
                    known = np.asarray((ids >= 0).all(axis=1))
                pairs = known[1:] & known[:-1]
                sums.add(in_blocks(same & pairs, self.block), in_blocks(pairs, self.block), row)

    def result(self, level: float = 0.95) -> Measured:
        """Share of neighbouring pairs, per layer."""
        level = self._checked(level)
        if self.of == "first":
            chance, words = 1 / self.num_experts, "Neighbours with the same first choice; chance: 1/E."
        else:
            chance = overlap_chance(self.top_k, self.num_experts)
            words = "Neighbours with an expert in common; chance: 1 − C(E−k,k)/C(E,k)."
        measured: Measured = self.sums["pairs"].share(level, np.float64(chance), words)
        return measured


def repetition(trace: Trace | HasTrace, of: Literal["first", "set"] = "first", level: float = 0.95) -> Measured:
    """`Repetition` of one trace."""
    return Repetition(of).add(trace).result(level)
