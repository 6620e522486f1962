"""Null lines: the figures quoted in docs/metrics.md, and blind tokens that land on each line within a stated error."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import slow_routing as slow

from colibri_lab import routing
from colibri_lab.routing import nulls
from colibri_lab.testing import synthetic_trace
from colibri_lab.trace import Trace

MIXTRAL, OLMOE = (8, 2), (64, 8)  # experts, k


def off_diagonal(values: Any) -> Any:
    return values[..., ~np.eye(values.shape[-1], dtype=bool)]


def chance_of(measured: routing.Measured) -> float:
    return float(measured.chance)


def test_the_figures_that_are_quoted() -> None:
    """Mixtral and OLMoE, as the literature and the page on metrics give them."""
    mixtral, olmoe = (slow.blind(*sizes, 40, layers=2) for sizes in (MIXTRAL, OLMOE))
    together = routing.Coactivation()
    assert off_diagonal(together.add(mixtral).result().chance) == pytest.approx(0.143, abs=5e-4)
    assert off_diagonal(routing.Coactivation().add(olmoe).result().chance) == pytest.approx(0.111, abs=5e-4)
    assert off_diagonal(routing.adjacent_coactivation(olmoe).chance) == pytest.approx(0.0278, abs=5e-5)
    assert chance_of(routing.usage(mixtral)) == 0.25 and chance_of(routing.usage(olmoe)) == 0.125
    assert chance_of(routing.repetition(mixtral)) == 0.125
    assert chance_of(routing.repetition(mixtral, "set")) == pytest.approx(0.464, abs=5e-4)
    assert chance_of(routing.repetition(olmoe, "set")) == pytest.approx(0.679, abs=5e-4)
    assert (
        chance_of(routing.agreement(olmoe, olmoe)) == 8 / 64 and chance_of(routing.agreement(olmoe, olmoe, 1)) == 1 / 64
    )
    assert chance_of(routing.cross_layer(mixtral)) == 1 / 64
    for form, balanced in (("switch", 1), ("deepseek", 1), ("transformers", 2), ("transformers_layers", 2)):
        assert chance_of(routing.load_balance_loss(mixtral, form)) == balanced


def balanced(experts: int, k: int, layers: int = 2) -> Trace:
    """Every set of k experts once in every order, and flat logits."""
    base = synthetic_trace(layers, experts, k, 0)
    ids = np.array(list(itertools.permutations(range(experts), k)), np.int32)
    arrays: dict[str, Any] = {}
    for layer in range(layers):
        arrays[f"layers.{layer}.moe.expert_ids"] = ids
        arrays[f"layers.{layer}.moe.router_logits"] = np.zeros((len(ids), experts), np.float32)
    return Trace(arrays, ids=[0] * len(ids), texts=[], meta={**base.meta, "passes": [[0, len(ids)]]})


@pytest.mark.parametrize(
    ("form", "value"), [("switch", 1), ("deepseek", 1), ("transformers", 2), ("transformers_layers", 2)]
)
def test_a_balanced_router_has_the_balanced_loss_exactly(form: Any, value: float) -> None:
    found = routing.load_balance_loss(balanced(8, 2), form)
    np.testing.assert_allclose(found.value, value, rtol=1e-15)


def test_perfect_balance_at_every_measure_of_it() -> None:
    trace = balanced(8, 2)
    assert routing.max_violation(trace).value.tolist() == [0, 0]
    assert routing.balancedness(trace).value.tolist() == [1, 1]
    np.testing.assert_allclose(routing.usage_entropy(trace).value, 1, rtol=1e-15)
    np.testing.assert_allclose(routing.mean_entropy(trace).value, 1, rtol=1e-15)
    np.testing.assert_allclose(routing.z_loss(trace).value, math.log(8) ** 2, rtol=1e-15)


def test_counting_layers_together_hides_what_they_lack() -> None:
    """Two layers, each using one half of the experts: balanced together, twice the loss layer by layer."""
    base = balanced(4, 1)
    arrays = dict(base)
    for layer, experts in ((0, [0, 1, 0, 1]), (1, [2, 3, 2, 3])):
        arrays[f"layers.{layer}.moe.expert_ids"] = np.array(experts, np.int32)[:, None]
        arrays[f"layers.{layer}.moe.router_logits"] = np.where(
            np.isin(np.arange(4), experts), np.float32(0), np.float32(-np.inf)
        )[None].repeat(4, axis=0)
    trace = Trace(arrays, ids=base.ids, texts=[], meta=base.meta)
    assert routing.load_balance_loss(trace, "transformers").value.tolist() == [1]
    assert routing.load_balance_loss(trace, "transformers_layers").value.tolist() == [2, 2]


# Metrics whose null is one value.
BLIND: dict[str, Callable[[Trace], routing.Measured]] = {
    "usage": routing.usage,
    "coactivation": lambda t: routing.Coactivation().add(t).result(),
    "adjacent": routing.adjacent_coactivation,
    "cross_layer": routing.cross_layer,
    "cross_layer_zipped": lambda t: routing.cross_layer(t, pairs="zipped"),
    "repetition": routing.repetition,
    "repetition_set": lambda t: routing.repetition(t, "set"),
    "agreement": lambda t: routing.agreement(t, slow.blind(t.num_experts, t.top_k, len(t.ids), 2, seed=77)),
    "agreement_first": lambda t: routing.agreement(t, slow.blind(t.num_experts, t.top_k, len(t.ids), 2, seed=77), 1),
    "specialisation": lambda t: routing.Specialisation().add(t, [n % 3 for n in range(len(t.ids))]).result(),
    "contrast": lambda t: routing.contrast(t, [n // 40 % 2 for n in range(len(t.ids))], 0, 1),
}


@pytest.mark.parametrize("sizes", [(8, 2), (16, 4)], ids=["E8k2", "E16k4"])
@pytest.mark.parametrize("name", list(BLIND))
def test_blind_tokens_land_on_the_null_line(name: str, sizes: tuple[int, int]) -> None:
    """12,000 tokens, fixed seed. Stated error: five binomial standard errors of the smallest group of a cell."""
    tokens = 12_000
    trace = slow.blind(*sizes, tokens, layers=2, seed=3)
    found = BLIND[name](trace)
    share = sizes[1] / sizes[0]
    parts = {"coactivation": share, "adjacent": share, "specialisation": 1 / 3, "contrast": 1 / 4}
    group = tokens * parts.get(name, 1.0)
    p = np.clip(np.maximum(found.chance, share if name == "contrast" else 0.0), 0, 1)
    error = 5 * np.sqrt(p * (1 - p) / (0.9 * group))
    assert (np.abs(found.value - found.chance) <= error + 1e-12).all()


@pytest.mark.parametrize("name", list(BLIND))
def test_intervals_hold_the_null_as_often_as_they_say(name: str) -> None:
    """40 blind traces of 960 tokens: 95 % of cells within 4 % (cells of a trace are dependent), never all or few."""
    held = []
    for seed in range(40):
        found = BLIND[name](slow.blind(8, 2, 960, layers=2, seed=100 + seed))
        inside = (found.low <= found.chance) & (found.chance <= found.high)
        known = np.broadcast_to(found.chance, found.value.shape) % 1 != 0 if name != "contrast" else inside >= 0
        held.append(inside[known].mean())
    assert 0.91 <= np.mean(held) <= 0.99


def test_intervals_widen_when_tokens_come_in_runs() -> None:
    """Every choice repeated 8 times: an interval for independent tokens would be √8 too narrow and miss too often."""
    held, width = [], []
    for seed in range(60):
        single = slow.blind(8, 2, 160, seed=500 + seed)
        ids = single["layers.0.moe.expert_ids"].repeat(8, axis=0)
        meta = {**single.meta, "passes": [[0, 1280]]}
        found = routing.usage(Trace({"layers.0.moe.expert_ids": ids}, ids=[0] * 1280, texts=[], meta=meta))
        held.append(((found.low <= 0.25) & (found.high >= 0.25)).mean())
        width.append((found.high - found.low).mean())
    independent = 2 * 1.96 * math.sqrt(0.25 * 0.75 / 1280)
    assert 0.91 <= np.mean(held) <= 0.99
    assert 2.2 < np.mean(width) / independent < 3.4


@pytest.mark.parametrize("sizes", [(8, 2), (64, 8), (8, 1)])
@pytest.mark.parametrize("tokens", [20, 300])
def test_the_null_of_the_largest_load_falls_with_the_number_of_tokens(sizes: tuple[int, int], tokens: int) -> None:
    """MaxVio, balancedness and entropy of 200 blind traces: the mean within five of its own standard errors, added to
    those of the simulated null.
    """
    experts, k = sizes
    violation, entropy = [], []
    for seed in range(200):
        taken = routing.Usage().add(slow.blind(experts, k, tokens, seed=seed))
        violation.append(float(taken.violation().value[0]))
        entropy.append(float(taken.entropy(normalised=False).value[0]))
    null = taken.violation().chance[0]
    assert abs(np.mean(violation) - null) < 5 * np.std(violation) * math.sqrt(1 / 200 + 1 / 400)
    assert taken.balancedness().chance[0] == pytest.approx(1 / (1 + null))
    expected = float(taken.entropy(normalised=False).chance[0])
    second_order = ((experts - k) / (2 * tokens * k)) ** 2 + 1e-3  # the first-order formula leaves this much out
    assert abs(np.mean(entropy) - expected) < 5 * np.std(entropy) / math.sqrt(200) + second_order


def test_a_batch_has_the_null_of_its_size() -> None:
    found = routing.batch_violation(slow.blind(8, 2, 32_000), batch=64)
    assert found.low[0] < found.chance < found.high[0] and found.chance > 0.2


def test_blind_loads_have_the_exact_mean_and_spread_where_they_are_drawn_as_normal() -> None:
    """400 draws, large T: mean T·k/E, variance T·p·(1 − p), and a fixed sum."""
    counts = nulls.blind_counts(10**7, 2, 8)
    assert counts.shape == (400, 8)
    np.testing.assert_allclose(counts.sum(axis=1), 2e7, rtol=1e-12)
    np.testing.assert_allclose(counts.var(axis=0).mean(), 1e7 * 0.25 * 0.75, rtol=0.1)
    assert nulls.blind_counts(50, 3, 3).tolist() == [[50.0] * 3] * 400


@pytest.mark.parametrize("of", ["first", "set"])
def test_a_favourite_expert_is_one_by_chance_too(of: Any) -> None:
    """Ids seen 10 to 40 times and blind tokens: the mean favourite's share lies on its null, far above 1/E or k/E."""
    rng = np.random.default_rng(0)
    ids = rng.permutation(np.repeat(np.arange(300), rng.integers(10, 41, 300)))
    found = routing.vocabulary(slow.blind(16, 2, len(ids), ids=ids.tolist()), of=of)
    assert len(found.ids) == 300
    assert found.mean.value[0] > 1.5 * (1 if of == "first" else 2) / 16
    assert abs(found.mean.value[0] - found.mean.chance[0]) < 5 * (found.mean.high - found.mean.low)[0] / 2 / 1.96


def test_corrected_tests_seldom_find_anything_in_noise() -> None:
    """60 blind traces, 32 tests each at 5 %: Holm lets a false finding through in about 3 of them, at most 8."""
    false = 0
    for seed in range(60):
        found = BLIND["contrast"](slow.blind(16, 2, 1600, layers=2, seed=900 + seed))
        false += bool(found.corrected.min() < 0.05)
    assert false <= 8
