"""The exercises of notebook 04: diseases that are real, and hints."""

from __future__ import annotations

import numpy as np
import pytest

import colibri_lab as lab


def test_known_mistakes_are_named() -> None:
    """Another weight of the layer, the later overflow, the tokens that met the expert instead of those it ruined."""
    assert "layer is right" in lab.exercises.nan_1("layers.1.attn.k").message
    assert "name in the file" in lab.exercises.nan_1("model.layers.1.self_attn.v_proj.weight").message
    assert "before it" in lab.exercises.nan_2((5, 2)).message
    assert "Others read" in lab.exercises.nan_3(1).message


def test_the_weight_of_the_origin_is_an_answer_as_it_is() -> None:
    session = lab.exercises.patient(5).session(capture="all")
    session.feed(lab.exercises.TEXT)
    found = lab.nan.find(session)
    assert found is not None and lab.exercises.nan_1(found.origin.weight)


def test_headroom_of_the_library_is_the_answer_of_the_fourth() -> None:
    session = lab.open().session(capture="all")
    session.feed(lab.exercises.TEXT)
    assert lab.exercises.nan_4(min(lab.nan.headroom(session).table["float16"]))


def test_the_diseases_agree_with_numpy() -> None:
    """Without lab.nan: which patients are ill in float32, where the first array that is not finite lies, and that those
    of float16 compute what the healthy model computes.
    """
    healthy = lab.open().session(capture="all")
    healthy.feed(lab.exercises.TEXT)
    first = {}
    for number in range(1, 7):
        session = lab.exercises.patient(number).session(capture="all")
        session.feed(lab.exercises.TEXT)
        trace = session.trace()
        bad = [path for path in trace if trace[path].dtype.kind == "f" and not np.isfinite(trace[path]).all()]
        first[number] = bad[0] if bad else None
        if not bad:
            assert np.array_equal(session.logits, healthy.logits)
    assert first == {
        1: "layers.2.moe.dispatch.output", 2: "layers.2.attn.norm", 3: None, 4: "layers.3.moe.dispatch.up",
        5: "layers.1.attn.v", 6: None,
    }  # fmt: skip


def test_the_right_answers_agree_with_numpy() -> None:
    """The ruined tokens of patient 1, the first overflow of patient 6."""
    one = lab.exercises.patient(1).session(capture="all")
    one.feed(lab.exercises.TEXT)
    assert (~np.isfinite(one.tape["logits"]).all(axis=1)).sum() == 10
    six = lab.exercises.patient(6).session(capture="all", emulate="float16")
    six.feed(lab.exercises.TEXT)
    trace = six.trace()
    up, offsets = trace["layers.3.moe.dispatch.up"], trace["layers.3.moe.dispatch.offsets"][0]
    row = int(np.argmax(~np.isfinite(up).all(axis=1)))
    assert np.searchsorted(offsets, row, side="right") - 1 == 5
    assert all(np.isfinite(trace[path]).all() for path in trace if path < "layers.3" and trace[path].dtype.kind == "f")


@pytest.mark.parametrize("number", [0, 7, -1, 1.5, None, "1", True])
def test_a_patient_that_does_not_exist_is_refused(number: object) -> None:
    with pytest.raises(lab.ArgumentError, match="patients 1 to 6"):
        lab.exercises.patient(number)
