"""Every metric of docs/metrics.md against a slow implementation of its definition, to 1e-12."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import slow_routing as slow

from colibri_lab import routing
from colibri_lab.errors import ArgumentError, NotCapturedError
from colibri_lab.testing import synthetic_trace
from colibri_lab.trace import Trace

# layers, experts, k, tokens: ordinary, odd, fine-grained, k = E, one expert, more experts than tokens
SHAPES = [(3, 8, 2, 100), (2, 5, 3, 37), (1, 64, 8, 70), (2, 3, 3, 40), (1, 1, 1, 33), (2, 60, 7, 5)]
TRACES = [slow.with_gaps(synthetic_trace(*shape, seed=n), n) for n, shape in enumerate(SHAPES)]
EVERY = pytest.mark.parametrize("trace", TRACES, ids=[f"E{e}k{k}T{t}" for _, e, k, t in SHAPES])


def close(actual: Any, expected: Any) -> None:
    """Equal to 1e-12 of the value, NaN at the same places; the interval holds the value."""
    if isinstance(actual, routing.Measured):
        known = ~np.isnan(actual.low)
        assert actual.low.shape == actual.high.shape == actual.value.shape
        assert np.broadcast_shapes(actual.chance.shape, actual.value.shape) == actual.value.shape
        inside = (actual.low <= actual.value + 1e-12) & (actual.value <= actual.high + 1e-12)
        assert inside[known].all()
        actual = actual.value
    np.testing.assert_allclose(actual, np.array(expected, np.float64).reshape(np.shape(actual)), rtol=1e-12, atol=1e-12)


@EVERY
class TestOneTrace:
    def test_router_entropy(self, trace: Trace) -> None:
        close(routing.mean_entropy(trace), slow.mean_entropy(trace))

    def test_gate_entropy(self, trace: Trace) -> None:
        expected = slow.gate_entropy(trace)
        close(routing.gate_entropy(trace), expected)
        scale = math.log(trace.top_k) if trace.top_k > 1 else 1.0
        close(routing.mean_entropy(trace, "gates"), [slow.mean(h / scale for h in row) for row in expected])

    def test_usage_and_its_entropy(self, trace: Trace) -> None:
        close(routing.usage(trace), slow.usage(trace))
        close(routing.usage_entropy(trace, normalised=False), slow.usage_entropy(trace))

    def test_max_violation_and_balancedness(self, trace: Trace) -> None:
        expected = [slow.max_violation(trace, layer) for layer in trace.moe_layers]
        close(routing.max_violation(trace), expected)
        close(routing.balancedness(trace), [1 / (1 + v) for v in expected])

    @pytest.mark.parametrize("batch", [1, 7, 32])
    def test_batch_violation(self, trace: Trace, batch: int) -> None:
        close(
            routing.batch_violation(trace, batch),
            [slow.batch_violation(trace, layer, batch) for layer in trace.moe_layers],
        )

    @pytest.mark.parametrize("form", ["switch", "deepseek", "transformers", "transformers_layers"])
    def test_load_balance_loss(self, trace: Trace, form: Any) -> None:
        close(routing.load_balance_loss(trace, form), slow.balance_loss(trace, form))

    def test_z_loss(self, trace: Trace) -> None:
        close(routing.z_loss(trace), slow.z_loss(trace))

    def test_coactivation(self, trace: Trace) -> None:
        close(routing.Coactivation().add(trace).result(), routing.coactivation(trace))
        close(routing.adjacent_coactivation(trace), [slow.adjacent(trace, layer) for layer in trace.moe_layers])

    @pytest.mark.parametrize("step", [1, 2])
    @pytest.mark.parametrize("pairs", ["all", "zipped"])
    def test_cross_layer(self, trace: Trace, step: int, pairs: Any) -> None:
        steps = list(zip(trace.moe_layers, trace.moe_layers[step:], strict=False))
        expected = [slow.cross_layer(trace, one, two, pairs == "zipped") for one, two in steps]
        found = routing.cross_layer(trace, step, pairs)
        assert found.value.shape == (len(steps), trace.num_experts, trace.num_experts)
        close(found, expected)

    def test_specialisation(self, trace: Trace) -> None:
        labels = [("code", "prose", None)[n % 7 % 3] for n in range(len(trace.ids))]
        expected = [slow.specialisation(trace, labels, layer) for layer in trace.moe_layers]
        close(routing.specialisation(trace, labels), expected)
        close(routing.Specialisation("set").add(trace, labels).result(), expected)
        first = [slow.specialisation(trace, labels, layer, first=True) for layer in trace.moe_layers]
        close(routing.specialisation(trace, labels, of="first"), first)

    def test_contrast(self, trace: Trace) -> None:
        labels = [n % 5 % 2 for n in range(len(trace.ids))]
        shares = np.array([slow.specialisation(trace, labels, layer) for layer in trace.moe_layers])
        close(routing.contrast(trace, labels, 1, 0), shares[:, :, 1] - shares[:, :, 0])

    @pytest.mark.parametrize("of", ["first", "set"])
    @pytest.mark.parametrize("by", ["input", "next"])
    def test_vocabulary(self, trace: Trace, by: Any, of: Any) -> None:
        ids = trace.ids if by == "input" else [*trace.ids[1:], None]
        found = routing.vocabulary(trace, by, of, least=3)
        for row, layer in enumerate(trace.moe_layers):
            expected = slow.vocabulary(trace, layer, ids, of == "first", 3)
            assert found.ids.tolist() == sorted(expected)
            close(found.share.value[row], [expected[i] for i in sorted(expected)])
            close(found.mean.value[row], slow.mean(expected.values()))

    def test_repetition(self, trace: Trace) -> None:
        for of in ("first", "set"):
            expected = [slow.repetition(trace, layer, of == "first") for layer in trace.moe_layers]
            close(routing.repetition(trace, of), expected)

    def test_agreement(self, trace: Trace) -> None:
        shape = (len(trace.layers), trace.num_experts, trace.top_k, len(trace.ids))
        other = synthetic_trace(*shape, seed=99)
        other = slow.with_gaps(Trace(dict(other), ids=trace.ids, texts=[], meta=other.meta), 5)
        for top in {1, trace.top_k}:
            expected = [slow.agreement(trace, other, layer, top) for layer in trace.moe_layers]
            close(routing.agreement(trace, other, top), expected)


def test_number_format_ties_are_margins_below_the_spacing_at_their_size() -> None:
    """Logits 9 and 9.03 tie in bfloat16 (0.0625 between 8 and 16), not in float16 (0.0078); a real tie ties in all."""
    rows = [[9.0, 9.03, 0.0], [9.0, 9.0, 0.0], [1.0, 0.5, 0.0], [np.nan, 1.0, 1.0], [1.0, -np.inf, -np.inf]]
    base = synthetic_trace(1, 3, 1, len(rows))
    trace = Trace({"layers.0.moe.router_logits": np.array(rows, np.float32)}, ids=base.ids, texts=[], meta=base.meta)
    assert routing.ties(trace, "bfloat16")[0].tolist() == [True, True, False, False, False]
    assert routing.ties(trace, "float16")[0].tolist() == [False, True, False, False, False]
    assert routing.ties(trace)[0].tolist() == [False, True, False, False, False]
    close(routing.tie_share(trace, "bfloat16"), [2 / 5])
    meta = {**base.meta, "arithmetic": "bfloat16"}
    assert routing.ties(Trace(dict(trace), ids=base.ids, texts=[], meta=meta))[0].sum() == 2


def test_every_tie_by_the_format_is_one_of_the_margins() -> None:
    trace = synthetic_trace(2, 8, 2, 400)
    for row, margins in enumerate(routing.margin(trace, of="logits")):
        tied = routing.ties(trace, "bfloat16")[row]
        z = np.sort(np.abs(trace[f"layers.{row}.moe.router_logits"].astype(np.float64)), axis=1)
        assert tied.any() and (margins[tied] < np.exp2(np.floor(np.log2(z[tied, -1])) - 7)).all()


def test_sigmoid_routers_are_normalised_before_their_entropy_is_taken() -> None:
    base = synthetic_trace(1, 6, 2, 40)
    trace = Trace(dict(base), ids=base.ids, texts=[], meta={**base.meta, "gate_rule": "sigmoid_renormalised"})
    expected = []
    for row in slow.logits_of(trace, 0):
        p = [1 / (1 + math.exp(-z)) for z in row]
        expected.append(slow.entropy_of(q / math.fsum(p) for q in p) / math.log(6))
    close(routing.mean_entropy(trace), [slow.mean(expected)])


def test_predicted_ids_come_from_the_logits() -> None:
    """The likeliest next id, and a row with a NaN predicts nothing."""
    base = synthetic_trace(2, 4, 2, 60)
    logits = np.random.default_rng(0).integers(0, 4, (60, 5)).astype(np.float32)
    logits[7, 2] = np.nan
    trace = Trace({**base, "logits": logits}, ids=base.ids, texts=[], meta=base.meta)
    predicted = [None if n == 7 else max(range(5), key=lambda v, r=row: (r[v], -v)) for n, row in enumerate(logits)]
    found = routing.vocabulary(trace, "predicted", least=2)
    expected = slow.vocabulary(trace, 1, predicted, True, 2)
    assert found.ids.tolist() == sorted(expected)
    close(found.share.value[1], [expected[i] for i in sorted(expected)])
    with pytest.raises(NotCapturedError, match='"all"'):
        routing.vocabulary(base, "predicted")


def test_the_shares_of_one_id_add_up_and_name_its_favourite() -> None:
    trace = synthetic_trace(2, 8, 2, 300)
    taken = routing.Vocabulary(least=5).add(trace)
    found = taken.result()
    for column, token in enumerate(found.ids.tolist()):
        shares = taken.of_id(token).value
        close(shares.sum(axis=1), [1, 1])
        assert shares.argmax(axis=1).tolist() == found.expert[:, column].tolist()
        close(shares.max(axis=1), found.share.value[:, column])
    assert np.isnan(taken.of_id(10**6).value).all()


NEEDS = {
    "expert_ids": [
        routing.usage, routing.usage_entropy, routing.max_violation, routing.balancedness,
        lambda t: routing.batch_violation(t, 4), routing.adjacent_coactivation, routing.cross_layer,
        routing.repetition, routing.vocabulary, lambda t: routing.agreement(t, t), routing.load_balance_loss,
        lambda t: routing.specialisation(t, "all"),
    ],
    "router_logits": [routing.mean_entropy, routing.tie_share, routing.z_loss, routing.load_balance_loss],
    "gates": [routing.gate_entropy],
}  # fmt: skip


@pytest.mark.parametrize(("tap", "metric"), [(tap, m) for tap, metrics in NEEDS.items() for m in metrics])
def test_what_a_trace_lacks_is_named(tap: str, metric: Callable[[Trace], Any]) -> None:
    """Imported routes have ids and no logits; each metric says which tap it misses, and runs on all that it needs."""
    base = synthetic_trace(2, 4, 2, 12)
    arrays = {path: array for path, array in base.items() if not path.endswith(tap)}
    with pytest.raises(NotCapturedError, match=f"moe.{tap}' was not recorded"):
        metric(Trace(arrays, ids=base.ids, texts=[], meta=base.meta))


ALL: list[Callable[[Trace], Any]] = [
    routing.mean_entropy, routing.tie_share, routing.usage, routing.usage_entropy, routing.max_violation,
    routing.balancedness, routing.batch_violation, routing.load_balance_loss, routing.z_loss,
    routing.adjacent_coactivation, routing.cross_layer, routing.repetition, lambda t: routing.agreement(t, t),
    lambda t: routing.repetition(t, "set"), lambda t: routing.load_balance_loss(t, "transformers"),
    lambda t: routing.mean_entropy(t, "gates"), lambda t: routing.contrast(t, ["a"] * len(t.ids), "a", "b"),
    lambda t: routing.Specialisation().add(t, ["a"] * len(t.ids)).result(), lambda t: routing.vocabulary(t).mean,
    lambda t: routing.Coactivation().add(t).result(), lambda t: routing.norm_gate_correlation(t),
]  # fmt: skip


@pytest.mark.parametrize("metric", ALL)
def test_traces_without_tokens_or_without_experts_are_defined(metric: Callable[[Trace], routing.Measured]) -> None:
    """No warning, no error: NaN where there is nothing to measure, no row without a layer."""
    empty = metric(synthetic_trace(2, 4, 2, 0, hidden=4))
    assert np.isnan(empty.value).all()
    dense = metric(synthetic_trace(2, 4, 2, 9, hidden=4, dense_layers=[0, 1]))
    assert np.isnan(dense.value).all()
    one = metric(synthetic_trace(1, 1, 1, 40, hidden=4))
    assert one.level == 0.95 and one.words and "Interval" in one.words and "Measured" in repr(one)


def test_non_finite_logits_are_left_out_and_spoil_no_other_token() -> None:
    clean, dirty = synthetic_trace(1, 8, 2, 80), synthetic_trace(1, 8, 2, 80, nonfinite=True)
    rows = [n for n in range(80) if np.isfinite(dirty["layers.0.moe.router_logits"][n]).all()]
    assert len(rows) == 77
    z = slow.logits_of(clean, 0)
    kept = [slow.entropy_of(softmax) / math.log(8) for softmax in map(slow.softmax, (z[n] for n in rows))]
    minus = next(n for n in range(80) if np.isneginf(dirty["layers.0.moe.router_logits"][n]).any())
    kept.append(slow.entropy_of(slow.softmax(slow.logits_of(dirty, 0)[minus])) / math.log(8))  # −Inf only excludes
    close(routing.mean_entropy(dirty), [slow.mean(kept)])
    assert np.isfinite(routing.load_balance_loss(dirty).value).all() and np.isfinite(routing.z_loss(dirty).value).all()


def test_arguments_that_make_no_sense_are_refused_by_name() -> None:
    trace, other = synthetic_trace(1, 4, 2, 6), synthetic_trace(1, 8, 2, 6)
    wrong: list[tuple[Callable[[], Any], str]] = [
        (lambda: routing.load_balance_loss(trace, "hf"), "switch, deepseek, transformers"),
        (lambda: routing.Coactivation("zipped"), "'all' or 'adjacent'"),
        (lambda: routing.cross_layer(trace, 0), "1 or more, not 0"),
        (lambda: routing.cross_layer(trace, pairs="adjacent"), "'all' or 'zipped'"),
        (lambda: routing.repetition(trace, "any"), "'first' choice or of the 'set'"),
        (lambda: routing.mean_entropy(trace, "load"), "usage_entropy"),
        (lambda: routing.usage(trace, level=95), "between 0 and 1, such as 0.95"),
        (lambda: routing.Usage(block=0), "1 or more, not 0"),
        (lambda: routing.batch_violation(trace, 2.5), "not 2.5"),
        (lambda: routing.agreement(trace, other), "same MoE layers, experts and k"),
        (lambda: routing.agreement(trace, trace, 3), "top 3 of 2"),
        (lambda: routing.agreement(trace, trace, 0), "not 0"),
        (lambda: routing.Agreement().add(trace), "two traces"),
        (lambda: routing.specialisation(trace, [1, 2]), "6 tokens, the labels are 2"),
        (lambda: routing.specialisation(trace, [1, "a", 1, 1, 1, 1]), "sorted"),
        (lambda: routing.specialisation(trace, [[], [], [], [], [], []]), "one label per token"),
        (lambda: routing.specialisation(trace, "a", of="top"), "'set' or by 'first'"),
        (lambda: routing.contrast(trace, "a", "a", "a"), "two labels"),
        (lambda: routing.vocabulary(trace, "output"), "input, next, predicted"),
        (lambda: routing.vocabulary(trace, least=0), "1 occurrence"),
        (lambda: routing.ties(trace, "int8"), "number format"),
        (lambda: routing.Usage().result(), "fed no trace"),
    ]
    for call, sentence in wrong:
        with pytest.raises(ArgumentError, match=sentence):
            call()


def test_traces_of_other_tokens_are_not_compared() -> None:
    a = synthetic_trace(1, 4, 2, 6)
    b = Trace(dict(a), ids=[*a.ids[:3], 999, *a.ids[4:]], texts=[], meta=a.meta)
    with pytest.raises(ArgumentError, match=rf"part at token 3 \(ids {a.ids[3]} and 999\)"):
        routing.agreement(a, b)


def test_a_longer_run_is_cut_to_the_shorter() -> None:
    a = synthetic_trace(2, 4, 2, 90)
    b = Trace(
        {path: array[:50] for path, array in a.items()}, ids=a.ids[:50], texts=[], meta={**a.meta, "passes": [[0, 50]]}
    )
    assert routing.agreement(a, b).value.tolist() == [1, 1] and routing.Agreement().add(a, b).tokens == 50


def test_contrast_finds_the_experts_that_differ_and_no_others() -> None:
    """Expert 5 takes slots of others in one layer: it comes first, and the layers left alone bear no finding."""
    trace = slow.blind(16, 2, 6000, layers=3)
    labels = np.array([("a", "b")[n // 50 % 2] for n in range(6000)])
    ids = trace["layers.1.moe.expert_ids"].copy()
    mine = (labels == "a") & (ids != 5).all(axis=1) & (np.arange(6000) % 4 == 0)
    ids[mine, 0] = 5
    trace = Trace({**trace, "layers.1.moe.expert_ids": ids}, ids=trace.ids, texts=[], meta=trace.meta)
    found = routing.contrast(trace, labels, "a", "b")
    assert found.order[0].tolist() == [1, 5] and found.value[1, 5] > 0.15 and found.low[1, 5] > 0
    assert found.corrected[1, 5] < 1e-6 and found.corrected[[0, 2]].min() > 0.05
    assert (found.corrected >= found.p).all()
    assert sorted(map(tuple, found.order.tolist())) == list(itertools.product(range(3), range(16)))


def test_counts_without_tokens_have_a_usage_and_nothing_that_needs_tokens() -> None:
    """What an imported file of counts tells is told; the rest is asked for, not NaN."""
    base, empty = synthetic_trace(2, 6, 2, 90), synthetic_trace(2, 6, 2, 0)
    arrays = {f"layers.{layer}.moe.load": row for layer, row in enumerate(routing.load(base))}
    trace = Trace(arrays, ids=[], texts=[], meta=empty.meta)
    for metric in (routing.usage, routing.usage_entropy, routing.max_violation, routing.balancedness):
        close(metric(trace), metric(base).value)
    assert np.isfinite(routing.usage(trace).low).all()
    np.testing.assert_array_equal(routing.Usage().add(trace).add(base).counts, 2 * routing.load(base))
    for metric in (routing.repetition, routing.cross_layer, routing.mean_entropy, routing.vocabulary):
        with pytest.raises(NotCapturedError, match="was not recorded"):
            metric(trace)
