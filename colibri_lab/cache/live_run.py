"""A real run with a budget of experts: what is not in it lies on disk, and is read when a router asks for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.cache.budget import Budget, BudgetPolicy, Key
from colibri_lab.cache.checks import array_of, open_model
from colibri_lab.cache.costs import Machine
from colibri_lab.cache.expert_pages import ExpertPages
from colibri_lab.cache.requests import Scope
from colibri_lab.cache.simulation import Simulation, simulate
from colibri_lab.errors import ArgumentError, NonFiniteError, is_whole
from colibri_lab.progress import Progress, shown
from colibri_lab.routing import load
from colibri_lab.trace import HasTrace, Trace, trace_of

__all__ = ["LiveCounts", "LiveRun", "Walked", "live"]

Whole = NDArray[np.int64]

_TILE = 512  # tokens of a stepped pass at most, in a session that keeps its routing alone

_PASS = np.dtype(
    [("start", "i8"), ("stop", "i8"), ("kind", "U7"), ("seconds", "f8"), ("read_seconds", "f8"), ("drop_seconds", "f8"),
     ("bytes_read", "i8"), ("hits", "i8"), ("misses", "i8")]
)  # fmt: skip


@dataclass(frozen=True)
class LiveCounts:
    """What the experts of each MoE layer were asked for and how often they were there; all (Lm,) int64."""

    requests: Whole
    hits: Whole
    misses: Whole
    bytes_read: Whole


@dataclass(frozen=True, repr=False)
class LiveRun:
    """What a run with a budget of experts did and how long that took. Made by `lab.cache.live`."""

    policy: BudgetPolicy
    capacity: int
    scope: Scope
    trace: Trace
    """Its routing, as any session gives it."""
    logits: NDArray[np.float32]
    """(V,) after the last token: the bytes of a run without a budget."""
    prefill: LiveCounts
    decode: LiveCounts
    passes: NDArray[Any]
    """One entry for each pass: token rows start to stop, kind ("prefill" or "decode"), seconds, of them read_seconds
    and drop_seconds, bytes_read, hits, misses.
    """
    expert_bytes: Whole
    """(Lm, E) bytes of each expert's weights."""
    request_bytes: int
    """Size of the largest read: an expert comes in pieces that lie together in the file, none larger than this."""
    cold: bool
    """Whether no page of an expert was in memory as the run began; `cold_sentence` says more."""
    cold_sentence: str
    threads: int
    _profile: Trace | None

    # ---- what it made ----

    @property
    def ids(self) -> list[int]:
        """Token ids of prompt and answer."""
        return list(self.trace.ids)

    @property
    def texts(self) -> list[str]:
        """The text of each token; empty texts when the model has no tokenizer."""
        return list(self.trace.texts)

    # ---- what it cost ----

    @property
    def requests(self) -> Whole:
        """(Lm,) experts asked for, pass by pass: a pass asks for each of its distinct experts once."""
        return self.prefill.requests + self.decode.requests

    @property
    def hits(self) -> Whole:
        """(Lm,) of them, there already."""
        return self.prefill.hits + self.decode.hits

    @property
    def misses(self) -> Whole:
        """(Lm,) of them, read."""
        return self.prefill.misses + self.decode.misses

    @property
    def bytes_read(self) -> Whole:
        """(Lm,) bytes of the experts that were read."""
        return self.prefill.bytes_read + self.decode.bytes_read

    @property
    def seconds(self) -> float:
        """Of all passes, reading and dropping included."""
        return float(self.passes["seconds"].sum())

    @property
    def read_seconds(self) -> float:
        """Of them, waiting for experts."""
        return float(self.passes["read_seconds"].sum())

    @property
    def tokens_per_s(self) -> float:
        """Decoded tokens per second, prefill aside; NaN when no token was decoded."""
        decode = self._decoded
        return len(decode) / float(decode["seconds"].sum()) if len(decode) else float("nan")

    @property
    def _decoded(self) -> NDArray[Any]:
        return np.asarray(self.passes[self.passes["kind"] == "decode"])

    # ---- held against ----

    @cached_property
    def simulation(self) -> Simulation:
        """What `simulate` makes of this run's trace: same policy, capacity, scope and passes. Counts and bytes are
        those of the run, layer by layer, or one of the two is wrong.
        """
        return simulate(
            self.trace,
            self.policy,
            self.capacity,
            self.scope,
            passes="trace",
            expert_bytes=self.expert_bytes,
            profile=self._profile,
        )

    @cached_property
    def machine(self) -> Machine | None:
        """What this run itself showed of the machine; None when it read nothing. To predict a run, measure before it
        (`lab.cache.measure_machine`): this one knows the answer.
        """
        n_bytes, reads = int(self.bytes_read.sum()), int(self.misses.sum())
        decode = self._decoded
        if not n_bytes or not len(decode) or not self.read_seconds:
            return None
        idle = decode["read_seconds"] + decode["drop_seconds"]
        return Machine(
            n_bytes / self.read_seconds,
            float((decode["seconds"] - idle).mean()),
            float(self.passes["drop_seconds"].sum()) / reads,
            source=f"what a live run of {len(self.ids)} tokens took itself, {_threads(self.threads)}",
        )

    def report(self) -> str:
        """All of it as a table, with what is known about the pages and whether the simulator agrees."""
        where = "each layer" if self.scope == "layer" else "all layers"
        lines = [
            f"live run: {self.policy}, {self.capacity} experts for {where}, {len(self.ids)} tokens, "
            f"{_threads(self.threads)}",
            f"  {'':8}{'passes':>7}{'requests':>10}{'hits':>9}{'misses':>8}{'hit rate':>10}{'read':>11}{'seconds':>9}"
            f"{'reading':>9}",
        ]
        for kind, counts in (("prefill", self.prefill), ("decode", self.decode)):
            rows = self.passes[self.passes["kind"] == kind]
            requests, hits, misses = (int(part.sum()) for part in (counts.requests, counts.hits, counts.misses))
            share, read = f"{hits / requests:.1%}" if requests else "-", int(counts.bytes_read.sum()) / 1e6
            lines.append(
                f"  {kind:8}{len(rows):7}{requests:10}{hits:9}{misses:8}{share:>10}"
                f"{read:8.1f} MB{rows['seconds'].sum():9.3f}{rows['read_seconds'].sum():9.3f}"
            )
        if len(self._decoded):
            warm = "" if self.cold else " (not of cold reads: see below)"
            lines.append(
                f"  {self.tokens_per_s:.2f} tokens/s decoding{warm}; reads of up to {self.request_bytes:,} bytes"
            )
        return "\n".join([*lines, f"  {self.cold_sentence}", f"  {self._verdict()}"])

    def __repr__(self) -> str:
        return (
            f"<LiveRun {self.policy}, {self.capacity} experts: {len(self.ids)} tokens, {int(self.hits.sum())} hits, "
            f"{int(self.misses.sum())} misses, {int(self.bytes_read.sum()) / 1e6:.1f} MB read>"
        )

    def _verdict(self) -> str:
        return (
            "The simulator replays this run exactly: hits, misses and bytes of every layer."
            if self.agrees
            else "The simulator does NOT replay this run: counts or bytes differ, so one of the two is wrong."
        )

    @property
    def agrees(self) -> bool:
        """Whether `simulation` has the same hits, misses and bytes, layer by layer, prefill and decode apart."""
        pairs = ((self.prefill, self.simulation.prefill), (self.decode, self.simulation.decode))
        return all(
            np.array_equal(getattr(mine, name), getattr(theirs, name))
            for mine, theirs in pairs
            for name in ("requests", "hits", "misses", "bytes_read")
        )


