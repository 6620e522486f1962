"""Why values are born that are not finite: the first point inside the operation that broke, and what broke there.

`explain` computes the points between the recorded taps again with the engine's arithmetic. Where that gives NaN or Inf
as well, the operation itself tells why; where it does not, the record was changed by hand (an edit), holds memory that
nobody wrote, or the arithmetic did something else than its definition, of which the watch table of the run may tell.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.difference.formulas import Missing
from colibri_lab.nan.causes_base import Operation, Where
from colibri_lab.nan.causes_origin import origin_of
from colibri_lab.nan.causes_record import not_computed, swallowed
from colibri_lab.nan.causes_weights import cut, places_of
from colibri_lab.nan.causes_words import Reason
from colibri_lab.nan.inner import Points
from colibri_lab.nan.result import Origin
from colibri_lab.nan.source import Birth, Source

__all__ = ["explain"]

Array = NDArray[Any]

_ROWS = 64  # token rows of which each is asked for its reason; the others have that of the first of their sort


@dataclass
class _Group:
    """Values of one operation that broke for one reason. `where`: rows and indices, sorted."""

    reason: Reason
    where: Where
    came: float  # the first of them


def explain(birth: Birth, source: Source) -> list[Origin]:
    """The origins of what was born in a tap, in the order of the data's way, then of tokens."""
    points = Points(source)
    needs: dict[str, None] = {}
    found: list[Origin] = []
    inner_rows: set[int] = set()
    *inner, last = points.chain(birth.path)
    for point in inner:
        try:
            operation = points.operation(point, birth.tokens)
            born = ~np.isfinite(operation.value) & operation.ready()
        except Missing as missing:
            needs[str(missing)] = None
            continue
        where = np.nonzero(born)
        inner_rows |= set(where[0].tolist())
        found += _origins(birth, source, operation, _groups(operation, where, operation.value[where]))
    if not birth.mask.any():  # what broke was swallowed before it came to the tap
        return found or swallowed(birth, source, points, inner)
    return found + _in_tap(birth, source, points, last, inner, inner_rows, tuple(needs))


def _in_tap(
    birth: Birth, source: Source, points: Points, path: str, inner: list[str], inner_rows: set[int],
    needs: tuple[str, ...],
) -> list[Origin]:  # fmt: skip
    """What is born in the recorded tap itself."""
    held = points.rows(path, birth.tokens)
    mask = birth.mask.reshape(held.shape)
    if path.endswith(".attn.weights"):  # keys behind the last query are nobody's
        n_keys = int(birth.tokens[-1]) + 1
        held, mask = held[..., :n_keys], mask[..., :n_keys]
    try:
        operation = points.operation(path, birth.tokens)
        mask = mask & operation.ready()
    except Missing as missing:
        lacking = tuple(dict.fromkeys([*needs, str(missing)]))
        rest = mask.copy()
        rest[sorted(inner_rows)] = False
        return not_computed(birth, source, points, None, inner, np.nonzero(rest), held, lacking)
    where = np.nonzero(mask)
    broke = ~np.isfinite(operation.at(where)[1]) if len(where[0]) else np.zeros(0, bool)
    own = tuple(axis[broke] for axis in where)
    groups = _groups(operation, own, held[own])
    told = np.zeros(held.shape, bool)
    for group in groups:
        told[group.where] = True
    found = _origins(birth, source, operation, groups)
    return found + not_computed(birth, source, points, operation, inner, np.nonzero(mask & ~told), held, needs)


def _groups(operation: Operation, where: Where, came: Array) -> list[_Group]:
    """The broken values of an operation by what broke them."""
    if not len(where[0]):
        return []
    culprit = operation.culprits(where)
    sort = np.where(culprit >= 0, culprit, -1 - np.isnan(came).astype(np.int64))
    _, numbered = np.unique(where[0], return_inverse=True)
    row = np.where((culprit < 0) & (numbered < _ROWS), numbered, 0)
    _, first, label = np.unique(sort * _ROWS + row, return_index=True, return_inverse=True)
    found: dict[tuple[Any, ...], tuple[Reason, float, list[Array]]] = {}
    order = np.argsort(label, kind="stable")
    starts = np.searchsorted(label[order], np.arange(len(first)))
    members = np.split(order, starts[1:])
    for number in np.argsort(first, kind="stable").tolist():
        at = int(first[number])
        reason = operation.why(tuple(int(axis[at]) for axis in where), float(came[at]))
        if reason is not None:
            group = found.setdefault((reason.kind, reason.weight), (reason, float(came[at]), []))
            group[2].append(members[number])
    return [_Group(reason, tuple(axis[at] for axis in where), value) for reason, value, at in _capped(found)]


def _capped(found: dict[tuple[Any, ...], tuple[Reason, float, list[Array]]]) -> list[tuple[Reason, float, Array]]:
    """Many bad elements of one row of a weight, or many of its rows, as one; with the places of all, sorted."""
    merged = cut([reason.weight for reason, _, _ in found.values() if reason.weight is not None])
    out: dict[Any, tuple[Reason, float, list[Array]]] = {}
    for reason, value, parts in found.values():
        key = reason.kind, None if reason.weight is None else merged[reason.weight]
        out.setdefault(key, (reason, value, []))[2].extend(parts)
    return [(reason, value, np.sort(np.concatenate(parts))) for reason, value, parts in out.values()]


def _origins(birth: Birth, source: Source, operation: Operation, groups: list[_Group]) -> list[Origin]:
    """As the result tells them."""
    return sorted(_made(birth, source, operation, groups), key=lambda origin: (origin.token, origin.index))


def _made(birth: Birth, source: Source, operation: Operation, groups: list[_Group]) -> Iterator[Origin]:
    for group in groups:
        reason, weight, words = group.reason, None, group.reason.words
        if reason.weight is not None:
            told = [each.reason.weight for each in groups if each.reason.weight is not None]
            weight, words = places_of(source, reason, told)
        yield origin_of(birth, source, operation.point, operation.words, group.where, reason, words, group.came, weight)
