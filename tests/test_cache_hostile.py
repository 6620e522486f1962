"""Arguments of no sense at all, and sizes beyond all measure: refused by name, and work cut so that Ctrl-C is heard."""

from __future__ import annotations

import errno
import io
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest

import colibri_lab as lab
from colibri_lab import _cachelab, cache
from colibri_lab.cache import Level, Machine, Tlb, hierarchy, prefetching, requests, simulate_addresses
from colibri_lab.cache.policies import Policy
from colibri_lab.errors import ArgumentError, FileError
from colibri_lab.testing import synthetic_trace, tiny_model
from colibri_lab.trace import Trace

TRACE = synthetic_trace(2, 8, 2, 50)
RAGGED: Any = [[1], [2, 3]]


def plan(**more: Any) -> Any:
    return SimpleNamespace(ids=np.zeros((2, 50, 1), int), **more)


@pytest.mark.parametrize(
    "options",
    [
        {"policy": ["lru", "lfu"]},
        {"policy": np.zeros(3)},
        {"scope": np.zeros(3)},
        {"unit": np.zeros(3)},
        {"passes": 50},
        {"passes": math.nan},
        {"expert_bytes": RAGGED},
        {"pin": [0, 1]},
        {"pin": {0: 1}},
        {"warm": "01"},
        {"warm": {0: "01"}},
        {"resize": 8},
        {"resize": [(0, 8)]},
        {"prefetch": SimpleNamespace(ids=RAGGED, late=None)},
        {"prefetch": plan(late=RAGGED)},
    ],
    ids=str,
)
def test_a_simulation_refuses_arguments_of_other_kinds(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError):
        cache.simulate(TRACE, **options)


def test_what_is_no_model_is_told_how_to_come_by_one() -> None:
    """A path, a trace, and a simulation without a machine."""
    for call in (cache.residency, cache.measure_machine, lambda x: cache.live(x, [1])):
        with pytest.raises(ArgumentError, match=r"takes a model: lab\.open\(path\)"):
            call("checkpoint")
        with pytest.raises(ArgumentError, match=r"takes a model: the one it is of, x\.model"):
            call(TRACE)
    with pytest.raises(ArgumentError, match=r"lab\.cache\.measure_machine\(model\)"):
        cache.predict(cache.simulate(TRACE, expert_bytes=1), 3)


@pytest.mark.parametrize(
    "call",
    [
        lambda given: cache.miss_ratio_curve(TRACE, capacities=given),
        lambda given: cache.miss_ratio_curve(TRACE, passes=given),
        lambda given: cache.simulate(TRACE).events(np.zeros(given)),  # type of a layer
        lambda given: cache.predict(given, Machine(1e9, 1e-3, source="told")),
        lambda given: cache.predict(cache.simulate(TRACE, expert_bytes=1), given),
        lambda given: cache.prefetch_quality(TRACE, [[given], []]),
        lambda given: cache.prefetch_quality(TRACE, np.zeros((2, 50, 1), int), late=[[given], []]),
        lambda given: simulate_addresses(given, [Level("L1", 1024, 2)]),
        lambda given: simulate_addresses(np.arange(5), given),
        lambda given: simulate_addresses(np.arange(5), [given]),
        lambda given: simulate_addresses(np.arange(5), tlbs=[given]),
        lambda given: cache.live(given, [1]),
        lambda given: cache.substitute(given, [1], 2, 0.1),
        lambda given: cache.measure_machine(given),
        lambda given: cache.residency(given),
        lambda given: cache.stage_addresses(given, "router", 0),
    ],
)
def test_a_number_where_something_else_belongs_is_refused_by_name(call: Callable[[Any], Any]) -> None:
    with pytest.raises(ArgumentError):
        call(3)


def test_a_plan_that_knows_of_nothing_late_needs_not_say_so() -> None:
    assert cache.simulate(TRACE, prefetch=plan()).prefetched.sum() > 0


def test_tables_without_a_place_in_memory_are_refused() -> None:
    """2^40 sets of 2^40 ways have no number of entries that 64 bits hold."""
    for ways, sets in ((2**40, 2**40), (1, 2**56), (2**56, 1), (2**32, 2**32), (1, 2**70)):
        with pytest.raises(ArgumentError, match=f"{ways * sets} lines are too many"):
            Level("L", 64 * ways * sets, ways)
        with pytest.raises(ArgumentError, match=f"{ways * sets} entries are too many"):
            Tlb("T", ways * sets, ways)
    for sets, ways in ((2**40, 2**40), (2**32, 2**32), (2**62, 4)):
        with pytest.raises(ValueError, match="2\\^28 ways in all"):
            _cachelab.Chain([(6, sets, ways)])
    with pytest.raises(ArgumentError, match="a line of L has at most"):
        Level("L", 2**63, 1, 2**63)


