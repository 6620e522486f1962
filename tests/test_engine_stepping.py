"""A pass run stage by stage through the compiled module: the bytes of feed, open rows, and who may touch them when."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest

import colibri_lab as lab
from colibri_lab._engine import core

KINDS = {kind.path: number for number, kind in enumerate(core.tap_kinds)}
IDS = np.array([401, 273, 30, 7, 1500, 401, 9, 88, 2, 273, 61], np.int32)
MORE = np.array([4, 8, 15, 16, 23], np.int32)
GATES, CHOSEN = KINDS["layers.{l}.moe.gates"], KINDS["layers.{l}.moe.expert_ids"]


@pytest.fixture(scope="module")
def model():
    return lab.open()


def new(model, capture="all", threads=1, max_tokens=64):
    return core.Session(model._engine, [capture], max_tokens, threads, None)


def step_to(session, stage, layer):
    while (following := session.next_stage()) is not None and following[:2] != (stage, layer):
        session.step(None)


def finish(session):
    while session.next_stage() is not None:
        session.step(None)


def shown(model, session):
    """The bytes of every tap that the session keeps, pass by pass for experts, and of the last logits."""
    out = {"last": session.logits().tobytes()}
    for path, kind in KINDS.items():
        for layer in range(model.config.num_hidden_layers if "{l}" in path else 1):
            if not session.captures(kind, layer):
                continue
            for expert in range(model.config.num_experts if "{e}" in path else 1):
                for index in range(session.pass_count) if "{e}" in path else [-1]:
                    out[path, layer, expert, index] = session.tap(kind, layer, expert, index).tobytes()
    return out


@pytest.mark.parametrize("capture", ["none", "routing", "moe", "all"])
@pytest.mark.parametrize("threads", [1, 2])
def test_stepping_shows_the_bytes_of_feed(model, capture, threads):
    ran, stepped = new(model, capture, threads), new(model, capture, threads)
    for ids in (IDS, MORE, MORE[:1]):
        ran.feed(ids, None)
        stepped.begin(ids)
        assert stepped.open_pass() == (ran.length - len(ids), ran.length)
        assert stepped.length == ran.length - len(ids)
        while (upcoming := stepped.next_stage()) is not None:
            assert stepped.step(None) == upcoming
        assert stepped.open_pass() is None
    assert shown(model, stepped) == shown(model, ran)


def test_each_place_names_its_stage_layer_and_expert(model):
    session = new(model)
    session.begin(IDS[:1])
    places = []
    while session.next_stage() is not None:
        places.append(session.step(None))
    expected = [("embed", -1, -1)]
    for layer in range(model.config.num_hidden_layers):
        chosen = sorted(session.tap(CHOSEN, layer, -1, -1)[0].tolist())
        expected += [(stage, layer, -1) for stage in ("attention", "router", "dispatcher")]
        expected += [("expert", layer, expert) for expert in chosen]
        expected += [(stage, layer, -1) for stage in ("aggregator", "residual")]
    assert places == [*expected, ("norm", -1, -1), ("logits", -1, -1)]


def test_open_rows_are_read_only_views_or_copies_and_edits_are_views(model):
    kept, bare = new(model), new(model, "none")
    for session in (kept, bare):
        session.begin(IDS)
        step_to(session, "dispatcher", 0)
    view, copy = kept.open_tap(GATES, 0, -1), bare.open_tap(GATES, 0, -1)
    assert view.tobytes() == copy.tobytes() and not view.flags.writeable and not copy.flags.writeable
    for array in (view, copy):
        with pytest.raises(ValueError):
            array.flags.writeable = True
    edit = kept.open_edit(GATES, 0, -1)
    assert edit.flags.writeable and edit.shape == view.shape
    edit *= 2
    assert (view == 2 * copy).all()  # live
    with pytest.raises(lab.NotCapturedError, match="routing"):
        bare.open_edit(GATES, 0, -1)
    bare.open_write(GATES, 0, -1, edit)
    assert (bare.open_tap(GATES, 0, -1) == edit).all() and (copy * 2 == edit).all()
    bare.open_write(GATES, 0, -1, np.asfortranarray(edit))  # laid out otherwise, the same rows
    finish(kept)
    finish(bare)
    assert kept.logits().tobytes() == bare.logits().tobytes()


@pytest.mark.parametrize(
    "rows", [np.zeros((2, 2), np.float32), np.zeros((11, 2)), np.zeros((11, 2), ">f4"), np.zeros(22, np.float32)]
)
def test_rows_of_another_kind_are_refused(model, rows):
    session = new(model)
    session.begin(IDS)
    step_to(session, "dispatcher", 0)
    before = session.open_tap(GATES, 0, -1).tobytes()
    with pytest.raises(lab.ArgumentError, match="these rows are"):
        session.open_write(GATES, 0, -1, rows)
    assert session.open_tap(GATES, 0, -1).tobytes() == before


@pytest.mark.parametrize("path", ["layers.{l}.moe.dispatch.tokens", "layers.{l}.moe.dispatch.offsets"])
def test_the_indices_of_the_dispatcher_cannot_be_written(model, path):
    session = new(model)
    session.begin(IDS)
    step_to(session, "aggregator", 0)
    rows = np.array(session.open_tap(KINDS[path], 0, -1))
    with pytest.raises(lab.ArgumentError, match="expert_ids"):
        session.open_edit(KINDS[path], 0, -1)
    with pytest.raises(lab.ArgumentError, match="expert_ids"):
        session.open_write(KINDS[path], 0, -1, rows)


@pytest.mark.parametrize("bad", [(99, 0), (8, 1), (-2, 1), (-(2**31), 0), (2**31 - 1, 1)])
def test_an_id_of_no_expert_is_named_and_nothing_is_lost(model, bad):
    """Whatever stands in the ids: the dispatcher says where, and goes on when it was put right."""
    value, slot = bad
    plain, session = new(model), new(model)
    plain.feed(IDS, None)
    session.begin(IDS)
    step_to(session, "dispatcher", 1)
    ids = session.open_edit(CHOSEN, 1, -1)
    right = int(ids[4, slot])
    ids[4, slot] = value
    for _ in range(2):
        with pytest.raises(
            lab.ArgumentError, match=rf"token 4 names expert {value} in slot {slot}; there are .* 0 to 7"
        ):
            session.step(None)
    assert session.next_stage() == ("dispatcher", 1, -1)
    ids[4] = ids[4, 1 - slot]
    with pytest.raises(lab.ArgumentError, match="in slot 0 and again in slot 1"):
        session.step(None)
    ids[4, slot] = right
    ids[4, 1 - slot] = plain.tap(CHOSEN, 1, -1, -1)[4, 1 - slot]
    finish(session)
    assert shown(model, session) == shown(model, plain)


def test_slots_without_an_expert_leave_rows_that_say_so(model):
    session = new(model)
    session.begin(IDS)
    step_to(session, "dispatcher", 0)
    session.route_again(None, 1, 2, 4, False)
    ids, gates = session.open_tap(CHOSEN, 0, -1), session.open_tap(GATES, 0, -1)
    assert (ids[2:6, 1] == -1).all() and (gates[2:6, 1] == 0).all() and (ids[:2] >= 0).all() and (ids[6:] >= 0).all()
    session.step(None)
    tokens = session.open_tap(KINDS["layers.{l}.moe.dispatch.tokens"], 0, -1)
    assert (tokens[-4:] == -1).all() and (tokens[:-4] >= 0).all()
    finish(session)
    for tap in ("input", "gate", "up", "hidden", "output"):
        packed = session.tap(KINDS["layers.{l}.moe.dispatch." + tap], 0, -1, -1)
        assert not packed[-4:].any() and packed[:-4].any(axis=1).all()
    routed = session.tap(KINDS["layers.{l}.moe.routed"], 0, -1, -1)
    output, e = KINDS["layers.{l}.moe.experts.{e}.output"], int(ids[3, 0])
    row = session.tap(KINDS["layers.{l}.moe.experts.{e}.tokens"], 0, e, -1).tolist().index(3)
    np.testing.assert_array_equal(routed[3], gates[3, 0] * session.tap(output, 0, e, -1)[row] + np.float32(0))


def test_routing_again_as_the_model_does_changes_nothing(model):
    plain, session = new(model), new(model)
    plain.feed(IDS, None)
    session.begin(IDS)
    while session.next_stage() is not None:
        if session.step(None)[0] == "router":
            session.route_again(None, model.config.top_k, 0, len(IDS), False)
            session.route_again(model.config.gate_rule, 0, 0, len(IDS), True)
    assert shown(model, session) == shown(model, plain)


def test_an_interrupted_stage_runs_again(model):
    """A progress function that raises ends the step, not the pass."""
    plain, session = new(model, threads=2), new(model, threads=2)
    plain.feed(IDS, None)
    session.begin(IDS)
    asked: list[float] = []

    def stop(done):
        asked.append(done)
        raise RuntimeError("stop")

    while (upcoming := session.next_stage()) is not None:
        with pytest.raises(RuntimeError, match="stop"):
            session.step(stop)
        assert session.next_stage() == upcoming and session.length == 0
        session.step(None)
    assert asked == sorted(asked) and asked[0] == 0 and 0 < asked[-1] < 1
    assert shown(model, session) == shown(model, plain)


def test_kept_rows_of_an_abandoned_pass_never_change(model):
    session = new(model)
    session.feed(IDS, None)
    before = shown(model, session)
    session.begin(MORE)
    step_to(session, "aggregator", 0)
    kept = session.open_tap(GATES, 0, -1)
    copy = np.array(kept)
    session.abandon()
    session.abandon()  # none is open: nothing to do
    assert session.next_stage() is None and shown(model, session) == before
    assert session.memory()["copied_bytes"] > 0
    session.feed(MORE[::-1].copy(), None)
    np.testing.assert_array_equal(kept, copy)


def test_views_of_closed_rows_cost_nothing_when_a_pass_is_abandoned(model):
    session = new(model)
    session.feed(IDS, None)
    closed = session.tap(GATES, 0, -1, -1)
    copy = np.array(closed)
    session.begin(MORE)
    step_to(session, "aggregator", 1)
    session.abandon()
    session.feed(MORE, None)
    assert session.memory()["copied_bytes"] == 0
    np.testing.assert_array_equal(closed, copy)


def test_a_moved_session_is_out_of_reach_of_an_old_edit(model):
    session = new(model)
    session.begin(IDS)
    step_to(session, "dispatcher", 0)
    edit = session.open_edit(GATES, 0, -1)
    with pytest.raises(lab.BusyError, match="a pass is open before layer 0, dispatcher"):
        session.move()
    finish(session)
    before = shown(model, session)
    session.move()
    edit[:] = -1
    assert shown(model, session) == before


def test_a_fork_starts_with_the_past_and_is_independent(model):
    session, plain = new(model, threads=2), new(model)
    for each in (session, plain):
        each.feed(IDS, None)
    before = shown(model, session)
    session.begin(MORE)
    step_to(session, "expert", 1)
    fork = session.fork(len(IDS))
    assert shown(model, fork) == before and fork.next_stage() is None and fork.max_tokens == session.max_tokens
    fork.feed(MORE, None)
    plain.feed(MORE, None)
    assert shown(model, session) == before
    session.abandon()
    del session
    assert shown(model, fork) == shown(model, plain)
    with pytest.raises(lab.ArgumentError, match="no pass ends there"):
        fork.fork(3)


def test_a_pass_larger_than_a_tile_is_refused_with_both_ways_out(model):
    session = new(model, "routing", max_tokens=1024)
    with pytest.raises(lab.ArgumentError, match=r'600 tokens .* 512 .* capture "moe" or "all" .* smaller chunk'):
        session.begin(np.ones(600, np.int32))
    assert session.next_stage() is None
    large = new(model, "moe", max_tokens=1024)
    large.begin(np.ones(600, np.int32))
    assert large.open_pass() == (0, 600)


def test_what_an_open_pass_forbids(model):
    session = new(model)
    session.begin(IDS)
    step_to(session, "residual", 1)
    for call in (lambda: session.feed(IDS, None), lambda: session.begin(IDS), session.move):
        with pytest.raises(lab.BusyError, match="a pass is open before layer 1, residual: finish or abandon it"):
            call()
    with pytest.raises(lab.ArgumentError, match="between router and dispatcher"):
        session.route_again(None, 1, 0, 1, False)
    session.truncate(0)
    with pytest.raises(lab.ArgumentError, match="no pass is open"):
        session.step(None)
    with pytest.raises(lab.ArgumentError, match="no pass is open"):
        session.open_tap(GATES, 0, -1)


def test_another_thread_is_refused_while_a_stage_runs_and_reads_closed_rows(model):
    session = new(model, "moe", threads=2, max_tokens=512)
    session.feed(IDS, None)
    session.begin(np.arange(3, 403, dtype=np.int32))
    closed, refused, threads = session.tap(GATES, 0, -1, -1).tobytes(), [], []

    def look():
        assert session.length == len(IDS) and session.tap(GATES, 0, -1, -1).tobytes() == closed
        assert session.next_stage() == ("embed", -1, -1) and session.open_pass() == (len(IDS), len(IDS) + 400)
        for call in (session.abandon, lambda: session.open_tap(CHOSEN, 0, -1), lambda: session.fork(0)):
            with pytest.raises(lab.BusyError, match="session busy"):
                call()
            refused.append(call)

    def hold(done):  # the stage waits here until the other thread has come and gone
        if not threads:
            threads.append(threading.Thread(target=look))
            threads[0].start()
            threads[0].join(30)

    session.step(hold)
    assert len(refused) == 3 and session.next_stage() == ("attention", 0, -1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_child_process_finishes_the_open_pass_it_was_given(model):
    plain, session = new(model, threads=2), new(model, threads=2)
    plain.feed(IDS, None)
    session.begin(IDS)
    step_to(session, "aggregator", 1)
    child = os.fork()
    if child == 0:
        finish(session)
        os._exit(0 if shown(model, session) == shown(model, plain) else 3)
    assert os.waitpid(child, 0)[1] == 0
    finish(session)
    assert shown(model, session) == shown(model, plain)
