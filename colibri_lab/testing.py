"""Helpers for tests, ours and yours: made-up traces, tiny random checkpoints, tolerances and comparators.

- `synthetic_trace`: a trace with plausible routing at any size, no engine needed.
- `tiny_model`: a small random checkpoint on disk, in the names and layout of the hub.
- `canonical`: bytes that are equal exactly when two arrays are the same answer.
- `assert_close`, `RELATIVE_TOLERANCE`: the pass line against another implementation.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.errors import ArgumentError, nearest
from colibri_lab.trace import Trace

__all__ = ["RELATIVE_TOLERANCE", "assert_close", "canonical", "synthetic_trace", "tiny_model"]

Array = NDArray[Any]

RELATIVE_TOLERANCE = 5e-5
"""Largest difference to another float32 implementation, as a share of the tensor's largest magnitude."""


# ---- comparators ----


def canonical(array: Array) -> bytes:
    """The array's bytes, row-major, with every NaN as 0x7FC00000 (0x7E00 in float16, 0x7FC0 in bfloat16): equal bytes, equal answer."""
    from colibri_lab.trace_file import quiet

    return quiet(np.asarray(array)).tobytes()


def assert_close(actual: Array, expected: Array, name: str = "array", tolerance: float = RELATIVE_TOLERANCE) -> None:
    """Raises AssertionError unless shapes agree, NaN and Inf stand at the same places, and the largest difference is within
    `tolerance` times the largest finite magnitude of `expected`. The message names the worst element.
    """
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, f"{name}: shape {actual.shape}, expected {expected.shape}"
    finite = np.isfinite(expected)
    odd = ~finite | ~np.isfinite(actual)
    same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
    assert same[odd].all(), f"{name}: non-finite values differ at {np.argwhere(odd & ~same)[0].tolist()}"
    if not finite.any():
        return
    limit = tolerance * float(np.abs(expected[finite]).max())
    error = np.where(odd, 0.0, np.abs(np.where(odd, 0.0, actual) - np.where(odd, 0.0, expected)))
    worst = np.unravel_index(int(error.argmax()), error.shape)
    assert error[worst] <= limit, (
        f"{name}: differs by {error[worst]:.3g} at {[int(i) for i in worst]} ({actual[worst]!r}, expected {expected[worst]!r}); allowed {limit:.3g}"
    )


# ---- traces ----

_PROSE = (
    "the river ran past an old mill and nobody in the town could say who had built it or why its wheel still turned"
)
_CODE = ["def", " area", "(", "w", ",", " h", "):", "\n    ", "return", " w", " *", " h", "\n\n", "for", " n", " in", " range", "(", "9", "):", "\n    ", "print", "(", "n", ")", "\n"]  # fmt: skip


def _texts(tokens: int, rng: np.random.Generator) -> tuple[list[str], list[int]]:
    """`tokens` readable token texts, prose and code by turns, and the kind of each (0 prose, 1 code)."""
    words, texts, kinds = _PROSE.split(), ["<s>"], [0]
    while len(texts) < tokens:
        if len(texts) == 1 or rng.random() < 0.5:
            sentence = rng.choice(words, size=int(rng.integers(6, 20))).tolist()
            piece = [
                sentence[0].capitalize(),
                *(f" {w}" for w in sentence[1:]),
                ".",
                "\n" if rng.random() < 0.5 else " ",
            ]
            kind = 0
        else:
            piece, kind = list(_CODE), 1
        texts += piece
        kinds += [kind] * len(piece)
    return texts[:tokens], kinds[:tokens]


