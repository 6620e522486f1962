"""The runs behind a profile: a session of its own, watched stage by stage."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab import _cachelab
from colibri_lab.cache.checks import array_of
from colibri_lab.errors import ArgumentError, is_whole
from colibri_lab.profiling.counters import COUNTERS, reasons
from colibri_lab.profiling.limits import Limits, measure_limits
from colibri_lab.profiling.result import TABLE, Profile
from colibri_lab.profiling.work import STAGES, WorkOf
from colibri_lab.progress import Progress, shown

if TYPE_CHECKING:
    from colibri_lab.model import Model
    from colibri_lab.session import Session

__all__ = ["DECODE_TOKENS", "profile"]

DECODE_TOKENS = 8
PHASES = ("prefill", "decode")
CALLS, SECONDS, MINOR, MAJOR, SHARE, EVENTS = range(6)  # columns of Stages.take; one for each counter from EVENTS on

Array = NDArray[Any]


def profile(
    session_or_model: Session | Model,
    x: str | Sequence[int] | NDArray[np.integer[Any]],
    *,
    threads: int | None = None,
    repeats: int = 5,
    progress: Progress = None,
) -> Profile:
    """Runs `x` (a text or ids) in one pass and then some tokens one by one (the most likely ones), `repeats` times, and
    tells what each stage of each layer took: seconds, operations, bytes, page faults, and what the CPU counts of itself
    where the system lets it. The limits of the machine are measured right before, in this process, by as many threads.

    The runs have a session of their own; of a session that is given only the model, the threads, the gate mode and the
    emulated formats are taken, and it stays as it is. `threads` None: those of the session, or as many as may be used.
    A first run, which touches memory for the first time, counts for `faults` alone. Ctrl-C ends it within a second.

    Raises ArgumentError (not a session or model, no tokens, an id outside the vocabulary, `repeats` below 1), and what
    `model.session` raises for threads and memory.
    """
    model, options = _options(session_or_model, threads)
    if not is_whole(repeats) or not 1 <= repeats <= 1000:
        raise ArgumentError(f"repeats is a whole number from 1 to 1000; this is {repeats!r:.80}")
    ids = _ids(model, x)
    counters = _cachelab.Counters()  # before the session, whose threads then are counted too
    refused = reasons(counters.errors())
    session = model.session(capture="routing", max_tokens=len(ids) + DECODE_TOKENS, **options)
    limits = measure_limits(int(session.threads), model.info["isa"])
    runs = Runs(session, ids)
    counted = repeats if len(refused) < len(COUNTERS) else 0
    with shown(progress, 1 + repeats + counted, "runs", "profile") as report:
        first = runs.take(True, counters, report, 0, 1 + repeats + counted)
        timed = [runs.take(False, None, report, 1 + i, 1 + repeats + counted) for i in range(repeats)]
        again = [runs.take(True, counters, report, 1 + repeats + i, 1 + repeats + counted) for i in range(counted)]
    return _result(runs, first, timed, again, refused, limits)


class Runs:
    """Runs of one prompt in one session, each from its beginning."""

    def __init__(self, session: Session, ids: list[int]) -> None:
        self.session, self.ids = session, ids
        self.work = np.zeros((0,))
        self.experts = np.zeros((0,))

    def take(self, system: bool, counters: Any, report: Any, number: int, total: int) -> tuple[Array, Array]:
        """One run: (2, layers + 1, stages, columns), and (2,) the seconds of the calls; decode: the mean of its tokens.
        `system`: page faults and counters too, which cost time.
        """
        session, n_layers = self.session, self.session.model.config.num_hidden_layers
        stages = _cachelab.Stages(n_layers, system, counters)
        session.reset()
        session._engine.observe(stages)
        try:
            begin = time.perf_counter()
            session.feed(self.ids, progress=_part(report, number, total))
            middle = time.perf_counter()
            prefill, tile = stages.take(), stages.tile_tokens
            seconds = 0.0
            for _ in range(DECODE_TOKENS):
                token = [int(np.argmax(session.logits))]
                began = time.perf_counter()
                session.feed(token, progress=False)
                seconds += time.perf_counter() - began
            decode = stages.take()
        finally:
            session._engine.observe(None)
        decode[..., [*range(SHARE), *range(EVENTS, EVENTS + len(COUNTERS))]] /= DECODE_TOKENS
        if not self.work.size:
            self._count_work(tile)
        return np.stack([prefill, decode]), np.array([middle - begin, seconds / DECODE_TOKENS])

    def _count_work(self, tile: int) -> None:
        """Operations, bytes and experts at work of a prefill and of one token, from what this run chose."""
        session, n = self.session, len(self.ids)
        count = WorkOf(session.model)
        chosen = {layer: np.asarray(session.tape.expert_ids(layer)) for layer in session.model.config.moe_layers}
        tiles = [(start, min(tile, n - start), start + tile >= n) for start in range(0, n, tile)]
        tokens = [(n + i, 1, True) for i in range(DECODE_TOKENS)]

        def rows(part: tuple[int, int, bool]) -> dict[int, Array]:
            return {layer: ids[part[0] : part[0] + part[1]] for layer, ids in chosen.items()}

        self.work = np.stack(
            [
                np.sum([count.tile(*part, rows(part)) for part in tiles], axis=0),
                np.mean([count.tile(*part, rows(part)) for part in tokens], axis=0),
            ]
        )
        self.experts = np.full(self.work.shape[:3], np.nan)
        for layer, ids in chosen.items():
            self.experts[0, layer, STAGES.index("expert")] = np.unique(ids[:n]).size
            self.experts[1, layer, STAGES.index("expert")] = np.mean([np.unique(row).size for row in ids[n:]])


def _result(
    runs: Runs,
    first: tuple[Array, Array],
    timed: list[tuple[Array, Array]],
    again: list[tuple[Array, Array]],
    refused: dict[str, str],
    limits: Limits,
) -> Profile:
    found, _ = first
    seconds = np.stack([run[..., SECONDS] for run, _ in timed])
    events = _median_of_known([run[..., EVENTS:] for run, _ in again]) if again else found[..., EVENTS:] * np.nan
    n_layers = runs.session.model.config.num_hidden_layers
    order = [
        (n_layers, 0),
        *((layer, stage) for layer in range(n_layers) for stage in range(1, 9)),
        (n_layers, 9),
        (n_layers, 10),
    ]
    places = [(p, *place) for p in range(2) for place in order if found[(p, *place, CALLS)] > 0]
    table = np.zeros(len(places), TABLE)
    for row, (p, layer, stage) in zip(table, places, strict=True):
        times = seconds[:, p, layer, stage]
        row["phase"], row["layer"], row["stage"] = PHASES[p], -1 if layer == n_layers else layer, STAGES[stage]
        row["seconds"], row["fastest"], row["slowest"] = np.median(times), times.min(), times.max()
        row["flops"], row["bytes"] = runs.work[p, layer, stage]
        row["experts"] = runs.experts[p, layer, stage]
        row["faults"] = found[p, layer, stage, MINOR] + found[p, layer, stage, MAJOR]
        for i, name in enumerate(COUNTERS):
            row[name] = np.nan if name in refused else events[p, layer, stage, i]
    prefill = table[table["phase"] == "prefill"]
    counters = {name: refused.get(name) or _sum_or_reason(prefill[name]) for name in COUNTERS}
    table.flags.writeable = False
    faults = {
        phase: {"minor": float(found[p, ..., MINOR].sum()), "major": float(found[p, ..., MAJOR].sum())}
        for p, phase in enumerate(PHASES)
    }
    repeat_seconds = np.array([[run[(*place, SECONDS)] for place in places] for run, _ in timed])
    shares = [run[..., SHARE] for run, _ in again]
    return Profile(
        table=table,
        limits=limits,
        counters=counters,
        faults=faults,
        repeat_seconds=repeat_seconds,
        wall_seconds=np.stack([wall for _, wall in timed]),
        tokens=len(runs.ids),
        decode_tokens=DECODE_TOKENS,
        threads=limits.threads,
        counted_share=float(np.nanmin(shares)) if shares else float("nan"),
    )


def _median_of_known(runs: list[Array]) -> Array:
    """Along the runs, of those in which the counter had a turn; NaN where it never had one."""
    ordered, known = np.sort(runs, axis=0), (~np.isnan(runs)).sum(axis=0)[None]  # NaN stands last
    lower = np.take_along_axis(ordered, np.maximum(known - 1, 0) // 2, axis=0)
    middle: Array = (lower + np.take_along_axis(ordered, known // 2, axis=0))[0] / 2
    return middle


def _sum_or_reason(events: Array) -> float | str:
    if np.isnan(events).any():
        return "not available here: in some stages the counter had no turn; more repeats may give it one"
    return float(events.sum())


def _part(report: Any, number: int, total: int) -> Any:
    """What tells `report` of run `number`; False when nobody wants to know."""
    return False if report is None else lambda done: report((number + done) / total)


def _options(given: Any, threads: int | None) -> tuple[Model, dict[str, Any]]:
    from colibri_lab.model import Model
    from colibri_lab.session import Session

    if isinstance(given, Session):
        asked = given._engine.threads_asked or None
        gates = given.gate_mode if given.gate_mode != given.model.config["gate_rule"] else None
        chosen = asked if threads is None else threads
        return given.model, {"threads": chosen, "gate_mode": gates, "emulate": given.emulation}
    if isinstance(given, Model):
        return given, {"threads": threads}
    raise ArgumentError(f"lab.profile takes a session or a model; this is {type(given).__name__}: pass lab.open(path)")


def _ids(model: Model, x: Any) -> list[int]:
    """The ids of a text as an empty session has them, or the ids themselves; feed looks at their range."""
    if not isinstance(x, str):
        ids = array_of(x, "a list of token ids")
        if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "iu":
            raise ArgumentError(f"x is a text or a list of one or more token ids; this is {x!r:.80}")
        return [int(number) for number in ids]
    if model.tokenizer is None:
        raise ArgumentError(f"the checkpoint at '{model.path}' has no tokenizer.json, so it takes ids, not a text")
    return model.tokenizer.encode(x, special=True)
