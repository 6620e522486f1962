"""Sick copies of the bundled model: what notebook 04 diagnoses. Weights are replaced in memory, no file is written."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.errors import ArgumentError, is_whole
from colibri_lab.model import Model, open

__all__ = ["patient"]

Replace = Callable[[str], NDArray[Any]]
Weights = dict[str, NDArray[Any]]

_SIGNALLING = np.uint16(0x7F81)  # a bfloat16 NaN whose first fraction bit is 0


def _element(weights: Replace, name: str, index: int | tuple[int, ...], value: float) -> Weights:
    array = weights(name)
    array[index] = value
    return {name: array}


def _one(weights: Replace) -> Weights:
    return _element(weights, "layers.2.moe.experts.1.down", (40, 9), np.nan)


def _two(weights: Replace) -> Weights:
    return _element(weights, "layers.2.attn_norm", 17, np.nan)


def _three(weights: Replace) -> Weights:
    return _scaled(weights, "layers.4.moe.experts.3.", 13)


def _four(weights: Replace) -> Weights:
    head = weights("lm_head")
    head.view(np.uint16)[61, 5] = _SIGNALLING
    return _element(weights, "layers.3.moe.experts.4.up", (100, 5), np.inf) | {"lm_head": head}


def _five(weights: Replace) -> Weights:
    return _element(weights, "layers.1.attn.v", (3, 7), -np.inf)


def _six(weights: Replace) -> Weights:
    return _scaled(weights, "layers.5.moe.experts.2.", 14) | _scaled(weights, "layers.3.moe.experts.5.", 14)


def _scaled(weights: Replace, expert: str, power: int) -> Weights:
    """up · 2^power and down / 2^power: exact in a binary format, so float32 computes the same output bit for bit."""
    up, down = weights(expert + "up"), weights(expert + "down")
    factor = up.dtype.type(2.0**power)
    return {expert + "up": up * factor, expert + "down": down / factor}


_DISEASES: dict[int, Callable[[Replace], Weights]] = {1: _one, 2: _two, 3: _three, 4: _four, 5: _five, 6: _six}


def patient(number: int) -> Model:
    """The bundled model with disease `number` (1 to 6). The same object when asked again.

    Raises ArgumentError for a patient that does not exist.
    """
    if not is_whole(number) or number not in _DISEASES:
        raise ArgumentError(f"there are patients 1 to {len(_DISEASES)}, and no patient {number!r:.40}")
    return _sick(int(number))


@cache
def _sick(number: int) -> Model:
    healthy = open()
    return healthy.with_weights(_DISEASES[number](lambda name: np.array(healthy.weights[name])))