def live(
    model: Any,
    x: str | Sequence[int] | NDArray[np.integer[Any]],
    capacity: int = 16,
    policy: BudgetPolicy = "lru",
    scope: Scope = "layer",
    *,
    new_tokens: int = 32,
    chunk: int | None = None,
    profile: Trace | HasTrace | None = None,
    threads: int | None = None,
    progress: Progress = None,
) -> LiveRun:
    """Runs a prompt and `new_tokens` more, greedily, with no more than `capacity` experts in memory.

    The weights stay where the file maps them. At the start all experts are dropped, from the mapping and from the
    system's page cache, and everything else is read in. From then on a stepper walks the model: when a router has
    chosen, the budget decides who goes and who comes; who goes is dropped, who comes is read. Of a prefill set larger
    than the budget, experts that find no room are read when their turn comes, computed and dropped at once. Nothing is
    locked, and what the budget holds at the end stays in memory. Logits and tokens are those of a run without a budget,
    byte for byte. End tokens do not end it.

    `chunk`: tokens of the prompt in one pass, None for all of them or 512, which is the most; with 1 the prompt is
    decoded token by token.
    `capacity`: experts in each layer (scope="layer") or in all together ("global"), from top_k on. `policy`: "lru",
    "fifo", "lfu", or "static", which holds the experts that `profile`, a trace, used most. Other processes or models
    that have the same files mapped hold their pages too: `cold` then says so.

    Raises ArgumentError for a capacity, policy or prompt that does not work, for a model without experts or with
    replaced ones; UnsupportedError where the system cannot drop pages; CapacityError; FileError; KeyboardInterrupt.
    """
    budget = _budgets(open_model(model, "live"), capacity, policy, scope, profile)
    if not is_whole(new_tokens) or new_tokens < 0:
        raise ArgumentError(f"new_tokens is a whole number of 0 or more; this is {new_tokens!r:.80}")
    if chunk is not None and (not is_whole(chunk) or chunk < 1):
        raise ArgumentError(f"chunk is the number of tokens in a pass, or None for all at once; this is {chunk!r:.80}")
    ids = _prompt(model, x)
    session = model.session(capture="routing", threads=threads, max_tokens=len(ids) + int(new_tokens))
    _ = model.identity  # what a trace says of its model; it reads a part of the files, so before they are dropped
    pages = ExpertPages(model)
    cold, cold_sentence = pages.begin()
    run = Walked(session, pages, budget)
    run.fill()
    with shown(progress, len(ids) + new_tokens, "tokens", "live") as report:
        total, done = len(ids) + new_tokens, 0
        while done < total:
            done += run.walk(ids[done : done + (chunk or _TILE)] if done < len(ids) else [_greedy(session.logits)])
            if report is not None:
                report(done / total)
    return LiveRun(
        policy,
        int(capacity),
        scope,
        session.trace(),
        np.array(session.logits),
        LiveCounts(*run.counts["prefill"]),
        LiveCounts(*run.counts["decode"]),
        np.array(run.passes, _PASS),
        pages.expert_bytes,
        pages.request_bytes,
        cold,
        cold_sentence,
        int(session.threads),
        None if profile is None else trace_of(profile),
    )


