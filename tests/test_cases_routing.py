"""Failures that other engines had in routing, experts and reading the config, as small inputs with hand-set numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from checkpoints import (
    fused,
    moe_prefix,
    random_tensors,
    read_checkpoint,
    shapes,
    small_config,
    write_checkpoint,
    write_safetensors,
)
from compare import assert_agrees
from handmade import router_model
from oracle import Oracle

import colibri_lab as lab

Z = np.array([2, 1, 0.5, -1, 0, -2, -0.5, 0.25], np.float32)  # the token of case A1
P = np.exp(Z.astype(float)) / np.exp(Z.astype(float)).sum()


def fed(folder: Path, ids, capture="all", **options):
    """A session that has run `ids` as one pass."""
    session = lab.open(folder).session(capture=capture, max_tokens=max(len(ids), 1) + 8, **options)
    session.feed(ids)
    return session


def assert_rows(ids: np.ndarray, n_experts: int) -> None:
    """Ids in range, and no expert twice in a row."""
    assert ((ids >= 0) & (ids < n_experts)).all()
    assert all(len(set(row)) == len(row) for row in ids.tolist())


# ---- A1, A2: gates, scores and logits ----

RULES = {
    ("mixtral", None): ("softmax_renormalised", [0.73106, 0.26894]),
    ("olmoe", False): ("softmax", [0.48773, 0.17943]),
    ("olmoe", True): ("softmax_renormalised", [0.73106, 0.26894]),
    ("qwen2_moe", False): ("softmax", [0.48773, 0.17943]),
    ("qwen2_moe", True): ("softmax_renormalised", [0.73106, 0.26894]),
    ("qwen3_moe", False): ("softmax", [0.48773, 0.17943]),
    ("qwen3_moe", True): ("softmax_renormalised", [0.73106, 0.26894]),
}


def a1_model(folder: Path, family: str, renormalise: bool | None) -> Path:
    options = {} if renormalise is None else {"norm_topk_prob": renormalise}
    return router_model(folder, Z[None], 2, family, **options)


@pytest.mark.parametrize(("family", "renormalise"), RULES)
def test_A1_the_gate_rule_comes_from_the_config(family, renormalise, tmp_path):
    rule, gates = RULES[family, renormalise]
    session = fed(a1_model(tmp_path, family, renormalise), [0])
    assert session.model.config.gate_rule == rule
    assert session.tape.expert_ids(0).tolist() == [[0, 1]]
    np.testing.assert_allclose(session.tape.gates(0)[0], gates, atol=5e-6)


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe", "olmoe"])
def test_A1_an_absent_norm_topk_prob_means_not_renormalised(family, tmp_path):
    folder = a1_model(tmp_path, family, False)
    config = json.loads((folder / "config.json").read_text())
    del config["norm_topk_prob"]
    (folder / "config.json").write_text(json.dumps(config))
    assert lab.open(folder).config.gate_rule == "softmax"


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe"])
def test_A1_logits_scores_and_gates_are_three_arrays(family, tmp_path):
    tape = fed(a1_model(tmp_path, family, None if family == "mixtral" else False), [0]).tape
    logits, scores, gates = tape.router_logits(0), tape.scores(0), tape.gates(0)
    assert logits.tobytes() == Z.tobytes()
    np.testing.assert_allclose(scores[0], P, rtol=1e-6)
    for one, other in ((logits, scores), (scores, gates), (logits, gates)):
        assert not np.shares_memory(one, other)


@pytest.mark.parametrize(
    ("mode", "gates"),
    [
        ("softmax", [0.48773, 0.17943]),
        ("softmax_renormalised", [0.73106, 0.26894]),
        ("softmax_of_chosen", [0.73106, 0.26894]),
        ("raw_logits", [2.0, 1.0]),
    ],
)
def test_A1_another_gate_rule_must_be_asked_for_and_is_recorded(mode, gates, tmp_path):
    session = fed(a1_model(tmp_path, "olmoe", False), [0], gate_mode=mode)
    np.testing.assert_allclose(session.tape.gates(0)[0], gates, atol=5e-6)
    assert session.trace().meta["gate_rule"] == mode
    assert session.model.config.gate_rule == "softmax"


def test_A1_an_unknown_gate_rule_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(lab.ColibriError, match="softmax_renormalised"):
        lab.open(a1_model(tmp_path, "mixtral", None)).session(gate_mode="sigmoid")


def test_A2_the_score_that_chooses_and_the_factor_that_is_applied_are_kept_apart(tmp_path):
    """Scores and choice are the same under every gate rule; only gates change, and the routed sum follows the gates."""
    logits = np.random.default_rng(2).standard_normal((16, 8)).astype(np.float32)
    folder = router_model(tmp_path, logits, 3, "olmoe", norm_topk_prob=False)
    ids = list(range(16))
    tapes = {
        mode: fed(folder, ids, gate_mode=mode).tape
        for mode in ("softmax", "softmax_renormalised", "softmax_of_chosen", "raw_logits")
    }
    base = tapes["softmax"]
    for mode, tape in tapes.items():
        assert tape.scores(0).tobytes() == base.scores(0).tobytes()
        assert tape.expert_ids(0).tobytes() == base.expert_ids(0).tobytes()
        routed = np.zeros(tape["embed"].shape)
        for expert in range(8):
            rows = tape.expert_rows(0, expert)
            for token, output in zip(rows["tokens"], rows["output"], strict=True):
                slot = tape.expert_ids(0)[token].tolist().index(expert)
                routed[token] += float(tape.gates(0)[token, slot]) * output.astype(float)
        np.testing.assert_allclose(tape["layers.0.moe.routed"], routed, rtol=1e-5, atol=1e-6, err_msg=mode)
    assert tapes["raw_logits"].gates(0).tobytes() != base.gates(0).tobytes()


# ---- A3: scores that are not numbers ----


def test_A3_a_token_whose_logits_are_all_nan_gets_valid_distinct_experts(tmp_path):
    """And the tokens beside it get theirs: the NaN stays in its row."""
    logits = np.tile(Z, (4, 1))
    folder = router_model(tmp_path / "clean", logits, 2)
    config, tensors = read_checkpoint(folder)
    embedding = tensors["model.embed_tokens.weight"].copy()
    embedding[2] = np.nan
    dirty = write_checkpoint(tmp_path / "dirty", config, tensors | {"model.embed_tokens.weight": embedding})
    session = fed(dirty, [0, 1, 2])
    tape = session.tape
    assert np.isnan(lab.routing.margin(session.trace())).tolist() == [[False, False, True]]  # the token is marked
    assert np.isnan(tape.router_logits(0)[2]).all()
    assert np.isnan(tape.scores(0)[2]).all()
    assert_rows(tape.expert_ids(0), 8)
    assert tape.expert_ids(0).tolist() == [[0, 1]] * 3
    assert np.isfinite(tape.gates(0)[:2]).all()


@pytest.mark.parametrize("top_k", [1, 2, 7, 8])
def test_A3_one_nan_logit_gives_no_id_out_of_range_and_none_twice(top_k, tmp_path):
    config, tensors = read_checkpoint(router_model(tmp_path / "clean", Z[None], top_k))
    router = tensors[moe_prefix(config, 0) + "gate.weight"].copy()
    router[0] = np.nan
    dirty = write_checkpoint(tmp_path / "dirty", config, tensors | {moe_prefix(config, 0) + "gate.weight": router})
    tape = fed(dirty, [0]).tape
    assert np.isnan(tape.router_logits(0)[0, 0])
    assert tape.router_logits(0)[0, 1:].tobytes() == Z[1:].tobytes()
    assert_rows(tape.expert_ids(0), 8)


@pytest.mark.parametrize("low", [-1e30, -1.0, -3e38])
def test_A3_scores_below_any_starting_value_still_choose(low, tmp_path):
    tape = fed(router_model(tmp_path, np.full((1, 8), low, np.float32), 2, "olmoe", norm_topk_prob=False), [0]).tape
    assert tape.expert_ids(0).tolist() == [[0, 1]]
    assert tape.gates(0).tolist() == [[0.125, 0.125]]


def test_A3_generation_from_a_nan_router_stops_and_names_the_step_and_the_layer(tmp_path):
    config, tensors = read_checkpoint(router_model(tmp_path / "clean", np.tile(Z, (4, 1)), 2))
    router = tensors[moe_prefix(config, 0) + "gate.weight"].copy()
    router[0] = np.nan
    dirty = write_checkpoint(tmp_path / "dirty", config, tensors | {moe_prefix(config, 0) + "gate.weight": router})
    session = fed(dirty, [0, 1], capture="routing")
    with pytest.raises(lab.NonFiniteError, match=r"step 0.*layer.*0"):
        list(session.generate(3))
    assert session.ids == [0, 1]


# ---- A4: ties ----


def test_A4_equal_scores_go_to_the_lower_expert(tmp_path):
    tape = fed(router_model(tmp_path, np.zeros((1, 8), np.float32), 2, "olmoe", norm_topk_prob=False), [0]).tape
    assert tape.expert_ids(0).tolist() == [[0, 1]]
    assert tape.gates(0).tolist() == [[0.125, 0.125]]


def test_A4_a_tie_below_the_winner_goes_to_the_lower_expert_too(tmp_path):
    logits = np.array([[0, 1, 3, 1, 1, 0, 1, 0], [1, 1, 1, 1, 1, 1, 1, 2]], np.float32)
    tape = fed(router_model(tmp_path, logits, 3), [0, 1]).tape
    assert tape.expert_ids(0).tolist() == [[2, 1, 3], [7, 0, 1]]


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
def test_A4_the_router_is_float32_whatever_the_file_stores(dtype, tmp_path):
    """1.0 and 1.003 are one number in bfloat16; here the second is 1 + 1/256 + ... of two exactly stored weights."""
    config, tensors = read_checkpoint(router_model(tmp_path / "base", np.zeros((1, 8), np.float32), 1, dtype=dtype))
    name = moe_prefix(config, 0) + "gate.weight"
    embedding, router = (tensors[key].astype(np.float32) for key in ("model.embed_tokens.weight", name))
    embedding[0] = [2, 2, 2, 2, *[0] * 12]  # mean square 1
    router[0, :2], router[1, :2] = [0.5, 0.0], [0.5, 0.0015]
    stored = tensors[name].dtype
    changed = {"model.embed_tokens.weight": embedding.astype(stored), name: router.astype(stored)}
    tape = fed(write_checkpoint(tmp_path / "tie", config, tensors | changed), [0]).tape
    assert tape.router_logits(0)[0, 0] == 1.0
    np.testing.assert_allclose(tape.router_logits(0)[0, 1], 1.003, atol=2e-5)
    assert tape.expert_ids(0).tolist() == [[1]]


# ---- A5, A6: which expert, which matrix ----


def constant_experts(folder: Path, n_experts: int = 12) -> tuple[Path, dict, dict]:
    """Token t goes to expert t alone; expert e answers e in every channel (silu(1) · (1 / silu(1)) · e)."""
    logits = np.where(np.eye(n_experts, dtype=bool), 9.0, 0.0).astype(np.float32)
    config, tensors = read_checkpoint(router_model(folder / "base", logits, 1))
    hidden = config["hidden_size"]
    for expert in range(n_experts):
        prefix = f"{moe_prefix(config, 0)}experts.{expert}."
        silu_of_1 = 1 / (1 + np.exp(-1.0))
        tensors[prefix + "w1.weight"] = np.full((4, hidden), 0.25, np.float32)  # 4 · 0.25 = 1
        tensors[prefix + "w3.weight"] = np.full((4, hidden), 0.25 / silu_of_1, np.float32)
        tensors[prefix + "w2.weight"] = np.zeros((hidden, 4), np.float32)
        tensors[prefix + "w2.weight"][:, 0] = expert
    return folder, config, tensors


@pytest.mark.parametrize("form", ["separate", "in text order", "fused"])
def test_A5_experts_are_numbered_not_sorted_as_text(form, tmp_path):
    _, config, tensors = constant_experts(tmp_path)
    if form == "fused":
        tensors = fused(config, tensors)
    elif form == "in text order":  # 0, 1, 10, 11, 2, ...
        tensors = dict(sorted(tensors.items()))
    tape = fed(write_checkpoint(tmp_path / form, config, tensors), list(range(12))).tape
    for expert in range(12):
        assert tape[f"layers.0.moe.experts.{expert}.tokens"].tolist() == [expert]
        np.testing.assert_allclose(tape[f"layers.0.moe.experts.{expert}.output"], expert, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(tape["layers.0.moe.routed"][expert], expert, rtol=1e-6, atol=1e-6)


def test_A5_a_missing_expert_is_refused_by_name(tmp_path):
    _, config, tensors = constant_experts(tmp_path)
    kept = {name: value for name, value in tensors.items() if ".experts.10." not in name}
    with pytest.raises(lab.FormatError, match=r"experts\.10\."):
        lab.open(write_checkpoint(tmp_path / "gap", config, kept))


@pytest.mark.parametrize("number", ["07", "+7", "7 ", "12", "-1", "4294967303", "seven"])
def test_A5_an_expert_number_that_is_repeated_or_out_of_range_is_refused_by_name(number, tmp_path):
    """`07` would be expert 7 a second time; 4294967303 is 7 modulo 2^32."""
    _, config, tensors = constant_experts(tmp_path)
    prefix = moe_prefix(config, 0) + "experts."
    extra = {f"{prefix}{number}.{w}.weight": tensors[f"{prefix}7.{w}.weight"] for w in ("w1", "w2", "w3")}
    with pytest.raises(lab.ColibriError, match=re.escape(f"experts.{number}.")):
        lab.open(write_checkpoint(tmp_path / "twice", config, tensors | extra))


@pytest.mark.parametrize("form", ["separate", "fused"])
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe"])
def test_A6_gate_and_up_are_not_exchanged(family, form, tmp_path):
    """w1 = 1, w3 = 2, w2 = 1 (times identity) on [1, -1]; exchanged they would give [1.76159, 0.23841]."""
    config = small_config(family) | {"hidden_size": 2, "num_attention_heads": 1, "num_key_value_heads": 1}
    config |= {"num_hidden_layers": 1, "vocab_size": 1, "rms_norm_eps": 1e-30, "num_experts_per_tok": 1}
    config["num_local_experts" if family == "mixtral" else "num_experts"] = 1
    for width in ("head_dim", "intermediate_size", "moe_intermediate_size"):
        if width in config:
            config[width] = 2
    eye = np.eye(2, dtype=np.float32)
    tensors = {}
    for name, shape in shapes(config).items():
        if ".experts." in name:
            tensors[name] = 2 * eye if name.endswith(("w3.weight", "up_proj.weight")) else eye
        else:
            tensors[name] = np.full(shape, name.endswith("norm.weight"), np.float32)
    tensors["model.embed_tokens.weight"] = np.array([[1, -1]], np.float32)
    tape = fed(write_checkpoint(tmp_path, config, fused(config, tensors) if form == "fused" else tensors), [0]).tape
    np.testing.assert_allclose(tape["layers.0.moe.experts.0.output"], [[1.46212, 0.53788]], atol=5e-6)
    np.testing.assert_allclose(tape["layers.0.moe.routed"], [[1.46212, 0.53788]], atol=5e-6)


# ---- B3: an expert that nobody chose ----


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_B3_an_unused_expert_full_of_nan_changes_no_byte(bad, tmp_path):
    """Skipped means not touched: a gate of 0 would turn NaN weights into NaN outputs."""
    logits = np.random.default_rng(4).standard_normal((16, 8)).astype(np.float32)
    logits[:, 5] = -20
    config, tensors = read_checkpoint(router_model(tmp_path / "clean", logits, 2))
    prefix = f"{moe_prefix(config, 0)}experts.5."
    broken = {name: np.full_like(value, bad) for name, value in tensors.items() if name.startswith(prefix)}
    assert len(broken) == 3
    write_checkpoint(tmp_path / "broken", config, tensors | broken)
    sessions = [fed(tmp_path / name, list(range(16))) for name in ("clean", "broken")]
    clean, dirty = (session.tape for session in sessions)
    assert list(clean) == list(dirty)
    for path in clean:
        assert clean[path].tobytes() == dirty[path].tobytes(), path
    assert np.isfinite(dirty["logits"]).all()
    assert dirty["layers.0.moe.experts.5.output"].shape == (0, config["hidden_size"])
    found = lab.nan.weights(sessions[1])
    assert [weight.name for weight in found] == [f"layers.0.moe.experts.5.{name}" for name in ("gate", "up", "down")]
    assert all(str(weight).endswith("expert 5 was never used") for weight in found)
    assert lab.nan.weights(sessions[0]) == []


# ---- K1, K2: numbers of experts and of tokens ----


@pytest.mark.parametrize("n_experts", [1, 2, 3, 5, 7, 8, 60, 64, 257, 300, 512, 1024])
def test_K1_any_number_of_experts_finds_winners_in_every_place(n_experts, tmp_path):
    """Winners in the last slot, at 256 and at random; the brute-force order is NumPy's, ties to the lower index."""
    random = np.random.default_rng(n_experts)
    logits = random.standard_normal((16, n_experts)).astype(np.float32)
    logits[:8] = np.round(logits[:8])  # many ties
    logits[0, -1] = 9
    logits[1, min(256, n_experts - 1)] = 9
    for top_k in {1, min(2, n_experts), min(8, n_experts), n_experts}:
        tape = fed(router_model(tmp_path / str(top_k), logits, top_k), list(range(16)), capture="moe").tape
        assert (tape.router_logits(0) == logits).all()
        assert tape.expert_ids(0)[0, 0] == n_experts - 1
        assert tape.expert_ids(0)[1, 0] == min(256, n_experts - 1)
        order = np.argsort(-tape.scores(0), axis=1, kind="stable")[:, :top_k]
        assert tape.expert_ids(0).tolist() == order.tolist()
        np.testing.assert_allclose(tape.gates(0).sum(1), 1, rtol=2e-5)


