"""Claim: reading a prompt runs near the machine's multiply-add limit, ahead of the peers.

Logits of the last row alone, everywhere. The limit is the float32 multiply-add rate of as many threads, measured
before and after each sample; an engine with bf16 or int8 instructions may exceed it.
"""

from __future__ import annotations

from collections.abc import Iterator

from contenders import Contender
from harness import Cell, Sample
from suite import Checkpoint


def operations(arithmetic: dict[str, int], tokens: int) -> float:
    """Floating-point operations of a prompt: every layer for every token, attention to all before it, logits once."""
    keys = tokens * (tokens + 1) / 2
    return 2.0 * (arithmetic["per_token"] * tokens + arithmetic["per_key"] * keys + arithmetic["logits"])


def run(checkpoint: Checkpoint) -> Iterator[Cell]:
    plan = checkpoint.plan
    for threads in plan.threads:
        checkpoint.configure(threads)
        for engine in checkpoint.engines.values():
            engine.ask("prefill", tokens=min(512, max(plan.prompts)), seconds=0.0)  # touches every page once
        for tokens in plan.prompts:

            def ask(engine: Contender, tokens: int = tokens) -> Sample:
                answer = engine.ask("prefill", tokens=tokens, seconds=plan.seconds)
                return Sample(answer.pop("rate"), extra=answer)

            def limit(sample: Sample, gflops: float, tokens: int = tokens) -> float:
                return gflops * 1e9 * tokens / operations(checkpoint.arithmetic, tokens)

            point = {"threads": threads, "tokens": tokens}
            yield checkpoint.cell("prefill", "tokens/s", point, ask, checkpoint.fma_probe(threads), limit)
