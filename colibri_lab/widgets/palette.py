"""The views' colours in Python, for still pictures: the light theme of `static/common/palette.js` (a test keeps
the two equal).
"""

from __future__ import annotations

import re
from functools import cache

import numpy as np
from numpy.typing import NDArray

from colibri_lab.widgets._modules import static_text

__all__ = ["EXPERTS", "INK", "INK2", "NO_SLOT", "SELECTION", "SUNK", "cividis", "expert_colours", "ink_on"]

EXPERTS = ("#1077b8", "#9b5815", "#085336", "#cb7188", "#399eb7", "#8f8c3b", "#431e7b", "#636a78")
"""Blue, brown-orange, green, rose, sky, olive-gold, violet, slate."""
NO_SLOT = "#9aa0a8"
"""Experts beyond the eight busiest."""
SELECTION = "#d6006c"
INK, INK2, SUNK = "#212121", "#616161", "#f5f6f8"


def expert_colours(load: NDArray[np.unsignedinteger]) -> list[str]:
    """One colour per expert of a layer with tokens per expert `load` (E,): by number up to eight experts, else for the
    busiest eight.
    """
    if len(load) <= len(EXPERTS):
        return list(EXPERTS[: len(load)])
    busiest = np.lexsort((np.arange(len(load)), -load.astype(np.int64)))[: len(EXPERTS)]
    colours = [NO_SLOT] * len(load)
    for colour, expert in zip(EXPERTS, busiest, strict=True):
        colours[int(expert)] = colour
    return colours


def ink_on(colour: str) -> str:
    """Black or white, whichever keeps 4.5 : 1 on a colour."""
    rgb = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
    return "#111111" if 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] > 0.19 else "#ffffff"


@cache
def cividis() -> NDArray[np.uint8]:
    """(256, 3), red, green and blue from dark to bright: the table of `palette.js`, which is written once, there."""
    table = "".join(re.findall(r'^  "([0-9a-f]+)"', static_text("common", "palette.js"), flags=re.MULTILINE))
    return np.frombuffer(bytes.fromhex(table), np.uint8).reshape(256, 3)