def test_K1_more_experts_than_the_build_was_made_for_are_refused_with_both_numbers(tmp_path):
    with pytest.raises(lab.ColibriError, match=r"1025.*COLIBRI_MAX_EXPERTS = 1024"):
        lab.open(router_model(tmp_path, np.zeros((1, 1025), np.float32), 2))


def assert_dispatch(tape, n_tokens: int, n_experts: int, top_k: int) -> list[int]:
    """Counts sum to tokens · k, offsets are monotone, every row is its token's; returns the counts of the only pass."""
    offsets = tape["layers.0.moe.dispatch.offsets"]
    assert offsets.shape == (1, n_experts + 1)
    assert offsets[0, 0] == 0 and offsets[0, -1] == n_tokens * top_k
    counts = np.diff(offsets[0]).tolist()
    assert min(counts) >= 0
    for expert, count in enumerate(counts):
        tokens = tape[f"layers.0.moe.experts.{expert}.tokens"]
        assert len(tokens) == count
        assert tape.expert_inputs(0, expert).shape == (count, tape["embed"].shape[1])
        assert tape.expert_inputs(0, expert).dtype == np.float32
        assert tape.expert_inputs(0, expert).tobytes() == tape["layers.0.moe.input"][tokens].tobytes()
    return counts


def test_K2_one_token_leaves_six_of_eight_experts_empty(tmp_path):
    counts = assert_dispatch(fed(router_model(tmp_path, Z[None], 2), [0]).tape, 1, 8, 2)
    assert counts == [1, 1, 0, 0, 0, 0, 0, 0]


