"""The next token from a row of logits. All arithmetic is float64; the same seed gives the same token everywhere."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.errors import ArgumentError, NonFiniteError, is_number, is_whole

__all__ = ["check_options", "sample"]


def check_options(temperature: float, top_k: int, top_p: float) -> None:
    """Raises ArgumentError, with the valid range, for an option outside it."""
    for name, value in (("temperature", temperature), ("top_p", top_p)):
        if not is_number(value):
            raise ArgumentError(f"{name} is {value!r:.80}; it must be a number")
    if not is_whole(top_k):
        raise ArgumentError(f"top_k is {top_k!r:.80}; it must be a whole number, 0 (all tokens) or more")
    if not 0 <= temperature <= sys.float_info.max:
        raise ArgumentError(f"temperature is {temperature}; it must be 0 (greedy) or a positive number")
    if top_k < 0:
        raise ArgumentError(f"top_k is {top_k}; it must be 0 (all tokens) or a positive number")
    if not 0 < top_p <= 1:
        raise ArgumentError(f"top_p is {top_p}; it must lie above 0 and be at most 1 (all tokens)")


def sample(
    logits: NDArray[Any],
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    rng: np.random.Generator,
) -> tuple[int, float]:
    """(id, logprob) of the next token for one row of logits (V,).

    Temperature 0 takes the largest logit, ties to the lower id. Otherwise p = softmax(logits / temperature), cut to the
    `top_k` likeliest tokens (0: all) and then to the smallest set of likeliest tokens whose share of what is left
    reaches `top_p`; order and cuts break ties to the lower id. `logprob` is ln softmax(logits) of the chosen id at
    temperature 1 and without cuts, in nats: how likely the model itself held it. −Inf excludes a token.
    Raises NonFiniteError, naming the first index, for NaN or +Inf, or when every token is excluded; ArgumentError for
    an option out of range.
    """
    check_options(temperature, top_k, top_p)
    z = np.asarray(logits, np.float64)
    if z.ndim != 1 or z.size == 0:
        raise ArgumentError(f"logits have the shape {z.shape}; one row (V,) is needed")
    bad = np.isnan(z) | (z == np.inf)
    if bad.any():
        first = int(bad.argmax())
        raise NonFiniteError(
            f"{int(bad.sum())} of {z.size} logits are NaN or +Inf, the first is {z[first]} at id {first}; "
            "lab.nan.find(session) tells where they were born"
        )
    largest = z.max()
    if largest == -np.inf:
        raise NonFiniteError(f"all {z.size} logits are -Inf: no token is possible; lab.nan.find(session) tells why")
    shifted = z - largest
    log_total = math.log(float(np.exp(shifted).sum()))
    chosen = int(z.argmax()) if temperature == 0 else _draw(shifted, float(temperature), int(top_k), float(top_p), rng)
    return chosen, float(shifted[chosen]) - log_total


def _draw(shifted: NDArray[np.float64], temperature: float, top_k: int, top_p: float, rng: np.random.Generator) -> int:
    """One draw from the cut distribution; `shifted` is logits minus their maximum."""
    order = np.argsort(-shifted, kind="stable")
    if top_k:
        order = order[:top_k]
    with np.errstate(over="ignore"):  # a tiny temperature sends the others to −Inf, as it should
        p = np.exp(shifted[order] / temperature)
    order, p = order[p > 0], p[p > 0]
    cumulative = np.cumsum(p / p.sum())
    if top_p < 1:
        keep = min(int(np.searchsorted(cumulative, top_p)) + 1, len(order))
        cumulative = cumulative[:keep]
    place = np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right")
    return int(order[min(int(place), len(cumulative) - 1)])
