"""Stepper: a debugger for the inside of a model: stop between two stages, look, change something, go on, go back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from colibri_lab.breakpoints import Breakpoints
from colibri_lab.conditions import Expression, parse
from colibri_lab.errors import ArgumentError, BusyError, CapacityError, ColibriError, TapError, is_whole, nearest
from colibri_lab.moment import Moment
from colibri_lab.places import ENDS, Place, Where
from colibri_lab.progress import Progress, shown
from colibri_lab.steering import Steering
from colibri_lab.walk import Report, Walk

if TYPE_CHECKING:
    from colibri_lab.compare import Comparison
    from colibri_lab.session import Session

__all__ = ["Locals", "Stepper"]

Array = NDArray[Any]


class Locals(Mapping[str, Array]):
    """The buffers of one moment by tap path, live and read-only. A short name works while it is the only one of its
    kind: `locals()["gates"]`, `locals()["moe.output"]`.
    """

    def __init__(self, arrays: dict[str, Array]) -> None:
        self._arrays = arrays

    def __getitem__(self, path: str) -> Array:
        if path in self._arrays:
            return self._arrays[path]
        found = [full for full in self._arrays if full.endswith(f".{path}")]
        if len(found) == 1:
            return self._arrays[found[0]]
        if found:
            raise TapError(f"'{path}' could be {' or '.join(map(repr, found))}; give more of the path")
        raise TapError(f"no buffer '{path}' is there at this moment{nearest(str(path), self._arrays)}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __repr__(self) -> str:
        return "\n".join(f"{path}  {array.shape} {array.dtype}" for path, array in self.items()) or "(nothing yet)"


class Stepper(Steering):
    """Walks a prompt through the model, stage by stage. Made by `session.stepper(x)`.

    The stages are embed; in each layer attention, router, dispatcher, expert (one step each), shared, aggregator,
    residual (dense layers: attention, mlp, residual); norm, logits. `where` names the one just completed. The end is
    bit for bit that of `session.feed`, whatever way led there.

    Rows of the pass in progress are open: `locals()` shows them, `edit()` changes them. When its logits are there the
    pass is closed, and its rows are the session's like any other.
    """

    def __init__(self, session: Session, ids: NDArray[np.int32], chunk: int | None) -> None:
        if chunk is not None and (not is_whole(chunk) or chunk < 1):
            raise ArgumentError(
                f"chunk is the number of tokens in a pass, or None for all at once; this is {chunk!r:.80}"
            )
        if not ids.size:
            raise ArgumentError("nothing to walk through: give at least one token")
        engine = session._engine
        if engine.open_pass() is not None:
            raise BusyError("another stepper is in the middle of a pass; finish() it, or session.reset()")
        start, stop = engine.length, engine.length + len(ids)
        vocabulary = session.model.config.vocab_size
        outside = np.flatnonzero(ids >= vocabulary)
        if len(outside):
            raise ArgumentError(
                f"token id {ids[outside[0]]} at index {outside[0]} is outside 0 .. {vocabulary - 1} "
                f"(vocab_size is {vocabulary})"
            )
        if stop > session.max_tokens:
            raise CapacityError(
                f"no room for {len(ids)} more tokens after {start} (max_tokens={session.max_tokens}); open a session "
                "with a larger max_tokens"
            )
        size = len(ids) if chunk is None else int(chunk)
        chunks = [(first, min(first + size, stop)) for first in range(start, stop, size)]
        self._set_up(Walk(session, ids, chunks))

    def _set_up(self, walk: Walk) -> None:
        self._walk = walk
        self.session = walk.session
        self._watches: dict[str, Expression] = {}
        ids = [*walk.session._ids[: walk.base], *walk.ids.tolist()]
        tokenizer = walk.session.model.tokenizer
        self._texts = [""] * len(ids) if tokenizer is None else tokenizer.texts(ids)
        self.breakpoints = Breakpoints(Moment(walk, self._texts).check)
        self._found: tuple[tuple[int, int], tuple[int, ...], str] | None = None  # (position, tokens, reason)

    def _text_of(self, number: int) -> str:
        """The text of one token id by itself; empty without a tokenizer."""
        tokenizer = self.session.model.tokenizer
        return "" if tokenizer is None else tokenizer.texts([number])[0]

    # ---- where ----

    @property
    def ids(self) -> list[int]:
        """The token ids that it walks through."""
        return [int(number) for number in self._walk.ids]

    @property
    def passes(self) -> list[tuple[int, int]]:
        """(start, stop) token rows of each pass of the walk, also of those ahead."""
        return list(self._walk.chunks)

    @property
    def where(self) -> Where:
        """After which stage it stands, and which tokens that is about."""
        walk, place = self._walk, self._walk.place
        pass_index = walk.first_pass + max(len(walk.walked) - 1, 0)
        found = self._found if self._found is not None and self._found[0] == walk.position else None
        tokens = found[1] if found else tuple(Moment(walk, self._texts).rows().tolist())
        reason = found[2] if found else "end" if walk.at_end else ""
        if place is None:
            return Where(pass_index, (), None, None, None, "", reason)
        text = "".join(self._texts[token] for token in tokens)
        layer, expert = (number if number >= 0 else None for number in (place.layer, place.expert))
        return Where(pass_index, tokens, layer, place.stage, expert, text, reason)

    @property
    def next(self) -> Place | None:
        """The stage that the next step runs; None at the end."""
        return self._walk.next_place

    @property
    def at_start(self) -> bool:
        """Whether nothing has run."""
        return not self._walk.walked

    @property
    def at_end(self) -> bool:
        """Whether the whole prompt has run."""
        return self._walk.at_end

    # ---- go ----

    def step(self, unit: str = "stage", progress: Progress = None) -> Where:
        """On by one "stage", "expert", "layer" or "token" (to the end of the pass).

        "expert" stops after the next expert, "layer" after the next residual (after the last layer: the logits); when
        no more come, at the end. Raises StopIteration at the end, KeyboardInterrupt (it then stands where it got to).
        """
        ends = _ends(unit)
        walk = self._walk
        with walk.alone():
            walk.arrive()
            if walk.at_end:
                raise StopIteration("the walk is at its end; back() goes back")
            with self._bar(progress) as report:
                while walk.advance(report).stage not in ends and not walk.at_end:
                    pass
        return self.where

    def back(self, unit: str = "stage") -> Where:
        """Back to the last place before this one at which a stage, expert, layer or token was complete; else to the
        start. Rows are abandoned and the pass run anew up to there, with its edits. Raises StopIteration at the start.
        """
        ends = _ends(unit)
        walk = self._walk
        with walk.alone():
            walk.arrive()
            if not walk.walked:
                raise StopIteration("the walk is at its start")
            walk.go_to(*self._before(ends))
        return self.where

    def _before(self, ends: frozenset[str]) -> tuple[int, int]:
        number, stages = self._walk.position
        for earlier in range(number, -1, -1):
            done = self._walk.walked[earlier]
            for count in range(stages - 1 if earlier == number else len(done), 0, -1):
                if done[count - 1].stage in ends:
                    return earlier, count
        return -1, 0

    def run_to(self, condition: str | None = None, progress: Progress = None) -> Where | None:
        """On to the next place where `condition` holds for a token row, or an enabled breakpoint does; see
        `colibri_lab.conditions` for the language. `where.tokens` are the rows that satisfied it.

        Returns None when the end came first. Raises ConditionError, with the column, before anything runs.
        """
        walk = self._walk
        wanted = None if condition is None else parse(condition)
        if wanted is not None:
            Moment(walk, self._texts).check(wanted)
        with walk.alone(), self._bar(progress) as report:
            walk.arrive()
            while not walk.at_end:
                walk.advance(report)
                if self._stops(wanted):
                    return self.where
        return None

    def _stops(self, wanted: Expression | None) -> bool:
        moment = Moment(self._walk, self._texts)
        tests = [("condition", wanted)] if wanted is not None else []
        stopped = False
        for reason, expression in [*tests, *self.breakpoints.tests()]:
            hits = expression.hits(moment)
            if not hits.any():
                continue
            if reason != "condition":
                self.breakpoints.count(reason)
                reason = f"breakpoint {reason}"
            if not stopped:
                tokens = tuple(moment.rows()[hits].tolist())
                self._found = (self._walk.position, tokens, reason)
            stopped = True
        return stopped

    def finish(self, progress: Progress = None) -> Where:
        """On to the end of the prompt, past breakpoints. At the end it does nothing."""
        walk = self._walk
        with walk.alone(), self._bar(progress) as report:
            walk.arrive()
            while not walk.at_end:
                walk.advance(report)
        return self.where

    @contextmanager
    def _bar(self, progress: Progress) -> Iterator[Report]:
        """Progress over the whole walk."""
        walk = self._walk
        first, last = walk.chunks[0][0], walk.chunks[-1][1]
        with shown(progress, last - first, "tokens", "walk") as report:
            if report is None:
                yield None
                return

            def told(done: float) -> None:
                start, stop = walk.bounds()
                report((start - first + done * (stop - start)) / (last - first))

            yield told

    # ---- look ----

    def peek(self, path: str) -> Array:
        """The rows of a tap in the pass in progress, or in the one just finished, read-only.

        A live view where the session's capture keeps the tap; else a copy of working memory that the next layer uses
        again. Raises TapError (no such path), ArgumentError (not there yet, or overwritten), NotCapturedError.
        """
        with self._walk.alone():
            self._walk.arrive()
            return self._walk.read(path)

    def readers(self, path: str) -> list[str]:
        """The later stages that will still read a tap of this pass, in words; empty when nobody will."""
        with self._walk.alone():
            self._walk.arrive()
            last = len(self._walk.walked) == len(self._walk.chunks)
            whose = "whatever the session is fed after this walk" if last else "later passes"
            later = [f"the attention of {whose}"] if self._walk.later_tokens_read(path) else []
            return [str(place) for place in self._walk.readers_of(path)] + later

    def locals(self) -> Locals:
        """The buffers of this moment: what the present layer has written so far in this pass, and what it reads."""
        with self._walk.alone():
            self._walk.arrive()
            return Locals(self._buffers())

    def _buffers(self) -> dict[str, Array]:
        walk, place = self._walk, self._walk.place
        if place is None:
            return {}
        layer = place.layer
        if not walk.is_open:
            return {"logits": walk.session._engine.logits()[None]} if "logits" not in walk.session.tape else {
                path: walk.read(path) for path in ("norm", "logits") if path in walk.session.tape
            }  # fmt: skip
        out: dict[str, Array] = {}
        layers = [number for number in (layer - 1, layer) if number >= 0]
        for path, tap in walk.session.model._taps.places(layers=layers):
            near = tap.layer == layer if layer >= 0 else tap.layer < 0
            enters = path == "embed" if layer <= 0 else path == f"layers.{layer - 1}.output"
            if not (near or enters) or not walk.is_written(path):
                continue
            with suppress(ColibriError):  # not kept, and its working memory is used again
                rows = walk.read(path)
                if tap.expert < 0 or len(rows):
                    out[path] = rows
        return out

    # ---- watch ----

    @property
    def watches(self) -> list[str]:
        """The watched expressions."""
        return list(self._watches)

    def watch(self, expression: str) -> Any:
        """Adds an expression of the condition language to `watches` and returns its value here.

        A value that differs by token is an array with one entry a row of `where.tokens`' pass; None where it has none.
        """
        parsed = parse(expression)
        with self._walk.alone():
            self._walk.arrive()
            value = parsed.value(Moment(self._walk, self._texts))
        self._watches[expression] = parsed
        return value

    def unwatch(self, expression: str) -> None:
        """Removes a watch. Raises ArgumentError when there is none of this text."""
        if self._watches.pop(expression, None) is None:
            raise ArgumentError(f"nothing watches {expression!r:.80}; watched: {', '.join(self._watches) or 'nothing'}")

    def values(self) -> dict[str, Any]:
        """The value of every watch at this place."""
        with self._walk.alone():
            self._walk.arrive()
            moment = Moment(self._walk, self._texts)
            return {text: expression.value(moment) for text, expression in self._watches.items()}

    # ---- forks ----

    def fork(self) -> Stepper:
        """A second stepper at the same place, on a session of its own that starts from a copy of the past.

        What is edited in one is not seen by the other. Edits, breakpoints and watches made so far are in both.
        """
        walk = self._walk
        with walk.alone():
            walk.arrive()
            other = Stepper.__new__(Stepper)
            other._set_up(walk.fork(walk.position))
        self.breakpoints.copy_to(other.breakpoints)
        other._watches = dict(self._watches)
        other._found = self._found
        return other

    def compare(self, fork: Stepper) -> Comparison:
        """What changed from this run to `fork`: routing, residual stream, next token. Both are run to their ends in
        sessions of their own; neither moves. Raises ArgumentError when they walk through different tokens.
        """
        from colibri_lab.compare import compare

        return compare(self, fork)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a stepper is live engine memory and cannot be pickled or copied; fork() makes a second one")

    def __repr__(self) -> str:
        return f"<Stepper {self.where}, {len(self.edits)} edit{'s' * (len(self.edits) != 1)}>"


def _ends(unit: str) -> frozenset[str]:
    if not isinstance(unit, str) or unit not in ENDS:
        raise ArgumentError(f"a step is one of {', '.join(map(repr, ENDS))}; this is {unit!r:.80}")
    return ENDS[unit]
