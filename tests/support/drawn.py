"""Checkpoint configs drawn at random over everything that a config of the four families can say."""

from __future__ import annotations

import numpy as np
from checkpoints import is_moe, small_config


def draw_rope(random: np.random.Generator) -> dict:
    """One of the four rope types, with every option of it somewhere in its range."""
    kind = str(random.choice(["default", "linear", "llama3", "yarn"]))
    rope = {"rope_type": kind, "rope_theta": float(np.float32(10 ** random.uniform(1, 7)))}
    if kind != "default":
        rope["factor"] = float(random.uniform(1, 8))
    if kind in ("llama3", "yarn"):
        rope["original_max_position_embeddings"] = int(random.integers(8, 200))
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": float(random.uniform(1.5, 5))}
    if kind == "yarn":
        rope |= {"beta_fast": float(random.uniform(4, 40)), "beta_slow": float(random.uniform(0.5, 2))}
        if random.integers(2):
            rope["truncate"] = False
        if random.integers(2):
            rope["attention_factor"] = float(random.uniform(0.5, 1.5))
    return rope


def draw_config(random: np.random.Generator) -> dict:
    """Sizes from 1 up, every option of the family on or off."""

    def maybe(value):
        return value if random.integers(2) else None

    family = str(random.choice(["mixtral", "qwen2_moe", "qwen3_moe", "olmoe"]))
    n_layers, kv_heads = (int(size) for size in random.integers(1, 4, 2))
    heads, head_dim = kv_heads * int(random.integers(1, 4)), 2 * int(random.integers(1, 20))
    n_experts = int(random.choice([1, 2, 3, 5, 8, 13, 17, 33, 64, 65]))
    config = small_config(family) | {
        "num_hidden_layers": n_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": heads * head_dim,
        "vocab_size": int(random.integers(2, 90)),
        "intermediate_size": int(random.integers(1, 50)),
        "num_experts_per_tok": int(random.integers(1, min(n_experts, 9) + 1)),
        "rms_norm_eps": float(10 ** random.uniform(-7, -2)),
        "tie_word_embeddings": bool(random.integers(2)),
        "rope_parameters": draw_rope(random),
    }
    config["num_local_experts" if family == "mixtral" else "num_experts"] = n_experts
    if family in ("mixtral", "qwen3_moe"):
        config |= {"head_dim": head_dim, "hidden_size": int(random.integers(1, 90))}
    if family == "mixtral":
        config["sliding_window"] = maybe(int(random.integers(1, 40)))
    else:
        config["norm_topk_prob"] = bool(random.integers(2))
    if family in ("qwen3_moe", "olmoe"):
        config["attention_bias"] = bool(random.integers(2))
    if family == "olmoe":
        config["clip_qkv"] = maybe(float(random.uniform(0.2, 2)))
    if family.startswith("qwen"):
        config |= {
            "moe_intermediate_size": int(random.integers(1, 50)),
            "decoder_sparse_step": int(random.integers(1, 3)),
            "mlp_only_layers": [int(random.integers(n_layers))][: int(random.integers(2))],
            "use_sliding_window": bool(random.integers(2)),
            "sliding_window": int(random.integers(1, 40)),
        }
        if not any(is_moe(config, layer) for layer in range(n_layers)):
            config |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
    if family == "qwen2_moe":
        config |= {"shared_expert_intermediate_size": int(random.integers(1, 50)), "qkv_bias": bool(random.integers(2))}
        config["max_window_layers"] = int(random.integers(4))
    return config
