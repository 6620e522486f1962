"""Small random checkpoints in the names and layout of the hub; public as `colibri_lab.testing.tiny_model`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from colibri_lab._files import local_path
from colibri_lab.errors import ArgumentError, nearest

Array = NDArray[Any]

_CLASSES = {"mixtral": "Mixtral", "qwen3_moe": "Qwen3Moe", "olmoe": "Olmoe", "qwen2_moe": "Qwen2Moe"}
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class _Recipe:
    """Everything that decides one checkpoint."""

    family: str
    seed: int
    dtype: str
    tied: bool
    fused: bool
    layers: int
    experts: int
    top_k: int
    hidden: int
    expert_width: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    window: int | None
    dense_layers: tuple[int, ...]
    bias: bool
    rope: dict[str, Any]

    @property
    def dense_width(self) -> int:
        return 2 * self.expert_width

    @property
    def shared_width(self) -> int:
        return self.expert_width + 4

    def check(self) -> None:
        """Raises ArgumentError for an option that the family does not have."""
        family = self.family
        if family not in _CLASSES:
            raise ArgumentError(
                f"no family is named '{family}'; known are {', '.join(_CLASSES)}{nearest(family, _CLASSES, 1)}"
            )
        if self.dtype not in _DTYPES:
            raise ArgumentError(f"no checkpoint dtype is named '{self.dtype}'; known are {', '.join(_DTYPES)}")
        if self.dense_layers and not family.startswith("qwen"):
            raise ArgumentError(f"{family} has no dense layers; qwen2_moe and qwen3_moe do")
        if self.bias and not family.startswith("qwen"):
            raise ArgumentError(f"{family} has no attention bias; qwen2_moe and qwen3_moe do")
        if self.window is not None and family == "olmoe":
            raise ArgumentError("olmoe has no sliding window; the other families do")
        if family in ("olmoe", "qwen2_moe") and self.head_dim * self.heads != self.hidden:
            raise ArgumentError(
                f"{family} has no head_dim of its own: it is hidden / heads = {self.hidden}/{self.heads}"
            )


def tiny_model(
    folder: str | PathLike[str],
    family: str = "mixtral",
    *,
    seed: int = 0,
    dtype: str = "F32",
    tied: bool = False,
    sharded: bool = False,
    fused: bool = False,
    layers: int = 2,
    experts: int = 4,
    top_k: int = 2,
    hidden: int = 32,
    expert_width: int = 24,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    vocab: int = 64,
    window: int | None = None,
    dense_layers: Sequence[int] = (),
    bias: bool = False,
    rope: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
) -> Path:
    """Writes a random checkpoint of one family to `folder` (config.json, safetensors) and returns the folder.

    Names and layout are those of the hub; `fused` uses the stacked form that transformers 5 keeps in memory, `sharded`
    three files and an index. `dtype` is F32, F16 or BF16 (routers included). `bias` adds attention biases where the
    family can have them (qwen2_moe always has). `rope` adds to or replaces the rope parameters, for instance
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}; `config` overrides single keys of
    config.json last. The same arguments give the same bytes.
    Raises ArgumentError for an unknown family or dtype, or an option that the family does not have.
    """
    recipe = _Recipe(
        family=family,
        seed=seed,
        dtype=dtype,
        tied=tied,
        fused=fused,
        layers=layers,
        experts=experts,
        top_k=top_k,
        hidden=hidden,
        expert_width=expert_width,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim or hidden // heads,
        vocab=vocab,
        window=window,
        dense_layers=tuple(sorted(dense_layers)),
        bias=bias or family == "qwen2_moe",
        rope={"rope_theta": 10000.0, "rope_type": "default"} | (rope or {}),
    )
    recipe.check()
    path = local_path(folder)
    path.mkdir(parents=True, exist_ok=True)
    settings = json.dumps(_settings(recipe) | (config or {}), indent=2, sort_keys=True)
    (path / "config.json").write_text(settings + "\n", encoding="utf-8")
    _write(path, _tensors(recipe), sharded)
    return path


def _tensors(r: _Recipe) -> dict[str, Array]:
    """All tensors by hub name, scaled so that activations keep their size and the router is decided."""
    out: dict[str, Array] = {}
    rng = np.random.default_rng(r.seed)

    def matrix(name: str, *shape: int, gain: float = 1.0) -> None:
        out[name] = (rng.standard_normal(shape) * (gain / np.sqrt(shape[-1]))).astype(np.float32)

    def norm(name: str, size: int) -> None:
        out[name] = (1 + 0.1 * rng.standard_normal(size)).astype(np.float32)

    def vector(name: str, size: int) -> None:
        out[name] = (0.2 * rng.standard_normal(size)).astype(np.float32)

    queries, keys = r.heads * r.head_dim, r.kv_heads * r.head_dim
    out["model.embed_tokens.weight"] = rng.standard_normal((r.vocab, r.hidden)).astype(np.float32)
    for layer in range(r.layers):
        p = f"model.layers.{layer}"
        norm(f"{p}.input_layernorm.weight", r.hidden)
        norm(f"{p}.post_attention_layernorm.weight", r.hidden)
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            matrix(f"{p}.self_attn.{name}_proj.weight", rows, r.hidden)
            if r.bias:
                vector(f"{p}.self_attn.{name}_proj.bias", rows)
        matrix(f"{p}.self_attn.o_proj.weight", r.hidden, queries)
        if r.bias and r.family == "qwen3_moe":
            vector(f"{p}.self_attn.o_proj.bias", r.hidden)
        if r.family in ("qwen3_moe", "olmoe"):
            whole = r.family == "olmoe"
            norm(f"{p}.self_attn.q_norm.weight", queries if whole else r.head_dim)
            norm(f"{p}.self_attn.k_norm.weight", keys if whole else r.head_dim)
        if layer in r.dense_layers:
            for name, shape in (
                ("gate", (r.dense_width, r.hidden)),
                ("up", (r.dense_width, r.hidden)),
                ("down", (r.hidden, r.dense_width)),
            ):
                matrix(f"{p}.mlp.{name}_proj.weight", *shape)
            continue
        block = f"{p}.block_sparse_moe" if r.family == "mixtral" and not r.fused else f"{p}.mlp"
        matrix(f"{block}.gate.weight", r.experts, r.hidden, gain=2.0)
        names = ("w1", "w3", "w2") if r.family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
        for e in range(r.experts):
            for name, shape in zip(names, [(r.expert_width, r.hidden)] * 2 + [(r.hidden, r.expert_width)], strict=True):
                matrix(f"{block}.experts.{e}.{name}.weight", *shape)
        if r.fused:
            parts = [[out.pop(f"{block}.experts.{e}.{name}.weight") for e in range(r.experts)] for name in names]
            out[f"{block}.experts.gate_up_proj"] = np.concatenate([np.stack(parts[0]), np.stack(parts[1])], axis=1)
            out[f"{block}.experts.down_proj"] = np.stack(parts[2])
        if r.family == "qwen2_moe":
            for name, shape in (
                ("gate", (r.shared_width, r.hidden)),
                ("up", (r.shared_width, r.hidden)),
                ("down", (r.hidden, r.shared_width)),
            ):
                matrix(f"{p}.mlp.shared_expert.{name}_proj.weight", *shape)
            matrix(f"{p}.mlp.shared_expert_gate.weight", 1, r.hidden)
    norm("model.norm.weight", r.hidden)
    if not r.tied:
        matrix("lm_head.weight", r.vocab, r.hidden)
    stored = np.dtype(ml_dtypes.bfloat16 if r.dtype == "BF16" else _DTYPES[r.dtype])
    return {name: tensor.astype(stored) for name, tensor in out.items()}


def _settings(r: _Recipe) -> dict[str, Any]:
    """config.json as the hub spells it."""
    out: dict[str, Any] = {
        "architectures": [f"{_CLASSES[r.family]}ForCausalLM"],
        "model_type": r.family,
        "vocab_size": r.vocab,
        "hidden_size": r.hidden,
        "num_hidden_layers": r.layers,
        "num_attention_heads": r.heads,
        "num_key_value_heads": r.kv_heads,
        "num_experts_per_tok": r.top_k,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": r.tied,
        "rope_parameters": r.rope,
        "dtype": _DTYPES[r.dtype],
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if r.family == "mixtral":
        return out | {
            "num_local_experts": r.experts,
            "intermediate_size": r.expert_width,
            "head_dim": r.head_dim,
            "sliding_window": r.window,
        }
    out |= {"num_experts": r.experts, "norm_topk_prob": r.family == "qwen3_moe"}
    if r.family == "olmoe":
        return out | {"intermediate_size": r.expert_width, "clip_qkv": None, "attention_bias": False}
    out |= {
        "moe_intermediate_size": r.expert_width,
        "intermediate_size": r.dense_width,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(r.dense_layers),
        "use_sliding_window": r.window is not None,
        "sliding_window": r.window,
        "max_window_layers": r.layers,
    }
    if r.family == "qwen3_moe":
        return out | {"head_dim": r.head_dim, "attention_bias": r.bias}
    return out | {"shared_expert_intermediate_size": r.shared_width, "qkv_bias": True}


def _write(path: Path, tensors: dict[str, Array], sharded: bool) -> None:
    from safetensors.numpy import save_file

    if not sharded:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return
    names, count = list(tensors), 3
    weight_map: dict[str, str] = {}
    for number in range(count):
        file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
        part = {name: tensors[name] for name in names[number::count]}  # one expert's matrices land in different files
        save_file(part, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
