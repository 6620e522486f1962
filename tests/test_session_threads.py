"""Sessions under interrupts and threads: no lock is lost, no pass is of two pieces, nothing half happens."""

from __future__ import annotations

import contextlib
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import colibri_lab as lab

IDS = [0, 5, 9, 13, 21, 34, 55, 7, 8, 11]


@pytest.fixture(scope="module")
def model() -> lab.Model:
    return lab.open()


@pytest.mark.parametrize("call", ["feed", "generate", "reset", "trace"])
def test_G4_an_interrupt_anywhere_leaves_the_session_free(model: lab.Model, call: str) -> None:
    """KeyboardInterrupt at the 1st, 2nd, 3rd ... place inside where Python looks for signals (a function begins, a
    call of C ends): never is the session busy for good.
    """
    calls = {
        "feed": lambda session: session.feed(IDS, progress=False),
        "generate": lambda session: list(session.generate(2, stop_ids=(), progress=False)),
        "reset": lambda session: session.reset(),
        "trace": lambda session: session.trace(),
    }
    inside = [str(Path(lab.__file__).with_name("session.py")), contextlib.__file__]
    session = model.session(max_tokens=64)
    left = 0

    def profiler(frame, event, argument):
        nonlocal left
        if frame.f_code.co_filename in inside and event in ("call", "c_return"):
            left -= 1
            if left == 0:
                raise KeyboardInterrupt

    for number in range(1, 400):
        session.reset()
        session.feed([1, 2], progress=False)
        left = number
        sys.setprofile(profiler)
        try:
            calls[call](session)
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        assert not session._lock.locked(), f"after place {number}"
        if left > 0:
            break
    assert 3 < number < 399


class Between:
    """The engine's session, which runs `act` once when `name` is asked for, after (or before) it has answered."""

    def __init__(self, engine, name: str, act, before: bool = False) -> None:
        self.engine, self.name, self.act, self.before = engine, name, act, before

    def __getattr__(self, name: str):
        if name != self.name or self.act is None:
            return getattr(self.engine, name)
        act, self.act = self.act, None
        if self.before:
            act()
        answer = getattr(self.engine, name)
        if not self.before:
            act()
        return answer


@pytest.mark.parametrize("name", ["truncations", "pass_count", "pass_bounds", "logits"])
@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("before", [False, True])
def test_H1_a_pass_taken_while_another_thread_goes_on_is_of_one_piece(model, name, resets, before) -> None:
    """A feed (or reset and feed) that slips in between two questions: ids, rows and logits are of the same pass."""
    session = model.session(capture="logits", max_tokens=64)
    session.feed([1, 2])
    session.feed([3, 4])
    engine = session._engine

    def other_thread() -> None:
        session._engine = engine
        if resets:
            session.reset()
            session.feed([7, 8])
            session.feed([9, 10])
        else:
            session.feed([5])
        session._engine = between

    between = session._engine = Between(engine, name, other_thread, before)
    taken = session.passes[-1]
    assert between.act is None
    assert taken.ids == session.ids[taken.start : taken.stop]
    assert taken.logits.tobytes() == taken.tape["logits"][-1].tobytes()
    assert taken is session.passes[taken.index]


def test_a_reset_that_fails_changes_nothing(model: lab.Model) -> None:
    """No memory for a fresh tape beside a kept view: the passes are as they were."""
    session = model.session(capture="all", max_tokens=64)
    held = session.feed(IDS)
    view = session.tape["embed"]

    def no_memory() -> None:
        raise lab.OutOfMemoryError("no memory")

    session._engine = Between(session._engine, "truncate", no_memory)
    with pytest.raises(lab.OutOfMemoryError):
        session.reset()
    assert session.ids == IDS and session.passes[0] is held
    assert held.tape["embed"].tobytes() == view.tobytes()


@pytest.mark.parametrize("count", [2, 8])
def test_H1_threads_on_one_session_are_refused_or_right(model: lab.Model, count: int) -> None:
    """Each call either appends its own ids as one pass or raises "session busy"; the result is that of one thread."""
    session = model.session(max_tokens=512)
    barrier = threading.Barrier(count)
    done: list[lab.Pass] = []
    refused: list[str] = []
    failures: list[BaseException] = []

    def work(number: int) -> None:
        barrier.wait()
        for turn in range(100 // count):
            ids = [number * 100 + turn, number, turn + 1]
            try:
                passed = session.feed(ids, progress=False)
                assert passed.ids == ids and passed.stop - passed.start == 3
                done.append(passed)
            except lab.BusyError as error:
                refused.append(str(error))
            except BaseException as error:
                failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and done and all("session busy" in text for text in refused)
    assert len(session.ids) == 3 * len(done) and len(session.passes) == len(done)
    single = model.session(max_tokens=512)
    for passed in session.passes:
        single.feed(passed.ids)
    assert np.array_equal(single.logits, session.logits)
    for path in session.tape.stored():
        assert session.tape[path].tobytes() == single.tape[path].tobytes(), path


def test_H1_sessions_of_one_model_are_independent(model: lab.Model) -> None:
    """Four threads with a session each give the bytes of one after the other."""
    prompts = [[(7 * n + i) % 2048 for i in range(40)] for n in range(4)]
    expected = []
    for ids in prompts:
        session = model.session(max_tokens=64)
        session.feed(ids)
        expected.append(session.logits.tobytes())
    found: dict[int, bytes] = {}

    def work(number: int) -> None:
        session = model.session(max_tokens=64)
        for i in prompts[number]:
            session.feed([i])
        found[number] = session.logits.tobytes()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number] for number in range(4)] == expected
