"""How many threads there are, what says so, and what a fork leaves of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

import colibri_lab as lab

LIMITED = """
import os, sys
import colibri_lab as lab
if sys.argv[1] == "one CPU":
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
model = lab.open()
sessions = [model.session(threads=count, max_tokens=16) for count in (64, None)]
for session in sessions:
    session.feed([1, 2, 3])
print(len(os.listdir("/proc/self/task")))
for session in sessions:
    print(int(session.threads), repr(session.threads), sep="|")
print(sessions[0].logits.tobytes() == sessions[1].logits.tobytes())
print(model.info["threads"], model.info["threads_limit"], sep="|")
"""


def limited(how: str, **environment: str) -> list[str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("COLIBRI_CPUS", "OPENBLAS_NUM_THREADS")}
    command = [sys.executable, "-c", LIMITED, how]
    done = subprocess.run(
        command, env=clean | {"OPENBLAS_NUM_THREADS": "1"} | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_H2_threads_beyond_the_affinity_are_told_and_not_made() -> None:
    """64 asked for on one CPU: one thread in the process, both numbers shown, the same bytes as the default."""
    tasks, asked, default, same, info = limited("one CPU")
    word = "affinity" if (os.cpu_count() or 1) > 1 else "this machine"
    assert tasks == "1" and same == "True" and info == f"1|{word}"
    assert asked == f"1|64 requested, 1 effective; limited by {word} to 1 CPU"
    assert default == f"1|none requested, 1 effective; limited by {word} to 1 CPU"


def test_H2_the_environment_says_how_many_cpus_count_as_ours() -> None:
    """COLIBRI_CPUS=3: two sessions of three threads each, on any machine."""
    tasks, asked, default, same, info = limited("free", COLIBRI_CPUS="3")
    assert tasks == "5" and same == "True" and info == "3|COLIBRI_CPUS"
    assert asked == "3|64 requested, 3 effective; limited by COLIBRI_CPUS to 3 CPUs"
    assert default == "3|none requested, 3 effective; limited by COLIBRI_CPUS to 3 CPUs"


def test_H2_a_number_of_cpus_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentence names the variable, its value and the range."""
    monkeypatch.setenv("COLIBRI_CPUS", "many")
    with pytest.raises(lab.ArgumentError, match='COLIBRI_CPUS is "many"; it can be 1 to 256'):
        lab.open().session()


def test_H2_numpy_at_work_beside_us_changes_neither_bytes_nor_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 threads asked for of one CPU while NumPy multiplies on threads of its own: one is made, bytes as alone."""
    monkeypatch.setenv("COLIBRI_CPUS", "1")
    model, ids = lab.open(), list(range(1, 65))
    alone = model.session(capture="all", max_tokens=64)
    alone.feed(ids)
    square, products, stop = np.ones((384, 384), np.float32), [0], threading.Event()

    def multiply() -> None:
        while not stop.is_set():
            np.matmul(square, square)
            products[0] += 1

    beside = threading.Thread(target=multiply)
    beside.start()
    try:
        session = model.session(capture="all", max_tokens=64, threads=64)
        session.feed(ids)
        while not products[0]:
            session.reset()
            session.feed(ids)
    finally:
        stop.set()
        beside.join()
    assert session.threads == 1 and session.threads.requested == 64 and "COLIBRI_CPUS to 1 CPU" in repr(session.threads)
    for path in alone.tape.stored():
        assert session.tape[path].tobytes() == alone.tape[path].tobytes(), path


def test_threads_are_a_number_that_knows_its_reason() -> None:
    """Counts, formats and compares as an int; shows request and limit; a request within the limit is no limitation."""
    session = lab.open().session(threads=1, max_tokens=8)
    threads = session.threads
    assert threads == threads.effective == threads.requested == 1 and f"{threads}" == str(threads) == "1"
    assert json.dumps(threads) == "1" and "1 threads" in repr(session) and threads.cpus >= 1
    assert repr(threads).startswith("1 requested, 1 effective; ") and "limited" not in repr(threads)


FORK = """
import os, signal, threading
import numpy as np
import colibri_lab as lab

model = lab.open()
rest, busy = (model.session(capture="all", max_tokens=512, threads=2) for _ in range(2))
rest.feed([1, 2, 3])
inside, go_on = threading.Event(), threading.Event()

def report(done):
    inside.set()
    go_on.wait()

def waits(feed):
    ids = np.array([5], np.int32)
    try:
        feed(ids, lambda done: feed(ids, None))
    except lab.BusyError as error:
        return "wait for it" in str(error)

thread = threading.Thread(target=lambda: busy.feed([4] * 64, progress=report))
thread.start()
inside.wait()
child = os.fork()
if child == 0:
    signal.alarm(60)  # a hang ends the child by a signal
    code = 1
    try:
        try:
            busy.feed([1])
        except lab.BusyError as error:
            told = "in use when this process was forked off" in str(error) and "open a new session" in str(error)
            told = told and "wait" not in str(error)
            told = told and rest.threads == 1 and "2 requested, 1 effective; a forked child" in repr(rest.threads)
            told = told and waits(rest.feed) and waits(lambda ids, report: rest._engine.feed(ids, report))
            own = model.session(capture="all", max_tokens=8, threads=2)
            own.feed([1, 2, 3, 5])
            rest.feed([5])  # nobody was inside: it goes on here
            same = own.tape.router_logits(0).tobytes() == rest.tape.router_logits(0).tobytes()
            told = told and own.threads == 2 and "fork" not in repr(own.threads)
            code = 0 if same and told and len(busy.ids) == 0 and model.memory()["anonymous"] > 0 else 2
    finally:
        os._exit(code)
_, status = os.waitpid(child, 0)
go_on.set()
thread.join()
rest.feed([5])
print(os.waitstatus_to_exitcode(status), len(busy.ids), rest.ids, rest.threads)
"""


def test_a_forked_child_works_or_refuses_and_never_hangs() -> None:
    """Forked while a thread is inside one session: that one is refused in the child; others run on one
    thread, say so, and ask to be waited for when in use there; the parent goes on."""
    command = [sys.executable, "-W", "ignore", "-c", FORK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["0", "64", "[1,", "2,", "3,", "5]", "2"], (done.stdout, done.stderr)
