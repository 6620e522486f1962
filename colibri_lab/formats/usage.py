"""Usage files of JustVugg/colibri (`.coli_usage`): how often each expert was chosen, over all runs.

Text: lines `layer expert count`, only those above 0, below two headers: `-1 layers experts` (the layer number `layers`
itself may be there: the one that drafts) and `-2 version engine`. Older files have no headers. Binary: "IKU1", layers,
experts, and a block of counts. None of them tells the order, or how many experts a token is sent to.
"""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from colibri_lab.errors import UnsupportedError
from colibri_lab.formats.routes import counts_trace, meta_of
from colibri_lab.formats.sizes import LIMIT, Said
from colibri_lab.formats.source import Reader, Source
from colibri_lab.trace import Trace

NAME = "usage"
ABOUT = "usage of JustVugg/colibri (.coli_usage, text or IKU1)"
USES = {"config", "layers", "experts", "top_k"}

_MAGIC = b"IKU1"
_LINE = re.compile(r"(-?\d{1,9}) (\d{1,9}) (\d{1,10})")
_VERSION = 1
_ENGINES = ("glm_moe_dsa", "inkling", "olmoe", "kimi_k3", "deepseek_v4", "qwen38", "glm53")


def recognise(source: Source) -> bool:
    """The magic, or three whole numbers in the first line."""
    return source.head.startswith(_MAGIC) or _LINE.fullmatch(source.first_line.strip()) is not None


def load(source: Source, said: Said) -> Trace:
    """Counts by layer."""
    if source.head.startswith(_MAGIC):
        return _binary(source, said)
    layers = experts = None
    engine, counts = "unknown", dict[int, dict[int, int]]()
    for number, line in source.lines(said.progress, source.path.name):
        found = _LINE.fullmatch(line.strip())
        if found is None:
            source.refuse(f"line {number} is no `layer expert count`: {line!r:.80}")
        layer, expert, count = int(found[1]), int(found[2]), int(found[3])
        if layer == -1:
            layers, experts = expert, count
            if not (1 <= layers <= LIMIT and 1 <= experts <= LIMIT):
                source.refuse(f"line {number}: {layers} layers of {experts} experts are no model")
        elif layer == -2:
            if expert > _VERSION:
                raise UnsupportedError(f"{source.path}: usage of version {expert}; {_VERSION} is read here")
            engine = next((name for name in _ENGINES if _hash(name) == count), f"engine {count:#010x}")
        elif layer < 0 or count >= 1 << 32:
            source.refuse(f"line {number}: layer {layer} with {count} tokens cannot be")
        elif expert in counts.setdefault(layer, {}):
            source.refuse(f"line {number}: layer {layer}, expert {expert} was counted before")
        else:
            counts[layer][expert] = count
    if not counts:
        source.refuse("it counts nothing")
    if said.num_experts is not None and experts not in (None, said.num_experts):
        source.refuse(f"its header says {experts} experts, and there are {said.num_experts}: check experts= or config=")
    size = experts if experts is not None else said.experts(NAME)
    for layer, row in counts.items():
        if max(row) >= size:
            source.refuse(f"layer {layer}: expert {max(row)} is outside 0 to {size - 1}")
        if layers is not None and layer > layers:
            source.refuse(f"layer {layer} is beyond the {layers} layers of its header")
    dense = {layer: np.array([row.get(e, 0) for e in range(size)], np.int64) for layer, row in counts.items()}
    return _trace(source, said, dense, layers, size, engine)


def _binary(source: Source, said: Said) -> Trace:
    reader = Reader(source, source.whole(), "the usage")
    reader.take(4, "the magic")
    layers, experts = reader.number("I", "the number of layers"), reader.number("I", "the number of experts")
    if not (1 <= layers <= LIMIT and 1 <= experts <= LIMIT) or reader.left != 4 * layers * experts:
        source.refuse(
            f"{layers} layers of {experts} experts need {4 * layers * experts} bytes and {reader.left} are there: it "
            "was "
            "cut short, or is damaged"
        )
    if said.num_experts not in (None, experts):
        source.refuse(f"it has {experts} experts, and there are {said.num_experts}: check experts= or config=")
    block = np.frombuffer(reader.data, "<u4", offset=reader.at).reshape(layers, experts).astype(np.int64)
    counts = {layer: row for layer, row in enumerate(block) if row.any()}
    if not counts:
        source.refuse("all counts are 0: nothing was recorded")
    return _trace(source, said, counts, layers, experts, "inkling")


def _trace(
    source: Source, said: Said, counts: dict[int, NDArray[np.int64]], layers: int | None, experts: int, engine: str
) -> Trace:
    """Layers that were counted are those with experts, unless the caller says which are."""
    k, moe = said.chosen(NAME), sorted(counts)
    drafting = [layers] if layers in counts else []
    if said.moe_layers is not None:
        extra = [layer for layer in moe if layer not in said.moe_layers and layer not in drafting]
        missing = [layer for layer in said.moe_layers if layer not in counts]
        if extra or missing:
            layer, what = (extra[0], "was counted and has no experts") if extra else (missing[0], "was not counted")
            source.refuse(f"layer {layer} {what}, by layers= or config=")
    total = max(layers or 0, said.num_hidden_layers or 0, moe[-1] + 1)
    meta = meta_of(
        source, said, f"JustVugg/colibri ({engine})", total, moe, experts, k,
        **({"drafting_layer": layers} if drafting else {}),
    )  # fmt: skip
    return counts_trace(source, meta, {layer: counts[layer] for layer in moe})


def _hash(name: str) -> int:
    """FNV-1a, 32 bits: how a file names its engine."""
    out = 2166136261
    for byte in name.encode():
        out = (out ^ byte) * 16777619 & 0xFFFFFFFF
    return out
