"""Claim: looking is cheap: what a capture level costs, as the speed of "none" over the speed of the level in the same
round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from contenders import OURS
from harness import Cell, Sample, interleave
from serve import KV_SLACK
from suite import Checkpoint

LEVELS = ("none", "routing", "moe", "all")
PROMPT = 512


def run(checkpoint: Checkpoint) -> Iterator[Cell]:
    plan, engine = checkpoint.plan, checkpoint.engines[OURS]
    threads, prompt = max(plan.threads), min(PROMPT, max(plan.prompts))
    max_tokens = max(prompt, KV_SLACK + 1) + 1
    for work, arguments in (("prefill", {"tokens": prompt}), ("decode", {"context": 0})):

        def at(level: str, work: str = work, arguments: dict[str, int] = arguments) -> Callable[[], Sample]:
            def ask() -> Sample:
                engine.ask("configure", threads=threads, max_tokens=max_tokens, capture=level)
                answer = engine.ask(work, seconds=plan.seconds, **arguments)
                copied = engine.ask("memory")["notes"]["session"]["copied_bytes"]
                return Sample(answer.pop("rate"), extra={**answer, "copied_bytes": copied})

            return ask

        for level in LEVELS:
            at(level)()  # the first pass of a session touches its memory
        samples = interleave({level: at(level) for level in LEVELS}, plan.rounds)
        yield Cell("capture", "tokens/s", checkpoint.point(threads=threads, work=work, **arguments), samples)
