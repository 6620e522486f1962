"""`lab.nan.find` names the places where NaN and Inf were born: all of them, and no other; `scan` counts by tap."""

from __future__ import annotations

import re
import tracemalloc
from pathlib import Path
from typing import Any

import format_goldens as goldens
import numpy as np
import pytest
from checkpoints import random_tensors, small_config, write_checkpoint
from planted_runs import Plant, Run, places
from safetensors.numpy import load_file, save_file

import colibri_lab as lab
from colibri_lab.nan.births import births
from colibri_lab.nan.census import first_rows
from colibri_lab.nan.source import Source
from colibri_lab.testing import synthetic_trace, tiny_model
from colibri_lab.trace import Trace

TAPS = (
    "embed", "attn.norm", "attn.q", "attn.k", "attn.v", "attn.weights", "attn.out", "moe.input", "moe.router_logits",
    "moe.scores", "moe.gates", "dispatch.input", "dispatch.gate", "dispatch.up", "dispatch.hidden", "dispatch.output",
    "shared.output", "shared.gate", "moe.routed", "moe.output", "mlp.input", "mlp.output", ".output", "norm", "logits",
)  # fmt: skip
IDS = list(range(3, 27))


def born(trace: Trace) -> set[Plant]:
    source = Source(trace)
    return {
        (birth.path, int(token), tuple(int(i) for i in place))
        for birth in births(source, first_rows(source))
        for row, token in enumerate(birth.tokens)
        for place in np.argwhere(birth.mask[row])
    }


def planted(seed: int, count: int, values: tuple[float, ...]) -> Run:
    draw = np.random.default_rng(seed)
    clean = Run(9, {}, seed=seed)
    plants = {places(clean, draw): values[i % len(values)] for i in range(count)}
    return Run(9, plants, seed=seed)


# ---- births ----


@pytest.mark.parametrize("seed", range(12))
def test_what_is_born_is_what_was_planted_where_all_was_finite(seed: int) -> None:
    """Any number of NaN at any taps, in one pass or three; all else that is not finite was passed on by arithmetic."""
    run = planted(seed, 1 + seed % 4, (np.nan,))
    assert run.born and born(run.trace()) == run.born
    assert born(run.trace(passes=(2, 3, 4))) == run.born


@pytest.mark.parametrize("seed", range(12))
def test_an_infinity_is_born_once_however_norms_and_softmax_change_it(seed: int) -> None:
    run = planted(100 + seed, 1, (np.inf, -np.inf) if seed % 2 else (-np.inf,))
    assert run.born and born(run.trace()) == run.born


@pytest.mark.parametrize("seed", range(24))
def test_taps_that_were_not_recorded_hide_no_other_birth_and_make_none(seed: int) -> None:
    """A random third of the taps is left out, but not those with the plants."""
    run = planted(200 + seed, 1 + seed % 3, (np.nan,))
    own = {re.sub(r"experts\.\d+", "dispatch", path) for path, _, _ in run.born}
    draw = np.random.default_rng(seed)
    without = [tap for tap in TAPS if draw.random() < 0.35 and not any(path.endswith(tap) for path in own)]
    assert born(run.trace(*without)) == run.born


@pytest.mark.parametrize(
    ("plant", "without", "seen"),
    [
        (("layers.0.attn.out", 4, (2,)), ("attn.out",), "layers.0.moe.input"),
        (("layers.0.moe.output", 4, (2,)), ("moe.output",), "layers.0.output"),
        (("layers.1.mlp.output", 4, (2,)), ("mlp.output", "layers.1.output"), "layers.2.attn.norm"),
        (("norm", 4, (2,)), ("norm",), "logits"),
    ],
)
def test_a_birth_between_two_recorded_taps_shows_at_the_second(plant: Plant, without: Any, seen: str) -> None:
    run = Run(9, {plant: np.nan})
    found = born(run.trace(*without))
    assert {path for path, _, _ in found} == {seen} and {token for _, token, _ in found} == {4}


