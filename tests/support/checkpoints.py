"""Write and read small checkpoints of the four families under their hub names, without any code of the engine.

Tests draw random checkpoints here, set single tensors by hand, and read recorded files back. Reading and writing
safetensors takes twenty lines each, so nothing of ours stands between a test and the bytes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

DTYPES = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "U8": np.dtype("u1"),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Every tensor of one file, in its stored dtype."""
    raw = path.read_bytes()
    (size,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + size])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        start, stop = (8 + size + offset for offset in entry["data_offsets"])
        tensors[name] = np.frombuffer(raw[start:stop], DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """One file in the order given, header padded to eight bytes."""
    header, offset = {}, 0
    for name, value in tensors.items():
        header[name] = {
            "dtype": NAMES[value.dtype],
            "shape": list(value.shape),
            "data_offsets": [offset, offset + value.nbytes],
        }
        offset += value.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for value in tensors.values():
            file.write(np.ascontiguousarray(value).tobytes())


def read_checkpoint(folder: Path) -> tuple[dict, dict[str, np.ndarray]]:
    """(config, tensors) of a folder; a single file goes before an index."""
    config = json.loads((folder / "config.json").read_text())
    single = folder / "model.safetensors"
    if single.exists():
        return config, read_safetensors(single)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    tensors: dict[str, np.ndarray] = {}
    for shard in sorted(set(index["weight_map"].values())):
        tensors |= read_safetensors(folder / shard)
    return config, tensors


def write_checkpoint(folder: Path, config: dict, tensors: Mapping[str, np.ndarray]) -> Path:
    """config.json and model.safetensors; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def small_config(family: str, **options) -> dict:
    """A config with every key the family needs; sizes that divide nothing evenly."""
    qwen = family.startswith("qwen")
    base = {
        "model_type": family,
        "architectures": [
            {"mixtral": "Mixtral", "qwen2_moe": "Qwen2Moe", "qwen3_moe": "Qwen3Moe", "olmoe": "Olmoe"}[family]
            + "ForCausalLM"
        ],
        "vocab_size": 61,
        "hidden_size": 44,
        "intermediate_size": 23,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    }
    base |= {"num_local_experts" if family == "mixtral" else "num_experts": 8}
    if qwen:
        base |= {"moe_intermediate_size": 19, "norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": []}
    if family == "qwen2_moe":
        base |= {"shared_expert_intermediate_size": 29, "hidden_size": 40}
    if family in ("mixtral", "qwen3_moe"):
        base |= {"head_dim": 10}
    if family == "olmoe":
        base |= {"hidden_size": 40, "norm_topk_prob": False, "clip_qkv": None}
    return base | options


def expert_count(config: dict) -> int:
    return config["num_local_experts"] if "num_local_experts" in config else config["num_experts"]


def expert_width(config: dict) -> int:
    return config["moe_intermediate_size" if config["model_type"].startswith("qwen") else "intermediate_size"]


def head_dim(config: dict) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def is_moe(config: dict, layer: int) -> bool:
    """Qwen's rule for dense layers; the other two families have none."""
    if not config["model_type"].startswith("qwen"):
        return True
    return (
        layer not in (config.get("mlp_only_layers") or []) and (layer + 1) % config.get("decoder_sparse_step", 1) == 0
    )


def moe_prefix(config: dict, layer: int) -> str:
    return f"model.layers.{layer}.{'block_sparse_moe' if config['model_type'] == 'mixtral' else 'mlp'}."


def expert_names(config: dict) -> tuple[str, str, str]:
    """The hub's names of (gate, up, down)."""
    return ("w1", "w3", "w2") if config["model_type"] == "mixtral" else ("gate_proj", "up_proj", "down_proj")


def shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint with this config holds on the hub."""
    family, width = config["model_type"], config["hidden_size"]
    q_width = config["num_attention_heads"] * head_dim(config)
    kv_width = config["num_key_value_heads"] * head_dim(config)
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], width)}

    def mlp(prefix: str, names: tuple[str, str, str], inner: int) -> None:
        gate, up, down = names
        out[f"{prefix}{gate}.weight"] = out[f"{prefix}{up}.weight"] = (inner, width)
        out[f"{prefix}{down}.weight"] = (width, inner)

    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        out[prefix + "input_layernorm.weight"] = (width,)
        sizes = {"q": (q_width, width), "k": (kv_width, width), "v": (kv_width, width), "o": (width, q_width)}
        biased = {"qwen2_moe": "qkv" if config.get("qkv_bias", True) else ""}.get(
            family, "qkvo" if config.get("attention_bias") else ""
        )
        for name, shape in sizes.items():
            out[f"{prefix}self_attn.{name}_proj.weight"] = shape
            if name in biased:
                out[f"{prefix}self_attn.{name}_proj.bias"] = shape[:1]
        if family in ("qwen3_moe", "olmoe"):
            full = family == "olmoe"
            out[prefix + "self_attn.q_norm.weight"] = (q_width if full else head_dim(config),)
            out[prefix + "self_attn.k_norm.weight"] = (kv_width if full else head_dim(config),)
        out[prefix + "post_attention_layernorm.weight"] = (width,)
        if not is_moe(config, layer):
            mlp(prefix + "mlp.", ("gate_proj", "up_proj", "down_proj"), config["intermediate_size"])
            continue
        moe = moe_prefix(config, layer)
        out[moe + "gate.weight"] = (expert_count(config), width)
        for expert in range(expert_count(config)):
            mlp(f"{moe}experts.{expert}.", expert_names(config), expert_width(config))
        if family == "qwen2_moe":
            mlp(
                moe + "shared_expert.", ("gate_proj", "up_proj", "down_proj"), config["shared_expert_intermediate_size"]
            )
            out[moe + "shared_expert_gate.weight"] = (1, width)
    out["model.norm.weight"] = (width,)
    if not config.get("tie_word_embeddings"):
        out["lm_head.weight"] = (config["vocab_size"], width)
    return out


def random_tensors(config: dict, seed: int) -> dict[str, np.ndarray]:
    """float32 weights that keep activations near 1 and routing far from uniform; names as `shapes` gives them."""
    random = np.random.default_rng(seed)

    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
        value = random.standard_normal(shape)
        if name.endswith("norm.weight"):
            value = 1 + 0.15 * value
        elif len(shape) == 1:
            value *= 0.2
        elif name != "model.embed_tokens.weight":
            gain = 1.5 if name.endswith(("gate.weight", "lm_head.weight")) else 1.2
            value *= gain / shape[-1] ** 0.5
        return value.astype(np.float32)

    return {name: draw(name, shape) for name, shape in shapes(config).items()}


def fused(config: dict, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same checkpoint with the experts of a layer in two stacked tensors, gate rows before up rows."""
    gate, up, down = expert_names(config)
    out = {}
    for name, value in tensors.items():
        if ".experts." not in name:
            out[name.replace(".block_sparse_moe.", ".mlp.")] = value
    for layer in range(config["num_hidden_layers"]):
        if not is_moe(config, layer):
            continue
        experts = [f"{moe_prefix(config, layer)}experts.{e}." for e in range(expert_count(config))]
        stacked = f"model.layers.{layer}.mlp.experts."
        out[stacked + "gate_up_proj"] = np.stack(
            [np.concatenate([tensors[f"{e}{gate}.weight"], tensors[f"{e}{up}.weight"]]) for e in experts]
        )
        out[stacked + "down_proj"] = np.stack([tensors[f"{e}{down}.weight"] for e in experts])
    return out
