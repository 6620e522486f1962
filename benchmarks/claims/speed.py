"""Claims: 128 tokens/s on one thread, 2.3 to 2.7 times vLLM, P99 within 11 % of the mean.

A token cannot be written faster than its weights are read: tokens/s ≤ bandwidth / bytes touched. The bandwidth is
measured around each sample over the model's own files; for models that are named and not here, the limit is arithmetic.
"""

from __future__ import annotations

import statistics
from typing import Any

import machine
from contenders import OURS
from harness import Cell, Sample, limit_ratio, paired_ratio, summary
from measures import decode
from report import ratio_text
from suite import Checkpoint

from claims.claim import FAILS, HOLDS, UNMEASURABLE, Plan, Result
from claims.memory import PEER, peers, subject, suite_plan

SAID_RATE = "128 tokens/s on a small Mixture-of-Experts model on one thread"
SAID_VLLM = "2.3 to 2.7 times vLLM"
SAID_P99 = "P99 within 11 % of the mean"
CLAIMED = 128.0
MODELS = {"Mixtral-8x7B": 12.9e9, "OLMoE-1B-7B": 1.3e9}  # parameters at work for one token
WIDTHS = {"bf16": 2.0, "int8": 1.0625, "int4": 0.5625}  # bytes of a weight; the last two with a scale for each 32
SECONDS = 5.0  # of one sample: at least 100 tokens, so that P99 says something


def ceiling(gbs: float) -> dict[str, float]:
    """The most tokens a second at this bandwidth, for the named models in each width."""
    return {f"{m}, {w}": gbs * 1e9 / (n * size) for m, n in MODELS.items() for w, size in WIDTHS.items()}


def active_parameters(gbs: float, rate: float, width: float) -> float:
    """How many parameters a token may touch at this rate."""
    return gbs * 1e9 / (rate * width)


def measured(plan: Plan) -> tuple[Cell, str]:
    names, reason = peers(plan)
    name, dtype, folder = subject(plan)
    seconds = plan.seconds if plan.quick else max(plan.seconds, SECONDS)
    with Checkpoint(suite_plan(plan, names, seconds, limits=True), name, dtype, folder, names) as checkpoint:
        (cell,) = decode.run(checkpoint)
    return cell, reason


def run(plan: Plan) -> list[Result]:
    cell, reason = measured(plan)
    ours = cell.samples[OURS]
    kept = [s for s in ours if not s.void] or ours
    gbs = statistics.median(sum(s.probes) / 2 for s in kept if s.probes)
    touched = statistics.median(s.extra["bytes_per_token"] for s in kept)
    figures = summary(kept if summary(ours).n == 0 else ours)
    share = limit_ratio(ours)
    most = ceiling(gbs)
    facts: dict[str, Any] = {"read ceiling (GB/s)": gbs, "bytes a token touches (MB)": touched / 1e6}
    facts |= {f"at most, {name} (tokens/s)": rate for name, rate in most.items()}
    room = {w: active_parameters(gbs, CLAIMED, size) for w, size in WIDTHS.items()}
    facts |= {f"parameters at {CLAIMED:.0f} tokens/s, {w} (millions)": n / 1e6 for w, n in room.items()}
    facts["ours / read ceiling"] = ratio_text(share)
    small = f"{room['bf16'] / 1e6:.0f} M parameters at work in bf16 ({room['int4'] / 1e6:.0f} M in int4)"
    why = (
        f"at {gbs:.0f} GB/s the limit is {most['OLMoE-1B-7B, bf16']:.1f} for OLMoE-1B-7B and"
        f" {most['Mixtral-8x7B, bf16']:.1f} for Mixtral-8x7B in bf16, {most['OLMoE-1B-7B, int4']:.0f} and"
        f" {most['Mixtral-8x7B, int4']:.1f} in int4; 128 tokens/s leave room for {small}"
    )
    cached = touched < machine.least_weights()  # such a model may live in a cache
    if cached:
        why += f"; this model touches {touched / 1e6:.0f} MB and lives in a cache, so its own rate proves nothing"
    verdict = UNMEASURABLE if cached else HOLDS if figures.median >= CLAIMED else FAILS
    figure = f"{figures.median:.1f} tokens/s at {touched / 1e6:.0f} MB a token"
    return [
        Result("tokens per second", SAID_RATE, figure, verdict, why, [cell], facts),
        vllm(cell, reason),
        steady(kept, cell, touched),
    ]


def vllm(cell: Cell, reason: str) -> Result:
    """There is no vLLM here; what bounds the ratio of any two engines is their share of the read ceiling."""
    share = limit_ratio(cell.samples[OURS])
    why = "vLLM is a server for accelerators and many requests at once and is not part of this suite"
    figure = "–"
    if share.pairs:
        why += (
            f"; for one request nothing exceeds the read ceiling, of which we reach {share.median:.2f}: we are 2.3"
            f" times as fast only as an engine that reaches {share.median / 2.3:.2f} of it or less"
        )
    if PEER in cell.samples:
        figure = f"{ratio_text(paired_ratio(cell.samples[OURS], cell.samples[PEER]))}× transformers"
        why += "; transformers (PyTorch, CPU) is shown instead"
    elif reason:
        why += f"; transformers: {reason}"
    return Result("vLLM", SAID_VLLM, figure, UNMEASURABLE, why)


def steady(kept: list[Sample], cell: Cell, touched: float) -> Result:
    """P99 of the time of one token over its mean, in each sample."""
    over = [Sample(s.extra["p99_ms"] / s.extra["mean_ms"], extra={"tokens": s.extra["tokens"]}) for s in kept]
    taken = Cell("P99 / mean of a token", "×", cell.point, {OURS: over}, higher_is_better=False)
    middle, tokens = summary(over), statistics.median(s.extra["tokens"] for s in over)
    spread = f"{middle.low:.2f} to {middle.high:.2f}"
    why = f"median of {middle.n} runs of {tokens:.0f} tokens each ({spread}); others on the machine add to it"
    if tokens < 100:
        return Result("P99", SAID_P99, f"{middle.median:.2f}×", UNMEASURABLE, f"too few tokens: {why}", [taken])
    return Result("P99", SAID_P99, f"{middle.median:.2f}×", HOLDS if middle.median <= 1.11 else FAILS, why, [taken])
