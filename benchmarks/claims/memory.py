"""Claim: 63 % less memory than PyTorch.

What the system says of a fresh process after it has opened the model and read a prompt: peak of resident bytes, of
which anonymous (nobody else can use them) and file-backed (the page cache, shared and droppable). PyTorch runs the
model through transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import models
from contenders import OURS, available
from harness import Cell, paired_ratio
from measures import load
from suite import Checkpoint, say
from suite import Plan as SuitePlan

import colibri_lab as lab
from claims.claim import FAILS, HOLDS, UNMEASURABLE, Plan, Result, median

SAID = "63 % less memory than PyTorch"
PEER = "transformers"
PROMPT = 128


def suite_plan(plan: Plan, peers: tuple[str, ...], seconds: float, limits: bool) -> SuitePlan:
    """One thread, a short prompt, no context: what the measures of the suite need."""
    return SuitePlan(
        cache=plan.cache.absolute(),
        threads=(1,),
        rounds=plan.rounds,
        seconds=seconds,
        prompts=(PROMPT,),
        contexts=(0,),
        peers=peers,
        limits=limits,
        process_rounds=plan.rounds,
    )


def subject(plan: Plan) -> tuple[str, str, Path]:
    """(name, dtype, folder) of the model that is run."""
    if plan.quick:
        return "bundled", "bf16", Path(lab.open().info["path"])
    return "coarse", "bf16", models.checkpoint(models.COARSE, "bf16", plan.cache)


def peers(plan: Plan) -> tuple[tuple[str, ...], str]:
    """The peers that work here, and why not when there are none."""
    if plan.quick:
        return (), "left out in the quick form"
    versions, reasons = available([PEER], plan.cache)
    for reason in reasons.values():
        say(f"transformers (PyTorch) is left out: {reason}")
    return tuple(versions), reasons.get(PEER, "")


def cells(plan: Plan, names: tuple[str, ...]) -> Iterator[Cell]:
    name, dtype, folder = subject(plan)
    with Checkpoint(suite_plan(plan, names, 0.0, limits=False), name, dtype, folder, names) as checkpoint:
        yield from (cell for cell in load.run(checkpoint) if cell.measure.startswith("memory"))


def run(plan: Plan) -> list[Result]:
    names, reason = peers(plan)
    found = list(cells(plan, names))
    peak, anonymous, _ = found
    if PEER not in peak.samples:
        figure = f"peak {median(peak, OURS):.0f} MB, of it anonymous {median(anonymous, OURS):.0f} MB"
        return [Result("memory", SAID, figure, UNMEASURABLE, f"PyTorch: {reason}", found)]
    saved, own = (1 - paired_ratio(c.samples[OURS], c.samples[PEER]).median for c in (peak, anonymous))
    why = f"peak resident; of anonymous memory alone {own:.0%} less, since mapped weights belong to the page cache"
    facts = {"peak, less than PyTorch": f"{saved:.0%}", "anonymous, less than PyTorch": f"{own:.0%}"}
    verdict = HOLDS if saved >= 0.63 else FAILS
    return [Result("memory", SAID, f"{saved:.0%} less (peak)", verdict, why, found, facts)]
