"""Small models for the planted cases, one per way in which the families differ, with weights as trained ones lie.

Norm weights near 1, embeddings small enough that an epsilon is felt, router logits spread so that few choices are
close, branches that add to the residual stream without drowning it. Everything is drawn from a seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from checkpoints import shapes, small_config, write_checkpoint

import colibri_lab as lab
from colibri_lab.trace import Trace

Config = dict
Tensors = dict[str, np.ndarray]

ALL = ("all",)
MOE = ("moe",)
WITH_WEIGHTS = ("all", "layers.*.attn.weights")


def rope(theta: float) -> dict:
    return {"rope_type": "default", "rope_theta": theta}


_BASES: dict[str, tuple[str, int, int, dict]] = {
    # name: (family, seed, tokens, keys of the config that differ from small_config)
    "mixtral": ("mixtral", 1, 32, dict(
        vocab_size=96, hidden_size=48, intermediate_size=40, num_hidden_layers=3, head_dim=12,
        rope_parameters=rope(1e6))),
    "mixtral-square": ("mixtral", 2, 30, dict(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_key_value_heads=4, head_dim=8,
        sliding_window=7, num_local_experts=8)),
    "mixtral-many": ("mixtral", 3, 28, dict(
        vocab_size=80, hidden_size=40, intermediate_size=28, num_hidden_layers=2, head_dim=16, num_local_experts=13,
        num_experts_per_tok=3, rope_parameters=rope(1e6))),
    "qwen3": ("qwen3_moe", 4, 32, dict(
        vocab_size=128, hidden_size=48, moe_intermediate_size=24, num_hidden_layers=3, head_dim=16, num_experts=12,
        num_experts_per_tok=3, norm_topk_prob=True, rms_norm_eps=1e-6, rope_parameters=rope(1e6))),
    "qwen3-dense": ("qwen3_moe", 5, 26, dict(
        vocab_size=72, hidden_size=32, moe_intermediate_size=32, intermediate_size=56, num_hidden_layers=3, head_dim=8,
        num_experts=16, num_experts_per_tok=4, mlp_only_layers=[0], rms_norm_eps=1e-6, use_sliding_window=True,
        sliding_window=6)),
    "qwen2": ("qwen2_moe", 6, 32, dict(
        vocab_size=100, hidden_size=40, moe_intermediate_size=24, shared_expert_intermediate_size=36, num_experts=10,
        num_hidden_layers=3, num_key_value_heads=4, rms_norm_eps=1e-6)),
    "qwen2-sparse": ("qwen2_moe", 7, 36, dict(
        vocab_size=90, hidden_size=48, moe_intermediate_size=20, shared_expert_intermediate_size=32, num_experts=12,
        intermediate_size=60, num_hidden_layers=4, decoder_sparse_step=2, norm_topk_prob=True, rms_norm_eps=1e-6,
        use_sliding_window=True, sliding_window=9, num_experts_per_tok=4)),
    "olmoe": ("olmoe", 8, 32, dict(
        vocab_size=64, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_key_value_heads=4,
        num_experts=16, num_experts_per_tok=4)),
    "olmoe-clip": ("olmoe", 9, 24, dict(
        vocab_size=110, hidden_size=32, intermediate_size=24, num_hidden_layers=4, num_experts=11,
        num_experts_per_tok=3, clip_qkv=2.5)),
}  # fmt: skip

_BIASED = dict(
    vocab_size=84, hidden_size=40, intermediate_size=52, moe_intermediate_size=22, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=2, head_dim=10, num_experts=12, num_experts_per_tok=3,
    rms_norm_eps=1e-5, rope_parameters=rope(1e4), max_position_embeddings=256, hidden_act="silu",
)  # fmt: skip
_BIASED_BASES: dict[str, tuple[str, int, int, dict]] = {  # families whose routers choose by a corrected score
    "deepseek": ("deepseek_v3", 21, 30, dict(
        n_group=4, topk_group=2, norm_topk_prob=True, routed_scaling_factor=2.5, first_k_dense_replace=1, n_shared=1)),
    "glm4": ("glm4_moe", 22, 28, dict(
        n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=1.0, first_k_dense_replace=1, n_shared=1)),
    "dots": ("dots1", 23, 26, dict(
        n_group=1, topk_group=1, norm_topk_prob=False, routed_scaling_factor=1.8, first_k_dense_replace=0, n_shared=1)),
    "minimax": ("minimax_m2", 24, 26, dict(norm_topk_prob=True, first_k_dense_replace=0, n_shared=0)),
    "ernie": ("ernie4_5_moe", 25, 26, dict(norm_topk_prob=True, first_k_dense_replace=1, n_shared=1)),
}  # fmt: skip


def _drawn(name: str, shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    value = random.standard_normal(shape)
    if name.endswith("norm.weight"):
        value = 1 + 0.1 * value
    elif name.endswith("embed_tokens.weight"):
        value *= 0.25
    elif name.endswith("e_score_correction_bias"):
        value *= 0.15
    elif len(shape) == 1:
        value *= 0.3
    else:
        gains = {"gate.weight": 2.5, "q_proj.weight": 1.4, "k_proj.weight": 1.4, "o_proj.weight": 0.6,
                 "down_proj.weight": 0.9, "w2.weight": 0.9, "lm_head.weight": 2.0}  # fmt: skip
        gain = next((gain for end, gain in gains.items() if name.endswith(end)), 1.2)
        value *= gain / shape[-1] ** 0.5
    return value.astype(np.float32)


def _biased_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """As `shapes` for families with a correction bias, plain attention and ungated shared experts."""
    plain = shapes(config | {"model_type": "qwen3_moe", "mlp_only_layers": range(config["first_k_dense_replace"])})
    out = {name: shape for name, shape in plain.items() if not name.endswith(("q_norm.weight", "k_norm.weight"))}
    for layer in range(config["first_k_dense_replace"], config["num_hidden_layers"]):
        prefix, inner = f"model.layers.{layer}.mlp.", config["moe_intermediate_size"]
        out[prefix + "gate.e_score_correction_bias"] = (config["num_experts"],)
        if config["n_shared"]:
            out[prefix + "shared_experts.gate_proj.weight"] = (inner, config["hidden_size"])
            out[prefix + "shared_experts.up_proj.weight"] = (inner, config["hidden_size"])
            out[prefix + "shared_experts.down_proj.weight"] = (config["hidden_size"], inner)
    return out


def base(name: str, **options) -> tuple[Config, Tensors, list[int]]:
    """(config, tensors, token ids) of a model named above; `options` replace keys of its config."""
    if name in _BASES:
        family, seed, tokens, keys = _BASES[name]
        config = small_config(family, **(keys | options))
        names = shapes(config)
    else:
        family, seed, tokens, keys = _BIASED_BASES[name]
        config = {"model_type": family} | _BIASED | keys | options
        names = _biased_shapes(config)
    random = np.random.default_rng(1000 + seed)
    tensors = {tensor: _drawn(tensor, shape, random) for tensor, shape in names.items()}
    return config, tensors, random.integers(0, config["vocab_size"], tokens).tolist()


def family_of(name: str) -> str:
    return (_BASES.get(name) or _BIASED_BASES[name])[0]


def write(folder: Path, config: Config, tensors: Mapping[str, np.ndarray]) -> Path:
    return write_checkpoint(folder, config, tensors)


def run(
    folder: Path,
    ids: Sequence[int],
    capture: Sequence[str] = ALL,
    chunks: Sequence[int] = (),
    gate_mode: str | None = None,
) -> Trace:
    """What our engine does with `ids`, in passes of the given lengths (one pass when there are none)."""
    session = lab.open(folder).session(capture=capture, threads=1, max_tokens=len(ids), gate_mode=gate_mode)
    start = 0
    for length in chunks or [len(ids)]:
        session.feed(list(ids[start : start + length]))
        start += length
    return session.trace()
