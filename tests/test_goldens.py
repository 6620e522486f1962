"""Recorded activations of transformers, layer by layer, for every stored form of the seven small checkpoints.

fixtures/reference/README.md says how they were made and what each tensor is.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from compare import TOLERANCE, assert_agrees, relative_error
from goldens import CONFIGURATIONS, LEGACY, REFERENCE, expected_taps, golden_of

import colibri_lab as lab


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
    """Four families with all their stored forms, and three more; a lost fixture must not pass silently."""
    forms = {
        f"{family}{form}"
        for family in ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
        for form in ("", "/sharded", "/bf16", "/f16", "/fused")
    }
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
