"""What a cache of experts would do: reuse distances and miss ratios of a trace's routing, and how good a prefetch was.

The requests of a trace are its chosen experts, token by token as a decoder makes them: the k experts of one token and
layer form a *set*, requested in slot order. A set is served as a whole: none of its members is evicted for another, so
no cache below k experts can work. scope="layer": each MoE layer has a cache of its own. scope="global": one cache for
the experts of all layers; its keys are (layer, expert), its sets follow one another token by token, layer by layer.
Slots without an expert (id −1) request nothing. Ids alone are needed, so any trace will do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from colibri_lab.errors import ArgumentError
from colibri_lab.progress import Progress, shown
from colibri_lab.routing.measured import Measured, Ratios
from colibri_lab.routing.streaming import BLOCK, check_level, expert_ids, hot, in_blocks
from colibri_lab.trace import HasTrace, Trace, trace_of

__all__ = ["Prefetch", "miss_ratio_curve", "prefetch_quality", "stack_distances"]

Policy = Literal["lru", "belady"]
Scope = Literal["layer", "global"]
Whole = NDArray[np.int64]

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
    for rows in _streams(trace, scope):
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
    streams = list(_streams(trace, scope))
    keys = trace.num_experts * (1 if scope == "layer" else len(trace.moe_layers))
    counts = np.zeros((len(streams), keys + 1), np.int64)  # requests by distance; the last column is never a hit
    if policy == "lru":
        for number, rows in enumerate(streams):
            for _, distances in _lru(trace, rows):
                counts[number] += _histogram(distances, keys)
    elif streams and trace.ids:
        requests = np.stack([_keys(trace, rows, slice(None)).reshape(-1, trace.top_k) for rows in streams])
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


# ---- requests ------------------------------------------------------------------------------------------------------


def _streams(trace: Trace, scope: Scope) -> Iterator[slice]:
    """The rows of `trace.moe_layers` that share a cache, cache by cache."""
    if scope not in ("layer", "global"):
        raise ArgumentError(f"a cache is per 'layer' or 'global', not {scope!r:.80}")
    layers = len(trace.moe_layers)
    if scope == "layer":
        yield from (slice(row, row + 1) for row in range(layers))
    elif layers:
        yield slice(0, layers)


def _keys(trace: Trace, rows: slice, tokens: slice) -> Whole:
    """(tokens, layers, k) keys of the requests of some layers: number of the layer among them · E + expert, or −1."""
    ids = np.stack([expert_ids(trace, layer, tokens) for layer in trace.moe_layers[rows]], axis=1)
    return np.where(ids >= 0, ids + np.arange(ids.shape[1])[:, None] * trace.num_experts, -1)


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
        keys = _keys(trace, rows, tokens)
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


# ---- prefetch ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prefetch:
    """How good a prefetch was, layer by layer; all counts (Lm,)."""

    needed: Whole  # requests of the trace
    issued: Whole  # experts fetched ahead
    used: Whole  # of these, needed by their token
    late: Whole  # of the used ones, arrived too late
    precision: Measured  # used / issued; chance: k/E
    recall: Measured  # in time / needed; chance: issued per token / E
    wasted_bytes: Whole | None  # fetched and not needed; None when the size of an expert was not given

    @property
    def wasted(self) -> Whole:
        """Experts fetched and not needed."""
        return self.issued - self.used


def prefetch_quality(
    trace: Trace | HasTrace,
    issued: NDArray[Any],
    *,
    late: NDArray[Any] | None = None,
    expert_bytes: int | None = None,
    level: float = 0.95,
) -> Prefetch:
    """Holds a prefetch against what the tokens really needed.

    `issued`: (Lm, T, p) expert ids fetched ahead for each token and layer, −1 for none; an expert named twice counts as
    fetched twice and used once. `late`: bool of the same shape, those that came after they were needed; they count as
    used but not in recall. `expert_bytes`: size of one expert. Raises ArgumentError when shapes or ids do not fit.
    """
    trace, level = trace_of(trace), check_level(level)
    layers, experts, tokens = len(trace.moe_layers), trace.num_experts, len(trace.ids)
    guess = np.asarray(issued)
    if guess.dtype.kind not in "iu" or guess.ndim != 3 or guess.shape[:2] != (layers, tokens):
        raise ArgumentError(
            f"a prefetch names whole numbers of the shape ({layers}, {tokens}, any); these are {guess.dtype} "
            f"{guess.shape}"
        )
    if guess.size and not -1 <= int(guess.min()) <= int(guess.max()) < experts:
        raise ArgumentError(f"a prefetch names 0 to {experts - 1}, or −1; not {guess.min()} to {guess.max()}")
    after = np.zeros(guess.shape, bool) if late is None else np.asarray(late, bool)
    if after.shape != guess.shape:
        raise ArgumentError(f"`late` has the shape {after.shape}, `issued` {guess.shape}")
    counts = np.zeros((4, layers), np.int64)
    precision, recall = Ratios((layers,), (layers,)), Ratios((layers,), (layers,))
    for row, layer in enumerate(trace.moe_layers):
        ids = guess[row].astype(np.int64)
        wanted = hot(expert_ids(trace, layer), experts) > 0
        fetched, in_time = hot(ids, experts) > 0, hot(np.where(after[row], -1, ids), experts) > 0
        needed, sent = wanted.sum(axis=1), (ids >= 0).sum(axis=1)
        used, found = (wanted & fetched).sum(axis=1), (wanted & in_time).sum(axis=1)
        counts[:, row] = needed.sum(), sent.sum(), used.sum(), used.sum() - found.sum()
        precision.add(in_blocks(used, BLOCK), in_blocks(sent, BLOCK), row)
        recall.add(in_blocks(found, BLOCK), in_blocks(needed, BLOCK), row)
    wasted = None if expert_bytes is None else (counts[1] - counts[2]) * int(expert_bytes)
    per_token = counts[1] / max(tokens, 1) / experts
    return Prefetch(
        counts[0],
        counts[1],
        counts[2],
        counts[3],
        precision.share(level, trace.top_k / experts, "Used / fetched; chance: k/E."),
        recall.share(level, per_token, "Found in time / needed; chance: fetched per token / E."),
        wasted,
    )
