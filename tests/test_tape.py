"""The tape: which paths there are, what they hold, and what a wrong one is told."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

import colibri_lab as lab
from colibri_lab.testing import assert_close, tiny_model

IDS = [0, 5, 9, 13, 21, 34, 55, 7, 8, 11, 2, 2]


@pytest.fixture(scope="module")
def model() -> lab.Model:
    return lab.open()


@pytest.fixture(scope="module")
def session(model: lab.Model) -> lab.Session:
    session = model.session(capture=["all", "layers.*.attn.weights"], max_tokens=64)
    session.feed(IDS[:7])
    session.feed(IDS[7:])
    return session


@pytest.fixture(scope="module")
def mixed(tmp_path_factory) -> lab.Model:
    """Three layers, of which the first is dense; a shared expert in the others."""
    folder = tiny_model(tmp_path_factory.mktemp("mixed"), family="qwen2_moe", layers=3, dense_layers=(0,))
    return lab.open(folder)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x.astype(np.float64) - x.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def test_the_routing_is_what_numpy_makes_of_the_views(session: lab.Session) -> None:
    """Router logits from the input and the weights, scores, ids and gates from the logits: each stage from the one
    before.
    """
    for layer in session.model.config.moe_layers:
        tape, weights = session.tape, session.model.weights
        x = tape[f"layers.{layer}.moe.input"].astype(np.float64)
        logits = x @ weights.float32(f"layers.{layer}.moe.router").T.astype(np.float64)
        assert_close(tape.router_logits(layer), logits, "router_logits")
        p = softmax(tape.router_logits(layer))
        assert_close(tape.scores(layer), p, "scores")
        ids = np.argsort(-tape.scores(layer), axis=1, kind="stable")[:, :2]
        assert np.array_equal(tape.expert_ids(layer), ids)
        chosen = np.take_along_axis(p, ids, axis=1)
        assert_close(tape.gates(layer), chosen / chosen.sum(axis=1, keepdims=True), "gates")


def test_the_experts_are_what_numpy_makes_of_the_views(session: lab.Session) -> None:
    """Each expert's rows are gathered from the block's input; its answer and the gated sum follow from the weights."""
    layer, tape, weights = 2, session.tape, session.model.weights
    x, ids, gates = tape[f"layers.{layer}.moe.input"], tape.expert_ids(layer), tape.gates(layer)
    total = np.zeros(x.shape, np.float64)
    for expert in range(8):
        rows = tape.expert_rows(layer, expert)
        assert np.array_equal(rows["tokens"], np.flatnonzero((ids == expert).any(axis=1)))
        assert np.array_equal(rows["input"], x[rows["tokens"]])
        gate, up, down = (
            weights.float32(f"layers.{layer}.moe.experts.{expert}.{n}").astype(np.float64)
            for n in ("gate", "up", "down")
        )
        g, u = x[rows["tokens"]] @ gate.T, x[rows["tokens"]] @ up.T
        hidden = g / (1 + np.exp(-g)) * u
        if len(hidden):
            assert_close(rows["gate"], g, "gate")
            assert_close(rows["up"], u, "up")
            assert_close(rows["hidden"], hidden, "hidden")
            assert_close(rows["output"], hidden @ down.T, "output")
        np.add.at(total, rows["tokens"], (hidden @ down.T) * gates[ids == expert][:, None])
    assert_close(tape[f"layers.{layer}.moe.routed"], total, "routed")
    assert np.array_equal(tape[f"layers.{layer}.moe.output"], tape[f"layers.{layer}.moe.routed"])


def test_the_logits_are_the_last_row_of_the_tap(session: lab.Session) -> None:
    """`session.logits`, the pass' logits and the tap agree, and follow from `norm` and `lm_head`."""
    assert session.tape["logits"].shape == (len(IDS), 2048)
    assert np.array_equal(session.logits, session.tape["logits"][-1])
    assert np.array_equal(session.passes[0].logits, session.tape["logits"][6])
    expected = session.tape["norm"].astype(np.float64) @ session.model.weights.float32("lm_head").T.astype(np.float64)
    assert_close(session.tape["logits"], expected, "logits")


def test_attention_weights_are_there_when_named(session: lab.Session) -> None:
    """(heads, T, S): each query's probabilities add up to one and are zero for keys to come."""
    weights = session.tape["layers.0.attn.weights"]
    assert weights.shape == (4, len(IDS), len(IDS))
    assert np.allclose(weights.sum(axis=2), 1, atol=1e-6)
    assert not np.triu(np.ones((len(IDS), len(IDS))), 1).astype(bool)[None].repeat(4, 0)[weights != 0].any()


