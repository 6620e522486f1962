"""Where NaN and Inf of a run come from: `find` and `scan`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from os import PathLike
from typing import Any

from numpy.typing import NDArray

from colibri_lab.difference.pair import trace_from
from colibri_lab.errors import ArgumentError, CapacityError, NotCapturedError, OutOfMemoryError
from colibri_lab.nan.births import births
from colibri_lab.nan.causes import explain
from colibri_lab.nan.census import census, first_rows, taps_of
from colibri_lab.nan.propagation import propagate
from colibri_lab.nan.replay import is_complete, obstacle, replay, watched
from colibri_lab.nan.result import Found, Origin
from colibri_lab.nan.source import Birth, Source, opened
from colibri_lab.nan.watched import swallowed
from colibri_lab.progress import Progress, shown
from colibri_lab.trace import HasTrace, Trace

__all__ = ["find", "scan"]

_POINTS = (
    "embed", "attn.norm", "attn.q.product", "attn.k.product", "attn.v.product", "attn.q", "attn.k", "attn.v",
    "attn.scores", "attn.weights", "attn.context", "attn.out", "middle", "moe.input", "moe.router_logits", "moe.scores",
    "moe.gates", "moe.experts.input", "moe.experts.gate", "moe.experts.up", "moe.experts.hidden", "moe.experts.output",
    "moe.shared.inner.gate", "moe.shared.inner.up", "moe.shared.inner.hidden", "moe.shared.output",
    "moe.shared.gate.product", "moe.shared.gate", "moe.routed", "moe.output", "mlp.input", "mlp.inner.gate",
    "mlp.inner.up", "mlp.inner.hidden", "mlp.output", "output", "norm", "logits",
)  # fmt: skip
_RANK = {point: rank for rank, point in enumerate(_POINTS)}
_IN_LAYER = re.compile(r"layers\.\d+\.")
_EXPERT = re.compile(r"\.experts\.(?:\d+|\*)\.")


def find(
    x: Trace | HasTrace | str | PathLike[str], *, model: Any = None, progress: Progress = None
) -> Found | None:  # fmt: skip
    """Where NaN and Inf were born, why, and what they ruined; None when all that was computed is finite.

    `x` is a session, a trace, or a file that `lab.load_trace` opens, of any producer. An origin is the first operation
    all of whose inputs are finite and whose output is not; independent ones are listed apart, in the order of the
    data's way. Of an imported trace the same, as far as its taps allow; `notes` say what is unknown.

    A run of our own that captured less than "all" is replayed in a session of its own, which `notes` mention, when its
    model is open: the session's, or `model` (a lab.Model, or its path) for a trace from a file. A run with edits, and
    one of another program, is never replayed. `model` also gives weights to what explains the causes.

    Reads the run in pieces, so memory does not grow with its length beyond what a replay captures. Ctrl-C ends it
    within a second. Raises ArgumentError for anything else and for another model than that of a run of our own,
    NotCapturedError for a trace that holds no numbers, and what `load_trace` raises.
    """
    trace = trace_from(x)
    model = opened(model)
    made_by = trace.meta.get("model_identity")
    if model is not None and trace.meta["producer"] == "colibri-lab" and made_by not in (None, model.identity):
        raise ArgumentError("this run was made by another model than the one of model=: pass that one, or none")
    if trace.model is None:
        trace.model = model
    watch = getattr(x, "watch", None)
    source = Source(trace, model, watch if getattr(watch, "mode", "off") != "off" else None)
    source, first, notes = _seen(source, progress)
    inside = list(swallowed(source))
    if not (first or inside):
        return None
    with shown(progress, len(source.trace.layers) + 1, "layers", "NaN origins") as report:
        born = (*births(source, first, report), *inside)
        origins = _origins(born, source)
    if not origins:
        return None
    return Found(
        trace=source.trace,
        origins=origins,
        propagation=propagate(source, origins),
        map=_marked(census(source), origins, born),
        dtype=source.dtype,
        notes=(*notes, *_unknown(source)),
    )


def scan(x: Trace | HasTrace | str | PathLike[str]) -> NDArray[Any]:
    """One row per recorded tap (dtype `MAP`), in the order of the data's way; the experts of a layer are one row.

    `state` is "origin" or "passed" where something is not finite, "near" with under 2 bits to the largest number of
    the run's format, "subnormal" with 5 % or more of subnormal numbers, else "finite". Nothing is replayed: a tap that
    was not recorded has no row. Raises what `find` raises.
    """
    source = Source(trace_from(x))
    table = census(source)
    if not (table["state"] == "passed").any():
        return table
    for birth in births(source, first_rows(source)):
        _mark(table, birth.path)
    return table


# ---- what is looked at ----


def _seen(source: Source, progress: Progress) -> tuple[Source, dict[str, int], tuple[str, ...]]:
    """(the run as recorded or replayed, the first rows that are not finite by tap, notes)."""
    first = _first(source, progress)
    if not (first or taps_of(source)):
        raise NotCapturedError(
            "this trace holds no values of activations, only which experts were chosen: whether one was not finite is "
            'unknown; record again with capture="all"'
        )
    if source.trace.n_tokens and source.trace.meta["producer"] == "colibri-lab" and not is_complete(source):
        captured = f"captured {', '.join(map(str, source.trace.meta.get('capture', ['not all'])))}"
        why = obstacle(source)
        if why:
            note = f"The run {captured} and cannot be replayed: {why}. Between two recorded taps all is one operation."
            return source, first, (note,)
        if not first and watched(source, progress).first is None:
            return source, first, ()
        try:
            again = replay(source, progress)
        except (OutOfMemoryError, CapacityError) as error:
            return source, first, (f"The run {captured}; a replay with all taps does not fit: {error}.",)
        found = _first(again, progress)
        part = f", up to token {again.trace.n_tokens - 1}" if again.trace.n_tokens < source.trace.n_tokens else ""
        if found or not first:
            return again, found, (f"The run {captured}: it was replayed in a session of its own with all taps{part}.",)
        note = "A replay of the run was finite: what is not finite here did not come from the model's arithmetic."
        return source, first, (note,)
    return source, first, ()


def _first(source: Source, progress: Progress) -> dict[str, int]:
    with shown(progress, 1000, "‰", "looking for NaN") as report:
        return first_rows(source, report)


def _unknown(source: Source) -> tuple[str, ...]:
    """What the taps of a recording do not tell."""
    stored = {path.split(".", 2)[2] for path in source.trace if path.startswith("layers.")}
    wanted = {
        "attn.out": "attention", "moe.dispatch.output": "experts", "moe.input": "router", "output": "residual stream",
    }  # fmt: skip
    missing = [f"{stage} (layers.*.{tap})" for tap, stage in wanted.items() if tap not in stored]
    if source.trace.meta["producer"] == "colibri-lab" or not missing:
        return ()
    return (
        f"Not recorded: {', '.join(missing)}. Where it broke between two recorded taps is unknown; a recording with "
        'capture="all" would tell.',
    )


# ---- origins ----


def _origins(found: Iterable[Birth], source: Source) -> tuple[Origin, ...]:
    """The origins of all births, those of one operation joined."""
    joined: dict[tuple[Any, ...], Origin] = {}
    for birth in found:
        for origin in explain(birth, source):
            weight = (origin.weight.name, origin.weight.index) if origin.weight is not None else None
            key = (origin.path, origin.point, origin.expert, origin.kind, weight)
            joined[key] = _joined(joined[key], origin) if key in joined else origin
    return tuple(sorted(joined.values(), key=_order))


def _joined(a: Origin, b: Origin) -> Origin:
    """The one whose token comes first, with the tokens of both."""
    first = a if a.token <= b.token else b
    tokens = tuple(sorted({*a.tokens, *b.tokens}))
    return replace(first, tokens=tokens, n_values=a.n_values + b.n_values)


def _order(origin: Origin) -> tuple[Any, ...]:
    """The data's way, then expert, token, index."""
    point = _EXPERT.sub(".experts.", _IN_LAYER.sub("", origin.point or origin.path, count=1))
    layer = -1 if origin.path == "embed" else origin.layer if origin.layer is not None else float("inf")
    index = origin.index if isinstance(origin.index, tuple) else (origin.index,)
    expert = -1 if origin.expert is None else origin.expert
    return layer, _RANK.get(point, len(_RANK)), expert, origin.token, index


def _marked(table: NDArray[Any], origins: tuple[Origin, ...], born: Iterable[Birth]) -> NDArray[Any]:
    """An origin whose own tap was not recorded is marked at the tap in which its values were found."""
    for path in {*(origin.path for origin in origins), *(birth.path for birth in born if birth.mask.any())}:
        _mark(table, path)
    return table


def _mark(table: NDArray[Any], path: str) -> None:
    table["state"][table["path"] == _EXPERT.sub(".experts.*.", path)] = "origin"
