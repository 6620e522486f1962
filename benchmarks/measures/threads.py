"""Claim: threads cost little, also when they are not alone.

A pass hands hundreds of short tasks to the threads of the engine and waits for all of them each time. Alone: the time
of a task beyond that of its longest part (c/barrier.c on the engine's own objects; many batches, of which the median
counts, because a batch in which the system takes a thread away is no figure of the engine). Beside another process that
keeps one CPU busy: two threads against one, where a waiting thread that only spins would lose most.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import machine
from contenders import OURS, Contender
from harness import Cell, Sample, interleave
from models import checkpoint
from programs import on_engine
from suite import Plan

THREADS = 2
DTYPE = "bf16"
PROMPT = 512
BUSY = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): pass"  # ends with the suite, however that ends


def run(plan: Plan) -> Iterator[Cell]:
    if machine.cpus() < THREADS:
        raise OSError(f"{THREADS} threads need as many CPUs; this process may use {machine.cpus()}")
    yield from alone(plan)
    yield from loaded(plan)


def alone(plan: Plan) -> Iterator[Cell]:
    program = on_engine("barrier", plan.cache)
    command = [str(program), str(THREADS), str(plan.seconds)]

    def sample() -> Sample:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        batches = [float(line) for line in done.stdout.split()]
        return Sample(statistics.median(batches), extra={"fastest": min(batches), "slowest": max(batches)})

    samples = interleave({OURS: sample}, plan.rounds)
    yield Cell("barrier", "µs", {"threads": THREADS}, samples, higher_is_better=False)


@contextmanager
def busy_process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", BUSY, str(os.getpid())]) as process:
        try:
            yield process
        finally:
            process.kill()


def loaded(plan: Plan) -> Iterator[Cell]:
    assert plan.scaling_base
    spec, prompt = plan.scaling_base[0], min(PROMPT, max(plan.prompts))
    path = checkpoint(spec, DTYPE, plan.cache)
    with ExitStack() as stack:
        engines = {
            f"{n} thread{'s' * (n > 1)}": (n, stack.enter_context(Contender(OURS, plan.cache))) for n in (THREADS, 1)
        }
        for threads, engine in engines.values():
            engine.ask("open", path=str(path), threads=threads, max_tokens=plan.max_tokens)
            engine.ask("prefill", tokens=prompt, seconds=0.0)  # touches the weights
        stack.enter_context(busy_process())
        for work, arguments in (("prefill", {"tokens": prompt}), ("decode", {"context": 0})):

            def at(engine: Contender, work: str = work, arguments: dict[str, int] = arguments) -> Callable[[], Sample]:
                def ask() -> Sample:
                    answer = engine.ask(work, seconds=plan.seconds, **arguments)
                    return Sample(answer.pop("rate"), extra=answer)

                return ask

            samples = interleave({name: at(engine) for name, (_, engine) in engines.items()}, plan.rounds)
            yield Cell("loaded", "tokens/s", {"model": spec.name, "dtype": DTYPE, "work": work, **arguments}, samples)
