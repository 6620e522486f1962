"""One-layer checkpoints whose numbers are set by hand, so that a token's router logits are exactly the ones asked for.

Token t is the vector sqrt(H) · e_t with H a power of 4. Its mean square is 1, so the norms leave it as it is to the
last bit (their weights are 1, eps vanishes beside 1). Attention adds nothing (its weights are 0). Router row e holds
logit(t, e) / sqrt(H) at column t, a division by a power of two. So the router's product is the logit itself, exactly.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from checkpoints import DTYPES, moe_prefix, shapes, small_config, write_checkpoint


def router_model(
    folder: Path,
    logits: np.ndarray,
    top_k: int,
    family: str = "mixtral",
    dtype: str = "F32",
    **options,
) -> Path:
    """Id t gives router logits `logits[t]` (T, E); `options` replace keys of the config."""
    n_tokens, n_experts = logits.shape
    hidden = next(4**power for power in range(2, 8) if 4**power >= n_tokens)
    experts = "num_local_experts" if family == "mixtral" else "num_experts"
    config = small_config(
        family, hidden_size=hidden, num_experts_per_tok=top_k, vocab_size=n_tokens, num_hidden_layers=1
    )
    config |= {"rms_norm_eps": 1e-30, "intermediate_size": 4, experts: n_experts}
    if family.startswith("qwen"):
        config["moe_intermediate_size"] = 4
    config |= options
    random = np.random.default_rng(7)
    tensors = {}
    for name, shape in shapes(config).items():
        value = np.zeros(shape, np.float32)
        if name.endswith("norm.weight"):
            value += 1
        elif ".experts." in name or name == "lm_head.weight":
            value = random.standard_normal(shape).astype(np.float32) / np.float32(shape[1] ** 0.5)
        tensors[name] = value
    scale = np.float32(hidden**0.5)
    rows = np.arange(n_tokens)
    tensors["model.embed_tokens.weight"][rows, rows] = scale
    tensors[moe_prefix(config, 0) + "gate.weight"][:, rows] = logits.T.astype(np.float32) / scale
    return write_checkpoint(folder, config, {name: value.astype(DTYPES[dtype]) for name, value in tensors.items()})
