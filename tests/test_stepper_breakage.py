"""Steppers under interrupts, odd input, changed routing and sessions that went on without them."""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
from walks import fed, held, ids_for

import colibri_lab as lab
from colibri_lab import testing

INSIDE = {
    str(Path(lab.__file__).with_name(f"{name}.py"))
    for name in ("session", "walk", "stepper", "steering", "interventions", "moment", "places", "compare")
} | {contextlib.__file__}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return lab.open(
        testing.tiny_model(tmp_path_factory.mktemp("models") / "tiny", family="mixtral", layers=2, experts=4)
    )


def at_router(model, capture="moe", chunk=2, count=3):
    """A walk that stands after the router of layer 1, in its first pass."""
    session = model.session(capture=capture, max_tokens=16, threads=1)
    stepper = session.stepper(ids_for(model, count), chunk=chunk)
    stepper.run_to("stage == 'router' and layer == 1")
    return session, stepper


def edit_and_step(stepper):
    stepper.edit("layers.1.moe.gates")[0, 0] = 0.5
    stepper.step()


@contextlib.contextmanager
def interrupted_step(stepper):
    """Ctrl-C as soon as the engine is asked to step."""
    engine = stepper._walk.engine

    class Interrupted:
        def __getattr__(self, name):
            if name == "step":
                raise KeyboardInterrupt
            return getattr(engine, name)

    stepper._walk.engine = Interrupted()
    try:
        yield
    finally:
        stepper._walk.engine = engine


CALLS = {
    "step": lambda stepper: stepper.step("layer"),
    "back": lambda stepper: stepper.back("layer"),
    "finish": lambda stepper: stepper.finish(),
    "ablate": lambda stepper: stepper.ablate(1, int(stepper.peek("layers.1.moe.expert_ids")[0, 0])),
    "scale": lambda stepper: stepper.scale("layers.1.moe.input", 2.0),
    "edit": edit_and_step,
    "undo": lambda stepper: stepper.undo() if stepper.edits else None,
    "locals": lambda stepper: stepper.locals(),
    "fork": lambda stepper: stepper.fork(),
    "compare": lambda stepper: stepper.compare(stepper),
}


@pytest.mark.parametrize("call", CALLS)
def test_G4_an_interrupt_anywhere_leaves_a_stepper_whole(tiny, call):
    """KeyboardInterrupt at many places inside, its traceback kept as a notebook keeps it: the session is free, the end
    has the bytes of the edits that are listed, and undoing them those of a plain run.
    """
    ids, left = ids_for(tiny, 3), 0
    plain = held(fed(tiny, [ids[:2], ids[2:]], "moe"))

    def profiler(frame, event, argument):
        nonlocal left
        if frame.f_code.co_filename in INSIDE and event in ("call", "c_return", "return"):
            left -= 1
            if left == 0:
                raise KeyboardInterrupt

    number, kept = 0, []
    while left <= 0:
        number += 1 + number // 25
        session, stepper = at_router(tiny)
        if call == "undo":
            stepper.scale("layers.1.moe.input", 3.0)
        left = number
        sys.setprofile(profiler)
        try:
            CALLS[call](stepper)
        except KeyboardInterrupt as error:
            kept.append(error)
        finally:
            sys.setprofile(None)
        assert not session._lock.locked(), f"after place {number}"
        stepper.finish()
        again = at_router(tiny)[1]
        for edit in stepper.edits:
            eval(edit.code if edit.kind != "edit" else "stepper.edit('layers.1.moe.gates').__setitem__((0, 0), 0.5)",
                 {"stepper": again})  # fmt: skip
        again.finish()
        assert held(session) == held(again.session), f"after place {number}"
        while stepper.edits:
            stepper.undo()
        stepper.finish()
        assert held(session) == plain, f"after place {number}"
    assert number > 20


