"""Whose turn it is: the explorer beside other threads in its session, and what an interrupt leaves."""

from __future__ import annotations

import contextlib
import sys
import threading
from types import FrameType
from typing import Any

import pytest
from fake_session import FakeSession

import colibri_lab
from colibri_lab.errors import BusyError
from colibri_lab.widgets.explorer import RoutingExplorer


def test_a_busy_session_is_waited_for_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The view says who is in the way, and the run goes on when the session is free."""
    monkeypatch.setattr("colibri_lab.widgets.explorer._RETRY_SECONDS", 0.001)
    session = FakeSession()
    explorer = RoutingExplorer(session)
    seen: list[str] = []
    explorer.observe(lambda change: seen.append(change["new"]["state"]), "_status")
    session.refuse = 3
    explorer.run("hello")
    assert "busy" in seen and len(explorer.trace.ids) == 5


def test_generating_waits_while_another_thread_feeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A feed that ends only once the explorer has said that it waits; then both have had their turn."""
    monkeypatch.setattr("colibri_lab.widgets.explorer._RETRY_SECONDS", 0.001)
    session = colibri_lab.open().session(threads=1)
    session.feed([5, 6])
    explorer = RoutingExplorer(session)
    inside, waits = threading.Event(), threading.Event()
    explorer.observe(lambda change: change["new"]["state"] == "busy" and waits.set(), "_status")

    def hold(_: float) -> None:
        inside.set()
        assert waits.wait(30)

    feeding = threading.Thread(target=lambda: session.feed([7] * 10, progress=hold))
    feeding.start()
    assert inside.wait(30)
    explorer.generate(2)
    feeding.join()
    assert waits.is_set() and session.ids[:12] == [5, 6] + [7] * 10 and explorer.trace.ids == session.ids


def test_generating_waits_before_every_token_and_for_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that only looks between two tokens ends nothing."""
    monkeypatch.setattr("colibri_lab.widgets.explorer._RETRY_SECONDS", 0.001)
    session = FakeSession()
    explorer = RoutingExplorer(session)
    explorer.run("hello")
    session.on_step = lambda i: setattr(session, "refuse", 2)
    explorer.generate(4)
    assert len(explorer.trace.ids) == session.tokens == 9


def test_generating_ends_when_another_thread_adds_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are nothing that this generation should continue; its own tokens stay."""
    monkeypatch.setattr("colibri_lab.widgets.explorer._RETRY_SECONDS", 0.001)
    session = FakeSession()
    explorer = RoutingExplorer(session)
    explorer.run("hello")

    def refused_while_another_feeds() -> None:
        if session.tokens == 7:
            session.tokens = 10
            raise BusyError("session busy: another call is inside it")

    session.enter = refused_while_another_feeds
    with pytest.raises(BusyError, match="another call changed the session"):
        explorer.generate(4)
    assert session.tokens == 10 and explorer._status["text"].endswith("2 new tokens are kept.")


@pytest.mark.parametrize("refused", ["reset", "feed", "trace"])
def test_a_run_waits_at_each_of_its_steps(refused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread that enters before the reset, before the pass or before the trace is waited for."""
    monkeypatch.setattr("colibri_lab.widgets.explorer._RETRY_SECONDS", 0.001)
    session = FakeSession()
    explorer = RoutingExplorer(session)
    step, times = getattr(session, refused), [1, 1]

    def busy(*args: Any, **options: Any) -> Any:
        if times:
            times.pop()
            raise BusyError("session busy: another call is inside it")
        return step(*args, **options)

    setattr(session, refused, busy)
    explorer.run("hello")
    assert not times and len(explorer.trace.ids) == session.tokens == 5
    assert explorer._status == {"state": "idle"}


def test_what_a_stopped_run_leaves_is_told_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped while it waits: for the reset, nothing was changed; for the trace, the prompt's tokens are there."""
    session = FakeSession()
    explorer = RoutingExplorer(session)
    explorer.run("hello")

    def busy() -> Any:
        explorer.stop()
        raise BusyError("session busy: another call is inside it")

    with monkeypatch.context() as patch:
        patch.setattr(session, "reset", busy)
        explorer.run("abc")
    assert session.tokens == 5 and explorer._status["text"] == "Stopped. Nothing was changed."
    monkeypatch.setattr(session, "trace", busy)
    explorer.run("abcd")
    left = "The session holds 4 tokens now; the picture is of the previous run."
    assert explorer._status["text"] == f"Stopped. {left}"


def test_an_interrupt_anywhere_leaves_the_explorer_able_to_work() -> None:
    """Signals are seen where a function is entered and where one in C returns; each such place in turn."""
    session = FakeSession()
    explorer = RoutingExplorer(session)
    explorer.run("warm up")
    names = {RoutingExplorer.run.__code__.co_filename, contextlib.__file__}
    place, interrupted = 0, True
    while interrupted:
        interrupted, left = False, place

        def interrupt(frame: FrameType, event: str, _: object) -> None:
            nonlocal interrupted, left
            if event in ("call", "c_return") and frame.f_code.co_filename in names:
                left -= 1
                if left < 0:
                    interrupted = True
                    sys.setprofile(None)
                    raise KeyboardInterrupt

        sys.setprofile(interrupt)
        try:
            explorer.run("hello")
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        place += 1
        explorer.run("again")
        assert len(explorer.trace.ids) == 5, f"after an interrupt at place {place}"
    assert place > 20


def test_one_piece_of_work_at_a_time() -> None:
    """A second run is refused while the first goes on; the first is not disturbed."""
    session = FakeSession()
    explorer = RoutingExplorer(session)
    refused: list[type] = []

    def second(_: int) -> None:
        session.on_step = lambda i: None
        try:
            explorer.run("again")
        except BusyError as error:
            refused.append(type(error))

    session.on_step = second
    explorer.run("hello")
    assert refused == [BusyError] and len(explorer.trace.ids) == 5
