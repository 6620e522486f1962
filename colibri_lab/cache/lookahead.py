"""Next-layer look-ahead: what the router of the next MoE layer would choose from the state one MoE layer earlier.

The state is h, the residual stream with the attention of MoE layer l added, as layer l's block reads it: the last state
that is known before the experts of layer l run, so that those of the next MoE layer can be fetched while they compute.
h goes through the norm and the router of the *next* MoE layer, and the best by its logits are the guess. What is
missing from h are the outputs of layer l's experts and the next attention (and dense layers that lie between).

Applying the next layer's gate to an earlier hidden state, which the residual stream keeps near to the later one, is the
speculative loading of Eliseev and Mazur (arXiv 2312.17238). That the state is one known while the layer still computes,
so that reading overlaps with it, is also how arXiv 2603.19289 guesses. The first MoE layer has no earlier state of this
kind, so there is no guess for it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.cache.plans import Plan, checked_count
from colibri_lab.errors import ArgumentError, NotCapturedError
from colibri_lab.progress import Progress
from colibri_lab.trace import HasTrace, Trace, trace_of

Array = NDArray[Any]

_ROWS = 1024  # tokens worked on at a time


def look_ahead(
    session: Trace | HasTrace, count: int | None = None, *, model: Any = None, progress: Progress = None
) -> Plan:
    """The `count` experts (None: k) that each MoE layer's router would choose one MoE layer earlier.

    Reads the residual streams `embed` or `layers.*.output` and `layers.*.attn.out` of the run. When they were not
    captured, the tokens are run once more in a session of its own that keeps them, and `source` of the plan says so;
    the expert ids of the two runs are the same. `session`: a session, its trace, or a loaded trace with `model=` the
    model that made it.

    Best by router logit, equal ones by number; float64 from the float32 taps. −1 for the first MoE layer.
    Raises ArgumentError when there is no model, or a run with edits would have to be repeated; OutOfMemoryError.
    """
    trace = trace_of(session)
    model = trace.model if model is None else model
    if model is None or not hasattr(model, "weights"):
        raise ArgumentError("look_ahead computes with the model's weights: pass a live session, or model=")
    if (model.config.num_experts, list(model.config.moe_layers)) != (trace.num_experts, trace.moe_layers):
        raise ArgumentError(f"the trace is of another model than {model!r:.200}")
    width = checked_count(count, trace, trace.num_experts)
    taps = [tap for layer in trace.moe_layers[:-1] for tap in _taps(layer)]
    source = f"{_SOURCE} computed from the taps of the run itself."
    run = trace
    if not all(tap in trace for tap in taps):
        run = _again(trace, model, taps, progress)
        source = f"{_SOURCE} computed from a replay of the {trace.n_tokens} tokens in a session of its own."
    out = np.full((len(trace.moe_layers), trace.n_tokens, width), -1, np.int32)
    for row, (earlier, layer) in enumerate(zip(trace.moe_layers, trace.moe_layers[1:], strict=False), start=1):
        for start in range(0, trace.n_tokens, _ROWS):
            rows = slice(start, start + _ROWS)
            logits = router_logits(model, layer, state(run, earlier, rows))
            out[row, rows] = np.argsort(-logits, axis=1, kind="stable")[:, :width]
    return Plan("look_ahead", out, None, source)


_SOURCE = "The router of the next MoE layer on the residual stream that enters the experts of the one before,"


def state(run: Trace, layer: int, rows: slice = slice(None)) -> NDArray[np.float32]:
    """(rows, H) float32: the residual stream that enters a layer's feed-forward block, added as the engine adds it."""
    residual, attention = _taps(layer)
    return np.asarray(run[residual][rows] + run[attention][rows], np.float32)


def router_logits(model: Any, layer: int, h: Array) -> NDArray[np.float64]:
    """(rows, E) float64: h through the norm and the router of a layer. h (rows, H)."""
    wide = h.astype(np.float64)
    mean_square = np.mean(wide * wide, axis=1, keepdims=True)
    norm = wide / np.sqrt(mean_square + model.config.rms_norm_eps) * model.weights.float32(f"layers.{layer}.moe_norm")
    return np.asarray(norm @ model.weights.float32(f"layers.{layer}.moe.router").astype(np.float64).T)


def _taps(layer: int) -> tuple[str, str]:
    """What the residual stream inside a layer is the sum of: as it enters, and the output of attention."""
    return ("embed" if layer == 0 else f"layers.{layer - 1}.output"), f"layers.{layer}.attn.out"


def _again(trace: Trace, model: Any, taps: list[str], progress: Progress) -> Trace:
    """The same tokens in a session that keeps these taps."""
    if trace.meta["producer"] != "colibri-lab" or trace.meta.get("model_identity", model.identity) != model.identity:
        raise NotCapturedError(f"'{taps[0]}' was not recorded, and the model that is open did not make this trace")
    if trace.edits:
        raise NotCapturedError(
            f"'{taps[0]}' was not captured, and a run with edits is not repeated: capture {', '.join(taps[:2])} …, or "
            'capture="all"'
        )
    from colibri_lab.nan.replay import emulation_of, feed  # here: analyses of ids alone need nothing of it

    mode, emulation = trace.meta.get("gate_mode"), emulation_of(trace)
    session = model.session(taps, max_tokens=max(trace.n_tokens, 1), gate_mode=mode, emulate=emulation)
    feed(session, trace.ids, progress, "replay")
    return trace_of(session)
