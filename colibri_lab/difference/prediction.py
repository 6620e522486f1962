"""What the differences do to the next-token distributions, compared only while both read the same tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.difference.pair import Pair
from colibri_lab.difference.result import Prediction

__all__ = ["predict"]

_BEST = 5


def predict(pair: Pair) -> Prediction | None:
    """KL(A ‖ B) in nats at each position of the common prefix, and whether the likeliest tokens agree; None when one
    side has no logits.

    The logits at position t depend on tokens 0 to t, so the last position compared is the last of the common prefix.
    KL = Σ p_A (ln p_A − ln p_B) in float64, at least 0; NaN where a row holds a NaN or +Inf, inf where B excludes
    (−Inf) a token that A allows.
    """
    if not pair.has("logits"):
        return None
    positions = [np.empty(0, np.int64)]
    kl, same, agreement = [np.empty(0)], [np.empty(0, np.bool_)], [np.empty(0)]
    for block in pair.blocks("logits"):
        positions.append(block.tokens)
        a, b = _log_softmax(block.a), _log_softmax(block.b)
        with np.errstate(invalid="ignore"):
            p = np.exp(a)
            terms = np.where(p > 0, p * (a - b), 0.0)
            total = np.where(np.isnan(a).any(axis=1) | np.isnan(b).any(axis=1), np.nan, terms.sum(axis=1))
        kl.append(np.where(np.isnan(total), np.nan, np.maximum(total, 0.0)))
        same.append(a.argmax(axis=1) == b.argmax(axis=1))
        agreement.append(_overlap(a, b))
    ids_a, ids_b, n = pair.a.ids, pair.b.ids, pair.n
    cut = ""
    if n < min(len(ids_a), len(ids_b)):
        cut = f"the tokens differ from row {n} on, and logits are compared only while both have read the same tokens"
    elif n < max(len(ids_a), len(ids_b)):
        cut = f"{'A' if n == len(ids_a) else 'B'} ends after {n} tokens"
    return Prediction(
        np.concatenate(positions), np.concatenate(kl), np.concatenate(same), np.concatenate(agreement), cut
    )


def _log_softmax(logits: NDArray[Any]) -> NDArray[np.float64]:
    z = logits.astype(np.float64)
    with np.errstate(invalid="ignore"):
        d = z - z.max(axis=1, keepdims=True)
        return np.asarray(d - np.log(np.exp(d).sum(axis=1, keepdims=True)))


def _overlap(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """Share of A's likeliest tokens that are among B's."""
    best = min(_BEST, a.shape[1])
    top_a, top_b = (np.argpartition(-x, best - 1, axis=1)[:, :best] for x in (a, b))
    return np.asarray((top_a[:, :, None] == top_b[:, None, :]).any(axis=2).mean(axis=1))