def test_tap_shapes_follow_their_axes(session: lab.Session) -> None:
    """Every kept tap has the dtype of the table and the shape that its axes name."""
    c = session.model.config
    sizes = {
        "T": len(IDS), "H": c.hidden_size, "E": c.num_experts, "k": c.top_k, "V": c.vocab_size,
        "heads": 4, "kv_heads": 2,
        "head_dim": c.head_dim, "I": 192, "N": len(IDS) * c.top_k, "passes": 2,
        "E+1": c.num_experts + 1, "S": len(IDS), "1": 1,
    }  # fmt: skip
    for path in session.tape:
        place = session.model._taps.find(path)
        kind = session.model._taps.kinds[place.kind]
        view = session.tape[path]
        assert view.dtype == kind.dtype, path
        expected = [sizes.get(axis) for axis in kind.axes.split(",")]
        assert all(size in (None, found) for size, found in zip(expected, view.shape, strict=True)), (path, view.shape)


def test_paths_are_a_mapping_with_wildcards(session: lab.Session) -> None:
    """Iteration, len, contains and paths() tell the same story, in the order of the data's way."""
    paths = list(session.tape)
    assert len(paths) == len(set(paths)) == len(session.tape)
    assert paths[0] == "embed" and paths[-2:] == ["norm", "logits"]
    assert all(path in session.tape for path in paths[:50])
    assert session.tape.paths("layers.*.moe.gates") == [f"layers.{n}.moe.gates" for n in range(6)]
    assert session.tape.paths("layers.1.moe.experts.?.input") == []
    assert len(session.tape.paths("layers.1.moe.experts.*.input")) == 8
    assert "layers.9.moe.gates" not in session.tape and "nonsense" not in session.tape and 3 not in session.tape
    assert not any(".experts." in path for path in session.tape.stored())


def test_a_passes_tape_shows_its_rows(session: lab.Session) -> None:
    """Rows of one pass; expert taps of the session show the last pass, and expert_rows joins them all."""
    first, last = session.passes
    assert first.tape.gates(0).shape == (7, 2) and last.tape.gates(0).shape == (5, 2)
    assert np.array_equal(np.concatenate([first.tape.gates(0), last.tape.gates(0)]), session.tape.gates(0))
    for expert in range(8):
        assert np.array_equal(session.tape.expert_inputs(3, expert), last.tape.expert_inputs(3, expert))
        joined = session.tape.expert_rows(3, expert)
        parts = [p.tape.expert_outputs(3, expert) for p in (first, last)]
        assert np.array_equal(joined["output"], np.concatenate(parts))
        assert (np.diff(joined["tokens"]) > 0).all()
        assert np.array_equal(first.tape.expert_rows(3, expert)["output"], parts[0])
    tokens = np.concatenate([last.tape[f"layers.3.moe.experts.{e}.tokens"] for e in range(8)])
    assert tokens.min() >= 7 and tokens.max() < 12


def test_a_trace_is_the_tape(session: lab.Session) -> None:
    """session.trace() holds every stored tap over the same bytes, with ids, texts and where they come from."""
    trace = session.trace()
    assert trace.ids == IDS and len(trace.texts) == len(IDS) and trace.passes == [(0, 7), (7, 12)]
    assert sorted(trace) == sorted(session.tape.stored())
    for path in trace:
        assert trace[path].ctypes.data == session.tape[path].ctypes.data or not trace[path].size, path
    for expert in range(8):
        assert np.array_equal(trace[f"layers.4.moe.experts.{expert}.output"], session.tape.expert_outputs(4, expert))
        assert np.array_equal(trace.expert_rows(4, expert)["hidden"], session.tape.expert_rows(4, expert)["hidden"])
    meta = trace.meta
    assert (meta["producer"], meta["model_type"], meta["gate_rule"]) == (
        "colibri-lab",
        "mixtral",
        "softmax_renormalised",
    )
    assert trace.edits == [] and meta["model_identity"] == session.model.identity


def test_an_unknown_path_names_the_nearest(session: lab.Session) -> None:
    """A misspelt path is told what it may have meant."""
    with pytest.raises(lab.TapError, match=r"no tap has the path 'layers\.0\.moe\.gate'.*'layers\.0\.moe\.gates'"):
        session.tape["layers.0.moe.gate"]
    with pytest.raises(lab.TapError, match=r"did you mean 'layers\.4\.moe\.experts\.3\.output'"):
        session.tape["layers.4.moe.experts.3.outputs"]
    with pytest.raises(KeyError):
        session.tape["layers.0"]
    with pytest.raises(lab.TapError, match="a tap path is a text"):
        session.tape[0]


