"""bench.py [--model PATH]: what this machine does, printed as a table. Medians of five.

Each code path runs in a process of its own. import and open are seconds from nothing; prefill and decode are tokens per
second of one session with capture="none".
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

REPEATS = 5


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(path: str | None, threads: int, prompt: int, tokens: int) -> dict[str, float]:
    """Runs in a process of its own, whose environment names the code path."""
    start = time.perf_counter()
    import colibri_lab as lab

    imported = time.perf_counter() - start
    opened = statistics.median(seconds(lambda: lab.open(path)) for _ in range(REPEATS))
    model = lab.open(path)
    ids = [3 + i * 7919 % (model.config.vocab_size - 3) for i in range(prompt)]
    prefill, decode = [], []
    for _ in range(REPEATS):
        session = model.session(capture="none", threads=threads)
        prefill.append(prompt / seconds(lambda s=session: s.feed(ids)))
        decode.append(tokens / seconds(lambda s=session: list(s.generate(tokens, stop_ids=()))))
    speeds = {"prefill": statistics.median(prefill), "decode": statistics.median(decode)}
    return {"import": imported, "open": opened, **speeds}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--model")
    options.add_argument("--prompt", type=int, default=256)
    options.add_argument("--tokens", type=int, default=64)
    options.add_argument("--one", type=int, metavar="THREADS", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.one:
        print(json.dumps(measure(given.model, given.one, given.prompt, given.tokens)))
        return

    from colibri_lab import _core

    print(f"{given.model or 'bundled model'}, prompt of {given.prompt}, {given.tokens} tokens generated")
    print(f"{'path':8} {'threads':>7} {'import s':>9} {'open s':>8} {'prefill /s':>11} {'decode /s':>10}")
    for isa in _core.isa_names():
        for threads in sorted({1, _core.default_threads()}):
            command = [sys.executable, __file__, *sys.argv[1:], "--one", str(threads)]
            done = subprocess.run(command, env={**os.environ, "COLIBRI_ISA": isa}, stdout=subprocess.PIPE, check=True)
            imported, opened, prefill, decode = json.loads(done.stdout).values()
            print(f"{isa:8} {threads:7} {imported:9.3f} {opened:8.4f} {prefill:11.0f} {decode:10.0f}")


if __name__ == "__main__":
    main()
