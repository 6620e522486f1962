"""The stepper without a browser: a few lines of text and a PNG, both kept in the notebook file for when no
kernel runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.widgets._sheet import Sheet, visible
from colibri_lab.widgets.palette import INK, INK2, NO_SLOT, SUNK, expert_colours, ink_on
from colibri_lab.widgets.stepper_data import figure, stage_rank

__all__ = ["stepper_png", "stepper_text"]

_WIDTH, _EDGE = 1200, 12  # pixels
_LEFT, _ROW, _CELL = 110, 24, 46
_DONE, _AHEAD = "#8a8f98", "#d5d8dd"
_MOST_LAYERS, _MOST_EXPERTS = 20, 12
Facts = Mapping[str, Any]
Arrays = Mapping[str, NDArray[Any]]


def stepper_text(head: Facts, facts: Facts, arrays: Arrays, title: str) -> str:
    """Where it stands, in a few lines."""
    lines = [f"TokenStepper  {title}", _place_line(facts)]
    lines += [line for line in (_token_line(head, facts, arrays),) if line]
    lines += [f"change  {code}" for _, code in facts.get("edits", [])]
    return "\n".join(lines)


def _place_line(facts: Facts) -> str:
    place, after = facts["place"], facts["next"]
    here = "before the first stage" if place["stage"] is None else f"after {_name(place)}"
    reason = f" ({facts['reason']})" if facts["reason"] else ""
    return f"{here}{reason}; next: {'nothing, this is the end' if after is None else _name(after)}"


def _name(place: Facts) -> str:
    if place["expert"] is not None and place["expert"] >= 0:
        return f"expert {place['expert']} of layer {place['layer']}"
    return f"the {place['stage']}" + (
        "" if place["layer"] is None or place["layer"] < 0 else f" of layer {place['layer']}"
    )


def _token_line(head: Facts, facts: Facts, arrays: Arrays) -> str:
    token, layer = facts["look"]["token"], facts["look"]["layer"]
    name = f"token {token} {head['texts'][token]!r}, layer {layer}"
    if "ids" not in arrays:
        return f"{name}: no experts chosen yet"
    row = token - facts["rows"][0]
    ids, gates = arrays["ids"], arrays.get("gates")
    if not 0 <= row < len(ids):
        return ""
    near = token - facts["window"][0]
    parts = [
        f"{expert}" + ("" if gates is None else f" (gate {figure(float(gates[near][slot]), '.2f')})")
        for slot, expert in enumerate(ids[row].tolist())
        if expert >= 0
    ]
    return f"{name}: experts {', '.join(parts)}"


def stepper_png(head: Facts, facts: Facts, arrays: Arrays, title: str) -> bytes:
    """The view as a PNG 1200 pixels wide: sentence, map of the pass, experts of the layer; light theme."""
    stages = _stages(head)
    text = stepper_text(head, facts, arrays, title).split("\n")
    top = 100
    experts = _experts(arrays, facts)
    tall = max(len(stages) * _ROW, len(experts) * _ROW)
    sheet = Sheet(_WIDTH, top + tall + 30 + 18 * max(0, len(text) - 3))
    sheet.text(_EDGE, 18, "Token Stepper", size=15, bold=True)
    sheet.text(_EDGE + 130, 18, title, colour=INK2)
    for number, line in enumerate(text[1:3]):
        sheet.text(_EDGE, 44 + 20 * number, _shown(line), size=14)
    for number, line in enumerate(text[3:]):
        sheet.text(_EDGE, top + tall + 20 + 18 * number, line, mono=True)
    _draw_map(sheet, head, facts, stages, top)
    _draw_experts(sheet, head, facts, arrays, experts, top)
    return sheet.png()


def _shown(line: str) -> str:
    return "".join(c if c.isprintable() else "·" for c in line)


def _stages(head: Facts) -> list[str]:
    moe = {"router", "dispatcher", "expert", "aggregator"} if head["moe"] else set()
    dense = {"mlp"} if len(head["moe"]) < head["layers"] else set()
    shared = {"shared"} if head["shared"] else set()
    wanted = {"attention", "residual"} | moe | dense | shared
    return [stage for stage in head["stages"] if stage in wanted]


def _has(head: Facts, layer: int, stage: str) -> bool:
    if stage == "mlp":
        return layer not in head["moe"]
    if stage == "shared":
        return layer in head["shared"]
    return stage in ("attention", "residual") or layer in head["moe"]


def _draw_map(sheet: Sheet, head: Facts, facts: Facts, stages: list[str], top: int) -> None:
    place = facts["place"]
    here = stage_rank(place["stage"], place["layer"], place["expert"])
    middle = facts["look"]["layer"]
    first = max(0, min(middle - _MOST_LAYERS // 2, head["layers"] - _MOST_LAYERS))
    layers = range(first, min(head["layers"], first + _MOST_LAYERS))
    cell = min(_CELL, 560 // max(1, len(layers)))
    for row, stage in enumerate(stages):
        y = top + row * _ROW
        sheet.text(
            _LEFT - 8,
            y + _ROW / 2,
            "experts" if stage == "expert" else stage,
            align="right",
            bold=stage == place["stage"],
        )
        for column, layer in enumerate(layers):
            if not _has(head, layer, stage):
                continue
            x = _LEFT + column * cell
            done = stage_rank(stage, layer, head["experts"] if stage == "expert" else None) <= here
            current = (stage, layer) == (place["stage"], place["layer"])
            sheet.fill(x + 2, y + 2, cell - 4, _ROW - 4, _DONE if done or current else _AHEAD, 0.75 if done else 0.5)
            if current:
                sheet.frame(x + 1, y + 1, cell - 2, _ROW - 2)
    for column, layer in enumerate(layers):
        centre = _LEFT + (column + 0.5) * cell
        sheet.text(centre, top - 10, str(layer), align="center", colour=INK2, bold=layer == place["layer"])


def _experts(arrays: Arrays, facts: Facts) -> list[int]:
    """Experts that got rows in the layer, busiest first when they are many, in the order of their numbers."""
    if "ids" not in arrays:
        return []
    load = arrays["load"][facts["look"]["layer"]].astype(np.int64)
    if len(load) <= _MOST_EXPERTS:
        return list(range(len(load)))
    busiest = np.lexsort((np.arange(len(load)), -load))[:_MOST_EXPERTS]
    return sorted(int(e) for e in busiest if load[e])


def _draw_experts(sheet: Sheet, head: Facts, facts: Facts, arrays: Arrays, experts: list[int], top: int) -> None:
    x = 730
    layer, token = facts["look"]["layer"], facts["look"]["token"]
    if not experts:
        sheet.text(x, top + 12, f"layer {layer}: the router has not chosen yet", colour=INK2)
        return
    load = arrays["load"][layer]
    colours = expert_colours(load)
    row = token - facts["rows"][0]
    mine = arrays["ids"][row].tolist() if 0 <= row < len(arrays["ids"]) else []
    gates = arrays.get("gates")
    name = visible(head["texts"][token], head["ids"][token])
    sheet.text(x, top - 10, f"layer {layer}: rows by expert, gates of token {token} {name}", bold=True)
    most = max(1, int(load[experts].max()))
    for number, expert in enumerate(experts):
        y = top + number * _ROW
        colour = colours[expert] if expert < len(colours) else NO_SLOT
        sheet.fill(x, y + 2, 26, _ROW - 4, colour)
        sheet.text(x + 13, y + _ROW / 2, str(expert), align="center", bold=True, colour=ink_on(colour))
        sheet.fill(x + 34, y + 6, 220, _ROW - 12, SUNK)
        if load[expert]:
            sheet.fill(x + 34, y + 6, 220 * int(load[expert]) / most, _ROW - 12, colour, 0.55)
        sheet.text(x + 262, y + _ROW / 2, f"{int(load[expert])} rows", colour=INK)
        if expert in mine and gates is not None:
            gate = gates[token - facts["window"][0]][mine.index(expert)]
            sheet.text(x + 330, y + _ROW / 2, f"gate {figure(float(gate), '.2f')}", bold=True)
