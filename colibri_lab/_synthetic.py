"""Made-up traces with plausible routing; public as `colibri_lab.testing.synthetic_trace`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.errors import ArgumentError, is_whole
from colibri_lab.trace import Trace

Array = NDArray[Any]

_PROSE = (
    "the river ran past an old mill and nobody in the town could say who had built it or why its wheel still turned"
)
_CODE = "def| area|(|w|,| h|):|\n    |return| w| *| h|\n\n|for| n| in| range|(|9|):|\n    |print|(|n|)|\n"


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
            piece, kind = _CODE.split("|"), 1
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
    """A trace with plausible, uneven routing.

    Some experts are busy, some follow the kind of text (prose or code), some follow single words. Holds router logits,
    scores, expert ids and gates (softmax over all experts, the chosen ones renormalised); with `hidden` also
    `moe.input`, `moe.routed`, `moe.output` and the packed expert rows. `passes` gives the number of tokens of each pass
    (default: one pass). `nonfinite` plants NaN, +Inf and −Inf in the logits of three tokens of the middle MoE layer;
    their scores and gates follow. The same arguments give the same bytes.
    Raises ArgumentError for sizes that contradict each other.
    """
    sizes = (layers, experts, top_k, tokens, seed, *(() if hidden is None else (hidden,)), *(passes or ()))
    if not all(map(is_whole, sizes)):
        raise ArgumentError(f"the sizes and the seed of a synthetic trace are whole numbers; these are {sizes!r:.80}")
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
    spans = [[int(a), int(b)] for a, b in itertools.pairwise(bounds)]
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
        "producer": "colibri_lab.testing",
        "producer_version": "1",
        "model_type": "synthetic",
        "num_hidden_layers": layers,
        "moe_layers": moe_layers,
        "num_experts": experts,
        "top_k": top_k,
        "gate_rule": "softmax_renormalised",
        "passes": spans,
        "edits": [],
    }
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
    """The block's input and output and its packed expert rows; an expert is one random linear map."""
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
        f"{prefix}.input": inputs,
        f"{prefix}.routed": routed,
        f"{prefix}.output": routed,
        f"{prefix}.dispatch.tokens": token.astype(np.int32),
        f"{prefix}.dispatch.offsets": offsets,
        f"{prefix}.dispatch.input": inputs[token],
        f"{prefix}.dispatch.output": outputs.astype(np.float32, copy=False),
    }
