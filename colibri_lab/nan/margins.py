"""Headroom: how many doublings every tap of a run is away from overflow, and what would be subnormal.

Bits left are log2(largest number of the format / largest magnitude): `colibri_lab.numerics.headroom_bits`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from os import PathLike
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.difference.pair import trace_from
from colibri_lab.difference.taps import Tap, parse
from colibri_lab.errors import ArgumentError
from colibri_lab.nan.causes_words import number
from colibri_lab.nan.forecast import Forecast, foretell
from colibri_lab.nan.replay import is_complete, obstacle, replay
from colibri_lab.nan.source import Source
from colibri_lab.nan.words import bits_left, place, shown, stage_of, tap_kind
from colibri_lab.numerics import Format, format_of, headroom_bits
from colibri_lab.progress import Progress
from colibri_lab.trace import HasTrace, Trace

__all__ = ["GROWTH", "HUGE", "LITTLE", "SUBNORMALS", "Headroom", "Margin", "headroom"]

Array = NDArray[Any]

LITTLE = 2.0
"""Bits; what has fewer left is warned of."""

SUBNORMALS = np.dtype([
    ("path", "U96"), ("layer", "i4"), ("stage", "U12"), ("format", "U16"),
    ("n", "i8"),            # finite values that are not zero
    ("n_subnormal", "i8"),  # of them, rounded to the format, subnormal: what flushing to zero would lose
    ("n_zero", "i8"),       # of them, so small that the format has zero for them in any case
    ("share", "f8"),        # (n_subnormal + n_zero) / n
    ("largest", "f8"),      # largest magnitude that flushing to zero would lose; 0 when none
])  # fmt: skip
"""Columns of `Headroom.subnormals`: one row per tap and format."""

GROWTH = np.dtype([("tap", "U64"), ("stage", "U12"), ("before", "i4"), ("layer", "i4"), ("bits", "f8")])
"""Columns of `Headroom.growth`: bits lost between two layers that have the tap; negative where there are more left."""

HUGE = 2.0**24
"""From here on neighbouring float32 numbers are 2 apart: what a norm makes, of a size about 1, is lost when it is added
to such a value. A run that holds one can be finite and is hardly right.
"""

_PIECE = 1 << 20  # values looked at at a time
_SHOWN = 5  # warnings in a notebook


@dataclass(frozen=True)
class Margin:
    """How far one tap is from the end of a format."""

    path: str  # experts of a layer are one: "layers.2.moe.experts.*.hidden"
    layer: int | None
    stage: str
    format: str
    bits: float
    absmax: float
    token: int | None  # row of the largest magnitude
    expert: int | None
    text: str  # of that token

    @property
    def words(self) -> str:
        """ "layer 2, expert hidden, 0.9 bit in float16"."""
        return f"{place(self.path)}, {bits_left(self.bits)} in {self.format}"

    @property
    def sentence(self) -> str:
        """Tap, layer, format and bits, and where the largest magnitude stands."""
        where = self._token
        expert = "" if self.expert is None else f", expert {self.expert}"
        size = f"{number(np.float32(self.absmax))}{where}{expert}"
        end = number(format_of(self.format).largest)
        name = place(self.path)
        name = name[0].upper() + name[1:]
        if self.bits < 0:
            return f"{name}: overflows {self.format}, {size} is beyond {end} by {bits_left(-self.bits)}."
        return f"{name}: {bits_left(self.bits)} left in {self.format}, {size} of {end}."

    @property
    def spot(self) -> str:
        """ "layer 2, expert 6, up, 3.53e+20 at token 0 'a'": the largest magnitude and where it stands."""
        path = self.path if self.expert is None else self.path.replace("*", str(self.expert))
        return f"{place(path)}, {number(np.float32(self.absmax))}{self._token}"

    @property
    def _token(self) -> str:
        return "" if self.token is None else f" at token {self.token}{' ' * bool(self.text)}{shown(self.text)}"

    def __str__(self) -> str:
        return self.words


@dataclass(frozen=True, repr=False, eq=False)
class Headroom:
    """How many doublings each tap is away from overflow; made by `lab.nan.headroom`.

    `table` has one row per tap in the order of the data's way: `path`, `layer` (−1 outside the layers), `stage`,
    `n` values, `n_nonfinite` of them, `absmax` of the finite ones, its `token` row, `expert` and `index` in the row (−1
    where not known), and the bits left in each format under the format's name. `subnormals`: one row per tap and
    format, see `SUBNORMALS`.
    """

    table: Array
    subnormals: Array
    formats: tuple[str, ...]
    dtype: str  # format of the run
    texts: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())

    def closest(self, format: str | None = None) -> Margin | None:
        """The tap with the fewest bits left in a format (None: the first of `formats`); None when nothing was looked
        at, or all was zero.
        """
        name = self._format(format)
        rows = self.table[np.isfinite(self.table[name])]
        return self._margin(rows[int(rows[name].argmin())], name) if len(rows) else None

    @property
    def huge(self) -> tuple[Margin, ...]:
        """Taps with a magnitude of 2^24 or more, in the order of the data's way: see `HUGE`."""
        return tuple(self._margin(row, self.formats[0]) for row in self.table[self.table["absmax"] >= HUGE])

    @property
    def growth(self) -> Array:
        """Bits lost from layer to layer, tap by tap; dtype `GROWTH`."""
        found = []
        for tap, rows in self._by_tap().items():
            for a, b in itertools.pairwise(rows):
                if a["absmax"] > 0 and b["absmax"] > 0:
                    lost = math.log2(b["absmax"]) - math.log2(a["absmax"])
                    found.append((tap, a["stage"], a["layer"], b["layer"], lost))
        return np.array(found, GROWTH)

    @property
    def warnings(self) -> tuple[str, ...]:
        """One sentence for each tap and format with fewer than 2 bits left, fewest first within a format."""
        return tuple(margin.sentence for name in self.formats for margin in self._little(name))

    def forecast(self, format: str | None = None) -> tuple[Forecast, ...]:
        """Overflows that the layers before them foretell, the first of each tap; see `Forecast`.

        Each layer is judged by the layers before it alone, as if the run had stopped there.
        """
        kind = format_of(self._format(format))
        series, stages = {}, {}
        for tap, rows in self._by_tap().items():
            with np.errstate(divide="ignore"):
                sizes = np.log2(rows["absmax"])
            beyond = (rows["absmax"] > kind.largest) | (rows["n_nonfinite"] > 0)
            series[tap], stages[tap] = np.column_stack([rows["layer"], sizes, beyond]), str(rows["stage"][0])
        return foretell(series, kind.name, math.log2(kind.largest), stages)

    def __repr__(self) -> str:
        lines = [f"<Headroom of {len(self.table)} taps of a {self.dtype} run>"]
        for name in self.formats:
            closest, few = self.closest(name), len(self._little(name))
            more = f"; {few} tap{'s' * (few != 1)} under {LITTLE:.0f} bits" if few else ""
            lines.append(f"{name:<14} {'nothing to measure' if closest is None else self._short(closest)}{more}")
        return "\n".join([*lines, *self.notes])

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{cell}</th>" for cell in ("format", "closest to overflow", "bits left",
                       f"taps under {LITTLE:.0f} bits", "most subnormal or zero"))  # fmt: skip
        rows = []
        for name in self.formats:
            closest, small = self.closest(name), self.subnormals[self.subnormals["format"] == name]
            most = small[int(small["share"].argmax())] if len(small) else None
            cells = [
                name,
                "" if closest is None else place(closest.path),
                "" if closest is None else bits_left(closest.bits),
                str(len(self._little(name))),
                "none" if most is None or not most["share"] else f"{most['share']:.1%} of {place(most['path'])}",
            ]
            rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
        said = self.warnings
        lines = [*said[:_SHOWN], *([f"… {len(said) - _SHOWN} more in .warnings"] if len(said) > _SHOWN else [])]
        below = "".join(f"<div>{escape(line)}</div>" for line in [*lines, *self.notes])
        return f"<table><caption>Headroom</caption><tr>{head}</tr>{''.join(rows)}</table>{below}"

    # ---- inside ----

    def _format(self, name: str | None) -> str:
        if name is None:
            return self.formats[0]
        known = format_of(name).name
        if known not in self.formats:
            raise ArgumentError(f"{known} was not asked for; this has {', '.join(self.formats)}")
        return known

    def _little(self, name: str) -> list[Margin]:
        rows = self.table[self.table[name] < LITTLE]
        return [self._margin(row, name) for row in rows[np.argsort(rows[name], kind="stable")]]

    def _margin(self, row: Any, name: str) -> Margin:
        layer, token, expert = (None if row[key] < 0 else int(row[key]) for key in ("layer", "token", "expert"))
        text = self.texts[token] if token is not None and token < len(self.texts) else ""
        path, stage = str(row["path"]), str(row["stage"])
        return Margin(path, layer, stage, name, float(row[name]), float(row["absmax"]), token, expert, text)

    def _short(self, margin: Margin) -> str:
        return f"{bits_left(margin.bits):<10} {place(margin.path)}"

    def _by_tap(self) -> dict[str, Array]:
        """The rows of each tap that lies in layers, by layer."""
        inside = self.table[self.table["layer"] >= 0]
        kinds = np.array([tap_kind(str(path)) for path in inside["path"]])
        return {tap: inside[kinds == tap] for tap in dict.fromkeys(kinds.tolist())}


