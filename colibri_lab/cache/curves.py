"""Reuse distances and miss ratios for all capacities at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from colibri_lab.cache.requests import Scope, Whole, keys_of, streams
from colibri_lab.errors import ArgumentError
from colibri_lab.progress import Progress, shown
from colibri_lab.trace import HasTrace, Trace, trace_of

Policy = Literal["lru", "belady"]

_STEP = 1 << 16  # requests worked on at a time, at least
_EMPTY = -(1 << 62)  # a place of Belady's stack that holds no key yet


def stack_distances(trace: Trace | HasTrace, scope: Scope = "layer") -> NDArray[np.float64]:
    """How many other keys were used since the last use of the same one, for every request, (Lm, T, k).

    Counted up to the request's own set, whose members do not push one another out. +Inf at a first use, NaN for a slot
    without an expert. An LRU cache of C ≥ k experts hits exactly the requests with a distance below C (Mattson et al.,
    1970). In the global scope every reuse has a distance of k (L − 1) or more, since all other layers come between.
    Raises ArgumentError for another scope, NotCapturedError when the trace has no expert ids.
    """
    trace = trace_of(trace)
    out = np.full((len(trace.moe_layers), len(trace.ids), trace.top_k), np.nan)
    for rows in streams(trace, scope):
        for tokens, distances in _lru(trace, rows):
            out[rows, tokens] = distances.transpose(1, 0, 2)
    return out


def miss_ratio_curve(
    trace: Trace | HasTrace, policy: Policy = "lru", scope: Scope = "layer", *, progress: Progress = None
) -> NDArray[np.float64]:
    """Share of the requests that miss, by capacity: (Lm, E + 1), or (1, Lm · E + 1) for scope="global".

    Column C is a cache of C experts; below k it is 1.0, for such a cache can not hold a set. It never rises. First uses
    miss at every capacity. NaN where a layer has no requests.

    "lru": least recently used, one pass, O(n log n), memory that does not grow with the number of tokens. "belady":
    evicts what is used again last (Belady's MIN, 1966), which needs the future: the upper bound of every policy that
    fetches on demand, as long as experts are of one size and routing stays what it is. Its time grows with E.

    Chance: tokens that choose blindly hit an LRU cache in C/E of the requests once it is warm.
    Raises ArgumentError for another policy or scope, NotCapturedError when the trace has no expert ids.
    """
    trace = trace_of(trace)
    if policy not in ("lru", "belady"):
        raise ArgumentError(f"a miss-ratio curve is of 'lru' or 'belady', not {policy!r:.80}")
    caches = list(streams(trace, scope))
    keys = trace.num_experts * (1 if scope == "layer" else len(trace.moe_layers))
    counts = np.zeros((len(caches), keys + 1), np.int64)  # requests by distance; the last column is never a hit
    if policy == "lru":
        for number, rows in enumerate(caches):
            for _, distances in _lru(trace, rows):
                counts[number] += _histogram(distances, keys)
    elif caches and trace.ids:
        requests = np.stack([keys_of(trace, rows, slice(None)).reshape(-1, trace.top_k) for rows in caches])
        for number, distances in enumerate(_belady(requests, keys, progress)):
            counts[number] = _histogram(distances, keys)
    total = counts.sum(axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):
        curve = 1 - np.concatenate([0 * total, np.cumsum(counts[:, :-1], axis=1)], axis=1) / total
    curve[:, : trace.top_k] = np.where(total > 0, 1.0, np.nan)
    return np.asarray(curve)


def _histogram(distances: NDArray[np.float64], keys: int) -> Whole:
    known = distances[~np.isnan(distances)]
    return np.bincount(np.minimum(known, keys).astype(np.int64), minlength=keys + 1)


# ---- least recently used -------------------------------------------------------------------------------------------


def _lru(trace: Trace, rows: slice) -> Iterator[tuple[slice, NDArray[np.float64]]]:
    """Stack distances of the layers `rows` as one stream, piece by piece: tokens and (tokens, layers, k) distances.

    Between pieces only the keys in the order of their last use are kept: to a distance, older history is no more.
    """
    layers = rows.stop - rows.start
    step = max(_STEP, 4 * layers * trace.num_experts) // (layers * trace.top_k) + 1
    recent = np.zeros(0, np.int64)  # every key used so far, the latest at the end
    for start in range(0, len(trace.ids), step):
        tokens = slice(start, min(start + step, len(trace.ids)))
        keys = keys_of(trace, rows, tokens)
        out, used = np.full(keys.shape, np.nan), keys >= 0
        line = np.concatenate([recent, keys[used]])
        # Where the set of each request begins in the line: after all used slots of the sets before.
        begins = len(recent) + np.concatenate([[0], np.cumsum(used.sum(axis=2).ravel())[:-1]]).reshape(used.shape[:2])
        before = _previous(line)
        mine = before[len(recent) :]
        again = mine >= 0
        found = np.full(len(mine), np.inf)
        limits = np.broadcast_to(begins[:, :, None], used.shape)[used][again]
        # Of what stands before the set, all up to the last use is older; the rest counts where it is the first since.
        found[again] = _count_below(before + 1, limits, mine[again] + 1) - (mine[again] + 1)
        out[used] = found
        yield tokens, out
        last = np.full(layers * trace.num_experts, -1, np.int64)
        last[line] = np.arange(len(line))
        recent = np.argsort(last, kind="stable")[int((last < 0).sum()) :]


def _previous(line: Whole) -> Whole:
    """Where each key of the line stood before, or −1."""
    order = np.argsort(line, kind="stable")
    out = np.full(len(line), -1, np.int64)
    same = line[order[1:]] == line[order[:-1]]
    out[order[1:][same]] = order[:-1][same]
    return out


def _count_below(values: Whole, limits: Whole, bounds: Whole) -> Whole:
    """For each query the number of places before `limits` whose value is below `bounds`, O(n log n) in all.

    A wavelet matrix: bit by bit from the highest, values are parted stably by the bit, and queries follow their bound.
    """
    low, high, out = np.zeros(len(limits), np.int64), limits.astype(np.int64), np.zeros(len(limits), np.int64)
    for bit in reversed(range(len(values).bit_length())):  # values and bounds are at most the length of the line
        ones = (values >> bit & 1).astype(bool)
        zeros = np.concatenate([[0], np.cumsum(~ones)])
        low_zeros, high_zeros, up = zeros[low], zeros[high], (bounds >> bit & 1).astype(bool)
        out += np.where(up, high_zeros - low_zeros, 0)
        low = np.where(up, zeros[-1] + low - low_zeros, low_zeros)
        high = np.where(up, zeros[-1] + high - high_zeros, high_zeros)
        values = np.concatenate([values[~ones], values[ones]])
    return out


# ---- Belady's MIN --------------------------------------------------------------------------------------------------


def _belady(requests: Whole, keys: int, progress: Progress) -> NDArray[np.float64]:
    """(streams, sets, k) depth of each request in MIN's stack: a cache of C ≥ k experts hits the depths below C.

    MIN keeps what is used soonest, at every capacity in the same order, so the cache of C is that of C − 1 and one key
    more (Mattson et al., 1970): one stack shows all capacities. A used key goes to the top, and from there on the key
    used latest is carried down until the place that became free; members of the set in progress are kept above all.
    A place holds next use · keys + key, so that the largest is the one to carry; members of the set have negative ones.
    """
    streams, sets, k = requests.shape
    following = _next_uses(requests, keys)
    stack, seen = np.full((streams, keys), _EMPTY), np.zeros(streams, np.int64)
    columns, row = np.arange(keys), np.arange(streams)
    out = np.full(requests.shape, np.nan)
    with shown(progress, sets, "sets", "belady") as report:
        for number in range(sets):
            members = requests[:, number]
            at = np.where(stack == _EMPTY, -1, stack % keys)[:, None, :] == members[:, :, None]
            here = at.any(axis=2) & (members >= 0)
            out[:, number] = np.where(members < 0, np.nan, np.where(here, at.argmax(axis=2), np.inf))
            pinned = members - keys * (1 + np.arange(k))
            for slot in range(k):
                stack[row[here[:, slot]], at[:, slot].argmax(axis=1)[here[:, slot]]] = pinned[here[:, slot], slot]
            for slot in range(k):
                asked = members[:, slot] >= 0
                place = np.where(here[:, slot], (stack == pinned[:, slot, None]).argmax(axis=1), seen)
                seen += asked & ~here[:, slot]
                carried = np.maximum.accumulate(stack, axis=1)[:, :-1]
                moved = np.minimum(carried, stack[:, 1:])
                moved = np.where(columns[1:] == place[:, None], carried, moved)
                new = np.concatenate([pinned[:, slot, None], moved], axis=1)
                stack = np.where(asked[:, None] & (columns <= place[:, None]), new, stack)
            top = stack[:, :k]
            is_member = (top < 0) & (top != _EMPTY)
            slots = np.where(is_member, -(top // keys) - 1, 0)
            stack[:, :k] = np.where(is_member, np.take_along_axis(following[:, number], slots, axis=1), top)
            if report is not None:
                report((number + 1) / sets)
    return out


def _next_uses(requests: Whole, keys: int) -> Whole:
    """Next use · keys + key of every request: the number of the set that asks for it next, or beyond all sets."""
    streams, sets, _ = requests.shape
    coming = np.full((streams, keys + 1), sets, np.int64)  # the last column takes the slots without an expert
    out = np.empty(requests.shape, np.int64)
    row = np.arange(streams)[:, None]
    for number in reversed(range(sets)):
        members = requests[:, number]
        out[:, number] = coming[row, members] * keys + members
        coming[row, members] = number
    return out
