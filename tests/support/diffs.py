"""Comparisons for tests of what shows them: made by hand from two traces, the plainest way, without `lab.diff`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from colibri_lab.difference.result import TABLE, Attempt, Diagnosis, Diff, Divergence, Flip, Prediction, Tolerance
from colibri_lab.testing import synthetic_trace
from colibri_lab.trace import Trace

DECLARED = Tolerance(5e-5, {}, "5e−5 of the largest value of a tap, declared before the run.")
IN_LAYER = (
    "attn.norm", "attn.q", "attn.k", "attn.v", "attn.out", "moe.input", "moe.router_logits", "moe.scores",
    "moe.expert_ids", "moe.gates", "moe.experts.*.output", "moe.routed", "moe.output", "output",
)  # fmt: skip


def full_trace(
    layers: int = 6, experts: int = 8, top_k: int = 2, tokens: int = 40, hidden: int = 16, seed: int = 0
) -> Trace:
    """A synthetic trace with the taps outside the experts too, and logits over a vocabulary of 50."""
    trace = synthetic_trace(layers, experts, top_k, tokens, seed, hidden)
    rng = np.random.default_rng(seed + 1)
    arrays = {path: np.array(trace[path]) for path in trace}
    for layer in trace.layers:
        for tap in ("attn.norm", "attn.q", "attn.k", "attn.v", "attn.out", "output"):
            arrays[f"layers.{layer}.{tap}"] = rng.standard_normal((tokens, hidden), np.float32)
    for tap, width in (("embed", hidden), ("norm", hidden), ("logits", 50)):
        arrays[tap] = rng.standard_normal((tokens, width), np.float32) * np.float32(3 if tap == "logits" else 1)
    return of(trace, arrays)


def of(trace: Trace, arrays: dict[str, Any], **meta: Any) -> Trace:
    """The same trace with other arrays."""
    return Trace(arrays, ids=trace.ids, texts=trace.texts, meta={**trace.meta, **meta})


def planted(a: Trace, layer: int = 2, expert: int | None = None) -> Trace:
    """B: A with noise of one part in ten million, another expert in `layer` (None: the busiest), and
    everything behind it moved; a near-tie in layer 1, and a few tokens re-routed in later layers.
    """
    rng = np.random.default_rng(9)
    arrays = {path: np.array(a[path]) for path in a}
    if expert is None:
        expert = int(np.argmax(np.bincount(a[f"layers.{layer}.moe.expert_ids"].ravel())))
    for path in arrays:
        if arrays[path].dtype.kind != "f" or path == "embed":
            continue
        own = int(path.split(".")[1]) if path.startswith("layers.") else 99
        behind = own > layer or (own == layer and path.endswith((".moe.routed", ".moe.output", f"{layer}.output")))
        size = (0.3 if own == layer else 0.05) if behind else 1e-7
        arrays[path] += (rng.standard_normal(arrays[path].shape) * size * np.abs(arrays[path]).max()).astype(np.float32)
    rows = slice(*a[f"layers.{layer}.moe.dispatch.offsets"][0, expert : expert + 2])
    output = arrays[f"layers.{layer}.moe.dispatch.output"]
    output[rows] = rng.standard_normal(output[rows].shape).astype(np.float32) * np.abs(output).max()
    swap(arrays, 1, 12)
    for later, tokens in ((layer + 1, (35, 8, 20)), (layer + 2, (36, 3)), (layer + 3, (35,))):
        for token in tokens:
            swap(arrays, later, token)
    return of(a, arrays)


def swap(arrays: dict[str, Any], layer: int, token: int) -> None:
    """Sends one token to one other expert."""
    path = f"layers.{layer}.moe.expert_ids"
    if path in arrays and token < len(arrays[path]):
        experts = (
            arrays[f"layers.{layer}.moe.router_logits"].shape[1] if f"layers.{layer}.moe.router_logits" in arrays else 8
        )
        free = [e for e in range(experts) if e not in arrays[path][token]]
        arrays[path][token, -1] = free[token % len(free)]


def compared(
    a: Trace,
    b: Trace,
    *,
    verdict: str | None = None,
    tolerance: Tolerance = DECLARED,
    tie_layers: Sequence[int] = (1,),
    diagnosis: Diagnosis | None = None,
    notes: Sequence[str] = (),
    first: Divergence | None = None,
) -> Diff:
    """The `Diff` of two traces of the same tokens; `verdict` None: by the table alone."""
    n = min(len(a.ids), len(b.ids))
    rows = []
    for path in ordered(a):
        if taps(b, path):
            rows.append(row(a, b, path, n, tolerance, tie_layers))
    table = np.array(rows, TABLE) if rows else np.zeros(0, TABLE)
    flips = tuple(sorted(flips_of(a, b, n, tie_layers), key=lambda flip: -np.nan_to_num(flip.consequence)))
    if first is None:
        first = next((divergence(a, b, r) for r in table if str(r["state"]) == "beyond"), None)
    if verdict is None:
        verdict = "defect" if first is not None else "tie" if flips else "identical"
    return Diff(
        a, b, ("reference", "port.safetensors"), n, tolerance, verdict, first if verdict == "defect" else None, flips,  # type: ignore[arg-type]
        table, diagnosis, prediction(a, b, n), tuple(notes),
    )  # fmt: skip


def ordered(a: Trace) -> list[str]:
    """The taps of a trace in the order of the data's way, experts as "*"."""
    layered = [f"layers.{layer}.{tap}" for layer in a.layers for tap in IN_LAYER]
    return [path for path in ("embed", *layered, "norm", "logits") if taps(a, path)]


