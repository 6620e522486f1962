"""Recorded activations of transformers, layer by layer, for every stored form of the seven small checkpoints.

fixtures/reference/README.md says how they were made and what each tensor is.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from checkpoints import read_safetensors
from compare import TOLERANCE, assert_agrees, relative_error

import colibri_lab as lab

REFERENCE = Path(__file__).parent / "fixtures" / "reference"
CONFIGURATIONS = sorted(path.parent.relative_to(REFERENCE).as_posix() for path in REFERENCE.rglob("config.json"))
LEGACY = sorted(path.parent.relative_to(REFERENCE).as_posix() for path in REFERENCE.rglob("config.legacy.json"))


def golden_of(configuration: str) -> dict[str, np.ndarray]:
    """A variant without a recording of its own holds the same numbers as the checkpoint above it."""
    path = REFERENCE / configuration / "golden.safetensors"
    return read_safetensors(path if path.exists() else path.parent.parent / path.name)


def expected_taps(golden: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The recorded tensors under the tape's paths."""
    layers = sum(name.startswith("layer.") and name.endswith(".ffn_out") for name in golden)
    out = {"embed": golden["hidden.0"], "norm": golden["final_norm"], "logits": golden["logits"]}
    for layer in range(layers):
        path = f"layers.{layer}."
        block = path + ("moe." if f"moe.{layer}.gates" in golden else "mlp.")
        out[path + "attn.out"] = golden[f"layer.{layer}.attn_out"]
        out[block + "input"] = golden[f"layer.{layer}.ffn_in"]
        if block.endswith("moe."):
            names = {"router_logits": "router_logits", "expert_ids": "topk_ids", "gates": "gates", "routed": "routed_out"}
            out |= {block + tap: golden[f"moe.{layer}.{name}"] for tap, name in names.items()}
            if f"moe.{layer}.shared_out" in golden:
                out[block + "shared.output"] = golden[f"moe.{layer}.shared_out"]
        out[block + "output"] = golden[f"layer.{layer}.ffn_out"]
        out[path + "output"] = golden[f"hidden.{layer + 1}"]
    layer = int(golden["expert.layer"].ravel()[0])
    for name, rows in golden.items():
        if name.startswith("expert.") and name != "expert.layer":
            _, expert, what = name.split(".")
            tap = {"in": "input", "out": "output", "tokens": "tokens"}[what]
            out[f"layers.{layer}.moe.experts.{expert}.{tap}"] = rows
    return out


def check(folder: Path, golden: dict[str, np.ndarray]) -> None:
    model = lab.open(folder)
    session = model.session(capture="all", max_tokens=64)
    prompt = golden["input_ids"].tolist()
    session.feed(prompt)
    taps = expected_taps(golden)
    used = {path: tap for path, tap in taps.items() if ".experts." in path}
    assert sum(len(rows) for path, rows in used.items() if path.endswith(".tokens")) == len(prompt) * model.config.top_k
    worst = assert_agrees(session.tape, taps)

    tokens, logits = [], []
    for token in session.generate(len(golden["greedy_ids"]), stop_ids=()):
        logits.append(session.tape["logits"][len(prompt) - 1 + len(tokens)].copy())
        tokens.append(int(token))
    assert tokens == golden["greedy_ids"].tolist()
    greedy = relative_error(np.array(logits), golden["greedy_logits"])
    assert greedy <= TOLERANCE
    print(f"largest relative error {max(worst, greedy):.1e}")


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_every_recorded_tensor_and_sixteen_greedy_tokens_agree_with_transformers(configuration):
    check(REFERENCE / configuration, golden_of(configuration))


@pytest.mark.parametrize("configuration", LEGACY)
def test_a_config_spelled_as_before_transformers_5_gives_the_same_numbers(configuration, tmp_path):
    shutil.copy(REFERENCE / configuration / "model.safetensors", tmp_path)
    shutil.copy(REFERENCE / configuration / "config.legacy.json", tmp_path / "config.json")
    check(tmp_path, golden_of(configuration))


def test_the_reference_set_is_complete():
    """Four families with all their stored forms, and three more configurations; a lost fixture must not pass silently."""
    forms = {f"{family}{form}" for family in ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe") for form in ("", "/sharded", "/bf16", "/f16", "/fused")}
    assert set(CONFIGURATIONS) == forms | {"mixtral_swa", "qwen2_moe_step", "qwen3_moe_yarn"}
    assert len(LEGACY) == 7


@pytest.mark.parametrize("configuration", ["mixtral", "olmoe", "qwen2_moe", "qwen3_moe"])
def test_sharding_and_stacking_the_experts_change_no_byte(configuration):
    """The same float32 weights stored three ways give the same bytes, not only the same numbers."""
    prompt = golden_of(configuration)["input_ids"].tolist()
    tapes = []
    for form in ("", "sharded", "fused"):
        session = lab.open(REFERENCE / configuration / form).session(capture="all", max_tokens=64)
        session.feed(prompt)
        tapes.append(session.tape)
    for path in expected_taps(golden_of(configuration)):
        for tape in tapes[1:]:
            assert tape[path].tobytes() == tapes[0][path].tobytes(), path