def headroom(
    x: Trace | HasTrace | str | PathLike[str] | Any,
    formats: Sequence[str] = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    *,
    progress: Progress = None,
) -> Headroom:
    """How many doublings each recorded tap is away from overflow in each format, and what would be subnormal there.

    `x` is a session, a trace, a file that `lab.load_trace` opens, or a watch table (`session.watch`), which knows
    points between the taps too, but neither the place of the largest magnitude nor subnormals of other formats. Of a
    session that was watched, points that are no taps come from its watch table. A session that captured less than
    "all" is replayed in a session of its own, and a note says so. NaN and Inf are left out of the largest magnitude,
    which a note says too. Raises ArgumentError for what is no number format, and for what holds no run.
    """
    if not isinstance(formats, Iterable):
        raise ArgumentError(f"formats takes names of number formats such as ('float16',); this is {formats!r:.80}")
    kinds = [format_of(name) for name in ([formats] if isinstance(formats, str) else formats)]
    names = tuple(dict.fromkeys(kind.name for kind in kinds))
    if not names:
        raise ArgumentError("headroom takes at least one number format, such as 'float16'")
    kinds = [format_of(name) for name in names]
    if _is_watch(x):
        return _made([], [], _watched(x), names, "float32", ())
    source = Source(trace_from(x), watch=_watch_of(x))
    notes: tuple[str, ...] = ()
    if hasattr(x, "tape") and source.trace.n_tokens and not is_complete(source):
        why, captured = obstacle(source), ", ".join(source.trace.meta["capture"])
        if why:
            notes = (f"The run captured {captured} and cannot be replayed: {why}; other taps are not known.",)
        else:
            source = replay(source, progress)
            notes = (f"The run captured {captured}: it was replayed in a session of its own with all taps.",)
    rows, small = _measured(source, kinds)
    have = {row[0] for row in rows}
    points = [row for row in _watched(source.watch) if row[0] not in have] if source.watch is not None else []
    return _made(rows, small, points, names, source.dtype, tuple(source.trace.texts), notes)


