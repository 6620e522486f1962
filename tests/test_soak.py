"""Load for minutes (make soak): many threads, one model."""

from __future__ import annotations

import os
import threading
import time

import pytest

import colibri_lab as lab
from colibri_lab.testing import canonical

SECONDS = float(os.environ.get("COLIBRI_SOAK_SECONDS", "60"))


@pytest.mark.soak
def test_H1_sessions_in_threads_give_the_bytes_of_a_session_alone() -> None:
    """Eight threads with sessions of one model, each generating again and again, agree with one session by bytes."""
    model = lab.open()

    def answer() -> bytes:
        session = model.session(capture="routing", threads=1, max_tokens=128)
        session.feed("In the beginning God created the heaven and the")
        list(session.generate(48, temperature=0.9, seed=7, stop_ids=()))
        return canonical(session.tape["layers.5.moe.router_logits"])

    alone = answer()
    stop = time.monotonic() + SECONDS
    rounds, different = [0] * 8, [0] * 8

    def load(number: int) -> None:
        while time.monotonic() < stop:
            different[number] += answer() != alone
            rounds[number] += 1

    threads = [threading.Thread(target=load, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(sum(rounds), "runs")
    assert min(rounds) > 0 and sum(different) == 0
