"""How far a difference reaches: which token rows of which taps can depend on a change made at one place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.difference.errors_of import TapError, tap_error
from colibri_lab.difference.flips import flipped
from colibri_lab.difference.pair import Pair
from colibri_lab.difference.taps import Tap

__all__ = ["Reach", "errors_apart_from_flips"]

_BEFORE_MIXING = ("attn.norm", "attn.q", "attn.k", "attn.v")


class Reach:
    """Token rows that a set of changes can have touched, while one goes through the taps in their order.

    A change in a row stays in its row until the attention of the next layer reads it: from there on it is in every row
    at or after it.
    """

    def __init__(self, tokens: int) -> None:
        self.rows: NDArray[np.bool_] = np.zeros(tokens, np.bool_)
        self._mixed = -1  # the last layer whose attention was passed

    def enter(self, tap: Tap) -> None:
        """To be called for each tap before its rows are looked at."""
        if tap.layer > self._mixed and tap.kind not in _BEFORE_MIXING:
            self._mixed = tap.layer
            if self.rows.any():
                self.rows[int(self.rows.argmax()) :] = True

    def add(self, tokens: NDArray[Any]) -> None:
        """A change of these rows, at the tap entered last."""
        self.rows[tokens] = True


def errors_apart_from_flips(pair: Pair) -> Iterator[tuple[Tap, TapError, NDArray[np.bool_]]]:
    """Every tap but expert ids with its error, and which of its rows no flip can have touched."""
    reach = Reach(pair.n)
    for tap in pair.taps():
        reach.enter(tap)
        if tap.kind == "moe.expert_ids":
            reach.add(flipped(pair, tap.layer))
            continue
        error = tap_error(pair.blocks(tap.path))
        yield tap, error, ~reach.rows[error.tokens]