def test_K2_all_64_tokens_go_to_the_last_expert(tmp_path):
    logits = np.zeros((64, 8), np.float32)
    logits[:, 7] = 5
    tape = fed(router_model(tmp_path, logits, 1), list(range(64))).tape
    assert assert_dispatch(tape, 64, 8, 1) == [0] * 7 + [64]
    assert tape["layers.0.moe.experts.7.tokens"].tolist() == list(range(64))


def test_K2_no_token_at_all_is_an_error_and_the_session_goes_on(tmp_path):
    session = lab.open(router_model(tmp_path, Z[None], 2)).session(capture="all", max_tokens=4)
    for nothing in ([], np.empty(0, np.int64)):
        with pytest.raises(lab.ArgumentError):
            session.feed(nothing)
    assert session.tape["layers.0.moe.experts.3.input"].shape == (0, 16)
    assert session.tape.gates(0).shape == (0, 2)
    session.feed([0])
    assert_dispatch(session.tape, 1, 8, 2)


# ---- J3: rotary settings, wherever the config keeps them ----


def rope_model(folder: Path, **options) -> Path:
    """The same weights under another spelling of the config."""
    config = small_config("mixtral", head_dim=16)
    del config["rope_parameters"]
    return write_checkpoint(folder, config | options, random_tensors(config, 3))


