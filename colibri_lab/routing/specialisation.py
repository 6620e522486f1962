"""Which experts serve which kind of token: by domain, and in contrast of two sets."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from colibri_lab.errors import ArgumentError
from colibri_lab.routing.intervals import holm, student_quantile, student_tail
from colibri_lab.routing.measured import Measured, Moments, Ratios
from colibri_lab.routing.streaming import BLOCK, Accumulator, expert_ids, hot, in_blocks, tiles
from colibri_lab.trace import HasTrace, Trace, trace_of

__all__ = ["Contrast", "Contrasted", "Labels", "Specialisation", "contrast", "specialisation"]

Labels = str | Sequence[Hashable] | NDArray[Any]
"""One label for all tokens of a trace (a text), or one per token; None leaves a token out."""


def specialisation(trace: Trace | HasTrace, labels: Labels, of: Literal["set", "first"] = "set") -> NDArray[np.float64]:
    """Share of the tokens of each label that went to each expert, (Lm, E, labels); labels in sorted order.

    of="first" counts first choices alone. Chance: k/E (Mixtral 25 %, OLMoE 12.5 %), or 1/E. Tokens labelled None, and
    tokens without an expert, are left out. `Specialisation` gives intervals and takes many traces. (Definition: OLMoE,
    arXiv 2409.02060, section 5.3.) Raises ArgumentError unless there is one label per token, NotCapturedError when the
    trace has no expert ids.
    """
    return Specialisation(of).add(trace, labels).result().value


class Specialisation(Accumulator):
    """`specialisation` of any number of traces, with intervals; `labels` are those seen so far, in sorted order."""

    def __init__(self, of: Literal["set", "first"] = "set", block: int = BLOCK) -> None:
        super().__init__(block)
        self.of = _checked_of(of)

    def options(self) -> dict[str, Any]:
        """What was asked for at the start."""
        return {"of": self.of, **super().options()}

    @property
    def labels(self) -> list[Any]:
        """The last axis of the result."""
        return _in_order(self.sums)

    def add(self, trace: Trace | HasTrace, labels: Labels | None = None) -> Self:
        """Counts a trace whose tokens have these labels: one per token, or one text for all of them."""
        trace = trace_of(trace)
        return self._take(trace, _per_token(labels, trace.n_tokens))

    def _add(self, trace: Trace, *more: Any) -> None:
        (labels,) = more
        names = _in_order(set(labels) - {None})
        number = {name: n for n, name in enumerate(names)}
        codes = np.array([number.get(label, -1) for label in labels], np.int64)
        layers, experts = len(trace.moe_layers), trace.num_experts
        for name in names:
            self.sums[name] = Ratios((layers, experts), (layers, 1))
        for row, layer in enumerate(trace.moe_layers):
            for rows in tiles(len(labels), self.block, experts):
                ids = expert_ids(trace, layer, rows)
                chosen = hot(ids if self.of == "set" else ids[:, :1], experts)
                known = chosen.any(axis=1)
                for code in np.unique(codes[rows][codes[rows] >= 0]):
                    mine = ((codes[rows] == code) & known)[:, None]
                    self.sums[names[code]].add(in_blocks(chosen * mine, self.block), in_blocks(mine, self.block), row)

    def result(self, level: float = 0.95) -> Measured:
        """Shares, (Lm, E, labels)."""
        level = self._checked(level)
        slots = self.top_k if self.of == "set" else 1
        chance = slots / self.num_experts
        words = f"Share of a label's tokens sent to the expert; chance: {'k' if self.of == 'set' else '1'}/E."
        parts = [self.sums[name].share(level, chance, words) for name in self.labels]
        if not parts:
            empty = np.zeros((len(self.moe_layers), self.num_experts, 0))
            return Measured(empty, empty, empty, np.asarray(chance), level, words)
        value, low, high = (np.stack([getattr(part, name) for part in parts], axis=-1) for name in _PARTS)
        return Measured(value, low, high, parts[0].chance, level, parts[0].words)


_PARTS = ("value", "low", "high")


@dataclass(frozen=True, repr=False)
class Contrasted(Measured):
    """A contrast with its tests: chance is 0 everywhere, so a cell is a finding when its corrected p is small."""

    p: NDArray[np.float64]  # (Lm, E), of each cell alone
    corrected: NDArray[np.float64]  # Holm's, over all Lm · E tests
    order: NDArray[np.int64]  # (Lm · E, 2): rows of (MoE layer's row, expert), the largest difference first


class Contrast(Accumulator):
    """p(first) − p(second): how much oftener tokens of one set go to an expert than those of another, (Lm, E).

    Chance: 0. (SteerMoE ranks experts by its absolute value.) With E · Lm experts some differences are large by chance:
    `corrected` are Holm's p values over all of them.
    """

    def __init__(self, block: int = BLOCK) -> None:
        super().__init__(block)

    def add(
        self,
        trace: Trace | HasTrace,
        labels: Labels | None = None,
        first: Hashable = "first",
        second: Hashable = "second",
    ) -> Self:
        """Counts a trace: tokens labelled `first` are of the one set, `second` of the other, all others of none.

        A text for all tokens puts a whole trace into a set: add(a, "first").add(b, "second").
        """
        trace = trace_of(trace)
        given = _per_token(labels, trace.n_tokens)
        if first == second:
            raise ArgumentError(f"a contrast is between two labels, not {first!r:.80} and itself")
        return self._take(trace, np.array([0 if x == first else 1 if x == second else 2 for x in given], np.int64))

    def _add(self, trace: Trace, *more: Any) -> None:
        (sets,) = more
        layers, experts = len(trace.moe_layers), trace.num_experts
        sums = self.sums["cells"] = Moments((layers, experts), 4)
        for place in (0, 1):
            self.sums[place] = Ratios((layers, experts), (layers, 1))
        for row, layer in enumerate(trace.moe_layers):
            for rows in tiles(len(sets), self.block, 4 * experts):
                chosen = hot(expert_ids(trace, layer, rows), experts)
                known, parts = chosen.any(axis=1), []
                for place in (0, 1):
                    mine = ((sets[rows] == place) & known)[:, None]
                    a, b = in_blocks(chosen * mine, self.block), in_blocks(mine, self.block)
                    self.sums[place].add(a, b, row)
                    parts += [a, np.broadcast_to(b, a.shape)]
                sums.add(np.stack(parts, axis=-1), row)

    def result(self, level: float = 0.95) -> Contrasted:
        """Differences, intervals cell by cell, p values and their correction."""
        level = self._checked(level)
        (a1, b1), (a2, b2) = self.sums[0].sums, self.sums[1].sums
        blocks = np.minimum(self.sums[0].blocks, self.sums[1].blocks)
        with np.errstate(divide="ignore", invalid="ignore"):
            p1, p2 = a1 / b1, a2 / b2
            value = p1 - p2
            ones = np.ones_like(value)
            gradient = np.stack([ones / b1, -p1 / b1, -ones / b2, p2 / b2], axis=-1)
            spread = self.sums["cells"].variance(gradient, np.broadcast_to(blocks, value.shape))
            # Blocks that happen to agree say too little: never below independent tokens (Agresti and Caffo).
            least = sum((a + 1) / (b + 2) * (1 - (a + 1) / (b + 2)) / (b + 2) for a, b in ((a1, b1), (a2, b2)))
            error = np.sqrt(np.maximum(spread, least))
            ratio = value / error
        freedom = np.broadcast_to(blocks - 1, value.shape)
        reach = student_quantile(freedom, level) * error
        p = np.full(value.shape, np.nan)
        for n in np.unique(freedom[freedom >= 1]):
            p[freedom == n] = student_tail(ratio[freedom == n], int(n))
        flat = np.argsort(-np.abs(np.nan_to_num(value)), axis=None, kind="stable")
        order = np.stack(np.unravel_index(flat, value.shape), axis=1).astype(np.int64)
        words = "p(first) − p(second); chance: 0. Interval: Student's t on blocks of tokens."
        return Contrasted(value, value - reach, value + reach, np.asarray(0.0), level, words, p, holm(p), order)


def contrast(
    trace: Trace | HasTrace, labels: Labels, first: Hashable, second: Hashable, level: float = 0.95
) -> Contrasted:
    """`Contrast` between two labels of one trace; for two traces see `Contrast.add`."""
    return Contrast().add(trace, labels, first, second).result(level)


def _checked_of(of: Literal["set", "first"]) -> Literal["set", "first"]:
    if of not in ("set", "first"):
        raise ArgumentError(f"choices are counted by 'set' or by 'first', not {of!r:.80}")
    return of


def _per_token(labels: Labels | None, tokens: int) -> list[Any]:
    if isinstance(labels, str):
        return [labels] * tokens
    try:
        given = labels.tolist() if isinstance(labels, np.ndarray) else list(labels or ())
        set(given)
    except TypeError:
        raise ArgumentError(f"labels are one text, or one label per token, not {labels!r:.80}") from None
    if len(given) != tokens:
        raise ArgumentError(f"the trace has {tokens} tokens, the labels are {len(given)}; give one per token")
    return given


def _in_order(names: Any) -> list[Any]:
    try:
        return sorted(names)
    except TypeError:
        raise ArgumentError(f"labels of one kind can be sorted; these can not: {list(names)!r:.80}") from None
