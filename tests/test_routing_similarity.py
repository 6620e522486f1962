"""Similarity of experts: assignments by brute force, cosines and correlations by plain loops."""

from __future__ import annotations

import itertools
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import slow_routing as slow

import colibri_lab as lab
from colibri_lab import routing
from colibri_lab.errors import ArgumentError, NotCapturedError, TapError
from colibri_lab.routing.alignment import greedy_assignment
from colibri_lab.testing import synthetic_trace
from colibri_lab.trace import Trace

HIDDEN, WIDTH, EXPERTS = 6, 4, 5


def make_weights(seed: int = 0, width: int = WIDTH, hidden: int = HIDDEN) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    return {
        f"layers.{layer}.moe.experts.{e}.{part}": rng.standard_normal(shape, np.float32)
        for layer in range(2)
        for e in range(EXPERTS)
        for part, shape in shapes.items()
    }


def test_an_assignment_has_the_largest_sum_of_all() -> None:
    """Against all permutations, with ties and negative gains."""
    rng = np.random.default_rng(0)
    for n in (0, 1, 2, 3, 5, 6):
        for whole in (False, True):
            gain = rng.integers(-3, 4, (n, n)).astype(float) if whole else rng.standard_normal((n, n))
            found = routing.assignment(gain)
            assert sorted(found.tolist()) == list(range(n))
            best = max(math.fsum(gain[i, p] for i, p in enumerate(order)) for order in itertools.permutations(range(n)))
            assert math.fsum(gain[np.arange(n), found]) == pytest.approx(best, abs=1e-12)


def test_an_assignment_undoes_a_permutation_of_two_hundred_neurons() -> None:
    rng = np.random.default_rng(1)
    x, order = rng.standard_normal((200, 20)), rng.permutation(200)
    for found in (routing.assignment(x @ x[order].T), greedy_assignment(-((x[:, None] - x[order]) ** 2).sum(axis=2))):
        np.testing.assert_array_equal(order[found], np.arange(200))