IDS = np.random.default_rng(0).integers(0, 61, 64).tolist()


def test_J3_rope_theta_is_read_at_the_top_and_inside_rope_parameters(tmp_path):
    spellings = {
        "top": {"rope_theta": 1000000.0},
        "top, null scaling": {"rope_theta": 1000000.0, "rope_scaling": None},
        "inside": {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}},
        "integer": {"rope_theta": 1000000},
        "the class default of mixtral": {},
    }
    answers = {}
    for name, options in spellings.items():
        session = fed(rope_model(tmp_path / name, **options), IDS)
        assert session.model.config.rope_theta == 1e6
        answers[name] = session.tape["logits"].tobytes()
    assert len(set(answers.values())) == 1, answers.keys()
    other = fed(rope_model(tmp_path / "other", rope_theta=10000.0), IDS)
    assert other.model.config.rope_theta == 1e4
    assert other.tape["logits"].tobytes() not in answers.values()


@pytest.mark.parametrize("kind", ["spiral", "dynamic", "longrope", "proportional", ""])
@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_J3_a_rope_type_that_is_not_known_is_refused_by_name(kind, place, key, tmp_path):
    options = {place: {key: kind, "factor": 2.0, "rope_theta": 10000.0}}
    if place == "rope_scaling":
        options["rope_theta"] = 10000.0
    with pytest.raises(lab.UnsupportedError, match=kind or "rope"):
        lab.open(rope_model(tmp_path, **options))