def test_a_key_beyond_the_window_reaches_nobody() -> None:
    """Layer 2 sees five keys: token 7 is born anew although token 2 has a broken key."""
    plants = {("layers.2.attn.k", 2, (0, 0)): np.nan, ("layers.2.attn.out", 7, (1,)): np.nan}
    run = Run(9, plants)
    assert run.born == set(plants) == born(run.trace())


def test_a_selection_score_of_minus_infinity_is_no_fault() -> None:
    """Scores of masked groups of experts are −Inf on purpose."""
    trace = synthetic_trace(layers=2, tokens=12)
    arrays = {path: np.array(trace[path]) for path in trace}
    arrays["layers.1.moe.scores"][3, 5] = -np.inf
    changed = Trace(arrays, ids=trace.ids, texts=[], meta=trace.meta)
    assert lab.nan.find(changed) is None
    arrays["layers.1.moe.scores"][3, 5] = np.inf
    found = lab.nan.find(changed)
    assert found is not None and found.origin.path == "layers.1.moe.scores" and found.origin.token == 3


# ---- traces of other programs ----


def test_a_trace_of_float16_arithmetic_is_judged_by_float16() -> None:
    """Values overflow where they are rounded; the origin says which format, and nothing is replayed."""
    plants = {("layers.0.moe.experts.1.output", token, (3,)): 70000.0 for token in range(9)}
    run = Run(9, plants, np.float16)
    trace = run.trace(arithmetic="float16")
    found = lab.nan.find(trace)
    assert found is not None and found.dtype == found.origin.dtype == "float16"
    assert (found.origin.path, found.origin.expert) == ("layers.0.moe.experts.1.output", 1)
    assert {(found.origin.path, token, (3,)) for token in found.origin.tokens} == run.born
    row = found.map[found.map["path"] == "layers.0.moe.experts.*.output"][0]
    assert row["state"] == "origin" and row["n_inf"] == len(run.born)


def test_the_format_is_that_of_the_arrays_when_nothing_else_tells() -> None:
    found = lab.nan.find(Run(9, {("embed", 3, (1,)): np.nan}, np.float16).trace())
    assert found is not None and found.dtype == "float16" and found.origin.token == 3


def test_what_was_not_recorded_is_said() -> None:
    run = Run(9, {("layers.0.moe.router_logits", 4, (2,)): np.nan})
    found = lab.nan.find(run.trace("attn.out", "dispatch.output"))
    assert found is not None and found.origin.path == "layers.0.moe.router_logits"
    assert any("attention (layers.*.attn.out)" in note and "experts" in note for note in found.notes)


@pytest.mark.parametrize("golden", goldens.GOLDENS, ids=lambda golden: golden.name)
def test_recordings_of_routes_alone_say_that_nothing_can_be_known(golden: Any, tmp_path: Path) -> None:
    """A file with ids and no number is neither clean nor broken; one with numbers is clean."""
    trace = lab.load_trace(golden.write(tmp_path), **golden.say)
    if any(path.endswith((".gates", ".scores", "logits", ".output", ".input")) for path in trace):
        assert lab.nan.find(trace) is None
    else:
        with pytest.raises(lab.NotCapturedError, match="unknown; record again"):
            lab.nan.find(trace)


# ---- runs of our own ----


@pytest.fixture(scope="module")
def sick(tmp_path_factory: pytest.TempPathFactory) -> lab.Model:
    """Expert 2 of layer 1 has an infinity in its up matrix, row 9."""
    model = lab.open(tiny_model(tmp_path_factory.mktemp("m") / "m"))
    name = "layers.1.moe.experts.2.up"
    up = np.array(model.weights[name])
    up[9, 4] = np.inf
    return model.with_weights({name: up})


@pytest.mark.parametrize("capture", ["none", "routing", "moe", "all", ["layers.1.output"]])
def test_every_capture_leads_to_the_same_origin(sick: lab.Model, capture: Any) -> None:
    """A session that captured too little is replayed, and a note says so."""
    session = sick.session(capture=capture)
    for start in range(0, len(IDS), 5):
        session.feed(IDS[start : start + 5])
    met = np.flatnonzero((sick_ids(sick) == 2).any(axis=1)).tolist()
    found = lab.nan.find(session)
    assert found is not None and len(found.origins) == 1
    origin = found.origin
    assert (origin.path, origin.expert, origin.index) == ("layers.1.moe.experts.2.up", 2, 9)
    assert list(origin.tokens) == met and origin.token == met[0]
    assert bool(found.notes) == (capture != "all")
    assert len(session.ids) == len(IDS)


