"""How much is kept, as the command line says it: experts in a cache, a share of all, or bytes."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

import numpy as np

from colibri_lab.errors import ArgumentError
from colibri_lab.trace import Trace

__all__ = ["capacities_of", "keys_of"]

_SAID = re.compile(r"(\d{1,18}(?:\.\d{1,9})?)\s*(%|[kMGT]?i?B)?", re.IGNORECASE)
_POWERS = "kmgt"


def keys_of(trace: Trace, scope: str) -> int:
    """How many experts could be in one cache."""
    return trace.num_experts * (1 if scope == "layer" else len(trace.moe_layers))


def capacities_of(said: str | None, trace: Trace, scope: str, size: Any) -> tuple[list[int], list[str]]:
    """Capacities in experts of one cache, ascending, and a line for each that was said otherwise.

    "16": experts in a cache; "60%": of all experts; "36MB": of memory for all caches together, in whole experts as
    large as the largest, which needs their size (an int or (Lm, E)). None: half. Raises ArgumentError for what is no
    capacity.
    """
    keys = keys_of(trace, scope)
    if said is None:
        return [max(trace.top_k, keys // 2)], []
    found: dict[int, None] = {}
    lines = []
    for part in (part.strip() for part in said.split(",")):
        number, unit = _read(part)
        capacity = number if unit == "" else _experts(part, number, unit, trace, scope, size)
        _check(part, int(capacity), trace.top_k, keys)
        found[int(capacity)] = None
        if unit:
            lines.append(_words(part, int(capacity), trace, scope, size))
    return sorted(found), lines


def _read(part: str) -> tuple[Decimal, str]:
    match = _SAID.fullmatch(part)
    if match is None or (match[2] is None and "." in match[1]):
        raise ArgumentError(
            f"capacities are whole numbers with commas between them, shares (60%) or bytes (36MB), not '{part:.40}'"
        )
    return Decimal(match[1]), (match[2] or "").lower()


def _experts(part: str, number: Decimal, unit: str, trace: Trace, scope: str, size: Any) -> int:
    if unit == "%":
        return int(number * keys_of(trace, scope) / 100)
    if size is None:
        raise ArgumentError(f"a capacity of {part} needs the size of an expert: --expert-bytes")
    one = int(np.max(size, initial=0))
    if one < 1:
        raise ArgumentError(f"a capacity of {part} needs experts of a byte or more, not {one}")
    power = _POWERS.index(unit[0]) + 1 if unit[0] in _POWERS else 0
    room = int(number * (1024 if "i" in unit else 1000) ** power)
    caches = len(trace.moe_layers) if scope == "layer" else 1
    return min(keys_of(trace, scope), room // (one * max(1, caches)))


def _check(part: str, capacity: int, k: int, keys: int) -> None:
    called = f"a capacity of {part}" if not part.isdigit() else f"a capacity of {capacity}"
    of = "" if part.isdigit() else f" ({capacity} experts in a cache)"
    if capacity < k:
        raise ArgumentError(f"{called}{of} is too small: a token asks for {k} at once; give --capacity {k} or more")
    if capacity > keys:
        raise ArgumentError(
            f"{called}{of} is more than there is to keep: a cache has {keys} experts to choose from; give --capacity "
            f"{keys} or less"
        )


def _words(part: str, capacity: int, trace: Trace, scope: str, size: Any) -> str:
    layers = len(trace.moe_layers)
    kept, every = capacity * (layers if scope == "layer" else 1), trace.num_experts * layers
    where = "each layer's cache" if scope == "layer" else "the cache of all layers"
    memory = "" if size is None else f", {kept * int(np.max(size, initial=0)):,} bytes at most"
    return f"{part}: {capacity:,} experts in {where}, {kept:,} of {every:,} in all{memory}."
