"""Values that are not finite in the record although the arithmetic gives finite ones: edits, memory nobody wrote, what
the watch table of the run knows, and what is left unknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.nan.causes_base import Operation, Where
from colibri_lab.nan.causes_origin import origin_of
from colibri_lab.nan.causes_words import Reason, number
from colibri_lab.nan.inner import Points
from colibri_lab.nan.result import Operand, Origin
from colibri_lab.nan.source import Birth, Source

__all__ = ["not_computed", "swallowed"]

Array = NDArray[Any]

POISON = 0x7FA5A5A5
"""What a test build of the engine fills its memory with: a signalling NaN that no arithmetic makes."""
_QUIET = 0x00400000  # the bit that arithmetic sets when it passes a signalling NaN on

_PATH = re.compile(r"layers\.\d+\.[\w.]+|\bembed\b|\bnorm\b")


def not_computed(
    birth: Birth, source: Source, points: Points, operation: Operation | None, inner: list[str], where: Where,
    held: Array, needs: tuple[str, ...],
) -> list[Origin]:  # fmt: skip
    """Origins of the values `where` of a tap, of which the arithmetic tells no reason."""
    found, rest = [], where
    words = operation.words if operation is not None else ""
    for edit in source.trace.edits:
        hit = np.isin(birth.tokens[rest[0]], _tokens(edit, birth.tokens)) & _touches(edit, birth.path, points)
        part, rest = _split(rest, hit)
        if len(part[0]):
            made = f"{edit.get('code', edit.get('kind', 'a change'))} (made {edit.get('made', 'in the run')})"
            reason = Reason("edit", made)
            found.append(origin_of(birth, source, birth.path, words, part, reason, made, float(held[part][0])))
    if operation is not None and len(rest[0]):
        watched = _watched(birth, source, points, inner, np.unique(rest[0]), True)
        if watched is not None:
            return [*found, watched]
    for reason, part in _reasons(birth, source, operation, rest, held, needs):
        found.append(origin_of(birth, source, birth.path, words, part, reason, reason.words, float(held[part][0])))
    return found


def _reasons(
    birth: Birth, source: Source, operation: Operation | None, rest: Where, held: Array, needs: tuple[str, ...]
) -> Iterator[tuple[Reason, Where]]:
    """(reason, values of the tap) of what the watch table does not know of."""
    bits = np.ascontiguousarray(held[rest], np.float32).view(np.uint32) & ~np.uint32(_QUIET)
    unwritten, rest = _split(rest, bits == POISON & ~_QUIET)
    if len(unwritten[0]):
        word = int(np.ascontiguousarray(held[unwritten][:1]).view(np.uint32)[0])
        words = f"0x{word:08X} is what memory holds that was never written, and {birth.path} has it"
        yield Reason("uninitialised", words, (Operand("found", float("nan"), bits=word),)), unwritten
    if not len(rest[0]):
        return
    came = number(held[rest][0])
    if operation is None:
        words = f"{birth.path} holds {came} and what it was made from is not all recorded"
        yield Reason("unknown", words, needs=needs), rest
        return
    first = tuple(axis[:1] for axis in rest)
    gives = number(operation.at(first)[1][0])
    words = (
        f"{operation.words} gives {gives} from what was recorded, and the record holds {came}: the arithmetic did not "
        "do what its definition says, or the values were changed afterwards"
    )
    yield Reason("unknown", words, needs=needs), rest


def swallowed(birth: Birth, source: Source, points: Points, inner: list[str]) -> list[Origin]:
    """The origin of what broke before a tap that is finite itself, when the arithmetic tells no reason."""
    found = _watched(birth, source, points, inner, np.arange(len(birth.tokens)), False)
    return [] if found is None else [found]


def _watched(
    birth: Birth, source: Source, points: Points, inner: list[str], rows: Array, broke: bool
) -> Origin | None:
    """An origin at the first point before the tap that the watch table saw break, at a token of these rows of the
    birth. `broke`: the tap is not finite there.
    """
    if source.watch is None:
        return None
    for point in inner:
        seen = source.watch.table[source.watch.table["point"] == point]
        hit = np.flatnonzero(birth.tokens[rows] == int(seen["token"][0])) if len(seen) else rows[:0]
        if len(hit) and seen["n_nan"][0] + seen["n_inf"][0]:
            operation = points.operation(point, birth.tokens)
            row, token = int(rows[hit[0]]), int(seen["token"][0])
            shape: tuple[int, ...] = operation.value.shape[1:]
            if point.endswith((".scores", ".weights")):  # there token t has t + 1 keys in each head
                shape = (*shape[:-1], token + 1)
            at = tuple(np.asarray([each]) for each in (row, *np.unravel_index(int(seen["index"][0]), shape)))
            reason = _of_watched(seen[0], broke)
            came = reason.operands[0].value
            origin = origin_of(birth, source, point, operation.words, at, reason, reason.words, came)
            every = tuple(int(token) for token in birth.tokens[rows])
            return replace(origin, tokens=every, n_values=int(seen["n_nan"][0] + seen["n_inf"][0]))
    return None


def _of_watched(seen: Any, broke: bool) -> Reason:
    point = str(seen["point"])
    n_nan, n_inf, n_down = (int(seen[name]) for name in ("n_nan", "n_inf", "n_negative_inf"))
    value = float("nan") if n_nan else float("-inf") if n_down else float("inf")
    operand = (Operand("found", value),)
    counted = f"{n_nan:,} NaN and {n_inf:,} Inf in {point}"
    if seen["n_signalling"]:
        return Reason("uninitialised", f"{int(seen['n_signalling']):,} signalling NaN in {point}, which no arithmetic "
                      "makes: memory that was never written", operand)  # fmt: skip
    if point.endswith(".attn.scores"):
        if broke and n_inf == n_down and not n_nan:
            return Reason("masked row", "all scores of the query are −Inf: it sees no key at all", operand)
        return Reason("scale", f"{counted}, while q · k is finite: what they are multiplied with is not", operand)
    return Reason("unknown", f"{counted}, while its definition gives finite numbers", operand)


def _touches(edit: Mapping[str, Any], path: str, points: Points) -> bool:
    """Whether an edit changes a tap. Without a shared expert, what a block returns is the gated sum itself."""
    said = str(edit.get("path") or next(iter(_PATH.findall(str(edit.get("code", "")))), ""))
    if path.endswith(".moe.routed") and not points.has_shared(path.removesuffix("moe.routed")):
        said = said.replace(".moe.output", ".moe.routed")
    return bool(said) and fnmatchcase(path, said)


def _tokens(edit: Mapping[str, Any], every: Array) -> Array:
    tokens = edit.get("tokens")
    return every if tokens is None else np.asarray(tokens, np.int64)


def _split(where: Where, hit: Array) -> tuple[Where, Where]:
    return tuple(axis[hit] for axis in where), tuple(axis[~hit] for axis in where)