class Walked:
    """A session on its way, stage by stage, with a budget that is really kept."""

    def __init__(self, session: Any, pages: ExpertPages, budgets: Callable[[int], Budget]) -> None:
        self.session, self.pages, self.budgets = session, pages, budgets
        layers = session.model.config.moe_layers
        self.rows = {layer: row for row, layer in enumerate(layers)}
        self.counts = {kind: np.zeros((4, len(layers)), np.int64) for kind in ("prefill", "decode")}
        self.passes: list[tuple[Any, ...]] = []
        self.passing: set[Key] = set()  # members of the set in progress that found no room

    def fill(self) -> None:
        """Reads what the budgets hold before the first token."""
        for row in self.rows.values():
            for key in self.budgets(row).held:
                if key[0] == row:
                    self.pages.read(key)

    def walk(self, ids: NDArray[Any] | Sequence[int]) -> int:
        """One pass of so many tokens. An interrupt ends it between two stages; pages stay as the budget had them."""
        kind = "decode" if len(ids) == 1 else "prefill"
        before = self.counts[kind].sum(axis=1)
        self.read_seconds = self.drop_seconds = 0.0
        started = time.perf_counter()
        stepper = self.session.stepper(ids, chunk=None)
        while not stepper.at_end:
            place = stepper.next
            key = self.rows.get(place.layer, -1), place.expert
            if key in self.passing:
                self._read(key, self.counts[kind])
            stepper.step(progress=False)
            if key in self.passing:
                self._drop(key)
            if place.stage == "router":
                chosen = stepper.peek(f"layers.{place.layer}.moe.expert_ids")
                self._serve(self.rows[place.layer], chosen, self.counts[kind])
        seconds = time.perf_counter() - started
        _, hits, misses, n_bytes = (self.counts[kind].sum(axis=1) - before).tolist()
        stop = len(self.session.ids)
        self.passes.append(
            (stop - len(ids), stop, kind, seconds, self.read_seconds, self.drop_seconds, n_bytes, hits, misses)
        )
        return len(ids)

    def _serve(self, row: int, chosen: NDArray[np.int32], counts: Whole) -> None:
        """Makes room and fetches, as the budget decides about the experts that a router has chosen, (tokens, k)."""
        members = dict.fromkeys((row, expert) for expert in chosen.ravel().tolist() if expert >= 0)
        self.passing.clear()
        for served in self.budgets(row).serve(list(members)):
            counts[:3, row] += 1, served.hit, not served.hit
            if served.evicted is not None:
                self._drop(served.evicted)
            if served.kept and not served.hit:
                self._read(served.key, counts)
            elif not served.kept:
                self.passing.add(served.key)

    def _read(self, key: Key, counts: Whole) -> None:
        started = time.perf_counter()
        counts[3, key[0]] += self.pages.read(key)
        self.read_seconds += time.perf_counter() - started

    def _drop(self, key: Key) -> None:
        started = time.perf_counter()
        self.pages.drop(key)
        self.drop_seconds += time.perf_counter() - started


