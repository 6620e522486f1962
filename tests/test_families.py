"""Random checkpoints of odd shapes against an independent NumPy forward (support/oracle.py): every tap, no torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from checkpoints import DTYPES, fused, random_tensors, read_checkpoint, small_config, write_checkpoint
from compare import TIE, assert_agrees
from drawn import draw_config
from goldens import CONFIGURATIONS, REFERENCE, expected_taps, golden_of
from oracle import Oracle, smallest_margin

import colibri_lab as lab

EVERYTHING = ["all", "layers.*.attn.weights"]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 8.0,
}
YARN_FACTOR = {**YARN, "attention_factor": 0.9, "truncate": False, "beta_slow": 2.0}


CASES = {
    "mixtral, 65 experts, top 8, window 33, one kv head": (
        small_config(
            "mixtral",
            hidden_size=50,
            head_dim=18,
            num_attention_heads=3,
            num_key_value_heads=1,
            num_local_experts=65,
            num_experts_per_tok=8,
            sliding_window=33,
        ),
        "F32",
    ),
    "mixtral, every expert chosen, tied, llama3 rope": (
        small_config(
            "mixtral",
            head_dim=12,
            num_local_experts=3,
            num_experts_per_tok=3,
            tie_word_embeddings=True,
            rope_parameters=LLAMA3,
        ),
        "F32",
    ),
    "mixtral, one expert": (small_config("mixtral", head_dim=8, num_local_experts=1, num_experts_per_tok=1), "F16"),
    "mixtral, bf16, linear rope": (
        small_config("mixtral", head_dim=14, num_local_experts=7, rope_parameters=LINEAR),
        "BF16",
    ),
    "qwen2_moe, dense first layer, window in layer 0 and 2": (
        small_config(
            "qwen2_moe",
            num_hidden_layers=3,
            mlp_only_layers=[0],
            use_sliding_window=True,
            sliding_window=33,
            max_window_layers=3,
            num_experts=60,
            num_experts_per_tok=4,
        ),
        "F32",
    ),
    "qwen2_moe, every second layer dense, tied, renormalised, no biases": (
        small_config(
            "qwen2_moe",
            num_hidden_layers=4,
            decoder_sparse_step=2,
            norm_topk_prob=True,
            tie_word_embeddings=True,
            qkv_bias=False,
        ),
        "F32",
    ),
    "qwen2_moe, layer_types, yarn, bf16": (
        small_config(
            "qwen2_moe",
            use_sliding_window=True,
            sliding_window=5,
            layer_types=["full_attention", "sliding_attention"],
            rope_parameters=YARN,
        ),
        "BF16",
    ),
    "qwen3_moe, 65 experts, top 8, biases, yarn with a factor": (
        small_config(
            "qwen3_moe", num_experts=65, num_experts_per_tok=8, attention_bias=True, rope_parameters=YARN_FACTOR
        ),
        "F32",
    ),
    "qwen3_moe, wide heads, window 33, renormalised, every third layer sparse": (
        small_config(
            "qwen3_moe",
            hidden_size=36,
            head_dim=32,
            num_hidden_layers=3,
            decoder_sparse_step=3,
            norm_topk_prob=True,
            use_sliding_window=True,
            sliding_window=33,
        ),
        "F32",
    ),
    "qwen3_moe, f16, tied": (small_config("qwen3_moe", tie_word_embeddings=True, rope_parameters=LINEAR), "F16"),
    "olmoe, clip_qkv, llama3 rope, 64 experts, top 8": (
        small_config("olmoe", clip_qkv=0.8, num_experts=64, num_experts_per_tok=8, rope_parameters=LLAMA3),
        "F32",
    ),
    "olmoe, renormalised, biases, tied, all heads their own": (
        small_config(
            "olmoe", norm_topk_prob=True, attention_bias=True, tie_word_embeddings=True, num_key_value_heads=4
        ),
        "F32",
    ),
    "olmoe, bf16, yarn": (small_config("olmoe", clip_qkv=1.5, rope_parameters=YARN), "BF16"),
}


def checkpoint_and_taps(name: str, folder: Path, n_tokens: int = 90):
    """A checkpoint of the first seed whose routing has no near tie, the prompt, and the oracle's taps."""
    settings, dtype = CASES[name]
    for seed in range(100):
        tensors = {key: value.astype(DTYPES[dtype]) for key, value in random_tensors(settings, seed).items()}
        prompt = np.random.default_rng(seed).integers(0, settings["vocab_size"], n_tokens).tolist()
        taps = Oracle(settings, tensors).forward(prompt)
        if smallest_margin(taps, settings["num_experts_per_tok"]) > TIE:
            return write_checkpoint(folder, settings, tensors), prompt, taps
    raise AssertionError(f"no seed without a tie: {name}")


