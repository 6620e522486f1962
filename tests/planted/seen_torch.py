"""Planted differences in modules of transformers, patched after loading and recorded by lab.record.

The reference is our engine on the same checkpoint. Every case needs torch, which is imported when one is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import write_checkpoint

import colibri_lab as lab
from colibri_lab.trace import Trace
from tests.planted.case import Case
from tests.planted.seen_numpy import IDS, small

Patch = Callable[[Any], None]


def case(
    kind: str, family: str, layer: int | None, tap: str, what: str, patch: Patch, capture: str = "all", **options: Any
) -> Case:
    """`patch` changes the loaded model in place."""

    def make(folder: Path) -> tuple[Trace, Trace, Path | None]:
        import torch
        from transformers import AutoModelForCausalLM

        sizes = {"hidden_size": 48, "intermediate_size": 24, "head_dim": 12}  # torch wants 16 bytes
        sizes |= {"moe_intermediate_size": 24} if family.startswith("qwen") else {}
        sizes |= {"shared_expert_intermediate_size": 32} if family == "qwen2_moe" else {}
        sizes = {name: size for name, size in sizes.items() if name != "head_dim" or family in ("mixtral", "qwen3_moe")}
        config, tensors = small(family, **(sizes | options))
        right = write_checkpoint(folder / "right", config, tensors)
        session = lab.open(right).session(capture=capture, max_tokens=len(IDS), threads=1)
        session.feed(IDS, progress=False)
        model = AutoModelForCausalLM.from_pretrained(right, dtype=torch.float32, attn_implementation="eager")
        with swept(model), torch.no_grad():
            patch(model.eval())
            b = lab.record.transformers(model, IDS, capture=capture)
        return session.trace(), b, right

    path = tap if tap in ("embed", "norm", "logits") else f"layers.{layer or 0}.{tap}"
    place = "all" if layer is None else f"L{layer}"
    return Case(f"seen-{family}-{place}-{kind}-transformers-{what}", kind, family, layer, path, make)


@contextmanager
def swept(model: Any) -> Iterator[None]:
    """Functions of the model's module are put back afterwards."""
    import sys

    module = sys.modules[type(model).__module__]
    kept = dict(vars(module))
    try:
        yield
    finally:
        vars(module).update(kept)


def layer_of(model: Any, number: int) -> Any:
    return model.model.layers[number]


def eps(value: float, number: int, norm: str) -> Patch:
    return lambda model: setattr(getattr(layer_of(model, number), norm), "variance_epsilon", value)


def in_place(find: Callable[[Any], Any], change: Callable[[Any], Any]) -> Patch:
    """A parameter changed by a function."""

    def patch(model: Any) -> None:
        weight = find(model)
        weight.data = change(weight.data).contiguous()

    return patch


def rotate_pairs(model: Any) -> None:
    """rotate_half as in interleaved models, with cos and sin still laid out as halves."""
    import sys

    import torch

    def every_two(x: Any) -> Any:
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)

    sys.modules[type(model).__module__].rotate_half = every_two


def theta(value: float) -> Patch:
    def patch(model: Any) -> None:
        rotary = model.model.rotary_emb
        width = 2 * rotary.inv_freq.shape[0]
        rate = 1 / np.power(value, np.arange(0, width, 2) / width)
        rotary.inv_freq.copy_(rotary.inv_freq.new_tensor(rate))

    return patch


def later(model: Any) -> None:
    """Positions begin at 1."""
    rotary = model.model.rotary_emb
    plain = rotary.forward
    rotary.forward = lambda x, position_ids, *rest, **more: plain(x, position_ids + 1, *rest, **more)


def torch_cases() -> list[Case]:
    """Over kinds and families."""

    def fused(number: int) -> Callable[[Any], Any]:
        return lambda model: layer_of(model, number).mlp.experts.gate_up_proj

    def down(number: int) -> Callable[[Any], Any]:
        return lambda model: layer_of(model, number).mlp.experts.down_proj

    def swap(w: Any) -> Any:
        import torch

        return torch.cat(w.chunk(2, dim=1)[::-1], dim=1)

    def interleave(w: Any) -> Any:
        import torch

        wide = w.shape[1] // 2
        return torch.stack((w[:, :wide], w[:, wide:]), 2).flatten(1, 2)

    def one(number: int, change: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def apply(w: Any) -> Any:
            w = w.clone()
            w[number : number + 1] = change(w[number : number + 1])
            return w

        return apply

    def gelu(model: Any) -> None:
        import torch

        layer_of(model, 1).mlp.experts.act_fn = torch.nn.GELU()

    def softmax_scale(model: Any) -> None:
        layer_of(model, 1).self_attn.scaling = 0.1

    gate = "moe.experts.*.gate"
    q = "self_attn.q_proj.weight"
    return [
        case("norm_epsilon", "mixtral", 1, "attn.norm", "1e-3", eps(1e-3, 1, "input_layernorm")),
        case("norm_epsilon", "olmoe", 0, "moe.input", "1e-6", eps(1e-6, 0, "post_attention_layernorm")),
        case("norm_epsilon", "qwen3_moe", 1, "moe.input", "1e-3", eps(1e-3, 1, "post_attention_layernorm"), "moe"),
        case("rope_style", "mixtral", None, "attn.q", "pairs", rotate_pairs),
        case("rope_style", "qwen2_moe", None, "attn.q", "pairs", rotate_pairs),
        case("rope_theta", "qwen3_moe", None, "attn.q", "1e6", theta(1e6)),
        case("rope_theta", "olmoe", None, "moe.input", "500000", theta(5e5), "moe"),
        case("position_off_by_one", "qwen2_moe", None, "attn.q", "later", later),
        case("swapped_gate_up", "mixtral", 1, gate, "all", in_place(fused(1), swap)),
        case("swapped_gate_up", "olmoe", 0, "moe.experts.*.output", "one", in_place(fused(0), one(6, swap)), "moe"),
        case("interleaved_halves", "qwen3_moe", 1, "moe.experts.*.output", "all", in_place(fused(1), interleave),
             "moe"),
        case("expert_order", "qwen2_moe", 1, "moe.experts.*.output", "down", in_place(down(1), lambda w: w.flip(0))),
        case("transposed_weight", "olmoe", 1, "attn.q", "q", in_place(lambda m: m.get_parameter(f"model.layers.1.{q}"),
                                                                     lambda w: w.T)),
        case("bf16_rounding", "mixtral", 0, gate, "experts", in_place(fused(0), lambda w: w.bfloat16().float())),
        case("scale_factor", "qwen3_moe", 1, "attn.out", "softmax", softmax_scale),
        case("scale_factor", "mixtral", 1, "moe.experts.*.output", "down", in_place(down(1), lambda w: 0.5 * w)),
        case("activation", "mixtral", 1, "moe.experts.*.hidden", "gelu", gelu),
    ]  # fmt: skip
