"""Weights as culprits: which elements count as one origin, where they lie, and the sentence that says so."""

from __future__ import annotations

from collections import Counter
from pathlib import PurePath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.nan.causes_base import Weight
from colibri_lab.nan.causes_words import Reason, number
from colibri_lab.nan.result import WeightPlace
from colibri_lab.nan.source import Source

__all__ = ["coarse", "cut", "places_of"]

Named = tuple[str, tuple[int, ...]]
"""Name and element of a weight."""

_APART = 8  # bad elements of a row, or bad rows of a weight, that are told one by one; more of them are one origin


def cut(found: list[Named]) -> dict[Named, tuple[Any, ...]]:
    """To each element what it is told with: itself, its row, or its weight."""
    rows = Counter((name, index[:-1]) for name, index in found)
    of_weight = Counter(name for name, _ in rows)
    out: dict[Named, tuple[Any, ...]] = {}
    for name, index in found:
        whole, many = of_weight[name] > _APART, rows[name, index[:-1]] > _APART
        out[name, index] = (name,) if whole else (name, index[:-1]) if many else (name, index)
    return out


def coarse(flat: NDArray[np.int64], width: int) -> NDArray[np.int64]:
    """Of flat numbers of bad elements of a weight (−1: none) those that `cut` joins, as the first of them: of a ruined
    table nobody then asks for a reason a hundred thousand times. `width`: elements of a row.
    """
    out, bad = flat.copy(), np.flatnonzero(flat >= 0)
    rows = flat[bad] // width
    found = np.unique(rows)
    if len(found) > _APART:
        out[bad] = flat[bad[0]]
        return out
    for row in found:
        mine = bad[rows == row]
        if len(np.unique(flat[mine])) > _APART:
            out[mine] = flat[mine[0]]
    return out


def places_of(source: Source, reason: Reason, others: list[Named]) -> tuple[WeightPlace, str]:
    """(place, sentence after the kind) of a reason that names a weight; `others` are told apart from it."""
    assert reason.weight is not None
    name, index = reason.weight
    place = _place(source, reason, name, index)
    bits = f"0x{place.bits:0{4 if place.dtype.endswith('16') else 8}X}"
    sort = ", a signalling NaN" if place.signalling else ""
    words = f"{name}[{', '.join(map(str, index))}] is {number(place.value)} ({bits}{sort})"
    if place.file and place.offset is not None:
        words += f", in {place.file} at byte {place.offset:,}"
        if place.file_name not in ("", name):
            words += f" (there {place.file_name})"
    elif name in _replaced(source):
        words += ", put there in memory (model.with_weights)"
    words += _more(source, name, index, [other for other in others if other[0] == name])
    return place, f"{words}; {reason.words}" if reason.words else words


def _place(source: Source, reason: Reason, name: str, index: tuple[int, ...]) -> WeightPlace:
    operand = reason.operands[0]
    file, tensor, offset = "", "", None
    described = _described(source, name)
    if described is not None and described.file and name not in _replaced(source):
        file, tensor = PurePath(described.file).name, described.tensor
        flat = int(np.ravel_multi_index(index, described.shape))
        offset = int(described.file_offset) + flat * described.dtype.itemsize
    return WeightPlace(name, index, operand.value, operand.dtype, operand.pattern, file, offset, tensor)


def _replaced(source: Source) -> list[str]:
    return list(getattr(getattr(source.model, "weights", None), "replaced", []))


def _described(source: Source, name: str) -> Any:
    weights = getattr(source.model, "weights", None)
    if weights is None or not hasattr(weights, "describe"):
        return None
    if name == "lm_head" and name not in weights:
        name = "embed"  # tied
    return weights.describe(name)


def _more(source: Source, name: str, index: tuple[int, ...], told: list[Named]) -> str:
    """How many other elements are bad in the row, or in the weight when its rows are not told one by one."""
    array = source.weight(name)
    if array is None:
        return ""
    bad = Weight(name, array).bad
    rows = {other[1][:-1] for other in told}
    apart = len({other[1] for other in told if other[1][:-1] == index[:-1]})
    in_row = int(bad[index[:-1]].sum()) if len(index) > 1 else int(bad.sum())
    bad_rows = int(bad.reshape(len(bad), -1).any(1).sum())
    if len(index) > 1 and bad_rows > _APART and len(rows) == 1:
        return f", and {int(bad.sum()) - 1:,} more in this weight"
    if in_row > 1 and apart == 1:
        return f", and {in_row - 1:,} more in this {'row' if len(index) > 1 else 'weight'}"
    return ""
