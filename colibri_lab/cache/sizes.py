"""How large the experts of a model are."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from colibri_lab.cache.requests import Whole

_EXPERT = re.compile(r"layers\.(\d+)\.moe\.experts\.(\d+)\.")


def expert_bytes(model: Any) -> Whole:
    """(Lm, E) bytes of the weights of every expert of an open model: its matrices as they are stored, and biases."""
    rows = {layer: row for row, layer in enumerate(model.config.moe_layers)}
    out = np.zeros((len(rows), model.config.num_experts), np.int64)
    for name in model.weights:
        if found := _EXPERT.match(name):
            out[rows[int(found[1])], int(found[2])] += model.weights[name].nbytes
    return out
