"""Claim: watching is cheap: the speed of a session that looks at every value against one that does not, in the same
round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
from harness import Cell, Sample, interleave
from suite import Checkpoint

MODES = ("off", "watch")
PROMPT = 512
SLACK = 256  # tokens that are decoded before the session begins anew


def run(checkpoint: Checkpoint) -> Iterator[Cell]:
    import colibri_lab as lab

    plan, threads = checkpoint.plan, max(checkpoint.plan.threads)
    prompt = min(PROMPT, max(plan.prompts))
    with lab.open(checkpoint.path) as model:
        ids = np.random.default_rng(1).integers(0, model.config.vocab_size, max(prompt, SLACK))
        engines = {
            mode: model.session(capture="none", max_tokens=len(ids), threads=threads, watch=mode)._engine
            for mode in MODES
        }

        def at(mode: str, chunk: int) -> Callable[[], Sample]:
            """Passes of `chunk` tokens for `plan.seconds`; emptying the session takes no part."""
            engine, passes = engines[mode], [ids[i : i + chunk].astype(np.int32) for i in range(0, len(ids), chunk)]
            passes = [one for one in passes if len(one) == chunk]

            def ask() -> Sample:
                spent, tokens = 0.0, 0
                while spent < plan.seconds:
                    engine.truncate(0)
                    for one in passes:
                        start = time.perf_counter()
                        engine.feed(one, None)
                        spent += time.perf_counter() - start
                        tokens += chunk
                        if spent >= plan.seconds:
                            break
                return Sample(tokens / spent, extra={"seconds": spent})

            return ask

        for work, chunk, arguments in (("prefill", prompt, {"tokens": prompt}), ("decode", 1, {"context": 0})):
            for mode in MODES:
                at(mode, chunk)()  # the first pass of a session touches its memory
            samples = interleave({mode: at(mode, chunk) for mode in MODES}, plan.rounds)
            yield Cell("watch", "tokens/s", checkpoint.point(threads=threads, work=work, **arguments), samples)
