"""Claim: writing tokens runs near the machine's read limit, ahead of the peers.

A token reads the weights of every layer, of its chosen experts and of the logits once, and the keys and values of its
context. The limit is the rate at which as many threads read the same ranges of the same mapped file, measured before
and after each sample; when the two differ by more than 10 % the sample is void and taken again. Ids are given, so no
engine pays for sampling.
"""

from __future__ import annotations

from collections.abc import Iterator

from contenders import Contender
from harness import Cell, Sample
from suite import Checkpoint


def token_bytes(weights: int, kv_bytes: int, context: float) -> float:
    """Bytes that one token touches: weights, the cache before it, and its own row of the cache."""
    return weights + kv_bytes * (context + 1)


def run(checkpoint: Checkpoint) -> Iterator[Cell]:
    plan = checkpoint.plan
    for threads in plan.threads:
        checkpoint.configure(threads)
        for context in plan.contexts:

            def ask(engine: Contender, threads: int = threads, context: int = context) -> Sample:
                kv_bytes = engine.ask("configure", threads=threads, max_tokens=plan.max_tokens)["kv_bytes"]
                answer = engine.ask("decode", context=context, seconds=plan.seconds)
                touched = token_bytes(checkpoint.token_bytes, kv_bytes, answer["mean_context"])
                return Sample(answer.pop("rate"), extra={**answer, "bytes_per_token": touched})

            def limit(sample: Sample, gbs: float) -> float:
                return float(gbs * 1e9 / sample.extra["bytes_per_token"])

            for engine in checkpoint.engines.values():
                ask(engine)  # makes the context and touches its pages
            point = {"threads": threads, "context": context}
            cell = checkpoint.cell("decode", "tokens/s", point, ask, checkpoint.read_probe(threads), limit)
            if checkpoint.limits:
                cell.notes.append(f"read ceiling: {checkpoint.limits.ask('way', threads=threads)}")
            yield cell
