"""gguf_file.py: a Mixtral checkpoint as a GGUF file for llama.cpp: the same values, in the order and under the names
it wants.

llama.cpp keeps the experts of a layer in one tensor, norms and the router in f32, and rotates neighbouring channels
where Mixtral rotates the two halves of a head, so the rows of q and k change places.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Array = np.ndarray[Any, Any]
DTYPES = {"F32": np.dtype(np.float32), "BF16": np.dtype(np.uint16)}  # bf16 as its bits
KINDS = {"F32": gguf.GGMLQuantizationType.F32, "BF16": gguf.GGMLQuantizationType.BF16}


def read_folder(folder: Path) -> dict[str, tuple[Array, str]]:
    """Every tensor of a folder of safetensors files, mapped, with its stored dtype."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as source:
            length = int.from_bytes(source.read(8), "little")
            header = json.loads(source.read(length))
        for name, about in header.items():
            if name != "__metadata__":
                begin = 8 + length + about["data_offsets"][0]
                dtype, shape = DTYPES[about["dtype"]], tuple(about["shape"])
                found[name] = (np.memmap(file, dtype, "r", begin, shape), about["dtype"])
    return found


def widened(values: Array, stored: str) -> Array:
    return (values.astype(np.uint32) << 16).view(np.float32) if stored == "BF16" else np.asarray(values)


def neighbours(values: Array, heads: int) -> Array:
    """Rows (head, half, j) in the order (head, j, half)."""
    return np.ascontiguousarray(values.reshape(heads, 2, -1, values.shape[-1]).swapaxes(1, 2).reshape(values.shape))


def write(folder: Path, target: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] != "mixtral":
        raise ValueError(f"a GGUF file is written for mixtral checkpoints alone; this is {config['model_type']}")
    tensors = read_folder(folder)
    stored = tensors["lm_head.weight"][1]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]

    writer = gguf.GGUFWriter(target, "llama")
    writer.add_name(folder.name)
    writer.add_file_type({"F32": gguf.LlamaFileType.ALL_F32, "BF16": gguf.LlamaFileType.MOSTLY_BF16}[stored])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")

    parts: list[Callable[[], Array]] = []  # in the order of the file; each is read when its turn comes

    def add(name: str, shape: tuple[int, ...], kind: str, make: Callable[[], Array]) -> None:
        size = int(np.prod(shape)) * DTYPES[kind].itemsize
        writer.add_tensor_info(name, shape, DTYPES[kind], size, raw_dtype=KINDS[kind])
        parts.append(make)

    def plain(name: str, source: str) -> None:
        values, kind = tensors[source]
        add(name, values.shape, kind, lambda: values)

    def wide(name: str, source: str) -> None:
        values, kind = tensors[source]
        add(name, values.shape, "F32", lambda: widened(values, kind))

    def rotated(name: str, source: str, n: int) -> None:
        values, kind = tensors[source]
        add(name, values.shape, kind, lambda: neighbours(values, n))

    def stacked(name: str, sources: list[str]) -> None:
        values, kind = tensors[sources[0]]
        add(name, (len(sources), *values.shape), kind, lambda: np.stack([tensors[s][0] for s in sources]))

    plain("token_embd.weight", "model.embed_tokens.weight")
    for layer in range(config["num_hidden_layers"]):
        to, at = f"blk.{layer}", f"model.layers.{layer}"
        wide(f"{to}.attn_norm.weight", f"{at}.input_layernorm.weight")
        rotated(f"{to}.attn_q.weight", f"{at}.self_attn.q_proj.weight", heads)
        rotated(f"{to}.attn_k.weight", f"{at}.self_attn.k_proj.weight", kv_heads)
        plain(f"{to}.attn_v.weight", f"{at}.self_attn.v_proj.weight")
        plain(f"{to}.attn_output.weight", f"{at}.self_attn.o_proj.weight")
        wide(f"{to}.ffn_norm.weight", f"{at}.post_attention_layernorm.weight")
        wide(f"{to}.ffn_gate_inp.weight", f"{at}.block_sparse_moe.gate.weight")
        for kind, weight in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
            experts = range(config["num_local_experts"])
            stacked(
                f"{to}.ffn_{kind}_exps.weight", [f"{at}.block_sparse_moe.experts.{e}.{weight}.weight" for e in experts]
            )
    wide("output_norm.weight", "model.norm.weight")
    plain("output.weight", "lm_head.weight")

    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for make in parts:
        writer.write_tensor_data(make())
    writer.close()
