"""The policies of a cache of experts against a slow simulator, and against what must hold whatever the trace."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest

from colibri_lab import cache
from colibri_lab.cache.policies import Policy
from colibri_lab.errors import ArgumentError
from colibri_lab.testing import synthetic_trace
from colibri_lab.trace import Trace
from tests.support.slow_cache import COUNTERS, Cache, sets_of

POLICIES = get_args(Policy)
DEMAND = [policy for policy in POLICIES if policy not in ("belady", "static")]


def trace_of(ids: Any, experts: int, layers: tuple[int, ...] | None = None) -> Trace:
    """A trace of these expert ids, (layers, tokens, slots), all recorded as one pass."""
    ids = np.asarray(ids, np.int32)
    numbers = layers or tuple(range(len(ids)))
    dense = [layer for layer in range(max(numbers) + 1) if layer not in numbers]
    base = synthetic_trace(max(numbers) + 1, experts, ids.shape[2], ids.shape[1], dense_layers=dense)
    arrays = {f"layers.{layer}.moe.expert_ids": rows for layer, rows in zip(numbers, ids, strict=True)}
    return Trace(arrays, ids=base.ids, texts=base.texts, meta=base.meta)


def random_trace(rng: np.random.Generator) -> Trace:
    """One to three layers, one to seven experts, all k, gaps, some experts busier than others; layer 1 may be dense."""
    layers, experts, tokens = (int(rng.integers(1, n)) for n in (4, 8, 24))
    k = int(rng.integers(1, experts + 1))
    taste = rng.random((layers, 1, experts)) * rng.choice([0, 1, 3])
    ids = np.argsort(-(taste + rng.random((layers, tokens, experts))), axis=2)[:, :, :k]
    ids = np.where(rng.random(ids.shape) < rng.choice([0, 0.2]), -1, ids)
    return trace_of(ids, experts, (0, 2, 3)[:layers])


def random_passes(rng: np.random.Generator, tokens: int) -> list[int] | None:
    if rng.random() < 0.5:
        return None
    cuts = np.flatnonzero(rng.random(tokens - 1) < rng.choice([0.2, 0.8])) + 1
    return np.diff([0, *cuts.tolist(), tokens]).tolist()


@dataclass
class Case:
    """Arguments of a simulation, drawn at random."""

    trace: Trace
    scope: str
    capacity: int
    passes: list[int] | None
    options: dict[str, Any]

    def simulate(self, policy: str) -> cache.Simulation:
        dropped = "prefetch" if policy == "static" else ""
        options = {name: value for name, value in self.options.items() if name != dropped}
        return cache.simulate(self.trace, policy, self.capacity, self.scope, passes=self.passes, **options)


def random_case(seed: int, plain: bool = False) -> Case:
    """A third in bytes, half with each of the other options, or none when `plain`."""
    rng = np.random.default_rng(seed)
    trace = random_trace(rng)
    layers, experts, k, tokens = len(trace.moe_layers), trace.num_experts, trace.top_k, len(trace.ids)
    scope = str(rng.choice(["layer", "global"]))
    options: dict[str, Any] = {}
    least, most = k, experts * (layers if scope == "global" else 1) + 1
    if not plain and rng.random() < 0.33:
        sizes = rng.integers(1, 6, (layers, experts))
        least = int(np.sort(sizes, axis=1)[:, -k:].sum(axis=1).max())
        most = int(sizes.sum() if scope == "global" else sizes.sum(axis=1).max()) + 1
        options = {"unit": "bytes", "expert_bytes": sizes}
    elif rng.random() < 0.5:
        options = {"expert_bytes": rng.integers(1, 6, (layers, experts))}
    capacity = least + int((most - least) * rng.random() ** 2)
    if not plain:
        options |= random_options(rng, trace, scope, capacity, least, most, options)
    return Case(trace, scope, capacity, random_passes(rng, tokens), options)


def random_options(
    rng: np.random.Generator, trace: Trace, scope: str, capacity: int, least: int, most: int, known: dict[str, Any]
) -> dict[str, Any]:
    layers, experts, tokens = len(trace.moe_layers), trace.num_experts, len(trace.ids)
    out: dict[str, Any] = {}
    if rng.random() < 0.5:
        named = rng.choice([0, 1, 1, 1], p=[0.4, 0.2, 0.2, 0.2], size=(2, tokens))
        out["resize"] = {
            t: int(rng.integers(least, most + 1)) for t in np.flatnonzero(named[0] & named[1]).tolist()[:3]
        }
    floor = min([capacity, *out.get("resize", {}).values()])
    for name, room in (("pin", floor // 2), ("warm", capacity - floor // 2)):
        if rng.random() < 0.4:
            largest = int(known["expert_bytes"].max()) if known.get("unit") == "bytes" else 1
            count = room // largest // (layers if scope == "global" else 1)
            chosen = {layer: rng.permutation(experts)[:count].tolist() for layer in trace.moe_layers}
            out[name] = dict(reversed(chosen.items()))
    if rng.random() < 0.5:
        width = int(rng.integers(1, experts + 1))
        ids = np.argsort(rng.random((layers, tokens, experts)), axis=2)[:, :, :width]
        ids = np.where(rng.random(ids.shape) < 0.4, -1, ids)
        late = rng.random(ids.shape) < 0.4 if rng.random() < 0.6 else None
        out["prefetch"] = SimpleNamespace(ids=ids, late=late)
    return out


def slow(case: Case, policy: str) -> tuple[dict[str, np.ndarray], list[Any], list[dict[int, set[int]]]]:
    """Counters (Lm, 2), events by layer row, and by layer row who is there after each token."""
    trace, options = case.trace, case.options
    rows = range(len(trace.moe_layers))
    plan = None if policy == "static" else options.get("prefetch")
    bytes_of = np.broadcast_to(options.get("expert_bytes", 1), (len(rows), trace.num_experts))
    in_bytes = options.get("unit") == "bytes"
    counts = {name: np.zeros((len(rows), 2), np.int64) for name in COUNTERS}
    events: list[Any] = [[] for _ in rows]
    inside: list[dict[int, set[int]]] = [{} for _ in rows]
    uses = [np.bincount(ids[ids >= 0], minlength=trace.num_experts) for ids in trace.stack("expert_ids")]
    for group in [rows] if case.scope == "global" else [range(row, row + 1) for row in rows]:
        keys = [(row, expert) for row in group for expert in range(trace.num_experts)]
        size = {key: int(bytes_of[key]) if in_bytes else 1 for key in keys}
        total = sum(size.values())

        def places(limit: int, total: int = total, keys: list[Any] = keys) -> tuple[int, int]:
            limit = min(limit, total)
            return limit, limit * len(keys) // total

        sets = sets_of(trace, group, case.passes, plan)
        one = Cache(policy, *places(case.capacity), sets, len(group), size)
        one.cost = {key: int(bytes_of[key]) for key in keys}
        one.profile = {key: int(uses[key[0]][key[1]]) for key in keys}
        named = {name: [(trace.moe_layers.index(layer), e) for layer, es in options.get(name, {}).items() for e in es]
                 for name in ("pin", "warm")}  # fmt: skip
        one.pinned = {key for key in named["pin"] if key in size}
        ranked = sorted(keys, key=lambda k: (-one.profile[k], k)) if policy == "static" else []
        for key in [*named["warm"], *ranked]:
            room = one.limit - one.room([*one.inside, *one.pinned]) if key in size else -1
            if key in size and key not in one.pinned and key not in one.inside and size[key] <= room:
                one.enter(key, False)
        starts = {token: n for n, token in enumerate(np.cumsum([0, *(case.passes or [1] * len(trace.ids))]).tolist())}
        bounds = sorted(starts)
        for now in sets:
            if now.row == group[0]:
                stop = bounds[now.number + 1]
                changes = [c for t, c in sorted(options.get("resize", {}).items()) if now.start <= t < stop]
                if changes:
                    one.resize(*places(changes[-1]))
            events[now.row] += one.step()
            assert one.room([*one.inside, *one.pinned]) <= one.limit
            if now.row == group[-1]:
                for token in range(now.start, stop):
                    for row in group:
                        inside[row][token] = {e for r, e in [*one.inside, *one.pinned] if r == row}
        for key, kind in one.fetched.items():
            one.counts[key[0], kind, "wasted"] += 1
        for (row, kind, name), count in one.counts.items():
            counts[name][row, int(kind == "decode")] += count
    return counts, events, inside


@pytest.mark.parametrize("part", range(4))
def test_every_policy_equals_the_slow_simulator(part: int) -> None:
    """1,000 random traces in all: counters by layer and kind of pass, events, who is there after a token."""
    for seed in range(250 * part, 250 * part + 250):
        case = random_case(seed)
        for policy in {POLICIES[seed % 11], POLICIES[(seed // 11) % 11]}:
            found, (counts, events, inside) = case.simulate(policy), slow(case, policy)
            for name, expected in counts.items():
                for kind, part_of in enumerate((found.prefill, found.decode)):
                    if name == "bytes_read" and found.bytes_read is None:
                        continue
                    assert getattr(part_of, name).tolist() == expected[:, kind].tolist(), (seed, policy, name)
                    assert (getattr(found, name) == expected.sum(axis=1)).all()
            row = seed % len(events)
            layer = case.trace.moe_layers[row]
            told = found.events(layer)
            mine = [(t, s, e, o, k, g[1], -1 if g[0] < 0 else case.trace.moe_layers[g[0]], n)
                    for t, s, e, o, k, g, n in events[row]]  # fmt: skip
            assert told.tolist() == mine, (seed, policy)
            token = seed % len(case.trace.ids)
            assert found.resident(layer, token).tolist() == sorted(inside[row][token]), (seed, policy)
            told = found.residents(layer, token // 2)
            mine = [[e in inside[row][t] for e in range(told.shape[1])] for t in sorted(inside[row])[token // 2 :]]
            assert told.tolist() == mine, (seed, policy)


def test_curves_are_the_simulations_at_every_capacity_and_belady_is_below_every_demand_policy() -> None:
    """All policies, both scopes, prefill passes with more experts than room among them; LRU never rises."""
    for seed in range(60):
        rng = np.random.default_rng(seed)
        trace = random_trace(rng)
        passes = random_passes(rng, len(trace.ids))
        scope = ("layer", "global")[seed % 2]
        curves = {policy: cache.miss_ratio_curve(trace, policy, scope, passes=passes) for policy in POLICIES}
        for policy, curve in curves.items():
            capacity = int(rng.integers(trace.top_k, curve.shape[1]))
            found = cache.simulate(trace, policy, capacity, scope, passes=passes)
            rates = found.hit_rates if scope == "layer" else np.array([found.hit_rate])
            np.testing.assert_allclose(1 - curve[:, capacity], rates, rtol=0, atol=1e-12, err_msg=f"{seed} {policy}")
            some = cache.miss_ratio_curve(trace, policy, scope, passes=passes, capacities=[capacity, 0])
            np.testing.assert_array_equal(some, curve[:, [capacity, 0]])
            if policy in ("lru", "lfu", "lru-k", "least-stale", "belady", "static"):
                assert (np.diff(np.nan_to_num(curve), axis=1) <= 0).all(), (seed, policy)
            assert (np.nan_to_num(curves["belady"]) <= np.nan_to_num(curve) + 1e-12).all() or policy == "static", policy
        if passes is None:
            distances = cache.stack_distances(trace, scope)
            for capacity in range(trace.top_k, curves["lru"].shape[1]):
                hits = int((distances < capacity).sum())
                assert hits == int(cache.simulate(trace, "lru", capacity, scope).hits.sum())


def test_counters_add_up() -> None:
    """requests = hits + misses, hits by kind, prefill + decode; bytes are those of misses and fetches."""
    for seed in range(1000, 1100):
        case = random_case(seed)
        found = case.simulate(POLICIES[seed % 11])
        kinds = found.pin_hits + found.policy_hits + found.prefetch_hits + found.late_hits
        assert (found.requests == found.hits + found.misses).all() and (found.hits == kinds).all()
        for name in COUNTERS[:-1]:
            parts = getattr(found.prefill, name) + getattr(found.decode, name)
            assert (getattr(found, name) == parts).all(), name
        assert (found.wasted <= found.prefetched).all() and (found.late_hits <= found.prefetched).all()
        one = cache.simulate(case.trace, "lru", case.trace.top_k, expert_bytes=7)
        assert one.bytes_read is not None and (one.bytes_read == 7 * (one.misses + one.prefetched)).all()


def blind(tokens: int, experts: int, k: int) -> Trace:
    return trace_of(np.random.default_rng(1).random((1, tokens, experts)).argsort(axis=2)[:, :, :k], experts)


@pytest.mark.parametrize("policy", [*DEMAND, "static"])
def test_blind_tokens_hit_a_share_of_C_over_E_under_every_policy_that_does_not_know_them(policy: str) -> None:
    """60,000 tokens, 6 of 16 places: within 1 %, which is six standard errors. Static knows another trace."""
    options: dict[str, Any] = {"profile": blind(100, 16, 2)} if policy == "static" else {}
    found = cache.simulate(blind(60_000, 16, 2), policy, 6, **options)
    assert abs(found.hit_rate - 6 / 16) < 0.01


def test_a_global_lru_cache_of_k_times_L_minus_1_hits_nothing() -> None:
    trace = synthetic_trace(5, 8, 2, 200)
    assert cache.simulate(trace, "lru", 8, "global").hits.sum() == 0
    assert cache.simulate(trace, "lru", 12, "global").hits.sum() > 0


def test_L1_a_batch_of_more_experts_than_room_keeps_what_fits_and_reports_the_rest() -> None:
    """Capacity 2, k 2, one pass that needs 0, 1, 2 and 3: four misses, 0 and 1 are kept, nobody is pushed out."""
    trace = trace_of([[[0, 1], [2, 3]]], 4)
    found = cache.simulate(trace, "lru", 2, passes="trace")
    assert (found.misses[0], found.not_kept[0], found.prefill.requests[0], found.decode.requests[0]) == (4, 2, 4, 0)
    assert found.events(0)["kept"].tolist() == [True, True, False, False]
    assert found.events(0)["evicted"].tolist() == [-1] * 4 and found.resident(0, 0).tolist() == [0, 1]
    with pytest.raises(ArgumentError, match=r"the 2 experts of a token and layer .* a capacity is 2 experts or more"):
        cache.simulate(trace, "lru", 1)


@pytest.mark.parametrize("policy", POLICIES)
def test_L1_a_member_of_the_set_in_progress_is_never_evicted(policy: str) -> None:
    """Whoever is pushed out belongs to no set that asks for it at that moment."""
    rng = np.random.default_rng(7)
    trace = trace_of(rng.random((1, 200, 6)).argsort(axis=2)[:, :, :3], 6)
    events = cache.simulate(trace, policy, 3).events(0)
    for token in range(200):
        mine = events[events["token"] == token]
        assert not set(mine["evicted"].tolist()) & set(mine["expert"].tolist())


def test_L2_the_table_of_eight_requests_and_a_limit_that_is_lowered() -> None:
    """0 1 2 0 1 2 3 0 in three places: 3 hits, 5 misses. With two places from token 6 on the last 0 misses too, and the
    cache never holds more than two again.
    """
    trace = trace_of([[[e] for e in (0, 1, 2, 0, 1, 2, 3, 0)]], 4)
    found = cache.simulate(trace, "lru", 3)
    assert (found.hits[0], found.misses[0], found.first_uses[0]) == (3, 5, 4)
    assert found.events(0)["outcome"].tolist() == ["miss"] * 3 + ["hit"] * 3 + ["miss"] * 2
    assert found.events(0)["evicted"].tolist() == [-1] * 6 + [0, 1]
    lowered = cache.simulate(trace, "lru", 3, resize={6: 2})
    assert (lowered.hits[0], lowered.misses[0]) == (3, 5)
    assert [lowered.resident(0, token).tolist() for token in (5, 6, 7)] == [[0, 1, 2], [2, 3], [0, 3]]


@pytest.mark.parametrize("policy", POLICIES)
def test_L2_a_lowered_limit_holds_after_every_token(policy: str) -> None:
    trace = synthetic_trace(2, 16, 2, 60)
    limits = {0: 12, 20: 3, 40: 5}
    found = cache.simulate(trace, policy, 12, resize=limits)
    for token in range(60):
        limit = [capacity for start, capacity in limits.items() if start <= token][-1]
        assert all(len(found.resident(layer, token)) <= limit for layer in (0, 1))


def test_pins_prefetches_and_policy_have_counters_of_their_own() -> None:
    """Tokens ask for 0 1, 2 3, 0 4; 0 is pinned, 3 comes ahead in time, 2 and 4 late, 5 for nothing."""
    trace = trace_of([[[0, 1], [2, 3], [0, 4]]], 6)
    plan = SimpleNamespace(
        ids=np.array([[[-1, -1], [3, 2], [4, 5]]]), late=np.array([[[False] * 2, [False, True], [True] * 2]])
    )
    found = cache.simulate(trace, "lru", 4, pin={0: [0]}, prefetch=plan, expert_bytes=10)
    told = {name: int(getattr(found, name)[0]) for name in COUNTERS}
    assert told == {
        "requests": 6, "pin_hits": 2, "policy_hits": 0, "prefetch_hits": 1, "late_hits": 2, "misses": 1,
        "first_uses": 1, "not_kept": 0, "prefetched": 4, "wasted": 1, "bytes_read": 50,
    }  # fmt: skip
    assert found.events(0)["outcome"].tolist() == ["pin", "miss", "late", "prefetch", "pin", "late"]


def test_first_uses_are_some_of_the_misses() -> None:
    """What is there before the first request hits at its first use; what leaves and comes again is no first use."""
    trace = trace_of([[[e] for e in (0, 1, 2, 0, 3, 1)]], 4)
    for policy, options, misses, first in [
        ("lru", {}, 6, 4),
        ("lru", {"warm": {0: [0, 1]}}, 4, 2),
        ("lru", {"pin": {0: [0]}}, 4, 3),
        ("static", {}, 2, 2),
    ]:
        found = cache.simulate(trace, policy, 2, **options)
        assert (found.misses[0], found.first_uses[0]) == (misses, first), (policy, options)
    for seed in range(50):
        found = random_case(seed).simulate(POLICIES[seed % 11])
        assert (found.first_uses <= found.misses).all()


def test_a_report_says_what_the_counters_say() -> None:
    trace = synthetic_trace(3, 8, 2, 40, passes=[30, *[1] * 10], dense_layers=[1])
    found = cache.simulate(trace, "static", 4, passes="trace", expert_bytes=1000)
    lines = found.report().splitlines()
    assert repr(found.decode) == f"<Counts: {found.decode.requests.sum()} requests, {found.decode.hits.sum()} hits>"
    assert lines[0] == "static (profile: this trace itself), 4 experts in each layer's cache"
    assert lines[1].split()[:5] == ["layer", "requests", "hits", "misses", "hit"]
    every = next(line.split() for line in lines if line.split()[0] == "all")
    assert every[1:5] == [f"{int(n.sum()):,}" for n in (found.requests, found.hits, found.misses)] + [
        f"{found.hit_rate:.1%}"
    ]
    assert [line.split()[0] for line in lines[2:]] == ["0", "2", "all", "prefill", "decode"]


def test_pieces_do_not_change_a_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token at a time, and the next uses of belady in a file."""
    for seed in range(2000, 2040):
        case = random_case(seed)
        for policy in (POLICIES[seed % 11], "belady"):
            whole = case.simulate(policy)
            monkeypatch.setattr(cache.simulation, "_STEP", 1)
            monkeypatch.setattr(cache.requests, "_IN_MEMORY", 16)
            cut = case.simulate(policy)
            assert all((getattr(cut, name) == getattr(whole, name)).all() for name in COUNTERS[:-1])
            told, residents = cut.events(0), cut.residents(0)
            monkeypatch.undo()
            assert (told == whole.events(0)).all() and (residents == whole.residents(0)).all()


