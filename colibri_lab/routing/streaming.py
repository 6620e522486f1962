"""Accumulators: metrics of many traces, fed one after another or in parts that are merged; and their blocks."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Sequence, Sized
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from colibri_lab.errors import ArgumentError, is_number, is_whole
from colibri_lab.progress import Progress, shown
from colibri_lab.trace import HasTrace, Trace, trace_of

__all__ = ["BLOCK", "Accumulator", "check_level", "expert_ids", "feed", "hot", "in_blocks", "tiles"]

BLOCK = 32
"""Tokens of a block, unless an accumulator is told otherwise: longer than routing stays alike in running text."""

_TILE = 1 << 20  # numbers in the largest array of a step: 8 MB in float64


class Sums(Protocol):
    """What an accumulator keeps: it can take up the like."""

    def merge(self, other: Any) -> None:
        """Adds what the other has seen."""


class Accumulator(ABC):
    """A metric of any number of traces, in memory that does not grow with the number of tokens.

    `add` takes one trace after another, `merge` another accumulator of the same kind (from another process, say: they
    can be pickled), `result` gives the metric so far. The order does not matter, and feeding parts that are merged
    gives what feeding everything gives. Each trace is a text of its own: no pair and no block reaches from one into the
    next. A call that is interrupted, or that raises, has counted nothing of its trace.

    `block`: consecutive tokens that make one observation for the intervals (see `colibri_lab.routing.measured`).
    """

    def __init__(self, block: int = BLOCK) -> None:
        if not (is_whole(block) and block >= 1):
            raise ArgumentError(f"a block is a whole number of tokens, 1 or more, not {block!r:.80}")
        self.block = int(block)
        self.moe_layers: list[int] = []
        self.num_experts = self.top_k = 0
        self.tokens = 0  # fed so far
        self.sums: dict[Hashable, Any] = {}

    def add(self, trace: Trace | HasTrace) -> Self:
        """Counts one trace, or what a session has captured so far.

        Raises ArgumentError when its MoE layers, experts or k differ from those before, NotCapturedError naming what it
        does not hold.
        """
        return self._take(trace_of(trace))

    def merge(self, other: Self) -> Self:
        """Adds all that another accumulator of the same kind and options has counted; the other stays as it is."""
        if type(other) is not type(self) or other.options() != self.options():
            raise ArgumentError(f"{self!r} takes up another of the same options, not {other!r:.200}")
        if other._fed():
            self._same(other.moe_layers, other.num_experts, other.top_k)
            self.tokens += other.tokens
            for key, sums in other.sums.items():
                if key in self.sums:
                    self.sums[key].merge(sums)
                else:
                    self.sums[key] = copy.deepcopy(sums)
        return self

    @abstractmethod
    def result(self, level: float = 0.95) -> Any:
        """The metric of all that was fed, with intervals at `level`. Raises ArgumentError when nothing was."""

    def options(self) -> dict[str, Any]:
        """What was asked for at the start; equal for accumulators that can be merged."""
        return {"block": self.block}

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options().items())
        return f"<{type(self).__name__}({options}) of {self.tokens} tokens>"

    # ---- for the metrics ----

    def _taps(self, trace: Trace) -> tuple[str, ...]:
        """What a trace must hold of every MoE layer."""
        return ("expert_ids",)

    @abstractmethod
    def _add(self, trace: Trace, *more: Any) -> None:
        """Counts one trace into empty sums."""

    def _take(self, trace: Trace, *more: Any) -> Self:
        part = copy.copy(self)
        part.sums, part.moe_layers, part.tokens = {}, [], 0
        part.num_experts = part.top_k = 0
        part._same(trace.moe_layers, trace.num_experts, trace.top_k)
        part.tokens = trace.n_tokens
        for layer in trace.moe_layers:
            for tap in self._taps(trace):
                trace[f"layers.{layer}.moe.{tap}"]  # raises what a reader should ask for
        part._add(trace, *more)
        return self.merge(part)

    def _fed(self) -> bool:
        return self.num_experts > 0

    def _same(self, layers: list[int], experts: int, top_k: int) -> None:
        mine, other = (self.moe_layers, self.num_experts, self.top_k), (layers, experts, top_k)
        if self._fed() and mine != other:
            raise ArgumentError(
                f"this trace has MoE layers {layers!s:.60}, {experts} experts, {top_k} chosen; those before had "
                f"{self.moe_layers!s:.60}, {self.num_experts}, {self.top_k}"
            )
        self.moe_layers, self.num_experts, self.top_k = mine if self._fed() else other

    def _checked(self, level: float) -> float:
        if not self._fed():
            raise ArgumentError(f"{type(self).__name__} was fed no trace; add(trace) first")
        return check_level(level)


def check_level(level: float) -> float:
    """The level of an interval. Raises ArgumentError unless it lies between 0 and 1."""
    if not (is_number(level) and 0 < level < 1):
        raise ArgumentError(f"the level of an interval lies between 0 and 1, such as 0.95; this is {level!r:.80}")
    return float(level)


def feed(
    accumulators: Accumulator | Sequence[Accumulator],
    traces: Iterable[Trace | HasTrace],
    *,
    progress: Progress = None,
) -> int:
    """Feeds every trace to every accumulator and returns the number of traces.

    `traces` may be a generator that loads them one by one. A bar appears after a second when their number is known;
    `progress` as in a session's calls. Ctrl-C ends it: what was counted by then stays counted.
    """
    takers = [accumulators] if isinstance(accumulators, Accumulator) else list(accumulators)
    total = len(traces) if isinstance(traces, Sized) else 0
    count = 0
    with shown(progress if total else False, total, "traces", "routing") as report:
        for trace in traces:
            for taker in takers:
                taker.add(trace)
            count += 1
            if report is not None:
                report(count / total)
    return count


# ---- tokens in blocks ----------------------------------------------------------------------------------------------


def tiles(tokens: int, block: int, width: int) -> Iterator[slice]:
    """Token rows in steps of whole blocks, so that (rows, `width`) numbers stay small."""
    step = block * max(1, _TILE // max(1, width * block))
    for start in range(0, tokens, step):
        yield slice(start, min(start + step, tokens))


def in_blocks(rows: NDArray[Any], block: int) -> NDArray[Any]:
    """Sums of `block` rows each, (blocks, …); the last block may be short."""
    if not len(rows):
        return np.zeros((0, *rows.shape[1:]), np.float64)
    dtype = np.int64 if rows.dtype.kind in "bi" else rows.dtype
    return np.asarray(np.add.reduceat(rows, np.arange(0, len(rows), block), axis=0, dtype=dtype))


def expert_ids(trace: Trace, layer: int, rows: slice = slice(None)) -> NDArray[np.int64]:
    """(rows, k) expert ids, −1 where a slot has none."""
    return trace[f"layers.{layer}.moe.expert_ids"][rows].astype(np.int64)


def hot(ids: NDArray[np.int64], experts: int) -> NDArray[np.float32]:
    """(rows, E): 1 where a token has the expert among `ids` (rows, slots); −1 is nobody."""
    out = np.zeros((len(ids), experts + 1), np.float32)
    np.put_along_axis(out, ids, 1.0, axis=1)  # −1 writes the last column
    return out[:, :experts]
