"""Which taps a capture asks for, of those that a model has."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from colibri_lab._paths import matcher
from colibri_lab.errors import ArgumentError, nearest
from colibri_lab.trace import CAPTURE_LEVELS

__all__ = ["wanted"]

_ORDER = ("routing", "moe", "all")
_LAYER = re.compile(r"layers\.\d+\.")
_DISPATCH = re.compile(r"(layers\.\d+\.moe\.)dispatch\.(\w+)")


def wanted(capture: Any, paths: Iterable[str], num_experts: int) -> tuple[list[str], set[str]]:
    """(the patterns of `capture`, the paths they keep).

    "routing", "moe" and "all" as for sessions, except that `attn.k` and `attn.v` begin at "all" (there is no cache to
    look into), and patterns, in which `*` stands for any run of characters; `attn.weights` only when a pattern ends
    with `weights`. Raises ArgumentError for "none" and for a pattern that names no tap.
    """
    patterns = [capture] if isinstance(capture, str) else list(capture) if isinstance(capture, Iterable) else [capture]
    if not patterns or any(not isinstance(pattern, str) for pattern in patterns):
        raise ArgumentError(f"capture takes a level or a list of tap patterns, all texts; this is {capture!r:.80}")
    every, kept = list(paths), set[str]()
    for pattern in patterns:
        if pattern == "none":
            raise ArgumentError('capture "none" would record nothing; use "routing", "moe", "all" or tap patterns')
        found = {path for path in every if _keeps(pattern, path, num_experts)}
        if not found:
            raise ArgumentError(
                f'capture "{pattern}" names no tap of this model{nearest(pattern, [*_ORDER, *every])} '
                '(or use "routing", "moe", "all")'
            )
        kept |= found
    # Packed rows cannot be told apart without their tokens and offsets.
    for path in list(kept):
        packed = _DISPATCH.fullmatch(path)
        if packed:
            kept |= {f"{packed[1]}dispatch.tokens", f"{packed[1]}dispatch.offsets"}
    return patterns, kept


def _keeps(pattern: str, path: str, num_experts: int) -> bool:
    kind = _LAYER.sub("layers.{l}.", path)
    level = CAPTURE_LEVELS[kind]
    if pattern in _ORDER:
        own = "all" if level == "none" else level
        return own in _ORDER[: _ORDER.index(pattern) + 1]
    if level not in (*_ORDER, "none") and not pattern.endswith(path.rpartition(".")[2]):
        return False
    shape = matcher(pattern)
    packed = _DISPATCH.fullmatch(path)
    names = [path]
    if packed and packed[2] != "offsets":
        names += (f"{packed[1]}experts.{expert}.{packed[2]}" for expert in range(num_experts))
    return any(shape.fullmatch(name) for name in names)
