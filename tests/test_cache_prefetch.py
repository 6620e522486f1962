"""Prefetch plans against plain loops over the tokens, and the look-ahead against NumPy on the taps of a run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import colibri_lab as lab
from colibri_lab import cache, testing
from colibri_lab.cache import lookahead, plans
from colibri_lab.errors import ArgumentError, NotCapturedError
from colibri_lab.testing import synthetic_trace
from colibri_lab.trace import Trace

MODELS = {
    "dense first": {"family": "qwen2_moe", "layers": 4, "experts": 5, "dense_layers": (0,)},
    "dense between": {"family": "qwen3_moe", "layers": 4, "experts": 6, "top_k": 3, "dense_layers": (2,)},
    "one MoE layer": {"family": "qwen2_moe", "layers": 2, "experts": 4, "dense_layers": (0,)},
}


def model_of(name: str, folder: Path) -> lab.Model:
    return lab.open() if name == "bundled" else lab.open(testing.tiny_model(folder / "model", **MODELS[name]))


def ids_for(model: lab.Model, count: int) -> list[int]:
    return np.random.default_rng(3).integers(3, model.config.vocab_size - 8, count).tolist()


def with_gaps(trace: Trace, seed: int) -> Trace:
    """The same with a tenth of the slots empty."""
    rng, arrays = np.random.default_rng(seed), dict(trace)
    for path in [f"layers.{layer}.moe.expert_ids" for layer in trace.moe_layers]:
        arrays[path] = np.where(rng.random(trace[path].shape) < 0.1, -1, trace[path])
    return Trace(arrays, ids=trace.ids, texts=trace.texts, meta=trace.meta)


# ---- plans of ids --------------------------------------------------------------------------------------------------


def ranked(seen: Counter[int]) -> list[tuple[int, int]]:
    """(expert, count), the most frequent first, equal ones by number."""
    return sorted(seen.items(), key=lambda pair: (-pair[1], pair[0]))


def guesses(trace: Trace, kind: str, count: int) -> list[list[list[int]]]:
    """Token by token, as one would do by hand."""
    out = []
    for layer in trace.moe_layers:
        seen: Counter[int] = Counter()
        before: list[int] = []
        rows = []
        for token in trace[f"layers.{layer}.moe.expert_ids"].tolist():
            often = [expert for expert, _ in ranked(seen)]
            named = {"previous": before, "frequency": often, "oracle": token}[kind][:count]
            rows.append(named + [-1] * (count - len(named)))
            before = token
            seen.update(expert for expert in token if expert >= 0)
        out.append(rows)
    return out


@pytest.mark.parametrize("kind", ["previous", "frequency", "oracle"])
def test_a_plan_is_what_a_loop_over_the_tokens_names(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random traces with empty slots and dense layers, in pieces of a few tokens and as one."""
    for seed in range(12):
        trace = with_gaps(synthetic_trace(3, 7, 3, 40, seed, dense_layers=[1] if seed % 2 else []), seed)
        for count in (1, 3, 6) if kind == "frequency" else (1, 3):
            monkeypatch.setattr(plans, "_PIECE", 1 << 20 if seed % 3 else 30)
            done: list[float] = []
            found = cache.plan(trace, kind, count, progress=done.append)
            assert done == sorted(done) and (kind != "frequency" or done[-1] == 1)
            assert found.kind == kind and found.ids.dtype == np.int32 and found.late is None
            assert found.ids.tolist() == guesses(trace, kind, count)


def test_no_plan_but_the_oracle_reads_what_comes_after_a_token() -> None:
    """Another future, the same guesses up to there and for the first token of it."""
    one, other = synthetic_trace(2, 8, 2, 60, 0), synthetic_trace(2, 8, 2, 60, 1)
    joined = {path: np.concatenate([one[path][:30], other[path][30:]]) for path in one}
    mixed = Trace(joined, ids=one.ids, texts=one.texts, meta=one.meta)
    for kind in ("previous", "frequency"):
        np.testing.assert_array_equal(cache.plan(mixed, kind).ids[:, :31], cache.plan(one, kind).ids[:, :31])
        assert (cache.plan(mixed, kind).ids != cache.plan(one, kind).ids).any()


def test_a_profile_names_its_most_frequent_experts_to_every_token() -> None:
    trace, profile = synthetic_trace(2, 6, 2, 20, 0), synthetic_trace(2, 6, 2, 300, 5)
    found = cache.plan(trace, "frequency", 4, profile=profile)
    for row, layer in enumerate(trace.moe_layers):
        seen = Counter(profile[f"layers.{layer}.moe.expert_ids"].ravel().tolist())
        assert found.ids[row].tolist() == [[expert for expert, _ in ranked(seen)[:4]]] * 20
    assert "300 tokens of a profile" in found.source