@pytest.mark.parametrize("policy", POLICIES)
def test_an_empty_trace_one_token_and_a_thousand_experts_are_served(policy: str) -> None:
    empty = cache.simulate(synthetic_trace(2, 4, 2, 0), policy, 2, expert_bytes=5)
    assert empty.requests.tolist() == [0, 0] and math.isnan(empty.hit_rate) and "—" in empty.report()
    assert len(empty.events(0)) == 0
    dense = cache.simulate(synthetic_trace(2, 4, 2, 5, dense_layers=[0, 1]), policy, 2, "global")
    assert dense.requests.shape == (0,) and math.isnan(dense.hit_rate)
    one = cache.simulate(synthetic_trace(2, 4, 2, 1), policy, 2)
    assert one.misses.tolist() == ([2, 2] if policy != "static" else [0, 0])
    large = synthetic_trace(1, 1024, 8, 20)
    assert cache.simulate(large, policy, 10**30, "global").requests.sum() == 160


def test_what_makes_no_sense_is_refused_by_name() -> None:
    trace = synthetic_trace(2, 8, 2, 5, dense_layers=[0])
    for sentence, options in {
        "no policy 'lru2'; did you mean 'lru'": {"policy": "lru2"},
        "there are lru, lfu": {"policy": "?"},
        "there is no policy 3": {"policy": 3},
        "whole number of experts, not nan": {"capacity": math.nan},
        "whole number of experts, not 4.0": {"capacity": 4.0},
        "whole number of experts, not True": {"capacity": True},
        "2 experts or more, not 0": {"capacity": 0},
        "2 experts or more, not -3": {"capacity": -3},
        "per 'layer' or 'global', not 'all'": {"scope": "all"},
        "in 'experts' or 'bytes', not 'MB'": {"unit": "MB"},
        "needs expert_bytes": {"unit": "bytes"},
        "a capacity is 20 bytes or more, not 16": {"unit": "bytes", "expert_bytes": 10},
        r"whole number or whole numbers \(1, 8\); this is float64": {"expert_bytes": 1.5},
        "1 byte to 2.40, not 0": {"expert_bytes": 0},
        "passes are None, 'trace' or": {"passes": "chunks"},
        "add up to 5 tokens": {"passes": [2, 2]},
        "add up to 5": {"passes": [5, 0]},
        "resize names tokens 0 to 4, not 5": {"resize": {5: 3}},
        "2 experts or more, not 1": {"resize": {2: 1}},
        "whole number of experts, not 2.5": {"resize": {2: 2.5}},
        r"pin names MoE layers, \[1\]; not 0": {"pin": {0: [1]}},
        "warm names experts 0 to 7, not 8": {"warm": {1: [8]}},
        "pin names more experts than a capacity of 2": {"capacity": 2, "pin": {1: [0, 1, 2]}},
        "resize to 2 is less than what is pinned, 3": {"pin": {1: [0, 1, 2]}, "resize": {3: 2}},
        "a prefetch is a plan": {"prefetch": 3},
        "a plan names 0 to 7": {"prefetch": SimpleNamespace(ids=np.full((1, 5, 1), 8), late=None)},
        r"whole numbers \(1, 5, any\)": {"prefetch": SimpleNamespace(ids=np.zeros((1, 4, 1), int), late=None)},
        "`late` has the shape": {"prefetch": SimpleNamespace(ids=np.zeros((1, 5, 1), int), late=np.zeros(3))},
        "lets nobody in": {
            "policy": "static", "prefetch": SimpleNamespace(ids=np.zeros((1, 5, 1), int), late=None),
        },
        "a profile is for the policy 'static'": {"profile": trace},
        r"the profile has \(2, 8\)": {"policy": "static", "profile": synthetic_trace(2, 8, 2, 5)},
    }.items():  # fmt: skip
        with pytest.raises(ArgumentError, match=sentence):
            cache.simulate(trace, **options)
    found = cache.simulate(trace)
    with pytest.raises(ArgumentError, match=r"MoE layers are \[1\], not 0"):
        found.events(0)
    with pytest.raises(ArgumentError, match="tokens are 0 to 4, not 5"):
        found.resident(1, 5)
    with pytest.raises(ArgumentError, match="tokens are 0 to 5, not 3 to 2"):
        found.events(1, 3, 2)
    with pytest.raises(ArgumentError, match="capacities are whole numbers from 0 to 8"):
        cache.miss_ratio_curve(trace, capacities=[9])