def flat_cosine(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    x, y = a.ravel().tolist(), b.ravel().tolist()
    xy, xx, yy = (math.fsum(p * q for p, q in zip(*pair, strict=True)) for pair in ((x, y), (x, x), (y, y)))
    return xy / math.sqrt(xx * yy)


def test_weights_as_they_stand_have_the_cosine_of_their_numbers() -> None:
    weights = make_weights()
    found = routing.weight_similarity(weights, 1, range(EXPERTS), align=None)
    assert found.value.shape == (3, EXPERTS, EXPERTS) and found.chance.ravel().tolist() == [0, 0, 0]
    for (p, part), i, j in itertools.product(enumerate(("gate", "up", "down")), range(EXPERTS), range(EXPERTS)):
        one, two = (weights[f"layers.1.moe.experts.{e}.{part}"].astype(np.float64) for e in (i, j))
        assert found.value[p, i, j] == pytest.approx(flat_cosine(one, two), abs=1e-12)


def test_aligned_weights_have_the_best_cosine_over_all_orders_of_neurons() -> None:
    """One order for gate, up and down: the largest sum of the three cosines among all 24."""
    weights = make_weights()
    found = routing.weight_similarity(weights, 0, [1, 3])
    parts = ("gate", "up", "down")
    one, two = ([weights[f"layers.0.moe.experts.{e}.{p}"].astype(np.float64) for p in parts] for e in (1, 3))
    best = []
    for order in map(list, itertools.permutations(range(WIDTH))):
        moved = [two[0][order], two[1][order], two[2][:, order]]
        best.append([flat_cosine(a, b) for a, b in zip(one, moved, strict=True)])
    np.testing.assert_allclose(found.value[:, 0, 1], max(best, key=math.fsum), rtol=1e-12)


@pytest.mark.parametrize("align", ["exact", "greedy"])
def test_an_expert_and_its_shuffled_copy_are_one(align: Any) -> None:
    """The same function with its neurons in another order: cosine 1 when aligned, far from it as it stands."""
    weights = make_weights(width=40)
    order = np.random.default_rng(5).permutation(40)
    for part in ("gate", "up"):
        weights[f"layers.0.moe.experts.1.{part}"] = weights[f"layers.0.moe.experts.0.{part}"][order]
    weights["layers.0.moe.experts.1.down"] = weights["layers.0.moe.experts.0.down"][:, order]
    np.testing.assert_allclose(routing.weight_similarity(weights, 0, [0, 1], align).value[:, 0, 1], 1, rtol=1e-12)
    assert np.abs(routing.weight_similarity(weights, 0, [0, 1], None).value[:, 0, 1]).max() < 0.5


def test_alignment_finds_something_in_noise_and_its_null_says_how_much() -> None:
    """Independent experts: aligned cosines lie near the measured chance value (0.08), which is far above 0."""
    found = routing.weight_similarity(make_weights(width=60, hidden=12), 0, range(EXPERTS))
    off = found.value[:, ~np.eye(EXPERTS, dtype=bool)]
    assert found.chance.min() > 0.15 and np.abs(off - found.chance[:, :, 0]).max() < 0.08
    raw = routing.weight_similarity(make_weights(width=60, hidden=12), 0, range(EXPERTS), align=None)
    inside = (raw.low <= 0) & (raw.high >= 0)
    assert inside[:, ~np.eye(EXPERTS, dtype=bool)].mean() > 0.8


def with_inputs(tokens: int = 50) -> Trace:
    return synthetic_trace(2, EXPERTS, 2, tokens, hidden=HIDDEN)


def slow_outputs(trace: Trace, weights: dict[str, Any], layer: int, token: int) -> list[list[float]]:
    x = [float(v) for v in trace[f"layers.{layer}.moe.input"][token]]
    out = []
    for e in range(EXPERTS):
        gate, up, down = (weights[f"layers.{layer}.moe.experts.{e}.{p}"].tolist() for p in ("gate", "up", "down"))
        g = [math.fsum(w * v for w, v in zip(row, x, strict=True)) for row in gate]
        u = [math.fsum(w * v for w, v in zip(row, x, strict=True)) for row in up]
        hidden = [a / (1 + math.exp(-a)) * b for a, b in zip(g, u, strict=True)]
        out.append([math.fsum(w * v for w, v in zip(row, hidden, strict=True)) for row in down])
    return out


def test_outputs_are_compared_token_by_token_with_all_experts_running() -> None:
    trace, weights = with_inputs(), make_weights()
    found = routing.output_similarity(trace, weights)
    for layer in range(2):
        outputs = [[np.array(o) for o in slow_outputs(trace, weights, layer, t)] for t in range(50)]
        expected = [
            [slow.mean(flat_cosine(o[i], o[j]) for o in outputs) for j in range(EXPERTS)] for i in range(EXPERTS)
        ]
        np.testing.assert_allclose(found.value[layer], expected, rtol=1e-12, atol=1e-12)
    assert found.chance == 0


def test_the_rank_correlation_of_norm_and_gate_over_all_experts() -> None:
    trace, weights = with_inputs(), make_weights()
    found = routing.norm_gate_correlation(trace, weights)
    for layer in range(2):
        expected = []
        for token in range(50):
            norms = [math.sqrt(math.fsum(v * v for v in o)) for o in slow_outputs(trace, weights, layer, token)]
            expected.append(slow.spearman(norms, trace[f"layers.{layer}.moe.scores"][token].tolist()))
        assert found.value[layer] == pytest.approx(slow.mean(expected), abs=1e-12)


@pytest.mark.parametrize("passes", [[50], [20, 1, 29]])
def test_the_rank_correlation_over_the_recorded_experts(passes: list[int]) -> None:
    trace = synthetic_trace(2, EXPERTS, 3, 50, hidden=HIDDEN, passes=passes)
    found = routing.norm_gate_correlation(trace)
    for layer in range(2):
        norms: dict[tuple[int, int], float] = {}
        for e in range(EXPERTS):
            rows = trace.expert_rows(layer, e)
            for token, row in zip(rows["tokens"].tolist(), rows["output"].tolist(), strict=True):
                norms[token, e] = math.sqrt(math.fsum(v * v for v in row))
        gates = trace[f"layers.{layer}.moe.gates"].tolist()
        expected = [
            slow.spearman([norms[t, e] for e in row], gates[t]) for t, row in enumerate(slow.ids_of(trace, layer))
        ]
        assert found.value[layer] == pytest.approx(slow.mean(expected), abs=1e-12)


def test_independent_norms_and_gates_have_no_correlation() -> None:
    """4,000 tokens: the null lies in the interval, which is narrow."""
    found = routing.norm_gate_correlation(with_inputs(4000), make_weights())
    shuffled = np.random.default_rng(0).permutation(4000)
    arrays = dict(with_inputs(4000))
    for layer in range(2):
        noise = np.random.default_rng(layer).random((4000, EXPERTS), np.float32)
        arrays[f"layers.{layer}.moe.scores"] = noise[shuffled]
    base = with_inputs(4000)
    blind = routing.norm_gate_correlation(Trace(arrays, ids=base.ids, texts=[], meta=base.meta), make_weights())
    assert (np.abs(blind.value) < 0.05).all() and (blind.high - blind.low < 0.1).all()
    assert (blind.low <= 0.01).all() and (blind.high >= -0.01).all() and found.value.shape == (2,)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh", "relu"])
def test_activations_are_those_of_the_config(activation: str) -> None:
    """Known values at 1, and the trace's config is asked before the default."""
    from colibri_lab.routing.experts import ACTIVATIONS

    at_1 = {"silu": 0.7310585786300049, "gelu": 0.8413447460685429, "gelu_pytorch_tanh": 0.8411919906082768, "relu": 1}
    assert float(ACTIVATIONS[activation](np.array([1.0]))[0]) == pytest.approx(at_1[activation], abs=1e-12)
    trace, weights = with_inputs(), make_weights()
    told = Trace(dict(trace), ids=trace.ids, texts=[], meta={**trace.meta, "config": {"hidden_act": activation}})
    np.testing.assert_array_equal(
        routing.output_similarity(told, weights).value, routing.output_similarity(trace, weights, activation).value
    )


def test_the_bundled_model_gives_what_it_computed() -> None:
    """All experts run again: the chosen ones' outputs are those that the engine recorded; bf16 weights are widened."""
    from colibri_lab.routing.experts import Experts

    model = lab.open()
    session = model.session(capture="moe", max_tokens=16)
    session.feed([1, 5, 9, 30])
    trace = session.trace()
    run = Experts(model.weights, 2, trace.num_experts, "silu")
    outputs = run(trace["layers.2.moe.input"].astype(np.float64))
    for e in range(trace.num_experts):
        rows = trace.expert_rows(2, e)
        if len(rows["tokens"]):
            lab.testing.assert_close(rows["output"], outputs[e, rows["tokens"]])
    assert routing.output_similarity(session, model.weights).value.shape == (6, 8, 8)
    rounded = {name: np.asarray(x).astype(ml_dtypes.bfloat16) for name, x in make_weights().items()}
    widened = {name: x.astype(np.float32) for name, x in rounded.items()}
    for align in ("exact", None):
        one, two = (routing.weight_similarity(w, 0, [0, 1], align).value for w in (rounded, widened))
        np.testing.assert_array_equal(one, two)


def test_biases_take_part() -> None:
    trace, weights = with_inputs(), make_weights()
    biased = weights | {"layers.0.moe.experts.0.down.bias": np.full(HIDDEN, 1e6, np.float32)}
    for e in range(1, EXPERTS):
        biased[f"layers.0.moe.experts.{e}.down.bias"] = np.full(HIDDEN, 1e6, np.float32)
    np.testing.assert_allclose(routing.output_similarity(trace, biased).value[0], 1, atol=1e-6)


def test_zero_and_non_finite_outputs_are_left_out_for_their_pairs() -> None:
    trace, weights = with_inputs(), make_weights()
    weights["layers.0.moe.experts.2.down"] = np.zeros((HIDDEN, WIDTH), np.float32)
    weights["layers.1.moe.experts.3.down"] = np.full((HIDDEN, WIDTH), np.nan, np.float32)
    found = routing.output_similarity(trace, weights).value
    assert np.isnan(found[0, 2]).all() and np.isnan(found[1, :, 3]).all() and np.isfinite(found).sum() == 2 * 16


def test_what_is_missing_or_wrong_is_named() -> None:
    trace, weights = with_inputs(), make_weights()
    with pytest.raises(NotCapturedError, match=r"moe\.input"):
        routing.output_similarity(synthetic_trace(2, EXPERTS, 2, 5), weights)
    with pytest.raises(NotCapturedError, match='capture="moe"'):
        routing.norm_gate_correlation(synthetic_trace(2, EXPERTS, 2, 5))
    del weights["layers.0.moe.experts.4.up"]
    with pytest.raises(TapError, match=r"no 'layers\.0\.moe\.experts\.4\.up'; did you mean"):
        routing.output_similarity(trace, weights)
    with pytest.raises(TapError, match=r"experts\.4\.up"):
        routing.weight_similarity(weights, 0, [3, 4])
    with pytest.raises(ArgumentError, match="'exact', 'greedy' or None"):
        routing.weight_similarity(weights, 0, [0, 1], "best")
    with pytest.raises(ArgumentError, match=r"'swiglu'.*there are silu"):
        routing.output_similarity(trace, weights, "swiglu")
    with pytest.raises(ArgumentError, match="differ in shape"):
        routing.weight_similarity(
            weights | {"layers.0.moe.experts.1.gate": np.zeros((9, HIDDEN), np.float32)}, 0, [0, 1], None
        )
