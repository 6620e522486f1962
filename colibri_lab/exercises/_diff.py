"""Exercises of notebook 03: where a port leaves the reference, and why."""

from __future__ import annotations

from functools import cache

import numpy as np

from colibri_lab.difference.result import Diff
from colibri_lab.difference.verdict import diff
from colibri_lab.exercises._answers import Verdict, near, number, pair, several, whole
from colibri_lab.exercises._ports import TEXT, port, recording
from colibri_lab.model import open

__all__ = ["diff_1", "diff_2", "diff_3", "diff_4"]


def diff_1(answer: object) -> Verdict:
    """Which expert of which layer of port 1 is wrong? A pair (layer, expert), or its path."""
    place = pair(answer)
    if place is None:
        return Verdict(False, 'The answer is a pair (layer, expert), such as (1, 0), or "layers.1.moe.experts.0".')
    first = _found(1).first_divergence
    assert first is not None
    if place == (first.layer, first.expert):
        return Verdict(True, "All before it is equal, and what comes later follows from it.")
    if place[0] == first.layer:
        return Verdict(False, "The layer is right. Which of its experts' rows differ? d.first_divergence.expert knows.")
    if place[0] > (first.layer or 0):
        return Verdict(False, "That differs too, but something before it differs already: take the first divergence.")
    return Verdict(False, "Nothing differs there. d = lab.diff(reference, port); d.first_divergence.")


def diff_2(answer: object) -> Verdict:
    """Port 2's router of layer 4: its logits are those of the reference times what? A number, within 2 percent."""
    factor = number(answer)
    if factor is None:
        return Verdict(False, "The answer is a number, such as 1.25.")
    values = _found(2).values("layers.4.moe.router_logits")
    truth = float((values.a * values.b).sum() / (values.a * values.a).sum())  # least squares
    if near(factor, truth):
        return Verdict(True, "The choice stays the same, as the order of the logits does; the gates become flatter.")
    if near(factor, 1 / truth):
        return Verdict(False, "That is reference ÷ port.")
    return Verdict(False, 'Divide d.values("layers.4.moe.router_logits").b by .a of the same.')


def diff_3(answer: object) -> Verdict:
    """No known fault explains port 3. Which query heads of layer 2 are exchanged? Their two numbers."""
    given = [whole(part) for part in several(answer)]
    if len(given) != 2 or None in given or isinstance(answer, str):
        return Verdict(False, "The answer is two heads, such as [0, 3].")
    values = _found(3).values("layers.2.attn.q")  # (T, heads, head_dim)
    moved = np.flatnonzero(np.abs(values.b - values.a).max(axis=(0, 2)) > 1e-3)
    if set(given) == set(moved.tolist()):
        return Verdict(True, "Each has what the other should have: a permutation in the conversion of the weights.")
    if set(given) & set(moved.tolist()):
        return Verdict(False, "One of them.")
    return Verdict(False, 'd.values("layers.2.attn.q") has .a and .b, (tokens, heads, head_dim) each: look per head.')


def diff_4(answer: object) -> Verdict:
    """The two recordings in bfloat16 send two tokens to other experts. One is a tie, and the other follows from it. The
    number of the token that is the tie?
    """
    token = whole(answer)
    if token is None:
        return Verdict(False, "The answer is a token's number: a whole number such as 12.")
    flips = diff(recording("bfloat16-eager"), recording("bfloat16-sdpa"), progress=False).flips
    if token in [flip.token for flip in flips if flip.verdict == "tie"]:
        return Verdict(True, "Its experts score alike, so either choice is right. The other token attends to it.")
    if token in [flip.token for flip in flips]:
        return Verdict(False, "That one follows from the other: its router already read something else.")
    return Verdict(False, "That token went to the same experts. d.flips lists those that did not, with .verdict.")


@cache
def _found(number: int) -> Diff:
    """The engine's own run beside a port's."""
    session = open().session(capture="all")
    session.feed(TEXT)
    return diff(session, port(number), progress=False)
