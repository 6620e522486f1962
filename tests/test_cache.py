"""Expert caches against brute force: a dictionary for LRU, a look into the future for Belady's MIN."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable

import numpy as np
import pytest

import colibri_lab as lab
from colibri_lab import cache
from colibri_lab.cache import curves
from colibri_lab.errors import ArgumentError, NotCapturedError
from colibri_lab.testing import synthetic_trace
from colibri_lab.trace import Trace

Sets = list[list[int]]


def with_ids(ids: list[list[list[int]]], experts: int) -> Trace:
    """A trace of these expert ids, [layer][token][slot]."""
    base = synthetic_trace(len(ids), experts, len(ids[0][0]), len(ids[0]))
    arrays = {f"layers.{layer}.moe.expert_ids": np.array(rows, np.int32) for layer, rows in enumerate(ids)}
    return Trace(arrays, ids=base.ids, texts=base.texts, meta=base.meta)


def with_gaps(trace: Trace, seed: int) -> Trace:
    """The same with a tenth of the slots empty."""
    rng, arrays = np.random.default_rng(seed), dict(trace)
    for layer in trace.moe_layers:
        path = f"layers.{layer}.moe.expert_ids"
        arrays[path] = np.where(rng.random(trace[path].shape) < 0.1, -1, trace[path])
    return Trace(arrays, ids=trace.ids, texts=trace.texts, meta=trace.meta)


def streams(trace: Trace, scope: str) -> list[Sets]:
    rows = [trace[f"layers.{layer}.moe.expert_ids"].tolist() for layer in trace.moe_layers]
    if scope == "layer":
        return [[[e for e in row if e >= 0] for row in layer] for layer in rows]
    tokens = range(len(trace.ids))
    return [[[e + n * trace.num_experts for e in layer[t] if e >= 0] for t in tokens for n, layer in enumerate(rows)]]


def lru_hits(sets: Sets, capacity: int) -> int:
    kept: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for members in sets:
        hits += sum(e in kept for e in members)
        for e in members:
            if e in kept:
                kept.move_to_end(e)
                continue
            if len(kept) == capacity:
                del kept[next(other for other in kept if other not in members)]
            kept[e] = None
    return hits


def belady_hits(sets: Sets, capacity: int) -> int:
    kept: set[int] = set()
    hits = 0
    for now, members in enumerate(sets):
        hits += sum(e in kept for e in members)
        for e in members:
            if e not in kept and len(kept) == capacity:
                nexts = {other: next((t for t in range(now + 1, len(sets)) if other in sets[t]), len(sets))
                         for other in kept if other not in members}  # fmt: skip
                kept.discard(max(nexts, key=lambda other: nexts[other]))
            kept.add(e)
    return hits


BRUTE: dict[str, Callable[[Sets, int], int]] = {"lru": lru_hits, "belady": belady_hits}


@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize("policy", ["lru", "belady"])
def test_a_miss_ratio_curve_is_that_of_a_cache_simulated_at_every_capacity(policy: str, scope: str) -> None:
    """Random traces of all sizes, with empty slots, k = E and single experts among them."""
    for seed in range(16):
        rng = np.random.default_rng(seed)
        experts = int(rng.integers(1, 8))
        k, layers, tokens = int(rng.integers(1, experts + 1)), int(rng.integers(1, 4)), int(rng.integers(1, 30))
        trace = with_gaps(synthetic_trace(layers, experts, k, tokens, seed), seed)
        curve = cache.miss_ratio_curve(trace, policy, scope)
        found = streams(trace, scope)
        assert curve.shape == (len(found), experts * (layers if scope == "global" else 1) + 1)
        for row, sets in zip(curve, found, strict=True):
            requests = sum(map(len, sets))
            for capacity, ratio in enumerate(row):
                hits = BRUTE[policy](sets, capacity) if capacity >= k else 0
                assert ratio == pytest.approx(1 - hits / requests, abs=1e-12) if requests else math.isnan(ratio)


def test_L2_the_hand_computed_table_of_eight_requests() -> None:
    """0 1 2 0 1 2 3 0 in three places: hits are the second 0, 1 and 2."""
    trace = with_ids([[[e] for e in (0, 1, 2, 0, 1, 2, 3, 0)]], 4)
    assert cache.miss_ratio_curve(trace)[0].tolist() == [1, 1, 1, 5 / 8, 4 / 8]
    inf = math.inf
    assert cache.stack_distances(trace)[0, :, 0].tolist() == [inf, inf, inf, 2, 2, 2, inf, 3]


def test_L1_a_member_of_the_set_in_progress_is_never_evicted() -> None:
    """A cache of two holds b, a; the set (c, a) finds a, although c comes first and a is the older one."""
    trace = with_ids([[[0, 1], [2, 0]]], 3)
    assert cache.miss_ratio_curve(trace)[0, 2] == 3 / 4
    assert cache.miss_ratio_curve(trace)[0, :2].tolist() == [1, 1]


def test_a_distance_counts_other_keys_once_and_leaves_out_its_own_set() -> None:
    distances = cache.stack_distances(with_ids([[[0, 1], [2, 3], [2, 4], [0, -1], [4, 0]]], 5))[0]
    np.testing.assert_array_equal(distances, [[math.inf] * 2, [math.inf] * 2, [1, math.inf], [4, math.nan], [1, 0]])


def test_distances_do_not_depend_on_the_pieces_they_are_worked_on_in(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = with_gaps(synthetic_trace(3, 6, 2, 300), 0)
    for scope in ("layer", "global"):
        whole = cache.stack_distances(trace, scope)
        monkeypatch.setattr(curves, "_STEP", 1)
        np.testing.assert_array_equal(cache.stack_distances(trace, scope), whole)
        monkeypatch.undo()


def blind(tokens: int, experts: int, k: int, layers: int = 1) -> Trace:
    rng = np.random.default_rng(1)
    ids = rng.random((layers, tokens, experts)).argsort(axis=2)[:, :, :k]
    return with_ids(ids.tolist(), experts)


def test_blind_tokens_hit_a_share_of_C_over_E() -> None:
    """20,000 tokens: within five standard errors of the null line, at every capacity."""
    curve = cache.miss_ratio_curve(blind(20_000, 16, 2))[0]
    expected = 1 - np.arange(17) / 16
    assert np.abs(curve[2:] - expected[2:]).max() < 5 * 0.5 / math.sqrt(40_000)


def test_a_global_lru_cache_below_k_times_L_minus_1_never_hits() -> None:
    """Between two uses of an expert all other layers' experts come."""
    trace = synthetic_trace(5, 8, 2, 200)
    curve = cache.miss_ratio_curve(trace, scope="global")[0]
    assert (curve[: 2 * 4 + 1] == 1).all() and curve[-1] < 1
    distances = cache.stack_distances(trace, "global")
    assert distances.min() >= 8