@pytest.mark.parametrize("name", CASES)
def test_every_tap_agrees_with_the_formulas(name, tmp_path):
    folder, prompt, taps = checkpoint_and_taps(name, tmp_path)
    session = lab.open(folder).session(capture=EVERYTHING, max_tokens=len(prompt))
    session.feed(prompt)
    assert {path for path in session.tape if ".dispatch." not in path} == set(taps)
    print(f"largest relative error {assert_agrees(session.tape, taps):.1e} over {len(taps)} taps")


@pytest.mark.parametrize(
    "name", ["mixtral, 65 experts, top 8, window 33, one kv head", "qwen2_moe, layer_types, yarn, bf16"]
)
def test_stacked_experts_are_the_same_model(name, tmp_path):
    folder, prompt, taps = checkpoint_and_taps(name, tmp_path / "separate")
    settings, tensors = read_checkpoint(folder)
    session = lab.open(write_checkpoint(tmp_path / "fused", settings, fused(settings, tensors))).session(
        capture="all", max_tokens=128
    )
    session.feed(prompt)
    assert_agrees(session.tape, {path: tap for path, tap in taps.items() if not path.endswith("attn.weights")})


@pytest.mark.parametrize("configuration", [name for name in CONFIGURATIONS if not name.endswith("fused")])
def test_the_oracle_itself_agrees_with_transformers(configuration):
    """The formulas above are right where a recording of transformers can tell."""
    golden = golden_of(configuration)
    taps = Oracle(*read_checkpoint(REFERENCE / configuration)).forward(golden["input_ids"])
    taps = {path: tap.astype(np.int32) if path.endswith("expert_ids") else tap for path, tap in taps.items()}
    assert_agrees(taps, expected_taps(golden), 5e-6)


def check_drawn(seed: int, folder: Path) -> None:
    """A config, a dtype, a prompt and a thread count drawn from the seed; every tap against the formulas."""
    random = np.random.default_rng(seed)
    settings, dtype = draw_config(random), DTYPES[str(random.choice(["F32", "BF16", "F16"]))]
    prompt = random.integers(0, settings["vocab_size"], int(random.integers(1, 80))).tolist()
    while True:
        tensors = random_tensors(settings, int(random.integers(2**31)))
        tensors = {name: value.astype(dtype) for name, value in tensors.items()}
        taps = Oracle(settings, tensors).forward(prompt)
        if smallest_margin(taps, settings["num_experts_per_tok"]) > TIE / 10:
            break
    model = lab.open(write_checkpoint(folder, settings, tensors))
    with pytest.MonkeyPatch.context() as machine:
        machine.setenv("COLIBRI_CPUS", "4")  # as many threads as are drawn, whatever machine it runs on
        session = model.session(capture=EVERYTHING, max_tokens=len(prompt), threads=int(random.integers(1, 4)))
    session.feed(prompt)
    assert_agrees(session.tape, taps)


@pytest.mark.parametrize("seed", range(16))
def test_a_drawn_config_agrees_with_the_formulas(seed, tmp_path):
    check_drawn(seed, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(16, 400))
def test_many_drawn_configs_agree_with_the_formulas(seed, tmp_path):
    check_drawn(seed, tmp_path)
