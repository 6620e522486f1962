"""The requests that a trace makes of a cache of experts, as streams of keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from colibri_lab.errors import ArgumentError
from colibri_lab.routing.streaming import expert_ids
from colibri_lab.trace import Trace

Scope = Literal["layer", "global"]
Whole = NDArray[np.int64]



def streams(trace: Trace, scope: Scope) -> Iterator[slice]:
    """The rows of `trace.moe_layers` that share a cache, cache by cache."""
    if scope not in ("layer", "global"):
        raise ArgumentError(f"a cache is per 'layer' or 'global', not {scope!r:.80}")
    layers = len(trace.moe_layers)
    if scope == "layer":
        yield from (slice(row, row + 1) for row in range(layers))
    elif layers:
        yield slice(0, layers)


def keys_of(trace: Trace, rows: slice, tokens: slice) -> Whole:
    """(tokens, layers, k) keys of the requests of some layers: number of the layer among them · E + expert, or −1."""
    ids = np.stack([expert_ids(trace, layer, tokens) for layer in trace.moe_layers[rows]], axis=1)
    return np.where(ids >= 0, ids + np.arange(ids.shape[1])[:, None] * trace.num_experts, -1)
