"""Claim: a prompt read at once is several times faster than the same tokens one by one (with the same bytes in the
end).

Read at once, the rows of an expert share each weight that is loaded; one by one, every token loads its weights again.
"""

from __future__ import annotations

from collections.abc import Iterator

from contenders import OURS
from harness import Cell, Sample, interleave
from suite import Checkpoint

PROMPT = 128


def run(checkpoint: Checkpoint) -> Iterator[Cell]:
    plan, engine = checkpoint.plan, checkpoint.engines[OURS]
    prompt = min(PROMPT, max(plan.prompts))
    for threads in plan.threads:
        engine.ask("configure", threads=threads, max_tokens=plan.max_tokens)

        def ask(chunk: int) -> Sample:
            answer = engine.ask("prefill", tokens=prompt, seconds=plan.seconds, chunk=chunk)
            return Sample(answer.pop("rate"), extra=answer)

        ask(prompt)  # touches the weights
        samples = interleave({"at once": lambda: ask(prompt), "one by one": lambda: ask(1)}, plan.rounds)
        yield Cell("batching", "tokens/s", checkpoint.point(threads=threads, tokens=prompt), samples)
