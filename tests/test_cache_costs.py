"""What a machine makes of a cache, against the formulas worked out by hand and a queue played event by event."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import colibri_lab as lab
from colibri_lab import cache
from colibri_lab.cache import Machine
from colibri_lab.errors import ArgumentError
from colibri_lab.testing import synthetic_trace

LAYERS, E, K, T, SIZE = 3, 8, 2, 50, 1000
TRACE = synthetic_trace(LAYERS, E, K, T)
MACHINE = Machine(read_bytes_per_s=1e6, seconds_per_token=0.01)


def simulated(capacity: int = 4, **more: Any) -> cache.Simulation:
    return cache.simulate(TRACE, "lru", capacity, expert_bytes=SIZE, **more)


def test_what_is_all_resident_takes_its_compute_time_alone() -> None:
    """A warm cache with room for all reads nothing."""
    everything = {layer: list(range(E)) for layer in range(LAYERS)}
    speed = cache.predict(simulated(E, warm=everything), MACHINE)
    assert speed.seconds_read == 0 and speed.bytes_per_token == 0
    assert speed.tokens_per_s == pytest.approx(100)


def test_half_the_rate_takes_twice_the_time_to_read() -> None:
    """Compute stays, and nothing hides behind it."""
    fast, slow = (cache.predict(simulated(), replace(MACHINE, read_bytes_per_s=rate)) for rate in (1e6, 5e5))
    assert fast.seconds_read > 0
    assert slow.seconds_read == pytest.approx(2 * fast.seconds_read)
    assert 1 / slow.tokens_per_s - 1 / fast.tokens_per_s == pytest.approx(fast.seconds_read)


@pytest.mark.parametrize(("compute", "overlap"), [(0.01, 0.0), (0.01, 1.0), (0.001, 1.0), (0.004, 0.25)])
def test_overlap_hides_its_share_of_the_shorter_one(compute: float, overlap: float) -> None:
    """0: the sum, 1: the longer of computing and reading."""
    machine = replace(MACHINE, seconds_per_token=compute, overlap=overlap)
    result = simulated()
    read = int(result.misses.sum()) * SIZE / T / 1e6
    longer, shorter = max(compute, read), min(compute, read)
    assert cache.predict(result, machine).tokens_per_s == pytest.approx(1 / (longer + (1 - overlap) * shorter))


def test_each_miss_costs_its_own_time_beside_its_bytes() -> None:
    """Misses per token by seconds_per_read are added to the bytes by the rate."""
    result = simulated()
    plain, dear = (cache.predict(result, replace(MACHINE, seconds_per_read=s)) for s in (0.0, 1e-3))
    assert dear.seconds_read - plain.seconds_read == pytest.approx(int(result.misses.sum()) / T * 1e-3)


@pytest.mark.parametrize("overlap", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("rate", [1e4, 2e5, 1e6, 1e8])
@pytest.mark.parametrize("kind", ["oracle", "previous"])
def test_reads_ahead_run_beside_until_the_disk_is_the_slowest(kind: Any, rate: float, overlap: float) -> None:
    """By hand from the counters; some late, some wasted. An oracle in time hides all that computing covers."""
    machine = replace(MACHINE, read_bytes_per_s=rate, seconds_per_read=1e-5, overlap=overlap)
    plan = cache.plan(TRACE, kind)
    for some in (plan, replace(plan, late=np.random.default_rng(3).random(plan.ids.shape) < 0.3)):
        result = simulated(prefetch=some)
        each = SIZE / rate + 1e-5
        demand = int((result.misses + result.late_hits).sum()) * each / T
        ahead = int((result.prefetched - result.late_hits).sum()) * each / T
        alone = max(0.01, demand) + (1 - overlap) * min(0.01, demand)
        speed = cache.predict(result, machine)
        assert 1 / speed.tokens_per_s == pytest.approx(max(alone, ahead + demand))
        assert speed.seconds_hidden == pytest.approx(0.01 + speed.seconds_read - 1 / speed.tokens_per_s, abs=1e-12)
    if kind == "oracle" and rate == 1e8:
        best, plain = cache.predict(simulated(prefetch=plan), machine), cache.predict(simulated(), machine)
        assert best.tokens_per_s == pytest.approx(100) and "while computing" in best.sentence
        assert plain.tokens_per_s < 100 or overlap == 1


def test_the_sentence_has_plain_numbers_and_tells_of_first_uses() -> None:
    """No power of ten, nothing about what was not hidden."""
    said = cache.predict(simulated(), Machine(1e12, 0.0003)).sentence
    assert "e+" not in said and "e-" not in said and said.startswith("3,3") and "hidden" not in said
    assert f"{int(simulated().first_uses.sum())} first uses" in said


def test_a_cache_beyond_memory_is_slower_the_larger_it_is() -> None:
    """What does not fit is read for every token: more hits, fewer tokens per second."""
    machine = replace(MACHINE, memory_bytes=4 * LAYERS * SIZE + 5000)
    fits, larger = (simulated(capacity) for capacity in (4, E))
    assert larger.hits.sum() > fits.hits.sum()
    first, second = (cache.predict(result, machine, resident_bytes=5000) for result in (fits, larger))
    assert first.overflow_bytes == 0 and second.overflow_bytes == 4 * LAYERS * SIZE
    assert second.tokens_per_s < first.tokens_per_s and "do not fit" in second.sentence
    assert cache.predict(larger, MACHINE, resident_bytes=5000).tokens_per_s > first.tokens_per_s


def test_overflow_counts_the_capacity_of_one_cache_or_of_all() -> None:
    """A global cache has its capacity once; one in bytes has it in bytes."""
    machine = replace(MACHINE, memory_bytes=1)
    assert cache.predict(simulated(), machine).overflow_bytes == 4 * LAYERS * SIZE - 1
    assert cache.predict(simulated(scope="global"), machine).overflow_bytes == 4 * SIZE - 1
    assert cache.predict(simulated(4 * SIZE, unit="bytes"), machine).overflow_bytes == 4 * LAYERS * SIZE - 1


def test_prefill_is_told_apart() -> None:
    """Its bytes do not slow decoding; a run that decoded nothing has no speed."""
    passes = [20] + [1] * (T - 20)
    result = simulated(passes=passes)
    speed = cache.predict(result, MACHINE)
    assert speed.prefill_bytes == int(result.prefill.misses.sum()) * SIZE > 0
    assert speed.prefill_seconds_read == pytest.approx(speed.prefill_bytes / 1e6)
    assert speed.bytes_per_token == pytest.approx(int(result.decode.misses.sum()) * SIZE / (T - 20))
    only = cache.predict(simulated(passes=[T]), MACHINE)
    assert math.isnan(only.tokens_per_s) and "no token was decoded" in only.sentence


def test_without_the_size_of_an_expert_there_is_no_prediction() -> None:
    """The sentence says which argument tells it."""
    with pytest.raises(ArgumentError, match="expert_bytes="):
        cache.predict(cache.simulate(TRACE, "lru", 4), MACHINE)
    with pytest.raises(ArgumentError, match="resident_bytes"):
        cache.predict(simulated(), MACHINE, resident_bytes=-1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"read_bytes_per_s": 0},
        {"read_bytes_per_s": math.nan},
        {"seconds_per_token": -1},
        {"seconds_per_read": "1"},
        {"overlap": 1.5},
        {"memory_bytes": 0},
    ],
)
def test_a_machine_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    """By the name of the figure."""
    with pytest.raises(ArgumentError, match=next(iter(wrong))):
        Machine(**{"read_bytes_per_s": 1e6, "seconds_per_token": 0.01, **wrong})


# ---- late ----------------------------------------------------------------------------------------------------------


def played(plan: cache.Plan, machine: Machine, sizes: np.ndarray) -> np.ndarray:
    """`late` by a clock: transfers in one line, layers that wait for what they need and is on its way."""
    late = np.zeros(plan.ids.shape, bool)
    step = machine.seconds_per_token / LAYERS
    routed, clock, line = 0.0, step, 0.0  # when the layer before has routed; when this one does; the end of the line
    for token in range(T):
        for row in range(LAYERS):
            line, needed = max(line, routed), clock
            for place, expert in enumerate(plan.ids[row, token]):
                if expert < 0:
                    continue
                line += sizes[row, expert] / machine.read_bytes_per_s + machine.seconds_per_read
                late[row, token, place] = line > clock
                if line > clock and expert in TRACE[f"layers.{row}.moe.expert_ids"][token]:
                    needed = max(needed, line)
            routed, clock = clock, needed + step
    return late


@pytest.mark.parametrize("kind", ["previous", "frequency", "oracle"])
@pytest.mark.parametrize("rate", [3e5, 6.1e5, 1e6])
def test_lateness_is_that_of_one_line_of_transfers(kind: Any, rate: float) -> None:
    """Played event by event, with experts of different sizes."""
    sizes = np.random.default_rng(1).integers(500, 1500, (LAYERS, E))
    machine = replace(MACHINE, read_bytes_per_s=rate, seconds_per_read=1e-5)
    plan = cache.plan(TRACE, kind)
    told = cache.lateness(TRACE, plan, machine, sizes, progress=False)
    assert told.late is not None and told.late.tolist() == played(plan, machine, sizes).tolist()
    assert told.ids is plan.ids and plan.late is None
    assert 0 < told.late.sum() < (plan.ids >= 0).sum() or rate in (3e5, 1e6)


def test_a_fast_machine_is_never_late_and_a_slow_one_always() -> None:
    """k experts of 1,000 bytes in the time of a layer, or far from it."""
    plan = cache.plan(TRACE, "oracle")
    never = cache.lateness(TRACE, plan, replace(MACHINE, read_bytes_per_s=1e9), SIZE).late
    always = cache.lateness(TRACE, plan, replace(MACHINE, read_bytes_per_s=1e4), SIZE).late
    assert never is not None and not never.any()
    assert always is not None and always.all()


def test_lateness_refuses_what_does_not_fit() -> None:
    """A plan of another trace, sizes of another model."""
    other = cache.plan(synthetic_trace(LAYERS, E, K, T + 1), "oracle")
    with pytest.raises(ArgumentError, match="the plan is of"):
        cache.lateness(TRACE, other, MACHINE, SIZE)
    with pytest.raises(ArgumentError, match="expert_bytes is a whole number or an array of"):
        cache.lateness(TRACE, cache.plan(TRACE, "oracle"), MACHINE, np.ones((2, 2)))


def test_a_closed_view_holds_nothing_of_its_model() -> None:
    """With the session gone too, the model closes although the view's name is still there."""
    with_view = lab.open()
    session = with_view.session()
    session.feed("A lonely")
    view = lab.CacheLab(session)
    view.handle({"kind": "ready"})
    assert view.simulation.requests.sum() > 0
    view.close()
    del session
    with_view.close()
    assert "closed" in repr(with_view) and "closed" in repr(view)