def test_an_interrupted_stepper_is_refused_by_a_session_that_went_on(tiny):
    session, stepper = at_router(tiny)

    with interrupted_step(stepper), pytest.raises(KeyboardInterrupt):
        stepper.step()
    with pytest.raises(lab.BusyError, match="a pass is open"):
        session.feed([5])
    stepper.step()  # that changed nothing
    with pytest.raises(lab.BusyError, match="a pass is open"):
        session.feed([5])
    assert stepper.step("token").stage == "logits" and session.ids == stepper.ids[:2]
    stepper._walk._unsettle()
    session.reset()
    session.feed([7, 8])
    with pytest.raises(lab.BusyError, match="went on without this stepper"):
        stepper.finish()
    assert held(session) == held(fed(tiny, [[7, 8]], "moe"))


def test_what_is_written_to_a_view_after_an_interrupt_counts(tiny):
    session, stepper = at_router(tiny)
    gates = stepper.edit("layers.1.moe.gates")
    with interrupted_step(stepper), pytest.raises(KeyboardInterrupt):
        stepper.step()
    gates[0, 0] = 0.5
    stepper.finish()
    other = at_router(tiny)[1]
    edit_and_step(other)
    other.finish()
    assert held(session) == held(other.session) and len(stepper.edits) == 1


def test_a_write_is_one_edit_however_many_views_show_it(tiny):
    session, stepper = at_router(tiny, "all")
    stepper.run_to("stage == 'aggregator'")
    output = stepper.edit("layers.1.moe.output")
    same, routed = stepper.edit("layers.1.moe.output"), stepper.edit("layers.1.moe.routed")
    output[0, 0], same[0, 1], routed[0, 2] = 1, 2, 3
    assert len(stepper.edits) == 1  # noted by looking
    stepper.finish()
    stepper.undo()
    assert not stepper.edits and held(session) == held(fed(tiny, [stepper.ids[:2], stepper.ids[2:]]))


def test_where_of_a_stepper_at_an_expert_outlives_a_reset(tiny):
    session, stepper = at_router(tiny)
    where = stepper.step("expert")
    session.reset()
    assert stepper.where == where and "expert" in repr(stepper)


def test_a_patch_follows_its_tokens_in_any_order_and_over_passes(tiny):
    width = tiny.config.hidden_size
    for chunk in (1, 2, None):
        session = tiny.session(capture="all", max_tokens=16)
        stepper = session.stepper(ids_for(tiny, 4), chunk=chunk)
        rows = np.stack([np.full(width, value, np.float32) for value in (3, 1)])
        stepper.patch("layers.0.moe.output", rows, tokens=[3, 1])
        logits = np.float32([[9, 0, 0, 0], [0, 0, 9, 0]])
        stepper.patch("layers.1.moe.router_logits", logits, tokens=[2, 0])
        stepper.finish()
        np.testing.assert_array_equal(session.tape["layers.0.moe.output"][[3, 1]], rows)
        np.testing.assert_array_equal(session.tape.router_logits(1)[[2, 0]], logits)
        assert session.tape.expert_ids(1)[[2, 0], 0].tolist() == [0, 2]


def test_a_patch_of_an_expert_broadcasts_to_the_rows_that_it_has(tiny):
    session, stepper = at_router(tiny, "all", None)
    expert = int(stepper.peek("layers.1.moe.expert_ids")[0, 0])
    stepper.patch(f"layers.1.moe.experts.{expert}.output", 0.0)
    stepper.finish()
    outputs = session.tape.expert_outputs(1, expert)
    assert len(outputs) and not outputs.any()


def test_an_edit_whose_rows_have_become_fewer_is_taken_back(tiny):
    session, stepper = at_router(tiny, "all", None, 5)
    ids = np.array(stepper.peek("layers.1.moe.expert_ids"))
    expert = int(np.bincount(ids.ravel()).argmax())
    stepper.run_to(f"stage == 'expert' and layer == 1 and expert == {expert}")
    stepper.edit(f"layers.1.moe.experts.{expert}.output")[-1] = 3
    stepper.back("layer")
    sent = np.flatnonzero((ids == expert).any(axis=1)).tolist()
    stepper.ablate(1, expert, tokens=sent[:-1])
    with pytest.raises(lab.ArgumentError, match=r"there are rows \(1, .*taken back"):
        stepper.finish()
    stepper.finish()
    assert [edit.kind for edit in stepper.edits] == ["ablate"]
    stepper.undo()
    assert held(session) == held(fed(tiny, [stepper.ids]))