def test_a_layer_or_expert_out_of_range_names_the_range(session: lab.Session) -> None:
    """Numbers outside the model are told what there is."""
    with pytest.raises(lab.TapError, match="there is no layer 6; layers are 0 to 5"):
        session.tape.gates(6)
    with pytest.raises(lab.TapError, match="there is no expert 8; experts are 0 to 7"):
        session.tape.expert_inputs(0, 8)
    with pytest.raises(lab.TapError, match="there is no expert 99"):
        session.tape.expert_rows(0, 99)
    with pytest.raises(lab.TapError):
        session.tape.expert_inputs(-1, 0)


def test_a_tap_that_was_not_kept_names_the_capture(model: lab.Model) -> None:
    """The sentence says which capture to ask for."""
    session = model.session(capture="routing", max_tokens=16)
    session.feed(IDS)
    assert "layers.0.moe.gates" in session.tape and "layers.0.moe.input" not in session.tape
    with pytest.raises(lab.NotCapturedError, match="moe"):
        session.tape.expert_inputs(0, 0)
    with pytest.raises(lab.NotCapturedError, match="all"):
        session.tape["layers.0.output"]
    with pytest.raises(lab.NotCapturedError, match=r"attn\.weights"):
        session.tape["layers.0.attn.weights"]
    with pytest.raises(lab.NotCapturedError):
        session.tape.expert_rows(0, 0)
    with pytest.raises(LookupError):
        session.tape["embed"]


def test_a_dense_layer_asked_for_routing_names_the_moe_layers(mixed: lab.Model) -> None:
    """And a MoE layer asked for a dense MLP names the dense ones."""
    session = mixed.session(capture="all", max_tokens=16)
    session.feed([1, 2, 3])
    with pytest.raises(lab.TapError, match="layer 0 is dense and has no experts; MoE layers of this model: 1, 2"):
        session.tape.gates(0)
    with pytest.raises(
        lab.TapError, match="layer 1 is a MoE layer and has no dense MLP; dense layers of this model: 0"
    ):
        session.tape["layers.1.mlp.output"]
    assert session.tape["layers.0.mlp.output"].shape == (3, mixed.config.hidden_size)
    assert session.tape["layers.1.moe.shared.gate"].shape == (3, 1)
    assert session.tape.paths("layers.*.moe.gates") == ["layers.1.moe.gates", "layers.2.moe.gates"]
    assert session.trace().moe_layers == [1, 2]


def test_a_model_without_shared_experts_says_so(session: lab.Session) -> None:
    """Asking for a shared expert that no layer has is an unknown tap."""
    with pytest.raises(lab.TapError, match=r"layer 0 has no shared expert; .*: none"):
        session.tape["layers.0.moe.shared.output"]


def test_a_capture_of_patterns_keeps_what_it_names(model: lab.Model) -> None:
    """A list of patterns keeps those taps and the KV cache; an unknown pattern is refused with the nearest."""
    session = model.session(capture=["layers.1.output", "layers.2.moe.experts.*.input"], max_tokens=16)
    session.feed(IDS)
    kept = {path for path in session.tape.stored() if ".attn." not in path}
    assert kept == {
        "layers.1.output", "layers.2.moe.dispatch.input", "layers.2.moe.dispatch.tokens",
        "layers.2.moe.dispatch.offsets",
    }  # fmt: skip
    assert set(session.tape.expert_rows(2, 0)) == {"tokens", "input"}
    with pytest.raises(lab.ArgumentError, match="routing"):
        model.session(capture="routin")
    with pytest.raises(lab.ArgumentError, match="all texts"):
        model.session(capture=[3])


def test_a_tape_cannot_be_pickled_or_copied(session: lab.Session) -> None:
    """It is live memory; the error says what to do instead."""
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match=r"trace\(\)\.save"):
            attempt(session.tape)


@pytest.mark.parametrize("number", ["00", "٠", "9" * 5000])
def test_a_number_in_a_path_is_written_one_way(session: lab.Session, number: str) -> None:
    """Leading zeros, other scripts' digits and endless ones name no layer, in the tape as in a trace."""
    path = f"layers.{number}.moe.gates"
    assert path not in session.tape and path not in session.trace()
    for mapping in (session.tape, session.trace()):
        with pytest.raises(lab.TapError):
            mapping[path]