def _prompt(model: Any, x: Any) -> NDArray[Any]:
    """Token ids of a text or of ids. Raises ArgumentError."""
    if isinstance(x, str):
        if not x:
            raise ArgumentError("a live run begins with at least one token; this text is empty")
        if model.tokenizer is None:
            raise ArgumentError(f"the checkpoint at '{model.path}' has no tokenizer.json, so it takes ids, not a text")
        x = model.tokenizer.encode(x)
    ids = array_of(x, "a flat row of token ids")
    if ids.ndim != 1 or not ids.size:
        raise ArgumentError(f"a live run begins with at least one token, in one flat row; this is {ids.shape}")
    return ids


def _threads(count: int) -> str:
    return f"{count} thread{'s' * (count != 1)}"


def _greedy(logits: NDArray[np.float32]) -> int:
    if np.isnan(logits).any() or logits.max() in (np.inf, -np.inf):
        raise NonFiniteError("the logits are not finite, so no token can be chosen; lab.nan.find(session) tells why")
    return int(logits.argmax())


def _budgets(
    model: Any, capacity: int, policy: BudgetPolicy, scope: Scope, profile: Trace | HasTrace | None
) -> Callable[[int], Budget]:
    """The budget that serves a row of MoE layers. Raises ArgumentError."""
    layers, experts, top_k = len(model.config.moe_layers), model.config.num_experts, model.config.top_k
    if scope not in ("layer", "global"):
        raise ArgumentError(f"a cache is per 'layer' or 'global', not {scope!r:.80}")
    if not is_whole(capacity) or capacity < 1:
        most = experts if scope == "layer" else experts * layers
        raise ArgumentError(
            f"capacity is a whole number of experts, from {top_k} (top_k) to {most}; this is {capacity!r:.80}"
        )
    if layers and capacity < top_k:
        raise ArgumentError(
            f"a budget of {capacity} experts cannot hold what one token needs in one layer: this model chooses {top_k} "
            f"(top_k), so give {top_k} or more"
        )
    if (policy == "static") != (profile is not None):
        raise ArgumentError(
            "policy='static' holds what an earlier trace used most: give it as profile="
            if policy == "static"
            else f"profile= is for policy='static'; {policy!r:.80} does not look at it"
        )
    caches = [slice(row, row + 1) if scope == "layer" else slice(0, layers) for row in range(layers)]
    chosen = [_most_used(profile, rows, int(capacity), (layers, experts)) for rows in caches]
    made = {rows.start: Budget(policy, int(capacity), keys) for rows, keys in zip(caches, chosen, strict=True)}
    return [made[rows.start] for rows in caches].__getitem__


def _most_used(profile: Trace | HasTrace | None, rows: slice, capacity: int, shape: tuple[int, int]) -> list[Key]:
    """The experts of some rows that a trace chose most often, the lower one where two are equal."""
    if profile is None:
        return []
    counts = load(profile)
    if counts.shape != shape:
        raise ArgumentError(
            f"the profile has {counts.shape[0]} MoE layers of {counts.shape[1]} experts, the model {shape[0]} of "
            f"{shape[1]}"
        )
    order = np.argsort(-counts[rows].ravel(), kind="stable")[:capacity]
    return [(rows.start + int(place) // shape[1], int(place) % shape[1]) for place in order]
