"""What a run says it changed itself, as places of the data's way."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from colibri_lab.difference.pair import Pair
from colibri_lab.difference.taps import Tap, parse

__all__ = ["OwnChange", "own_changes"]

_PATH = re.compile(r"layers\.\d+\.[\w.]+|\b(?:embed|norm|logits)\b")
_LAYER = re.compile(r"\(\s*(?:layer\s*=\s*)?(\d+)")


@dataclass(frozen=True)
class OwnChange:
    """One change: it can have touched all that is computed from `rank` on, in rows from `token` on."""

    side: str  # "A" or "B"
    rank: tuple[float, int]
    token: int
    words: str  # the line of code that made it

    def explains(self, tap: Tap, token: int) -> bool:
        """Whether a row of a tap can depend on it."""
        return tap.rank >= self.rank and token >= self.token


def own_changes(pair: Pair) -> list[OwnChange]:
    """The changes that only one of the two runs made; none when both made the same."""
    if pair.a.edits == pair.b.edits:
        return []
    return [_change(side, edit) for side, trace in (("A", pair.a), ("B", pair.b)) for edit in trace.edits]


def _change(side: str, edit: Any) -> OwnChange:
    """A change whose place cannot be read is taken to come first: it explains everything."""
    code = str(edit.get("code", edit)) if isinstance(edit, Mapping) else str(edit)
    tokens = edit.get("tokens") if isinstance(edit, Mapping) else None
    rank: tuple[float, int] = (-1.0, -1)
    path, layer = _PATH.search(code), _LAYER.search(code)
    tap = parse(path[0].rstrip(".")) if path else None
    if tap is None and layer is not None:
        tap = parse(f"layers.{layer[1]}.moe.router_logits")
    if tap is not None:
        rank = tap.rank
    return OwnChange(side, rank, min(tokens, default=0) if isinstance(tokens, list) else 0, code)
