"""Traces from taps that something other than the engine computed: `oracle.Oracle`, or a recording."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from checkpoints import expert_count, is_moe

from colibri_lab.trace import EXPERT_TAPS, Trace

_EXPERT = re.compile(r"layers\.\d+\.moe\.experts\.\d+\.\w+")


def traced(taps: Mapping[str, np.ndarray], config: dict, ids: Sequence[int], dtype: Any = np.float32, **meta) -> Trace:
    """One pass over `ids`, values rounded to `dtype`, rows of experts packed; `meta` adds to or replaces entries."""
    moe_layers = [layer for layer in range(config["num_hidden_layers"]) if is_moe(config, layer)]
    arrays = {}
    for path, values in taps.items():
        if _EXPERT.fullmatch(path) is None:
            arrays[path] = values.astype(np.int32 if path.endswith("expert_ids") else dtype)
    for layer in moe_layers:
        prefix = f"layers.{layer}.moe."
        rows = [taps.get(f"{prefix}experts.{e}.tokens") for e in range(expert_count(config))]
        if rows[0] is None:
            continue
        counts = [len(r) for r in rows]
        arrays[f"{prefix}dispatch.offsets"] = np.concatenate([[0], np.cumsum(counts)])[None].astype(np.int64)
        for tap in EXPERT_TAPS:
            parts = [taps.get(f"{prefix}experts.{e}.{tap}") for e in range(expert_count(config))]
            if all(part is not None for part in parts):
                arrays[f"{prefix}dispatch.{tap}"] = np.concatenate(parts).astype(np.int32 if tap == "tokens" else dtype)
    whole = {
        "producer": "oracle", "producer_version": "1", "model_type": config["model_type"],
        "num_hidden_layers": config["num_hidden_layers"], "moe_layers": moe_layers,
        "num_experts": expert_count(config), "top_k": config["num_experts_per_tok"],
        "gate_rule": "softmax_renormalised" if config["model_type"] == "mixtral" or config.get("norm_topk_prob")
        else "softmax",
        "passes": [[0, len(ids)]], "edits": [],
    }  # fmt: skip
    return Trace(arrays, ids=list(ids), texts=[], meta=whole | meta)
