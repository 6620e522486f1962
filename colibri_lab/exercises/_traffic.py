"""Recordings that caches of notebook 05 are tried on: made-up ones, and a run of the bundled model."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from colibri_lab.errors import ArgumentError, is_whole
from colibri_lab.exercises._ports import TEXT
from colibri_lab.model import open
from colibri_lab.trace import Trace

__all__ = ["diary", "traffic"]

_LAYERS, _EXPERTS, _K, _TOKENS = 4, 8, 2, 4000
_AGAIN = 0.7  # of the tokens of recording 3 ask for what the token before asked for


def traffic(number: int) -> Trace:
    """Recording `number` (1 to 3): 4 layers, 8 experts, 2 a token, 4,000 tokens, expert ids alone. The same bytes
    whenever it is asked for.

    Raises ArgumentError for a recording that does not exist.
    """
    if not is_whole(number) or not 1 <= number <= 3:
        raise ArgumentError(f"there are recordings 1 to 3, and no recording {number!r:.40}")
    return _recording(int(number))


@cache
def _recording(number: int) -> Trace:
    rng = np.random.default_rng([5, number])
    make = {1: _blind, 2: _uneven, 3: _steady}[number]
    arrays = {f"layers.{layer}.moe.expert_ids": make(rng).astype(np.int32) for layer in range(_LAYERS)}
    meta = {
        "producer": f"recording {number}", "producer_version": "1", "model_type": "made up",
        "num_hidden_layers": _LAYERS, "moe_layers": list(range(_LAYERS)), "num_experts": _EXPERTS, "top_k": _K,
        "gate_rule": "none", "passes": [[token, token + 1] for token in range(_TOKENS)], "edits": [],
    }  # fmt: skip
    return Trace(arrays, ids=[-1] * _TOKENS, texts=[], meta=meta)


def _blind(rng: np.random.Generator) -> NDArray[np.int64]:
    """(T, k): each token chooses as if by dice."""
    return rng.random((_TOKENS, _EXPERTS)).argsort(axis=1)[:, :_K]


def _uneven(rng: np.random.Generator) -> NDArray[np.int64]:
    """(T, k): each token by itself, some experts more often than others (Gumbel noise on fixed logits)."""
    logits = rng.permutation(np.linspace(0, 3, _EXPERTS))
    return (-(logits + rng.gumbel(size=(_TOKENS, _EXPERTS)))).argsort(axis=1)[:, :_K]


def _steady(rng: np.random.Generator) -> NDArray[np.int64]:
    """(T, k): all experts equally often in the long run, but a token mostly stays where the one before was."""
    fresh = _blind(rng)
    source = np.where(rng.random(_TOKENS) < _AGAIN, 0, np.arange(_TOKENS))
    return fresh[np.maximum.accumulate(source)]


@cache
def diary() -> Trace:
    """The run of notebook 05: the bundled model reads `lab.exercises.TEXT` and writes 400 tokens. Captures routing."""
    session = open().session(capture="routing")
    session.feed(TEXT)
    for _ in session.generate(400, temperature=0.8, seed=0, stop_ids=()):
        pass
    return session.trace()
