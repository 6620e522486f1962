"""Continuing a session token by token; never with a token drawn from numbers that are not numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from colibri_lab._engine import core
from colibri_lab.errors import ArgumentError, BusyError, NonFiniteError
from colibri_lab.progress import Progress, shown
from colibri_lab.sampling import sample
from colibri_lab.streaming import TextStream

if TYPE_CHECKING:
    from colibri_lab.session import Session

__all__ = ["Token", "generate"]


@dataclass(frozen=True)
class Token:
    """One generated token: its `id` (also `int(token)`), the `text` that it completes, and its natural-log probability at temperature 1."""

    id: int
    text: str
    logprob: float

    def __int__(self) -> int:
        return self.id


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
    if isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 0:
        raise ArgumentError(f"generate takes a number of tokens, 0 or more; this is {n!r:.80}")
    stops = frozenset(session.model.end_ids if stop_ids is None else (int(i) for i in stop_ids))
    if not len(session):
        raise ArgumentError("an empty session has nothing to continue; feed it first")

    def draw(logits: Any) -> tuple[int, float]:
        return sample(logits, temperature=temperature, top_k=top_k, top_p=top_p, rng=rng)

    rng = np.random.default_rng(seed)
    return _tokens(session, int(n), draw, stops, progress)


def _tokens(
    session: Session, n: int, draw: Callable[[Any], tuple[int, float]], stops: frozenset[int], progress: Progress
) -> Iterator[Token]:
    tokenizer = session.model.tokenizer
    stream = None if tokenizer is None else TextStream(tokenizer)
    length = len(session)
    with shown(progress, n, "tokens", "generate") as report:
        for step in range(n):
            if len(session) != length:
                raise BusyError(f"the session went from {length} to {len(session)} tokens while generate was running; start generate again")
            logits = session.logits
            nan, inf, _, _ = core.census(logits)
            if nan or (inf and not np.isneginf(logits[np.isinf(logits)]).all()) or inf == logits.size:
                raise _not_finite(session, step, nan, inf)
            number, logprob = draw(logits)
            session.feed([number], progress=False)
            length += 1
            last = step == n - 1 or number in stops or length == session.max_tokens
            text = "" if stream is None else stream.push(number) + (stream.flush() if last else "")
            if report is not None:
                report((step + 1) / n)
            yield Token(number, text, logprob)
            if number in stops:
                return


def _not_finite(session: Session, step: int, nan: int, inf: int) -> NonFiniteError:
    """The error that names where the first bad value stands. Replays the ids when this session did not keep enough to tell."""
    layers = range(session.model.config.num_hidden_layers)
    wanted = ["embed", *(f"layers.{layer}.output" for layer in layers), "norm"]
    seen, how = session, "as captured"
    if any(path not in session.tape for path in wanted):
        how = f"found by replaying the {len(session)} ids in a session of their own that captures the layers' outputs"
        seen = session.model.session(capture=wanted, max_tokens=len(session), gate_mode=session.gate_mode)
        seen.feed(session.ids, progress=False)
    place = "the final norm is finite, so they arise in the output matrix (lm_head)"
    for path in wanted:
        array = seen.tape[path]
        first = core.census(array)[3]
        if first >= 0:
            token = first // array.shape[1]
            where = f"layer {path.split('.')[1]}" if path.startswith("layers") else "outside the layers"
            place = f"the first bad value stands in '{path}' ({where}), token {token}"
            break
    return NonFiniteError(
        f"step {step} of generate (token {len(session)}): the logits hold {nan} NaN and {inf} Inf, so no token can be chosen; {place} ({how})"
    )
