"""The stepper's view without a browser: moving, changing, messages, turns, pictures, the saved page."""

from __future__ import annotations

import gc
import json
import re
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import colibri_lab as lab
from colibri_lab.errors import ArgumentError, BusyError
from colibri_lab.widgets.stepper import TokenStepper

TEXT = "The fox counts the eggs in her nest."


@pytest.fixture
def view() -> TokenStepper:
    return lab.TokenStepper(lab.open().session(capture="moe", threads=1), TEXT)


def sent(view: TokenStepper) -> list[dict[str, Any]]:
    """Everything the view sends from now on."""
    out: list[dict[str, Any]] = []
    view.send = lambda content, buffers=None: out.append(content)
    return out


def to_router(view: TokenStepper, layer: int) -> int:
    """Stops after the router of a layer; the selected token."""
    view.run_to(f"layer == {layer} and stage == 'router'")
    return int(view.selection["token"])


def routing(run: Any, layer: int, token: int) -> tuple[list[int], list[float]]:
    path = f"layers.{layer}.moe."
    return run.peek(path + "expert_ids")[token].tolist(), run.peek(path + "gates")[token].tolist()


# ---- what it takes ----


def test_it_takes_a_stepper_a_session_or_a_text() -> None:
    """A session's tokens are walked through anew in a session of its own; the session itself stays as it is."""
    session = lab.open().session(threads=1)
    session.feed(TEXT, progress=False)
    view = lab.TokenStepper(session)
    assert view.stepper.ids == session.ids and view.stepper.session is not session
    stepper = lab.open().session(capture="moe", threads=1).stepper(TEXT)
    assert lab.TokenStepper(stepper).stepper is stepper
    assert len(lab.TokenStepper(TEXT).stepper.passes) == 1


@pytest.mark.parametrize("wrong", [3, None, {}])
def test_anything_else_is_refused_in_a_sentence(wrong: Any) -> None:
    with pytest.raises(ArgumentError, match="takes a stepper, a session or a text"):
        lab.TokenStepper(wrong)


def test_an_empty_session_is_asked_for_a_text() -> None:
    with pytest.raises(ArgumentError, match="give the text"):
        lab.TokenStepper(lab.open().session(threads=1))


# ---- moving ----


def test_it_moves_as_the_stepper_does_and_the_selection_comes_along(view: TokenStepper) -> None:
    """By every unit, back, to a condition, to a cell of the map, to the end."""
    other = lab.open().session(capture="moe", threads=1).stepper(TEXT, chunk=None)
    for unit in ("stage", "expert", "layer", "stage", "stage", "expert"):
        assert view.step(unit) == other.step(unit)
        assert view.selection["layer"] == (view.stepper.where.layer or 0)
    assert view.back("layer") == other.back("layer")
    assert view.run_to("layer == 4 and stage == 'router'") == other.run_to("layer == 4 and stage == 'router'")
    assert view.selection["layer"] == 4
    where = view.go_to("aggregator", 2)
    assert (where.layer, where.stage) == (2, "aggregator")
    assert view.go_to("expert", 5, 7).layer == 5
    assert view.finish() == other.finish()
    assert np.array_equal(view.stepper.session.logits, other.session.logits)


def test_a_stop_by_condition_selects_a_token_that_satisfied_it(view: TokenStepper) -> None:
    where = view.run_to("layer == 2 and token == 4")
    assert where.tokens == (4,) and view.selection["token"] == 4


def test_a_condition_that_is_never_met_is_said(view: TokenStepper) -> None:
    view.run_to("nonfinite > 0")
    assert view.stepper.at_end and "nonfinite > 0 was not met before the end" in view._status["text"]


def test_selection_is_checked_and_set_in_part(view: TokenStepper) -> None:
    """What is left out stays; what does not exist is named with what does."""
    view.step("layer")
    view.selection = {"token": 3}
    assert view.selection["token"] == 3
    ids = view.stepper.peek("layers.0.moe.expert_ids")
    assert view.selection["expert"] == int(ids[3, 0])
    for wrong in ({"layer": 9}, {"token": 99}, {"expert": 8}, {"token": 1.5}, {"place": 1}):
        with pytest.raises(ArgumentError):
            view.selection = wrong
    assert view.selection["token"] == 3


def test_the_code_of_a_place_leads_there(view: TokenStepper) -> None:
    view.run_to("layer == 3 and expert == 4")
    other = lab.open().session(capture="moe", threads=1).stepper(TEXT, chunk=None)
    eval(view.code, {"stepper": other})
    assert other.where.layer == 3 and other.where.expert == view.stepper.where.expert


# ---- changing ----


def test_a_gate_is_changed_in_a_fork_and_undone(view: TokenStepper) -> None:
    """The original keeps its bytes; the comparison shows a change, and after undo none."""
    token = to_router(view, 3)
    ids, gates = routing(view.stepper, 3, token)
    edit = view.edit_routing(3, token, ids, [0.0, *gates[1:]])
    assert view.look == "fork" and edit.code == f'stepper.edit("layers.3.moe.gates")[{token}, 0] = 0.0'
    assert routing(view.forked, 3, token)[1][0] == 0.0
    assert routing(view.stepper, 3, token) == (ids, gates)
    found = view.compare()
    assert not found.identical and found.residual[3, token] > 0
    assert view.undo() == edit
    assert view.compare().identical


