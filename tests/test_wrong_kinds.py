"""Arguments of a wrong kind: each is refused with a sentence that shows it, not by whatever stumbles over it first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import colibri_lab as lab
from colibri_lab.testing import synthetic_trace

MODEL = lab.open()
SESSION = MODEL.session(max_tokens=8)
TOKENIZER: Any = MODEL.tokenizer
TRACE = synthetic_trace(2, 4, 2, 5, hidden=3)

CALLS: dict[str, Callable[[Any], Any]] = {
    "encode": TOKENIZER.encode,
    "decode": TOKENIZER.decode,
    "decode one": lambda wrong: TOKENIZER.decode([wrong]),
    "texts": lambda wrong: TOKENIZER.texts([1, wrong]),
    "token": TOKENIZER.token,
    "nan.weights": lab.nan.weights,
    "tape": lambda wrong: SESSION.tape[wrong],
    "tape.paths": SESSION.tape.paths,
    "trace": lambda wrong: TRACE[wrong],
    "trace expert": lambda wrong: TRACE.expert_rows(0, wrong),
    "trace layer": lambda wrong: TRACE.expert_rows(wrong, 0),
    "config": lambda wrong: MODEL.config[wrong],
    "weights": lambda wrong: MODEL.weights[wrong],
    "synthetic": synthetic_trace,
    "feed": SESSION.feed,
}


@pytest.mark.parametrize("wrong", [None, 1.5, [None], {"a": 1}, object()], ids=lambda wrong: type(wrong).__name__)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_thing_of_a_wrong_kind_is_refused_with_a_sentence(call: Callable[[Any], Any], wrong: Any) -> None:
    with pytest.raises(lab.ColibriError, match=r"\w+ \w+ \w+"):
        call(wrong)


def test_ids_of_every_whole_kind_are_taken_and_unknown_ones_shown() -> None:
    """NumPy's, and generated tokens; an id that no vocabulary has is ⟨id⟩."""
    session = MODEL.session(max_tokens=8)
    session.feed([1, 100])
    tokens = list(session.generate(3, stop_ids=()))
    assert TOKENIZER.decode(tokens) == TOKENIZER.decode(np.array([token.id for token in tokens]))
    assert TOKENIZER.decode([2**40, -1]) == f"⟨{2**40}⟩⟨-1⟩" and TOKENIZER.token(2**40) is None


def test_a_pass_that_is_not_there_is_named() -> None:
    session = MODEL.session(max_tokens=8)
    session.feed([1])
    session.feed([2])
    assert session.passes[-2].start == 0 and [p.index for p in session.passes] == [0, 1]
    for index in (2, -3):
        with pytest.raises(IndexError, match=f"no pass {index}; the session has 2"):
            session.passes[index]
