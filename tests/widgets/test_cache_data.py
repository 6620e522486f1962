"""What the cache lab shows, held against simulations and against NumPy."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from diffs import copied

import colibri_lab as lab
from colibri_lab.errors import ArgumentError
from colibri_lab.testing import synthetic_trace
from colibri_lab.trace import Trace
from colibri_lab.widgets.cache_data import COUNTERS, OUTCOMES, CacheData

EACH = {"policy": "lru", "capacity": 4, "scope": "layer", "passes": "each", "prefetch": "none"}


@pytest.fixture(scope="module")
def trace() -> Trace:
    return synthetic_trace(layers=3, experts=8, top_k=2, tokens=60, passes=[40, *[1] * 20])


@pytest.fixture(scope="module")
def data(trace: Trace) -> CacheData:
    return CacheData(trace, sizes=1000)


def changed(trace: Trace, arrays: dict[str, Any]) -> Trace:
    return Trace(arrays, ids=trace.ids, texts=trace.texts, meta=trace.meta)


# ---- the setting ----


def test_a_setting_keeps_what_is_left_out(data: CacheData) -> None:
    assert data.check({"policy": "fifo"}, EACH) == {**EACH, "policy": "fifo"}
    assert data.check({"capacity": np.int64(3)}, EACH)["capacity"] == 3


def test_another_scope_keeps_the_memory(data: CacheData) -> None:
    """4 experts in each of 3 layers are 12 in all, and the other way round."""
    both = data.check({"scope": "global"}, EACH)
    assert both["capacity"] == 12
    assert data.check({"scope": "layer"}, both) == EACH
    assert data.check({"scope": "layer"}, {**both, "capacity": 2})["capacity"] == 2


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({"policy": "lrv"}, "did you mean 'lru'"),
        ({"capacity": 1}, "holds 2 .* to 8 experts, not 1"),
        ({"capacity": 25, "scope": "global"}, "to 24 experts, not 25"),
        ({"capacity": 4.0}, "not 4.0"),
        ({"prefetch": "look-ahead"}, "no prefetch 'look-ahead'"),
        ({"size": 3}, "not size"),
        ({"policy": "LRU"}, "did you mean 'lru'"),
        ({"scope": "all"}, "there are layer, global"),
    ],
)
def test_a_setting_that_cannot_be_names_what_can(data: CacheData, wish: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        data.check(wish, EACH)


def test_many_capacities_are_a_grid_that_holds_the_chosen_one() -> None:
    data = CacheData(synthetic_trace(layers=4, experts=64, top_k=4, tokens=8))
    found = data.capacities({**EACH, "capacity": 77, "scope": "global"})
    assert found[0] == 4 and found[-1] == 256 and 77 in found and len(found) <= 49
    assert found == sorted(set(found))


def test_a_still_picture_of_a_long_trace_asks_for_one_size(monkeypatch: pytest.MonkeyPatch, data: CacheData) -> None:
    """For the first view waits for it."""
    assert data.few(EACH) == data.capacities(EACH)
    monkeypatch.setattr("colibri_lab.widgets.cache_data._WORK", 1000)
    assert data.few(EACH) == [4]


# ---- counters ----


@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize("passes", ["each", "trace"])
@pytest.mark.parametrize("policy", ["lru", "static", "belady"])
def test_a_curve_is_what_simulations_count(trace: Trace, data: CacheData, policy: str, passes: str, scope: str) -> None:
    """At every capacity; prefill and decode apart; requests are hits and misses."""
    setting = data.check({"scope": scope, "passes": passes}, EACH)
    curve = json.loads(json.dumps(data.curve(setting, policy), allow_nan=False))
    for i, capacity in list(enumerate(curve["capacities"]))[::5]:
        once = lab.cache.simulate(
            trace, policy, capacity, scope, passes=None if passes == "each" else "trace", expert_bytes=1000
        )
        for part in ("decode", "prefill"):
            for name in COUNTERS:
                assert curve[part][name][i] == getattr(getattr(once, part), name).sum(), (part, name, capacity)
        mine = [curve[part]["misses"][i] + curve[part]["hits"][i] for part in ("decode", "prefill")]
        assert mine == [curve[part]["requests"][i] for part in ("decode", "prefill")]
        assert sum(curve[part]["bytes_read"][i] for part in ("decode", "prefill")) == once.bytes_read.sum()
    assert (sum(curve["prefill"]["requests"]) == 0) == (passes == "each")


def test_speed_is_what_the_machine_predicts(trace: Trace) -> None:
    machine = lab.cache.Machine(read_bytes_per_s=1e6, seconds_per_token=1e-3, memory_bytes=12_000)
    data = CacheData(trace, machine=machine, sizes=1000)
    curve = data.curve(EACH, "lru")
    once = lab.cache.simulate(trace, "lru", 5, expert_bytes=1000)
    assert curve["speed"][curve["capacities"].index(5)] == lab.cache.predict(once, machine).tokens_per_s
    assert CacheData(trace, sizes=1000).curve(EACH, "lru")["speed"] == [None] * 7


# ---- the timeline ----


def test_the_timeline_is_who_is_inside(trace: Trace, data: CacheData) -> None:
    """Bits against `resident`, requests against the trace's own ids."""
    layer = trace.moe_layers[1]
    facts, arrays = data.timeline(EACH, layer, 30)
    once = lab.cache.simulate(trace, "lru", 4)
    inside = np.unpackbits(arrays["inside"], axis=1, bitorder="little")
    for token in range(60):
        assert np.flatnonzero(inside[token]).tolist() == sorted(map(int, once.resident(layer, token)))
    assert not arrays["before"].any()
    ids = trace[f"layers.{layer}.moe.expert_ids"]
    assert arrays["expert"].tolist() == ids.ravel().tolist()
    assert arrays["token"].tolist() == np.repeat(np.arange(60), 2).tolist()
    assert [OUTCOMES[code] for code in arrays["outcome"]] == once.events(layer)["outcome"].tolist()
    assert facts["texts"] == trace.texts and facts["bytes"] == [1000] * 8


