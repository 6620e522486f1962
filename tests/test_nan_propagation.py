"""How NaN and Inf travel: steps from the origin to the ruined logits, against what the reading rules say."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import random_tensors, read_checkpoint, small_config, write_checkpoint

import colibri_lab as lab
from colibri_lab.nan.propagation import propagate
from colibri_lab.nan.result import Origin, Propagation
from colibri_lab.nan.source import Source
from colibri_lab.testing import synthetic_trace

REFERENCE = Path(__file__).parent / "fixtures" / "reference"
Tensors = dict[str, np.ndarray]


def planted(folder: Path, config: dict, tensors: Tensors, name: str, place: Any, value: float) -> lab.Model:
    changed = tensors[name].copy()
    changed[place] = value
    return lab.open(write_checkpoint(folder, config, {**tensors, name: changed}))


def fed(model: lab.Model, ids: Sequence[int], capture: Any = "all", passes: int = 1) -> lab.Session:
    session = model.session(capture=capture, max_tokens=len(ids))
    for part in np.array_split(np.asarray(ids), passes):
        session.feed(part)
    return session


def origin(path: str, layer: int | None, tokens: Sequence[int], expert: int | None = None) -> Origin:
    return Origin(path, layer, "", tokens[0], 0, "weight value", "", expert=expert, tokens=tuple(tokens))


def way(session: lab.Session, *origins: Origin) -> Propagation:
    return propagate(Source(session.trace()), origins)


def sent_to(session: lab.Session, layer: int, expert: int) -> list[int]:
    return np.flatnonzero((session.tape[f"layers.{layer}.moe.expert_ids"] == expert).any(axis=1)).tolist()


def least_used(session: lab.Session, layer: int) -> int:
    """An expert with as few tokens as possible, but some."""
    counts = [len(sent_to(session, layer, e)) or 10**9 for e in range(session.model.config.num_experts)]
    return int(np.argmin(counts))


def reached(born: Sequence[int], layers: Sequence[int], tokens: int, window: int | None = None) -> set[int]:
    """Brute force: in each layer a token reads every row up to its own, `window` of them when there is one."""
    bad = set(born)
    for _ in layers:
        bad |= {t for t in range(tokens) if any(s in bad for s in range(t + 1) if window is None or t - s < window)}
    return bad


def is_a_tree(found: Propagation, origins: Sequence[Origin]) -> bool:
    known = {each.path for each in origins}
    for step in found.steps:
        if step.came_from not in known:
            return False
        known.add(step.path)
    return True


@pytest.mark.parametrize("passes", [1, 5])
def test_a_bad_expert_ruins_the_tokens_sent_to_it_and_those_that_read_them(tmp_path: Path, passes: int) -> None:
    config, ids = small_config("mixtral", num_hidden_layers=4), np.arange(24)
    tensors = random_tensors(config, 3)
    clean = fed(lab.open(write_checkpoint(tmp_path / "clean", config, tensors)), ids)
    expert = least_used(clean, 1)
    born = sent_to(clean, 1, expert)
    name = f"model.layers.1.block_sparse_moe.experts.{expert}.w1.weight"
    session = fed(planted(tmp_path / "bad", config, tensors, name, (7, 3), np.nan), ids, passes=passes)
    start = origin(f"layers.1.moe.experts.{expert}.gate", 1, born, expert)
    found = way(session, start)
    assert set(found.ruined) == reached(born, [2, 3], 24) and found.last == "logits"
    assert set(found.ruined) | set(found.clean) == set(range(24)) and not set(found.ruined) & set(found.clean)
    assert is_a_tree(found, [start])
    assert dict(found.cache) == {2: tuple(born), 3: tuple(sorted(reached(born, [2], 24)))}
    assert dict(found.routing)[2] == tuple(sorted(reached(born, [2], 24)))
    steps = {(step.path, step.came_from): step for step in found.steps}
    hidden = steps[f"layers.1.moe.experts.{expert}.hidden", start.path]
    assert hidden.how == "activation" and hidden.n_values == len(born) == hidden.n_nan, "one neuron of each token"
    down = steps[f"layers.1.moe.experts.{expert}.output", hidden.path]
    assert down.words == "NaN × column 7 of down, any weight" and down.n_values == 44 * len(born)
    (gated,) = (step for step in found.steps if step.path == "layers.1.moe.routed")
    slot = session.tape["layers.1.moe.expert_ids"][born[0]].tolist().index(expert)
    other = session.tape["layers.1.moe.expert_ids"][born[0], 1 - slot]
    gate = session.tape["layers.1.moe.gates"][born[0], slot]
    assert gated.words == f"× gate {gate:.2g}, then + expert {other}"
    (read,) = (step for step in found.steps if step.how == "attention" and "own" not in step.words)
    assert set(read.tokens) == reached(born, [2], 24) - set(born) and read.words.endswith(" of k and v")


def test_overflow_stays_inf_in_its_layer_and_becomes_nan_in_the_next_norm(tmp_path: Path) -> None:
    config, ids = small_config("mixtral", num_hidden_layers=3), np.arange(12)
    tensors = random_tensors(config, 8)
    clean = fed(lab.open(write_checkpoint(tmp_path / "clean", config, tensors)), ids)
    expert = least_used(clean, 0)
    name = f"model.layers.0.block_sparse_moe.experts.{expert}.w2.weight"
    hidden = clean.tape.expert_rows(0, expert)["hidden"]
    row = np.where(hidden[0] >= 0, 3e38, -3e38)  # all products of one sign
    session = fed(planted(tmp_path / "bad", config, tensors, name, 5, row * 1.0), ids)
    output = session.tape.expert_rows(0, expert)
    born = [t for t, bad in zip(output["tokens"], ~np.isfinite(output["output"]).all(axis=1), strict=True) if bad]
    first = int(born[0])
    found = way(session, origin(f"layers.0.moe.experts.{expert}.output", 0, [int(t) for t in born], expert))
    here = [step for step in found.steps if step.layer == 0]
    assert [step.path for step in here] == ["layers.0.moe.routed", "layers.0.output"]
    assert all(np.isinf(step.value) for step in here)
    norm = next(step for step in found.steps if step.path == "layers.1.attn.norm")
    assert norm.words == "Inf ÷ Inf = NaN" and norm.n_values == len(born) and norm.n_nan == len(born)
    assert any(s.startswith(f"layers.1.attn.norm, token {first}: 43 finite values were divided by Inf and became 0")
               for s in found.swallowed)  # fmt: skip


def test_a_window_keeps_later_tokens_from_reading_a_ruined_row(tmp_path: Path) -> None:
    config, tensors = read_checkpoint(REFERENCE / "mixtral_swa")
    config["tie_word_embeddings"], tensors["lm_head.weight"] = False, tensors["model.embed_tokens.weight"]
    window, layers = config["sliding_window"], config["num_hidden_layers"]
    ids = np.random.default_rng(1).permutation(config["vocab_size"])[: window * (layers + 2)]
    name = "model.embed_tokens.weight"
    session = fed(planted(tmp_path / "bad", config, tensors, name, (ids[2], 1), np.nan), ids, passes=2)
    start = origin("embed", None, [2])
    found = way(session, start)
    assert set(found.ruined) == reached([2], range(layers), len(ids), window) < set(range(2, len(ids)))
    assert is_a_tree(found, [start])
    assert dict(found.cache)[1] == tuple(sorted(reached([2], [0], len(ids), window)))


def test_every_layer_that_reaches_new_tokens_has_a_step_and_no_other_far_away(tmp_path: Path) -> None:
    config = small_config("mixtral", num_hidden_layers=7, sliding_window=4)
    tensors = random_tensors(config, 5)
    ids = np.arange(30)
    session = fed(planted(tmp_path / "m", config, tensors, "model.embed_tokens.weight", (3, 0), np.inf), ids)
    found = way(session, origin("embed", None, [3]))
    assert set(found.ruined) == reached([3], range(7), 30, 4)
    for layer in range(1, 7):
        new = reached([3], range(layer + 1), 30, 4) - reached([3], range(layer), 30, 4)
        steps = [s for s in found.steps if s.path == f"layers.{layer}.attn.out" and s.words.startswith(("read", "all"))]
        assert {t for step in steps for t in step.tokens} == new
    whole = origin("embed", None, [0])
    full = small_config("mixtral", num_hidden_layers=7)
    session = fed(planted(tmp_path / "full", full, tensors, "model.embed_tokens.weight", (0, 0), np.nan), ids)
    found = way(session, whole)
    assert {step.layer for step in found.steps} == {0, None}, "all tokens are reached at once"
    assert [step.came_from for step in found.steps if step.path == "norm"] == ["layers.0.output"]


def test_steps_stay_few_in_a_model_with_many_experts_and_tokens(tmp_path: Path) -> None:
    from colibri_lab.testing import tiny_model

    model = lab.open(tiny_model(tmp_path / "m", experts=64, top_k=4, layers=6, seed=2))
    name, tensors = "model.layers.1.input_layernorm.weight", read_checkpoint(model.path)[1]
    bad = planted(tmp_path / "bad", read_checkpoint(model.path)[0], tensors, name, 0, np.nan)
    ids = np.arange(200) % model.config.vocab_size
    found = way(fed(bad, ids), origin("layers.1.attn.norm", 1, range(200)))
    assert found.ruined == tuple(range(200)) and len(found.steps) < 40
    assert any(step.path == "layers.1.moe.experts.*.output" for step in found.steps)


def test_two_experts_of_one_layer_each_have_their_own_way_into_the_sum(tmp_path: Path) -> None:
    config, ids = small_config("mixtral", num_hidden_layers=2), np.arange(16)
    tensors = random_tensors(config, 3)
    clean = fed(lab.open(write_checkpoint(tmp_path / "clean", config, tensors)), ids)
    a, b = clean.tape["layers.0.moe.expert_ids"][6].tolist()
    prefix = "model.layers.0.block_sparse_moe.experts."
    for expert in (a, b):
        name = f"{prefix}{expert}.w2.weight"
        tensors[name] = tensors[name].copy()
        tensors[name][4, 2] = np.nan
    session = fed(lab.open(write_checkpoint(tmp_path / "bad", config, tensors)), ids)
    origins = [origin(f"layers.0.moe.experts.{e}.output", 0, sent_to(clean, 0, e), e) for e in sorted((a, b))]
    found = way(session, *origins)
    into = {step.came_from: set(step.tokens) for step in found.steps if step.path == "layers.0.moe.routed"}
    assert into == {each.path: set(each.tokens) for each in origins}
    assert set(found.ruined) == reached(sorted(into[origins[0].path] | into[origins[1].path]), [1], 16)


@pytest.mark.parametrize(
    ("family", "name", "path"),
    [
        ("qwen2_moe", "model.layers.0.mlp.shared_expert.down_proj.weight", "layers.0.moe.shared.output"),
        ("qwen2_moe", "model.layers.0.mlp.shared_expert_gate.weight", "layers.0.moe.shared.gate"),
        ("qwen3_moe", "model.layers.0.mlp.gate.weight", "layers.0.moe.router_logits"),
        ("qwen3_moe", "model.layers.0.self_attn.v_proj.weight", "layers.0.attn.v"),
        ("olmoe", "model.layers.0.self_attn.q_norm.weight", "layers.0.attn.q"),
        ("olmoe", "lm_head.weight", "logits"),
        ("olmoe", "model.norm.weight", "norm"),
    ],
)
def test_every_stage_hands_on_what_was_born_in_it(tmp_path: Path, family: str, name: str, path: str) -> None:
    config, ids = small_config(family, num_hidden_layers=2), np.arange(9)
    tensors = random_tensors(config, 4)
    place = (0,) * tensors[name].ndim
    session = fed(planted(tmp_path / "m", config, tensors, name, place, np.nan), ids, ["all", "layers.*.attn.weights"])
    layer = 0 if path.startswith("layers.") else None
    start = origin(path, layer, range(9))
    found = way(session, start)
    assert found.ruined == tuple(range(9)) and is_a_tree(found, [start])
    assert bool(found.steps) == (path != "logits") and all(step.tokens for step in found.steps)
    assert found.steps == () or found.steps[-1].path == "logits"


def test_dense_layers_hand_it_on_too(tmp_path: Path) -> None:
    config, tensors = read_checkpoint(REFERENCE / "qwen2_moe_step")
    dense = next(layer for layer in range(4) if f"model.layers.{layer}.mlp.down_proj.weight" in tensors)
    name = f"model.layers.{dense}.mlp.down_proj.weight"
    session = fed(planted(tmp_path / "m", config, tensors, name, (3, 0), np.nan), np.arange(7))
    found = way(session, origin(f"layers.{dense}.mlp.output", dense, range(7)))
    assert found.ruined == tuple(range(7))
    assert (found.steps[0].path, found.steps[0].how) == (f"layers.{dense}.output", "residual")


def test_without_logits_it_speaks_of_the_last_tap_that_was_recorded(tmp_path: Path) -> None:
    config, ids = small_config("mixtral", num_hidden_layers=2), np.arange(12)
    tensors = random_tensors(config, 3)
    name = "model.layers.0.post_attention_layernorm.weight"
    model = planted(tmp_path / "m", config, tensors, name, 1, np.nan)
    for capture, last in (("moe", "layers.1.moe.output"), ("routing", "layers.1.moe.gates")):
        path = "layers.0.moe.input" if capture == "moe" else "layers.0.moe.router_logits"
        start = origin(path, 0, range(12))
        found = way(fed(model, ids, capture), start)
        assert (found.last, found.ruined) == (last, tuple(range(12)))
        assert is_a_tree(found, [start]) and found.steps


def test_an_infinite_key_that_only_lost_its_weight_is_said_to_be_swallowed() -> None:
    trace = synthetic_trace(2, 4, 2, 6)
    k = np.zeros((6, 1, 4), np.float32)
    k[2, 0, 1] = -np.inf
    arrays = {**{path: trace[path] for path in trace}, "layers.0.attn.k": k, "layers.0.attn.v": np.ones_like(k),
              "layers.0.attn.out": np.ones((6, 4), np.float32)}  # fmt: skip
    changed = lab.Trace(arrays, ids=trace.ids, texts=trace.texts, meta=trace.meta)
    found = propagate(Source(changed), [origin("layers.0.attn.k", 0, [2])])
    assert found.steps == () and found.ruined == ()
    assert found.swallowed == (
        "layers.0.attn.out, tokens 2–5: −Inf came in from layers.0.attn.k, only finite values came out",
    )
    assert found.cache == ((0, (2,)),)


def test_what_is_born_between_two_taps_and_swallowed_there_has_a_sentence_and_no_steps() -> None:
    session = fed(lab.open(REFERENCE / "mixtral"), range(5), ["all", "layers.*.attn.weights"])
    start = Origin("layers.1.attn.weights", 1, "attention", 3, (0, 1), "overflow", "", point="layers.1.attn.scores",
                   value=-np.inf, tokens=(3,))  # fmt: skip
    found = way(session, start)
    assert (found.steps, found.ruined, found.clean) == ((), (), tuple(range(5)))
    assert found.swallowed == ("layers.1.attn.scores, token 3: −Inf was born, layers.1.attn.weights is finite",)


MODELS = ("mixtral", "mixtral_swa", "qwen3_moe", "olmoe", "qwen2_moe_step")
TAPS = (
    "attn.norm", "attn.q", "attn.k", "attn.v", "attn.out", "attn.weights", "moe.input", "moe.router_logits",
    "moe.scores", "moe.gates", "moe.dispatch.input", "moe.dispatch.gate", "moe.dispatch.up", "moe.dispatch.hidden",
    "moe.dispatch.output", "moe.shared.output", "moe.routed", "moe.output", "output", "embed", "norm", "logits",
    "mlp.input", "mlp.output",
)  # fmt: skip


@pytest.mark.parametrize("seed", range(25))
def test_any_weight_of_any_family_leads_by_steps_to_all_that_it_ruined(seed: int) -> None:
    """Two elements drawn; then the same run with only some of its taps, as another program may have recorded it."""
    random = np.random.default_rng(seed)
    model = lab.open(REFERENCE / MODELS[seed % len(MODELS)])
    values = {}
    for name in random.choice(list(model.weights), 2, replace=False).tolist():
        values[name] = np.array(model.weights[name])
        values[name][tuple(random.integers(0, values[name].shape))] = random.choice([np.nan, np.inf, -np.inf])
    ids = random.integers(0, model.config.vocab_size, int(random.integers(3, 30)))
    session = fed(model.with_weights(values), ids, ["all", "layers.*.attn.weights"], int(random.integers(1, 4)))
    found = lab.nan.find(session)
    if found is None:  # an expert that no token chose
        assert np.isfinite(session.tape["logits"]).all()
        return
    way, trace = found.propagation, found.trace
    lost = ~np.isfinite(trace["logits"]).all(axis=1)
    assert way.ruined == tuple(np.flatnonzero(lost).tolist()) and is_a_tree(way, found.origins)
    arrived = {t for step in way.steps if step.path == "logits" for t in step.tokens}
    arrived |= {t for each in found.origins if each.path == "logits" for t in each.tokens}
    assert arrived == set(way.ruined) and len(way.steps) < 80
    for step in way.steps:
        assert step.tokens and 0 <= step.n_nan <= step.n_values > 0 and not np.isfinite(step.value) and step.words
        if ".experts." not in step.path:
            array = trace[step.path]
            rows = (array.swapaxes(0, 1) if step.path.endswith(".weights") else array)[list(step.tokens)]
            assert not np.isfinite(rows.reshape(len(rows), -1)).all(axis=1).any(), step
    kept = set(random.choice(TAPS, int(random.integers(4, len(TAPS))), replace=False).tolist())
    kept |= {"moe.expert_ids", "moe.dispatch.tokens", "moe.dispatch.offsets", "output"}
    arrays = {path: trace[path] for path in trace if path.removeprefix("layers.").lstrip("0123456789.") in kept}
    some = lab.Trace(arrays, ids=trace.ids, texts=trace.texts, meta={**trace.meta, "producer": "another"})
    partly = lab.nan.find(some, model=session.model)
    if partly is not None:
        assert is_a_tree(partly.propagation, partly.origins)
        assert all(step.tokens and step.n_values > 0 for step in partly.propagation.steps)