def test_other_experts_are_forced(view: TokenStepper) -> None:
    token = to_router(view, 2)
    ids, _ = routing(view.stepper, 2, token)
    wish = [e for e in range(8) if e not in ids][:2]
    view.edit_routing(2, token, wish, [0.25, 0.75])
    assert routing(view.forked, 2, token) == (wish, [0.25, 0.75])


def test_an_expert_is_switched_off_and_values_are_written(view: TokenStepper) -> None:
    token = to_router(view, 1)
    ids, _ = routing(view.stepper, 1, token)
    view.switch_off(1, ids[0])
    assert ids[0] not in routing(view.forked, 1, token)[0]
    view.go_to("aggregator", 1)
    view.edit_values("layers.1.moe.output", token, [1.5, -2.0])
    assert view.forked.peek("layers.1.moe.output")[token, :2].tolist() == [1.5, -2.0]


def test_a_refused_change_says_where_and_leaves_no_fork(view: TokenStepper) -> None:
    """The sentence says where to change it instead; nothing else is changed."""
    token = to_router(view, 3)
    view.go_to("aggregator", 3)
    ids, gates = routing(view.stepper, 3, token)
    with pytest.raises(ArgumentError, match="has run"):
        view.edit_routing(3, token, ids, [0.0, *gates[1:]])
    assert view.forked is None and view.stepper.edits == [] and view._status["state"] == "error"


def test_fork_and_original_move_together(view: TokenStepper) -> None:
    """Whichever is shown is driven; the other stands at the same place, also where its experts differ."""
    token = to_router(view, 2)
    view.edit_routing(2, token, [7, 6], [0.5, 0.5])
    for move in (view.step, view.step, view.step, lambda: view.back("layer"), lambda: view.step("layer")):
        move()
        a, b = view.stepper.where, view.forked.where
        assert a.layer == b.layer and (a.stage == b.stage or "expert" in (a.stage, b.stage))
    view.look = "original"
    view.finish()
    assert view.stepper.at_end and view.forked.at_end
    view.drop_fork()
    assert view.forked is None and view.look == "original"


# ---- messages ----


def test_messages_do_what_the_buttons_say(view: TokenStepper) -> None:
    """Each request of the browser, and the frame that answers it."""
    out = sent(view)
    view.handle({"kind": "ready"})
    assert [m["kind"] for m in out] == ["head", "frame"]
    view.handle({"kind": "break", "what": "add", "name": "layer == 1 and stage == 'router'"})
    view.handle({"kind": "watch", "add": True, "text": "margin"})
    view.handle({"kind": "run_to", "condition": " "})
    frame = out[-1]
    assert frame["reason"] == "breakpoint 1" and frame["place"]["layer"] == 1
    assert frame["breakpoints"][0] | {"hits": 0} == {
        "name": "1", "condition": "layer == 1 and stage == 'router'", "enabled": True, "hits": 0, "here": True,
        "place": [1, "router"],
    }  # fmt: skip
    assert frame["watches"][0]["text"] == "margin" and frame["watches"][0]["token"] == view.selection["token"]
    token = view.selection["token"]
    ids, _ = routing(view.stepper, 1, token)
    view.handle({"kind": "routing", "layer": 1, "token": token, "experts": list(map(str, ids)), "gates": ["1", "0"]})
    assert out[-2]["run"]["forked"] and out[-1]["kind"] == "compared"
    assert out[-2]["run"]["edits"][0][1].startswith('fork.edit("layers.1.moe.gates")')
    view.handle({"kind": "undo"})
    assert out[-2]["run"]["edits"] == [] and out[-1]["identical"]
    view.handle({"kind": "drop"})
    view.handle({"kind": "break", "what": "disable", "name": "1"})
    assert out[-1]["breakpoints"][0]["enabled"] is False
    view.handle({"kind": "step", "unit": "layer"})
    view.handle({"kind": "back", "unit": "stage"})
    view.handle({"kind": "go_to", "stage": "logits", "layer": None, "expert": None})
    assert out[-1]["place"]["stage"] == "logits" and view.stepper.at_end


def test_a_bad_condition_is_shown_with_its_column_and_nothing_runs(view: TokenStepper) -> None:
    view.step("layer")
    before = view.stepper.where
    view._guarded({"kind": "run_to", "condition": "layer == = 3"})
    assert view._status["state"] == "error" and "(column 10)" in view._status["text"]
    assert view.stepper.where == before


def test_what_is_typed_and_is_no_number_is_named(view: TokenStepper) -> None:
    token = to_router(view, 1)
    view._guarded({"kind": "routing", "layer": 1, "token": token, "experts": ["0", "1"], "gates": ["much", "0"]})
    assert "'much' is no number" in view._status["text"] and view.forked is None


# ---- turns ----