@pytest.mark.parametrize("passes", ["each", "trace"])
def test_a_runner_up_is_ready_when_it_was_there_as_the_pass_began(trace: Trace, data: CacheData, passes: str) -> None:
    """Token by token the state after the token before; in a prefill pass that before the whole pass: nobody."""
    layer, setting = trace.moe_layers[0], data.check({"passes": passes}, EACH)
    _, arrays = data.timeline(setting, layer, 0)
    once = data.simulate(setting)
    for token in range(60):
        begin = token if passes == "each" or token >= 40 else 0
        there = begin > 0 and int(arrays["runner"][token]) in once.resident(layer, begin - 1)
        assert arrays["ready"][token] == there
    assert arrays["ready"].any()


def test_a_fixed_set_is_there_from_the_start(trace: Trace, data: CacheData) -> None:
    layer = trace.moe_layers[0]
    _, arrays = data.timeline({**EACH, "policy": "static"}, layer, 0)
    busiest = np.argsort(-np.bincount(trace[f"layers.{layer}.moe.expert_ids"].ravel(), minlength=8), kind="stable")[:4]
    assert np.flatnonzero(np.unpackbits(arrays["before"], bitorder="little")).tolist() == sorted(busiest.tolist())


def test_runners_up_are_the_best_of_those_left_out(trace: Trace, data: CacheData) -> None:
    layer = trace.moe_layers[0]
    runner, behind, near, unit = data.places.runners_up(layer, 5, 25)
    logits = trace[f"layers.{layer}.moe.router_logits"][5:25]
    ranked = np.sort(logits, axis=1)[:, ::-1]
    assert runner.tolist() == np.argsort(-logits, axis=1, kind="stable")[:, 2].tolist()
    assert np.allclose(behind, ranked[:, 1] - ranked[:, 2]) and unit == "logit"
    assert near.tolist() == (np.exp(ranked[:, 2] - ranked[:, 1]) > 0.9).tolist()


