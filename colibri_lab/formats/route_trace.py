"""ROUTE_TRACE of JustVugg/colibri: a text line per (moe call, row): `call row layer id:gate id:gate …`.

A call is one MoE block on all rows of a pass; calls are numbered without a gap, and a pass goes through its layers in
order. Gates have 4 decimals, which cannot decide a tie.
"""

from __future__ import annotations

import re
from array import array

import numpy as np
from numpy.typing import NDArray

from colibri_lab.formats.routes import check_layer, meta_of, routes_trace, token_ids
from colibri_lab.formats.sizes import LIMIT, Said
from colibri_lab.formats.source import Source
from colibri_lab.trace import Trace

NAME = "route_trace"
ABOUT = "ROUTE_TRACE of JustVugg/colibri (call row layer id:gate …)"
USES = {"config", "layers", "experts", "top_k", "ids"}

_NUMBER = r"-?(?:\d{1,30}(?:\.\d{1,30})?(?:e[+-]?\d{1,3})?|nan|inf)"
_LINE = re.compile(rf"(\d{{1,18}}) (\d{{1,18}}) (\d{{1,9}})((?: -?\d{{1,9}}:{_NUMBER})+)")
_FIRST = re.compile(r"\d+ \d+ \d+( -?\d+:\S+)+ *")


def recognise(source: Source) -> bool:
    """The form of the first line."""
    return _FIRST.fullmatch(source.first_line) is not None


class _Layer:
    """Ids and gates of one layer, packed."""

    def __init__(self) -> None:
        self.ids, self.gates, self.slots, self.rows = array("i"), array("f"), array("H"), 0


def load(source: Source, said: Said) -> Trace:
    """Routes and gates of all passes."""
    experts = said.experts(NAME)
    layers: dict[int, _Layer] = {}
    passes: list[list[int]] = []
    call, here = -1, LIMIT
    rows, before = 0, 0  # of the present call, and of the call before it in its pass
    for number, line in source.lines(said.progress, source.path.name):
        found = _LINE.fullmatch(line.rstrip())
        if found is None:
            source.refuse(f"line {number} is no `call row layer id:gate …`: {line!r:.80}")
        now, row, layer = int(found[1]), int(found[2]), int(found[3])
        if now != call:
            if call >= 0 and now != call + 1:
                source.refuse(f"line {number}: call {now} follows call {call}; calls are missing")
            if passes and before and rows != before:
                source.refuse(f"line {number}: call {call} has {rows} rows, the calls before it in its pass {before}")
            if layer <= here:
                _close(source, layers, passes, number)
                start = passes[-1][1] if passes else 0
                passes.append([start, start])
                before = 0
            else:
                before = rows
            call, here, rows = now, layer, 0
        if layer != here or row != rows:
            source.refuse(f"line {number}: row {row} of layer {layer} where row {rows} of layer {here} is due")
        if layer >= LIMIT:
            source.refuse(f"line {number}: layer {layer} is no model's")
        rows += 1
        if layer not in layers:
            layers[layer] = _Layer()
        kept = layers[layer]
        if len(passes) > 1 and kept.rows < passes[-1][0]:
            source.refuse(f"line {number}: layer {layer} was not in the passes before: rows are missing")
        kept.rows += 1
        passes[-1][1] = max(passes[-1][1], passes[-1][0] + rows)
        pairs = [pair.split(":") for pair in found[4].split()]
        if len(pairs) > experts:
            source.refuse(f"line {number}: {len(pairs)} experts chosen of {experts}")
        kept.ids.extend([int(one) for one, _ in pairs])
        kept.gates.extend([float(gate) for _, gate in pairs])
        kept.slots.append(len(pairs))
    if before and rows != before:
        source.refuse(f"its last call has {rows} rows, the calls before it in its pass {before}: it was cut short")
    _close(source, layers, passes, None)
    return _trace(source, said, layers, passes, experts)


def _close(source: Source, layers: dict[int, _Layer], passes: list[list[int]], number: int | None) -> None:
    """A pass ends: every layer must have all its rows."""
    if not passes:
        return
    for layer, kept in layers.items():
        if kept.rows != passes[-1][1]:
            where = "the end of the file" if number is None else f"line {number}"
            source.refuse(
                f"{where}: the pass of tokens {passes[-1][0]} to {passes[-1][1] - 1} ends without "
                f"{passes[-1][1] - kept.rows} rows of layer {layer}: rows are missing (cut short?)"
            )


def _trace(source: Source, said: Said, layers: dict[int, _Layer], passes: list[list[int]], experts: int) -> Trace:
    if not layers:
        source.refuse("it has no line")
    moe = sorted(layers)
    if said.moe_layers is not None and tuple(moe) != said.moe_layers:
        source.refuse(f"it has routes in the layers {moe!s:.80}, and layers= or config= says others")
    widest = max(max(kept.slots) for kept in layers.values())
    narrowest = min(min(kept.slots) for kept in layers.values())
    if said.top_k is None and narrowest != widest:
        said.chosen(NAME)
    k = widest if said.top_k is None else said.top_k
    if widest > k:
        source.refuse(f"a line names {widest} experts, and top_k={k} was given")
    routes, arrays = {}, {}
    for layer in moe:
        kept = layers[layer]
        ids, gates = np.full((kept.rows, k), -1, np.int32), np.zeros((kept.rows, k), np.float32)
        used: NDArray[np.bool_] = np.arange(k) < np.frombuffer(kept.slots, np.uint16)[:, None]
        ids[used], gates[used] = np.frombuffer(kept.ids, np.int32), np.frombuffer(kept.gates, np.float32)
        if (ids[used] < 0).any():
            source.refuse(f"layer {layer} names expert {int(ids[used].min())}")
        routes[layer] = check_layer(source, layer, ids, experts)
        arrays[f"layers.{layer}.moe.gates"] = gates
    all_ids, missing = token_ids(source, said, passes[-1][1])
    if missing:
        arrays = {path: np.pad(gates, ((0, 1), (0, 0))) for path, gates in arrays.items()}
        passes = [*passes, [len(all_ids) - 1, len(all_ids)]]
    total = said.num_hidden_layers or moe[-1] + 1
    meta = meta_of(
        source, said, "JustVugg/colibri", total, moe, experts, k, passes=passes, gates_decimals=4, rows_missing=missing
    )
    return routes_trace(source, meta, routes, all_ids, arrays, missing=missing)
