"""Exercises of notebook 04: where a run stops being finite, and why."""

from __future__ import annotations

import re
from functools import cache

import numpy as np

from colibri_lab import nan
from colibri_lab.exercises._answers import Verdict, near, number, pair, several, whole
from colibri_lab.exercises._patients import patient
from colibri_lab.exercises._ports import TEXT
from colibri_lab.model import open
from colibri_lab.nan.result import Found, WeightPlace

__all__ = ["nan_1", "nan_2", "nan_3", "nan_4"]


def nan_1(answer: object) -> Verdict:
    """Which weight makes patient 5 ill? Its name, with or without the index."""
    if isinstance(answer, WeightPlace):
        answer = answer.name
    given = [answer] if isinstance(answer, str) else several(answer)
    name = re.sub(r"\s*\[.*", "", given[0].strip()) if given and isinstance(given[0], str) else ""
    if not name:
        return Verdict(False, 'The answer is the name of a weight, such as "layers.0.attn.q".')
    if name.startswith("model."):
        return Verdict(False, "That is a name in the file. The answer is the name that model.weights has for it.")
    origin = _found(5, None).origin
    assert origin.weight is not None
    if name == origin.weight.name:
        return Verdict(True, "All that the layer read was finite, and what came out was not.")
    if name == origin.path or name.split(".")[:2] == origin.weight.name.split(".")[:2]:
        return Verdict(False, "The layer is right. found.origin.weight says which of its weights.")
    return Verdict(False, "That weight is finite. found = lab.nan.find(session); found.origin.weight.")


def nan_2(answer: object) -> Verdict:
    """In float16 patient 6 overflows. Which expert is the first? A pair (layer, expert), or its path."""
    place = pair(answer)
    if place is None:
        return Verdict(False, 'The answer is a pair (layer, expert), such as (1, 0), or "layers.1.moe.experts.0".')
    origins = _found(6, "float16").origins
    if place == (origins[0].layer, origins[0].expert):
        return Verdict(True, "Later layers never had a chance: what they read was ruined already.")
    if place == (5, 2):
        return Verdict(False, "It is scaled in the same way, but something before it overflows already.")
    return Verdict(False, 'Run lab.exercises.patient(6).session(capture="all", emulate="float16"); found.origin.')


def nan_3(answer: object) -> Verdict:
    """How many of the tokens of TEXT have ruined logits in patient 1? A whole number."""
    count = whole(answer)
    if count is None:
        return Verdict(False, "The answer is a whole number, such as 3.")
    found = _found(1, None)
    if count == len(found.propagation.ruined):
        return Verdict(True, "One token met the bad expert. Those behind it attend to it, and those before it do not.")
    if count == len(found.origin.tokens):
        return Verdict(False, "So many met the bad expert. Others read what these left behind.")
    return Verdict(False, "found.propagation.ruined lists them.")


def nan_4(answer: object) -> Verdict:
    """How many bits of headroom has the healthy model left in float16, at its tightest tap? Within 2 percent."""
    bits = number(answer)
    if bits is None:
        return Verdict(False, "The answer is a number of bits, such as 4.5.")
    session = open().session(capture="all")
    session.feed(TEXT)
    trace = session.trace()
    largest = max(float(np.abs(trace[path]).max()) for path in trace if trace[path].dtype.kind == "f")
    if near(bits, float(np.log2(65504 / largest))):
        return Verdict(True, "So often can its largest number double before float16 ends.")
    return Verdict(False, "lab.nan.headroom(session) has a row for every tap; the fewest bits count.")


@cache
def _found(number: int, emulate: str | None) -> Found:
    session = patient(number).session(capture="all", emulate=emulate)
    session.feed(TEXT)
    found = nan.find(session)
    assert found is not None
    return found
