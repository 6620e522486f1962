"""Claim: it goes on like this: while sessions are opened, write and are closed, memory stays and so does the speed.

Each turn is a session of its own. The run is cut into tenths: tokens/s of each (what opening costs included), and the
anonymous memory of the process at the start and after each tenth, when no turn is open. The first tenth may still
grow; what counts is the spread after it. The read ceiling between the tenths shows what the machine did meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from contenders import OURS
from harness import Cell, Sample, interleave
from models import checkpoint
from suite import Checkpoint, Plan

from measures.decode import token_bytes

DTYPE = "bf16"
TENTHS = 10
TURN = 64  # tokens that a session writes


def run(plan: Plan) -> Iterator[Cell]:
    assert plan.scaling_base
    spec, threads = plan.scaling_base[0], max(plan.threads)
    with Checkpoint(plan, spec.name, DTYPE, checkpoint(spec, DTYPE, plan.cache), ()) as running:
        engine = running.engines[OURS]
        kv_bytes = engine.ask("configure", threads=threads, max_tokens=plan.max_tokens)["kv_bytes"]

        def turn() -> float:
            return float(engine.ask("call", method="turn", tokens=TURN, threads=threads))

        def anonymous() -> Sample:
            return Sample(engine.ask("memory")["now"].get("anonymous", math.nan) / 2**20)

        def tenth() -> Sample:
            spent, turns = 0.0, 0
            while spent < plan.steady_seconds / TENTHS or not turns:
                spent += turn()
                turns += 1
            memory.append(anonymous())
            return Sample(TURN * turns / spent, extra={"sessions": turns})

        def limit(sample: Sample, gbs: float) -> float:
            return gbs * 1e9 / token_bytes(running.token_bytes, kv_bytes, TURN / 2)

        turn()  # touches the weights
        memory = [anonymous()]
        probe = running.read_probe(threads)
        samples = interleave({OURS: tenth}, TENTHS, probe and replace(probe, void_above=None, retries=0), limit)
        point = running.point(threads=threads, seconds=plan.steady_seconds)
        yield Cell("steady", "tokens/s", point, samples)
        yield Cell("steady memory", "MiB", point, {OURS: memory}, higher_is_better=False)
