"""goals.py: what the engine aims at, as ratios within one run, so that a table can say which are met.

A goal holds when the median of every cell it speaks of reaches its number; it names the worst cell. One without a
cell in this run is "not measured"; cells whose samples are all void say nothing and are counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from contenders import OURS
from harness import Cell, limit_ratio, paired_ratio, summary
from models import TINY


@dataclass(frozen=True)
class Goal:
    sentence: str
    figure: Callable[[Cell], float]
    at_least: float | None = None
    at_most: float | None = None
    where: Callable[[Cell], bool] = lambda cell: True


def against(peer: str) -> Callable[[Cell], float]:
    return lambda cell: (
        paired_ratio(cell.samples[OURS], cell.samples[peer]).median if peer in cell.samples else math.nan
    )


def of_limit(cell: Cell) -> float:
    return limit_ratio(cell.samples[OURS]).median


def cost(level: str) -> Callable[[Cell], float]:
    return lambda cell: paired_ratio(cell.samples["none"], cell.samples[level]).median - 1


def first_of_two(cell: Cell) -> float:
    """The first way of doing it over the second."""
    return paired_ratio(*cell.samples.values()).median


def last_of_first(cell: Cell) -> float:
    taken = cell.samples[OURS]
    return taken[-1].value / taken[0].value


def spread_after_first(cell: Cell) -> float:
    """Largest less smallest of what follows the start, which is the first sample."""
    later = [sample.value for sample in cell.samples[OURS][1:]]
    return max(later) - min(later)


def unaccounted(kind: str) -> Callable[[Cell], float]:
    """MiB by which the process grew since its import, beyond what the session reserves or the weights take."""

    def figure(cell: Cell) -> float:
        beyond = []
        for sample in cell.samples[OURS]:
            memory = sample.extra["memory"]
            notes = memory["notes"]
            told = notes["session"]["reserved"] if kind == "anonymous" else notes["weights"]["mapped"]
            beyond.append((memory["now"].get(kind, math.nan) - memory["bare"].get(kind, math.nan) - told) / 2**20)
        return max(beyond)

    return figure


def at(measure: str, **point: Any) -> Callable[[Cell], bool]:
    """Cells of one measure at one point; never those of a model that fits into a cache."""

    def chosen(cell: Cell) -> bool:
        whole = cell.point.get("model") != TINY.name
        return whole and cell.measure == measure and all(cell.point.get(key) == value for key, value in point.items())

    return chosen


GOALS = (
    Goal("decode ≥ 0.80 of the read ceiling", of_limit, 0.80, where=at("decode")),
    Goal("decode ≥ 1.0× llama.cpp", against("llama"), 1.0, where=at("decode")),
    Goal(
        "prefill 512, f32, 2 threads ≥ 1.15× transformers",
        against("transformers"),
        1.15,
        where=at("prefill", tokens=512, threads=2, dtype="f32"),
    ),
    Goal(
        "prefill 512, f32, 2 threads ≥ 1.8× llama.cpp",
        against("llama"),
        1.8,
        where=at("prefill", tokens=512, threads=2, dtype="f32"),
    ),
    Goal(
        "prefill 512, bf16, 2 threads, coarse ≥ 1.2× llama.cpp",
        against("llama"),
        1.2,
        where=at("prefill", tokens=512, threads=2, dtype="bf16", model="coarse"),
    ),
    Goal(
        "prefill 512, bf16, 2 threads, fine ≥ 1.1× llama.cpp",
        against("llama"),
        1.1,
        where=at("prefill", tokens=512, threads=2, dtype="bf16", model="fine"),
    ),
    Goal("prefill 512, 1 thread ≥ 1.0× llama.cpp", against("llama"), 1.0, where=at("prefill", tokens=512, threads=1)),
    Goal(
        "kernel, 64 rows, bf16 ≥ 75 % of the FMA peak",
        of_limit,
        0.75,
        where=at("kernel", rows=64, dtype="bf16", threads=1),
    ),
    Goal(
        "kernel, 64 rows, f32 ≥ 70 % of the FMA peak",
        of_limit,
        0.70,
        where=at("kernel", rows=64, dtype="f32", threads=1),
    ),
    Goal(
        "opening coarse f32 (3 GB) ≤ 0.1 s",
        lambda cell: summary(cell.samples[OURS]).median,
        at_most=0.1,
        where=at("load", model="coarse", dtype="f32"),
    ),
    Goal(
        "anonymous memory ≤ what the session reserves + 64 MiB", unaccounted("anonymous"), at_most=64, where=at("load")
    ),
    Goal("file-backed memory ≤ the weights + 16 MiB", unaccounted("file"), at_most=16, where=at("load")),
    Goal(
        "peak memory, f32 ≤ 0.6× transformers",
        against("transformers"),
        at_most=0.6,
        where=at("memory peak", dtype="f32"),
    ),
    Goal(
        "a prompt of 128, f32, 1 thread ≥ 4× one by one",
        first_of_two,
        4.0,
        where=at("batching", tokens=128, threads=1, dtype="f32"),
    ),
    Goal('capture "routing" costs ≤ 3 %', cost("routing"), at_most=0.03, where=at("capture")),
    Goal('capture "moe" costs ≤ 15 % of prefill', cost("moe"), at_most=0.15, where=at("capture", work="prefill")),
    Goal('capture "moe" costs ≤ 5 % of decode', cost("moe"), at_most=0.05, where=at("capture", work="decode")),
    Goal(
        'capture "none" adds ≤ 0.5 % of instructions',
        lambda cell: first_of_two(cell) - 1,
        at_most=0.005,
        where=lambda cell: cell.measure == "instructions",  # of the smallest model, where they would show most
    ),
    Goal("watching costs ≤ 3 %", lambda cell: first_of_two(cell) - 1, at_most=0.03, where=at("watch")),
    Goal("a recording is written at ≥ 80 % of the disk's rate", of_limit, 0.80, where=at("recording")),
    Goal(
        "a recording run: anonymous memory ≤ what the session reserves beside the tape + 16 MiB",
        lambda cell: max(sample.extra["beyond"] for sample in cell.samples[OURS]) / 2**20,
        at_most=16,
        where=at("recording run"),
    ),
    Goal(
        "an empty task of 2 threads ≤ 0.7 µs",
        lambda cell: summary(cell.samples[OURS]).median,
        at_most=0.7,
        where=at("barrier", threads=2),
    ),
    Goal("beside a busy process, 2 threads ≥ 0.9× 1 thread", first_of_two, 0.9, where=at("loaded")),
    Goal("steady: tokens/s of the last tenth ≥ 0.9× of the first", last_of_first, 0.9, where=at("steady")),
    Goal(
        "steady: anonymous memory within 16 MiB after the first tenth",
        spread_after_first,
        at_most=16,
        where=at("steady memory"),
    ),
)


@dataclass(frozen=True)
class Verdict:
    goal: Goal
    worst: float
    cell: Cell | None
    met: int
    cells: int
    void: int

    @property
    def word(self) -> str:
        if not self.cells:
            return "void" if self.void else "not measured"
        return "met" if self.met == self.cells else f"not met ({self.met} of {self.cells} cells)"


def judge(goal: Goal, cells: Sequence[Cell]) -> Verdict:
    figures = [(goal.figure(cell), cell) for cell in cells if goal.where(cell)]
    known = [(figure, cell) for figure, cell in figures if not math.isnan(figure)]
    void = sum(all(s.void for s in cell.samples[OURS]) for _, cell in figures if OURS in cell.samples)
    if not known:
        return Verdict(goal, math.nan, None, 0, 0, void)
    if goal.at_least is not None:
        worst = min(known, key=lambda pair: pair[0])
        met = sum(figure >= goal.at_least for figure, _ in known)
    else:
        worst = max(known, key=lambda pair: pair[0])
        met = sum(figure <= (goal.at_most or 0.0) for figure, _ in known)
    return Verdict(goal, *worst, met, len(known), void)
