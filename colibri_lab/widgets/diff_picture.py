"""The comparison without a browser: a few lines of text and a PNG, both kept in the notebook file for when no kernel
runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from colibri_lab.difference.result import Diff
from colibri_lab.widgets._sheet import Sheet, visible
from colibri_lab.widgets.diff_data import DiffData, kind_of, layer_of
from colibri_lab.widgets.palette import INK, INK2, SUNK, cividis, ink_on

__all__ = ["diff_png", "diff_text", "title"]

MARKS = {"identical": "= SAME", "tie": "≈ TIE", "defect": "✗ DEFECT", "downstream": "↓ DOWNSTREAM"}
_WIDTH, _EDGE = 1200, 12  # pixels
_LEFT, _TOP, _ROW = 170, 104, 20
_BAD = "#b3261e"
_FLIPS = 6
_LINE = 150  # characters
_TRIED, _ATTEMPTS = 380, 10  # pixels and lines for the faults tried


def title(diff: Diff) -> str:
    """Which runs, in one line."""
    plural = "token" if diff.n_tokens == 1 else "tokens"
    return f"A {diff.names[0]} · B {diff.names[1]} · {diff.n_tokens:,} {plural} in common"


def diff_text(data: DiffData) -> str:
    """Verdict, place, likely fault and flips, in a few lines."""
    diff = data.diff
    lines = [f"DiffView  {title(diff)}", f"{MARKS[diff.verdict]}  {_where(data)}"]
    if diff.diagnosis is not None:
        lines.append(diff.diagnosis.words)
    if diff.flips:
        lines.append(f"tokens sent to other experts: {len(diff.flips):,}")
        lines += [_flip(data, i) for i in range(min(3, len(diff.flips)))]
    return "\n".join(lines)


def _where(data: DiffData) -> str:
    diff = data.diff
    first = diff.first_divergence
    if first is not None:
        expert = "" if first.expert is None else f", expert {first.expert}"
        return f"B leaves A at {first.path}{expert}, token {first.token}: {first.cause}"
    allowed = f"within {_short(diff.tolerance.relative)} of the largest value"
    if diff.verdict == "identical":
        same = all(str(state) in ("same bits", "same") for state in diff.table["state"])
        return f"all {len(data.paths)} compared taps " + ("hold the same bits" if same else f"agree {allowed}")
    return f"all that differs beyond {allowed} follows from near-ties" if diff.verdict == "tie" else "no single place"


def _flip(data: DiffData, number: int) -> str:
    flip = data.diff.flips[number]
    word = visible(data.diff.a.texts[flip.token], data.diff.a.ids[flip.token])
    ids = [" ".join(map(str, ids)) for ids in (flip.ids_a, flip.ids_b)]
    return f"  {flip.verdict}  layer {flip.layer}, token {flip.token} {word}: {ids[0]} -> {ids[1]}  {flip.cause}"


def diff_png(data: DiffData, selection: Mapping[str, Any]) -> bytes:
    """The view as a PNG 1200 pixels wide: verdict, error map, the weightiest flips; light theme."""
    diff = data.diff
    layers = sorted({n for n in (layer_of(path) for path in data.paths) if n is not None})
    kinds = list(dict.fromkeys(kind_of(path) for path in data.paths if layer_of(path) is not None))
    outside = [path for path in data.paths if layer_of(path) is None]
    flips = diff.flips[:_FLIPS]
    below = _TOP + _ROW * (len(kinds) + len(outside)) + 34
    sheet = Sheet(_WIDTH, below + (26 + 20 * len(flips) if flips else 0) + 8)
    sheet.text(_EDGE, 18, "Diff View", size=15, bold=True)
    sheet.text(_EDGE + 100, 18, title(diff), colour=INK2)
    colour = _BAD if diff.verdict == "defect" else INK
    sheet.text(_EDGE, 44, MARKS[diff.verdict], size=14, bold=True, colour=colour)
    sheet.text(_EDGE + 130, 44, _cut(_where(data)), size=13)
    if diff.diagnosis is not None:
        sheet.text(_EDGE + 130, 64, _cut(diff.diagnosis.words), size=13, bold=True)
    _draw_map(sheet, data, layers, kinds, outside, selection)
    _draw_tried(sheet, data, len(layers))
    up_to = "≤ " if diff.tolerance.by_tap else ""
    key = f"largest difference ÷ largest value; tolerance {up_to}{_short(diff.tolerance.relative)}"
    sheet.text(_EDGE, below - 12, key, colour=INK2)
    for i in range(len(flips)):
        if not i:
            sheet.text(_EDGE, below + 14, f"Tokens routed differently: {len(diff.flips):,}", bold=True)
        sheet.text(_EDGE, below + 36 + 20 * i, _cut(_flip(data, i).strip()), mono=True, size=11)
    return sheet.png()


def _cut(words: str, most: int = _LINE) -> str:
    line = "".join(c if c.isprintable() else "·" for c in words)
    return line if len(line) <= most else line[: most - 1] + "…"


def _cell_width(layers: int) -> float:
    return min(62.0, (_WIDTH - _LEFT - _EDGE) / max(1, layers))


def _draw_tried(sheet: Sheet, data: DiffData, layers: int) -> None:
    """Beside a map that leaves room: the faults that were tried and what each leaves over."""
    x = _LEFT + layers * _cell_width(layers) + 40
    found = data.diff.diagnosis
    if found is None or _WIDTH - x < _TRIED:
        return
    sheet.text(x, _TOP - 10, "Faults tried", bold=True)
    for i, attempt in enumerate(found.attempts[:_ATTEMPTS]):
        mark = {"explains": "✓", "tried": "✗", "excluded": "–"}[attempt.state]
        left = "" if attempt.left_over is None else f"  left over {attempt.left_over:.2g}"
        words = _cut(f"{mark} {attempt.words}", int((_WIDTH - x) / 7.4) - len(left))
        sheet.text(x, _TOP + 10 + 20 * i, words + left, bold=attempt.state == "explains")


def _draw_map(
    sheet: Sheet, data: DiffData, layers: list[int], kinds: list[str], outside: list[str], selection: Mapping[str, Any]
) -> None:
    cell = _cell_width(len(layers))
    places = {path: i for i, path in enumerate(data.paths)}
    every = max(1, math.ceil(30 / cell))
    first = data.diff.first_divergence
    marked = data.known(first.path)[0] if first is not None else None
    for column, layer in enumerate(layers):
        if column % every == 0:
            sheet.text(_LEFT + (column + 0.5) * cell, _TOP - 10, str(layer), align="center", colour=INK2)
    before = [path for path in outside if path == "embed"]
    rows = [*before, *kinds, *(path for path in outside if path not in before)]
    for row, kind in enumerate(rows):
        y = _TOP + row * _ROW
        at_first = marked is not None and kind_of(marked) == kind
        sheet.text(_LEFT - 8, y + _ROW / 2, ("▶ " if at_first else "") + kind, align="right", bold=at_first)
        for column, layer in enumerate(layers):
            path = kind if kind in places else f"layers.{layer}.{kind}"
            if path not in places or (kind in places and column):
                continue
            x = _LEFT + column * cell
            _draw_cell(sheet, data, places[path], x, y, cell)
            if path == selection["path"]:
                sheet.frame(x, y, cell, _ROW)


def _draw_cell(sheet: Sheet, data: DiffData, i: int, x: float, y: float, cell: float) -> None:
    row = data.diff.table[i]
    state, error = str(row["state"]), float(row["max_rel"])
    fill, ink = SUNK, INK2
    if state in ("beyond", "flips"):
        strength = 0.6 if state == "flips" else _strength(error, data.diff.tolerance.relative)
        fill = "#" + cividis()[255 - round(255 * strength)].tobytes().hex()
        ink = ink_on(fill)
    sheet.fill(x + 1, y + 1, cell - 2, _ROW - 2, fill)
    if cell >= 30:
        words = str(int(row["flips"])) if kind_of(data.paths[i]) == "moe.expert_ids" else _short(error)
        words = "=" if state in ("same bits", "same") else f"≈ {words}" if state == "tie" else words
        sheet.text(x + cell / 2, y + _ROW / 2, words, align="center", size=11, colour=ink)


def _strength(error: float, tolerance: float) -> float:
    """0 at the tolerance, 1 at 1, on a log scale."""
    if not math.isfinite(error):
        return 1.0
    low = math.log10(max(tolerance, 1e-12))
    return 1.0 if low >= 0 else max(0.0, min(1.0, (math.log10(max(error, 1e-30)) - low) / -low))


def _short(value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    return f"{value:.0e}".replace("e-0", "e−").replace("e-", "e−").replace("e+00", "")