def test_where_a_bias_decides_runners_up_are_counted_in_scores(trace: Trace) -> None:
    """One token's choice is not that of its logits, so logits do not rank the layer."""
    arrays, layer = copied(trace), trace.moe_layers[0]
    logits, ids = arrays[f"layers.{layer}.moe.router_logits"], arrays[f"layers.{layer}.moe.expert_ids"]
    logits[3, ids[3, 0]] = -50
    runner, behind, _, unit = CacheData(changed(trace, arrays)).places.runners_up(layer, 0, 60)
    ranked = np.sort(trace[f"layers.{layer}.moe.scores"], axis=1)[:, ::-1]
    assert unit == "score" and np.allclose(behind, ranked[:, 1] - ranked[:, 2])
    assert (runner >= 0).all()


def test_what_was_not_recorded_is_not_made_up(trace: Trace) -> None:
    """Without logits no runner-up; a slot without an expert asks for nothing."""
    arrays = {path: values for path, values in copied(trace).items() if not path.endswith(("scores", "router_logits"))}
    layer = trace.moe_layers[0]
    arrays[f"layers.{layer}.moe.expert_ids"][10:20] = -1
    data = CacheData(changed(trace, arrays))
    _, found = data.timeline(EACH, layer, 0)
    assert (found["runner"] == -1).all() and np.isnan(found["behind"]).all()
    assert not np.isin(found["token"], range(10, 20)).any()
    facts = json.loads(json.dumps(data.facts(), allow_nan=False))
    assert facts["margins"] is False and facts["holes"] == 20 and facts["expert_bytes"] is None


def test_a_token_without_a_ranking_has_no_runner_up(trace: Trace) -> None:
    arrays = copied(trace)
    layer = trace.moe_layers[0]
    arrays[f"layers.{layer}.moe.router_logits"][7] = np.nan
    runner, behind, *_ = CacheData(changed(trace, arrays)).places.runners_up(layer, 6, 9)
    assert runner[1] == -1 and np.isnan(behind[1]) and (runner[[0, 2]] >= 0).all()


def test_a_long_trace_is_sent_in_windows() -> None:
    """The window holds the token; who was inside before it is sent along."""
    trace = synthetic_trace(layers=1, experts=16, top_k=2, tokens=2000)
    data = CacheData(trace)
    facts, arrays = data.timeline(EACH, trace.moe_layers[0], 1500)
    assert facts["start"] <= 1500 < facts["stop"] < facts["start"] + 1000
    before = np.flatnonzero(np.unpackbits(arrays["before"], bitorder="little")).tolist()
    assert before == sorted(map(int, data.simulate(EACH).resident(trace.moe_layers[0], facts["start"] - 1)))
    assert data.window(0)[0] == 0 and data.window(1999)[1] == 2000


def test_every_miss_is_walked_to_and_back() -> None:
    trace = synthetic_trace(layers=2, experts=16, top_k=2, tokens=1500)
    data, layer = CacheData(trace), trace.moe_layers[1]
    events = data.simulate({**EACH, "capacity": 12}).events(layer)
    misses = [(int(e["token"]), int(e["expert"])) for e in events[events["outcome"] == "miss"]]
    where: dict[str, Any] | None = {"layer": layer, "token": misses[0][0], "expert": misses[0][1]}
    walked = []
    while where is not None:
        walked.append((where["token"], where["expert"]))
        last, where = where, data.next_miss({**EACH, "capacity": 12}, where)
    assert walked == misses
    back = data.next_miss({**EACH, "capacity": 12}, last, -1)
    assert back is not None and (back["token"], back["expert"]) == misses[-2]


def test_it_begins_at_a_miss_that_was_a_close_call(trace: Trace, data: CacheData) -> None:
    where = data.start(EACH)
    once = lab.cache.simulate(trace, "lru", 4)
    assert where["layer"] == trace.moe_layers[int(np.argmax(once.misses))]
    events = once.events(where["layer"])
    misses = events[events["outcome"] == "miss"]
    behind = data.places.runners_up(where["layer"], 0, 60)[1]
    assert (where["token"], where["expert"]) in {(int(e["token"]), int(e["expert"])) for e in misses}
    assert behind[where["token"]] == np.nanmin(behind[misses["token"]])
