"""Claim: opening costs nothing but headers, and memory is the weights in the page cache plus what the session
reserves.

Every sample is a process of its own: import, open (with a session ready), a first token, a prompt. Files are in the
page cache, so this is the time of a second start, not of the disk.
"""

from __future__ import annotations

from collections.abc import Iterator

from contenders import OURS, Contender
from harness import Cell, Sample, interleave
from suite import Checkpoint

MEMORY_PROMPT = 512


def run(checkpoint: Checkpoint) -> Iterator[Cell]:
    plan, threads = checkpoint.plan, max(checkpoint.plan.threads)
    prompt = min(MEMORY_PROMPT, max(plan.prompts))

    def start(name: str) -> Sample:
        with Contender(name, plan.cache) as engine:
            seconds = engine.ask("open", path=str(checkpoint.path), threads=threads, max_tokens=plan.max_tokens)
            first = engine.ask("prefill", tokens=1, seconds=0.0)["seconds"]
            engine.ask("prefill", tokens=prompt, seconds=0.0)
            return Sample(seconds["open"], extra={**seconds, "first_token": first, "memory": engine.ask("memory")})

    asked = {name: (lambda name=name: start(name)) for name in (OURS, *(n for n in checkpoint.engines if n != OURS))}
    samples = interleave(asked, plan.process_rounds)
    point = checkpoint.point(threads=threads, tokens=prompt)
    yield Cell("load", "s", point, samples, higher_is_better=False)
    for kind in ("peak", "anonymous", "file"):
        taken = {
            name: [Sample(s.extra["memory"]["now"].get(kind, float("nan")) / 1e6) for s in of]
            for name, of in samples.items()
        }
        yield Cell(f"memory {kind}", "MB", point, taken, higher_is_better=False)
