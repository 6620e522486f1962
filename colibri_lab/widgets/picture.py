"""The explorer without a browser: three lines of text and a PNG, both kept in the notebook file for when no kernel
runs.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from colibri_lab.widgets._sheet import Sheet, visible
from colibri_lab.widgets.explorer_data import UNRANKED, UNRECORDED, ExplorerData
from colibri_lab.widgets.palette import INK, INK2, NO_SLOT, SUNK, cividis, expert_colours, ink_on

__all__ = ["explorer_png", "explorer_text"]

# All in pixels of the picture.
_WIDTH, _EDGE = 1200, 12
_LINE, _LINES = 38, 4  # of text, and how many are shown
_CHARACTER = 7.3
_MAPS_TALL = 340  # height that the experts share
_LOAD, _TOKENS, _BARS = (46, 240), (330, 700), (1062, 90)  # left edge and width
_MAP_TOKENS = 233  # token columns of 3 pixels

Selection = Mapping[str, int | None]


def explorer_text(data: ExplorerData, selection: Selection, title: str) -> str:
    """What the picture says, in three lines."""
    layer, token = selection["layer"], selection["token"]
    first = f"RoutingExplorer  {title}, layer {layer}"
    if token is None or layer is None:
        return f"{first}\nno token yet: nothing has run"
    return f"{first}\n{_token_line(data, layer, token)}\n{_load_line(data, layer)}"


def _token_line(data: ExplorerData, layer: int, token: int) -> str:
    here = data.cell(data.layers.index(layer), token)
    text = data.trace.texts[token]
    name = f"token {token} {repr(text) if text else visible(text, data.trace.ids[token])}"
    if here["flags"] & UNRECORDED:
        return f"{name}   expert ids not recorded"
    if here["flags"] & UNRANKED:
        return f"{name}   NaN or +Inf in its router logits: no ranking"
    held = [(e, g) for e, g in zip(here["ids"], here["gates"], strict=True) if e < data.experts]
    experts = ", ".join(f"{e} ({g:.2f})" if data.has_gates else str(e) for e, g in held)
    unit = "in score" if data.by_score[data.layers.index(layer)] else "in logits"
    margin = f"   margin {here['margin']:.2f} {unit}" if np.isfinite(here["margin"]) else ""
    return f"{name}   experts {experts}{margin}"


def _load_line(data: ExplorerData, layer: int) -> str:
    row = data.layers.index(layer)
    counts, total = data.load[row], max(1, int(data.recorded(row).sum()))
    busiest = np.lexsort((np.arange(data.experts), -counts.astype(np.int64)))[:3]
    shares = "  ".join(f"{e} ({100 * counts[e] / total:.0f} %)" for e in busiest)
    return f"busiest experts  {shares}   chance {100 * data.top_k / data.experts:.2g} %"


def explorer_png(data: ExplorerData, selection: Selection, title: str) -> bytes:
    """The view as a PNG 1200 pixels wide: text strip, load map, token map and load bars of the selected layer, light
    theme.
    """
    layer, token = selection["layer"], selection["token"]
    words = explorer_text(data, selection, title).split("\n")
    lines = [] if token is None else _text_lines(data, token)
    row = max(2, min(22, _MAPS_TALL // max(1, data.experts)))
    top = 66 + _LINE * len(lines) + 30
    sheet = Sheet(_WIDTH, top - 20 if token is None else top + row * data.experts + 40)
    sheet.text(_EDGE, 18, "Routing Explorer", size=15, bold=True)
    sheet.text(_EDGE + 150, 18, title, colour=INK2)
    sheet.text(_EDGE, 46, words[1], size=15)
    if layer is not None and token is not None:
        at = data.layers.index(layer)
        colours = expert_colours(data.load[at])
        _draw_text(sheet, data, at, token, lines, colours)
        _draw_load(sheet, data, at, top, row)
        _draw_tokens(sheet, data, at, token, top, row)
        _draw_bars(sheet, data, at, top, row, colours)
    return sheet.png()


def _text_lines(data: ExplorerData, token: int) -> list[list[tuple[int, str, float]]]:
    """Tokens around the selected one as lines of (token, word, width), broken where the text breaks and where a line is
    full.
    """
    lines: list[list[tuple[int, str, float]]] = [[]]
    used = 0.0
    texts = data.trace.texts
    for t in range(max(0, token - 200), min(data.tokens, token + 200)):
        word = visible(texts[t], data.trace.ids[t])[:24]
        width = max(26.0, _CHARACTER * len(word) + 6)
        if used + width > _WIDTH - 2 * _EDGE:
            lines.append([])
            used = 0.0
        lines[-1].append((t, word, width))
        used += width + 2
        if "\n" in texts[t]:
            lines.append([])
            used = 0.0
    lines = [line for line in lines if line]
    here = next(i for i, line in enumerate(lines) if line[0][0] <= token <= line[-1][0])
    first = max(0, min(here - _LINES // 2, len(lines) - _LINES))
    return lines[first : first + _LINES]


def _draw_text(
    sheet: Sheet,
    data: ExplorerData,
    at: int,
    token: int,
    lines: list[list[tuple[int, str, float]]],
    colours: list[str],
) -> None:
    ids = data.ids(at)
    colour = [*colours, NO_SLOT]  # the last one for -1, not recorded
    second = 1 if data.top_k > 1 and data.experts <= 8 else 0
    for i, line in enumerate(lines):
        x, y = float(_EDGE), 66 + _LINE * i
        for t, word, width in line:
            held = [int(e) for e in ids[t] if e >= 0] or [-1]
            expert = held[0]
            sheet.fill(x, y, width, 18, colour[expert], 0.24)
            sheet.fill(x, y + 17, width, 3, colour[held[min(second, len(held) - 1)]])
            sheet.text(x + width / 2, y + 9, word, mono=True, align="center", size=12)
            sheet.text(x + width / 2, y + 27, str(expert) if expert >= 0 else "?", align="center", size=11)
            if t == token:
                sheet.frame(x, y - 1, width, 35)
            x += width + 2


def _expert_axis(sheet: Sheet, data: ExplorerData, x: float, top: float, row: int) -> None:
    step = max(1, 2 ** int(np.ceil(np.log2(16 / row))))
    for expert in range(0, data.experts, step):
        sheet.text(x - 6, top + (expert + 0.5) * row, str(expert), colour=INK2, align="right", size=11)


def _draw_load(sheet: Sheet, data: ExplorerData, at: int, top: float, row: int) -> None:
    counted = np.maximum(1, data.overview()["counted"])[:, None]
    share = (data.load / counted).T
    high = min(max(float(share.max()), 1e-9), 4 * data.top_k / data.experts)
    x, width = _LOAD
    cell = min(34.0, width / len(data.layers))
    sheet.text(x, top - 14, "Load: layer × expert", bold=True)
    sheet.image(x, top, cell * len(data.layers), row * data.experts, np.where(share > 0, share, np.nan), 0.0, high)
    _expert_axis(sheet, data, x, top, row)
    step = max(1, int(np.ceil(30 / cell)))
    for i in range(0, len(data.layers), step):
        sheet.text(
            x + (i + 0.5) * cell,
            top + row * data.experts + 11,
            str(data.layers[i]),
            colour=INK2,
            align="center",
            size=12,
        )
    if cell >= 22 and row >= 14:
        colours = ["#" + rgb.tobytes().hex() for rgb in cividis()[::-1]]
        for i in range(len(data.layers)):
            for expert in range(data.experts):
                n = int(data.load[i, expert])
                ink = ink_on(colours[round(255 * min(1.0, share[expert, i] / high))]) if n else INK
                middle = x + (i + 0.5) * cell, top + (expert + 0.5) * row
                sheet.text(*middle, str(n), colour=ink, align="center", size=11)
    sheet.frame(x + at * cell, top - 1, cell, row * data.experts + 2)


def _draw_tokens(sheet: Sheet, data: ExplorerData, at: int, token: int, top: float, row: int) -> None:
    shown = min(data.tokens, _MAP_TOKENS)
    start = max(0, min(token - shown // 2, data.tokens - shown))
    x, width = _TOKENS
    cell = min(30.0, width / shown)
    tall = row * data.experts
    block = data.block(at)
    flags = block["flags"][start : start + shown]
    strange = np.flatnonzero(flags & (UNRANKED | UNRECORDED))
    grid = np.full((data.experts, shown), np.nan)
    for i in np.flatnonzero((flags & (UNRANKED | UNRECORDED)) == 0):
        ids, gates = block["ids"][start + i], block["gates"][start + i]
        held = ids < data.experts  # slots with an expert
        grid[ids[held], i] = np.abs(gates[held]) if data.has_gates else data.gate_top / 2  # one colour: chosen
    sheet.fill(x, top, cell * shown, tall, SUNK)
    sheet.image(x, top, cell * shown, tall, grid, -0.1 * data.gate_top, data.gate_top)
    for i in strange:
        sheet.fill(x + (i + 0.25) * cell, top, cell / 2, tall, "#d5d8dd")
        sheet.text(x + (i + 0.5) * cell, top + tall / 2, "×", bold=True, align="center")
    cut = f" · tokens {start}–{start + shown - 1} of {data.tokens:,}" if shown < data.tokens else ""
    odd = f" · × no ranking ({len(strange)})" if len(strange) else ""
    what = "gate strength" if data.has_gates else "chosen (gates not recorded)"
    sheet.text(x, top - 14, f"Layer {data.layers[at]}: token × expert, {what}{cut}{odd}", bold=True)
    _expert_axis(sheet, data, x, top, row)
    step = next(s for s in (1, 2, 5, 10, 20, 50) if s * cell >= 42)
    for t in range(-(-start // step) * step, start + shown, step):
        sheet.text(x + (t - start + 0.5) * cell, top + tall + 11, str(t), colour=INK2, align="center", size=11)
    sheet.frame(x + (token - start) * cell, top - 1, cell, tall + 2)


def _draw_bars(sheet: Sheet, data: ExplorerData, at: int, top: float, row: int, colours: list[str]) -> None:
    share = data.load[at] / max(1, int(data.recorded(at).sum()))
    chance = data.top_k / data.experts
    x, width = _BARS
    scale = width / max(float(share.max()), 2 * chance)
    thick = 12 if row >= 16 else 0.8 * row
    sheet.text(x, top - 14, f"Load, layer {data.layers[at]}", bold=True)
    for expert in range(data.experts):
        if share[expert]:
            sheet.fill(x, top + (expert + 0.5) * row - thick / 2, share[expert] * scale, thick, colours[expert])
        if row >= 14:
            sheet.text(
                _WIDTH - _EDGE, top + (expert + 0.5) * row, f"{100 * share[expert]:.0f} %", align="right", size=12
            )
    sheet.dashes(x + chance * scale, top - 3, top + row * data.experts + 3)
    sheet.text(x, top + row * data.experts + 11, f"chance {100 * chance:.2g} %", size=12)