def test_ids_that_the_dispatcher_refuses_can_be_corrected_in_the_same_view(tiny):
    session, stepper = at_router(tiny)
    ids = stepper.edit("layers.1.moe.expert_ids")
    before = int(ids[0, 1])
    for hostile in (99, -2, 2**31 - 1, -(2**31), int(ids[0, 0])):
        ids[0, 1] = hostile
        with pytest.raises(lab.ArgumentError, match=r"expert_ids: token 0 names expert"):
            stepper.step()
        assert stepper.where.stage == "router"
    ids[0, 1] = before
    stepper.finish()
    assert held(session) == held(fed(tiny, [stepper.ids[:2], stepper.ids[2:]], "moe"))


def test_packed_rows_are_no_rows_of_tokens_even_when_there_are_as_many(tmp_path):
    model = lab.open(testing.tiny_model(tmp_path / "one", family="mixtral", layers=2, experts=4, top_k=1))
    for count, path in (
        (6, "moe.dispatch.input"),
        (1, "moe.dispatch.offsets"),
        (model.config["num_attention_heads"], "attn.weights"),
    ):
        stepper = model.session(capture=["all", "layers.0.attn.weights"], max_tokens=16).stepper(
            ids_for(model, count), chunk=None
        )
        assert stepper.run_to(f"max('layers.0.{path}') > -1e9") is None


@pytest.mark.parametrize(
    "call",
    [
        lambda s: s.patch("layers.1.moe.expert_ids", 2**40),
        lambda s: s.patch("layers.1.moe.output", None),
        lambda s: s.scale("layers.1.moe.output", 10**400),
        lambda s: s.bias_router(1, {0: 10**400}),
        lambda s: s.bias_router(1, {0: "a"}),
        lambda s: s.bias_router(1, [[1], [2, 3]]),
        lambda s: s.bias_router(1, np.zeros(4, complex)),
        lambda s: s.force(1, [0, 1], gates=["a", "b"]),
        lambda s: s.force(1, [0, 1], gates=[1j, 2]),
        lambda s: s.force(None, [0]),
        lambda s: s.ablate(None, 0),
        lambda s: s.gate_mode(np.array(["softmax", "x"])),
        lambda s: s.step(["stage"]),
        lambda s: s.breakpoints.add("token == 0", name=[]),
        lambda s: s.breakpoints.remove([]),
        lambda s: s.compare(None),
    ],
)
def test_a_wrong_kind_is_refused_and_changes_nothing(tiny, call):
    session, stepper = at_router(tiny)
    with pytest.raises(lab.ArgumentError):
        call(stepper)
    stepper.finish()
    assert not stepper.edits and held(session) == held(fed(tiny, [stepper.ids[:2], stepper.ids[2:]], "moe"))


def test_the_code_of_an_edit_is_python_whatever_gave_its_numbers(tiny):
    stepper = at_router(tiny)[1]
    edit = stepper.force(1, np.array([2, 0]), gates=np.float32([0.5, 0.25]), tokens=np.array([1]))
    assert edit.code == "stepper.force(layer=1, experts=[2, 0], gates=[0.5, 0.25], tokens=[1])"


def test_a_fork_does_not_hold_its_parent(tiny):
    stepper = at_router(tiny)[1]
    stepper.breakpoints.add("margin < 0.5")
    fork, parent = stepper.fork(), weakref.ref(stepper.session)
    del stepper
    gc.collect()
    assert parent() is None and list(fork.breakpoints) == ["1"]
    with pytest.raises(lab.TapError):
        fork.breakpoints.add("norm('moe.nothing') > 1")