def _made(
    rows: list[Any],
    small: list[Any],
    points: list[Any],
    names: tuple[str, ...],
    dtype: str,
    texts: tuple[str, ...],
    notes: tuple[str, ...] = (),
) -> Headroom:
    columns = [
        ("path", "U96"), ("layer", "i4"), ("stage", "U12"), ("n", "i8"), ("n_nonfinite", "i8"), ("absmax", "f8"),
        ("token", "i8"), ("expert", "i4"), ("index", "i8"), *((name, "f8") for name in names),
    ]  # fmt: skip
    every = [(*row, *(headroom_bits([row[5]], name) for name in names)) for row in [*rows, *points]]
    table = np.array(every, np.dtype(columns))
    bad = table[table["n_nonfinite"] > 0]
    if len(bad):
        count = f"{len(bad)} tap{'s hold' if len(bad) != 1 else ' holds'}"
        first = f"{count} NaN or Inf, first {bad['path'][0]}: bits left there are those of the finite values."
        notes = (*notes, first)
    return Headroom(table, np.array(small, SUBNORMALS), names, dtype, texts, notes)


# ---- from a trace ----


def _measured(source: Source, kinds: Sequence[Format]) -> tuple[list[Any], list[Any]]:
    """Rows of the table without the bits, and rows of the census of small values."""
    taps = [(tap, path) for path in source.trace if (tap := parse(path)) is not None]
    rows, small = [], []
    for tap, path in sorted(taps, key=lambda pair: pair[0].rank):
        array = source.trace[path]
        if array.dtype.kind in "iu":
            continue
        measure = _Measure(kinds)
        measure.add_all(array)
        token, expert, index = _place_of(source, tap, array, measure.spot)
        rows.append((tap.path, tap.layer, tap.stage, measure.n, measure.n_bad, measure.absmax, token, expert, index))
        for kind, (n_subnormal, n_zero, largest) in zip(kinds, measure.small, strict=True):
            share = (n_subnormal + n_zero) / max(1, measure.n_nonzero)
            counts = measure.n_nonzero, n_subnormal, n_zero, share, largest
            small.append((tap.path, tap.layer, tap.stage, kind.name, *counts))
    return rows, small


