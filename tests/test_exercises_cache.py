"""The exercises of notebook 05: truths worked out by hand, and hints."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest

import colibri_lab as lab

PROMPT = 28  # tokens of lab.exercises.TEXT


def test_known_mistakes_are_named() -> None:
    """A flat load taken for blind traffic; the cache that just misses every time; the most hits; knowing the future."""
    assert "Flat is not blind" in lab.exercises.cache_1(3).message
    assert "not even busy alike" in lab.exercises.cache_1(2).message
    assert "must hold that one" in lab.exercises.cache_2(376).message
    assert "most hits" in lab.exercises.cache_3(8).message
    assert "knows the future" in lab.exercises.cache_4(5).message
    assert "not for all" in lab.exercises.cache_4(36).message


def lru(sets: list[list[int]], capacity: int) -> list[bool]:
    """Which requests an LRU cache hits, by hand. Members of a set do not push one another out."""
    kept: OrderedDict[int, None] = OrderedDict()
    hits = []
    for members in sets:
        for key in members:
            hits.append(key in kept)
            kept[key] = None
            kept.move_to_end(key)
            if len(kept) > capacity:
                del kept[next(old for old in kept if old not in members)]
    return hits


@pytest.mark.parametrize(("layers", "k"), [(48, 8), (6, 2), (3, 1)])
def test_a_shared_lru_first_hits_with_one_more_than_the_other_layers_ask_for(layers: int, k: int) -> None:
    """By hand: tokens that always ask for the same experts, the best case there is."""
    token = np.arange(layers * k).reshape(layers, k).tolist()
    needed = k * (layers - 1) + 1
    assert not any(lru(token * 3, needed - 1)) and any(lru(token * 3, needed))
    assert needed == 377 or layers != 48


def test_the_fastest_size_and_the_smallest_that_keeps_to_the_budget_by_hand() -> None:
    """LRU by hand on the run of the notebook, and the arithmetic of a machine on paper."""
    trace, expert = lab.exercises.diary(), 3 * 192 * 128 * 2
    streams = [trace[f"layers.{layer}.moe.expert_ids"].tolist() for layer in trace.moe_layers]
    read, speed = {}, {}
    for capacity in range(2, 9):
        misses = sum(lru(sets, capacity).count(False) for sets in streams)
        read[capacity] = misses * expert / len(trace.ids)
        overflow = max(0, 1_650_000 + 6 * capacity * expert - 6_000_000)
        speed[capacity] = 1 / (0.5e-3 + (read[capacity] + overflow) / 1e9)
    assert min(c for c, n in read.items() if n <= lab.exercises.BUDGET) == 6
    assert max(speed, key=speed.__getitem__) == 5


def test_the_run_of_the_notebook_is_that_of_its_first_cells() -> None:
    trace = lab.exercises.diary()
    assert len(trace.ids) == PROMPT + 400 and trace.passes[0] == (0, PROMPT)


def test_recordings_are_what_the_exercise_says() -> None:
    """By counting: 1 and 3 have a flat load, 2 has not; only in 1 does an LRU of half the experts hit half the time."""
    for number, flat, blind in ((1, True, True), (2, False, False), (3, True, False)):
        ids = lab.exercises.traffic(number)["layers.2.moe.expert_ids"]
        load = np.bincount(ids.ravel(), minlength=8) / ids.size
        assert (abs(load - 1 / 8).max() < 0.03) == flat
        hits = np.mean(lru(ids.tolist(), 4))
        assert (abs(hits - 0.5) < 0.02) == blind
        assert (np.diff(np.sort(ids, axis=1), axis=1) > 0).all()


def test_a_recording_is_the_same_whenever_it_is_asked_for() -> None:
    assert lab.exercises.traffic(1) is lab.exercises.traffic(1)


@pytest.mark.parametrize("number", [0, 4, -1, 1.5, None, "1", True])
def test_a_recording_that_does_not_exist_is_refused(number: object) -> None:
    with pytest.raises(lab.ArgumentError, match="recordings 1 to 3"):
        lab.exercises.traffic(number)
