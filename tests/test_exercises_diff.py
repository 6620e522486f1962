"""The exercises of notebook 03: faults that are real, and hints."""

from __future__ import annotations

import numpy as np
import pytest

import colibri_lab as lab


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
