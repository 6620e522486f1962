"""claim.py: what every script here takes and gives: a plan in, for each claim a result with its samples and its verdict
out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import models
from harness import Cell, Ratio, Sample, paired_ratio, summary
from report import number, with_spread

HOLDS = "holds"
FAILS = "does not hold"
QUICK_SECONDS = 0.02
UNMEASURABLE = "not measurable on this machine"
NOT_YET = "not measured yet"  # one command is missing; the reason says which
UNDECIDED = "undecided"  # measured, but the interval has what was said inside: a quieter machine, more samples
HIDDEN, WIDTH = 1024, 512  # of the matrices whose place in memory is varied: one is 1 MiB in bfloat16, 2 MiB in float32


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    cache: Path
    rounds: int = 5
    seconds: float = 0.2  # of one sample, at least
    quick: bool = False  # small memory, the bundled model, no peers

    @property
    def megabytes(self) -> int:
        """Of weights that are to come from memory: more than caches hold, or what a notebook may take."""
        return 64 if self.quick else 256


def quick(cache: Path | None = None) -> Plan:
    """The plan of the notebook: seconds for each claim."""
    return Plan(cache or models.default_cache(), rounds=5, seconds=QUICK_SECONDS, quick=True)


@dataclass
class Result:
    """One claim of the description, and what we found."""

    claim: str  # its name
    said: str
    figure: str  # ours, in a line
    verdict: str
    why: str
    cells: list[Cell] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)  # what is counted, not sampled

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "cells": [cell.as_json() for cell in self.cells]}

    @staticmethod
    def from_json(whole: dict[str, Any]) -> Result:
        cells = []
        for cell in whole["cells"]:
            samples = {name: [Sample(**s) for s in taken] for name, taken in cell["samples"].items()}
            cells.append(Cell(**{**cell, "samples": samples}))
        return Result(**{**whole, "cells": cells})

    def __str__(self) -> str:
        return f"{self.claim}: {self.figure}\n  said: {self.said}\n  {self.verdict}: {self.why}"


def judged(ratio: Ratio, least: float) -> str:
    """Does the gain reach what was said? Only an interval that lies on one side of it decides."""
    return HOLDS if ratio.low >= least else FAILS if ratio.high < least else UNDECIDED


def times(cell: Cell, slower: str, faster: str) -> Ratio:
    """How many times `faster` is as fast as `slower`, in a cell of times."""
    return paired_ratio(cell.samples[slower], cell.samples[faster])


def median(cell: Cell, name: str) -> float:
    return summary(cell.samples[name]).median


def missing(claim: str, said: str, why: str, verdict: str = UNMEASURABLE) -> Result:
    """A claim that could not be measured."""
    return Result(claim, said, "–", verdict, why)


# ---- as text ------------------------------------------------------------------------------------------------------


def where(cell: Cell) -> str:
    return ", ".join(f"{key} {value}" for key, value in cell.point.items())


def figures(cell: Cell) -> dict[str, str]:
    """Contender -> median and spread, with the unit."""
    return {name: f"{with_spread(taken)} {cell.unit}" for name, taken in cell.samples.items()}


def fact(value: Any) -> str:
    if isinstance(value, float):
        return number(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def lines(results: Sequence[Result]) -> list[tuple[str, str, str]]:
    """(what, where, figure) of every cell and fact of some results."""
    found = []
    for result in results:
        for cell in result.cells:
            found += [(f"{cell.measure}: {name}", where(cell), text) for name, text in figures(cell).items()]
        found += [(name, "", fact(value)) for name, value in result.facts.items()]
    return found