def sick_ids(model: lab.Model) -> np.ndarray:
    session = model.session()
    session.feed(IDS)
    return session.tape["layers.1.moe.expert_ids"]


def test_a_clean_run_gives_none_at_every_capture(tmp_path: Path) -> None:
    model = lab.open(tiny_model(tmp_path / "m"))
    for capture in ("none", "routing", "moe", "all"):
        session = model.session(capture=capture)
        session.feed(IDS)
        assert lab.nan.find(session) is None
        assert lab.nan.find(session.trace()) is None
        session.reset()
        assert lab.nan.find(session) is None


def test_a_trace_from_a_file_is_replayed_with_its_model_only(sick: lab.Model, tmp_path: Path) -> None:
    """Without one the recorded taps must do, and a note tells what to pass."""
    session = sick.session(capture="routing")
    session.feed(IDS)
    session.trace().save(tmp_path / "run.safetensors")
    alone = lab.nan.find(tmp_path / "run.safetensors")
    assert alone is None or ("pass model=" in alone.notes[0] and alone.origin.path != "layers.1.moe.experts.2.up")
    found = lab.nan.find(tmp_path / "run.safetensors", model=sick)
    assert found is not None and found.origin.path == "layers.1.moe.experts.2.up"
    with pytest.raises(lab.ArgumentError, match="model= takes"):
        lab.nan.find(tmp_path / "run.safetensors", model=3)
    with pytest.raises(lab.ArgumentError, match="made by another model"):  # its healthy weights would explain nothing
        lab.nan.find(tmp_path / "run.safetensors", model=lab.open())


def test_a_run_with_edits_is_not_replayed(tmp_path: Path) -> None:
    model = lab.open(tiny_model(tmp_path / "m"))
    session = model.session(capture="moe")
    stepper = session.stepper(IDS[:6], chunk=None)
    stepper.run_to("stage == 'expert' and layer == 1")
    expert = stepper.where.expert
    path = f"layers.1.moe.experts.{expert}.output"
    stepper.edit(path)[0, 3] = np.nan
    stepper.finish()
    found = lab.nan.find(session)
    assert found is not None and found.origin.path == path and found.origin.index == 3
    assert any("cannot be replayed: it has edits" in note for note in found.notes)


def test_another_gate_rule_is_replayed_with_that_rule(sick: lab.Model) -> None:
    session = sick.session(capture="none", gate_mode="raw_logits")
    session.feed(IDS)
    found = lab.nan.find(session)
    assert found is not None and found.trace.meta["gate_mode"] == "raw_logits"


def test_two_faults_far_apart_are_two_origins_in_the_order_of_the_data(tmp_path: Path) -> None:
    model = lab.open(tiny_model(tmp_path / "m", experts=8, top_k=1, layers=3))
    routing = model.session()
    routing.feed(IDS[:12])
    last = int(routing.tape["layers.2.moe.expert_ids"][0, 0])
    later = int(routing.tape["layers.0.moe.expert_ids"][11, 0])
    changes = {}
    for name in (f"layers.2.moe.experts.{last}.gate", f"layers.0.moe.experts.{later}.down"):
        changes[name] = np.array(model.weights[name])
        changes[name][2, 1] = np.nan
    session = model.with_weights(changes).session(capture="all")
    session.feed(IDS[:12])
    found = lab.nan.find(session)
    assert found is not None
    assert [origin.path for origin in found.origins] == [
        f"layers.0.moe.experts.{later}.output", f"layers.2.moe.experts.{last}.gate",
    ]  # fmt: skip
    assert found.origins[1].token == 0


def test_ctrl_c_ends_a_search_and_leaves_the_session_usable(sick: lab.Model) -> None:
    session = sick.session(capture="routing")
    session.feed(IDS)
    calls = []

    def progress(share: float) -> None:
        calls.append(share)
        if len(calls) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lab.nan.find(session, progress=progress)
    session.feed([5])
    assert lab.nan.find(session, progress=lambda share: calls.append(share)) is not None
    assert all(0 <= share <= 1 for share in calls)


