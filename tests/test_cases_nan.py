"""Cases of NaN and Inf that users met, each on a small model: the origin is named in one call."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from checkpoints import read_checkpoint, write_checkpoint
from handmade import router_model

import colibri_lab as lab
from colibri_lab.testing import synthetic_trace, tiny_model
from colibri_lab.trace import Trace

CHANNEL, TOKEN = 11, 2


@pytest.fixture(scope="module")
def large_row(tmp_path_factory: pytest.TempPathFactory) -> lab.Model:
    """Token 2 sends 9/10 of its weight to expert 0, which returns 0, and 1/10 to expert 1, which returns 70000 at
    channel 11.
    """
    folder = tmp_path_factory.mktemp("b2") / "m"
    logits = np.zeros((4, 2), np.float32)
    logits[TOKEN] = np.log(9), 0
    config, tensors = read_checkpoint(router_model(folder, logits, top_k=2))
    expert = "model.layers.0.block_sparse_moe.experts."
    for name in list(tensors):
        if ".experts." in name:
            tensors[name] = np.zeros_like(tensors[name])
    root = np.float32(config["hidden_size"] ** 0.5)  # what token t holds at place t
    tensors[expert + "1.w1.weight"][0, TOKEN] = 64 / root  # silu(64) is 64 in float32
    tensors[expert + "1.w3.weight"][0, TOKEN] = 1 / 64 / root
    tensors[expert + "1.w2.weight"][CHANNEL, 0] = 70000
    return lab.open(write_checkpoint(folder, config, tensors))


def test_B2_a_large_output_under_a_small_gate_is_right_in_float32(large_row: lab.Model) -> None:
    session = large_row.session(capture="all")
    session.feed([0, 1, TOKEN])
    assert session.tape["layers.0.moe.experts.1.output"][-1, CHANNEL] == 70000
    assert session.tape["layers.0.moe.routed"][2, CHANNEL] == pytest.approx(7000.0, rel=1e-6)
    assert lab.nan.find(session) is None


@pytest.mark.parametrize("capture", ["none", "all"])
def test_B2_the_same_in_float16_overflows_and_names_expert_token_and_channel(
    large_row: lab.Model, capture: str
) -> None:
    session = large_row.session(capture=capture, emulate="float16")
    session.feed([0, 1, TOKEN])
    found = lab.nan.find(session)
    assert found is not None and len(found.origins) == 1
    origin = found.origin
    assert (origin.path, origin.expert) == ("layers.0.moe.experts.1.output", 1)
    assert (origin.token, origin.tokens, origin.index) == (2, (2,), CHANNEL)
    assert (origin.kind, origin.dtype, origin.exact) == ("overflow", "float16", 70000.0)
    assert 2 in found.propagation.ruined


@pytest.fixture(scope="module")
def two_prompts(tmp_path_factory: pytest.TempPathFactory) -> lab.Model:
    """Eight experts; token 0 goes to experts 0 and 1, token 1 to 3 and 6."""
    logits = np.zeros((2, 8), np.float32)
    logits[0, [0, 1]] = 4, 3
    logits[1, [3, 6]] = 4, 3
    return lab.open(router_model(tmp_path_factory.mktemp("b4") / "m", logits, top_k=2))


def poisoned(model: lab.Model, name: str, place: tuple[int, ...] | None, value: float) -> lab.Model:
    weight = np.array(model.weights[name])
    weight[... if place is None else place] = value
    return model.with_weights({name: weight})


def test_B3_an_expert_whose_weights_are_nan_harms_no_prompt_that_never_picks_it(two_prompts: lab.Model) -> None:
    """The run is clean and the same as before; the weights are still reported, as never used."""
    sick = two_prompts
    for part in ("gate", "up", "down"):
        sick = poisoned(sick, f"layers.0.moe.experts.5.{part}", None, np.nan)
    sessions = [model.session(capture="all") for model in (two_prompts, sick)]
    for session in sessions:
        session.feed([0, 1, 0])
    assert lab.nan.find(sessions[1]) is None
    assert sessions[0].logits.tobytes() == sessions[1].logits.tobytes()
    assert [str(row).endswith("expert 5 was never used") for row in lab.nan.weights(sessions[1])] == [True] * 3
    assert lab.nan.weights(sessions[1], used=True) == []


@pytest.mark.parametrize("capture", ["none", "routing", "moe", "all"])
def test_B4_only_the_prompt_that_meets_the_bad_expert_is_ill(two_prompts: lab.Model, capture: str) -> None:
    """One Inf in w1 of expert 3: prompt a is clean, prompt b leads to expert, row and token in one call."""
    sick = poisoned(two_prompts, "layers.0.moe.experts.3.gate", (2, 1), np.inf)
    a, b = sick.session(capture=capture), sick.session(capture=capture)
    a.feed([0, 0, 0])
    b.feed([0, 0, 1])
    assert lab.nan.find(a) is None
    found = lab.nan.find(b)
    assert found is not None and len(found.origins) == 1
    origin = found.origin
    assert (origin.path, origin.layer, origin.expert) == ("layers.0.moe.experts.3.gate", 0, 3)
    assert (origin.token, origin.tokens, origin.index) == (2, (2,), 2)
    assert origin.kind == "weight value" and origin.weight is not None
    assert (origin.weight.name, origin.weight.index) == ("layers.0.moe.experts.3.gate", (2, 1))
    assert found.propagation.ruined == (2,)


def test_B5_routing_is_the_damage_and_the_norm_before_it_the_origin(tmp_path: Path) -> None:
    """NaN in the input norm of layer 2: every token picks the same experts afterwards, and none of them is blamed."""
    model = lab.open(tiny_model(tmp_path / "m", experts=16, top_k=4, layers=3))
    session = poisoned(model, "layers.2.attn_norm", None, np.nan).session(capture="all")
    session.feed(list(range(3, 19)))
    assert (session.tape["layers.2.moe.expert_ids"] == np.arange(4)).all()
    found = lab.nan.find(session)
    assert found is not None
    assert {origin.path for origin in found.origins} == {"layers.2.attn.norm"}
    assert {origin.kind for origin in found.origins} == {"weight value"}
    assert {origin.weight.name for origin in found.origins if origin.weight} == {"layers.2.attn_norm"}
    assert found.origin.tokens == tuple(range(16)) and found.origin.expert is None
    assert dict(found.propagation.routing) == {2: tuple(range(16))}
    assert not any(origin.stage in ("router", "expert") for origin in found.origins)


def test_I2_a_scan_counts_by_what_the_bits_are() -> None:
    """NaN quiet and signalling, of either sign, both infinities, a subnormal: none is lost, none counted twice."""
    bits = np.array([[0x7FC00000, 0x7F800000, 0xFF800000, 0x7F800001, 0xFFC00000, 0x00000001, 0x3F800000]], np.uint32)
    trace = synthetic_trace(layers=1, tokens=1, experts=7)
    arrays = {path: np.array(trace[path]) for path in trace} | {"layers.0.moe.router_logits": bits.view(np.float32)}
    table = lab.nan.scan(Trace(arrays, ids=trace.ids, texts=[], meta=trace.meta))
    row = table[table["path"] == "layers.0.moe.router_logits"][0]
    assert (row["n"], row["n_nan"], row["n_inf"], row["n_negative_inf"], row["n_subnormal"]) == (7, 3, 2, 1, 1)
    assert row["absmax"] == 1
