"""Faults planted in the modules of transformers: another parameter, hook or function in a loaded model, then recorded.

torch is imported only when a case is made, so that the list can be read without it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

import colibri_lab as lab
from colibri_lab.trace import Trace
from tests.planted.case import Case
from tests.planted.unseen_checkpoints import as_text, interleaved_read_as_halves, reversed_order
from tests.planted.unseen_models import ALL, MOE, WITH_WEIGHTS, base, family_of, run, write

Patch = Callable[[Any], AbstractContextManager[Any] | None]


def load(folder: Path, attention: str = "eager", experts: str = "eager") -> Any:
    import torch
    import transformers

    torch.set_num_threads(1)  # small models: threads would only wait for each other
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    options = {"attn_implementation": attention, "experts_implementation": experts}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32", **options).eval()


def recorded(model: Any, ids: Sequence[int], capture: Sequence[str] = ALL, patch: Patch | None = None) -> Trace:
    import torch

    with torch.no_grad(), (patch(model) if patch else None) or nullcontext():
        return lab.record.transformers(model, list(ids), capture=capture, progress=False)


def case(
    kind: str,
    model: str,
    layer: int | None,
    expected: str,
    what: str,
    patch: Patch,
    capture: Sequence[str] = ALL,
    reference: str = "transformers",
) -> Case:
    """`patch` changes the suspect's modules; the reference is the same model without it, or our engine."""

    def make(folder: Path) -> tuple[Trace, Trace, Path | None]:
        config, tensors, ids = base(model)
        checkpoint = write(folder / "reference", config, tensors)
        a = run(checkpoint, ids, capture) if reference == "engine" else recorded(load(checkpoint), ids, capture)
        return a, recorded(load(checkpoint), ids, capture, patch), checkpoint

    place = "all" if layer is None else f"L{layer}"
    return Case(f"unseen-{model}-{place}-{kind}-transformers-{what}", kind, family_of(model), layer, expected, make)


# ---- what goes wrong ----


def layers_of(model: Any, at: int | None) -> list[Any]:
    return [layer for number, layer in enumerate(model.model.layers) if at in (None, number)]


def blocks_of(model: Any, at: int | None) -> list[Any]:
    """The MoE blocks."""
    return [layer.mlp for layer in layers_of(model, at) if hasattr(layer.mlp, "experts")]


def epsilon(new: float, names: Callable[[Any], list[Any]]) -> Patch:
    def patch(model: Any) -> None:
        for norm in names(model):
            norm.variance_epsilon = new

    return patch


def skipped(names: Callable[[Any], list[Any]]) -> Patch:
    """Norms that hand on what they get."""

    def patch(model: Any) -> None:
        for norm in names(model):
            norm.forward = lambda x: x

    return patch


def q_and_k_norms(model: Any) -> list[Any]:
    return [norm for layer in layers_of(model, None) for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm)]


def renormalises(answer: bool, at: int | None = None) -> Patch:
    def patch(model: Any) -> None:
        for block in blocks_of(model, at):
            block.gate.norm_topk_prob = answer

    return patch


def routed_by(change: Callable[[Any, Any, Any], tuple[Any, Any, Any]], at: int | None = None) -> Patch:
    """change(logits, gates, ids) is what the router returns."""

    def patch(model: Any) -> None:
        for block in blocks_of(model, at):
            block.gate.register_forward_hook(lambda module, args, out: change(*out))

    return patch


def not_divided(logits: Any, gates: Any, ids: Any) -> tuple[Any, Any, Any]:
    return logits, logits.softmax(-1).gather(-1, ids), ids


def raw(logits: Any, gates: Any, ids: Any) -> tuple[Any, Any, Any]:
    return logits, logits.gather(-1, ids), ids


def counted_from_one(logits: Any, gates: Any, ids: Any) -> tuple[Any, Any, Any]:
    return logits, gates, (ids + 1) % logits.shape[-1]


def halved(logits: Any, gates: Any, ids: Any) -> tuple[Any, Any, Any]:
    return logits, gates * 0.5, ids