def taps(trace: Trace, path: str) -> bool:
    return (path.replace("experts.*", "dispatch") if "*" in path else path) in trace


def row(a: Trace, b: Trace, path: str, n: int, tolerance: Tolerance, tie_layers: Sequence[int]) -> tuple[Any, ...]:
    layer = int(path.split(".")[1]) if path.startswith("layers.") else -1
    stored = path.replace("experts.*", "dispatch")
    x, y = np.asarray(a[stored], np.float64), np.asarray(b[stored], np.float64)
    stage = "router" if "router" in path or "expert_ids" in path else "expert" if "*" in path else "attention"
    if path.endswith("expert_ids"):
        moved = (np.sort(x[:n], axis=1) != np.sort(y[:n], axis=1)).any(axis=1)
        state = "same" if not moved.any() else "tie" if layer in tie_layers else "flips"
        token = int(np.argmax(moved)) if moved.any() else -1
        return (path, 0.0, 0.0, 1.0, 0.0, layer, stage, 0.0, state, token, int(moved.sum()))
    with np.errstate(invalid="ignore"):
        d = np.abs(y[:n] - x[:n]) if x.shape == y.shape else np.abs(x - y)
    scale = float(np.nanmax(np.abs(x), initial=1e-30))
    largest = float(np.nan if np.isnan(d).any() else d.max(initial=0.0))
    error, allowed = largest / scale, tolerance.of(path)
    state = "same bits" if largest == 0 else "within" if error <= allowed else "beyond"
    bad = ~(d <= allowed * scale)
    rows = np.flatnonzero(bad.reshape(len(bad), -1).any(axis=1))
    token = int(rows[0]) if len(rows) else -1
    if "*" in path and token >= 0:
        token = int(a[stored.rpartition(".")[0] + ".tokens"][rows].min())
    return (path, largest, error, 0.98, 1e3, layer, stage, allowed, state, token, 0)


def divergence(a: Trace, b: Trace, entry: Any) -> Divergence:
    path, expert = str(entry["path"]), None
    if "*" in path:
        prefix = path.replace("experts.*.output", "dispatch.")
        bad = (
            np.abs(a[prefix + "output"] - b[prefix + "output"]).max(axis=1) > 5e-5 * np.abs(a[prefix + "output"]).max()
        )
        expert = int(np.searchsorted(a[prefix + "offsets"][0], np.flatnonzero(bad)[0], side="right") - 1)
    layer = int(entry["layer"])
    cause = "Inputs, ids and gates of these rows are equal, so the fault lies inside it."
    error = float(entry["max_rel"])
    return Divergence(
        path, layer if layer >= 0 else None, str(entry["stage"]), int(entry["token"]), error, cause, expert
    )


def flips_of(a: Trace, b: Trace, n: int, tie_layers: Sequence[int]) -> list[Flip]:
    found = []
    for layer in a.moe_layers:
        path = f"layers.{layer}.moe.expert_ids"
        for token in range(n):
            one, other = a[path][token], b[path][token]
            if set(one.tolist()) != set(other.tolist()):
                tie = layer in tie_layers
                words = "Two experts score alike." if tie else "The residual stream of this token has moved."
                margin, moved, effect = (2e-7, 4e-7, 1e-6) if tie else (0.84, 1.12, 0.1 + token / 1000)
                ids = tuple(one.tolist()), tuple(other.tolist())
                found.append(Flip(layer, token, *ids, margin, moved, "tie" if tie else "downstream", words, effect))
    return found


def prediction(a: Trace, b: Trace, n: int) -> Prediction | None:
    if "logits" not in a or "logits" not in b:
        return None
    with np.errstate(invalid="ignore", divide="ignore"):
        p, q = (
            np.exp(x - x.max(axis=1, keepdims=True)) for x in (np.asarray(t["logits"][:n], np.float64) for t in (a, b))
        )
        p, q = p / p.sum(axis=1, keepdims=True), q / q.sum(axis=1, keepdims=True)
        kl = (p * (np.log(p) - np.log(q))).sum(axis=1)
    five = [len(set(np.argsort(-x)[:5]) & set(np.argsort(-y)[:5])) / 5 for x, y in zip(p, q, strict=True)]
    cut = "" if len(a.ids) == len(b.ids) else f"Not compared past token {n - 1}, the last that both runs share."
    return Prediction(np.arange(n), kl, p.argmax(axis=1) == q.argmax(axis=1), np.array(five), cut)


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
