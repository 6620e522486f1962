"""Two runs compared: the verdict, the first divergence and what the table, the report and the notes say."""

from __future__ import annotations

import json

import numpy as np
import pytest

import colibri_lab as lab

TEXT = "The engine counts its gates."


@pytest.fixture(scope="module")
def model() -> lab.Model:
    return lab.open()


def run(model: lab.Model, sizes: list[int] | None = None, capture: object = "all", **options) -> lab.Trace:
    """A trace of TEXT, fed at once or in pieces of these sizes."""
    session = model.session(capture=capture, **options)
    ids = model.tokenizer.encode(TEXT)
    start = 0
    for size in sizes or [len(ids)]:
        session.feed(ids[start : start + size])
        start += size
    return session.trace()


def test_how_a_run_was_cut_into_passes_does_not_show(model):
    """Rows of experts are packed pass by pass, yet a chunked run is the same bits in every tap."""
    a = run(model)
    d = lab.diff(a, run(model, [4, 1, len(a.ids) - 5]))
    assert d.verdict == "identical" and d.exit_code == 0
    assert set(d.table["state"]) == {"same bits", "same"}
    assert d.first_divergence is None and d.flips == () and d.notes == () and d.diagnosis is None
    assert (d.prediction.kl == 0).all() and d.prediction.same_top.all() and (d.prediction.agreement == 1).all()
    assert "same bits everywhere" in d.summary


def test_A1_raw_logits_as_gates_are_found_at_the_gates(model):
    """Ids, logits and scores are equal; the gates alone differ, and the first divergence says so."""
    d = lab.diff(run(model), run(model, gate_mode="raw_logits"))
    assert d.verdict == "defect" and d.exit_code == 1
    first = d.first_divergence
    assert (first.path, first.layer, first.stage, first.token) == ("layers.0.moe.gates", 0, "router", 0)
    assert "Ids are equal, gates differ" in first.cause
    assert all(flip.verdict == "downstream" for flip in d.flips)


def test_gates_without_renormalisation_are_told_by_their_factor_per_token(model):
    d = lab.diff(run(model), run(model, gate_mode="softmax"))
    assert d.first_divergence.path == "layers.0.moe.gates"
    assert "in A the gates of a token add up to 1, in B they do not" in d.first_divergence.cause


def test_what_a_run_changed_itself_is_downstream(model):
    """An ablated expert is no fault: the trace's edits say what was done."""
    a = run(model)
    session = model.session(capture="all")
    stepper = session.stepper(a.ids)
    stepper.ablate(1, int(a["layers.1.moe.expert_ids"][3, 0]))
    stepper.finish()
    d = lab.diff(a, session)
    assert d.verdict == "downstream" and d.exit_code == 1
    assert d.first_divergence.layer == 1 and "stepper.ablate" in d.first_divergence.cause
    assert {flip.verdict for flip in d.flips} == {"downstream"}


def test_a_report_and_its_json_say_the_same(model):
    d = lab.diff(run(model), run(model, gate_mode="softmax"), names=("right", "wrong"))
    text, data = d.report(), json.loads(d.to_json())
    assert text.startswith("DEFECT: B leaves A at layers.0.moe.gates") and "right" in text and "wrong" in text
    assert all(len(line) <= 100 for line in text.splitlines())
    assert data["verdict"] == d.verdict and data["summary"] == d.summary and len(data["table"]) == len(d.table)
    assert d.report() == lab.diff(d.a, d.b, names=d.names).report()


def test_runs_without_a_common_token_or_tap_are_refused_by_name(model):
    a = run(model, capture="routing")
    other = model.session(capture="routing")
    other.feed([7, 8, 9])
    with pytest.raises(lab.ArgumentError, match="no first token in common"):
        lab.diff(a, other)
    some = lab.Trace({"embed": np.zeros((len(a.ids), 4), np.float32)}, ids=a.ids, texts=[], meta=a.meta)
    rest = lab.Trace({"norm": np.zeros((len(a.ids), 4), np.float32)}, ids=a.ids, texts=[], meta=a.meta)
    with pytest.raises(lab.ArgumentError, match="A holds embed, and B holds norm"):
        lab.diff(some, rest)