def test_sizes_in_small_numbers_of_numpy_are_whole_numbers_like_others() -> None:
    assert Level("L", np.int16(4096), np.int8(2)) == Level("L", 4096, 2)  # 2 ways of 64 bytes are no int8
    assert Tlb("T", np.int8(64), np.int8(2)).reach == 64 * 4096


def test_a_table_of_many_ways_is_asked_in_short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each address may look at all ways of its set; between two pieces Ctrl-C is heard."""
    walked: list[int] = []

    class Chain(_cachelab.Chain):
        def walk(self, addresses: Any) -> None:
            walked.append(len(addresses))
            super().walk(addresses)

    monkeypatch.setattr(_cachelab, "Chain", Chain)
    walk = np.arange(3000) * 64
    found = simulate_addresses(walk, [Level("L", 1 << 26, 1 << 20)])
    assert found["L"].misses == 3000
    assert max(walked) * (1 << 20) <= hierarchy._LOOKS


def test_a_cache_of_many_experts_is_served_in_short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who goes may be found by a look at all experts, so there are fewer requests between two looks for Ctrl-C; how
    they are cut changes nothing.
    """
    big = requests.Requests(synthetic_trace(60, 256, 8, 1), slice(0, 60), None)
    for slots in (0, 8, 64):
        assert big.at_once(1 << 16, slots) * (8 + slots) // 8 * 60 * 256 <= requests._LOOKS

    def served() -> list[Any]:
        simulations = [cache.simulate(TRACE, policy, 5, "global").misses for policy in get_args(Policy)]
        return simulations + [cache.miss_ratio_curve(TRACE, policy, "global") for policy in get_args(Policy)]

    whole = served()
    quality = cache.prefetch_quality(TRACE, cache.plan(TRACE, "previous"))
    monkeypatch.setattr(requests, "_LOOKS", 1)
    monkeypatch.setattr(prefetching, "_PIECE", 1)
    assert all((same == other).all() for same, other in zip(whole, served(), strict=True))
    again = cache.prefetch_quality(TRACE, cache.plan(TRACE, "previous"))
    assert (quality.used == again.used).all() and (quality.precision.value == again.precision.value).all()
    assert (quality.recall.low == again.recall.low).all()


@pytest.mark.parametrize("call", [lab.profile, lambda model, x: cache.substitute(model, x, 2, 0.1), cache.live])
def test_ids_that_form_no_row_are_refused_before_anything_runs(call: Callable[..., Any], tmp_path: Path) -> None:
    with lab.open(tiny_model(tmp_path)) as model, pytest.raises(ArgumentError):
        call(model, RAGGED)


def test_more_experts_than_one_cache_keeps_apart_are_refused() -> None:
    base = synthetic_trace(17, 2, 1, 1)
    ids = {name: base[name] for name in base if name.endswith("expert_ids")}
    huge = Trace(ids, ids=base.ids, texts=base.texts, meta={**base.meta, "num_experts": 1 << 20})
    for call in (cache.simulate, cache.miss_ratio_curve):
        with pytest.raises(ArgumentError, match="scope='layer' has one for each"):
            call(huge, scope="global")
    with pytest.raises(ArgumentError, match="17 layers of 1048576 experts"):
        cache.stack_distances(huge, "global")


@pytest.mark.parametrize("where", ["opening", "writing"])
def test_belady_without_a_place_for_a_temporary_file_says_so(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    class Full(io.BytesIO):
        write = full

    monkeypatch.setattr(requests, "_IN_MEMORY", 0)
    monkeypatch.setattr(requests.tempfile, "TemporaryFile", full if where == "opening" else Full)
    for call in (cache.simulate, cache.miss_ratio_curve):
        with pytest.raises(FileError, match=r"800 bytes of next uses .* No space left"):
            call(TRACE, "belady", scope="global")


def test_residency_of_no_experts_at_all_changes_nothing_and_says_so(tmp_path: Path) -> None:
    with lab.open(tiny_model(tmp_path)) as model:
        found = cache.residency(model)
        for change in (found.warm(0, []), found.drop([]), found.lock([], []), found.unlock([])):
            assert change.sentence == "no experts were asked for" and math.isnan(change.after)


def test_a_live_run_takes_a_prompt_longer_than_one_pass(tmp_path: Path) -> None:
    """600 tokens go in passes of 512 and 88; logits are the bytes of a plain run, and the simulator replays it."""
    prompt = np.random.default_rng(1).integers(1, 60, 600).tolist()
    with lab.open(tiny_model(tmp_path, experts=8, top_k=2, layers=2)) as model:
        plain = model.session(max_tokens=700)
        plain.feed(prompt)
        try:
            run = cache.live(model, prompt, 3, new_tokens=0, progress=False)
        except lab.errors.UnsupportedError as reason:
            assert "not available here" in str(reason)
            return
        assert run.passes["stop"].tolist() == [512, 600] and run.agrees
        assert run.logits.tobytes() == np.asarray(plain.logits).tobytes()
