"""models.py: random checkpoints of the Mixtral architecture, made once and kept in a cache folder.

The values matter little to speed, the sizes do: every model but `tiny` has far more weights than the last cache level
holds. Each tensor is drawn from a seed of its own name, so bf16 is the rounding of the same f32 values and a model
with fewer layers shares its layers with the larger one.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

SHARD_BYTES = 1 << 30
DTYPES = {"f32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16)}
STORED = {"f32": "F32", "bf16": "BF16"}  # the names of safetensors
SPREAD = 0.02  # standard deviation of the weights: activations stay finite through all layers


@dataclass(frozen=True)
class Spec:
    """The sizes of one random model."""

    name: str
    layers: int
    experts: int
    top_k: int
    width: int  # of one expert
    hidden: int = 1024
    heads: int = 16
    kv_heads: int = 4
    vocabulary: int = 32000
    positions: int = 8192

    @property
    def parameters(self) -> int:
        return sum(int(np.prod(shape)) for _, shape in tensors(self))

    def config(self, dtype: str) -> dict[str, object]:
        return {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "hidden_size": self.hidden,
            "intermediate_size": self.width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "num_local_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.positions,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "hidden_act": "silu",
            "attention_dropout": 0.0,
            "router_jitter_noise": 0.0,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "torch_dtype": {"f32": "float32", "bf16": "bfloat16"}[dtype],
        }


COARSE = Spec("coarse", layers=8, experts=8, top_k=2, width=3584)  # 791 M parameters, 230 M of them at work for a token
FINE = Spec("fine", layers=8, experts=64, top_k=8, width=512)  # 892 M
LARGE = replace(COARSE, name="large", layers=24)  # 2.2 G: 4.5 GB in bf16
TINY = Spec(
    "tiny", layers=2, experts=4, top_k=2, width=96, hidden=64, heads=4, kv_heads=2, vocabulary=512, positions=4096
)
SPECS = {spec.name: spec for spec in (COARSE, FINE, LARGE, TINY)}


def variant(spec: Spec, **sizes: int) -> Spec:
    """The same model with other sizes, under a name that tells them."""
    return replace(spec, name="-".join([spec.name, *(f"{key}{value}" for key, value in sizes.items())]), **sizes)


def tensors(spec: Spec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes as Mixtral checkpoints have them, in the order of the forward pass."""
    head = spec.hidden // spec.heads
    yield "model.embed_tokens.weight", (spec.vocabulary, spec.hidden)
    for layer in range(spec.layers):
        at = f"model.layers.{layer}"
        yield f"{at}.input_layernorm.weight", (spec.hidden,)
        yield f"{at}.self_attn.q_proj.weight", (spec.heads * head, spec.hidden)
        yield f"{at}.self_attn.k_proj.weight", (spec.kv_heads * head, spec.hidden)
        yield f"{at}.self_attn.v_proj.weight", (spec.kv_heads * head, spec.hidden)
        yield f"{at}.self_attn.o_proj.weight", (spec.hidden, spec.heads * head)
        yield f"{at}.post_attention_layernorm.weight", (spec.hidden,)
        yield f"{at}.block_sparse_moe.gate.weight", (spec.experts, spec.hidden)
        for expert in range(spec.experts):
            for name, shape in (
                ("w1", (spec.width, spec.hidden)),
                ("w3", (spec.width, spec.hidden)),
                ("w2", (spec.hidden, spec.width)),
            ):
                yield f"{at}.block_sparse_moe.experts.{expert}.{name}.weight", shape
    yield "model.norm.weight", (spec.hidden,)
    yield "lm_head.weight", (spec.vocabulary, spec.hidden)


def values(name: str, shape: tuple[int, ...], dtype: str) -> NDArray[np.generic]:
    if len(shape) == 1:
        return np.ones(shape, DTYPES[dtype])  # norms
    drawn = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, dtype=np.float32)
    drawn *= np.float32(SPREAD)
    return drawn.astype(DTYPES[dtype], copy=False)


def default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "colibri-lab" / "benchmarks"


def made(path: Path, make: Callable[[Path], None]) -> Path:
    """`path`, made at the first use under a temporary name and renamed when whole; a file or a folder."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        try:
            make(partial)
            os.replace(partial, path)
        except OSError:
            if not path.exists():  # else another process was first
                raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            partial.unlink(missing_ok=True)
    return path


def checkpoint(spec: Spec, dtype: str, cache: Path) -> Path:
    """The folder of this model; made now if the cache has none."""
    folder = cache / f"{spec.name}-{dtype}"
    if not folder.exists():
        size = spec.parameters * DTYPES[dtype].itemsize
        print(f"making the random model {folder.name} ({size / 1e9:.1f} GB) in {cache}", file=sys.stderr, flush=True)
    return made(folder, lambda partial: write_checkpoint(spec, dtype, partial))


def write_checkpoint(spec: Spec, dtype: str, folder: Path) -> None:
    folder.mkdir(parents=True)
    size = DTYPES[dtype].itemsize
    shards: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    filled = 0
    for name, shape in tensors(spec):
        n_bytes = int(np.prod(shape)) * size
        if filled and filled + n_bytes > SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append((name, shape))
        filled += n_bytes
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_shard(folder / file, shard, dtype)
        weight_map |= {name: file for name, _ in shard}
    index = {"metadata": {"total_size": spec.parameters * size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(spec.config(dtype), indent=1), encoding="utf-8")


def write_shard(file: Path, shard: list[tuple[str, tuple[int, ...]]], dtype: str) -> None:
    """One safetensors file, tensor by tensor, so that memory stays small: 8 bytes with the length of the header, the
    header as JSON, padded to 64 bytes, and the values.
    """
    header, offset = {}, 0
    for name, shape in shard:
        end = offset + int(np.prod(shape)) * DTYPES[dtype].itemsize
        header[name] = {"dtype": STORED[dtype], "shape": shape, "data_offsets": (offset, end)}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % 64)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shard:
            out.write(values(name, shape, dtype).view(np.uint8).reshape(-1).data)