def test_a_busy_session_is_waited_for_and_said(view: TokenStepper, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step while another call is inside waits its turn and then is made; the place is the one it should be."""
    monkeypatch.setattr("colibri_lab.widgets.stepper._RETRY_SECONDS", 0.001)
    waits = threading.Event()
    view.observe(lambda change: change["new"].get("state") == "busy" and waits.set(), "_status")
    with view.stepper.session._alone():
        stepping = threading.Thread(target=view.step)
        stepping.start()
        assert waits.wait(30)
    stepping.join(30)
    assert view.stepper.where.stage == "embed" and view._status["state"] == "idle"


def test_stop_ends_the_wait(view: TokenStepper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("colibri_lab.widgets.stepper._RETRY_SECONDS", 0.001)
    waits = threading.Event()
    view.observe(lambda change: change["new"].get("state") == "busy" and waits.set(), "_status")
    with view.stepper.session._alone():
        stepping = threading.Thread(target=view._guarded, args=({"kind": "step", "unit": "stage"},))
        stepping.start()
        assert waits.wait(30)
        view.stop()
        stepping.join(30)
    assert view.stepper.at_start and "Stopped" in view._status["text"]


def test_stop_ends_a_run_where_it_got_to(view: TokenStepper) -> None:
    """It can go on from there and ends in the same bytes."""
    stages = 0

    def heard(change: Any) -> None:
        nonlocal stages
        if change["new"].get("done"):
            stages += 1
            view.stop()

    view.observe(heard, "_status")
    import colibri_lab.widgets._work as work

    rate, work._REPORTS_PER_SECOND = work._REPORTS_PER_SECOND, 10**9
    try:
        view._guarded({"kind": "finish"})
    finally:
        work._REPORTS_PER_SECOND = rate
    assert stages and "Stopped" in view._status["text"] and not view.stepper.at_end
    view.unobserve(heard, "_status")
    view.finish()
    plain = lab.open().session(capture="moe", threads=1)
    plain.feed(TEXT, progress=False)
    assert view.stepper.session.logits.tobytes() == plain.logits.tobytes()


def test_a_second_move_is_refused_while_one_runs(view: TokenStepper) -> None:
    with view._work, pytest.raises(BusyError, match="already working"):
        view.step()


def test_a_stepper_moved_from_python_is_shown_when_the_cell_ends(view: TokenStepper) -> None:
    out = sent(view)
    view.stepper.step("layer")
    view._look_again()
    assert out[-1]["place"]["stage"] == "residual"
    view._look_again()
    assert len(out) == 1


# ---- without a kernel ----


def test_the_picture_and_the_text_say_where_it_stands(view: TokenStepper) -> None:
    token = to_router(view, 3)
    ids, gates = routing(view.stepper, 3, token)
    view.edit_routing(3, token, ids, [0.0, *gates[1:]])
    bundle = view._repr_mimebundle_()
    assert bundle["image/png"].startswith(b"\x89PNG")
    assert "after the router of layer 3 (condition); next: the dispatcher of layer 3" in bundle["text/plain"]
    assert f"experts {ids[0]} (gate 0.00)" in bundle["text/plain"] and "fork.edit" in bundle["text/plain"]


def test_the_saved_page_holds_the_moments_of_the_walk(view: TokenStepper, tmp_path: Path) -> None:
    """One frame for each place that was shown, in order; no request to anywhere, no NaN in its JSON."""
    for _ in range(5):
        view.step()
    view.run_to("layer == 2 and stage == 'router'")
    text = view.to_html(tmp_path / "walk.html").read_text(encoding="utf-8")
    assert not re.search(r"https?:|<link|\bsrc=|@import|url\((?!#)|\bfetch\(", text)
    found = re.search(r'<script type="application/json" id="saved">(.*?)</script>', text, flags=re.DOTALL)
    assert found
    messages = [m["content"] for m in json.loads(found[1])["messages"]]
    assert messages[0]["kind"] == "head"
    assert [m["place"]["stage"] for m in messages[1:]][-6:] == [
        "embed", "attention", "router", "dispatcher", "expert", "router",
    ]  # fmt: skip


def test_a_long_walk_keeps_the_newest_moments(view: TokenStepper, monkeypatch: pytest.MonkeyPatch) -> None:
    view.step("layer")
    monkeypatch.setattr("colibri_lab.widgets.stepper._KEPT_BYTES", 1)
    view.step()
    view.step()
    assert len(view._frames) == 1
    assert view._page().count('"kind": "frame"') == 1


def test_a_closed_view_lets_go(view: TokenStepper) -> None:
    view.close()
    view.handle({"kind": "ready"})
    assert repr(view) == "<TokenStepper, closed>" and view.forked is None and not view._frames


def test_closed_views_are_forgotten() -> None:
    """Ten views, made, moved and closed, leave none alive."""
    stepper = lab.open().session(capture="moe", threads=1).stepper(TEXT, chunk=None)
    gone = []
    for _ in range(10):
        view = lab.TokenStepper(stepper)
        view.step()
        gone.append(weakref.ref(view))
        view.close()
    del view
    gc.collect()
    assert not [reference for reference in gone if reference() is not None]
