"""Planted differences made by the NumPy forward pass of seen_forward, against our engine or against itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import expert_count, random_tensors, small_config, write_checkpoint

import colibri_lab as lab
from colibri_lab.trace import Trace
from tests.planted.case import Case
from tests.planted.seen_forward import Forward

IDS = [int(i) for i in np.random.default_rng(5).integers(0, 61, 30)]


def small(family: str, **options: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A checkpoint whose residual stream is small enough for an epsilon to show."""
    config = small_config("olmoe" if family == "deepseek_v3" else family, **options)
    tensors = random_tensors(config, 11)
    for name in tensors:
        if "embed" in name:
            tensors[name] = tensors[name] * np.float32(0.02)
        elif name.endswith(("o_proj.weight", "down_proj.weight", "w2.weight")):
            tensors[name] = tensors[name] * np.float32(0.03)
    if family == "deepseek_v3":
        config["model_type"] = family
        tensors = {name: value for name, value in tensors.items() if "q_norm" not in name and "k_norm" not in name}
    return config, tensors


def run(folder: Path, config: dict[str, Any], tensors: Mapping[str, np.ndarray], capture: str = "all") -> Trace:
    """Our engine on a checkpoint."""
    model = lab.open(write_checkpoint(folder, config, tensors))
    session = model.session(capture=capture, max_tokens=len(IDS), threads=1)
    session.feed(IDS, progress=False)
    return session.trace()


def case(
    kind: str, family: str, layer: int | None, tap: str, wrong: Mapping[str, Any], *, note: str = "",
    capture: str = "all", against: str = "engine", **options: Any,
) -> Case:  # fmt: skip
    """`tap` is the first that must differ, in `layer` or, when it is None, in layer 0."""

    def make(folder: Path) -> tuple[Trace, Trace, Path | None]:
        config, tensors = small(family, **options)
        more: dict[str, Any] = {}
        if family == "deepseek_v3":
            bias = np.linspace(-0.4, 0.4, expert_count(config)).astype(np.float32)
            more = {"bias": bias, "scaling": 2.5}
        right = write_checkpoint(folder / "right", config, tensors) if family != "deepseek_v3" else None
        if right is not None and against == "engine":
            a = run(right, config, tensors, capture)
        else:
            a = Forward(config, tensors, **more).trace(IDS, capture)
        b = Forward(config, tensors, wrong, layer, **more).trace(IDS, capture)
        return a, b, right

    outside = tap in ("embed", "norm", "logits")
    path = tap if outside else f"layers.{layer or 0}.{tap}"
    what = "-".join(f"{name}={value}" for name, value in wrong.items()).replace(" ", "_")
    place = "all" if layer is None else f"L{layer}"
    name = f"seen-{family}-{place}-{kind}-numpy-{what}{note}{'-moe' if capture == 'moe' else ''}"
    return Case(name, kind, family, layer, path, make)


