"""Runs of minutes (make soak): memory that must stay flat, and threads that must not disturb each other."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable

import numpy as np
import psutil
import pytest

import colibri_lab as lab
from colibri_lab.testing import canonical

pytestmark = pytest.mark.soak

SECONDS = float(os.environ.get("COLIBRI_SOAK_SECONDS", "60"))
TEXT = "In the beginning God created the heaven and the"


def anonymous() -> int:
    """Bytes of this process that no file backs."""
    gc.collect()
    info = psutil.Process().memory_info()
    return int(info.rss - info.shared)


def repeat(work: Callable[[], object]) -> int:
    """Runs `work` until the time is over; how often."""
    stop, rounds = time.monotonic() + SECONDS, 0
    while time.monotonic() < stop:
        work()
        rounds += 1
    return rounds


def test_E2_opening_running_and_closing_leaves_memory_flat() -> None:
    """The bytes of the second half of all cycles are those of the first, within a few MB."""

    def cycle() -> None:
        model = lab.open()
        session = model.session(capture="all", max_tokens=64)
        session.feed(TEXT)
        list(session.generate(8))
        session.trace()
        del session
        gc.collect()
        model.close()

    for _ in range(50):
        cycle()
    before = anonymous()
    rounds = repeat(cycle)
    grown = anonymous() - before
    print(f"{rounds} cycles, {grown / 2**20:+.1f} MiB")
    assert grown < 8 * 2**20


def test_F5_views_come_and_go_while_passes_run() -> None:
    """Threads that create, slice and drop views of closed rows never meet a changed or freed number."""
    model = lab.open()
    session = model.session(capture="all", max_tokens=512)
    session.feed(TEXT)
    n = len(session.ids)
    expected = {path: np.array(session.tape[path]) for path in ("layers.0.moe.gates", "layers.5.output", "embed")}
    wrong: list[str] = []
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            for path, values in expected.items():
                view = session.tape[path][:n][::2]  # without rows for a moment after each reset
                if not np.array_equal(view, values[::2][: len(view)]):
                    wrong.append(path)

    watchers = [threading.Thread(target=look) for _ in range(3)]
    for watcher in watchers:
        watcher.start()

    def work() -> None:
        if len(session.ids) + 32 > session.max_tokens:
            session.reset()
            session.feed(TEXT)
        session.feed([5] * 16)

    try:
        print(repeat(work), "passes")
    finally:
        over.set()
        for watcher in watchers:
            watcher.join()
    assert not wrong


def test_H1_sessions_in_threads_give_the_bytes_of_a_session_alone() -> None:
    """Eight threads with sessions of one model, each generating again and again, agree with one session by bytes."""
    model = lab.open()

    def answer() -> bytes:
        session = model.session(capture="routing", threads=1, max_tokens=128)
        session.feed(TEXT)
        list(session.generate(48, temperature=0.9, seed=7, stop_ids=()))
        return canonical(session.tape["layers.5.moe.router_logits"])

    alone = answer()
    different: list[int] = []

    def load(number: int) -> None:
        def once() -> None:
            if answer() != alone:
                different.append(number)

        print(number, repeat(once), "runs")

    threads = [threading.Thread(target=load, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not different
