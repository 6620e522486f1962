"""CacheLab without a browser: a few lines of text and a PNG, both kept in the notebook file for when no kernel runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from colibri_lab.widgets._sheet import Sheet
from colibri_lab.widgets.cache_data import CacheData
from colibri_lab.widgets.palette import INK2

__all__ = ["cache_png", "cache_text"]

_WIDTH, _EDGE = 1200, 12  # pixels


def cache_text(data: CacheData, setting: Mapping[str, Any], selection: Mapping[str, Any]) -> str:
    """What the setting does, in a few lines."""
    first = f"CacheLab  {data.title()}"
    if not data.trace.ids:
        return f"{first}\nno token yet: nothing has run"
    return first


def cache_png(data: CacheData, setting: Mapping[str, Any], selection: Mapping[str, Any]) -> bytes:
    """The view as a PNG 1200 pixels wide, light theme."""
    sheet = Sheet(_WIDTH, 60)
    sheet.text(_EDGE, 18, "Cache Lab", size=15, bold=True)
    sheet.text(_EDGE + 100, 18, data.title(), colour=INK2)
    return sheet.png()
