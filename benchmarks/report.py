"""report.py: a run as JSON with every sample, and as Markdown tables in which lost cells look like won ones."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contenders import OURS, TITLES
from goals import GOALS, judge
from harness import Cell, Ratio, Sample, limit_ratio, paired_ratio, summary


@dataclass
class Run:
    """Everything that is kept of a run."""

    machine: dict[str, Any]
    arguments: dict[str, Any]
    versions: dict[str, dict[str, str]]
    missing: dict[str, str]  # contender or measure -> why it was left out
    agreement: list[dict[str, Any]] = field(default_factory=list)
    cells: list[Cell] = field(default_factory=list)
    in_cache: list[dict[str, Any]] = field(default_factory=list)  # models too small to tell about memory

    def write_json(self, path: Path) -> None:
        whole = {**vars(self), "cells": [cell.as_json() for cell in self.cells]}
        write(path, json.dumps(whole, indent=1) + "\n")

    @staticmethod
    def read_json(path: Path) -> Run:
        whole = json.loads(path.read_text(encoding="utf-8"))
        cells = whole.pop("cells")
        for cell in cells:
            cell["samples"] = {name: [Sample(**s) for s in taken] for name, taken in cell["samples"].items()}
        return Run(**whole, cells=[Cell(**cell) for cell in cells])


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


# ---- figures as text ---------------------------------------------------------------------------------------------


def number(value: float) -> str:
    """Three digits that count, without exponents."""
    if math.isnan(value):
        return "–"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def with_spread(samples: Sequence[Sample]) -> str:
    s = summary(samples)
    if not s.n:
        return "void" if s.void else "–"
    return f"{number(s.median)} ({number(s.low)}–{number(s.high)})" + (f", {s.void} void" if s.void else "")


def ratio_text(ratio: Ratio) -> str:
    return f"{ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]" if ratio.pairs else "–"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def of(run: Run, *measures: str) -> list[Cell]:
    return [cell for cell in run.cells if cell.measure in measures]


def title(name: str) -> str:
    return TITLES.get(name, name)


# ---- one table for each measure ----------------------------------------------------------------------------------


def speeds(cells: Sequence[Cell], last: str, limit_unit: str) -> str:
    """Prefill and decode: every engine, ours over each peer, each engine over the limit."""
    engines = [name for name in TITLES if any(name in cell.samples for cell in cells)]
    peers = [name for name in engines if name != OURS]
    limited = any(s.limit for cell in cells for taken in cell.samples.values() for s in taken)
    head = [
        "model",
        "dtype",
        "threads",
        last,
        *(f"{title(n)}, {cells[0].unit}" for n in engines),
        *(f"ours / {title(n)}" for n in peers),
    ]
    if limited:
        head += [*(f"{title(n)} / limit" for n in engines), f"limit, {limit_unit}"]
    rows = []
    for cell in cells:
        ours = cell.samples[OURS]
        row = [str(cell.point[key]) for key in ("model", "dtype", "threads", last)]
        row += [with_spread(cell.samples.get(name, [])) for name in engines]
        row += [ratio_text(paired_ratio(ours, cell.samples[name])) if name in cell.samples else "–" for name in peers]
        if limited:
            row += [number(limit_ratio(cell.samples.get(name, [])).median) for name in engines]
            row.append(
                with_spread([Sample(sum(s.probes) / 2) for taken in cell.samples.values() for s in taken if s.probes])
            )
        rows.append(row)
    return table(head, rows)


def in_short(run: Run, tokens: int = 512) -> str:
    """The few figures that the README shows: a prompt and what is written after it, every engine beside ours."""
    prefill = [cell for cell in of(run, "prefill") if cell.point["tokens"] == tokens]
    written = {key(cell): cell for cell in of(run, "decode") if not cell.point["context"]}
    pairs = [(cell, written[key(cell)]) for cell in prefill if key(cell) in written]
    what = (f"prompt of {tokens}", "decode")
    engines = [[n for n in TITLES if any(n in cell.samples for cell in cells)] for cells in zip(*pairs, strict=True)]
    head = ["model", "threads", *(f"{w}: {title(n)}" for w, names in zip(what, engines, strict=False) for n in names)]
    head.append("decode of the read ceiling")
    rows = []
    for pair in pairs:
        row = ["{model} {dtype}".format(**pair[0].point), str(pair[0].point["threads"])]
        for cell, names in zip(pair, engines, strict=True):
            for name in names:
                text = number(summary(cell.samples.get(name, [])).median)
                if name != OURS and name in cell.samples:
                    text += f" ({paired_ratio(cell.samples[OURS], cell.samples[name]).median:.2f}×)"
                row.append(text)
        rows.append([*row, f"{100 * limit_ratio(pair[1].samples[OURS]).median:.0f} %"])
    return table(head, rows)


def key(cell: Cell) -> tuple[Any, ...]:
    return tuple(cell.point[name] for name in ("model", "dtype", "threads"))


def costs(cells: Sequence[Cell], last: Sequence[str]) -> str:
    """Load and memory: smaller is better."""
    engines = [name for name in TITLES if any(name in cell.samples for cell in cells)]
    peers = [name for name in engines if name != OURS]
    head = ["what", *last, *map(title, engines), *(f"ours / {title(n)}" for n in peers)]
    rows = [
        [
            f"{cell.measure}, {cell.unit}",
            *(str(cell.point[key]) for key in last),
            *(with_spread(cell.samples.get(name, [])) for name in engines),
            *(
                ratio_text(paired_ratio(cell.samples[OURS], cell.samples[n])) if n in cell.samples else "–"
                for n in peers
            ),
        ]
        for cell in cells
    ]
    return table(head, rows)


def captures(cells: Sequence[Cell]) -> str:
    levels = list(cells[0].samples)
    head = [
        "model",
        "dtype",
        "threads",
        "work",
        *(f"{level}, {cells[0].unit}" for level in levels),
        *(f"cost of {level}" for level in levels[1:]),
    ]
    rows = []
    for cell in cells:
        ratios = [paired_ratio(cell.samples[levels[0]], cell.samples[level]) for level in levels[1:]]
        rows.append(
            [str(cell.point[key]) for key in ("model", "dtype", "threads", "work")]
            + [with_spread(cell.samples[level]) for level in levels]
            + [f"{100 * (r.median - 1):+.1f} % [{100 * (r.low - 1):+.1f}, {100 * (r.high - 1):+.1f}]" for r in ratios]
        )
    return table(head, rows)


def line_fit(cell: Cell) -> tuple[float, float, float]:
    """(start, slope, R²) of the least-squares line through the medians of a curve."""
    points = [(float(at), summary(taken).median) for at, taken in cell.samples.items()]
    n = len(points)
    mean_x, mean_y = sum(x for x, _ in points) / n, sum(y for _, y in points) / n
    xx = sum((x - mean_x) ** 2 for x, _ in points)
    yy = sum((y - mean_y) ** 2 for _, y in points)
    xy = sum((x - mean_x) * (y - mean_y) for x, y in points)
    if not xx:
        return mean_y, 0.0, math.nan
    return mean_y - xy / xx * mean_x, xy / xx, xy * xy / (xx * yy) if yy else math.nan


def shape_of(cell: Cell) -> str:
    """What a curve comes to: a line for sizes, a speed-up for threads."""
    medians = [summary(taken).median for taken in cell.samples.values()]
    if cell.point["axis"] == "threads":
        return f"{medians[0] / medians[-1]:.2f}× faster with {list(cell.samples)[-1]} threads"
    start, slope, fit = line_fit(cell)
    line = f"{number(start)} + {number(slope)} × {cell.point['axis']}, R² = {fit:.4f}"
    return f"{line}; last / first {medians[-1] / medians[0]:.2f}"


def curves(cells: Sequence[Cell]) -> str:
    rows = (
        [
            *(str(cell.point.get(key, "–")) for key in ("model", "dtype", "threads", "axis", "work")),
            cell.unit,
            ", ".join(f"{at}: {number(summary(taken).median)}" for at, taken in cell.samples.items()),
            shape_of(cell),
        ]
        for cell in cells
    )
    return table(["model", "dtype", "threads", "axis", "work", "unit", "medians", "shape"], rows)


def pairs(cells: Sequence[Cell], last: Sequence[str]) -> str:
    """Two ways of doing the same, and the first over the second."""
    names = list(cells[0].samples)
    rows = (
        [
            *(str(cell.point.get(key, "–")) for key in last),
            *map(with_spread, cell.samples.values()),
            ratio_text(paired_ratio(*cell.samples.values())),
        ]
        for cell in cells
    )
    return table([*last, *(f"{name}, {cells[0].unit}" for name in names), " / ".join(names)], rows)


def instructions(cells: Sequence[Cell]) -> str:
    """Counts, which repeat: a difference of thousandths is one."""
    names = list(cells[0].samples)
    rows = (
        [
            *(str(cell.point[key]) for key in ("model", "dtype", "work", "tokens", "isa")),
            *(number(summary(taken).median) for taken in cell.samples.values()),
            f"{100 * (paired_ratio(*cell.samples.values()).median - 1):+.3f} %",
        ]
        for cell in cells
    )
    return table(["model", "dtype", "work", "tokens", "code path", *names, "more"], rows)


def tenths(cells: Sequence[Cell]) -> str:
    """What was sampled one after the other while the same went on."""
    rows = []
    for cell in cells:
        taken = cell.samples[OURS]
        shares = [number(s.value / s.limit) for s in taken if s.limit]
        rows.append(
            [f"{cell.measure}, {cell.unit}"]
            + [str(cell.point[key]) for key in ("model", "dtype", "threads", "seconds")]
            + [number(taken[place].value) for place in (0, len(taken) // 2, -1)]
            + [", ".join(number(s.value) for s in taken), ", ".join(shares) or "–"]
        )
    head = ["what", "model", "dtype", "threads", "seconds", "first", "middle", "last", "all", "of the read ceiling"]
    return table(head, rows)


def kernels(cells: Sequence[Cell]) -> str:
    head = ["dtype", "threads", "K", "rows", "code path", "GFLOP/s", "FMA peak, GFLOP/s", "of the peak"]
    return table(
        head,
        (
            [
                *(str(cell.point[key]) for key in ("dtype", "threads", "K", "rows", "isa")),
                with_spread(cell.samples[OURS]),
                with_spread([Sample(s.limit) for s in cell.samples[OURS] if s.limit]),
                f"{100 * limit_ratio(cell.samples[OURS]).median:.0f} %",
            ]
            for cell in cells
        ),
    )


def in_cache(one: dict[str, Any]) -> str:
    """The warning that belongs to every speed of such a model."""
    return (
        f"{one['model']} {one['dtype']} has {one['weight_bytes'] / 2**20:.0f} MiB of weights, less than "
        f"{one['least_bytes'] / 2**20:.0f} MiB: they may stay in the CPU's cache, so its figures say nothing about "
        "memory speed"
    )


def goals(run: Run) -> str:
    small = {(one["model"], one["dtype"]) for one in run.in_cache}
    cells = [
        cell
        for cell in run.cells
        if cell.measure == "instructions" or (cell.point.get("model"), cell.point.get("dtype")) not in small
    ]
    rows = []
    for goal in GOALS:
        verdict = judge(goal, cells)
        where = ", ".join(f"{key} {value}" for key, value in verdict.cell.point.items()) if verdict.cell else "–"
        rows.append([goal.sentence, f"{verdict.worst:.3f}" if verdict.cell else "–", where, verdict.word])
    return table(["goal", "worst figure", "where", "verdict"], rows)


def markdown(run: Run, plot: str | None = None) -> str:
    """The whole report."""
    m, a = run.machine, run.arguments
    parts = [
        f"# Benchmarks: {m['cpu']}, {m['date']}\n",
        f"{m['cpus']} CPUs, {m['memory_bytes'] / 2**30:.0f} GiB, {m['system']}, Python {m['python']}; load "
        f"{m['load_at_start']} when it began. Each figure is a median (smallest–largest) of {a['rounds']} interleaved "
        f"samples of at least {a['seconds']} s; a ratio is the median of the ratios within rounds with its bootstrap "
        "95 % interval. Only figures of one run can be compared.\n",
        "Versions: "
        + "; ".join(f"{key} {value}" for about in run.versions.values() for key, value in about.items())
        + ".\n",
    ]
    parts += [f"**Not from memory**: {in_cache(one)}.\n" for one in run.in_cache]
    parts += [f"Left out: {title(name)} ({reason}).\n" for name, reason in run.missing.items()]
    parts += [
        f"Same network: after {one['tokens']} tokens of {one['model']} {one['dtype']} a logit of {title(one['peer'])} "
        f"differs from ours by at most {one['difference']:.2g} (largest logit {one['largest']:.2g}).\n"
        for one in run.agreement
    ]
    if plot:
        parts.append(f"![the same figures as bars and curves]({plot})\n")
    if of(run, "prefill") and of(run, "decode"):
        parts.append(f"## In short\n\nTokens/s; in brackets ours over that.\n\n{in_short(run)}")
    memory = ("load", "memory peak", "memory anonymous", "memory file")
    sections = (
        ("Decode", ("decode",), lambda c: speeds(c, "context", "GB/s")),
        ("Prefill", ("prefill",), lambda c: speeds(c, "tokens", "GFLOP/s")),
        ("A prompt at once", ("batching",), lambda c: pairs(c, ("model", "dtype", "threads", "tokens"))),
        ("Load and memory", memory, lambda c: costs(c, ("model", "dtype", "threads", "tokens"))),
        ("Cost of looking", ("capture",), captures),
        ("Cost of watching", ("watch",), captures),
        ("Instructions of looking at nothing", ("instructions",), instructions),
        ("Scaling", ("scaling",), curves),
        ("Kernel alone", ("kernel",), kernels),
        ("An empty task of the threads", ("barrier",), lambda c: costs(c, ("threads",))),
        ("Beside a busy process", ("loaded",), lambda c: pairs(c, ("model", "dtype", "work"))),
        ("Going on", ("steady", "steady memory"), tenths),
    )
    for heading, measures, make in sections:
        if cells := of(run, *measures):
            parts.append(f"## {heading}\n\n{make(cells)}")
    parts.append(f"## Goals\n\n{goals(run)}")
    return "\n".join(parts)
