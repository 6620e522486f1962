"""Claim: time grows in proportion where it should, and stays where it should.

Ours alone, random models that differ in one size. Linear in layers and (but for attention) in the tokens of a prompt;
the time of a written token does not depend on how many experts lie unused; two threads are faster than one. The
points of a curve are interleaved as the engines of the other measures are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import machine
from contenders import OURS, Contender
from harness import Cell, Sample, interleave
from models import Spec, checkpoint, variant
from suite import Plan

DTYPE = "bf16"
PROMPTS = (16, 32, 64, 128, 256, 512, 1024, 2048)
CURVE_PROMPT = 128


def decode_ms(engine: Contender, plan: Plan) -> Sample:
    answer = engine.ask("decode", context=0, seconds=plan.seconds)
    return Sample(1e3 / answer["rate"], extra=answer)


def prefill_ms(engine: Contender, plan: Plan, tokens: int) -> Sample:
    answer = engine.ask("prefill", tokens=tokens, seconds=plan.seconds)
    return Sample(1e3 * tokens / answer["rate"], extra=answer)


def over_models(plan: Plan, axis: str, specs: dict[int, Spec], threads: int) -> Iterator[Cell]:
    """Milliseconds of a written token and of a short prompt, for models that differ in `axis`."""
    with ExitStack() as stack:
        engines = {}
        for size, spec in specs.items():
            path = checkpoint(spec, DTYPE, plan.cache)
            engine = engines[size] = stack.enter_context(Contender(OURS, plan.cache))
            engine.ask("open", path=str(path), threads=threads, max_tokens=max(CURVE_PROMPT, plan.max_tokens))
            prefill_ms(engine, plan, CURVE_PROMPT)  # touches the weights
        works: dict[str, Callable[[Contender], Sample]] = {
            "decode": lambda engine: decode_ms(engine, plan),
            "prefill": lambda engine: prefill_ms(engine, plan, CURVE_PROMPT),
        }
        for work, ask in works.items():
            asked = {str(size): (lambda engine=engine, ask=ask: ask(engine)) for size, engine in engines.items()}
            point = {
                "model": next(iter(specs.values())).name.partition("-")[0],
                "dtype": DTYPE,
                "threads": threads,
                "axis": axis,
                "work": work,
            }
            unit = "ms per token" if work == "decode" else f"ms per prompt of {CURVE_PROMPT}"
            yield Cell("scaling", unit, point, interleave(asked, plan.rounds), higher_is_better=False)


def over_threads_and_tokens(plan: Plan, spec: Spec) -> Iterator[Cell]:
    counts, prompts = tuple(range(1, machine.cpus() + 1)), tuple(n for n in PROMPTS if n <= max(plan.prompts))
    max_tokens = max(plan.max_tokens, *prompts) + 1
    with Contender(OURS, plan.cache) as engine:
        engine.ask("open", path=str(checkpoint(spec, DTYPE, plan.cache)), threads=counts[-1], max_tokens=max_tokens)
        prefill_ms(engine, plan, prompts[-1])

        def with_threads(threads: int, ask: Callable[[], Sample]) -> Callable[[], Sample]:
            def sample() -> Sample:
                engine.ask("configure", threads=threads, max_tokens=max_tokens)
                return ask()

            return sample

        point = {"model": spec.name, "dtype": DTYPE}
        asked = {str(n): with_threads(counts[-1], lambda n=n: prefill_ms(engine, plan, n)) for n in prompts}
        tokens_point = {**point, "threads": counts[-1], "axis": "tokens", "work": "prefill"}
        yield Cell("scaling", "ms per prompt", tokens_point, interleave(asked, plan.rounds), higher_is_better=False)
        for work, ask in (
            ("decode", lambda: decode_ms(engine, plan)),
            ("prefill", lambda: prefill_ms(engine, plan, CURVE_PROMPT)),
        ):
            asked = {str(n): with_threads(n, ask) for n in counts}
            unit = "ms per token" if work == "decode" else f"ms per prompt of {CURVE_PROMPT}"
            yield Cell(
                "scaling",
                unit,
                {**point, "axis": "threads", "work": work},
                interleave(asked, plan.rounds),
                higher_is_better=False,
            )


def run(plan: Plan) -> Iterator[Cell]:
    assert plan.scaling_base
    by_layers, by_experts = plan.scaling_base
    threads = max(plan.threads)
    layers = [n for n in (1, 2, 4, 8) if n <= by_layers.layers]
    yield from over_models(plan, "layers", {n: variant(by_layers, layers=n) for n in layers}, threads)
    experts = [n for n in (8, 16, 32, 64) if by_experts.top_k <= n <= by_experts.experts] or [by_experts.experts]
    few = min(4, by_experts.layers)  # enough weights to leave the caches, at half the disk
    yield from over_models(plan, "experts", {n: variant(by_experts, layers=few, experts=n) for n in experts}, threads)
    yield from over_threads_and_tokens(plan, by_layers)