def test_more_places_never_miss_more_and_belady_is_never_worse() -> None:
    trace = with_gaps(synthetic_trace(3, 12, 3, 120), 3)
    for scope in ("layer", "global"):
        lru, belady = (cache.miss_ratio_curve(trace, policy, scope) for policy in ("lru", "belady"))
        assert (np.diff(lru, axis=1) <= 0).all() and (np.diff(belady, axis=1) <= 0).all() and (belady <= lru).all()


def test_traces_without_tokens_or_layers_have_curves_without_numbers() -> None:
    empty = synthetic_trace(2, 4, 2, 0)
    for policy in ("lru", "belady"):
        assert np.isnan(cache.miss_ratio_curve(empty, policy)).all()
        dense = synthetic_trace(2, 4, 2, 5, dense_layers=[0, 1])
        assert cache.miss_ratio_curve(dense, policy).shape == (0, 5)
        assert cache.miss_ratio_curve(dense, policy, "global").shape == (0, 1)


def test_a_prefetch_is_counted_request_by_request() -> None:
    trace = with_ids([[[0, 1], [2, 3], [4, -1]]], 8)
    issued = np.array([[[0, 5], [3, 3], [-1, -1]]])
    late = np.array([[[True, False], [False, False], [False, False]]])
    found = cache.prefetch_quality(trace, issued, late=late, expert_bytes=100)
    assert [int(x[0]) for x in (found.needed, found.issued, found.used, found.late, found.wasted)] == [5, 4, 2, 1, 2]
    assert found.precision.value[0] == 2 / 4 and found.recall.value[0] == 1 / 5
    assert found.wasted_bytes is not None and int(found.wasted_bytes[0]) == 200
    assert found.precision.chance == 2 / 8 and found.recall.chance[0] == pytest.approx(4 / 3 / 8)


def test_blind_prefetch_lies_on_its_null_lines() -> None:
    """10,000 tokens, three guesses each: within five standard errors."""
    trace = blind(10_000, 8, 2)
    guesses = np.random.default_rng(5).random((1, 10_000, 8)).argsort(axis=2)[:, :, :3]
    found = cache.prefetch_quality(trace, guesses)
    assert abs(found.precision.value[0] - 2 / 8) < 5 * 0.43 / math.sqrt(30_000)
    assert abs(found.recall.value[0] - 3 / 8) < 5 * 0.48 / math.sqrt(20_000)


def test_what_makes_no_sense_is_refused_by_name() -> None:
    trace = synthetic_trace(1, 4, 2, 3)
    with pytest.raises(ArgumentError, match="no policy 'slur'; did you mean 'slru'"):
        cache.miss_ratio_curve(trace, "slur")
    with pytest.raises(ArgumentError, match="'layer' or 'global', not 'all'"):
        cache.stack_distances(trace, "all")
    with pytest.raises(ArgumentError, match=r"shape \(1, 3, any\)"):
        cache.prefetch_quality(trace, np.zeros((1, 2, 2), int))
    with pytest.raises(ArgumentError, match="0 to 3"):
        cache.prefetch_quality(trace, np.full((1, 3, 2), 4))
    with pytest.raises(NotCapturedError, match="expert_ids"):
        cache.stack_distances(Trace({}, ids=trace.ids, texts=trace.texts, meta=trace.meta))


def test_a_session_stands_in_for_its_trace() -> None:
    session = lab.open().session(max_tokens=8)
    session.feed([1, 2, 3])
    np.testing.assert_array_equal(lab.cache.miss_ratio_curve(session), lab.cache.miss_ratio_curve(session.trace()))
