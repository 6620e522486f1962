"""Exercises of notebook 05: which experts to keep, and three ways to fool oneself about it."""

from __future__ import annotations

from functools import cache
from typing import Literal

import numpy as np

from colibri_lab.cache import Machine, miss_ratio_curve, predict, residency, simulate
from colibri_lab.exercises._answers import Verdict, whole
from colibri_lab.exercises._traffic import diary, traffic
from colibri_lab.model import open
from colibri_lab.trace import Trace

__all__ = ["BUDGET", "MACHINE", "cache_1", "cache_2", "cache_3", "cache_4"]

MACHINE = Machine(
    read_bytes_per_s=1e9,
    seconds_per_token=0.5e-3,
    memory_bytes=6_000_000,
    source="made up for an exercise",
)
"""The machine of exercise 3: its memory holds less than the model."""

BUDGET = 300_000
"""Bytes that exercise 4 may read for each token."""

_EVEN = 0.25  # of the mean: loads closer than this are flat


def cache_1(answer: object) -> Verdict:
    """Which of the recordings `traffic(1)` to `traffic(3)` can say nothing about policies? Its number."""
    number = whole(answer)
    if number is None:
        return Verdict(False, "The answer is the number of a recording, such as 1.")
    if not 1 <= number <= 3:
        return Verdict(False, "The recordings are 1 to 3.")
    gains = {n: _gain(traffic(n)) for n in (1, 2, 3)}  # of LRU over chance
    if number == min(gains, key=gains.__getitem__):
        return Verdict(True, "Who chooses blindly hits C/E of the time, whatever is kept, unless one can see ahead.")
    hit = f"an LRU cache of 4 hits {100 * (0.5 + gains[number]):.0f} % of its requests, where chance is 50 %"
    if _flat(traffic(number)):
        return Verdict(False, f"Its load is flat, but {hit}: a token does as the one before. Flat is not blind.")
    return Verdict(False, f"Its experts are not even busy alike: {hit}.")


def cache_2(answer: object) -> Verdict:
    """48 layers, 128 experts, 8 a token, one token after another, one LRU cache for all layers: how many experts must
    it hold before it can hit at all? A whole number.
    """
    capacity = whole(answer)
    if capacity is None:
        return Verdict(False, "The answer is a number of experts, such as 100.")
    truth = _first_hit(layers=48, experts=128, k=8)
    if capacity == truth:
        return Verdict(True, "All other layers come between two visits to a layer, and each brings its 8 experts.")
    if capacity == truth - 1:
        return Verdict(False, "So many others come between two uses of one expert. The cache must hold that one, too.")
    if capacity == 48 * 8:
        return Verdict(False, "With so many it hits, but fewer will do: the expert itself was used last time as well.")
    if capacity < truth:
        return Verdict(False, "Too few: in between, the other 47 layers ask for their own and push it out.")
    return Verdict(False, "It hits with fewer. Count what the other layers ask for between two visits to one layer.")


def cache_3(answer: object) -> Verdict:
    """How many experts per layer make the run of notebook 05 fastest on `MACHINE`, with LRU and 1.65 MB of other
    weights? A whole number.
    """
    capacity = whole(answer)
    if capacity is None:
        return Verdict(False, "The answer is a number of experts per layer, such as 3.")
    speeds = _speeds()
    if capacity not in speeds:
        return Verdict(False, f"A layer holds {min(speeds)} to {max(speeds)} experts here.")
    best = max(speeds, key=speeds.__getitem__)
    if capacity == best:
        return Verdict(True, f"{speeds[best]:.0f} tokens/s; all {max(speeds)} would give {speeds[max(speeds)]:.0f}.")
    said = f"{speeds[capacity]:.0f} tokens/s, and another size gives {speeds[best]:.0f}."
    if capacity == max(speeds):
        return Verdict(False, f"It has the most hits, and {said} What does not fit is read again for every token.")
    return Verdict(False, f"That gives {said} predict(simulation, MACHINE, resident_bytes=1_650_000).tokens_per_s.")


def cache_4(answer: object) -> Verdict:
    """The fewest experts per layer with which LRU reads at most `BUDGET` bytes for each token of the run of notebook
    05. A whole number.
    """
    capacity = whole(answer)
    if capacity is None:
        return Verdict(False, "The answer is a number of experts per layer, such as 3.")
    trace = diary()
    least, most = trace.top_k, trace.num_experts
    if capacity > most:
        return Verdict(False, f"A layer has {most} experts. The answer is per layer, not for all of them.")
    if capacity < least:
        return Verdict(False, f"A cache holds the {least} experts of a token at least.")
    needs = {c: _bytes_per_token("lru", c) for c in range(least, most + 1)}
    truth = min(c for c, n in needs.items() if n <= BUDGET)
    if capacity == truth:
        return Verdict(True, f"{needs[truth] / 1e6:.2f} MB for each token, from a cache of {_megabytes(truth):.2f} MB.")
    if capacity > truth:
        return Verdict(False, "That keeps to the budget, and fewer do.")
    if _bytes_per_token("belady", capacity) <= BUDGET:
        return Verdict(False, "So few would do for a policy that knows the future. LRU needs more.")
    return Verdict(False, f"That reads {needs[capacity] / 1e6:.2f} MB for each token.")


# ---- the truth, worked out when it is asked for ----------------------------------------------------------------------


def _gain(trace: Trace) -> float:
    """How much more an LRU cache of half the experts hits than blind traffic would let it."""
    half = trace.num_experts // 2
    return float(1 - miss_ratio_curve(trace, "lru")[:, half].mean()) - half / trace.num_experts


def _flat(trace: Trace) -> bool:
    ids = [trace[f"layers.{layer}.moe.expert_ids"].ravel() for layer in trace.moe_layers]
    loads = [np.bincount(of, minlength=trace.num_experts) for of in ids]
    return all(float(np.abs(load / load.mean() - 1).max()) < _EVEN for load in loads)


@cache
def _first_hit(layers: int, experts: int, k: int) -> int:
    """The smallest global LRU cache that hits when every token asks for what the one before asked for."""
    meta = {
        "producer": "exercise", "producer_version": "1", "model_type": "made up", "num_hidden_layers": layers,
        "moe_layers": list(range(layers)), "num_experts": experts, "top_k": k, "gate_rule": "none",
        "passes": [[0, 1], [1, 2]], "edits": [],
    }  # fmt: skip
    same = np.tile(np.arange(k, dtype=np.int32), (2, 1))
    trace = Trace({f"layers.{n}.moe.expert_ids": same for n in range(layers)}, ids=[-1, -1], texts=[], meta=meta)
    return int(np.argmax(miss_ratio_curve(trace, "lru", "global")[0] < 1))


@cache
def _expert_bytes() -> int:
    return int(residency(open()).bytes.max())


@cache
def _speeds() -> dict[int, float]:
    """Tokens/s on MACHINE by experts per layer."""
    trace = diary()
    capacities = range(trace.top_k, trace.num_experts + 1)
    runs = {c: simulate(trace, capacity=c, expert_bytes=_expert_bytes()) for c in capacities}
    return {c: predict(run, MACHINE, resident_bytes=1_650_000).tokens_per_s for c, run in runs.items()}


@cache
def _bytes_per_token(policy: Literal["lru", "belady"], capacity: int) -> float:
    trace = diary()
    run = simulate(trace, policy=policy, capacity=capacity)
    return int(run.misses.sum()) * _expert_bytes() / trace.n_tokens


def _megabytes(capacity: int) -> float:
    return capacity * len(diary().moe_layers) * _expert_bytes() / 1e6
