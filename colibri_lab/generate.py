"""Continuing a session token by token; never with a token drawn from numbers that are not numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab._engine import core
from colibri_lab.errors import ArgumentError, BusyError, ColibriError, NonFiniteError, is_whole
from colibri_lab.progress import Progress, shown
from colibri_lab.sampling import check_options, sample
from colibri_lab.streaming import TextStream

if TYPE_CHECKING:
    from colibri_lab.session import Session

__all__ = ["Token", "generate"]

Array = NDArray[Any]


@dataclass(frozen=True)
class Token:
    """One generated token: its `id` (also `int(token)`), the `text` that it completes, and its natural-log probability
    at temperature 1.
    """

    id: int
    text: str
    logprob: float

    def __int__(self) -> int:
        return self.id

    __index__ = __int__


def generate(
    session: Session,
    n: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    stop_ids: Sequence[int] | None,
    progress: Progress,
) -> Iterator[Token]:
    """See `Session.generate`. Arguments are checked here, at the call; the tokens come from the iterator."""
    if not is_whole(n) or n < 0:
        raise ArgumentError(f"generate takes a number of tokens, 0 or more; this is {n!r:.80}")
    check_options(temperature, top_k, top_p)
    session._check_closed()
    if not session._engine.length:
        raise ArgumentError("an empty session has nothing to continue; feed it first")
    if not is_whole(seed) or seed < 0:
        raise ArgumentError(f"seed must be a whole number, 0 or more; it is {seed!r:.80}")
    stops = frozenset(session.model.end_ids) if stop_ids is None else _stops(stop_ids)
    rng = np.random.default_rng(seed)

    def draw(logits: Array) -> tuple[int, float]:
        return sample(logits, temperature=temperature, top_k=top_k, top_p=top_p, rng=rng)

    return _tokens(session, int(n), draw, stops, progress)


def _stops(stop_ids: Iterable[int]) -> frozenset[int]:
    ids = list(stop_ids) if isinstance(stop_ids, Iterable) else [None]
    if not all(map(is_whole, ids)):
        raise ArgumentError(f"stop_ids must be whole token ids such as (2,), or () for none; this is {stop_ids!r:.80}")
    return frozenset(map(int, ids))


def _tokens(
    session: Session, n: int, draw: Callable[[Array], tuple[int, float]], stops: frozenset[int], progress: Progress
) -> Iterator[Token]:
    stream = _stream(session)
    length, epoch = session._engine.length, session._engine.truncations
    with shown(progress, n, "tokens", "generate") as report:
        for step in range(n):
            if session._engine.length != length or session._engine.truncations != epoch:
                reset = " by reset()" if session._engine.truncations != epoch else ""
                raise BusyError(
                    f"while generate was running, another hand took the session from {length} to "
                    f"{session._engine.length} tokens{reset}"
                )
            try:
                number, logprob = draw(session.logits)
            except NonFiniteError:
                raise _not_finite(session, step) from None
            session.feed([number], progress=False)
            length += 1
            last = step == n - 1 or number in stops or length == session.max_tokens
            text = "" if stream is None else stream.push(number) + (stream.flush() if last else "")
            if report is not None:
                report((step + 1) / n)
            yield Token(number, text, logprob)
            if number in stops:
                return


def _stream(session: Session) -> TextStream | None:
    """A text stream that stands at the end of the session: a character begun by its last tokens is finished by the
    next.
    """
    if session.model.tokenizer is None:
        return None
    stream = TextStream(session.model.tokenizer)
    for number in session.ids[-4:]:  # no character has more than four bytes
        stream.push(number)
    return stream


def _not_finite(session: Session, step: int) -> NonFiniteError:
    """The error that names the origin, by `lab.nan.find`, which replays the ids when this session kept too little."""
    from colibri_lab.nan import find
    from colibri_lab.nan.report import born

    nan, inf, _, _ = core.census(session.logits)
    count, size = session._engine.length, session.logits.size
    try:
        found = find(session, progress=False)
        place = "what was captured of the layers is finite" if found is None else ""
    except ColibriError as error:
        found, place = None, f"where they were born is not known: {str(error).rstrip('.')}"
    if found is not None:
        origin = found.origin
        place = f"born in {born(found, origin)} ({origin.path}): {origin.cause.rstrip('.')}"
        place += "".join(f". {note.rstrip('.')}" for note in found.notes[:1])
    return NonFiniteError(
        f"step {step} of generate, after {count} tokens: of {size} logits {nan} are NaN and {inf} Inf, so no token can "
        f"be chosen; {place}. lab.nan.find(session) tells more, lab.nan.cures what helps"
    )