def test_the_oracle_is_right_and_finds_all() -> None:
    trace = synthetic_trace(3, 8, 2, 50)
    found = cache.prefetch_quality(trace, cache.plan(trace, "oracle"), expert_bytes=10)
    assert (found.precision.value == 1).all() and (found.recall.value == 1).all()
    assert found.wasted_bytes is not None and not found.wasted_bytes.any()


def test_the_quality_of_a_plan_is_that_of_its_ids_and_of_what_it_says_is_late() -> None:
    trace = synthetic_trace(2, 6, 2, 80)
    ids = cache.plan(trace, "previous").ids
    late = np.random.default_rng(0).random(ids.shape) < 0.3
    by_plan = cache.prefetch_quality(trace, cache.Plan("mine", ids, late), expert_bytes=7)
    by_ids = cache.prefetch_quality(trace, ids, late=late, expert_bytes=7)
    np.testing.assert_array_equal(by_plan.late, by_ids.late)
    np.testing.assert_array_equal(by_plan.recall.value, by_ids.recall.value)
    assert by_plan.late.sum() > 0 and (by_plan.wasted_bytes == 7 * by_ids.wasted).all()


def test_blind_tokens_make_every_plan_but_the_oracle_a_guess() -> None:
    """8,000 tokens that choose blindly: precision k/E, recall fetched/E, within five standard errors."""
    ids = np.random.default_rng(1).random((8_000, 8)).argsort(axis=1)[:, :2]
    base = synthetic_trace(1, 8, 2, 8_000)
    trace = Trace({"layers.0.moe.expert_ids": ids.astype(np.int32)}, ids=base.ids, texts=base.texts, meta=base.meta)
    for kind in ("previous", "frequency"):
        found = cache.prefetch_quality(trace, cache.plan(trace, kind))
        for measured in (found.precision, found.recall):
            assert abs(measured.value[0] - 2 / 8) < 5 * 0.43 / np.sqrt(16_000)


def test_plans_that_make_no_sense_are_refused_by_name() -> None:
    trace = synthetic_trace(1, 4, 2, 3)
    with pytest.raises(ArgumentError, match="'previous', 'frequency' or 'oracle', not 'markov'"):
        cache.plan(trace, "markov")
    with pytest.raises(ArgumentError, match="1 to 2 experts for a token, not 3"):
        cache.plan(trace, "previous", 3)
    with pytest.raises(ArgumentError, match="1 to 4 experts for a token, not 5"):
        cache.plan(trace, "frequency", 5)
    with pytest.raises(ArgumentError, match="profile is for the plan 'frequency'"):
        cache.plan(trace, "oracle", profile=trace)
    with pytest.raises(ArgumentError, match="8 experts"):
        cache.plan(trace, "frequency", profile=synthetic_trace(1, 8, 2, 3))
    with pytest.raises(ArgumentError, match="pass a live session, or model="):
        cache.look_ahead(trace)


# ---- look-ahead ----------------------------------------------------------------------------------------------------


def by_hand(session: lab.Session, row: int) -> NDArray[np.float64]:
    """(T, E) logits of MoE layer number `row` from the state before the experts of the MoE layer before it."""
    weights, config = session.model.weights, session.model.config
    earlier, layer = config.moe_layers[row - 1], config.moe_layers[row]
    enters = session.tape["embed"] if earlier == 0 else session.tape[f"layers.{earlier - 1}.output"]
    out = np.empty((len(session.ids), config.num_experts))
    for token in range(len(session.ids)):
        h = enters[token].astype(np.float64) + session.tape[f"layers.{earlier}.attn.out"][token]
        normed = h / (np.dot(h, h) / len(h) + config.rms_norm_eps) ** 0.5 * weights.float32(f"layers.{layer}.moe_norm")
        out[token] = [np.dot(gate, normed) for gate in weights.float32(f"layers.{layer}.moe.router")]
    return out


@pytest.mark.parametrize("name", ["bundled", *MODELS])
def test_the_look_ahead_is_the_next_router_on_the_state_before_the_experts(name: str, tmp_path: Path) -> None:
    model = model_of(name, tmp_path)
    session = model.session(capture="all", max_tokens=64)
    session.feed(ids_for(model, 40))
    found = cache.look_ahead(session)
    k, layers = model.config.top_k, model.config.moe_layers
    assert found.ids.shape == (len(layers), 40, k) and found.ids.dtype == np.int32
    assert (found.ids[0] == -1).all() and "taps of the run itself" in found.source
    for row in range(1, len(layers)):
        assert found.ids[row].tolist() == np.argsort(-by_hand(session, row), axis=1)[:, :k].tolist()