def test_a_long_trace_is_read_in_pieces() -> None:
    """30,000 rows, of which the last 20,000 are ruined: the search needs a fraction of the trace's own memory."""
    tokens, hidden, layers = 30_000, 16, 2
    arrays = {}
    for layer in range(layers):
        for tap in ("attn.norm", "attn.q", "attn.k", "attn.v", "attn.out", "moe.input", "moe.routed", "moe.output"):
            heads = tap in ("attn.q", "attn.k", "attn.v")
            arrays[f"layers.{layer}.{tap}"] = np.ones((tokens, 2, 8) if heads else (tokens, hidden), np.float32)
    whole = sum(array.nbytes for array in arrays.values())
    ruined = [path for path in arrays if not path.startswith("layers.0.")]
    for path in [*ruined, "layers.0.moe.output"]:
        arrays[path][10_000:] = np.nan
    arrays["layers.0.moe.routed"][10_000:, 5] = np.inf
    base = synthetic_trace(layers=layers, tokens=tokens)
    trace = Trace(arrays, ids=base.ids, texts=[], meta=base.meta)
    tracemalloc.start()
    table = lab.nan.scan(trace)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 0.25 * whole
    assert set(table["path"][table["state"] == "origin"]) == {"layers.0.moe.routed", "layers.0.moe.output"}


# ---- scan ----


def test_scan_counts_what_numpy_counts(sick: lab.Model) -> None:
    session = sick.session(capture="all")
    session.feed(IDS)
    trace, table = session.trace(), lab.nan.scan(session)
    assert table.dtype == lab.nan.result.MAP
    assert list(table["path"][:2]) == ["embed", "layers.0.attn.norm"] and table["path"][-1] == "logits"
    for row in table:
        values = trace[row["path"].replace(".experts.*.", ".dispatch.")]
        finite = values[np.isfinite(values)]
        assert row["n"] == values.size and row["n_nan"] == np.isnan(values).sum()
        assert row["n_inf"] == np.isinf(values).sum() and row["n_negative_inf"] == (values == -np.inf).sum()
        assert row["absmax"] == (np.abs(finite).max() if finite.size else 0)
        assert (row["state"] in ("origin", "passed")) == (finite.size < values.size)
    assert list(table["path"][table["state"] == "origin"]) == ["layers.1.moe.experts.*.up"]


@pytest.mark.parametrize(
    ("value", "state"), [(40000.0, "near"), (10.0, "finite"), (1e-6, "subnormal"), (np.inf, "origin")]
)
def test_scan_marks_what_is_near_the_limit_or_subnormal_in_the_format_of_the_run(value: float, state: str) -> None:
    trace = synthetic_trace(layers=1, tokens=20)
    arrays = {path: np.array(trace[path]) for path in trace}
    arrays["layers.0.moe.router_logits"][:] = value
    table = lab.nan.scan(Trace(arrays, ids=trace.ids, texts=[], meta=trace.meta | {"arithmetic": "float16"}))
    row = table[table["path"] == "layers.0.moe.router_logits"][0]
    assert row["state"] == state
    if np.isfinite(value):
        assert row["bits_left"] == pytest.approx(np.log2(65504 / np.float32(value)))
        assert row["n_subnormal"] == (160 if state == "subnormal" else 0)


# ---- weights ----


def test_weights_are_read_when_an_expert_is_first_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_model(tmp_path / "m", experts=16, top_k=1, layers=2, seed=5)
    tensors = load_file(folder / "model.safetensors")
    for expert in range(16):
        tensors[f"model.layers.1.block_sparse_moe.experts.{expert}.w2.weight"][3, 7] = np.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model = lab.open(folder)
    read: list[str] = []
    census = model.weights.census
    monkeypatch.setattr(model.weights, "census", lambda name: (read.append(name), census(name))[1])
    session = model.session()
    for token in IDS:
        before = {name for name in read if ".experts." in name}
        session.feed([token])
        found = lab.nan.weights(session, used=True)
        met = {int(e) for e in np.unique(session.tape["layers.1.moe.expert_ids"])}
        assert {int(row.name.split(".")[4]) for row in found} == met
        new = [name for name in read if ".experts." in name and name not in before]
        assert len(new) == len(set(new)) <= 6  # three of one expert in each layer
    assert len(read) == len(set(read))
    with pytest.raises(lab.ArgumentError, match="pass the session"):
        lab.nan.weights(model, used=True)


