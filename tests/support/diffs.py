"""Two runs that differ in known ways, for tests of what shows a comparison."""

from __future__ import annotations

from typing import Any

import numpy as np

from colibri_lab.difference.result import Attempt, Diagnosis
from colibri_lab.testing import synthetic_trace
from colibri_lab.trace import Trace

TIE = (1, 12)  # layer and token of `full_trace` whose second and third expert score alike


def full_trace(
    layers: int = 6, experts: int = 8, top_k: int = 2, tokens: int = 40, hidden: int = 16, seed: int = 0
) -> Trace:
    """A synthetic trace with the taps outside the experts too, logits over a vocabulary of 50, and one near-tie."""
    trace = synthetic_trace(layers, experts, top_k, tokens, seed, hidden)
    rng = np.random.default_rng(seed + 1)
    arrays = copied(trace)
    for layer in trace.layers:
        for tap in ("attn.norm", "attn.q", "attn.k", "attn.v", "attn.out", "output"):
            arrays[f"layers.{layer}.{tap}"] = rng.standard_normal((tokens, hidden), np.float32)
    for tap, width in (("embed", hidden), ("norm", hidden), ("logits", 50)):
        arrays[tap] = rng.standard_normal((tokens, width), np.float32) * np.float32(3 if tap == "logits" else 1)
    layer, token = TIE
    if layers > layer and tokens > token:
        logits = arrays[f"layers.{layer}.moe.router_logits"][token]
        order = np.argsort(-logits)
        logits[order[top_k]] = np.nextafter(logits[order[top_k - 1]], np.float32(-np.inf))
        scores = np.exp(logits - logits.max())
        arrays[f"layers.{layer}.moe.scores"][token] = scores / scores.sum()
    return of(trace, arrays)


def copied(trace: Trace) -> dict[str, Any]:
    """The arrays of a trace, to be changed."""
    return {path: np.array(trace[path]) for path in trace}


def of(trace: Trace, arrays: dict[str, Any], **meta: Any) -> Trace:
    """The same trace with other arrays."""
    return Trace(arrays, ids=trace.ids, texts=trace.texts, meta={**trace.meta, **meta})


def busiest(a: Trace, layer: int) -> int:
    """The expert with most tokens."""
    return int(np.argmax(np.bincount(a[f"layers.{layer}.moe.expert_ids"].ravel())))


def planted(a: Trace, layer: int = 2) -> Trace:
    """B: A with noise of one part in ten million, other outputs of the busiest expert in `layer`, everything behind it
    moved, the near-tie decided the other way, and a few tokens re-routed in later layers.
    """
    rng = np.random.default_rng(9)
    arrays, expert = copied(a), busiest(a, layer)
    for path, array in arrays.items():
        if array.dtype.kind != "f" or path == "embed":
            continue
        own = int(path.split(".")[1]) if path.startswith("layers.") else 99
        behind = own > layer or (own == layer and path.endswith((".moe.routed", ".moe.output", f"{layer}.output")))
        size = (0.3 if own == layer else 0.05) if behind else 1e-7
        array += (rng.standard_normal(array.shape) * size * np.abs(array).max()).astype(np.float32)
    rows = slice(*a[f"layers.{layer}.moe.dispatch.offsets"][0, expert : expert + 2])
    output = arrays[f"layers.{layer}.moe.dispatch.output"]
    output[rows] = rng.standard_normal(output[rows].shape).astype(np.float32) * np.abs(output).max()
    swap(arrays, *TIE)
    for later, tokens in ((layer + 1, (35, 8, 20)), (layer + 2, (36, 3)), (layer + 3, (35,))):
        for token in tokens:
            swap(arrays, later, token)
    return of(a, arrays)


def swap(arrays: dict[str, Any], layer: int, token: int) -> None:
    """Sends one token to its best expert left out in place of the last chosen one."""
    ids, logits = (arrays.get(f"layers.{layer}.moe.{tap}") for tap in ("expert_ids", "router_logits"))
    if ids is not None and token < len(ids):
        ids[token, -1] = next(e for e in np.argsort(-logits[token], kind="stable") if e not in ids[token])


SWAPPED = Diagnosis(
    "swapped_gate_up",
    "Likely fault: the gate and up weights of this one expert are swapped; with the two exchanged, B is A to 3e−7.",
    (
        Attempt("swapped_gate_up", "gate and up swapped (w1, w3)", "explains", 3e-7),
        Attempt("transposed_weight", "down matrix transposed", "tried", None, "shape 64×256 forbids it"),
        Attempt("interleaved_halves", "rows interleaved instead of halves", "tried", 0.7),
        Attempt("activation", "activation: gelu for silu", "tried", 0.3),
        Attempt("bf16_rounding", "weights rounded to bf16", "tried", 0.99, "explains 0.4 % of it"),
        Attempt("missing_renormalisation", "gates not renormalised", "excluded", None, "gates equal"),
        Attempt("rope_style", "rotary style, position, window", "excluded", None, "attention equal"),
    ),
    "fixed = lab.open('reference').session(capture='all')\nlab.diff(fixed, b).verdict",
)