def synthetic_trace(
    layers: int = 6,
    experts: int = 8,
    top_k: int = 2,
    tokens: int = 64,
    seed: int = 0,
    hidden: int | None = None,
    *,
    passes: Sequence[int] | None = None,
    dense_layers: Sequence[int] = (),
    nonfinite: bool = False,
) -> Trace:
    """A trace with plausible, uneven routing: some experts are busy, some follow the kind of text, some follow single words.

    Holds router logits, scores, expert ids and gates (softmax over all experts, the chosen ones renormalised). With `hidden` also
    `moe.input`, `moe.routed`, `moe.output` and the packed expert rows. `passes` gives the number of tokens of each pass (default: one).
    `nonfinite` plants NaN, +Inf and −Inf in the logits of three tokens of the middle MoE layer (their scores and gates follow).
    The same arguments give the same bytes. Raises ArgumentError for sizes that contradict each other.
    """
    if not (layers >= 1 and 1 <= top_k <= experts and tokens >= 0):
        raise ArgumentError(f"no trace has {layers} layers, {top_k} of {experts} experts chosen and {tokens} tokens")
    counts = [tokens] if passes is None else [int(n) for n in passes]
    if sum(counts) != tokens or any(n < 1 for n in counts if tokens):
        raise ArgumentError(f"passes {counts} must be at least 1 each and add up to {tokens} tokens")
    rng = np.random.default_rng(seed)
    texts, kinds = _texts(tokens, rng)
    vocabulary = {text: number for number, text in enumerate(dict.fromkeys(texts))}
    ids, kind = [vocabulary[text] for text in texts], np.array(kinds, np.int64)
    moe_layers = [layer for layer in range(layers) if layer not in set(dense_layers)]
    bounds = np.concatenate([[0], np.cumsum(counts)]) if tokens else np.zeros(1, np.int64)
    spans = [[int(a), int(b)] for a, b in zip(bounds[:-1], bounds[1:], strict=True)]
    arrays: dict[str, Array] = {}
    for order, layer in enumerate(moe_layers):
        depth = (order + 0.5) / len(moe_layers)  # deep layers listen less to the word and more to the kind of text
        by_word = rng.standard_normal((max(len(vocabulary), 1), experts), np.float32) * np.float32(1.6 - depth)
        by_kind = rng.standard_normal((2, experts), np.float32) * np.float32(0.4 + 1.2 * depth)
        busy = rng.standard_normal(experts, np.float32) * np.float32(0.5)
        logits = rng.standard_normal((tokens, experts), np.float32) * np.float32(0.6)
        if tokens:
            logits += by_word[ids] + by_kind[kind] + busy
        if nonfinite and order == len(moe_layers) // 2:
            for token, value in zip(range(tokens // 4, tokens), (np.nan, np.inf, -np.inf), strict=False):
                logits[token, token % experts] = value
        arrays |= _routing_arrays(f"layers.{layer}.moe", logits, top_k)
        if hidden is not None:
            arrays |= _expert_arrays(f"layers.{layer}.moe", arrays, spans, experts, hidden, rng)
    meta = {
        "producer": "colibri_lab.testing", "producer_version": "1", "model_type": "synthetic", "num_hidden_layers": layers,
        "moe_layers": moe_layers, "num_experts": experts, "top_k": top_k, "gate_rule": "softmax_renormalised", "passes": spans, "edits": [],
    }  # fmt: skip
    return Trace(arrays, ids=ids, texts=texts, meta=meta)


def _routing_arrays(prefix: str, logits: Array, top_k: int) -> dict[str, Array]:
    """Scores, ids and gates of raw logits by the rule of Mixtral; NaN below every number, ties to the lower id."""
    with np.errstate(invalid="ignore"):
        shifted = np.exp(logits - logits.max(axis=1, keepdims=True, initial=-np.inf))
        scores = shifted / shifted.sum(axis=1, keepdims=True)
        ids = np.argsort(-np.where(np.isnan(scores), -np.inf, scores), axis=1, kind="stable")[:, :top_k].astype(
            np.int32
        )
        chosen = np.take_along_axis(scores, ids, axis=1)
        gates = chosen / chosen.sum(axis=1, keepdims=True)
    return {
        f"{prefix}.router_logits": logits,
        f"{prefix}.scores": scores,
        f"{prefix}.expert_ids": ids,
        f"{prefix}.gates": gates,
    }


def _expert_arrays(
    prefix: str, arrays: dict[str, Array], spans: list[list[int]], experts: int, hidden: int, rng: np.random.Generator
) -> dict[str, Array]:
    """The block's input and output and the packed expert rows; expert e is one random linear map, `routed` the gated sum."""
    ids, gates = arrays[f"{prefix}.expert_ids"], arrays[f"{prefix}.gates"]
    inputs = rng.standard_normal((len(ids), hidden), np.float32)
    maps = rng.standard_normal((experts, hidden, hidden), np.float32) / np.float32(np.sqrt(hidden))
    rows, offsets = [np.empty(0, np.int64)], np.zeros((len(spans), experts + 1), np.int64)
    owners, slots = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    position = 0
    for number, (start, stop) in enumerate(spans):
        flat = ids[start:stop].ravel()
        order = np.argsort(flat, kind="stable")
        rows.append(start + order // ids.shape[1])
        slots.append(order % ids.shape[1])
        owners.append(flat[order])
        offsets[number] = position + np.concatenate([[0], np.cumsum(np.bincount(flat, minlength=experts))])
        position += len(flat)
    token, slot, owner = np.concatenate(rows), np.concatenate(slots), np.concatenate(owners)
    outputs = np.einsum("nh,nhj->nj", inputs[token], maps[owner]) if len(token) else np.empty((0, hidden), np.float32)
    routed = np.zeros_like(inputs)
    np.add.at(routed, token, outputs * gates[token, slot][:, None])
    return {
        f"{prefix}.input": inputs, f"{prefix}.routed": routed, f"{prefix}.output": routed,
        f"{prefix}.dispatch.tokens": token.astype(np.int32), f"{prefix}.dispatch.offsets": offsets,
        f"{prefix}.dispatch.input": inputs[token], f"{prefix}.dispatch.output": outputs.astype(np.float32, copy=False),
    }  # fmt: skip


# ---- checkpoints ----

_FAMILIES = ("mixtral", "qwen3_moe", "olmoe", "qwen2_moe")
_CLASSES = {"mixtral": "Mixtral", "qwen3_moe": "Qwen3Moe", "olmoe": "Olmoe", "qwen2_moe": "Qwen2Moe"}


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
    """Writes a random checkpoint of one family to `folder` (config.json and safetensors) and returns the folder.

    Names and layout are those of the hub; `fused` uses the stacked form that transformers 5 keeps in memory, `sharded` three files and an
    index. `dtype` is F32, F16 or BF16 (routers included). `bias` adds attention biases where the family has them (qwen2_moe always has).
    `rope` replaces the rope parameters, e.g. {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}; `config`
    overrides single keys of config.json last. The same arguments give the same bytes.
    Raises ArgumentError for an unknown family or dtype, or an option that the family does not have.
    """
    if family not in _FAMILIES:
        raise ArgumentError(
            f"no family is named '{family}'; known are {', '.join(_FAMILIES)}{nearest(family, _FAMILIES, 1)}"
        )
    if dense_layers and not family.startswith("qwen"):
        raise ArgumentError(f"{family} has no dense layers; qwen2_moe and qwen3_moe do")
    if bias and family not in ("qwen2_moe", "qwen3_moe"):
        raise ArgumentError(f"{family} has no attention bias; qwen2_moe and qwen3_moe do")
    if window is not None and family == "olmoe":
        raise ArgumentError("olmoe has no sliding window; the other families do")
    if head_dim is not None and family in ("olmoe", "qwen2_moe") and head_dim * heads != hidden:
        raise ArgumentError(f"{family} has no head_dim of its own: it is hidden / heads = {hidden // heads}")
    width = head_dim or hidden // heads
    rng = np.random.default_rng(seed)
    sizes = _Sizes(layers, experts, hidden, expert_width, heads, kv_heads, width, vocab)
    tensors = _tensors(
        family,
        sizes,
        rng,
        frozenset(dense_layers),
        bias or family == "qwen2_moe",
        bias and family == "qwen3_moe",
        fused,
    )
    if tied:
        del tensors["lm_head.weight"]
    settings = _settings(
        family, sizes, top_k, window, sorted(dense_layers), bias, rope or {"rope_type": "default"}, tied, dtype
    )
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(
        json.dumps(settings | (config or {}), indent=2, sort_keys=True) + "\n", encoding="utf-8"
    )
    _write(path, {name: tensor.astype(_numpy_dtype(dtype)) for name, tensor in tensors.items()}, sharded)
    return path


class _Sizes:
    """The sizes of one checkpoint, named."""

    def __init__(
        self,
        layers: int,
        experts: int,
        hidden: int,
        expert_width: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        vocab: int,
    ) -> None:
        self.layers, self.experts, self.hidden, self.expert_width = layers, experts, hidden, expert_width
        self.heads, self.kv_heads, self.head_dim, self.vocab = heads, kv_heads, head_dim, vocab
        self.dense_width, self.shared_width = 2 * expert_width, expert_width + 4


def _numpy_dtype(name: str) -> Any:
    if name == "BF16":
        import ml_dtypes

        return ml_dtypes.bfloat16
    if name not in ("F32", "F16"):
        raise ArgumentError(f"no checkpoint dtype is named '{name}'; known are F32, F16, BF16")
    return np.float32 if name == "F32" else np.float16


def _tensors(
    family: str, s: _Sizes, rng: np.random.Generator, dense: frozenset[int], qkv_bias: bool, o_bias: bool, fused: bool
) -> dict[str, Array]:
    """All tensors by hub name, float32. Scaled so that activations keep their size and routers are decided."""
    out: dict[str, Array] = {}

    def matrix(name: str, *shape: int, gain: float = 1.0) -> None:
        out[name] = (rng.standard_normal(shape) * (gain / np.sqrt(shape[-1]))).astype(np.float32)

    def norm(name: str, size: int) -> None:
        out[name] = (1 + 0.1 * rng.standard_normal(size)).astype(np.float32)

    def vector(name: str, size: int) -> None:
        out[name] = (0.2 * rng.standard_normal(size)).astype(np.float32)

    queries, keys = s.heads * s.head_dim, s.kv_heads * s.head_dim
    out["model.embed_tokens.weight"] = rng.standard_normal((s.vocab, s.hidden)).astype(np.float32)
    for layer in range(s.layers):
        p = f"model.layers.{layer}"
        norm(f"{p}.input_layernorm.weight", s.hidden)
        norm(f"{p}.post_attention_layernorm.weight", s.hidden)
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            matrix(f"{p}.self_attn.{name}_proj.weight", rows, s.hidden)
            if qkv_bias:
                vector(f"{p}.self_attn.{name}_proj.bias", rows)
        matrix(f"{p}.self_attn.o_proj.weight", s.hidden, queries)
        if o_bias:
            vector(f"{p}.self_attn.o_proj.bias", s.hidden)
        if family in ("qwen3_moe", "olmoe"):
            whole = family == "olmoe"
            norm(f"{p}.self_attn.q_norm.weight", queries if whole else s.head_dim)
            norm(f"{p}.self_attn.k_norm.weight", keys if whole else s.head_dim)
        if layer in dense:
            for name, shape in (
                ("gate", (s.dense_width, s.hidden)),
                ("up", (s.dense_width, s.hidden)),
                ("down", (s.hidden, s.dense_width)),
            ):
                matrix(f"{p}.mlp.{name}_proj.weight", *shape)
            continue
        block = f"{p}.block_sparse_moe" if family == "mixtral" and not fused else f"{p}.mlp"
        matrix(f"{block}.gate.weight", s.experts, s.hidden, gain=2.0)
        names = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
        for e in range(s.experts):
            for name, shape in zip(names, [(s.expert_width, s.hidden)] * 2 + [(s.hidden, s.expert_width)], strict=True):
                matrix(f"{block}.experts.{e}.{name}.weight", *shape)
        if fused:
            parts = [[out.pop(f"{block}.experts.{e}.{name}.weight") for e in range(s.experts)] for name in names]
            out[f"{block}.experts.gate_up_proj"] = np.concatenate([np.stack(parts[0]), np.stack(parts[1])], axis=1)
            out[f"{block}.experts.down_proj"] = np.stack(parts[2])
        if family == "qwen2_moe":
            for name, shape in (
                ("gate", (s.shared_width, s.hidden)),
                ("up", (s.shared_width, s.hidden)),
                ("down", (s.hidden, s.shared_width)),
            ):
                matrix(f"{p}.mlp.shared_expert.{name}_proj.weight", *shape)
            matrix(f"{p}.mlp.shared_expert_gate.weight", 1, s.hidden)
    norm("model.norm.weight", s.hidden)
    matrix("lm_head.weight", s.vocab, s.hidden)
    return out


def _settings(
    family: str,
    s: _Sizes,
    top_k: int,
    window: int | None,
    dense: list[int],
    bias: bool,
    rope: dict[str, Any],
    tied: bool,
    dtype: str,
) -> dict[str, Any]:
    """config.json as the hub spells it."""
    out: dict[str, Any] = {
        "architectures": [f"{_CLASSES[family]}ForCausalLM"], "model_type": family, "vocab_size": s.vocab, "hidden_size": s.hidden,
        "num_hidden_layers": s.layers, "num_attention_heads": s.heads, "num_key_value_heads": s.kv_heads, "num_experts_per_tok": top_k,
        "hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": tied,
        "rope_parameters": {"rope_theta": 10000.0} | rope, "dtype": {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[dtype],
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    if family == "mixtral":
        return out | {
            "num_local_experts": s.experts,
            "intermediate_size": s.expert_width,
            "head_dim": s.head_dim,
            "sliding_window": window,
        }
    out |= {"num_experts": s.experts, "norm_topk_prob": family == "qwen3_moe"}
    if family == "olmoe":
        return out | {"intermediate_size": s.expert_width, "clip_qkv": None, "attention_bias": False}
    out |= {
        "moe_intermediate_size": s.expert_width, "intermediate_size": s.dense_width, "decoder_sparse_step": 1, "mlp_only_layers": dense,
        "use_sliding_window": window is not None, "sliding_window": window, "max_window_layers": s.layers,
    }  # fmt: skip
    if family == "qwen3_moe":
        return out | {"head_dim": s.head_dim, "attention_bias": bias}
    return out | {"shared_expert_intermediate_size": s.shared_width, "qkv_bias": True}


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
