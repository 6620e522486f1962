"""The recorded activations of tests/fixtures/reference, under the tape's paths."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from checkpoints import read_safetensors

REFERENCE = Path(__file__).parents[1] / "fixtures" / "reference"
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
            names = {
                "router_logits": "router_logits",
                "expert_ids": "topk_ids",
                "gates": "gates",
                "routed": "routed_out",
            }
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
