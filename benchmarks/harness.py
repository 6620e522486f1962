"""harness.py: interleaved samples and the statistics that compare them.

Figures of a shared machine drift by tens of per cent within minutes, so nothing is compared across time: one round
takes one sample of every contender, the next round goes through them backwards (a steady drift then cancels), and a
ratio is the median of the ratios within rounds.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

SETTLE_SECONDS = 0.02  # after a sample: lets the threads of that engine fall asleep before another is timed
RESAMPLES = 10_000


@dataclass
class Sample:
    """One figure of one contender, and the machine's limit just before and just after it."""

    value: float  # in the unit of its cell
    limit: float | None = None  # the same unit: what the machine's limit allows
    probes: tuple[float, float] | None = None  # the limit's own unit (GB/s, GFLOP/s), before and after
    void: bool = False  # the two probes differ too much for this sample to say anything
    attempts: int = 1
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass
class Cell:
    """One line of a table: what was measured at which point, with every sample of every contender."""

    measure: str
    unit: str
    point: dict[str, Any]  # model, dtype, threads, tokens ...
    samples: dict[str, list[Sample]]
    higher_is_better: bool = True
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Probe:
    """How the machine's limit is measured around a sample, and how it turns into a limit of that sample."""

    measure: Callable[[], float]
    void_above: float | None = None  # the relative difference of before and after at which a sample says nothing
    retries: int = 3


def interleave(
    contenders: Mapping[str, Callable[[], Sample]],
    rounds: int,
    probe: Probe | None = None,
    limit_of: Callable[[Sample, float], float] | None = None,
) -> dict[str, list[Sample]]:
    """Takes `rounds` samples of each contender, one of each per round.

    With a probe, it runs between all samples, so that each has one before and one after; `limit_of(sample, probed)`
    gives the limit in the sample's unit. A sample whose probes differ by more than `void_above` is taken again, at
    most `retries` times; if none will do, the last stays, marked void.
    """
    taken: dict[str, list[Sample]] = {name: [] for name in contenders}
    names = list(contenders)
    before = probe.measure() if probe else 0.0
    for round_number in range(rounds):
        for name in names if round_number % 2 == 0 else reversed(names):
            for attempt in range(1 + (probe.retries if probe else 0)):
                sample = contenders[name]()
                sample.attempts = attempt + 1
                time.sleep(SETTLE_SECONDS)
                if probe is None:
                    break
                after = probe.measure()
                sample.probes = (before, after)
                if limit_of:
                    sample.limit = limit_of(sample, (before + after) / 2)
                sample.void = probe.void_above is not None and differ(before, after) > probe.void_above
                before = after
                if not sample.void:
                    break
            taken[name].append(sample)
    return taken


def differ(a: float, b: float) -> float:
    """How far apart two positive figures are, relative to the smaller."""
    return abs(a - b) / min(a, b)


@dataclass(frozen=True)
class Summary:
    median: float
    low: float
    high: float
    n: int
    void: int


def summary(samples: Sequence[Sample]) -> Summary:
    """Median, smallest and largest of the samples that count."""
    values = [sample.value for sample in samples if not sample.void]
    void = len(samples) - len(values)
    if not values:
        return Summary(math.nan, math.nan, math.nan, 0, void)
    return Summary(statistics.median(values), min(values), max(values), len(values), void)


@dataclass(frozen=True)
class Ratio:
    median: float
    low: float  # bootstrap 95 % interval of the median
    high: float
    pairs: int


def bootstrap(values: Sequence[float], seed: int = 0) -> Ratio:
    """The median of paired ratios with its 95 % interval: percentiles of the medians of RESAMPLES resamples."""
    if not values:
        return Ratio(math.nan, math.nan, math.nan, 0)
    array = np.asarray(values)
    picks = np.random.default_rng(seed).integers(0, len(array), size=(RESAMPLES, len(array)))
    low, high = np.percentile(np.median(array[picks], axis=1), [2.5, 97.5])
    return Ratio(float(np.median(array)), float(low), float(high), len(array))


def paired_ratio(a: Sequence[Sample], b: Sequence[Sample]) -> Ratio:
    """a / b over the rounds in which both count."""
    return bootstrap([x.value / y.value for x, y in zip(a, b, strict=True) if not (x.void or y.void)])


def limit_ratio(samples: Sequence[Sample]) -> Ratio:
    """value / limit over the samples that count and have a limit."""
    return bootstrap([s.value / s.limit for s in samples if s.limit and not s.void])