def cases() -> list[Case]:
    """Over kinds, families and layers."""
    gate = "moe.experts.*.gate"
    out = [
        case("norm_epsilon", "mixtral", None, "attn.norm", {"eps attention": 1e-3}),
        case("norm_epsilon", "mixtral", 0, "attn.norm", {"eps attention": 1e-6}),
        case("norm_epsilon", "qwen2_moe", 0, "moe.input", {"eps experts": 1e-6}),
        case("norm_epsilon", "qwen3_moe", 1, "moe.input", {"eps experts": 1e-3}),
        case("norm_epsilon", "olmoe", 1, "attn.norm", {"eps outside attention": True}, rms_norm_eps=1e-3),
        case("norm_epsilon", "qwen3_moe", None, "attn.q", {"eps q": 1e-2, "eps k": 1e-2}),
        case("norm_epsilon", "qwen3_moe", 1, "attn.k", {"eps k": 1e-2}, against="numpy"),
        case("norm_epsilon", "olmoe", 0, "attn.q", {"eps q": 1e-1, "eps k": 1e-1}),
        case("norm_epsilon", "mixtral", None, "norm", {"eps final": 1e-3}),
        case("missing_renormalisation", "mixtral", None, "moe.gates", {"renormalise": False}),
        case("missing_renormalisation", "mixtral", 1, "moe.gates", {"renormalise": False}, capture="moe"),
        case("missing_renormalisation", "qwen3_moe", 1, "moe.gates", {"renormalise": False}, norm_topk_prob=True),
        case("missing_renormalisation", "qwen3_moe", None, "moe.gates", {"renormalise": True}),
        case("missing_renormalisation", "olmoe", 0, "moe.gates", {"renormalise": True}, num_experts_per_tok=3),
        case("missing_renormalisation", "deepseek_v3", 1, "moe.gates", {"renormalise": False}),
        case("raw_logit_gates", "mixtral", None, "moe.gates", {"gates": "raw"}),
        case("raw_logit_gates", "olmoe", 1, "moe.gates", {"gates": "raw"}),
        case("raw_logit_gates", "qwen2_moe", 0, "moe.gates", {"gates": "raw"}, capture="moe"),
        case("raw_logit_gates", "deepseek_v3", 0, "moe.gates", {"gates": "raw"}),
        case("biased_gates", "deepseek_v3", None, "moe.gates", {"gates": "biased"}),
        case("biased_gates", "deepseek_v3", 1, "moe.gates", {"gates": "biased"}, num_experts_per_tok=3),
        case("biased_gates", "deepseek_v3", 0, "moe.gates", {"gates": "biased", "renormalise": False}),
        case("scale_factor", "deepseek_v3", 1, "moe.gates", {"scaling": 1.0}),
        case("scale_factor", "deepseek_v3", None, "moe.gates", {"scaling": 0.4}),
        case("swapped_gate_up", "mixtral", None, gate, {"swap": True}),
        case("swapped_gate_up", "qwen3_moe", 1, gate, {"swap": True, "experts": [5]}),
        case("swapped_gate_up", "olmoe", 1, "moe.experts.*.output", {"swap": True, "experts": [2]}, capture="moe"),
        case("swapped_gate_up", "qwen2_moe", 0, "moe.shared.output", {"swap": True, "experts": [-1]}),
        case("swapped_gate_up", "qwen3_moe", 1, "mlp.output", {"swap": True}, mlp_only_layers=[1]),
        case("rope_style", "mixtral", None, "attn.q", {"rope": "pairs"}),
        case("rope_style", "qwen3_moe", 1, "attn.q", {"rope": "pairs"}),
        case("rope_style", "olmoe", 1, "attn.k", {"rope k": "pairs"}),
        case("rope_style", "qwen2_moe", 0, "attn.q", {"rope q": "none"}),
        case("rope_style", "mixtral", 1, "attn.q", {"rope": "all heads"}),
        case("rope_style", "olmoe", None, "attn.q", {"rope": "backwards"}),
        case("rope_style", "qwen3_moe", 0, "attn.k", {"rope": "pairs"}, capture="moe"),
        case("rope_style", "mixtral", 1, "attn.q", {"heads last": True}, hidden_size=40),
        case("rope_theta", "mixtral", None, "attn.q", {"theta": 1e6}),
        case("rope_theta", "qwen3_moe", 1, "attn.q", {"theta": 1e6}),
        case("rope_theta", "olmoe", 0, "attn.k", {"theta": 5e5}, capture="moe"),
        case("rope_theta", "qwen2_moe", 1, "attn.k", {"theta k": 12345.0}),
        case("window_off_by_one", "mixtral", None, "attn.out", {"window": 8}, sliding_window=9),
        case("window_off_by_one", "mixtral", 1, "attn.out", {"window": 10}, sliding_window=9),
        case("window_off_by_one", "mixtral", 0, "moe.input", {"window": 7}, sliding_window=6, capture="moe"),
        case("window_off_by_one", "qwen3_moe", 1, "attn.out", {"ahead": 1}),
        case("position_off_by_one", "mixtral", None, "attn.q", {"position": 1}),
        case("position_off_by_one", "qwen2_moe", 1, "attn.q", {"position q": -1}),
        case("position_off_by_one", "olmoe", 0, "attn.k", {"position k": 1}),
        case("position_off_by_one", "qwen3_moe", 1, "attn.q", {"position": 1, "position since": 12}),
        case("position_off_by_one", "mixtral", 1, "attn.k", {"position": 1}, capture="moe"),
        case("expert_order", "mixtral", None, gate, {"order": [1, 0, 2, 3, 4, 5, 6, 7]}),
        case("expert_order", "olmoe", 1, gate, {"order": sorted(range(12), key=str)}, num_experts=12),
        case("expert_order", "qwen3_moe", 0, "moe.experts.*.output", {"order": [7, 6, 5, 4, 3, 2, 1, 0]},
             capture="moe"),
        case("interleaved_halves", "mixtral", None, gate, {"fused": "every other"}),
        case("interleaved_halves", "qwen3_moe", 1, gate, {"fused": "halves", "experts": [1]}),
        case("interleaved_halves", "olmoe", 0, gate, {"fused": "3"}),
        case("interleaved_halves", "qwen2_moe", 1, "moe.experts.*.output", {"fused": "halves"}, capture="moe"),
        case("bf16_rounding", "mixtral", 1, "moe.experts.*.hidden", {"round hidden": "bfloat16"}),
        case("bf16_rounding", "qwen3_moe", None, "attn.norm", {"bf16 norm attention": True}),
        case("bf16_rounding", "olmoe", 1, "attn.out", {"round weights": "bfloat16"}),
        case("bf16_rounding", "qwen2_moe", 0, "moe.router_logits", {"round logits": "bfloat16"}),
        case("bf16_rounding", "mixtral", 0, "attn.q", {"round attn.q": "float16"}),
        case("bf16_rounding", "qwen3_moe", 1, "moe.output", {"round moe.output": "bfloat16"}),
        case("bf16_rounding", "olmoe", 0, "moe.input", {"round attn.out": "bfloat16"}, capture="moe"),
        case("scale_factor", "mixtral", None, "attn.out", {"softmax scale": 1 / 10}),
        case("scale_factor", "qwen3_moe", 1, "attn.out", {"softmax scale": 44**-0.5}),
        case("scale_factor", "olmoe", 0, "attn.q", {"scale q": 10**-0.5}),
        case("scale_factor", "qwen2_moe", 1, "attn.v", {"scale v": 2.0}),
        case("scale_factor", "mixtral", 1, "moe.gates", {"scale gates": 0.5}),
        case("scale_factor", "olmoe", 1, "moe.router_logits", {"scale logits": 0.5}),
        case("scale_factor", "qwen3_moe", None, "moe.routed", {"scale routed": 2.5}),
        case("scale_factor", "mixtral", 0, "moe.experts.*.output", {"scale expert": 0.5, "experts": [1]}),
        case("scale_factor", "qwen2_moe", 1, "output", {"scale branch": 0.22}),
        case("scale_factor", "olmoe", None, "logits", {"scale output": 0.125}),
        case("scale_factor", "mixtral", None, "embed", {"scale embed": 44**0.5}),
        case("scale_factor", "qwen3_moe", 0, "moe.input", {"softmax scale": 0.1}, capture="moe"),
        case("activation", "mixtral", None, "moe.experts.*.hidden", {"act": "gelu"}),
        case("activation", "qwen2_moe", 1, "moe.experts.*.output", {"act": "relu"}, capture="moe"),
        case("norm_missing", "qwen3_moe", None, "attn.q", {"no norm q": True, "no norm k": True}),
        case("shared_gate", "qwen2_moe", 1, "moe.output", {"no shared gate": True}),
        case("head_order", "mixtral", 1, "attn.out", {"tiled heads": True}),
        case("missing_bias", "qwen2_moe", 1, "attn.q", {"no bias": True}),
    ]  # fmt: skip
    return out


def clean() -> list[Case]:
    """Pairs without a fault: the forward pass against the engine, and the same values stored as bf16 and as f32."""
    import ml_dtypes

    def against_engine(family: str) -> Case:
        def make(folder: Path) -> tuple[Trace, Trace, Path | None]:
            config, tensors = small(family)
            return run(folder / "right", config, tensors), Forward(config, tensors).trace(IDS), folder / "right"

        return Case(f"seen-clean-{family}-numpy", "clean", family, None, "", make)

    def stored_twice(family: str) -> Case:
        def make(folder: Path) -> tuple[Trace, Trace, Path | None]:
            config, tensors = small(family)
            narrow = {name: value.astype(ml_dtypes.bfloat16) for name, value in tensors.items()}
            wide = {name: value.astype(np.float32) for name, value in narrow.items()}
            return run(folder / "wide", config, wide), run(folder / "narrow", config, narrow), folder / "wide"

        return Case(f"seen-clean-{family}-bf16-file", "clean", family, None, "", make)

    families = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
    return [*map(against_engine, families), *map(stored_twice, families)]
