"""Simulations of a cache as files: a table with a row for each policy, capacity, layer and kind of pass; a picture."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab._files import whole_file
from colibri_lab.cache.requests import passes_known
from colibri_lab.errors import ArgumentError, UnsupportedError, nearest

if TYPE_CHECKING:
    from colibri_lab.cache import Simulation

__all__ = ["check_picture", "check_table", "draw", "write_csv", "write_parquet"]

COUNTERS = (
    "requests", "hits", "misses", "pin_hits", "policy_hits", "prefetch_hits", "late_hits", "first_uses", "not_kept",
    "prefetched", "wasted", "bytes_read",
)  # fmt: skip
WORDS = ("policy", "scope", "passes", "phase")
COLUMNS = ("policy", "scope", "passes", "capacity", "layer", "phase", *COUNTERS)
PICTURES = ("png", "svg", "pdf")

# Told apart by every eye, and by dash and marker without a colour.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#555555")
DASHES = ("-", "--", "-.", (0, (1, 1)), (0, (5, 1, 1, 1, 1, 1)))
MARKERS = "os^Dv<>Pphd"


def check_picture(path: Path | None) -> None:
    """Raises ArgumentError for a name that says no kind of picture."""
    suffix = "" if path is None else path.suffix.lower().lstrip(".")
    if path is not None and suffix not in PICTURES:
        kinds = ", ".join(f".{name}" for name in PICTURES)
        raise ArgumentError(f"'{path}' names no kind of picture{nearest(suffix, PICTURES)}; kinds: {kinds}")


def check_table(path: Path | None) -> None:
    """Raises UnsupportedError when Parquet is asked for and nothing here writes it."""
    if path is not None:
        _pyarrow()


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UnsupportedError("Parquet is written by pyarrow: pip install 'colibri-lab[parquet]'") from None
    return pyarrow, pyarrow.parquet


def _rows(simulations: Sequence[Simulation], layers: Sequence[int]) -> Iterator[tuple[str | int | None, ...]]:
    """COLUMNS of every simulation, kind of pass that happened, and layer; None for what is not known.

    `layers`: the numbers of the layers that the rows of a simulation are.
    """
    for s in simulations:
        passes = "trace" if isinstance(s.passes, str) and passes_known(s.trace) else "decode"
        for phase in ("prefill", "decode"):
            counted = getattr(s, phase)
            for row in np.flatnonzero(counted.requests + counted.prefetched).tolist():
                values = [getattr(counted, name) for name in COUNTERS]
                counts = (None if value is None else int(value[row]) for value in values)
                yield (s.policy, s.scope, passes, s.capacity, layers[row], phase, *counts)


def write_csv(path: Path, simulations: Sequence[Simulation], layers: Sequence[int]) -> None:
    """Text with a header; a count that is not known is empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(_rows(simulations, layers))
    with whole_file(path, "the table") as handle:
        handle.write(text.getvalue().encode())


def write_parquet(path: Path, simulations: Sequence[Simulation], layers: Sequence[int]) -> None:
    """The same as `write_csv`, typed; a count that is not known is null."""
    pyarrow, parquet = _pyarrow()
    schema = pyarrow.schema([(name, pyarrow.string() if name in WORDS else pyarrow.int64()) for name in COLUMNS])
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in _rows(simulations, layers)]
    with whole_file(path, "the table") as handle:
        parquet.write_table(pyarrow.Table.from_pylist(rows, schema=schema), handle)


def draw(
    path: Path,
    points: Sequence[int],
    curves: Mapping[Any, NDArray[np.float64]],
    capacities: Sequence[int],
    scope: str,
) -> None:
    """Miss ratios at some capacities (`points`) by policy; a thin line at each capacity that was asked for."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for number, (name, curve) in enumerate(curves.items()):
        axes.plot(
            points, 100 * curve, label=name, color=COLOURS[number % len(COLOURS)],
            linestyle=DASHES[number % len(DASHES)], marker=MARKERS[number % len(MARKERS)], markersize=5,
        )  # fmt: skip
    for capacity in capacities:
        axes.axvline(capacity, color="#888888", linewidth=0.8)
    axes.set(xlabel="experts in the cache of a layer" if scope == "layer" else "experts in the one cache")
    axes.set(ylabel="requests that miss, %", ylim=(0, 102), title="Misses by capacity")
    axes.legend(title="policy")
    axes.spines[["top", "right"]].set_visible(False)
    with whole_file(path, "the picture") as handle:
        figure.savefig(handle, format=path.suffix.lower().lstrip("."), dpi=150)
