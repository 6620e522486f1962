"""CacheLab without a browser: a few lines of text and a PNG, both kept in the notebook file for when no kernel runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from colibri_lab.widgets._sheet import Sheet, visible
from colibri_lab.widgets.cache_data import CacheData
from colibri_lab.widgets.palette import INK, INK2, NO_SLOT, SELECTION, SUNK, expert_colours

__all__ = ["cache_png", "cache_text"]

_WIDTH, _EDGE = 1200, 12  # pixels
_LEFT, _TOP, _TALL, _WIDE = 64, 92, 190, 620  # the curves
_TIME_LEFT, _ROWS_TALL, _CELL = 46, 240, (8, 28)  # the timeline
_DRAWN = ("static", "belady")  # beside the chosen policy
_NAMES = {"lru": "LRU", "lfu": "LFU", "fifo": "FIFO", "arc": "ARC", "static": "static pin", "belady": "Belady"}

Setting = Mapping[str, Any]


def _size_text(n_bytes: float) -> str:
    """Bytes in powers of 1,000."""
    value, units = float(n_bytes), ["bytes", "kB", "MB", "GB", "TB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.1f} {units[0]}" if value < 9.95 and units[0] != "bytes" else f"{value:,.0f} {units[0]}"


def cache_text(data: CacheData, setting: Setting, selection: Mapping[str, Any]) -> str:
    """What the setting does, in a few lines."""
    first = f"CacheLab  {data.title()}"
    if not data.trace.n_tokens:
        return f"{first}\nno token yet: nothing has run"
    lines = [first, _sentence(data, setting)]
    if data.places.not_finite:
        tokens = f"{data.places.not_finite:,} of {data.trace.n_tokens:,} tokens"
        lines.append(f"{tokens} have router logits that are not finite")
    lines += [_request(data, setting, selection)] if selection["token"] is not None else []
    return "\n".join(lines)


def _name(policy: str) -> str:
    return _NAMES.get(policy, policy)


def _policies(setting: Setting) -> list[str]:
    """The chosen policy, a fixed set (which nothing can be fetched ahead for), and the bound."""
    drawn = _DRAWN if setting["prefetch"] == "none" else _DRAWN[1:]
    return list(dict.fromkeys((setting["policy"], *drawn)))


def _part(counts: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the answer is about: decode, or prefill where there is nothing else."""
    chosen: Mapping[str, Any] = counts["decode"] if counts["decode"]["requests"] else counts["prefill"]
    return chosen


def _share(data: CacheData, setting: Setting) -> float:
    part = _part(data.counts(setting))
    return part["misses"] / part["requests"] if part["requests"] else float("nan")


def _percent(share: float) -> str:
    return "no request" if np.isnan(share) else f"{100 * share:.{1 if 0 < share < 0.095 else 0}f} %"


def _sentence(data: CacheData, setting: Setting) -> str:
    where = "per layer" if setting["scope"] == "layer" else "for all layers"
    size = "" if data.mean_bytes is None else f" ({_size_text(data.bytes_of(setting))})"
    counts = data.counts(setting)
    said = [f"{_percent(_share(data, setting))} of requests miss"]
    read = _part(counts)["bytes_read"]
    if read is not None:
        said.append(f"{_size_text(read)} read")
    if counts["speed"] is not None:
        said.append(f"{counts['speed']:,.1f} tokens/s predicted")
    bound = _percent(_share(data, {**setting, "policy": "belady"}))
    best = "Belady" if setting["prefetch"] == "none" else "Belady with the same prefetch"
    if best == "Belady" and not (counts["decode"]["requests"] and counts["prefill"]["requests"]):
        best = "best that fetches on demand"  # of decode alone it is no bound: Belady spares misses of all passes
    return (
        f"{_name(setting['policy'])} with {setting['capacity']:,} experts {where}{size}: {', '.join(said)}   "
        f"{best}: {bound} miss"
    )


