"""What a reader of a simulation must know of the trace that it is of."""

from __future__ import annotations

import numpy as np

from colibri_lab.cache.requests import Passes, passes_known
from colibri_lab.trace import Trace

_TAPS = {"router_logits": "router logits", "scores": "router scores", "gates": "gates"}
_NUMBERS = 1 << 20  # looked at in one step


def notes_of(trace: Trace, passes: Passes) -> tuple[str, ...]:
    """Sentences: the tokens whose experts no model chose, passes that nobody recorded. Reads the routers' numbers."""
    return tuple(note for note in (_no_choice(trace), _not_recorded(trace, passes)) if note)


def _not_recorded(trace: Trace, passes: Passes) -> str:
    if not isinstance(passes, str) or passes_known(trace):
        return ""
    return (
        "The passes of this recording are not known: each token is counted on its own, as in decode (a list of token "
        "counts, passes=[…], says them)."
    )


def _no_choice(trace: Trace) -> str:
    """How many tokens have a router whose numbers are not finite, where the trace holds any."""
    for tap, words in _TAPS.items():
        if not _layers(trace, tap):
            continue
        count = not_finite(trace, tap)
        if not count:
            return ""
        have, whose = ("has", "its") if count == 1 else ("have", "their")
        return (
            f"{count:,} of {trace.n_tokens:,} tokens {have} {words} that are not finite: {whose} experts are the tie "
            "rule's, not the model's; lab.nan.find (colibri-lab nan) says why."
        )
    return ""


def _layers(trace: Trace, tap: str) -> list[int]:
    return [layer for layer in trace.moe_layers if f"layers.{layer}.moe.{tap}" in trace]


def not_finite(trace: Trace, tap: str = "router_logits") -> int:
    """Tokens for which a router's numbers went wrong in some layer: the largest is NaN or infinite; 0 without any."""
    layers = _layers(trace, tap)
    count, step = 0, max(1, _NUMBERS // max(1, trace.num_experts))
    for start in range(0, trace.n_tokens, step):
        rows = slice(start, start + step)
        found = np.zeros(len(range(*rows.indices(trace.n_tokens))), bool)
        for layer in layers:
            values = trace[f"layers.{layer}.moe.{tap}"][rows]
            if values.dtype.kind != "f":
                values = values.astype(np.float32)
            # a single −inf is how a router masks an expert, so the largest decides, which is NaN if any is
            bad = ~np.isfinite(values.max(axis=1, initial=-np.inf))
            found |= bad & (trace[f"layers.{layer}.moe.expert_ids"][rows] >= 0).any(axis=1)
        count += int(found.sum())
    return count
