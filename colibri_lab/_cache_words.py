"""What `colibri-lab cache` says of several policies: misses by capacity, who misses least, how far the bound is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from colibri_lab.cache.policies import Policy

__all__ = ["BOUND", "beside_the_bound", "ranking", "table"]

BOUND: Policy = "belady"
Curves = Mapping[Policy, NDArray[np.float64]]


def table(curves: Curves, points: Sequence[int], capacities: Sequence[int], scope: str) -> str:
    """Shares of misses at some capacities (`points`); those asked for are marked."""
    what = "a layer" if scope == "layer" else "all layers together"
    width = max(8, *(len(name) + 1 for name in curves))
    lines = [f"Misses by capacity (experts of {what}); * was asked for", ""]
    lines.append(f"{'capacity':>10}" + "".join(f"{name:>{width}}" for name in curves))
    for row, number in enumerate(points):
        mark = "*" if number in capacities else " "
        values = "".join(f"{100 * curve[row]:>{width - 2}.1f} %" for curve in curves.values())
        lines.append(f"{mark}{number:>9}{values}")
    return "\n".join(lines) + "\n"


def ranking(curves: Curves, points: Sequence[int], capacities: Sequence[int], own_profile: bool) -> str:
    """The policies at each capacity, who misses least first; those that cannot be built are marked. A capacity at which
    everything misses ranks nobody, and is left out.
    """
    places = [points.index(number) for number in capacities]
    places = [place for place in places if any(curve[place] < 1 for curve in curves.values())]
    if not places:
        return ""
    marks = {name: "*" if name == BOUND or (name == "static" and own_profile) else "" for name in curves}
    columns = []
    for place in places:
        order = sorted((float(curve[place]), n, name) for n, (name, curve) in enumerate(curves.items()))
        cells = [f"{name + marks[name]:<13}{100 * share:>5.1f} %" for share, _, name in order]
        columns.append([f"{points[place]:,} experts", *cells])
    width = max(len(cell) for column in columns for cell in column)
    rows = ["   ".join(cell.ljust(width) for cell in row).rstrip() for row in zip(*columns, strict=True)]
    lines = ["Misses, the least first", "", "    " + rows[0], *(f"{n:>2}  {row}" for n, row in enumerate(rows[1:], 1))]
    return "\n".join([*lines, "*   knows this very trace: not to be built"]) + "\n"


def beside_the_bound(curves: Curves, points: Sequence[int], capacities: Sequence[int], own_profile: bool) -> list[str]:
    """How far the nearest policy that can be built is from Belady's, a line for each capacity; and static apart, when
    it was chosen from the trace itself.
    """
    lines = []
    for number in capacities:
        hits = {name: 100 * (1 - curve[points.index(number)]) for name, curve in curves.items()}
        bound = hits.pop(BOUND)
        fixed = hits.pop("static", None) if own_profile else None
        if not any((bound, fixed, *hits.values())):
            lines.append(f"With {number} experts every request misses, whatever the policy: there is nothing to rank.")
            continue
        line = f"With {number} experts Belady, who knows what comes and begins empty, would hit {bound:.1f} %"
        if hits:
            name = max(hits, key=lambda name: hits[name])
            side = "below" if hits[name] <= bound else "above"
            nearest = f"{name} comes nearest" if len(hits) == 1 else f"of those that can be built {name} comes nearest"
            line += f"; {nearest}: {hits[name]:.1f} %, {abs(bound - hits[name]):.1f} points {side}"
        lines.append(line + ".")
        if fixed is not None:
            lines.append(
                f"  Apart: static hits {fixed:.1f} %, chosen from this very trace and there before it begins "
                "(--profile names another trace)."
            )
    return lines
