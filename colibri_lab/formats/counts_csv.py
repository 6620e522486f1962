"""Two small CSV: SGLang's older recorder (`layer_id,expert_id,count`) and llama.cpp's moe-trace (`layer,expert`).

The first counts, one file per rank. The second has one row per routed activation; within a run of rows of one layer,
k rows in a row are one token's choice. It names no token, and the last layer may compute fewer of them than the others,
so it gives counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from colibri_lab.formats.routes import counts_trace, meta_of
from colibri_lab.formats.sizes import LIMIT, Said
from colibri_lab.formats.source import Source
from colibri_lab.trace import Trace

__all__ = ["MoeTrace", "SglangCsv"]

_NUMBERS = re.compile(r"\d{1,9}(,\d{1,18}){1,2}")


class SglangCsv:
    """SGLang's older recorder."""

    NAME = "sglang_csv"
    ABOUT = "SGLang's older recorder (CSV layer_id,expert_id,count; several ranks as a list)"
    USES = frozenset({"config", "layers", "experts", "top_k"})

    @staticmethod
    def recognise(source: Source) -> bool:
        """The header."""
        return source.first_line.replace(" ", "") == "layer_id,expert_id,count"

    @staticmethod
    def load(source: Source, said: Said) -> Trace:
        """The counts of one file."""
        return SglangCsv.load_ranks([source], said)

    @staticmethod
    def load_ranks(sources: Sequence[Source], said: Said) -> Trace:
        """The counts of the files of several ranks, added."""
        experts, k = said.experts(SglangCsv.NAME), said.chosen(SglangCsv.NAME)
        counts: dict[int, NDArray[np.int64]] = {}
        for source in sources:
            seen: set[tuple[int, int]] = set()
            for number, (layer, expert, count) in _rows(source, said, 3):
                if (layer, expert) in seen:
                    source.refuse(f"line {number}: layer {layer}, expert {expert} was counted before")
                seen.add((layer, expert))
                _counted(source, counts, number, layer, expert, experts, count)
        return _trace(sources[0], said, counts, "sglang recorder, csv", experts, k, ranks=len(sources))


class MoeTrace:
    """llama.cpp's moe-trace."""

    NAME = "moe_trace"
    ABOUT = "llama.cpp's moe-trace (CSV layer,expert)"
    USES = frozenset({"config", "layers", "experts", "top_k"})

    @staticmethod
    def recognise(source: Source) -> bool:
        """The header."""
        return source.first_line.replace(" ", "") == "layer,expert"

    @staticmethod
    def load(source: Source, said: Said) -> Trace:
        """Counts, and the check that every k rows name k experts."""
        experts, k = said.experts(MoeTrace.NAME), said.chosen(MoeTrace.NAME)
        counts: dict[int, NDArray[np.int64]] = {}
        here, number = -1, 1
        chosen: list[int] = []
        for number, (layer, expert) in _rows(source, said, 2):
            if layer != here and chosen:
                _incomplete(source, number, here, len(chosen), k)
            here = layer
            if expert in chosen:
                source.refuse(
                    f"line {number}: layer {layer} names expert {expert} twice for one token; top_k={k} is wrong, or "
                    "rows "
                    "are missing"
                )
            _counted(source, counts, number, layer, expert, experts, 1)
            chosen = [*chosen, expert] if len(chosen) + 1 < k else []
        if chosen:
            _incomplete(source, number + 1, here, len(chosen), k)
        return _trace(source, said, counts, "llama.cpp moe-trace", experts, k)


def _incomplete(source: Source, number: int, layer: int, have: int, k: int) -> None:
    source.refuse(
        f"line {number}: layer {layer} ends with {have} experts for its last token and top_k={k} are chosen; rows are "
        "missing, or top_k= is wrong"
    )


def _rows(source: Source, said: Said, columns: int) -> Iterator[tuple[int, list[int]]]:
    """(line number, its numbers) below the header; the header may come again where files were joined."""
    names = source.first_line.replace(" ", "")
    for number, line in source.lines(said.progress, source.path.name):
        text = line.replace(" ", "")
        if text == names or (not text and number > 1):
            continue
        if not _NUMBERS.fullmatch(text) or text.count(",") != columns - 1:
            source.refuse(f"line {number} is no row of {columns} numbers: {line!r:.80}")
        yield number, [int(part) for part in text.split(",")]


def _counted(
    source: Source,
    counts: dict[int, NDArray[np.int64]],
    number: int,
    layer: int,
    expert: int,
    experts: int,
    count: int,
) -> None:
    if expert >= experts:
        source.refuse(f"line {number}: expert {expert} of layer {layer} is outside 0 to {experts - 1}")
    if layer >= LIMIT or count >= 1 << 62:
        source.refuse(f"line {number}: layer {layer} with {count} tokens is no model")
    if layer not in counts:
        counts[layer] = np.zeros(experts, np.int64)
    counts[layer][expert] += count


def _trace(
    source: Source, said: Said, counts: dict[int, NDArray[np.int64]], producer: str, experts: int, k: int, **more: int
) -> Trace:
    """Counts by the model's own layer numbers; those said to have experts must be those that were counted."""
    if not counts:
        source.refuse("it has a header and no row")
    found = sorted(counts)
    if said.moe_layers is not None:
        dense = {layer for layer in found if layer not in said.moe_layers}
        if any(counts[layer].any() for layer in dense):
            source.refuse(f"layer {min(dense)} was counted and is none of those with experts: check layers= or config=")
        missing = [layer for layer in said.moe_layers if layer not in counts]
        if missing:
            source.refuse(f"layer {missing[0]} has experts and no row: rows are missing")
        found = list(said.moe_layers)
    layers = said.num_hidden_layers or found[-1] + 1
    meta = meta_of(source, said, producer, layers, found, experts, k, **more)
    return counts_trace(source, meta, {layer: counts[layer] for layer in found})
