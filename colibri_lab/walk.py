"""Walk: the mechanics of a stepper: a prompt cut into passes, run stage by stage, with its edits, back and forth.

Going back is never a recording played again: rows are abandoned and the pass is run anew, with the edits where they
were made, so the bytes are those of a straight run.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.errors import ArgumentError, BusyError, TapError
from colibri_lab.interventions import Edit, Mark, RoutingEdit, RowsEdit, apply_routing
from colibri_lab.places import INSTEAD, Place, in_layer, readers, writer

if TYPE_CHECKING:
    from colibri_lab._paths import Place as Tap
    from colibri_lab.session import Session

__all__ = ["Walk"]

Array = NDArray[Any]
Report = Callable[[float], object] | None
_BEFORE = (-2.0, 0, 0)  # the rank of a place before all stages


@dataclass
class _Lent:
    """A writable view that edit() gave out, and the rows as they were when last looked at."""

    path: str
    array: weakref.ReferenceType[Array]
    seen: Array
    expired: bool = False


class Walk:
    """A prompt on its way through a session. Methods are called within `alone()`, after `arrive()`.

    `chunks` are the token rows (start, stop) of each pass; `walked[i]` the stages that pass i has completed, one list
    for each pass begun.
    """

    def __init__(self, session: Session, ids: NDArray[np.int32], chunks: Sequence[tuple[int, int]]) -> None:
        self.session = session
        self.engine = session._engine
        self.ids = ids
        self.base = self.engine.length
        self.first_pass = self.engine.pass_count
        self.chunks = list(chunks)
        self.walked: list[list[Place]] = []
        self.edits: list[Edit] = []
        self._edits_before = list(session._edits)
        self.top_k: int = session.model.config["top_k"]
        self._layers_with: dict[str, list[int]] = {}
        self._lent: list[_Lent] = []
        self.sent: NDArray[np.int64] = np.empty(0, np.int64)  # token rows of the expert that ran last
        self._settled = True  # whether rows, `walked` and `edits` agree
        self._left = self._state()
        self._mark = object()  # what a session bears that was last moved by this walk

    # ---- one caller at a time, whole steps only ----

    def alone(self) -> threading.Lock:
        """What to hold while inside. Raises BusyError when another call is inside the session."""
        return self.session._alone()

    def arrive(self) -> None:
        """Makes whole what an interrupt parted and notes what was written to lent views. Raises BusyError when the
        session went on without this walk.
        """
        if self.session._moved_by is not self._mark and self._state() != self._left:
            raise BusyError(
                "the session went on without this stepper (fed, reset, or stepped by another); make a new one with "
                "session.stepper(...)"
            )
        if not self._settled:
            self.go_to(*self.position)
        self._note_edits()

    def _settle(self) -> None:
        self._left = self._state()
        self._settled = True

    def _unsettle(self) -> None:
        self._settled = False
        self.session._moved_by = self._mark

    def _state(self) -> tuple[Any, ...]:
        return self.engine.truncations, self.engine.pass_count, self.engine.open_pass()

    # ---- where ----

    @property
    def position(self) -> tuple[int, int]:
        """(number of the pass in the walk, stages done in it); (−1, 0) at the start."""
        return len(self.walked) - 1, len(self.walked[-1]) if self.walked else 0

    @property
    def place(self) -> Place | None:
        """The stage just completed."""
        return self.walked[-1][-1] if self.walked and self.walked[-1] else None

    @property
    def now(self) -> Mark:
        """The place as edits note it."""
        place = self.place
        return max(len(self.walked) - 1, 0), _BEFORE if place is None else place.rank

    @property
    def is_open(self) -> bool:
        """Whether a pass is under way; its rows can be edited."""
        return bool(self.walked) and (not self.walked[-1] or self.walked[-1][-1].stage != "logits")

    @property
    def at_end(self) -> bool:
        """Whether every pass is closed."""
        return not self.is_open and len(self.walked) == len(self.chunks)

    @property
    def next_place(self) -> Place | None:
        """What the next step runs; None at the end."""
        if not self.is_open:
            return None if self.at_end else Place("embed")
        upcoming = self.engine.next_stage()
        return None if upcoming is None else Place(*upcoming)

    def bounds(self) -> tuple[int, int]:
        """(start, stop) of the token rows of the pass under way or just done, or of the first one."""
        return self.chunks[max(len(self.walked) - 1, 0)]

    # ---- go ----

    def advance(self, report: Report = None) -> Place:
        """Runs the next stage, with the edits that belong there. The caller has seen that there is one."""
        self._unsettle()
        if not self.is_open:
            self._begin()
        upcoming = self.next_place
        if upcoming is not None and upcoming.stage == "logits":
            self._take_back_late_writes()
        try:
            place = Place(*self.engine.step(report))
        except (ArgumentError, KeyboardInterrupt):  # edited ids to be corrected, or Ctrl-C: it stands where it stood
            if self.walked[-1] and self.next_place == upcoming:
                self._settle()
            raise
        self.walked[-1].append(place)
        if place.expert >= 0:
            self.sent = self.tokens_of(f"layers.{place.layer}.moe.experts.{place.expert}.tokens")
        if self.is_open:
            self._apply_at(place)
        elif any(lent.array() is not None for lent in self._lent):
            self.engine.move()  # the pass is closed: nobody can write to its rows any more
        self._expire()
        self._settle()
        return place

    def _begin(self) -> None:
        start, stop = self.chunks[len(self.walked)]
        ids = self.ids[start - self.base : stop - self.base]
        self.session._ids[self.engine.length :] = ids.tolist()
        self.engine.begin(ids)
        self.walked.append([])

    def go_to(self, number: int, stages: int) -> None:
        """Back to where pass `number` of the walk has completed so many stages: abandons rows and runs them anew."""
        self._unsettle()
        self._expire(all_of_them=True)
        self.walked = self.walked[: max(number, 0)]
        self.engine.truncate(self.chunks[max(number, 0)][0])
        self._settle()
        for _ in range(stages):
            if self.advance().stage == "logits":  # an edit less can mean an expert less
                break

    def come_to(self, number: int, rank: tuple[float, int, int]) -> None:
        """On to a place of pass `number`, or the one after it when routing no longer leads there."""
        while not self.at_end and (len(self.walked) - 1, self.place.rank if self.place else _BEFORE) < (number, rank):
            self.advance()

    def fork(self, position: tuple[int, int]) -> Walk:
        """The same walk at `position`, on a session of its own that starts from a copy of the closed rows before it."""
        number, stages = position
        start = self.chunks[max(number, 0)][0]
        other = Walk.__new__(Walk)
        other.__dict__.update(self.__dict__)
        other.session = self.session._fork(start)
        other.engine = other.session._engine
        other.walked = [list(done) for done in self.walked[: max(number, 0)]]
        other.edits = list(self.edits)
        other._lent = []
        other._mark = object()
        other._tell_session()
        for _ in range(stages):
            other.advance()
        other._settle()
        return other

    # ---- rows ----

    def tap(self, path: str) -> Tap:
        """Where the path lies. Raises TapError."""
        return self.session.model._taps.find(path)

    def name(self, tap: Tap) -> str:
        """The tap's name without its numbers."""
        return in_layer(self.session.model._taps.kinds[tap.kind].path)

    def is_by_token(self, tap: Tap) -> bool:
        """Whether it has one row for each token of a pass."""
        return self.session.model._taps.kinds[tap.kind].axes.startswith("T,")

    def layers_with(self, relative: str) -> list[int]:
        """The layers that have a tap of this name ("moe.gates"). Raises TapError when none has."""
        if relative not in self._layers_with:
            layers = []
            for layer in range(self.session.model.config.num_hidden_layers):
                with suppress(TapError):
                    self.tap(f"layers.{layer}.{relative}")
                    layers.append(layer)
            if not layers:
                self.tap(f"layers.0.{relative}")  # raises, and says what there is
            self._layers_with[relative] = layers
        return self._layers_with[relative]

    def writer_of(self, path: str) -> Place:
        """The stage that writes a tap."""
        tap = self.tap(path)
        return writer(self.name(tap), tap.layer, tap.expert)

    def is_written(self, path: str) -> bool:
        """Whether the pass under way has computed it."""
        return self.is_open and self.now[1] >= self.writer_of(path).rank

    def readers_of(self, path: str) -> list[Place]:
        """The stages of this pass that will still read it."""
        tap = self.tap(path)
        places = readers(self.name(tap), tap.layer, tap.expert, self.session.model.config)
        return [place for place in places if place.rank > self.now[1]] if self.is_open else []

    def later_tokens_read(self, path: str) -> bool:
        """Whether it is a row of the KV cache, which all later tokens read."""
        return self.is_open and self.name(self.tap(path)) in ("attn.k", "attn.v")

    def read(self, path: str) -> Array:
        """The rows of the open pass (or of the one just done), read-only."""
        tap = self.tap(path)
        if not self.is_open:
            if not self.walked:
                raise ArgumentError(f"'{path}' is not there yet: nothing has run; step() first")
            return self.session.passes[self.first_pass + len(self.walked) - 1].tape[path]
        if not self.is_written(path):
            raise ArgumentError(f"'{path}' is not there yet: {self.writer_of(path)} writes it")
        return self.engine.open_tap(tap.kind, tap.layer, tap.expert)

    def write(self, path: str, rows: Array) -> None:
        """Replaces the rows of the open pass."""
        tap = self.tap(path)
        if rows.size:
            self.engine.open_write(tap.kind, tap.layer, tap.expert, np.ascontiguousarray(rows))

    def tokens_of(self, path: str) -> NDArray[np.int64]:
        """Which token each row of a tap belongs to."""
        tap = self.tap(path)
        if tap.expert >= 0:
            return self.read(f"layers.{tap.layer}.moe.experts.{tap.expert}.tokens").astype(np.int64)
        return np.arange(*self.bounds())

    # ---- edits ----

    def add(self, edit: Edit) -> None:
        """Records an edit and, when it belongs to the place where the walk stands, applies it."""
        self._unsettle()
        self.edits.append(edit)
        self._tell_session()
        place = self.place
        if self.is_open and place is not None:
            if isinstance(edit, RowsEdit):
                if self._belongs(edit, place):
                    self._or_drop([edit], partial(edit.apply, self))
            elif isinstance(edit, RoutingEdit) and place.stage == "router" and edit.layer in (None, place.layer):
                if any(self._changed_routing(earlier, place) for earlier in self.edits[:-1]):
                    self.go_to(*self.position)  # routing is decided anew, from logits that no edit has touched
                else:
                    self._route(place.layer)
        self._settle()

    def undo(self) -> Edit:
        """Takes back the last edit and runs anew what it had changed."""
        self._unsettle()
        edit = self.edits.pop()
        self._tell_session()
        number, rank = self.now
        if edit.since <= (number, rank) and self.walked:
            place = (number, rank) if self.place else None
            self.go_to(edit.since[0], 0)
            if place:
                self.come_to(*place)
        self._settle()
        return edit

    def _tell_session(self) -> None:
        self.session._edits = [*self._edits_before, *self.edits]

    def _belongs(self, edit: RowsEdit, place: Place) -> bool:
        """Whether an edit of rows is applied when `place` has run in the current pass."""
        here = self.now
        if edit.kind == "edit":
            return edit.since == here
        if not self._concerns(edit):
            return False
        if edit.since[0] == here[0] and edit.since[1] > edit.at.rank:  # made after its rows were written
            return edit.since == here
        return edit.since[0] <= here[0] and place == edit.at

    def _concerns(self, edit: Edit) -> bool:
        """Whether it is about a token of the pass under way."""
        start, stop = self.bounds()
        return edit.tokens is None or any(start <= token < stop for token in edit.tokens)

    def _apply_at(self, place: Place) -> None:
        """What belongs to the stage that has just run."""
        if place.stage == "router":
            self._route(place.layer)
        for edit in list(self.edits):
            if isinstance(edit, RowsEdit) and self._belongs(edit, place):
                self._or_drop([edit], partial(edit.apply, self))

    def _route(self, layer: int) -> None:
        """Routes the rows that the router of a layer has just left, as the edits say."""
        routing = [edit for edit in self.edits if isinstance(edit, RoutingEdit) and self._routes(edit, layer)]
        self._or_drop(routing, lambda: apply_routing(layer, routing, self, self.session.gate_mode))

    def _changed_routing(self, edit: Edit, place: Place) -> bool:
        """Whether an edit has changed what the router at `place`, where the walk stands, has left."""
        if isinstance(edit, RowsEdit):
            return self._belongs(edit, place)
        return isinstance(edit, RoutingEdit) and self._routes(edit, place.layer)

    def _routes(self, edit: RoutingEdit, layer: int) -> bool:
        return edit.layer in (None, layer) and edit.since <= self.now and self._concerns(edit)

    def _or_drop(self, edits: Sequence[Edit], apply: Callable[[], None]) -> None:
        """Applies edits; takes them back when one does not fit the rows that it finds."""
        try:
            apply()
        except ValueError as error:
            self.edits = [edit for edit in self.edits if edit not in edits]
            self._tell_session()
            raise ArgumentError(f"{error}; the edit was taken back") from None
        for lent in self._lent:
            if not lent.expired:
                lent.seen = np.array(self.read(lent.path))

    # ---- writable views ----

    def lend(self, path: str) -> Array:
        """A writable view of rows that a later stage will read. Raises ArgumentError saying where to edit instead."""
        if not self.is_written(path) or not (self.readers_of(path) or self.later_tokens_read(path)):
            raise ArgumentError(self.refusal(path))
        tap = self.tap(path)
        array = self.engine.open_edit(tap.kind, tap.layer, tap.expert)
        for lent in self._lent:  # of the same rows, perhaps by another name: one view, so that a write is noted once
            other = lent.array()
            if other is not None and not lent.expired and np.may_share_memory(array, other):
                return other
        self._lent.append(_Lent(path, weakref.ref(array), np.array(array)))
        return array

    def refusal(self, path: str) -> str:
        """Why an edit of these rows would change nothing, and what to edit instead."""
        if not self.walked or not self.is_open:
            if not self.at_end:
                return (
                    f"'{path}' is not there yet: no pass is under way; {self.writer_of(path)} writes it in the next. "
                    "Step there first, or use patch() or scale(), which wait for it"
                )
            return f"'{path}' cannot be edited: the walk is at its end, where all rows are closed; back() into it first"
        tap, kind = self.tap(path), self.name(self.tap(path))
        if not self.is_written(path):
            return (
                f"'{path}' is not there yet: {self.writer_of(path)} writes it. Step there first, or use patch() or "
                "scale(), which wait for it"
            )
        if kind in INSTEAD:
            instead = INSTEAD[kind].replace("{l}", str(tap.layer)).replace("{e}", str(max(tap.expert, 0)))
            return f"nobody reads '{path}' after {self.writer_of(path)}; edit {instead}"
        editable = [other for other in self._editable() if other != path]
        instead = f"edit '{editable[-1]}', which is still to be read, or " if editable else ""
        return f"nobody will read '{path}' again: its last reader has run; {instead}go back() to before it"

    def _editable(self) -> list[str]:
        """Paths that a later stage of this pass reads, in the order in which they were written."""
        place = self.place
        if place is None:
            return []
        near = [place.layer, place.layer - 1]
        paths = [
            (self.writer_of(path).rank, path)
            for path, tap in self.session.model._taps.places(experts=False)
            if (tap.layer in near or tap.layer < 0)
            and self.is_written(path)
            and self.readers_of(path)
            and not path.endswith("moe.routed")  # where nothing is shared, moe.output is the same rows
        ]
        return [path for _, path in sorted(paths)]

    def _note_edits(self) -> None:
        """Turns what was written to lent views since we last looked into edits."""
        for lent in self._lent:
            if lent.expired or not self.is_open:
                continue
            rows = np.array(self.read(lent.path))
            changed = np.flatnonzero(rows.reshape(-1).view(np.uint32) != lent.seen.reshape(-1).view(np.uint32))
            if len(changed):
                values = rows.reshape(-1)[changed]
                self._unsettle()
                self.edits.append(
                    RowsEdit("edit", _code_of(lent.path, rows, changed), self.now, self.place, None,
                             path=lent.path, at=self.place or Place("embed"), argument=(changed, values, rows.shape))
                )  # fmt: skip
                self._tell_session()
                lent.seen = rows
                self._settle()

    def _expire(self, all_of_them: bool = False) -> None:
        """Views of rows that nobody will read any more become read-only."""
        for lent in self._lent:
            still_read = self.readers_of(lent.path) or self.later_tokens_read(lent.path)
            if not lent.expired and (all_of_them or not still_read):
                lent.expired = True
                array = lent.array()
                if array is not None:
                    array.flags.writeable = False
        if all_of_them or not self.is_open:
            self._lent.clear()

    def _take_back_late_writes(self) -> None:
        """A slice of a view that has expired can still be written to: what was read is what the pass shows."""
        for lent in self._lent:
            if lent.array() is not None:
                self.write(lent.path, lent.seen)


def _code_of(path: str, rows: Array, changed: NDArray[np.int64]) -> str:
    if len(changed) > 4:
        return f'stepper.edit("{path}")  # {len(changed)} values written'
    lines = []
    for flat in changed.tolist():
        index = ", ".join(map(str, np.unravel_index(flat, rows.shape)))
        lines.append(f'stepper.edit("{path}")[{index}] = {rows.reshape(-1)[flat].item()!r}')
    return "; ".join(lines)
