"""Run a model of transformers and record every value the tape has a path for.

Nothing is taken from what the model returns: hooks of our own sit on the embedding, norms, attention, router, experts
and blocks, because names like `router_logits` and `hidden_states` meant different things in different releases. Expert
rows are computed again from the stacked parameters, since the library never keeps them apart.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import eager_mask

torch.set_num_threads(1)  # small models: threads would only wait for each other
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def recording_attention(module, query, key, value, attention_mask, scaling, **kwargs):
    """The family's own eager attention; keeps what it was given and its softmax on the module."""
    eager = sys.modules[type(module).__module__].eager_attention_forward
    out, weights = eager(module, query, key, value, attention_mask, scaling, **kwargs)
    module.seen = {"q": query, "k": key, "v": value, "weights": weights}
    return out, weights


AttentionInterface.register("recording", recording_attention)
AttentionMaskInterface.register("recording", eager_mask)
EAGER = {"attn_implementation": "recording", "experts_implementation": "eager"}


def build(config: dict, dtype: torch.dtype = torch.float32):
    """A model of this config (hub spelling), weights not yet drawn."""
    options = {key: value for key, value in config.items() if key not in ("model_type", "architectures")}
    auto = AutoConfig.for_model(config["model_type"], **options)
    return AutoModelForCausalLM.from_config(auto, dtype=dtype, **EAGER).eval()


def load(folder: Path, dtype: torch.dtype = torch.float32):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **EAGER).eval()


def randomise(model, seed: int) -> None:
    """Normal weights in the order of their names: norms near 1, biases 0.2, projections 1.2 / sqrt(inputs)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            value = torch.randn(parameter.shape, generator=generator)
            if "norm" in name and parameter.dim() == 1:
                value = value * 0.15 + 1.0
            elif parameter.dim() == 1:
                value = value * 0.2
            elif "embed_tokens" not in name:
                gain = 1.5 if name.endswith("gate.weight") else 2.0 if name.endswith("lm_head.weight") else 1.2
                value = value * gain / parameter.shape[-1] ** 0.5
            parameter.copy_(value)


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().float().numpy().copy()


class Recorder:
    """`with Recorder(model) as taps:` and one forward pass of a single sequence; `taps` maps tape paths to arrays."""

    def __init__(self, model):
        self.model, self.taps, self.handles = model, {}, []

    def keep(self, path: str, tensor: torch.Tensor) -> None:
        self.taps[path] = to_numpy(tensor.reshape(-1, tensor.shape[-1]))

    def output(self, module, path: str, pick: Callable = lambda out: out) -> None:
        self.handles.append(module.register_forward_hook(lambda m, args, out: self.keep(path, pick(out))))

    def input(self, module, path: str) -> None:
        self.handles.append(module.register_forward_pre_hook(lambda m, args: self.keep(path, args[0])))

    def attention(self, layer: int, module) -> None:
        def hook(module, args, kwargs, out):
            path = f"layers.{layer}.attn."
            for name in "qkv":
                self.taps[path + name] = to_numpy(module.seen[name][0].transpose(0, 1))
            self.taps[path + "weights"] = to_numpy(module.seen["weights"][0])
            self.keep(path + "out", out[0])
            del module.seen

        self.handles.append(module.register_forward_hook(hook, with_kwargs=True))

    def moe(self, layer: int, block) -> None:
        path = f"layers.{layer}.moe."

        def router(module, args, out):
            self.taps[path + "router_logits"] = to_numpy(out[0])
            self.taps[path + "scores"] = to_numpy(torch.softmax(out[0].float(), -1))

        def experts(module, args):
            x, ids, gates = args
            self.taps[path + "expert_ids"] = ids.int().numpy().copy()
            self.taps[path + "gates"] = to_numpy(gates)
            for expert in range(module.num_experts):
                tokens = (ids == expert).any(-1).nonzero()[:, 0]
                rows = x[tokens]
                gate, up = torch.nn.functional.linear(rows, module.gate_up_proj[expert]).chunk(2, -1)
                hidden = torch.nn.functional.silu(gate) * up
                out = torch.nn.functional.linear(hidden, module.down_proj[expert])
                here = f"{path}experts.{expert}."
                self.taps[here + "tokens"] = tokens.numpy().copy()
                parts = {"input": rows, "gate": gate, "up": up, "hidden": hidden, "output": out}
                self.taps |= {here + name: to_numpy(value) for name, value in parts.items()}

        self.input(block, path + "input")
        self.output(block, path + "output")
        self.handles.append(block.gate.register_forward_hook(router))
        self.handles.append(block.experts.register_forward_pre_hook(experts))
        self.output(block.experts, path + "routed")
        if hasattr(block, "shared_expert"):
            self.output(block.shared_expert, path + "shared.output")
            self.output(block.shared_expert_gate, path + "shared.gate", torch.sigmoid)

    def __enter__(self) -> dict[str, np.ndarray]:
        decoder = self.model.model
        self.output(decoder.embed_tokens, "embed")
        for layer, block in enumerate(decoder.layers):
            self.output(block.input_layernorm, f"layers.{layer}.attn.norm")
            self.attention(layer, block.self_attn)
            if hasattr(block.mlp, "experts"):
                self.moe(layer, block.mlp)
            else:
                self.input(block.mlp, f"layers.{layer}.mlp.input")
                self.output(block.mlp, f"layers.{layer}.mlp.output")
            self.output(block, f"layers.{layer}.output")
        self.output(decoder.norm, "norm")
        self.output(self.model.lm_head, "logits")
        return self.taps

    def __exit__(self, *exc) -> None:
        for handle in self.handles:
            handle.remove()


def record(model, ids: Sequence[int], first_position: int = 0) -> dict[str, np.ndarray]:
    """Taps of one pass over `ids`, which stand at first_position, first_position + 1, ..."""
    positions = torch.arange(first_position, first_position + len(ids))[None]
    with torch.no_grad(), Recorder(model) as taps:
        model(torch.tensor([list(ids)]), position_ids=positions, use_cache=False)
    return taps