def parameters(change: Callable[[np.ndarray], np.ndarray], names: Callable[[Any], list[Any]]) -> Patch:
    """Parameters replaced by what `change` makes of them."""

    def patch(model: Any) -> None:
        import torch

        for parameter in names(model):
            parameter.data = torch.from_numpy(np.ascontiguousarray(change(parameter.numpy()))).to(parameter.dtype)

    return patch


def fused(at: int | None) -> Callable[[Any], list[Any]]:
    return lambda model: [block.experts.gate_up_proj for block in blocks_of(model, at)]


def stacks(at: int | None) -> Callable[[Any], list[Any]]:
    return lambda model: [
        stack for block in blocks_of(model, at) for stack in (block.experts.gate_up_proj, block.experts.down_proj)
    ]


def halves_exchanged(x: np.ndarray) -> np.ndarray:
    return np.concatenate(np.split(x, 2, axis=1)[::-1], axis=1)


def other_halves(x: np.ndarray) -> np.ndarray:
    """[E, 2I, H] as it comes out when interleaved rows are taken for halves."""
    return np.stack([np.concatenate(interleaved_read_as_halves(*np.split(one, 2))) for one in x])


def every_other(x: np.ndarray) -> np.ndarray:
    return np.concatenate([x[:, 0::2], x[:, 1::2]], axis=1)


def reordered(order: Callable[[int], list[int]]) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: x[order(len(x))]


def rounded(kind: str) -> Callable[[np.ndarray], np.ndarray]:
    def change(x: np.ndarray) -> np.ndarray:
        import torch

        return torch.from_numpy(x).to(getattr(torch, kind)).float().numpy()

    return change


def narrowed(kind: str) -> Patch:
    """The whole model in a narrow type, arithmetic included."""

    def patch(model: Any) -> None:
        import torch

        model.to(getattr(torch, kind))

    return patch


def exchanged_projections(name: str, at: int) -> Patch:
    """gate_proj and up_proj of one MLP under each other's name; an empty name is the dense one."""

    def patch(model: Any) -> None:
        (layer,) = layers_of(model, at)
        mlp = getattr(layer.mlp, name) if name else layer.mlp
        mlp.gate_proj, mlp.up_proj = mlp.up_proj, mlp.gate_proj

    return patch


def gelu(at: int | None) -> Patch:
    def patch(model: Any) -> None:
        import torch

        for block in blocks_of(model, at):
            block.experts.act_fn = torch.nn.GELU()

    return patch


def rotated_by(rotate: Callable[[Any, Any, Any, Any], tuple[Any, Any]]) -> Patch:
    """rotate(q, k, cos, sin) in place of the family's function, which all layers share."""

    @contextmanager
    def patch(model: Any) -> Iterator[None]:
        module = sys.modules[type(model).__module__]
        right = module.apply_rotary_pos_emb
        module.apply_rotary_pos_emb = lambda q, k, cos, sin, unsqueeze_dim=1: rotate(
            q, k, cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        )
        try:
            yield
        finally:
            module.apply_rotary_pos_emb = right

    return patch


def turned_in_pairs(x: Any, cos: Any, sin: Any) -> Any:
    import torch

    half = x.shape[-1] // 2
    a, b, cos, sin = x[..., 0::2], x[..., 1::2], cos[..., :half], sin[..., :half]
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)


def turned_in_halves(x: Any, cos: Any, sin: Any) -> Any:
    import torch

    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def shifted_back(x: Any) -> Any:
    """Each position's angles are those of the one before; the first keeps its own."""
    import torch

    return torch.cat([x[..., :1, :], x[..., :-1, :]], -2)


def positions_from_one(model: Any) -> None:
    rotary = model.model.rotary_emb
    right = rotary.forward
    rotary.forward = lambda x, position_ids: right(x, position_ids + 1)


def theta(new: float) -> Patch:
    def patch(model: Any) -> None:
        import torch

        inverse = model.model.rotary_emb.inv_freq
        inverse.copy_(new ** -(torch.arange(len(inverse)) / len(inverse)))

    return patch


def window(width: int) -> Patch:
    def patch(model: Any) -> None:
        model.config.sliding_window = width

    return patch


