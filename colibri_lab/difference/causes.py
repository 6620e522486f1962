"""The first divergence in words: what can be told from the numbers of one tap alone."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.difference.errors_of import TapError
from colibri_lab.difference.pair import Pair, widened
from colibri_lab.difference.result import Values
from colibri_lab.difference.taps import Tap

__all__ = ["factor_between", "why"]

_ROWS = 4096  # rows looked at for a factor; a constant one shows in fewer


def why(pair: Pair, tap: Tap, error: TapError, beyond: NDArray[np.bool_], allowed: float) -> str:
    """One or two sentences: how large the difference is, and what it looks like."""
    rows = int(beyond.sum())
    size = f"B differs by {error.max_rel:.2g} of the largest value, where {allowed:.2g} is allowed"
    where = f"in {rows} of {len(beyond)} rows"
    return " ".join(part for part in (f"{size}, {where}.", _look(pair, tap, error, beyond)) if part)


def _look(pair: Pair, tap: Tap, error: TapError, beyond: NDArray[np.bool_]) -> str:
    values = _some(pair.rows(tap.path), beyond)
    a, b = widened(values.a), widened(values.b)
    a, b = a.reshape(len(a), -1), b.reshape(len(b), -1)
    nan_a, nan_b = ~np.isfinite(a), ~np.isfinite(b)
    if (nan_a != nan_b).any():
        side = "B" if (nan_b & ~nan_a).any() else "A"
        row, _ = np.argwhere(nan_a != nan_b)[0]
        return f"{side} holds NaN or infinity where the other does not, first at token {int(values.tokens[row])}."
    fine = ~(nan_a.any(axis=1) | nan_b.any(axis=1))
    a, b = a[fine], b[fine]
    if tap.kind == "moe.gates":
        return _of_gates(pair, tap, a, b)
    parts = []
    if tap.of_experts:
        parts.append(_by_expert(error, beyond))
    factor = factor_between(a, b)
    if factor is not None:
        parts.append(f"B is A times {factor:.6g} there.")
    return " ".join(filter(None, parts))


def factor_between(a: NDArray[np.float64], b: NDArray[np.float64]) -> float | None:
    """f when b = f · a to within 1/100 of their difference; None when there is no such factor."""
    whole = float(np.vdot(a, a))
    difference = float(np.abs(b - a).max(initial=0.0))
    if whole == 0 or difference == 0:
        return None
    factor = float(np.vdot(a, b)) / whole
    return factor if float(np.abs(b - factor * a).max()) < 0.01 * difference else None


def _of_gates(pair: Pair, tap: Tap, a: NDArray[np.float64], b: NDArray[np.float64]) -> str:
    if not len(a):
        return ""
    sum_a, sum_b = a.sum(axis=1), b.sum(axis=1)
    factor = factor_between(a, b)
    if factor is not None:
        return f"Ids are equal, gates differ by the factor {factor:.6g}."
    one_a, one_b = (np.allclose(total, 1, atol=1e-3) for total in (sum_a, sum_b))
    with np.errstate(divide="ignore", invalid="ignore"):
        left = np.abs(b / sum_b[:, None] - a / sum_a[:, None]).max()
        apart = np.abs(b - a).max()
    if left < 0.01 * apart and one_a != one_b:
        one, other = ("A", "B") if one_a else ("B", "A")
        return (
            f"Ids are equal, gates differ by one factor per token: in {one} the gates of a token add up to 1, in "
            f"{other} they do not (renormalised or not)."
        )
    if left < 0.01 * apart:
        return "Ids are equal, gates differ by one factor per token."
    return "Ids are equal, gates differ."


def _by_expert(error: TapError, beyond: NDArray[np.bool_]) -> str:
    """Which experts differ."""
    assert error.experts is not None
    every, odd = np.unique(error.experts), np.unique(error.experts[beyond])
    if len(odd) == len(every):
        return f"All {len(every)} experts with tokens differ." if len(every) > 1 else ""
    listed = ", ".join(map(str, odd[:8].tolist())) + (" …" if len(odd) > 8 else "")
    return f"Only expert{'s' * (len(odd) > 1)} {listed} of {len(every)} with tokens differ{'s' * (len(odd) == 1)}."


def _some(values: Values, beyond: NDArray[np.bool_]) -> Values:
    rows = np.flatnonzero(beyond)[:_ROWS]
    experts: Any = None if values.experts is None else values.experts[rows]
    return Values(values.path, values.tokens[rows], experts, values.a[rows], values.b[rows])
