"""Where the parts of a model of transformers are: the modules that hooks go to, by the names of four families.

Releases differ: mixtral's block is `block_sparse_moe` before transformers 5 and `mlp` since; experts are a list of
modules before 5 and stacked parameters since.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from colibri_lab.errors import ArgumentError, UnsupportedError

__all__ = ["FAMILIES", "Anatomy", "Layer", "anatomy", "check_family"]

FAMILIES = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe")


@dataclass(frozen=True)
class Layer:
    """The modules of one decoder layer. `experts`: one module with stacked parameters, or a list of modules."""

    number: int
    module: Any
    norm: Any
    attention: Any
    block: Any
    router: Any | None  # None in a dense layer
    experts: Any | None
    shared: Any | None
    shared_gate: Any | None


@dataclass(frozen=True)
class Anatomy:
    """A model's parts and sizes."""

    model: Any  # what is called
    embed: Any
    layers: list[Layer]
    norm: Any
    head: Any | None
    names: dict[Any, str]  # of modules, as the model spells them
    config: dict[str, Any]
    model_type: str
    num_experts: int
    top_k: int
    gate_rule: str

    @property
    def moe_layers(self) -> list[int]:
        """Layers with a router."""
        return [layer.number for layer in self.layers if layer.router is not None]


def check_family(model_type: Any, where: str) -> None:
    """Raises UnsupportedError unless a model_type is one that is known here."""
    if model_type not in FAMILIES:
        raise UnsupportedError(
            f"{where} has the model_type {model_type!r:.80}; the recorder knows {', '.join(FAMILIES)} and looks for "
            "their decoder layers with self_attn, a router `gate` and `experts`"
        )


def anatomy(model: Any) -> Anatomy:
    """Finds the parts. Raises UnsupportedError for another family, ArgumentError for what is no model."""
    inner = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    if hasattr(inner, "get_base_model"):
        inner = inner.get_base_model()  # what adapters wrap
    config = getattr(inner, "config", None)
    if config is None or not hasattr(inner, "get_input_embeddings"):
        raise ArgumentError(
            "record takes a model of transformers or the folder of a checkpoint; "
            f"this is a {type(model).__name__}: {model!r:.80}"
        )
    check_family(getattr(config, "model_type", None), f"this {type(inner).__name__}")
    decoder = inner if hasattr(inner, "layers") else getattr(inner, "model", None)
    if decoder is None or not hasattr(decoder, "layers"):
        raise UnsupportedError(f"{type(inner).__name__} has no decoder `model.layers` to record")
    names = {module: name or type(inner).__name__ for name, module in inner.named_modules()}
    return Anatomy(
        model=model,
        embed=inner.get_input_embeddings(),
        layers=[_layer(number, module, names) for number, module in enumerate(decoder.layers)],
        norm=decoder.norm,
        head=inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None,
        names=names,
        config=_settings(config),
        model_type=config.model_type,
        num_experts=int(getattr(config, "num_local_experts", None) or config.num_experts),
        top_k=int(config.num_experts_per_tok),
        gate_rule="softmax_renormalised"
        if config.model_type == "mixtral" or getattr(config, "norm_topk_prob", False)
        else "softmax",
    )


def _settings(config: Any) -> dict[str, Any]:
    """The configuration as JSON values, without the path it came from: a trace travels."""
    values: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=str))
    return {name: value for name, value in values.items() if not name.startswith("_")}


def _layer(number: int, module: Any, names: dict[Any, str]) -> Layer:
    block: Any = getattr(module, "mlp", None) or getattr(module, "block_sparse_moe", None)
    parts = {name: getattr(module, name, None) for name in ("input_layernorm", "self_attn")}
    missing = [name for name, part in {**parts, "mlp": block}.items() if part is None]
    if missing:
        raise UnsupportedError(f"{names[module]} ({type(module).__name__}) has no {' and no '.join(missing)}")
    moe = hasattr(block, "experts")
    if not moe and not hasattr(block, "down_proj"):
        raise UnsupportedError(
            f"{names[block]} ({type(block).__name__}) has neither experts nor the projections of a dense layer; a "
            "wrapper around a whole block hides them"
        )
    if moe and not (hasattr(block.experts, "gate_up_proj") or hasattr(block.experts, "__len__")):
        raise UnsupportedError(
            f"{names[block.experts]} ({type(block.experts).__name__}) is neither a list of experts nor their stacked "
            "weights; a wrapper around them hides what happens inside"
        )
    if moe and not hasattr(block, "gate"):
        raise UnsupportedError(f"{names[block]} ({type(block).__name__}) has experts, but no router `gate`")
    return Layer(
        number=number,
        module=module,
        norm=parts["input_layernorm"],
        attention=parts["self_attn"],
        block=block,
        router=block.gate if moe else None,
        experts=block.experts if moe else None,
        shared=getattr(block, "shared_expert", None) if moe else None,
        shared_gate=getattr(block, "shared_expert_gate", None) if moe else None,
    )
