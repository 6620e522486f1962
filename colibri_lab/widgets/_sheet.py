"""A sheet to draw a still picture on, for when no kernel runs, and a token as one word."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.widgets.palette import INK, SELECTION, cividis

__all__ = ["Sheet", "visible"]


def visible(text: str, token_id: int) -> str:
    """A token as one word: leading and trailing spaces as dots, line ends as arrows; without a text its id, and a
    question mark when that is not known either (−1).
    """
    if not text:
        return f"‹{token_id if token_id >= 0 else '?'}›"
    inner = text.strip(" ")
    left = len(text) - len(text.lstrip(" "))
    right = len(text) - left - len(inner)
    shown = "·" * left + inner + "·" * max(0, right)
    return "".join({"\n": "↵", "\t": "→", "\r": "␍"}.get(c, c if c.isprintable() else "␣") for c in shown)


class Sheet:
    """One picture of `width` × `height` pixels with one coordinate system, pixels from the top left.

    Drawn with Pillow, for the first view of a notebook waits for it, and loading matplotlib takes longer than
    everything else together.
    """

    def __init__(self, width: int, height: int) -> None:
        from PIL import Image, ImageDraw

        self._image = Image.new("RGB", (width, height), "white")
        self._draw = ImageDraw.Draw(self._image, "RGBA")

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: int = 12,
        colour: str = INK,
        align: str = "left",
        bold: bool = False,
        mono: bool = False,
    ) -> None:
        """One line, centred on `y`; `size` in pixels."""
        name = "DejaVuSansMono" if mono else "DejaVuSans-Bold" if bold else "DejaVuSans"
        anchor = {"left": "lm", "center": "mm", "right": "rm"}[align]
        shown = words.replace("␣", "·").replace("␍", "↵")  # not in the font for code
        self._draw.text((x, y), shown, fill=colour, font=_font(name, size), anchor=anchor)

    def fill(self, x: float, y: float, w: float, h: float, colour: str, alpha: float = 1.0) -> None:
        """A filled rectangle, at least one pixel wide and high."""
        left, top = round(x), round(y)
        corner = max(left, round(x + w) - 1), max(top, round(y + h) - 1)
        self._draw.rectangle((left, top, *corner), fill=colour + f"{round(255 * alpha):02x}")

    def frame(self, x: float, y: float, w: float, h: float) -> None:
        """An outline in the selection's colour."""
        self._draw.rectangle((round(x), round(y), round(x + w) - 1, round(y + h) - 1), outline=SELECTION, width=2)

    def line(self, points: Sequence[tuple[float, float]], colour: str, width: int) -> None:
        """A line through points; one point alone is a dot."""
        if len(points) == 1:
            self.fill(points[0][0] - width, points[0][1] - width, 2 * width, 2 * width, colour)
        self._draw.line([(round(x), round(y)) for x, y in points], fill=colour, width=width, joint="curve")

    def dashes(self, x: float, top: float, bottom: float) -> None:
        """A dashed upright line."""
        for y in range(round(top), round(bottom), 5):
            self.fill(x, y, 1, 3, INK)

    def image(self, x: float, y: float, w: float, h: float, cells: NDArray[Any], low: float, high: float) -> None:
        """Cells on the cividis scale, strong is dark; NaN cells are left open."""
        from PIL import Image

        open_cells = np.isnan(cells)
        strength = np.clip((np.where(open_cells, low, cells) - low) / (high - low), 0, 1)
        colours = cividis()[255 - np.round(255 * strength).astype(np.intp)]
        pixels = np.dstack([colours, np.where(open_cells, 0, 255).astype(np.uint8)])
        picture = Image.fromarray(pixels).resize((max(1, round(w)), max(1, round(h))), Image.Resampling.NEAREST)
        self._image.paste(picture, (round(x), round(y)), picture)

    def png(self) -> bytes:
        """The sheet as a PNG file's bytes."""
        out = io.BytesIO()
        self._image.save(out, format="PNG", compress_level=4)
        return out.getvalue()


@lru_cache
def _font(name: str, size: int) -> Any:
    """A font that matplotlib ships (found without importing it); Pillow's own where it is not there."""
    from PIL import ImageFont

    package = find_spec("matplotlib")
    for folder in (package.submodule_search_locations or ()) if package else ():
        with contextlib.suppress(OSError):
            return ImageFont.truetype(f"{folder}/mpl-data/fonts/ttf/{name}.ttf", size)
    return ImageFont.load_default(size)
