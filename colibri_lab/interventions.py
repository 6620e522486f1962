"""Interventions: what a stepper changes in a run, each with its place in it, and how each is applied to the open rows.

Routing changes of one layer are applied together, always in this order: the router's logits (patched, scaled, biased);
how many experts are chosen; those that are forced; the gates by their rule or as given; those that are switched off.
Changes of rows follow in the order in which they were made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from colibri_lab.places import Place

if TYPE_CHECKING:
    from colibri_lab import _core

__all__ = ["Edit", "Mark", "OpenRows", "RoutingEdit", "RowsEdit", "apply_routing"]

Array = NDArray[Any]
Mark = tuple[int, tuple[float, int, int]]
"""A place of a walk: number of the pass in the walk, rank of the stage within it."""


class OpenRows(Protocol):
    """What an intervention needs of the pass in progress: its rows by tap path, read and written as copies."""

    engine: _core.Session
    top_k: int

    def bounds(self) -> tuple[int, int]:
        """(start, stop) token rows of the pass."""

    def read(self, path: str) -> Array:
        """The rows of a tap, read-only."""

    def write(self, path: str, rows: Array) -> None:
        """Replaces them."""

    def tokens_of(self, path: str) -> NDArray[np.int64]:
        """The token of each row of a tap."""


@dataclass(frozen=True, repr=False)
class Edit:
    """One change of a run. `code` is the Python line that makes it; it holds from the place `since` on, for the token
    rows `tokens` (None: all).
    """

    kind: str
    code: str
    since: Mark
    after: Place | None
    tokens: tuple[int, ...] | None

    def rows(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Which of the rows of these tokens it is about, as numbers counted from the first."""
        if self.tokens is None:
            return np.arange(len(tokens))
        return np.flatnonzero(np.isin(tokens, self.tokens))

    @property
    def changes(self) -> str:
        """The path of the tap that it changes first; `*` for every layer."""
        raise NotImplementedError

    def record(self) -> dict[str, Any]:
        """As it stands in a trace's `edits`."""
        return {
            "kind": self.kind,
            "path": self.changes,
            "code": self.code,
            "made": "before the first stage" if self.after is None else f"after {self.after}",
            "pass_of_walk": self.since[0],
            "tokens": None if self.tokens is None else list(self.tokens),
        }

    def __str__(self) -> str:
        made = "before the first stage" if self.after is None else f"after {self.after}"
        return f"{self.code}  (made {made}, pass {self.since[0]} of the walk)"

    def __repr__(self) -> str:
        return f"<Edit {self}>"


@dataclass(frozen=True, repr=False)
class RoutingEdit(Edit):
    """A change of what the router of a layer decides. `layer` None: of every layer."""

    layer: int | None = None
    argument: Any = None

    @property
    def changes(self) -> str:
        """The logits of the router, or the gates."""
        tap = "router_logits" if self.kind in ("patch", "scale", "bias_router") else "gates"
        return f"layers.{'*' if self.layer is None else self.layer}.moe.{tap}"


@dataclass(frozen=True, repr=False)
class RowsEdit(Edit):
    """A change of the rows of one tap, applied when the stage `at` has run. `argument`: new rows (patch: by token, or
    as they are of an expert), a factor (scale), or flat places, their values and the shape of the rows (edit).
    """

    path: str = ""
    at: Place = field(default_factory=lambda: Place("embed"))
    argument: Any = None

    @property
    def changes(self) -> str:
        """Its path."""
        return self.path

    def apply(self, open_rows: OpenRows) -> None:
        """Changes the open rows. Raises ValueError when the rows to put in have another shape than those there."""
        rows = np.array(open_rows.read(self.path))
        if self.kind == "edit":
            places, values, shape = self.argument
            if rows.shape != shape:
                raise ValueError(f"{self.code}: there are rows {rows.shape}, and {shape} when they were edited")
            rows.reshape(-1)[places] = values
        else:
            change(rows, open_rows.tokens_of(self.path), self)
        open_rows.write(self.path, rows)


def change(rows: Array, tokens: NDArray[np.int64], edit: RowsEdit | RoutingEdit) -> None:
    """Patches or scales, in place, the rows of the tokens that the edit is about; `tokens`: that of each row."""
    chosen = edit.rows(tokens)
    if edit.kind == "scale":
        with np.errstate(all="ignore"):
            rows[chosen] = rows[chosen] * np.float32(edit.argument)
        return
    new = edit.argument
    if isinstance(new, dict):
        for row in chosen.tolist():
            rows[row] = new[int(tokens[row])]
        return
    try:
        rows[chosen] = np.broadcast_to(new, rows[chosen].shape)
    except ValueError:
        raise ValueError(f"{edit.code}: there are rows {rows[chosen].shape}, and {new.shape} to put in") from None


def apply_routing(layer: int, edits: Sequence[RoutingEdit], open_rows: OpenRows, mode: str) -> None:
    """Routes the open rows of `layer` as the edits say. The router was the last stage to run; `mode` is the session's
    gate rule.
    """
    if not edits:
        return
    base = f"layers.{layer}.moe."
    start, stop = open_rows.bounds()
    tokens = np.arange(start, stop)
    logits = np.array(open_rows.read(base + "router_logits"))
    counts = np.full(len(tokens), open_rows.top_k)
    for edit in edits:
        rows = edit.rows(tokens)
        if edit.kind in ("patch", "scale"):
            change(logits, tokens, edit)
        elif edit.kind == "bias_router":
            with np.errstate(all="ignore"):
                logits[rows] += edit.argument
        elif edit.kind == "set_k":
            counts[rows] = edit.argument
        elif edit.kind == "gate_mode":
            mode = edit.argument
    open_rows.write(base + "router_logits", logits)
    for first, count in runs(counts):
        open_rows.engine.route_again(mode, int(counts[first]), first, count, False)

    for edit in edits:
        if edit.kind == "force":
            _force(base, edit, edit.rows(tokens), open_rows, mode)
    for edit in edits:
        if edit.kind == "ablate":
            rows = edit.rows(tokens)
            ids, gates = np.array(open_rows.read(base + "expert_ids")), np.array(open_rows.read(base + "gates"))
            off = np.zeros(ids.shape, bool)
            off[rows] = ids[rows] == edit.argument
            ids[off], gates[off] = -1, 0
            open_rows.write(base + "expert_ids", ids)
            open_rows.write(base + "gates", gates)


def _force(base: str, edit: RoutingEdit, rows: NDArray[np.int64], open_rows: OpenRows, mode: str) -> None:
    experts, given = edit.argument
    ids = np.array(open_rows.read(base + "expert_ids"))
    ids[rows] = -1
    ids[rows, : len(experts)] = experts
    open_rows.write(base + "expert_ids", ids)
    if given is None:
        for row in rows.tolist():
            open_rows.engine.route_again(mode, open_rows.top_k, row, 1, True)
        return
    gates = np.array(open_rows.read(base + "gates"))
    gates[rows] = 0
    gates[rows, : len(experts)] = given
    open_rows.write(base + "gates", gates)


def runs(values: NDArray[np.int64]) -> list[tuple[int, int]]:
    """(first, count) of each run of equal neighbours."""
    cuts = np.flatnonzero(np.diff(values)) + 1
    first = np.concatenate([[0], cuts])
    return list(zip(first.tolist(), np.diff(np.concatenate([first, [len(values)]])).tolist(), strict=True))
