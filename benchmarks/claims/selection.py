"""Claim: the branch-free bitonic selection of the two best experts takes 1/4.7 of the time of `qsort` and always the
same time.

Four ways in one C library (c/selection.c): the engine's network, `qsort`, a plain walk that remembers two, and the
steps of the published function. Each chooses from the same random scores. The answers are compared with NumPy's stable
sort, and for the published one over all orders of n scores.
"""

from __future__ import annotations

from functools import partial
from itertools import permutations

import numpy as np
from harness import Cell, Sample, interleave
from numpy.typing import NDArray
from report import ratio_text

from claims.claim import Plan, Result, judged, median, missing, times
from claims.engine import selection

SAID = "the two best of the experts by a bitonic network: 4.7× faster than qsort, no variance"
METHODS = {"network": 0, "qsort": 1, "walk": 2, "published": 3}
ROWS = 4096
KINDS = ("random", "ascending", "descending", "equal", "NaN")


def choose(plan: Plan, method: str, scores: NDArray[np.float32]) -> NDArray[np.int32]:
    """The ids [rows, 2] that this method chooses."""
    ids = np.empty((len(scores), 2), np.int32)
    selection(plan)(METHODS[method], scores.ctypes.data, *scores.shape, 1, ids.ctypes.data)
    return ids


def best_two(scores: NDArray[np.float32]) -> NDArray[np.int64]:
    """By NumPy: descending, ties to the lower id."""
    return np.argsort(-scores, axis=1, kind="stable")[:, :2]


def wrong(plan: Plan, method: str, scores: NDArray[np.float32]) -> float:
    """Share of the rows for which not even the set of two is right."""
    chosen = choose(plan, method, scores)
    return float((np.sort(chosen, axis=1) != np.sort(best_two(scores), axis=1)).any(axis=1).mean())


def orders(n: int) -> NDArray[np.float32]:
    """All orders of n different scores, [n!, n]."""
    return np.array(list(permutations(range(n))), np.float32)


def kind(name: str, n: int) -> NDArray[np.float32]:
    drawn = np.random.default_rng(n).standard_normal((ROWS, n), dtype=np.float32)
    rising = np.sort(drawn, axis=1)
    return {
        "random": drawn,
        "ascending": rising,
        "descending": np.ascontiguousarray(rising[:, ::-1]),
        "equal": np.zeros_like(drawn),
        "NaN": np.full_like(drawn, np.nan),
    }[name]


def take(plan: Plan, method: str, scores: NDArray[np.float32]) -> Sample:
    """Nanoseconds of one choice."""
    ids = np.empty((len(scores), 2), np.int32)
    seconds, choices = 0.0, 0
    while seconds < plan.seconds:
        repeats = 4
        seconds += selection(plan)(METHODS[method], scores.ctypes.data, *scores.shape, repeats, ids.ctypes.data)
        choices += repeats * len(scores)
    return Sample(1e9 * seconds / choices)


def run(plan: Plan) -> list[Result]:
    try:
        selection(plan)
    except OSError as error:
        return [missing("selection", SAID, str(error))]
    cells = []
    for n in (8, 64):
        asked = {method: partial(take, plan, method, kind("random", n)) for method in METHODS}
        cells.append(Cell("choice of 2", "ns", {"experts": n}, interleave(asked, plan.rounds), higher_is_better=False))
    for method in ("network", "qsort"):
        asked = {name: partial(take, plan, method, kind(name, 8)) for name in KINDS}
        samples = interleave(asked, plan.rounds)
        cells.append(Cell(f"by input, {method}", "ns", {"experts": 8}, samples, higher_is_better=False))
    eight, many, by_input, _ = cells
    spread = max(median(by_input, name) for name in KINDS) / min(median(by_input, name) for name in KINDS)
    facts = {
        "published: wrong of all orders of 3 scores": wrong(plan, "published", orders(3)),
        "published: wrong of all orders of 8 scores": wrong(plan, "published", orders(8)),
        "published: wrong of random scores of 64 experts": wrong(plan, "published", kind("random", 64)),
        "network: wrong of all orders of 8 scores": wrong(plan, "network", orders(8)),
        "qsort / network, 8 experts": ratio_text(times(eight, "qsort", "network")),
        "qsort / network, 64 experts": ratio_text(times(many, "qsort", "network")),
        "walk / network, 8 experts": ratio_text(times(eight, "walk", "network")),
        "slowest / fastest kind of input, network": spread,
    }
    against = times(eight, "qsort", "network")
    verdict = judged(against, 4.7)
    share = facts["published: wrong of all orders of 8 scores"]
    why = (
        f"a correct network is {against.median:.1f}× as fast as qsort over 8 experts; the published one is wrong for"
        f" {share:.0%} of all orders of 8 scores, since its answer is always experts 0 and 1: its own speed counts for"
        " nothing"
    )
    return [Result("selection", SAID, f"{ratio_text(against)}× qsort", verdict, why, cells, facts)]
