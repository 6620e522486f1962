"""The tracer without a browser: a few lines of text and a PNG, both kept in the notebook file for when no kernel
runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from colibri_lab.nan.result import Origin
from colibri_lab.widgets._sheet import Sheet, visible
from colibri_lab.widgets.nan_data import NanData
from colibri_lab.widgets.nan_tree import layer_of, mark_of, tap_name, token_words, tree
from colibri_lab.widgets.palette import INK, INK2, SUNK

__all__ = ["nan_png", "nan_text"]

_WIDTH, _EDGE = 1200, 12  # pixels
_LEFT, _TOP, _ROW = 184, 104, 20
_BAD, _WARN, _OK = "#b3261e", "#8a5a00", "#1b6e3c"
_LINE = 150  # characters
_BOXES, _LISTED = 430, 14  # pixels and lines for the way
_KEY = "· finite   ! under 2 bits left   _ many subnormals   × NaN   ▲ +Inf   ▼ −Inf   filled: origin; pale: passed on"
_MARKS = {"nan": "×", "+inf": "▲", "-inf": "▼"}


def nan_text(data: NanData, chosen: int) -> str:
    """What was born where, why, and what it ruined, in a few lines."""
    lines = [f"NanTracer  {data.title()}", f"{_word(data, chosen)}  {_where(data, chosen)}"]
    if data.found is not None:
        lines.append(_damage(data))
        more = len(data.found.origins) - 1
        lines += [f"independent origins: {more + 1:,}"] if more else []
    return "\n".join(line for line in lines if line)


def _word(data: NanData, chosen: int) -> str:
    return "✓ CLEAN" if data.found is None else data.origins[chosen].kind.upper()


def _where(data: NanData, chosen: int) -> str:
    if data.found is not None:
        origin = data.origins[chosen]
        return f"{_place(data, origin)}: {origin.cause}"
    row = data.closest()
    if row is None:
        return "nothing is NaN or Inf"
    facts = data.facts()["closest"]
    layer = "" if facts["layer"] is None else f"layer {facts['layer']}, "
    bits = float(facts["bits"])
    unit = "bit" if round(abs(bits), 1) <= 1 else "bits"
    return f"closest to overflow: {layer}{facts['name']}, {bits:.1f} {unit} in {data.facts()['format']}"


def _place(data: NanData, origin: Origin) -> str:
    trace = data.trace
    word = visible(trace.texts[origin.token], trace.ids[origin.token]) if trace is not None else ""
    layer = "" if origin.layer is None else f"layer {origin.layer}, "
    return f"{layer}{tap_name(origin.path)}, token {origin.token} {word}".rstrip()


def _damage(data: NanData) -> str:
    assert data.found is not None
    way = data.found.propagation
    if not way.ruined:
        return "no token is ruined by it"
    return f"ruined: {way.last} of {len(way.ruined):,} of {data.tokens:,} tokens ({token_words(way.ruined)})"


def nan_png(data: NanData, chosen: int, selection: Mapping[str, Any]) -> bytes:
    """The view as a PNG 1200 pixels wide: sentence, map, the steps from the origin; light theme."""
    layers = sorted({n for n in map(layer_of, data.paths) if n is not None})
    kinds = list(dict.fromkeys(_kind(path) for path in data.paths if layer_of(path) is not None))
    outside = [path for path in data.paths if layer_of(path) is None]
    rows = [*(p for p in outside if p == "embed"), *kinds, *(p for p in outside if p != "embed")]
    sheet = Sheet(_WIDTH, max(_TOP + _ROW * len(rows) + 34, 110))
    sheet.text(_EDGE, 18, "NaN Tracer", size=15, bold=True)
    sheet.text(_EDGE + 110, 18, data.title(), colour=INK2)
    word = _word(data, chosen)
    sheet.text(_EDGE, 44, word, size=14, bold=True, colour=_OK if data.found is None else _BAD)
    sheet.text(_EDGE + 12 + 10.5 * len(word), 44, _cut(_where(data, chosen)), size=13)
    if data.found is not None:
        sheet.text(_EDGE + 12 + 10.5 * len(word), 64, _cut(_damage(data)), size=13, bold=True)
    _draw_map(sheet, data, layers, rows, chosen, selection)
    _draw_way(sheet, data, len(layers), chosen)
    sheet.text(_EDGE, _TOP + _ROW * len(rows) + 18, _KEY, colour=INK2)
    return sheet.png()


def _kind(path: str) -> str:
    return path.split(".", 2)[2] if path.startswith("layers.") else path


def _cut(words: str, most: int = _LINE) -> str:
    line = "".join(c if c.isprintable() else "·" for c in words)
    return line if len(line) <= most else line[: most - 1] + "…"


def _cell_width(layers: int) -> float:
    return min(62.0, (_WIDTH - _LEFT - _EDGE) / max(1, layers))


def _draw_map(
    sheet: Sheet, data: NanData, layers: list[int], rows: list[str], chosen: int, selection: Mapping[str, Any]
) -> None:
    cell = _cell_width(len(layers))
    every = max(1, math.ceil(30 / cell))
    born = data.shown_at(data.origins[chosen].path) if data.origins else None
    places = {path: i for i, path in enumerate(data.paths)}
    for column, layer in enumerate(layers):
        if column % every == 0:
            sheet.text(_LEFT + (column + 0.5) * cell, _TOP - 10, str(layer), align="center", colour=INK2)
    for row, kind in enumerate(rows):
        y = _TOP + row * _ROW
        here = born is not None and _kind(born) == kind
        sheet.text(_LEFT - 8, y + _ROW / 2, ("▶ " if here else "") + kind, align="right", bold=here)
        columns = [(0, kind)] if kind in places else list(enumerate(f"layers.{layer}.{kind}" for layer in layers))
        for column, path in columns:
            if path in places:
                x = _LEFT + column * cell
                _draw_cell(sheet, data, places[path], x, y, cell)
                if path == selection["path"]:
                    sheet.frame(x, y, cell, _ROW)


def _draw_cell(sheet: Sheet, data: NanData, i: int, x: float, y: float, cell: float) -> None:
    row = data.table[i]
    state = str(row["state"])
    ink, fill, word = INK2, SUNK, "·"
    if state in ("origin", "passed"):
        word = _MARKS[_mark(data, i)]
        fill, ink = (INK, "#ffffff") if state == "origin" else ("#d7dade", INK)
    elif state == "near":
        fill, ink, word = "#efe6d6", _WARN, f"! {float(row['bits_left']):.1f}" if cell >= 40 else "!"
    elif state == "subnormal":
        word = "_"
    sheet.fill(x + 1, y + 1, cell - 2, _ROW - 2, fill)
    if cell >= 12:
        sheet.text(x + cell / 2, y + _ROW / 2, word, align="center", size=11, colour=ink)


def _mark(data: NanData, i: int) -> str:
    """The mark of a row: of its first origin, else what most of its values are."""
    row = data.table[i]
    for origin in data.origins:
        if str(row["state"]) == "origin" and data.is_of(data.paths[i], origin):
            return mark_of(origin.value) or "nan"
    if row["n_nan"] >= row["n_inf"]:
        return "nan"
    return "-inf" if 2 * row["n_negative_inf"] > row["n_inf"] else "+inf"


def _draw_way(sheet: Sheet, data: NanData, layers: int, chosen: int) -> None:
    """Beside a map that leaves room: the steps from the origin."""
    x = _LEFT + layers * _cell_width(layers) + 40
    if data.found is None or _WIDTH - x < _BOXES:
        return
    way = tree(data.found, chosen)
    sheet.text(x, _TOP - 10, "From the origin to the ruined logits", bold=True)
    for i, box in enumerate(way["boxes"][:_LISTED]):
        mark = f"{_MARKS[box['mark']]} " if box["mark"] else ""
        said = f"{mark}{box['title']}, {box['sub']}" + (f" ({box['label']})" if box["label"] else "")
        indent = 14 * box["column"]
        sheet.text(x + indent, _TOP + 12 + 20 * i, _cut(said, int((_WIDTH - x - indent) / 6.6)), bold=not i, size=11)
