"""One cache of experts on the requests of a trace: what hits, what is read, who is there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.cache._compiled import cachelab
from colibri_lab.cache.checks import ByLayer
from colibri_lab.cache.policies import NUMBERS, Policy
from colibri_lab.cache.requests import Passes, Requests, Scope, Whole, bounds_of, future_of, streams
from colibri_lab.cache.settings import HasPlan, Settings, Unit, settings_of
from colibri_lab.errors import ArgumentError, is_whole
from colibri_lab.progress import Progress, shown
from colibri_lab.trace import HasTrace, Trace, trace_of

_STEP = 1 << 16  # requests served at a time
_OUTCOMES = np.array(["pin", "hit", "prefetch", "late", "miss"])
_EVENT = np.dtype(
    [
        ("token", "<i8"),
        ("slot", "<i4"),
        ("expert", "<i4"),
        ("outcome", "<U8"),
        ("kept", "?"),
        ("evicted", "<i4"),
        ("evicted_layer", "<i4"),
        ("evictions", "<i4"),
    ]
)


@dataclass(frozen=True, eq=False, repr=False)
class Counts:
    """What was counted, by MoE layer: (Lm,) int64. requests = hits + misses, hits = pin + policy + prefetch + late."""

    requests: Whole
    pin_hits: Whole  # of experts held for good
    policy_hits: Whole  # of experts that the policy kept
    prefetch_hits: Whole  # the first use of an expert that was fetched ahead and came in time
    late_hits: Whole  # of experts whose fetch was under way when they were needed
    misses: Whole
    first_uses: Whole  # of the misses, those of an expert that was never asked for before
    not_kept: Whole  # misses and late hits that found no room
    prefetched: Whole  # experts fetched ahead, late ones included; what was there already is not fetched
    wasted: Whole  # of these, gone or left over at the end without a use
    bytes_read: Whole | None  # of misses and fetches, when expert_bytes is known

    @property
    def hits(self) -> Whole:
        """Requests that found their expert, (Lm,)."""
        return self.requests - self.misses

    @property
    def hit_rates(self) -> NDArray[np.float64]:
        """Hits / requests, (Lm,); NaN for a layer without requests."""
        with np.errstate(invalid="ignore"):
            return np.asarray(self.hits / self.requests)

    @property
    def hit_rate(self) -> float:
        """Hits / requests over all layers; NaN without requests."""
        total = int(self.requests.sum())
        return int(self.hits.sum()) / total if total else float("nan")

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {int(self.requests.sum()):,} requests, {int(self.hits.sum()):,} hits>"


@dataclass(frozen=True, eq=False, repr=False)
class Simulation(Counts):
    """What a cache did with the requests of a trace; made by `simulate`."""

    policy: str
    capacity: int
    scope: Scope
    unit: Unit
    passes: Passes
    expert_bytes: Whole | None  # (Lm, E)
    prefill: Counts  # passes of more than one token
    decode: Counts  # passes of one
    trace: Trace
    settings: Settings

    def events(self, layer: int, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        """The requests of one layer by tokens `start` to `stop` (None: the last), in order, as a structured array.

        Fields: `token` i8, `slot` i4, `expert` i4; `outcome` U8: "pin", "hit", "prefetch", "late" or "miss"; `kept`
        bool, whether the expert is there when its set ends; `evicted` i4 and `evicted_layer` i4, who went to make room
        (−1: nobody), the first where several did; `evictions` i4, how many. A request of a prefill pass stands at the
        token and slot that asked for its expert first. Found by replay. Raises ArgumentError for a layer or tokens that
        the trace has not.
        """
        requests, row = self._cache_of(layer)
        end = self._tokens(start, stop, requests)
        if start == end:
            return np.empty(0, _EVENT)
        first, last = requests.pass_of(start)[0], requests.pass_of(end - 1)[1]
        parts = []
        for caches, piece in _walk(requests, self.settings, last, cuts=(first,)):
            if piece.start < first:
                caches.feed(*piece.arrays)
            else:
                parts.append(caches.watch(*piece.arrays, piece.start, row))
        return _named(np.concatenate(parts), requests, int(start), int(end))

    def resident(self, layer: int, token: int) -> Whole:
        """The experts of one layer that are in its cache after a token (after its pass, where that is longer), sorted.

        Raises ArgumentError for a layer or token that the trace has not.
        """
        tokens = self.trace.n_tokens
        if not (is_whole(token) and 0 <= token < tokens):
            raise ArgumentError(f"tokens are 0 to {tokens - 1}, not {token!r:.40}")
        return np.flatnonzero(self.residents(layer, token, token + 1)[0])

    def residents(self, layer: int, start: int = 0, stop: int | None = None) -> NDArray[np.bool_]:
        """(stop − start, E): whether each expert of one layer is in its cache after each of these tokens (after its
        pass, where that is longer). One replay. Raises ArgumentError for a layer or tokens that the trace has not.
        """
        requests, row = self._cache_of(layer)
        end = self._tokens(start, stop, requests)
        out = np.zeros((end - start, self.trace.num_experts), bool)
        spans = [requests.pass_of(token) for token in range(start, end)]
        ends = {after: first for first, after in spans}
        for caches, piece in _walk(requests, self.settings, max(ends, default=0), cuts=tuple(ends)):
            caches.feed(*piece.arrays)
            if piece.stop in ends:
                out[max(0, ends[piece.stop] - start) : piece.stop - start] = caches.residents()[row]
        return out

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """What a reader must know of the trace, in sentences: tokens whose router gave NaN, so that no model chose
        their experts; passes that nobody recorded. Looked for when first asked for.
        """
        from colibri_lab.cache.notes import notes_of

        return notes_of(self.trace, self.passes)

    def report(self) -> str:
        """A plain table: one line per layer, and all together; then the notes."""
        from colibri_lab.cache.tables import table_of

        return "\n".join([table_of(self), *self.notes])

    def _tokens(self, start: int, stop: int | None, requests: Requests) -> int:
        """Where a span of tokens ends."""
        end = requests.tokens if stop is None else stop
        if not (is_whole(start) and is_whole(end) and 0 <= start <= end <= requests.tokens):
            raise ArgumentError(f"tokens are 0 to {requests.tokens}, not {start!r:.40} to {stop!r:.40}")
        return int(end)

    def _cache_of(self, layer: int) -> tuple[Requests, int]:
        if not (is_whole(layer) and layer in self.trace.moe_layers):
            raise ArgumentError(f"MoE layers are {self.trace.moe_layers!s:.80}, not {layer!r:.40}")
        row = self.trace.moe_layers.index(layer)
        rows = next(rows for rows in streams(self.trace, self.scope) if rows.start <= row < rows.stop)
        return Requests(self.trace, rows, bounds_of(self.trace, self.passes)), row - rows.start


def simulate(
    trace: Trace | HasTrace,
    policy: Policy = "lru",
    capacity: int = 16,
    scope: Scope = "layer",
    *,
    passes: Passes = None,
    unit: Unit = "experts",
    expert_bytes: int | NDArray[Any] | None = None,
    profile: Trace | HasTrace | None = None,
    pin: ByLayer | None = None,
    warm: ByLayer | None = None,
    resize: Mapping[int, int] | None = None,
    prefetch: HasPlan | None = None,
    progress: Progress = None,
) -> Simulation:
    """Serves the requests of a trace from a cache of experts and counts.

    `policy`: a name of `lab.cache.POLICIES`, which says what each does. `capacity`: of each layer's cache
    (scope="layer") or of the one that all layers share (scope="global"), in `unit`: experts, or bytes.

    The k experts of a token and layer are a set, requested in slot order. What is there when the set begins hits, and
    no member is evicted before the set ends, so a capacity below k (in bytes: below the k largest experts of a layer)
    is refused. An expert that would find no room even so is a miss, is not kept and evicts nobody. An expert named
    twice in a set is requested once.

    `passes`: None: each token is served on its own, as a decoder does. "trace": as they were recorded (like None where
    nobody recorded them), or a list of token counts: a pass of one token is decode; a longer one is prefill and makes
    one set per layer, its experts in order of first request, layer after layer.
    `expert_bytes`: size of an expert, one for all or (Lm, E); then bytes are counted too.
    `profile`: what "static" is chosen by; None: this trace itself, which is looking ahead.
    `pin`: {layer: experts} that are there for good, within the capacity. `warm`: {layer: experts} that are there at the
    start; they entered in this order and were not used. Neither counts as read.
    `resize`: {token: capacity} from the pass on that holds the token. What no longer fits goes at once, in the policy's
    order; then the shares of slru, lfru and arc follow.
    `prefetch`: a plan of what is fetched ahead of each token and layer (`lab.cache.plan`). It comes before the set,
    by evicting as a miss would (not one another, nor what is named and there already), and is no use of the expert; its
    first request is. What is marked late comes while its set is served: if asked for by it, it is a late hit and takes
    room like a miss; else it comes after the set.

    Memory does not grow with the number of tokens. Raises ArgumentError for what makes no sense, NotCapturedError when
    the trace has no expert ids.
    """
    trace = trace_of(trace)
    settings = settings_of(
        trace,
        policy,
        capacity,
        scope,
        unit=unit,
        expert_bytes=expert_bytes,
        profile=profile,
        pin=pin,
        warm=warm,
        resize=resize,
        prefetch=prefetch,
    )
    bounds = bounds_of(trace, passes)
    caches = [Requests(trace, rows, bounds) for rows in streams(trace, scope)]
    counts = np.zeros((len(trace.moe_layers), 2, 11), np.int64)
    total = len(caches) * trace.n_tokens
    with shown(progress, total, "tokens", policy) as report:
        for number, requests in enumerate(caches):
            state = None
            for state, piece in _walk(requests, settings, trace.n_tokens):
                state.feed(*piece.arrays)
                if report is not None:
                    report((number * trace.n_tokens + piece.stop) / total)
            if state is not None:
                counts[requests.rows] = state.counts()[0]
    known = settings.expert_bytes is not None
    prefill, decode = (_counts(counts[:, kind], known) for kind in range(2))
    both = _counts(counts.sum(axis=1), known)
    return Simulation(
        **vars(both),
        policy=policy,
        capacity=settings.capacity,
        scope=scope,
        unit=unit,
        passes=passes,
        expert_bytes=settings.expert_bytes,
        prefill=prefill,
        decode=decode,
        trace=trace,
        settings=settings,
    )


def _counts(columns: Whole, known: bool) -> Counts:
    requests, pin, policy, ahead, late, misses, first, not_kept, prefetched, wasted, read = columns.T.copy()
    return Counts(
        requests, pin, policy, ahead, late, misses, first, not_kept, prefetched, wasted, read if known else None
    )


# ---- one cache, piece by piece ----


@dataclass(frozen=True)
class Piece:
    """Tokens [start, stop) and what the compiled cache is fed of them."""

    start: int
    stop: int
    arrays: tuple[Any, ...]


def _walk(requests: Requests, settings: Settings, stop: int, cuts: tuple[int, ...] = ()) -> Iterator[tuple[Any, Piece]]:
    """The cache and the next piece to feed it, up to token `stop`; the capacity changes in between."""
    changes = {requests.pass_of(token)[0]: capacity for token, capacity in settings.resize.items()}
    slots = 0 if settings.ahead is None else settings.ahead.shape[2]
    spans = requests.spans(requests.at_once(_STEP, slots), (*cuts, *changes, stop))
    with ExitStack() as open_files:
        future = open_files.enter_context(future_of(requests, spans)) if settings.policy == "belady" else None
        caches = _start(requests, settings, None if future is None else future.first)
        for start, end in spans:
            if start >= stop:
                return
            if start in changes:
                caches.resize(*settings.limits(changes[start], requests))
            plan, late = (None if x is None else x[requests.rows, start:end] for x in (settings.ahead, settings.late))
            coming = None if future is None else future.read(start, end)
            arrays = (requests.passes(start, end), requests.ids(start, end), coming, plan, late)
            yield caches, Piece(start, end, arrays)


def _start(requests: Requests, settings: Settings, first: NDArray[np.int32] | None) -> Any:
    """The cache before the first request."""
    rows, experts = requests.rows, requests.trace.num_experts
    limits = settings.limits(settings.capacity, requests)
    uses = None if settings.uses is None else settings.uses[rows].ravel()
    slots = 0 if settings.ahead is None else settings.ahead.shape[2]
    caches = cachelab.Caches(
        NUMBERS[settings.policy],
        *requests.shape,
        slots,
        [limits],
        settings.sizes(rows),
        settings.cost(rows),
        uses,
        first,
    )
    for keys, pinned in ((settings.pin, True), (settings.warm, False)):
        for row, expert in keys:
            if rows.start <= row < rows.stop and not caches.place((row - rows.start) * experts + expert, pinned):
                what = "pin" if pinned else "warm"
                raise ArgumentError(f"{what} names more experts than a capacity of {settings.capacity} has room for")
    if uses is not None:
        for key in np.argsort(-uses, kind="stable").tolist():
            caches.place(key, False)
    for capacity in settings.resize.values():
        room = settings.limits(capacity, requests)[0]
        if room < caches.pinned():
            raise ArgumentError(f"resize to {capacity} is less than what is pinned, {caches.pinned()} {settings.unit}")
    return caches


def _named(found: NDArray[Any], requests: Requests, start: int, stop: int) -> NDArray[Any]:
    """Events in the words of the trace."""
    found = found[(found["token"] >= start) & (found["token"] < stop)]
    out, experts = np.empty(len(found), _EVENT), requests.trace.num_experts
    out["token"], out["slot"], out["expert"] = found["token"], found["slot"], found["key"] % experts
    out["outcome"], out["kept"], out["evictions"] = _OUTCOMES[found["outcome"]], found["kept"], found["n_evicted"]
    gone = found["evicted"] >= 0
    layers = np.array(requests.layers)
    out["evicted"] = np.where(gone, found["evicted"] % experts, -1)
    out["evicted_layer"] = np.where(gone, layers[found["evicted"] // experts], -1)
    return out