def test_J3_two_places_that_disagree_are_refused(tmp_path):
    inside = {"rope_type": "default", "rope_theta": 10000.0}
    with pytest.raises(lab.FormatError, match="rope_theta"):
        lab.open(rope_model(tmp_path, rope_theta=1000000.0, rope_parameters=inside))


# ---- J4: explicit head_dim, and tensors that nobody asked for ----


def j4_model() -> tuple[dict, dict]:
    """hidden 8, heads 2, head_dim 8: q_proj is [16, 8], and q_norm, k_norm are [8]."""
    config = small_config("qwen3_moe", hidden_size=8, num_attention_heads=2, num_key_value_heads=1, head_dim=8)
    tensors = random_tensors(config, 5)
    assert tensors["model.layers.0.self_attn.q_proj.weight"].shape == (16, 8)
    assert tensors["model.layers.0.self_attn.q_norm.weight"].shape == (8,)
    return config, tensors


def test_J4_an_explicit_head_dim_wins_over_hidden_by_heads(tmp_path):
    config, tensors = j4_model()
    session = fed(write_checkpoint(tmp_path, config, tensors), IDS)
    assert session.model.config.head_dim == 8
    taps = Oracle(config, tensors).forward(IDS)
    assert_agrees(session.tape, {path: tap for path, tap in taps.items() if not path.endswith("attn.weights")})


