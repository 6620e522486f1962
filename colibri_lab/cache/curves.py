"""Reuse distances and miss ratios for all capacities at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.cache._compiled import cachelab
from colibri_lab.cache.checks import listed
from colibri_lab.cache.policies import NUMBERS, STACKS, Policy, check_policy
from colibri_lab.cache.requests import Passes, Requests, Scope, Whole, bounds_of, future_of, profile_of, streams
from colibri_lab.errors import ArgumentError, is_whole
from colibri_lab.progress import Progress, shown
from colibri_lab.trace import HasTrace, Trace, trace_of

_STEP = 1 << 17  # requests worked on at a time
_AT_ONCE = 1 << 21  # the same, times caches
_CACHES = 1 << 18  # keys of all caches that are simulated side by side

Report = Callable[[float], object] | None


def stack_distances(trace: Trace | HasTrace, scope: Scope = "layer") -> NDArray[np.float64]:
    """How many other keys were used since the last use of the same one, for every request, (Lm, T, k).

    Counted up to the request's own set, whose members do not push one another out. +Inf at a first use, NaN for a slot
    without an expert (or with one that its set has asked for before). An LRU cache of C ≥ k experts hits exactly the
    requests with a distance below C (Mattson et al., 1970). In the global scope every reuse has a distance of k (L − 1)
    or more, since all other layers come between. Raises ArgumentError for another scope, NotCapturedError when the
    trace has no expert ids.
    """
    trace = trace_of(trace)
    out = np.empty((len(trace.moe_layers), trace.n_tokens, trace.top_k))
    for rows in streams(trace, scope):
        requests = Requests(trace, rows, None)
        recency = cachelab.Recency(*requests.shape)
        for start, stop in requests.spans(_STEP):
            depths = recency.feed(requests.ids(start, stop), True)
            out[rows, start:stop] = np.where(depths >= 0, depths, np.where(depths == -1, np.inf, np.nan))
    return out


def miss_ratio_curve(
    trace: Trace | HasTrace,
    policy: Policy = "lru",
    scope: Scope = "layer",
    *,
    passes: Passes = None,
    capacities: Sequence[int] | None = None,
    progress: Progress = None,
) -> NDArray[np.float64]:
    """Share of the requests that miss, by capacity: (Lm, E + 1), or (1, Lm · E + 1) for scope="global".

    Column C is a cache of C experts, as `simulate` has it; below k it is 1.0, for such a cache can not hold a set. NaN
    where a layer has no requests. With `capacities` there is a column for each of these instead.

    Policies that rank all experts alike whatever the capacity (lru, lfu, lru-k, least-stale, belady) take one pass for
    all capacities, and their curves never rise (Mattson et al., 1970). The others are simulated at each capacity, which
    takes time in a global cache: name some `capacities`. "belady" is the lower bound of every policy that fetches on
    demand, as long as experts are of one size and routing stays what it is. "static" takes the trace as its profile.

    Chance: tokens that choose blindly hit an LRU cache in C/E of the requests once it is warm. `passes` as in
    `simulate`. Memory does not grow with the number of tokens. Raises ArgumentError for another policy or scope or for
    impossible capacities, NotCapturedError when the trace has no expert ids.
    """
    trace = trace_of(trace)
    check_policy(policy)
    bounds = bounds_of(trace, passes)
    caches = [Requests(trace, rows, bounds) for rows in streams(trace, scope)]
    keys = trace.num_experts * (1 if scope == "layer" else len(trace.moe_layers))
    words = f"capacities are whole numbers from 0 to {keys}"
    chosen = list(range(keys + 1)) if capacities is None else listed(capacities, words)
    if not all(is_whole(c) and 0 <= c <= keys for c in chosen):
        raise ArgumentError(f"{words}, not {chosen!s:.80}")
    columns = np.array(chosen, np.int64)
    hits = np.zeros((len(caches), len(chosen)), np.int64)
    total = np.zeros((len(caches), 1), np.int64)
    with shown(progress, len(caches) * trace.n_tokens, "tokens", policy) as report:
        for number, requests in enumerate(caches):
            done = _part(report, number, len(caches))
            if policy in STACKS:
                counts = _distances(requests, policy, bounds is None, done)
                hits[number] = np.concatenate([[0], np.cumsum(counts[:-1])])[columns]
                total[number] = counts.sum()
            else:
                _simulated(requests, policy, columns, hits[number], total[number], done)
    with np.errstate(invalid="ignore"):
        curve = 1 - hits / total
    return np.asarray(np.where(columns >= trace.top_k, curve, np.where(total > 0, 1.0, np.nan)))


def _part(report: Report, number: int, count: int) -> Report:
    """Reports the progress of one cache among others."""
    return None if report is None else lambda done: report((number + done) / count)


def _distances(requests: Requests, policy: str, alone: bool, report: Report) -> Whole:
    """Requests by the smallest capacity less one that hits them; in the last place those that never hit."""
    spans = requests.spans(requests.at_once(_STEP))
    with ExitStack() as files:
        future = files.enter_context(future_of(requests, spans)) if policy == "belady" else None
        state: Any
        if policy == "lru" and alone:
            state = cachelab.Recency(*requests.shape)
        else:
            state = cachelab.Stack(NUMBERS[policy], *requests.shape, None if future is None else future.first)
        for start, stop in spans:
            ids = requests.ids(start, stop)
            if policy == "lru" and alone:
                state.feed(ids, False)
            else:
                state.feed(requests.passes(start, stop), ids, None if future is None else future.read(start, stop))
            if report is not None:
                report(stop / requests.tokens)
        return np.asarray(state.histogram())


def _simulated(requests: Requests, policy: str, columns: Whole, hits: Whole, total: Whole, report: Report) -> None:
    """Hits of a cache at each capacity, some of them side by side."""
    layers, experts, k = requests.shape
    uses = profile_of(requests.trace)[requests.rows].ravel() if policy == "static" else None
    ranked = [] if uses is None else np.argsort(-uses, kind="stable").tolist()
    side_by_side = max(1, _CACHES // (layers * experts))
    for first in range(0, len(columns), side_by_side):
        some = np.maximum(columns[first : first + side_by_side], k).tolist()
        caches = cachelab.Caches(NUMBERS[policy], layers, experts, k, 0, [(c, c) for c in some], None, None, uses, None)
        for key in ranked:
            caches.place(key, False)
        for start, stop in requests.spans(requests.at_once(_AT_ONCE) // len(some)):
            caches.feed(requests.passes(start, stop), requests.ids(start, stop), None, None, None)
            if report is not None:
                report((first + len(some) * stop / requests.tokens) / len(columns))
        counts = caches.counts().sum(axis=(1, 2))
        hits[first : first + len(some)] = counts[:, 0] - counts[:, 5]
        total[:] = counts[0, 0]