def test_the_page_on_metrics_says_what_each_policy_does() -> None:
    page = (Path(__file__).parent.parent / "docs" / "metrics.md").read_text(encoding="utf-8")
    for name, sentence in cache.POLICIES.items():
        assert f"| `{name}` | {sentence} |" in page, name


def test_hostile_ids_never_reach_the_simulator() -> None:
    """What a file says after it was checked is checked again."""
    from colibri_lab import _cachelab

    for bad in (-2, 4, 2**31 - 1, -(2**31)):
        ids = np.array([[[0, bad]]], np.int32)
        passes = np.array([0, 1])
        with pytest.raises(ValueError, match="an expert is -1 to 3"):
            _cachelab.Recency(1, 4, 2).feed(ids, True)
        with pytest.raises(ValueError, match="an expert is -1 to 3"):
            _cachelab.Caches(0, 1, 4, 2, 0, [(2, 2)], None, None, None, None).feed(passes, ids, None, None, None)
        with pytest.raises(ValueError, match="an expert is -1 to 3"):
            _cachelab.Stack(0, 1, 4, 2, None).feed(passes, ids, None)
        with pytest.raises(ValueError, match="an expert is -1 to 3"):
            _cachelab.next_uses(ids[0], passes[:1], *np.zeros((2, 4), np.int32))
    with pytest.raises(ValueError, match="another shape"):
        _cachelab.Recency(1, 4, 2).feed(np.zeros((1, 1, 3), np.int32), True)
    with pytest.raises(ValueError, match="experts are 1 to"):
        _cachelab.Recency(1, 2**40, 2)