def test_J4_a_head_dim_that_contradicts_the_tensors_is_refused_by_name(tmp_path):
    config, tensors = j4_model()
    with pytest.raises(lab.FormatError, match=r"q_proj"):
        lab.open(write_checkpoint(tmp_path, config | {"head_dim": 4}, tensors))


@pytest.mark.parametrize(
    "name", ["self_attn.q_norm.weight", "self_attn.k_norm.weight", "post_attention_layernorm.weight"]
)
def test_J4_a_missing_norm_is_refused_by_name(name, tmp_path):
    config, tensors = j4_model()
    del tensors["model.layers.1." + name]
    with pytest.raises(lab.FormatError, match=re.escape(name)):
        lab.open(write_checkpoint(tmp_path, config, tensors))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.0.self_attn.q_norm.weight", (11,)),
        ("model.layers.0.self_attn.sinks", (4,)),
        ("model.layers.0.self_attn.o_proj.bias", (44,)),
        ("model.layers.1.block_sparse_moe.gate.e_score_correction_bias", (8,)),
        ("model.layers.1.pre_feedforward_layernorm.weight", (44,)),
        ("lm_head.bias", (61,)),
    ],
)
def test_J4_a_tensor_that_mixtral_does_not_have_is_refused_by_name(name, shape, tmp_path):
    config = small_config("mixtral")
    tensors = random_tensors(config, 0) | {name: np.ones(shape, np.float32)}
    with pytest.raises(lab.ColibriError, match=re.escape(name)):
        lab.open(write_checkpoint(tmp_path, config, tensors))


def test_J4_tensors_that_every_reader_leaves_out_do_no_harm(tmp_path):
    """Rotary frequencies of old checkpoints, and layers beyond num_hidden_layers (prediction heads of training)."""
    config = small_config("mixtral")
    tensors = random_tensors(config, 0)
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(5, np.float32),
        "model.layers.2.input_layernorm.weight": np.ones(44, np.float32),
    }
    plain = fed(write_checkpoint(tmp_path / "plain", config, tensors), IDS).tape["logits"]
    more = fed(write_checkpoint(tmp_path / "more", config, tensors | extra), IDS).tape["logits"]
    assert plain.tobytes() == more.tobytes()


def test_a_rounded_checkpoint_of_the_tests_own_writer_is_what_it_says(tmp_path):
    """The writer that every case here trusts, against the safetensors package."""
    from safetensors import safe_open

    tensors = random_tensors(small_config("olmoe"), 1)
    write_safetensors(tmp_path / "x.safetensors", tensors)
    with safe_open(tmp_path / "x.safetensors", "np") as file:
        assert set(file.keys()) == set(tensors)
        for name, value in tensors.items():
            assert file.get_tensor(name).tobytes() == value.tobytes()