@pytest.mark.parametrize("name", ["bundled", "dense first"])
def test_its_norm_and_router_are_those_of_the_engine(name: str, tmp_path: Path) -> None:
    """On a layer's own state they give the logits that the engine computed, and so the experts that it chose."""
    model = model_of(name, tmp_path)
    session = model.session(capture="all", max_tokens=64)
    session.feed(ids_for(model, 40))
    for layer in model.config.moe_layers:
        own = lookahead.router_logits(model, layer, lookahead.state(session.trace(), layer))
        testing.assert_close(own, session.tape[f"layers.{layer}.moe.router_logits"], f"layer {layer}")


def test_a_run_that_kept_too_little_is_replayed_and_the_plan_says_so() -> None:
    model = lab.open()
    ids = ids_for(model, 30)
    full, routing = model.session(capture="all", max_tokens=32), model.session(max_tokens=32)
    full.feed(ids)
    for start in range(0, 30, 7):
        routing.feed(ids[start : start + 7])
    done: list[float] = []
    found = cache.look_ahead(routing, 4, progress=done.append)
    np.testing.assert_array_equal(found.ids, cache.look_ahead(full, 4).ids)
    assert "a replay of the 30 tokens in a session of its own" in found.source and done[-1] == 1
    assert len(routing.passes) == 5


@pytest.mark.parametrize("emulate", [None, "bfloat16"])
def test_a_loaded_trace_gives_the_plan_of_its_session(emulate: str | None, tmp_path: Path) -> None:
    """With the model that made it, also under an emulated number format, which the replay takes from the trace."""
    model = lab.open()
    session, full = (model.session(capture, max_tokens=32, emulate=emulate) for capture in ("routing", "all"))
    for each in (session, full):
        each.feed(ids_for(model, 25))
    session.trace().save(tmp_path / "run.safetensors")
    found = cache.look_ahead(lab.load_trace(tmp_path / "run.safetensors"), model=model)
    np.testing.assert_array_equal(found.ids, cache.look_ahead(full).ids)


def test_the_look_ahead_of_the_bundled_model_beats_chance_and_the_token_before() -> None:
    """Its routers were trained on text, and the residual stream changes little in one layer."""
    session = lab.open().session(max_tokens=200)
    session.feed("The router of the next layer reads nearly the same state, so a guess made early is often right.")
    ahead = cache.prefetch_quality(session, cache.look_ahead(session))
    before = cache.prefetch_quality(session, cache.plan(session, "previous"))
    assert (ahead.precision.value[1:] > before.precision.value[1:]).all()
    assert (ahead.precision.value[1:] > ahead.precision.chance).all() and ahead.precision.chance == 2 / 8
    assert ahead.issued[0] == 0 and np.isnan(ahead.precision.value[0]) and ahead.recall.value[0] == 0


def test_a_run_that_this_model_would_not_repeat_is_not_replayed() -> None:
    """One with edits, and one whose weights were others."""
    model = lab.open()
    session = model.session(max_tokens=8)
    stepper = session.stepper([5, 6, 7])
    stepper.force(1, [0, 1])
    stepper.finish()
    with pytest.raises(NotCapturedError, match="a run with edits is not repeated"):
        cache.look_ahead(session)
    stepper.undo()
    other = model.with_weights({"norm": 2 * model.weights["norm"]})
    with pytest.raises(NotCapturedError, match="the model that is open did not make this trace"):
        cache.look_ahead(session, model=other)


def test_wasted_bytes_count_each_expert_by_its_own_size() -> None:
    """By hand, token by token, with experts of different sizes; one size for all counts alike."""
    trace = synthetic_trace(2, 8, 2, 30)
    plan, sizes = lab.cache.plan(trace, "previous"), np.arange(1, 17).reshape(2, 8)
    wasted = [
        sum(
            int(sizes[row, expert])
            for token in range(30)
            for expert in plan.ids[row, token].tolist()
            if expert >= 0 and expert not in trace[f"layers.{layer}.moe.expert_ids"][token]
        )
        for row, layer in enumerate(trace.moe_layers)
    ]
    found = lab.cache.prefetch_quality(trace, plan, expert_bytes=sizes).wasted_bytes
    assert found is not None and found.tolist() == wasted and min(wasted) > 0
    one = lab.cache.prefetch_quality(trace, plan, expert_bytes=7)
    assert one.wasted_bytes is not None and one.wasted_bytes.tolist() == (7 * one.wasted).tolist()