# ---- what only a watch table knows ----


def test_an_infinity_that_a_sigmoid_swallows_is_an_origin_of_its_own(tmp_path: Path) -> None:
    """The gate of the shared expert overflows and comes out as 0 or 1: only the watch table of a run tells."""
    config = small_config("qwen2_moe")
    tensors = random_tensors(config, 3)
    tensors["model.layers.1.mlp.shared_expert_gate.weight"][0, 5] = 3.3e38
    tensors["model.layers.1.post_attention_layernorm.weight"][5] = 8
    session = lab.open(write_checkpoint(tmp_path / "m", config, tensors)).session(capture="all", watch="watch")
    session.feed(IDS)
    gate = session.tape["layers.1.moe.shared.gate"]
    assert np.isfinite(gate).all() and np.isin(gate, [0, 1]).any()
    found = lab.nan.find(session)
    assert found is not None and [origin.point for origin in found.origins] == ["layers.1.moe.shared.gate.product"]
    assert (found.origin.path, found.origin.kind) == ("layers.1.moe.shared.gate", "overflow")
    assert gate[found.origin.token] in (0, 1) and found.propagation.ruined == ()


def test_an_origin_in_a_tap_that_was_not_recorded_is_marked_where_its_values_were_found() -> None:
    """Scores overflow; the capture has no attention weights: the map marks what attention gave, as `scan` does."""
    model = lab.open()
    large = {}
    for name in ("layers.2.attn.q", "layers.2.attn.k"):
        weight = np.array(model.weights[name])
        large[name] = (weight.astype(np.float32) * 200).astype(weight.dtype)
    session = model.with_weights(large).session(capture="all", emulate="float16")
    session.feed([4, 5, 6, 7, 8])
    found = lab.nan.find(session)
    assert found is not None and found.origin.path == "layers.2.attn.weights"
    for table in (found.map, lab.nan.scan(session)):
        assert table["path"][table["state"] == "origin"].tolist() == ["layers.2.attn.out"]


def test_a_replay_that_does_not_fit_ends_at_the_first_bad_token(sick: lab.Model, monkeypatch: Any) -> None:
    """All taps of the whole prompt are refused; those up to the token that a watched run named fit."""
    session = sick.session(capture="none")
    session.feed(IDS)
    first = int(np.flatnonzero((sick_ids(sick) == 2).any(axis=1))[0])
    made = lab.Model.session

    def small(model: lab.Model, capture: Any, **options: Any) -> lab.Session:
        if "all" in capture and options["max_tokens"] > first + 1:
            raise lab.OutOfMemoryError("too little memory")
        return made(model, capture, **options)

    monkeypatch.setattr(lab.Model, "session", small)
    found = lab.nan.find(session)
    assert found is not None and found.origin.path == "layers.1.moe.experts.2.up" and found.origin.tokens == (first,)
    assert len(found.trace.ids) == first + 1 and f"up to token {first}" in found.notes[0]


def test_an_emulated_run_is_replayed_with_its_emulation(tmp_path: Path) -> None:
    """Weights so large that float16 overflows and float32 does not."""
    model = lab.open(tiny_model(tmp_path / "m"))
    sick = model.with_weights({"layers.0.attn.v": model.weights["layers.0.attn.v"] * np.float32(1e6)})
    for capture in ("none", "all"):
        session = sick.session(capture=capture, emulate="float16")
        session.feed(IDS)
        found = lab.nan.find(session)
        assert found is not None and found.dtype == found.origin.dtype == "float16"
        assert found.origin.path == "layers.0.attn.v" and found.origin.kind == "overflow"
    session = sick.session(capture="none")
    session.feed(IDS)
    assert lab.nan.find(session) is None
