"""plot.py: a run as one picture: decode and prefill beside the limit, the cost of looking, the curves."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contenders import TITLES
from harness import Cell, paired_ratio, summary
from report import Run, of

COLOURS = {"colibri": "#0072B2", "llama": "#E69F00", "transformers": "#999999"}  # told apart by every eye
HATCHES = {"colibri": "", "llama": "//", "transformers": ".."}


def bars(axes: Any, cells: Sequence[Cell], last: str, heading: str) -> None:
    """One group of bars for each cell; a black line over a bar is its limit, a whisker its smallest and largest
    sample.
    """
    engines = [name for name in TITLES if any(name in cell.samples for cell in cells)]
    width = 0.8 / len(engines)
    for number, name in enumerate(engines):
        for place, cell in enumerate(cells):
            taken = cell.samples.get(name, [])
            s = summary(taken)
            if not s.n:
                continue
            x = place + (number - (len(engines) - 1) / 2) * width
            axes.bar(
                x,
                s.median,
                width,
                color=COLOURS[name],
                hatch=HATCHES[name],
                edgecolor="white",
                label=TITLES[name] if place == 0 else None,
            )
            axes.vlines(x, s.low, s.high, color="black", linewidth=0.8)
            limits = sorted(sample.limit for sample in taken if sample.limit and not sample.void)
            if limits:
                axes.hlines(limits[len(limits) // 2], x - width / 2, x + width / 2, color="black", linewidth=1.5)
    names = ["{model} {dtype}\n{threads} thr, {at}".format(at=cell.point[last], **cell.point) for cell in cells]
    axes.set_xticks(range(len(cells)), names, fontsize=7, rotation=90)
    axes.set(title=heading, ylabel=cells[0].unit)
    axes.margins(y=0.2)  # room for the legend
    axes.legend(fontsize=8, loc="upper center", ncols=len(engines))


def looking(axes: Any, cells: Sequence[Cell]) -> None:
    levels = [level for level in cells[0].samples if level != "none"]
    for number, level in enumerate(levels):
        ratios = [paired_ratio(cell.samples["none"], cell.samples[level]) for cell in cells]
        x = [place + (number - (len(levels) - 1) / 2) * 0.25 for place in range(len(cells))]
        middle = [100 * (r.median - 1) for r in ratios]
        spread = [
            [max(0.0, m - 100 * (r.low - 1)) for m, r in zip(middle, ratios, strict=True)],
            [max(0.0, 100 * (r.high - 1) - m) for m, r in zip(middle, ratios, strict=True)],
        ]
        axes.errorbar(x, middle, yerr=spread, fmt="os^"[number % 3], label=level)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xticks(
        range(len(cells)), ["{model} {dtype}\n{work}".format(**cell.point) for cell in cells], fontsize=7, rotation=90
    )
    axes.set(title="Cost of a capture level against none", ylabel="% slower, 95 % interval")
    axes.margins(y=0.2)  # room for the legend
    axes.legend(fontsize=8, loc="upper center", ncols=len(levels))


def curve(axes: Any, cells: Sequence[Cell]) -> None:
    """Every curve relative to its first point; the thin line is exact proportion."""
    for number, cell in enumerate(cells):
        points = [(float(at), summary(taken).median) for at, taken in cell.samples.items()]
        first_x, first_y = points[0]
        axes.plot(
            [x / first_x for x, _ in points],
            [y / first_y for _, y in points],
            marker="os^vDP*"[number % 7],
            markersize=4,
            label=f"{cell.point['axis']}, {cell.point['work']}",
        )
    largest = max(1.1, axes.get_xlim()[1])
    axes.plot([1, largest], [1, largest], color="black", linewidth=0.6)
    axes.set(
        xscale="log",
        yscale="log",
        title="Time against size, both relative to the first point",
        xlabel="size",
        ylabel="time",
    )
    axes.legend(fontsize=8)


def draw(run: Run, path: Path) -> bool:
    """Writes the picture; False when the run has nothing to draw."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = [
        (cells, paint)
        for cells, paint in (
            (of(run, "decode"), lambda a, c: bars(a, c, "context", "Decode (line: read ceiling)")),
            (of(run, "prefill"), lambda a, c: bars(a, c, "tokens", "Prefill (line: multiply-add peak)")),
            (of(run, "capture"), looking),
            (of(run, "scaling"), curve),
        )
        if cells
    ]
    if not panels:
        return False
    widths = [max(5.0, 0.45 * len(cells)) for cells, _ in panels]
    columns = 1 if max(widths) > 9 else 2
    figure, grid = plt.subplots(
        math.ceil(len(panels) / columns),
        columns,
        figsize=(max(widths) * columns, 4.5 * math.ceil(len(panels) / columns)),
        squeeze=False,
    )
    for axes, (cells, paint) in zip(grid.flat, panels, strict=False):
        paint(axes, cells)
    for axes in list(grid.flat)[len(panels) :]:
        axes.remove()
    figure.suptitle(f"{run.machine['cpu']}, {run.machine['date']}")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.stem}.partial.png")
    figure.savefig(partial, dpi=110)
    plt.close(figure)
    os.replace(partial, path)
    return True