def _request(data: CacheData, setting: Setting, selection: Mapping[str, Any]) -> str:
    layer, token, expert = selection["layer"], selection["token"], selection["expert"]
    word = visible(data.trace.texts[token], data.trace.ids[token])
    name = f"layer {layer}, token {token} {word}"
    events = data.simulate(setting).events(layer, token, token + 1)
    mine = events[events["expert"] == expert] if expert is not None else events[:0]
    if not len(mine):
        return name
    one = mine[0]
    pushed = f", pushed out {int(one['evicted'])}" if one["evicted"] >= 0 else ""
    runner, behind, _, _ = data.places.runners_up(layer, token, token + 1)
    gap = "less than 0.01" if 0 < behind[0] < 0.005 else f"{behind[0]:.2f}"
    near = f"   runner-up {int(runner[0])}, {gap} behind" if runner[0] >= 0 else ""
    return f"{name}: expert {expert} {one['outcome']}{pushed}{near}"


def cache_png(data: CacheData, setting: Setting, selection: Mapping[str, Any]) -> bytes:
    """The view as a PNG 1200 pixels wide, light theme: sentence, curves, counters, the timeline of the layer."""
    ran = bool(data.trace.n_tokens)
    row = max(2, min(18, _ROWS_TALL // data.trace.num_experts))
    top = _TOP + _TALL + 62
    sheet = Sheet(_WIDTH, top + row * data.trace.num_experts + 40 if ran else 64)
    sheet.text(_EDGE, 18, "Cache Lab", size=15, bold=True)
    sheet.text(_EDGE + 100, 18, data.title(), colour=INK2)
    words = cache_text(data, setting, selection).split("\n")
    sheet.text(_EDGE, 44, words[1], size=14, bold=ran)
    if ran:
        _draw_curves(sheet, data, setting)
        _draw_counters(sheet, data, setting)
        if selection["layer"] is not None:
            _draw_timeline(sheet, data, setting, selection, top, row)
            sheet.text(_EDGE, top + row * data.trace.num_experts + 22, words[-1])
    return sheet.png()


def _draw_curves(sheet: Sheet, data: CacheData, setting: Setting) -> None:
    capacities = data.few(setting)
    step = _WIDE / max(1, capacities[-1] - capacities[0])
    at = [_LEFT + 12 + (c - capacities[0]) * step * 0.96 for c in capacities]
    policies = _policies(setting)
    curves = {
        policy: [_share(data, {**setting, "policy": policy, "capacity": c}) for c in capacities] for policy in policies
    }
    high = max([0.1, *(share for curve in curves.values() for share in curve if not np.isnan(share))])
    words = "by experts kept" if len(capacities) > 1 else "at this size (of a long trace the live view has the others)"
    sheet.text(_EDGE, _TOP - 22, f"Share of requests that miss, {words}", bold=True)
    for share in (0.0, high / 2, high):
        y = _TOP + _TALL * (1 - share / high)
        sheet.fill(_LEFT, y, _WIDE, 1, "#e0e0e0")
        sheet.text(_LEFT - 6, y, f"{100 * share:.0f} %", align="right", colour=INK2, size=11)
    for policy in reversed(policies):
        chosen = policy == setting["policy"]
        points = [(x, _TOP + _TALL * (1 - s / high)) for x, s in zip(at, curves[policy], strict=True) if s == s]
        sheet.line(points, INK if chosen else NO_SLOT, 3 if chosen else 2)
    for i, policy in enumerate(policies):
        share = curves[policy][capacities.index(setting["capacity"])]
        y = _TOP + 8 + 20 * i
        sheet.fill(_LEFT + _WIDE + 24, y - 1, 24, 3, INK if not i else NO_SLOT)
        sheet.text(_LEFT + _WIDE + 54, y, f"{_name(policy)}  {_percent(share)}", bold=not i)
    every = -(-len(capacities) // 12)
    here = at[capacities.index(setting["capacity"])]
    for i, (c, x) in enumerate(zip(capacities, at, strict=True)):
        if c == setting["capacity"] or (i % every == 0 and abs(x - here) > 40):
            sheet.text(x, _TOP + _TALL + 14, f"{c:,}", align="center", bold=c == setting["capacity"], size=11)
    sheet.fill(here - 1, _TOP - 6, 2, _TALL + 12, SELECTION)


def _draw_counters(sheet: Sheet, data: CacheData, setting: Setting) -> None:
    x = _LEFT + _WIDE + 200
    policies = _policies(setting)
    parts = [_part(data.counts({**setting, "policy": policy})) for policy in policies]
    for i, policy in enumerate(policies):
        sheet.text(x + 70 + 74 * (i + 1), _TOP - 4, _name(policy), align="right", colour=INK2, size=11)
    for row, (name, words) in enumerate(
        [("requests", "requests"), ("hits", "hits"), ("misses", "misses"), ("first_uses", "first uses")]
    ):
        y = _TOP + 20 * (row + 1)
        sheet.text(x, y, words)
        for i, part in enumerate(parts):
            sheet.text(x + 70 + 74 * (i + 1), y, f"{part[name]:,}", align="right")


def _draw_timeline(
    sheet: Sheet, data: CacheData, setting: Setting, selection: Mapping[str, Any], top: float, row: int
) -> None:
    facts, arrays = data.timeline(setting, selection["layer"], selection["token"])
    count = facts["stop"] - facts["start"]
    cell = min(_CELL[1], max(_CELL[0], (_WIDTH - _TIME_LEFT - _EDGE) / max(1, count)))
    shown = min(count, int((_WIDTH - _TIME_LEFT - _EDGE) / cell))
    token = selection["token"] or 0
    start = max(facts["start"], min(token - shown // 2, facts["stop"] - shown))
    experts = data.trace.num_experts
    inside = np.unpackbits(arrays["inside"], axis=1, bitorder="little")[:, :experts].astype(bool)
    colours = expert_colours(np.bincount(arrays["expert"], minlength=experts).astype(np.uint32))
    cut = f", tokens {start}–{start + shown - 1} of {data.trace.n_tokens:,}" if shown < data.trace.n_tokens else ""
    title = f"Cache of layer {selection['layer']}, token by token{cut}: band in the cache, ◇ miss, ● hit"
    sheet.text(_EDGE, top - 16, title, bold=True)
    every = 1 if row >= 12 else 16
    for expert in range(experts):
        y = top + expert * row
        if expert % every == 0:
            sheet.text(_TIME_LEFT - 8, y + row / 2, str(expert), align="right", size=11)
            sheet.fill(_TIME_LEFT, y, shown * cell, 1, SUNK if row >= 12 else "#e0e0e0")
        for t in np.flatnonzero(inside[start - facts["start"] : start - facts["start"] + shown, expert]):
            sheet.fill(_TIME_LEFT + t * cell, y + row * 0.2, cell, row * 0.6, colours[expert], 0.28)
    misses = arrays["outcome"] == 4
    for t, expert, missed in zip(arrays["token"], arrays["expert"], misses, strict=True):
        if start <= t < start + shown:
            x, y = _TIME_LEFT + (t - start + 0.5) * cell, top + (expert + 0.5) * row
            _draw_request(sheet, x, y, bool(missed), colours[expert], row)
    if selection["expert"] is not None:
        sheet.frame(_TIME_LEFT + (token - start) * cell, top + selection["expert"] * row, cell, max(row, 4))


def _draw_request(sheet: Sheet, x: float, y: float, missed: bool, colour: str, row: int) -> None:
    if row < 12:
        sheet.fill(x - 2, y - row / 2, 4, row, INK if missed else colour)
    elif missed:
        sheet.text(x, y, "◇", align="center", size=14, bold=True)
    else:
        sheet.text(x, y, "●", align="center", size=11, colour=colour)
