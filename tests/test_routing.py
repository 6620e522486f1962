"""Routing analyses against slow, independent definitions, and against what chance gives."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import colibri_lab as lab
from colibri_lab import routing
from colibri_lab.errors import ArgumentError, NotCapturedError
from colibri_lab.testing import synthetic_trace
from colibri_lab.trace import Trace


def with_logits(rows: list[list[float]], top_k: int) -> Trace:
    """A trace of one layer whose router logits are `rows`, scores equal to them, ids by descending score."""
    logits = np.array(rows, np.float32)
    ids = np.argsort(-np.nan_to_num(logits, nan=-np.inf), axis=1, kind="stable")[:, :top_k].astype(np.int32)
    arrays = {"router_logits": logits, "scores": logits, "expert_ids": ids, "gates": np.ones_like(ids, np.float32)}
    base = synthetic_trace(1, logits.shape[1], top_k, len(rows))
    return Trace(
        {f"layers.0.moe.{name}": a for name, a in arrays.items()}, ids=base.ids, texts=base.texts, meta=base.meta
    )


SHAPES = [(3, 8, 2, 40), (2, 5, 3, 17), (1, 64, 8, 30), (2, 3, 3, 9), (1, 1, 1, 4), (2, 300, 7, 5)]


@pytest.mark.parametrize(("layers", "experts", "top_k", "tokens"), SHAPES)
class TestAgainstTheDefinition:
    def test_load_counts_tokens(self, layers: int, experts: int, top_k: int, tokens: int) -> None:
        trace = synthetic_trace(layers, experts, top_k, tokens)
        load = routing.load(trace)
        assert load.dtype == np.int64 and load.shape == (layers, experts)
        for layer in range(layers):
            ids = trace[f"layers.{layer}.moe.expert_ids"].tolist()
            assert load[layer].tolist() == [sum(e in row for row in ids) for e in range(experts)]
        assert (load.sum(axis=1) == tokens * top_k).all()

    def test_entropy_is_minus_the_sum_of_p_ln_p(self, layers: int, experts: int, top_k: int, tokens: int) -> None:
        trace = synthetic_trace(layers, experts, top_k, tokens)
        entropy = routing.entropy(trace)
        assert entropy.dtype == np.float64 and entropy.shape == (layers, tokens)
        for layer, token in itertools.product(range(layers), range(tokens)):
            z = [float(v) for v in trace[f"layers.{layer}.moe.router_logits"][token]]
            total = math.fsum(math.exp(v - max(z)) for v in z)
            p = [math.exp(v - max(z)) / total for v in z]
            assert entropy[layer, token] == pytest.approx(
                -math.fsum(q * math.log(q) for q in p if q), rel=1e-12, abs=1e-12
            )

    def test_margin_is_the_gap_to_the_best_that_was_left_out(
        self, layers: int, experts: int, top_k: int, tokens: int
    ) -> None:
        trace = synthetic_trace(layers, experts, top_k, tokens)
        margin = routing.margin(trace)
        assert margin.dtype == np.float64 and margin.shape == (layers, tokens)
        for layer, token in itertools.product(range(layers), range(tokens)):
            s = sorted((float(v) for v in trace[f"layers.{layer}.moe.scores"][token]), reverse=True)
            assert margin[layer, token] == (s[top_k - 1] - s[top_k] if top_k < experts else math.inf)

    def test_margin_of_logits_is_the_gap_between_router_logits(
        self, layers: int, experts: int, top_k: int, tokens: int
    ) -> None:
        trace = synthetic_trace(layers, experts, top_k, tokens)
        for row, margin in enumerate(routing.margin(trace, of="logits")):
            z = -np.sort(-trace[f"layers.{row}.moe.router_logits"].astype(np.float64), axis=1)
            expected = z[:, top_k - 1] - z[:, top_k] if top_k < experts else np.full(tokens, np.inf)
            np.testing.assert_array_equal(margin, expected)

    def test_coactivation_is_the_share_of_common_tokens(
        self, layers: int, experts: int, top_k: int, tokens: int
    ) -> None:
        trace = synthetic_trace(layers, experts, top_k, tokens)
        together = routing.coactivation(trace)
        assert together.shape == (layers, experts, experts)
        for layer in range(layers):
            sets = [set(row) for row in trace[f"layers.{layer}.moe.expert_ids"].tolist()]
            for i in range(experts):
                mine = [s for s in sets if i in s]
                for j in range(experts):
                    value = together[layer, i, j]
                    assert value == sum(j in s for s in mine) / len(mine) if mine else math.isnan(value)


class TestSpecialValues:
    def test_a_flat_router_has_the_entropy_ln_E_and_one_favourite_has_none(self) -> None:
        trace = with_logits([[0.0] * 8, [500.0] + [-500.0] * 7, [1e30] + [0.0] * 7, [3.0, 3.0] + [-np.inf] * 6], 2)
        np.testing.assert_allclose(routing.entropy(trace)[0], [math.log(8), 0, 0, math.log(2)], rtol=1e-15, atol=0)
        np.testing.assert_allclose(routing.entropy(trace, normalised=True)[0], [1, 0, 0, 1 / 3], rtol=1e-15, atol=0)

    def test_one_expert_has_no_entropy_and_no_runner_up(self) -> None:
        trace = with_logits([[1.0], [2.0]], 1)
        assert routing.entropy(trace, normalised=True).tolist() == [[0, 0]] and routing.margin(trace).tolist() == [
            [math.inf] * 2
        ]

    def test_G1_a_row_with_nan_or_inf_says_so_and_spoils_no_other(self) -> None:
        trace = with_logits(
            [[np.nan, 1, 2, 3], [np.inf, 1, 2, 3], [-np.inf, 1, 2, 3], [0, 1, 2, 3], [np.inf, np.inf, np.inf, 0]], 2
        )
        entropy, margin = routing.entropy(trace)[0], routing.margin(trace)[0]
        assert np.isnan(entropy).tolist() == [True, True, False, False, True]
        assert np.isnan(margin[0]) and margin[1:].tolist() == [1, 1, 1, 0]

    def test_a_runner_up_that_is_excluded_can_never_win(self) -> None:
        assert routing.margin(with_logits([[1.0, 2.0, -np.inf, -np.inf]], 2)).tolist() == [[math.inf]]

    def test_a_margin_of_something_else_is_refused(self) -> None:
        with pytest.raises(ArgumentError, match="'scores' or of 'logits', not 'gates'"):
            routing.margin(synthetic_trace(1, 4, 2, 3), of="gates")

    def test_an_exact_tie_has_the_margin_zero(self) -> None:
        assert routing.margin(with_logits([[1.0, 2.0, 2.0, 2.0]], 2)).tolist() == [[0.0]]

    def test_an_expert_that_nobody_chose_has_no_shares(self) -> None:
        together = routing.coactivation(with_logits([[3.0, 2.0, 1.0]] * 4, 2))[0]
        np.testing.assert_array_equal(together, [[1, 1, 0], [1, 1, 0], [np.nan] * 3])

    def test_rows_follow_the_layers_with_experts(self) -> None:
        trace = synthetic_trace(5, 8, 2, 10, dense_layers=[0, 3])
        assert routing.load(trace).shape == (3, 8)
        np.testing.assert_array_equal(
            routing.load(trace)[1], np.bincount(trace["layers.2.moe.expert_ids"].ravel(), minlength=8)
        )

    @pytest.mark.parametrize("analysis", [routing.load, routing.entropy, routing.margin, routing.coactivation])
    def test_what_was_not_recorded_is_asked_for(self, analysis: Callable[[Trace], Any]) -> None:
        base = synthetic_trace(2, 4, 2, 3)
        with pytest.raises(NotCapturedError, match='capture="routing"'):
            analysis(Trace({}, ids=base.ids, texts=base.texts, meta=base.meta))

    def test_no_tokens_give_empty_rows(self) -> None:
        trace = synthetic_trace(2, 4, 2, 0)
        assert routing.load(trace).tolist() == [[0] * 4] * 2 and routing.entropy(trace).shape == routing.margin(
            trace
        ).shape == (2, 0)
        assert np.isnan(routing.coactivation(trace)).all()

    def test_a_long_trace_is_worked_on_in_blocks_with_the_same_values(self) -> None:
        trace = synthetic_trace(1, 8, 2, 9000)
        short = with_logits(trace["layers.0.moe.router_logits"][8990:].tolist(), 2)
        np.testing.assert_array_equal(routing.entropy(trace)[0, 8990:], routing.entropy(short)[0])
        assert (
            routing.margin(trace)[0, 8999]
            == np.diff(np.sort(trace["layers.0.moe.scores"][8999].astype(np.float64)))[-2]
        )


class TestSources:
    @pytest.mark.parametrize("analysis", [routing.load, routing.entropy, routing.margin, routing.coactivation])
    def test_a_session_stands_in_for_its_trace(self, analysis: Callable[[Any], Any]) -> None:
        session = lab.open().session(max_tokens=8)
        session.feed([1, 2, 3])
        np.testing.assert_array_equal(analysis(session), analysis(session.trace()))

    @pytest.mark.parametrize("analysis", [routing.load, routing.entropy, routing.margin, routing.coactivation])
    @pytest.mark.parametrize("source", [None, "run.safetensors", np.zeros(3), np.zeros((3, 3)), {}])
    def test_anything_else_is_refused_by_its_kind(self, analysis: Callable[[Any], Any], source: Any) -> None:
        with pytest.raises(ArgumentError, match=f"a trace or a session is needed; this is a {type(source).__name__}"):
            analysis(source)

    def test_a_slot_without_an_expert_is_not_counted(self) -> None:
        trace = with_logits([[3.0, 2.0, 1.0]] * 3, 2)
        ids = np.array([[0, 1], [1, -1], [-1, -1]], np.int32)
        trace = Trace({**trace, "layers.0.moe.expert_ids": ids}, ids=trace.ids, texts=trace.texts, meta=trace.meta)
        assert routing.load(trace).tolist() == [[1, 2, 0]]
        np.testing.assert_array_equal(routing.coactivation(trace)[0], [[1, 1, 0], [0.5, 1, 0], [np.nan] * 3])

    @pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint64, np.int64])
    def test_ids_of_every_whole_dtype_count_alike(self, dtype: Any) -> None:
        trace = synthetic_trace(1, 100, 2, 30)
        ids = trace["layers.0.moe.expert_ids"].astype(dtype)
        other = Trace({"layers.0.moe.expert_ids": ids}, ids=trace.ids, texts=trace.texts, meta=trace.meta)
        np.testing.assert_array_equal(routing.load(other), routing.load(trace))
        np.testing.assert_array_equal(routing.coactivation(other), routing.coactivation(trace))


class TestChance:
    def test_blind_routing_lands_on_the_null_values_of_the_docstrings(self) -> None:
        rng = np.random.default_rng(0)
        rows = rng.random((20_000, 8)).tolist()
        trace = with_logits(rows, 2)
        low, high = routing.chance_band(20_000, 2, 8)
        share = routing.load(trace)[0] / 20_000
        assert low < 0.25 < high and ((share > low - 0.003) & (share < high + 0.003)).all()
        others = routing.coactivation(trace)[0][~np.eye(8, dtype=bool)]
        assert np.abs(others - 1 / 7).max() < 0.02

    @pytest.mark.parametrize(
        ("tokens", "top_k", "experts"), [(40, 2, 8), (7, 1, 3), (300, 8, 128), (64, 3, 4), (1, 1, 8)]
    )
    def test_the_band_holds_the_exact_binomial_quantiles(self, tokens: int, top_k: int, experts: int) -> None:
        p, q = top_k / experts, 1 - top_k / experts
        mass = [math.comb(tokens, n) * p**n * q ** (tokens - n) for n in range(tokens + 1)]
        at_most = [math.fsum(mass[: n + 1]) for n in range(tokens + 1)]
        low = next(n for n in range(tokens + 1) if at_most[n] >= 0.025)
        high = next(n for n in range(tokens + 1) if at_most[n] >= 0.975)
        assert routing.chance_band(tokens, top_k, experts) == (low / tokens, high / tokens)

    def test_the_band_at_the_edges(self) -> None:
        assert routing.chance_band(50, 4, 4) == (1.0, 1.0) and routing.chance_band(0, 2, 8) == (0.0, 1.0)
        low, high = routing.chance_band(2_000_000, 8, 512)
        assert low < 1 / 64 < high < 1 / 64 + 0.001
        with pytest.raises(ArgumentError, match="9 of 8"):
            routing.chance_band(10, 9, 8)

    def test_the_band_of_a_corpus_needs_no_array_of_its_length(self) -> None:
        """Against the normal approximation, which is good to a millionth at this size."""
        low, high = routing.chance_band(10**12, 2, 8)
        spread = 1.959963984540054 * math.sqrt(0.25 * 0.75 / 10**12)
        assert low == pytest.approx(0.25 - spread, abs=1e-6 * spread) and high == pytest.approx(
            0.25 + spread, abs=1e-6 * spread
        )

    @pytest.mark.parametrize(
        "arguments",
        [("10", 2, 8), (10.0, 2, 8), (10, None, 8), (10, True, 8), (10, 2, [8]), (10, 2, 8, "x"), (10, 2, 8, None),
         (10, 2, 8, math.nan), (10, 2, 8, 1), (-1, 2, 8), (10, 0, 8), (10**13, 2, 8)],
    )  # fmt: skip
    def test_an_argument_that_makes_no_sense_is_refused(self, arguments: tuple[Any, ...]) -> None:
        with pytest.raises(ArgumentError, match="band"):
            routing.chance_band(*arguments)


def test_analyses_run_without_the_compiled_engine() -> None:
    """Traces are made, saved, loaded and analysed in a process in which the engine cannot be imported."""
    script = """
import sys, tempfile, pathlib
class Block:
    def find_spec(self, name, path=None, target=None):
        if name == "colibri_lab._core":
            raise ImportError(name)
sys.meta_path.insert(0, Block())
import colibri_lab as lab
trace = lab.testing.synthetic_trace(2, 8, 2, 20, hidden=4)
with tempfile.TemporaryDirectory() as folder:
    trace.save(pathlib.Path(folder) / "t")
    trace = lab.load_trace(pathlib.Path(folder) / "t")
    assert lab.routing.load(trace).sum() == 80
    for analysis in (lab.routing.entropy, lab.routing.margin, lab.routing.coactivation):
        analysis(trace)
assert not {"torch", "matplotlib", "ipywidgets", "anywidget"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