def attention_scale(factor: float, at: int | None) -> Patch:
    def patch(model: Any) -> None:
        for layer in layers_of(model, at):
            layer.self_attn.scaling *= factor

    return patch


def cases() -> list[Case]:
    return [
        case("norm_epsilon", "mixtral", 0, "layers.0.attn.norm", "one-norm",
             epsilon(1e-6, lambda model: [model.model.layers[0].input_layernorm])),
        case("norm_epsilon", "qwen3", None, "layers.0.attn.q", "q-and-k", epsilon(1e-3, q_and_k_norms)),
        case("norm_epsilon", "olmoe", None, "norm", "final", epsilon(1e-3, lambda model: [model.model.norm]),
             reference="engine"),
        case("norm_missing", "qwen3-dense", None, "layers.0.attn.q", "q-and-k", skipped(q_and_k_norms)),
        case("missing_renormalisation", "qwen3", 2, "layers.2.moe.gates", "one-layer", renormalises(False, 2)),
        case("missing_renormalisation", "olmoe", None, "layers.0.moe.gates", "needless", renormalises(True),
             reference="engine"),
        case("missing_renormalisation", "mixtral", 0, "layers.0.moe.gates", "not-divided", routed_by(not_divided, 0)),
        case("missing_renormalisation", "qwen2-sparse", 1, "layers.1.moe.gates", "moe-capture",
             renormalises(False, 1), MOE),
        case("raw_logit_gates", "mixtral-many", None, "layers.0.moe.gates", "all", routed_by(raw)),
        case("raw_logit_gates", "qwen2", 1, "layers.1.moe.gates", "one-layer", routed_by(raw, 1), reference="engine"),
        case("raw_logit_gates", "olmoe-clip", 3, "layers.3.moe.gates", "moe-capture", routed_by(raw, 3), MOE),
        case("swapped_gate_up", "mixtral", 2, "layers.2.moe.experts.*.gate", "fused",
             parameters(halves_exchanged, fused(2))),
        case("swapped_gate_up", "qwen2", 0, "layers.0.moe.shared.output", "shared",
             exchanged_projections("shared_expert", 0), reference="engine"),
        case("swapped_gate_up", "qwen3-dense", 0, "layers.0.mlp.output", "dense", exchanged_projections("", 0)),
        case("rope_style", "mixtral", None, "layers.0.attn.q", "pairs",
             rotated_by(lambda q, k, cos, sin: (turned_in_pairs(q, cos, sin), turned_in_pairs(k, cos, sin))),
             reference="engine"),
        case("rope_style", "qwen3", None, "layers.0.attn.q", "pairs",
             rotated_by(lambda q, k, cos, sin: (turned_in_pairs(q, cos, sin), turned_in_pairs(k, cos, sin)))),
        case("rope_style", "olmoe", None, "layers.0.attn.k", "pairs-k-only",
             rotated_by(lambda q, k, cos, sin: (turned_in_halves(q, cos, sin), turned_in_pairs(k, cos, sin)))),
        case("rope_theta", "qwen2", None, "layers.0.attn.q", "1e6", theta(1e6)),
        case("window_off_by_one", "mixtral-square", None, "layers.0.attn.out", "wider", window(8)),
        case("window_off_by_one", "mixtral-square", None, "layers.0.attn.weights", "narrower", window(6),
             WITH_WEIGHTS, reference="engine"),
        case("window_off_by_one", "qwen3-dense", None, "layers.0.attn.out", "narrower", window(5)),
        case("position_off_by_one", "qwen3", None, "layers.0.attn.q", "from-one", positions_from_one),
        case("position_off_by_one", "mixtral", None, "layers.0.attn.q", "q-one-behind",
             rotated_by(lambda q, k, cos, sin: (turned_in_halves(q, shifted_back(cos), shifted_back(sin)),
                                                turned_in_halves(k, cos, sin)))),
        case("position_off_by_one", "qwen2", None, "layers.0.attn.k", "k-one-behind",
             rotated_by(lambda q, k, cos, sin: (turned_in_halves(q, cos, sin),
                                                turned_in_halves(k, shifted_back(cos), shifted_back(sin)))),
             reference="engine"),
        case("expert_order", "olmoe", None, "layers.0.moe.experts.*.gate", "text-order",
             parameters(reordered(as_text), stacks(None)), reference="engine"),
        case("expert_order", "qwen3", 1, "layers.1.moe.experts.*.gate", "reversed",
             parameters(reordered(reversed_order), stacks(1))),
        case("expert_order", "qwen2", 1, "layers.1.moe.expert_ids", "ids-from-one", routed_by(counted_from_one, 1)),
        case("transposed_weight", "mixtral-square", 1, "layers.1.attn.out", "o",
             parameters(np.transpose, lambda model: [model.model.layers[1].self_attn.o_proj.weight])),
        case("transposed_weight", "olmoe", 1, "layers.1.attn.v", "v",
             parameters(np.transpose, lambda model: [model.model.layers[1].self_attn.v_proj.weight]),
             reference="engine"),
        case("transposed_weight", "qwen3-dense", None, "layers.1.moe.experts.*.output", "down",
             parameters(lambda x: x.swapaxes(1, 2),
                        lambda model: [block.experts.down_proj for block in blocks_of(model, None)])),
        case("interleaved_halves", "qwen3", None, "layers.0.moe.experts.*.gate", "interleaved-as-halves",
             parameters(other_halves, fused(None))),
        case("interleaved_halves", "qwen2", 2, "layers.2.moe.experts.*.gate", "halves-as-interleaved",
             parameters(every_other, fused(2)), reference="engine"),
        case("interleaved_halves", "mixtral", 1, "layers.1.moe.experts.*.output", "moe-capture",
             parameters(every_other, fused(1)), MOE),
        case("bf16_rounding", "mixtral", None, "embed", "model-in-bf16", narrowed("bfloat16")),
        case("bf16_rounding", "olmoe", None, "embed", "model-in-f16", narrowed("float16")),
        case("bf16_rounding", "qwen3", 1, "layers.1.moe.router_logits", "router",
             parameters(rounded("bfloat16"), lambda model: [model.model.layers[1].mlp.gate.weight]),
             reference="engine"),
        case("bf16_rounding", "qwen2-sparse", None, "layers.1.moe.experts.*.output", "experts-moe-capture",
             parameters(rounded("bfloat16"), stacks(None)), MOE),
        case("scale_factor", "qwen2", 1, "layers.1.attn.out", "softmax-scale-doubled", attention_scale(2.0, 1)),
        case("scale_factor", "mixtral-many", 1, "layers.1.moe.gates", "gates-halved", routed_by(halved, 1),
             reference="engine"),
        case("scale_factor", "olmoe-clip", None, "embed", "embedding-times-sqrt-hidden",
             parameters(lambda x: x * np.float32(32**0.5), lambda model: [model.model.embed_tokens.weight])),
        case("activation", "mixtral", 1, "layers.1.moe.experts.*.hidden", "gelu", gelu(1)),
    ]  # fmt: skip


def clean() -> list[Case]:
    """Our engine and transformers, and two implementations inside transformers."""

    def pair(model: str, what: str, second: Callable[[Path], Any]) -> Case:
        def make(folder: Path) -> tuple[Trace, Trace, Path | None]:
            config, tensors, ids = base(model)
            checkpoint = write(folder / "reference", config, tensors)
            a = run(checkpoint, ids) if what == "engine" else recorded(load(checkpoint), ids)
            return a, recorded(second(checkpoint), ids), checkpoint

        return Case(f"unseen-{model}-clean-transformers-{what}", "clean", family_of(model), None, "", make)

    models = ("mixtral", "mixtral-square", "qwen3", "qwen3-dense", "qwen2", "qwen2-sparse", "olmoe", "olmoe-clip")
    return [
        *(pair(model, "engine", load) for model in models),
        *(pair(model, "sdpa", lambda folder: load(folder, "sdpa")) for model in ("mixtral", "qwen3", "qwen2", "olmoe")),
        pair("qwen3-dense", "grouped-experts", lambda folder: load(folder, experts="grouped_mm")),
        pair("olmoe-clip", "batched-experts", lambda folder: load(folder, experts="batched_mm")),
    ]