class _Measure:
    """Counts over an array, in pieces: no copy of the whole."""

    def __init__(self, kinds: Sequence[Format]) -> None:
        self.kinds = kinds
        self.n = self.n_bad = self.n_nonzero = 0
        self.absmax, self.spot = 0.0, -1  # spot: place in the flat array
        self.small = [(0, 0, 0.0)] * len(kinds)

    def add_all(self, array: Array) -> None:
        for start in range(0, len(flat := array.reshape(-1)), _PIECE):
            self._add(np.abs(flat[start : start + _PIECE].astype(np.float64)), start)

    def _add(self, size: NDArray[np.float64], start: int) -> None:
        fine = np.isfinite(size)
        self.n += size.size
        self.n_bad += size.size - int(np.count_nonzero(fine))
        size[~fine] = 0
        spot = int(size.argmax())
        if size[spot] > self.absmax or (self.spot < 0 and fine[spot]):
            self.absmax, self.spot = float(size[spot]), start + spot
        size = size[size > 0]
        self.n_nonzero += size.size
        for place_of, kind in enumerate(self.kinds):
            few = size[size < 2.0**kind.lowest]
            n_subnormal, n_zero, largest = self.small[place_of]
            if few.size:
                # rounding to nearest even: half a spacing below the smallest normal number is normal already, and half
                # of the smallest subnormal number is zero
                half = 2.0 ** (kind.lowest - kind.fraction - 1)
                gone = few <= half
                between = few[~gone & (few < 2.0**kind.lowest - half)]
                n_subnormal, n_zero = n_subnormal + between.size, n_zero + int(gone.sum())
                largest = max(largest, float(between.max(initial=0.0)))
            self.small[place_of] = n_subnormal, n_zero, largest


def _place_of(source: Source, tap: Tap, array: Array, spot: int) -> tuple[int, int, int]:
    """(token row, expert, place in the row) of a place in the flat array; −1 for what there is none of."""
    if spot < 0:
        return -1, -1, -1
    if tap.kind == "attn.weights":  # (heads, T, S); the place is that of a (heads, S) row
        head, token, key = np.unravel_index(spot, array.shape)
        return int(token), -1, int(head) * array.shape[2] + int(key)
    width = max(1, array.size // len(array))
    row, index = divmod(spot, width)
    if not tap.of_experts:
        return row, -1, index
    tokens, experts = source.dispatch(tap.layer)
    return int(tokens[row]), int(experts[row]), index


# ---- from a watch table ----


def _watch_of(x: Any) -> Any:
    watch = getattr(x, "watch", None)
    return watch if _is_watch(watch) else None


def _is_watch(x: Any) -> bool:
    table = getattr(x, "table", None)
    return isinstance(table, np.ndarray) and {"point", "absmax"} <= set(table.dtype.names or ())


def _watched(watch: Any) -> list[Any]:
    """Rows of the headroom table from a watch table, without bits: the largest magnitude has no place there."""
    found = []
    for row in watch.table:
        if row["n"]:
            path = str(row["point"])
            counts = int(row["n"]), int(row["n_nan"] + row["n_inf"]), float(row["absmax"])
            found.append((path, int(row["layer"]), stage_of(path), *counts, -1, -1, -1))
    return found
