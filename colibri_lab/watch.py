"""What a session that watches found in the values of its passes: NaN, infinities, subnormals, the largest magnitude."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["FIELDS", "MODES", "Watch"]

MODES = ("off", "watch", "stop")

FIELDS = np.dtype([
    ("point", "U96"), ("layer", "i4"), ("n", "i8"), ("n_nan", "i8"), ("n_signalling", "i8"), ("n_inf", "i8"),
    ("n_negative_inf", "i8"), ("n_subnormal", "i8"), ("absmax", "f4"), ("token", "i8"), ("expert", "i4"),
    ("index", "i8"), ("bits", "u4"),
])  # fmt: skip
"""The columns of `Watch.table`."""

SHOWN = 20  # rows of points that have something to say; more are counted in a last line


class _Kind(Protocol):
    @property
    def path(self) -> str: ...


class Watch:
    """A look at the counts of all tokens of a session so far, the same for any number of threads, chunks and code path.

    `table` is a structured array, one row a point in the order in which data flows through a pass: `point` (its path;
    the experts of a layer together as `experts.*`), `layer` (−1 outside layers), `n` values, of them `n_nan`
    (`n_signalling` of these signalling), `n_inf` (`n_negative_inf` of these −Inf) and `n_subnormal`; `absmax`, the
    largest finite magnitude; `token`, `expert`, `index` and `bits` of the first value that is not finite, by token,
    then expert, then index (−1: there is none, or no expert; `bits` of every quiet NaN is 0x7FC00000). The index counts
    the values of that token at that point; of `attn.scores` and `attn.weights` it is head · (token + 1) + key.

    Values count as their stage computed them, before anything read them; edits of a stepper come after that. Passes
    that were interrupted, stopped or stepped back over are not in it. Logits of other tokens than the last of each pass
    are computed, and count, only where the capture keeps them. `mode` is the option of the session.
    """

    def __init__(self, table: NDArray[Any], mode: str) -> None:
        self.table, self.mode = table, mode

    @classmethod
    def of(cls, rows: Iterable[tuple[Any, ...]], mode: str, kinds: Sequence[_Kind]) -> Watch:
        """From the engine's rows, whose first number says which of the `kinds` of points it is."""
        named = [(kinds[row[0]].path.format(l=row[1], e="*"), *row[1:]) for row in rows]
        table = np.array(named, FIELDS)
        table.flags.writeable = False
        return cls(table, mode)

    @property
    def first(self) -> np.void | None:
        """The first row of the table with a value that is not finite; None when all values are."""
        found = self._broken()
        return self.table[found[0]] if found.size else None

    @property
    def clean(self) -> bool:
        """Whether something was counted and all of it was finite."""
        return bool(self.table["n"].any()) and not self._broken().size

    def _broken(self) -> NDArray[np.intp]:
        return np.flatnonzero((self.table["n_nan"] > 0) | (self.table["n_inf"] > 0))

    def _summary(self) -> str:
        values = int(self.table["n"].sum())
        if self.mode == "off":
            return 'nothing is watched: make the session with watch="watch"'
        if not values:
            return "nothing was computed yet"
        first = self.first
        if first is not None:
            return f"not finite first at {first['point']}: {_place(first)}"
        largest = self.table[int(self.table["absmax"].argmax())]
        return f"clean: {values:,} values are finite; the largest, {largest['absmax']:.4g}, is at {largest['point']}"

    def _rows(self) -> tuple[list[tuple[str, ...]], int]:
        """The lines of points that have something to say, and how many more there are."""
        table = self.table[(self.table["n_nan"] > 0) | (self.table["n_inf"] > 0) | (self.table["n_subnormal"] > 0)]
        lines: list[tuple[str, ...]] = [
            (
                str(row["point"]), f"{row['n']:,}", f"{row['n_nan']:,}", f"{row['n_inf']:,}",
                f"{row['n_subnormal']:,}", f"{row['absmax']:.4g}", _place(row) if row["token"] >= 0 else "",
            )
            for row in table[:SHOWN]
        ]  # fmt: skip
        return lines, len(table) - len(lines)

    def __repr__(self) -> str:
        rows, more = self._rows()
        lines = [_HEAD, *rows] if rows else []
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = [f"<Watch: {self._summary()}>"]
        for line in lines:
            text.append("  " + "  ".join(f"{cell:<{w}}" for cell, w in zip(line, widths, strict=True)).rstrip())
        return "\n".join(text + ([f"  and {more} more points"] if more else []))

    def _repr_html_(self) -> str:
        rows, more = self._rows()
        caption = f"<caption>{html.escape(self._summary())}</caption>"
        head = "".join(f'<th scope="col">{name}</th>' for name in _HEAD)
        body = "".join(
            f'<tr><th scope="row">{html.escape(line[0])}</th>'
            + "".join(f"<td>{html.escape(cell)}</td>" for cell in line[1:])
            + "</tr>"
            for line in rows
        )
        if not rows:
            return f"<table>{caption}</table>"
        last = f'<tr><td colspan="{len(_HEAD)}">and {more} more points</td></tr>' if more else ""
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}{last}</tbody></table>"


_HEAD = ("point", "values", "NaN", "Inf", "subnormal", "largest", "first not finite")


def _place(row: np.void) -> str:
    """Where the first value of a row that is not finite stands: "NaN, token 3, expert 1, index 7"."""
    magnitude = int(row["bits"]) & 0x7FFFFFFF
    value = "NaN" if magnitude > 0x7F800000 else "−Inf" if int(row["bits"]) >> 31 else "+Inf"
    expert = f", expert {row['expert']}" if row["expert"] >= 0 else ""
    return f"{value}, token {row['token']}{expert}, index {row['index']}"
