"""The exercises of notebook 03: right answers in every spelling, wrong ones with a hint, and faults that are real."""

from __future__ import annotations

import numpy as np
import pytest

import colibri_lab as lab

RIGHT = {
    "diff_1": [(3, 6), [3, 6], np.array([3, 6]), "layers.3.moe.experts.6", "layers.3.moe.experts.6.gate", "3, 6"],
    "diff_2": [0.5, "0.5", np.float32(0.5), [0.501], 1 / 2],
    "diff_3": [[1, 2], (2, 1), {1, 2}, np.array([1, 2]), ["1", "2"]],
    "diff_4": [73, "73", np.int64(73), [73]],
}
WRONG = {
    "diff_1": [(3, 5), (4, 6), (0, 0), (99, 99), (-1, 2)],
    "diff_2": [2, 1, 0, -0.5, float("nan"), float("inf"), 1e300],
    "diff_3": [[0, 3], [1, 1], [0, 1], [-1, 9]],
    "diff_4": [83, 0, -1, 10**9],
}
NO_ANSWERS = [None, "what", object(), [], {}, [[1, 2], [3, 4]], ["x", None], 3 + 4j, b"73", ...]


@pytest.mark.parametrize(("name", "number"), [(name, n) for name in RIGHT for n in range(len(RIGHT[name]))])
def test_every_spelling_of_a_right_answer_passes(name: str, number: int) -> None:
    verdict = getattr(lab.exercises, name)(RIGHT[name][number])
    assert verdict, verdict


@pytest.mark.parametrize(("name", "number"), [(name, n) for name in WRONG for n in range(len(WRONG[name]))])
def test_a_wrong_answer_gets_a_hint_that_does_not_tell(name: str, number: int) -> None:
    verdict = getattr(lab.exercises, name)(WRONG[name][number])
    assert not verdict and len(verdict.message) > 10, verdict


@pytest.mark.parametrize("name", RIGHT)
def test_what_cannot_be_an_answer_is_told_what_one_looks_like(name: str) -> None:
    for thing in NO_ANSWERS:
        verdict = getattr(lab.exercises, name)(thing)
        assert not verdict and "answer is" in verdict.message, (thing, verdict)


def test_known_mistakes_are_named() -> None:
    """A later layer, the inverse of a factor, one head of two, the token that follows from the tie."""
    assert "already" in lab.exercises.diff_1((4, 6)).message
    assert "÷" in lab.exercises.diff_2(2).message
    assert lab.exercises.diff_3([0, 1]).message == "One of them."
    assert "follows" in lab.exercises.diff_4(83).message


def test_the_answers_agree_with_numpy_on_the_traces() -> None:
    """Without lab.diff: the first arrays that differ from a plain run, by hand."""
    session = lab.open().session(capture="all")
    session.feed(lab.exercises.TEXT)
    plain = session.trace()
    one, two, three = (lab.exercises.port(number) for number in (1, 2, 3))
    same = [path for path in plain if plain[path].shape == one[path].shape and np.array_equal(plain[path], one[path])]
    assert {"layers.3.moe.expert_ids", "layers.3.moe.dispatch.input", "layers.3.moe.gates"} <= set(same)
    offsets = plain["layers.3.moe.dispatch.offsets"][0]
    rows = np.flatnonzero((plain["layers.3.moe.dispatch.gate"] != one["layers.3.moe.dispatch.gate"]).any(axis=1))
    assert rows.tolist() == list(range(offsets[6], offsets[7]))
    assert np.array_equal(one["layers.3.moe.dispatch.up"][rows], plain["layers.3.moe.dispatch.gate"][rows])
    assert np.array_equal(two["layers.4.moe.router_logits"], plain["layers.4.moe.router_logits"] * np.float32(0.5))
    assert np.array_equal(three["layers.2.attn.q"], plain["layers.2.attn.q"][:, [0, 2, 1, 3]])


def test_the_recording_of_transformers_is_that_of_the_bundled_model() -> None:
    """Same identity, same ids, and values within rounding; another name is refused with those that there are."""
    reference = lab.exercises.recording("float32")
    model = lab.open()
    assert reference.meta["model_identity"] == model.identity and reference.meta["producer"] == "transformers"
    assert reference.ids == model.tokenizer.encode(lab.exercises.TEXT)
    assert lab.diff(reference, _session(model), progress=False).verdict == "identical"
    with pytest.raises(lab.ArgumentError, match="there are bfloat16-eager, bfloat16-sdpa, float32"):
        lab.exercises.recording("float64")
    with pytest.raises(lab.ArgumentError, match="ports 1 to 3"):
        lab.exercises.port(4)


def _session(model: lab.Model) -> lab.Session:
    session = model.session(capture="all")
    session.feed(lab.exercises.TEXT)
    return session
