"""All experts of a layer run on its recorded inputs, in float64: what the unchosen ones would have answered."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.errors import ArgumentError, TapError, nearest

__all__ = ["ACTIVATIONS", "Experts", "expert_weight"]

Floats = NDArray[np.float64]


def _silu(x: Floats) -> Floats:
    with np.errstate(over="ignore"):
        return np.asarray(x / (1 + np.exp(-x)))


def _gelu(x: Floats) -> Floats:
    return x * 0.5 * (1 + _erf(x / math.sqrt(2)))


def _gelu_tanh(x: Floats) -> Floats:
    return np.asarray(0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))


_erf: Callable[[Floats], Floats] = np.vectorize(math.erf, otypes=[np.float64])

ACTIVATIONS: dict[str, Callable[[Floats], Floats]] = {
    "silu": _silu,
    "swish": _silu,
    "gelu": _gelu,
    "gelu_pytorch_tanh": _gelu_tanh,
    "gelu_new": _gelu_tanh,
    "relu": lambda x: np.maximum(x, 0.0),
}
"""By the names that `hidden_act` has in a config."""


def expert_weight(weights: Mapping[str, Any], layer: int, expert: int, part: str) -> Floats:
    """One matrix in float64. Raises TapError naming it when the mapping does not have it."""
    name = f"layers.{layer}.moe.experts.{expert}.{part}"
    try:
        return np.asarray(weights[name]).astype(np.float64)
    except KeyError:
        raise TapError(f"the weights have no '{name}'{nearest(name, map(str, weights))}") from None


class Experts:
    """The experts of a layer as functions: output = down (act(gate x) · (up x)), biases where the mapping has them."""

    def __init__(self, weights: Mapping[str, Any], layer: int, count: int, activation: str) -> None:
        if activation not in ACTIVATIONS:
            raise ArgumentError(
                f"no activation is called {activation!r:.80}{nearest(str(activation), ACTIVATIONS)}; "
                f"there are {', '.join(ACTIVATIONS)}"
            )
        self._weights, self._layer, self._count = weights, layer, count
        self._act = ACTIVATIONS[activation]

    def __call__(self, x: Floats) -> Floats:
        """(E, rows, H) outputs of every expert, before any gate, for inputs (rows, H)."""
        out = np.empty((self._count, *x.shape))
        for expert in range(self._count):
            hidden = self._act(self._product(x, expert, "gate")) * self._product(x, expert, "up")
            out[expert] = self._product(hidden, expert, "down")
        return out

    def _product(self, x: Floats, expert: int, part: str) -> Floats:
        bias = f"layers.{self._layer}.moe.experts.{expert}.{part}.bias"
        out = x @ expert_weight(self._weights, self._layer, expert, part).T
        return out + np.asarray(self._weights[bias]).astype(np.float64) if bias in self._weights else out
