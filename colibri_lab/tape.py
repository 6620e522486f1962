"""Tape: zero-copy views of what a session computed, by tap path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from colibri_lab._paths import Place, matcher
from colibri_lab.errors import ArgumentError, ColibriError, NotCapturedError

if TYPE_CHECKING:
    from colibri_lab.session import Session

__all__ = ["Tape"]

Array = NDArray[Any]


class Tape(Mapping[str, Array]):
    """The intermediates of a session, or of one of its passes, as read-only arrays over the engine's own memory.

    `session.tape[path]` spans all tokens of the session (T, …); an expert's tap shows the last pass. `pass.tape[path]`
    shows the rows of that pass. Rows of a finished pass never change, and an array stays valid for as long as you hold
    it or any slice of it; it cannot be made writable. Iteration lists the paths that this session's capture keeps.

    Raises TapError for a path, layer or expert that the model does not have, NotCapturedError for one that was not kept
    (naming the capture to ask for).
    """

    def __init__(self, session: Session, pass_index: int = -1) -> None:
        self._session = session
        self._pass = pass_index
        self._epoch = session._engine.truncations

    def __getitem__(self, path: str) -> Array:
        return self._view(self._session.model._taps.find(path))

    def __iter__(self) -> Iterator[str]:
        return (path for path, _ in self._places(experts=True))

    def __len__(self) -> int:
        return sum(1 for _ in self._places(experts=True))

    def __contains__(self, path: object) -> bool:
        try:
            place = self._session.model._taps.find(path)
        except ColibriError:
            return False
        return self._session._engine.captures(place.kind, max(place.layer, 0))

    def paths(self, pattern: str = "*") -> list[str]:
        """The kept paths that match `pattern`; `*` stands for any run of characters:
        `tape.paths("layers.*.moe.gates")`.
        """
        wanted = matcher(pattern)
        return [path for path in self if wanted.fullmatch(path)]

    def stored(self) -> list[str]:
        """The kept paths without those of single experts, whose rows are slices of `layers.{l}.moe.dispatch.*`."""
        return [path for path, _ in self._places(experts=False)]

    def router_logits(self, layer: int) -> Array:
        """(T, E) float32: the router's output before any softmax."""
        return self[f"layers.{layer}.moe.router_logits"]

    def scores(self, layer: int) -> Array:
        """(T, E) float32: exactly what the top-k selection compares."""
        return self[f"layers.{layer}.moe.scores"]

    def expert_ids(self, layer: int) -> Array:
        """(T, k) int32: the chosen experts by descending score."""
        return self[f"layers.{layer}.moe.expert_ids"]

    def gates(self, layer: int) -> Array:
        """(T, k) float32: the factors really applied."""
        return self[f"layers.{layer}.moe.gates"]

    def expert_inputs(self, layer: int, expert: int) -> Array:
        """(n, H) float32: what `expert` read in the last pass (of a pass' tape: in that pass). (0, H) when nobody chose
        it.
        """
        return self[f"layers.{layer}.moe.experts.{expert}.input"]

    def expert_outputs(self, layer: int, expert: int) -> Array:
        """(n, H) float32: what `expert` answered there, before its gate."""
        return self[f"layers.{layer}.moe.experts.{expert}.output"]

    def expert_rows(self, layer: int, expert: int) -> dict[str, Array]:
        """All rows that `expert` of `layer` received, joined over the passes in token order: a copy.

        Returns a dict with `tokens` (n,) int32 and every kept tap of the expert, (n, …) float32.
        Raises TapError for a layer or expert that does not exist, NotCapturedError when expert rows were not kept.
        """
        table, engine = self._session.model._taps, self._session._engine
        first = table.find(f"layers.{layer}.moe.experts.{expert}.tokens")
        passes = range(engine.pass_count) if self._pass < 0 else range(self._pass, self._pass + 1)
        rows = {}
        for number, kind in enumerate(table.kinds):
            place = Place(number, first.layer, first.expert)
            if kind.scope == "expert" and (number == first.kind or engine.captures(number, place.layer)):
                parts = [self._view(place, index) for index in passes] or [self._view(place)]
                rows[kind.path.rpartition(".")[2]] = np.concatenate(parts)
        return rows

    def _places(self, experts: bool) -> Iterator[tuple[str, Place]]:
        engine = self._session._engine
        return (
            (path, place)
            for path, place in self._session.model._taps.places(experts)
            if engine.captures(place.kind, max(place.layer, 0))
        )

    def _view(self, place: Place, pass_index: int | None = None) -> Array:
        number = self._pass if pass_index is None else pass_index
        try:
            array = self._session._engine.tap(place.kind, place.layer, place.expert, number)
        except ArgumentError:  # no such pass
            self._check_not_abandoned()
            raise
        self._check_not_abandoned()  # afterwards: another thread may have reset while we looked
        return array

    def _check_not_abandoned(self) -> None:
        if self._pass >= 0 and self._epoch != self._session._engine.truncations:
            raise NotCapturedError(
                "this pass was abandoned by reset(); arrays taken from it before then are still valid"
            )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "a tape is live engine memory and cannot be pickled or copied; session.trace().save(path) writes it to disk"
        )

    def __repr__(self) -> str:
        of = "session" if self._pass < 0 else f"pass {self._pass}"
        return f"<Tape of {of}: {self._session._engine.length} tokens, capture {', '.join(self._session.capture)}>"
