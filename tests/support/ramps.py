"""Checkpoints in which one kind of value grows from layer to layer by a drawn factor, with noise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from checkpoints import moe_prefix, random_tensors, small_config, write_checkpoint

KINDS = ("hidden", "output", "residual", "q", "k", "v", "router", "attention", "scores")


def growing_model(
    folder: Path, kind: str, seed: int, bits: float, noise: float, start: float = 0.0
) -> tuple[Path, str]:
    """(checkpoint, tap without its layer): the tap's values of layer l are about 2^(start + bits · l) times as large.

    8 to 12 layers of width 16. Each layer's factor has a normal noise of `noise` bits of its own.
    """
    random = np.random.default_rng(seed)
    layers = int(random.integers(8, 13))
    sizes = {"hidden_size": 16, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes |= {"head_dim": 8, "num_local_experts": 4, "vocab_size": 24}
    config = small_config("mixtral", num_hidden_layers=layers, **sizes)
    tensors = random_tensors(config, seed)
    exponents = start + bits * np.arange(layers) + random.normal(0, noise, layers)
    for layer in range(layers):
        factor = np.float32(2 ** exponents[layer])
        moe, attention = moe_prefix(config, layer), f"model.layers.{layer}.self_attn."
        experts = [f"{moe}experts.{e}." for e in range(4)]
        grown = {
            "hidden": [f"{e}w3" for e in experts],
            "output": [f"{e}w2" for e in experts],
            "residual": [f"{e}w2" for e in experts],
            "q": [attention + "q_proj"],
            "k": [attention + "k_proj"],
            "scores": [attention + "k_proj"],
            "v": [attention + "v_proj"],
            "attention": [attention + "o_proj"],
            "router": [moe + "gate"],
        }[kind]
        for name in grown:
            tensors[name + ".weight"] = tensors[name + ".weight"] * factor
        if kind == "hidden":  # its output stays as it was
            for e in experts:
                tensors[e + "w2.weight"] = tensors[e + "w2.weight"] / factor
    tap = {
        "hidden": "moe.experts.*.hidden", "output": "moe.experts.*.output", "residual": "output", "q": "attn.q",
        "k": "attn.k", "scores": "attn.scores", "v": "attn.v", "attention": "attn.out", "router": "moe.router_logits",
    }[kind]  # fmt: skip
    return write_checkpoint(folder, config, tensors), tap
