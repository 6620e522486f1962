"""Files of SGLang's expert distribution recorder (`.pt`), one per rank, read without torch.

`stat` counts logical experts over all ranks. `per_pass` and `per_token` keep records of *physical* experts, several of
which may hold one logical expert; the file's map (of the last moment: experts may have moved during the recording)
leads back. `per_token` has the ids of every token as well, in 8 columns with −1 for what is not used. Their layer axis
counts all layers of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.formats import torch_zip
from colibri_lab.formats.routes import check_layer, counts_trace, meta_of, routes_trace
from colibri_lab.formats.sizes import LIMIT, Said
from colibri_lab.formats.source import Source
from colibri_lab.trace import Trace

NAME = "sglang_recorder"
ABOUT = "SGLang's expert distribution recorder (.pt: stat, per_token, per_pass; several ranks as a list)"
USES = {"config", "layers", "experts", "top_k"}

Array = NDArray[Any]


def recognise(source: Source) -> bool:
    """A zip archive of torch.save."""
    return torch_zip.is_torch_zip(source)


def load(source: Source, said: Said) -> Trace:
    """One file: counts, or routes, by what it holds."""
    return load_ranks([source], said)


def load_ranks(sources: Sequence[Source], said: Said) -> Trace:
    """The files of several ranks of one recording, as one Trace.

    Ranks that saw the same tokens (tensor parallel) count once; ranks with tokens of their own follow one another
    inside each pass.
    """
    values = [(source, torch_zip.load(source)) for source in sources]
    for source, value in values:
        if not isinstance(value, dict) or not ({"logical_count"} <= set(value) or {"records"} <= set(value)):
            keys = ", ".join(map(str, value)) if isinstance(value, dict) else type(value).__name__
            source.refuse(f"it holds {keys:.120}, no recording: a logical_count or records are needed")
    first, content = values[0]
    if "logical_count" in content:
        if len(values) > 1:
            first.refuse("a stat recording has one file, written by rank 0, for all ranks")
        return _stat(first, content, said)
    return _records(values, said)


def _stat(source: Source, value: dict[str, Any], said: Said) -> Trace:
    counts = _array(source, value["logical_count"], 3, "logical_count [steps, layers, experts]")
    if (counts < 0).any():
        source.refuse("logical_count has negative counts")
    return _counted(source, counts.sum(axis=0, dtype=np.int64), said, "stat", steps=len(counts))


def _counted(source: Source, counts: Array, said: Said, mode: str, **more: Any) -> Trace:
    """A Trace of counts [layers, experts] over all layers of the model."""
    experts = counts.shape[1]
    if said.num_experts not in (None, experts):
        source.refuse(f"it counts {experts} experts, and there are {said.num_experts}: check experts= or config=")
    layers, moe = _layers(source, said, np.asarray(counts.any(axis=1)))
    k = said.chosen(NAME)
    meta = meta_of(source, said, f"sglang recorder, {mode}", layers, moe, experts, k, **more)
    return counts_trace(source, meta, {layer: counts[layer] for layer in moe})


def _layers(source: Source, said: Said, used: Array) -> tuple[int, list[int]]:
    """(layers, those with experts) of an axis of all layers; `used` tells which have anything. An empty one is dense by
    what was said, or is asked for.
    """
    if said.moe_layers is None and not used.any():
        source.refuse("nothing was recorded in any layer")
    if said.moe_layers is None and used.all():
        return len(used), list(range(len(used)))
    layers, places = said.axis(len(used), NAME)
    if layers != len(used):
        source.refuse(f"its axis has {len(used)} layers and the model has {layers}: this recorder counts all layers")
    for layer in np.flatnonzero(used).tolist():
        if layer not in places:
            source.refuse(f"layer {layer} was recorded and is none of those with experts: check layers= or config=")
    return layers, list(places)


def _records(values: list[tuple[Source, dict[str, Any]]], said: Said) -> Trace:
    source, content = values[0]
    mapping = _map(source, content.get("last_physical_to_logical_map"))
    experts = int(mapping.max()) + 1
    if said.num_experts not in (None, experts):
        source.refuse(
            f"its map leads to {experts} experts, and there are {said.num_experts}: check experts= or config="
        )
    ranks = []
    for other, value in values:
        if not np.array_equal(_map(other, value.get("last_physical_to_logical_map")), mapping):
            other.refuse(
                "its map of physical experts is not that of the other ranks: another recording, or experts moved"
            )
        ranks.append(_passes(other, value["records"]))
    if any([number for number, _ in rank] != [number for number, _ in ranks[0]] for rank in ranks[1:]):
        source.refuse("its passes are not those of the other ranks: a file is of another recording, or was cut short")
    detailed = all("topk_ids_of_layer" in record for rank in ranks for _, record in rank)
    key = "topk_ids_of_layer" if detailed else "global_physical_count"
    kept = [ranks[0]]
    for rank in ranks[1:]:
        same = all(
            np.array_equal(a[key], b[key]) and a.get("input_ids") == b.get("input_ids")
            for (_, a), (_, b) in zip(rank, ranks[0], strict=True)
        )
        kept += [] if same else [rank]
    if detailed:
        return _per_token(source, kept, mapping, said, len(ranks))
    counts = np.zeros((len(mapping), experts), np.int64)
    for rank in kept:
        for _, record in rank:
            physical = _array(source, record["global_physical_count"], 2, "global_physical_count [layers, experts]")
            if physical.shape != mapping.shape or (physical < 0).any():
                source.refuse(f"global_physical_count of shape {physical.shape} does not fit the map {mapping.shape}")
            for layer, row in enumerate(physical):
                np.add.at(counts[layer], mapping[layer], row)
    return _counted(source, counts, said, "per_pass", steps=len(ranks[0]), ranks=len(ranks), ranks_kept=len(kept))


def _per_token(source: Source, ranks: list[Any], mapping: Array, said: Said, files: int) -> Trace:
    blocks: list[Array] = []
    ids: list[int] = []
    positions: list[int] = []
    spans: list[list[int]] = []
    for records in zip(*ranks, strict=True):
        for _, record in records:
            tokens = record.get("input_ids")
            block = _array(source, record["topk_ids_of_layer"], 3, "topk_ids_of_layer [layers, tokens, slots]")
            if not isinstance(tokens, list) or not all(type(i) is int and i >= 0 for i in tokens):
                source.refuse("a record has no list of input_ids")
            if block.shape[:2] != (len(mapping), len(tokens)):
                source.refuse(
                    f"a record of {len(tokens)} tokens has routes of shape {block.shape}; the map has {len(mapping)} "
                    "layers"
                )
            places = record.get("positions")
            _agree(source, block, record.get("global_physical_count"), mapping)
            if tokens:
                blocks.append(block)
                spans.append([len(ids), len(ids) + len(tokens)])
                ids += tokens
                positions += places if isinstance(places, list) and len(places) == len(tokens) else [-1] * len(tokens)
    if not blocks:
        source.refuse("no record has a token: the recorder was started and nothing was run")
    physical = np.concatenate(blocks, axis=1)
    used = np.flatnonzero((physical >= 0).any(axis=(0, 1)))
    k = int(used[-1]) + 1 if used.size else 0
    if not k or (said.top_k is not None and said.top_k != k):
        source.refuse(
            f"its tokens have {k} slots in use, and {said.top_k or 'one or more'} experts are chosen per token"
        )
    layers, moe = _layers(source, said, np.asarray((physical >= 0).any(axis=(1, 2))))
    experts = int(mapping.max()) + 1
    routes = {}
    for layer in moe:
        rows = physical[layer, :, :k].astype(np.int64)
        if (rows < -1).any() or (rows >= mapping.shape[1]).any():
            source.refuse(f"layer {layer} names physical experts outside 0 to {mapping.shape[1] - 1}")
        # A padded place of the map would lead nowhere; −1 stays −1.
        logical = np.where(rows < 0, -1, mapping[layer][np.maximum(rows, 0)])
        routes[layer] = check_layer(source, layer, logical, experts)
    meta = meta_of(
        source, said, "sglang recorder, per_token", layers, moe, experts, k, passes=spans, ranks=files,
        ranks_kept=len(ranks), physical_experts=mapping.shape[1],
    )  # fmt: skip
    return routes_trace(source, meta, routes, ids, {"positions": np.array(positions, np.int64)})


def _agree(source: Source, block: Array, counted: Any, mapping: Array) -> None:
    """The counts that a record keeps beside its routes must be those of the routes."""
    if counted is None:
        return
    counts = _array(source, counted, 2, "global_physical_count [layers, experts]")
    for layer, rows in enumerate(block):
        flat = rows[rows >= 0]
        if counts.shape != mapping.shape or (flat.size and flat.max() >= counts.shape[1]):
            source.refuse(f"layer {layer} names physical experts outside 0 to {mapping.shape[1] - 1}")
        if not np.array_equal(np.bincount(flat.astype(np.int64), minlength=counts.shape[1]), counts[layer]):
            source.refuse(f"the routes of layer {layer} contradict the counts beside them")


def _map(source: Source, value: Any) -> Array:
    """[layers, physical experts] -> logical expert; every logical expert must be somewhere in every layer."""
    mapping = _array(source, value, 2, "last_physical_to_logical_map [layers, physical experts]").astype(np.int64)
    if not mapping.size or mapping.min() < 0 or mapping.max() >= min(LIMIT, mapping.shape[1]):
        source.refuse("its map of physical to logical experts has numbers that are no experts")
    every = np.arange(mapping.max() + 1)
    for layer, row in enumerate(mapping):
        if not np.array_equal(np.unique(row), every):
            source.refuse(f"its map of layer {layer} misses logical experts below {len(every)}")
    return mapping


def _passes(source: Source, records: Any) -> list[tuple[int, dict[str, Any]]]:
    """(forward_pass_id, record) in order of the passes."""
    out = []
    for record in records if isinstance(records, list) else [None]:
        if not isinstance(record, dict) or type(record.get("forward_pass_id")) is not int:
            source.refuse("a record has no forward_pass_id, or is none")
        number: int = record["forward_pass_id"]
        if "global_physical_count" not in record and "topk_ids_of_layer" not in record:
            source.refuse(f"the record of pass {number} has neither counts nor routes")
        out.append((number, record))
    if not out:
        source.refuse("it has no record: the recorder was started and nothing was run")
    return sorted(out, key=lambda item: item[0])


def _array(source: Source, value: Any, ndim: int, what: str) -> Array:
    if not isinstance(value, np.ndarray) or value.ndim != ndim or value.dtype.kind not in "iu":
        found = f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else type(value).__name__
        source.refuse(f"{what} is {found}, no tensor of whole numbers with {ndim} axes")
    return value
