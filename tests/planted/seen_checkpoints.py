"""Planted differences in checkpoints: tensors permuted, exchanged or rescaled, or another config, run by our engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from checkpoints import expert_count, expert_names, moe_prefix

from colibri_lab.trace import Trace
from tests.planted.case import Case
from tests.planted.seen_numpy import run, small

Tensors = dict[str, np.ndarray]
Alter = Callable[[dict[str, Any], Tensors], None]


def case(
    kind: str,
    family: str,
    layer: int | None,
    tap: str,
    what: str,
    alter: Alter,
    *,
    capture: str = "all",
    **options: Any,
) -> Case:
    """`alter` changes config and tensors in place."""

    def make(folder: Path) -> tuple[Trace, Trace, Path | None]:
        config, tensors = small(family, **options)
        a = run(folder / "right", config, tensors, capture)
        other, changed = dict(config), dict(tensors)
        alter(other, changed)
        return a, run(folder / "wrong", other, changed, capture), folder / "right"

    path = tap if tap in ("embed", "norm", "logits") else f"layers.{layer or 0}.{tap}"
    place = "all" if layer is None else f"L{layer}"
    return Case(
        f"seen-{family}-{place}-{kind}-engine-{what}{'-moe' * (capture == 'moe')}", kind, family, layer, path, make
    )


def setting(name: str, value: Any) -> Alter:
    return lambda config, tensors: config.update({name: value})


def scaled(factor: float, *ends: str, layer: int | None = None) -> Alter:
    return each(lambda w: w * np.float32(factor), *ends, layer=layer)


def each(change: Callable[[np.ndarray], np.ndarray], *ends: str, layer: int | None = None) -> Alter:
    def alter(config: dict[str, Any], tensors: Tensors) -> None:
        names = [n for n in tensors if n.endswith(ends) and (layer is None or f".layers.{layer}." in n)]
        assert names
        for name in names:
            tensors[name] = np.ascontiguousarray(change(tensors[name]))

    return alter


def experts(
    layer: int | None, change: Callable[[list[np.ndarray]], list[np.ndarray]], only: int | None = None
) -> Alter:
    """`change` gets [gate, up, down] of each expert."""

    def alter(config: dict[str, Any], tensors: Tensors) -> None:
        for number in range(config["num_hidden_layers"]) if layer is None else [layer]:
            for expert in range(expert_count(config)) if only is None else [only]:
                names = [f"{moe_prefix(config, number)}experts.{expert}.{n}.weight" for n in expert_names(config)]
                for name, value in zip(names, change([tensors[n] for n in names]), strict=True):
                    tensors[name] = np.ascontiguousarray(value)

    return alter


def ordered(layer: int | None, order: list[int], parts: tuple[int, ...] = (0, 1, 2)) -> Alter:
    def alter(config: dict[str, Any], tensors: Tensors) -> None:
        plain = dict(tensors)
        for number in range(config["num_hidden_layers"]) if layer is None else [layer]:
            prefix = f"{moe_prefix(config, number)}experts."
            for expert, other in enumerate(order):
                for part in parts:
                    name = expert_names(config)[part]
                    tensors[f"{prefix}{expert}.{name}.weight"] = plain[f"{prefix}{other}.{name}.weight"]

    return alter


def bf16(w: np.ndarray) -> np.ndarray:
    return w.astype(ml_dtypes.bfloat16).astype(np.float32)


def every_other(w: list[np.ndarray]) -> list[np.ndarray]:
    both = np.concatenate(w[:2])
    return [both[0::2], both[1::2], w[2]]


def halves(w: list[np.ndarray]) -> list[np.ndarray]:
    both = np.stack(w[:2], 1).reshape(2 * len(w[0]), -1)
    return [both[: len(w[0])], both[len(w[0]) :], w[2]]


def shifted(w: list[np.ndarray]) -> list[np.ndarray]:
    both = np.roll(np.concatenate(w[:2]), -1, 0)
    return [both[: len(w[0])], both[len(w[0]) :], w[2]]


def heads_interleaved(w: np.ndarray) -> np.ndarray:
    """Rows of each head from half order to interleaved order (head_dim 10)."""
    return w.reshape(-1, 2, 5, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def cases() -> list[Case]:
    """Over kinds, families and layers."""
    gate, output = "moe.experts.*.gate", "moe.experts.*.output"
    text = sorted(range(12), key=str)
    pair = [0, 1, 5, 3, 4, 2, 6, 7]
    swap = lambda w: [w[1], w[0], w[2]]  # noqa: E731
    square: dict[str, Any] = {"hidden_size": 40, "intermediate_size": 40}
    qwen = square | {"moe_intermediate_size": 40}
    theta = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    out = [
        case("norm_epsilon", "mixtral", None, "attn.norm", "1e-6", setting("rms_norm_eps", 1e-6)),
        case("norm_epsilon", "qwen2_moe", None, "attn.norm", "1e-3", setting("rms_norm_eps", 1e-3)),
        case("norm_epsilon", "qwen3_moe", None, "attn.k", "1e-4-moe", setting("rms_norm_eps", 1e-4), capture="moe"),
        case("norm_epsilon", "olmoe", None, "attn.norm", "1e-8", setting("rms_norm_eps", 1e-8)),
        case("missing_renormalisation", "qwen2_moe", None, "moe.gates", "on", setting("norm_topk_prob", True)),
        case("missing_renormalisation", "olmoe", None, "moe.gates", "on", setting("norm_topk_prob", True),
             capture="moe"),
        case("missing_renormalisation", "qwen3_moe", None, "moe.gates", "off", setting("norm_topk_prob", False),
             norm_topk_prob=True, num_experts_per_tok=3),
        case("swapped_gate_up", "mixtral", None, gate, "all", experts(None, swap)),
        case("swapped_gate_up", "qwen2_moe", 1, gate, "one", experts(1, swap, 3)),
        case("swapped_gate_up", "olmoe", 0, output, "one", experts(0, swap, 6), capture="moe"),
        case("swapped_gate_up", "qwen3_moe", 1, output, "all", experts(1, swap), capture="moe"),
        case("rope_theta", "mixtral", None, "attn.q", "1e6", lambda c, t: c.update(theta)),
        case("rope_theta", "olmoe", None, "attn.q", "1e6", lambda c, t: c.update(theta)),
        case("rope_theta", "qwen3_moe", None, "attn.k", "1e6", lambda c, t: c.update(theta), capture="moe"),
        case("rope_style", "mixtral", None, "attn.q", "rows", each(heads_interleaved, "q_proj.weight",
             "k_proj.weight")),
        case("rope_style", "qwen2_moe", 1, "attn.k", "k-rows",
             each(heads_interleaved, "k_proj.weight", "k_proj.bias", layer=1)),
        case("window_off_by_one", "mixtral", None, "attn.out", "less", setting("sliding_window", 11),
             sliding_window=12),
        case("window_off_by_one", "mixtral", None, "attn.out", "more", setting("sliding_window", 6), sliding_window=5),
        case("window_off_by_one", "qwen3_moe", None, "attn.out", "more",
             setting("sliding_window", 9), sliding_window=8, use_sliding_window=True),
        case("window_off_by_one", "mixtral", None, "moe.input", "less", setting("sliding_window", 11),
             sliding_window=12, capture="moe"),
        case("expert_order", "mixtral", None, gate, "two", ordered(None, pair)),
        case("expert_order", "qwen3_moe", 1, gate, "text", ordered(1, text), num_experts=12),
        case("expert_order", "olmoe", 1, output, "down", ordered(1, pair, (2,))),
        case("expert_order", "qwen2_moe", 0, output, "two", ordered(0, pair), capture="moe"),
        case("expert_order", "mixtral", 1, output, "text", ordered(1, text), num_local_experts=12, capture="moe"),
        case("expert_order", "olmoe", 0, gate, "cycle", ordered(0, [1, 2, 3, 4, 5, 6, 7, 0])),
        case("expert_order", "qwen2_moe", 1, "moe.router_logits", "router",
             each(lambda w: w[[1, 0, 2, 3, 4, 5, 6, 7]], "mlp.gate.weight", layer=1)),
        case("expert_order", "mixtral", 0, "moe.router_logits", "router",
             each(lambda w: w[::-1], "gate.weight", layer=0)),
        case("transposed_weight", "mixtral", 1, gate, "w1", each(lambda w: w.T, "w1.weight", layer=1), **square),
        case("transposed_weight", "qwen3_moe", 0, output, "down", each(lambda w: w.T, "experts.3.down_proj.weight",
             layer=0),
             **qwen),
        case("transposed_weight", "olmoe", None, output, "all",
             experts(None, lambda w: [m.T for m in w]), capture="moe", **square),
        case("transposed_weight", "mixtral", 1, "attn.q", "q", each(lambda w: w.T, "q_proj.weight", layer=1), **square),
        case("transposed_weight", "olmoe", 0, "attn.out", "o", each(lambda w: w.T, "o_proj.weight", layer=0)),
        case("transposed_weight", "mixtral", 1, output, "w2-bytes",
             each(lambda w: w.T.reshape(w.shape), "w2.weight", layer=1)),
        case("transposed_weight", "qwen2_moe", 1, "moe.router_logits", "router-bytes",
             each(lambda w: w.T.reshape(w.shape), "mlp.gate.weight", layer=1)),
        case("interleaved_halves", "mixtral", None, gate, "other", experts(None, every_other)),
        case("interleaved_halves", "qwen3_moe", 1, output, "halves", experts(1, halves), capture="moe"),
        case("interleaved_halves", "olmoe", 1, gate, "shifted", experts(1, shifted, 4)),
        case("interleaved_halves", "qwen2_moe", 0, output, "one", experts(0, every_other, 4), capture="moe"),
        case("bf16_rounding", "mixtral", None, "embed", "all", each(bf16, "weight")),
        case("bf16_rounding", "qwen3_moe", 1, gate, "experts", experts(1, lambda w: [bf16(m) for m in w])),
        case("bf16_rounding", "olmoe", 1, "moe.router_logits", "router", each(bf16, "mlp.gate.weight", layer=1)),
        case("bf16_rounding", "qwen2_moe", 0, "attn.q", "attention", each(bf16, "_proj.weight", layer=0)),
        case("bf16_rounding", "mixtral", 0, output, "w2",
             each(lambda w: w.astype(np.float16).astype(np.float32), "w2.weight", layer=0), capture="moe"),
        case("scale_factor", "mixtral", 1, "attn.v", "v", scaled(2.0, "v_proj.weight", layer=1)),
        case("scale_factor", "qwen3_moe", 0, "attn.out", "o", scaled(0.5, "o_proj.weight", layer=0)),
        case("scale_factor", "olmoe", 1, "moe.router_logits", "router", scaled(40**-0.5, "mlp.gate.weight", layer=1)),
        case("scale_factor", "mixtral", 0, output, "w2", scaled(2.0, "experts.2.w2.weight", layer=0)),
        case("scale_factor", "qwen2_moe", 1, "moe.shared.output", "shared",
             scaled(0.5, "shared_expert.down_proj.weight", layer=1), capture="moe"),
        case("scale_factor", "olmoe", None, "logits", "head", scaled(0.7, "lm_head.weight")),
        case("scale_factor", "qwen3_moe", 1, output, "up", scaled(1.7, "up_proj.weight", layer=1), capture="moe"),
        case("scale_factor", "mixtral", None, "embed", "embed", scaled(44**0.5, "embed_tokens.weight")),
        case("scale_factor", "qwen3_moe", 1, "attn.norm", "norm", scaled(2.0, "input_layernorm.weight", layer=1)),
        case("scale_factor", "olmoe", 1, "moe.input", "o-moe", scaled(3.0, "o_proj.weight", layer=1), capture="moe"),
        case("scale_factor", "mixtral", 1, output, "gate", scaled(0.25, "w1.weight", layer=1), capture="moe"),
    ]  # fmt: skip
    return out
