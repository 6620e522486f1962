"""JSONL of OLMoE's analysis scripts: rows {input_ids, predicted_token_ids, exp_ids[token][slot][layer]}.

The slot stands before the layer. Each row is a text of its own: one pass of the trace. Gates are not there.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.formats.routes import layers_of_axis, meta_of, routes_trace, widened
from colibri_lab.formats.sizes import Said
from colibri_lab.formats.source import Source
from colibri_lab.trace import Trace

NAME = "olmoe"
ABOUT = "JSONL of OLMoE's analysis (input_ids, exp_ids)"
USES = {"config", "layers", "experts", "top_k"}

_FIRST = re.compile(r'\{\s*"(input_ids|predicted_token_ids|exp_ids)"\s*:\s*\[')


def recognise(source: Source) -> bool:
    """A first line that opens an object with one of the three keys, and `exp_ids` somewhere in it."""
    if _FIRST.match((source.text or "").lstrip()) is None:
        return False
    return b'"exp_ids"' in source.whole().partition(b"\n")[0]


def load(source: Source, said: Said) -> Trace:
    """All rows, one after the other."""
    blocks: list[NDArray[Any]] = []
    predicted: list[NDArray[Any]] = []
    ids: list[int] = []
    spans: list[list[int]] = []
    for number, line in source.lines(said.progress, source.path.name):
        if not line.strip():
            continue
        row = source.parse_json(line.encode(), f"line {number}")
        if not isinstance(row, dict) or not {"input_ids", "exp_ids"} <= set(row):
            source.refuse(f"line {number} has not both input_ids and exp_ids")
        tokens = _numbers(source, row["input_ids"], 1, f"line {number}, input_ids")
        block = widened(source, _numbers(source, row["exp_ids"], 3, f"line {number}, exp_ids"), f"line {number}")
        if len(block) != len(tokens):
            source.refuse(f"line {number}: {len(tokens)} input_ids and {len(block)} rows of exp_ids: rows are missing")
        if blocks and block.shape[1:] != blocks[0].shape[1:]:
            source.refuse(
                f"line {number}: slots and layers {block.shape[1:]}, in the rows before {blocks[0].shape[1:]}"
            )
        if tokens.size and tokens.min() < 0:
            source.refuse(f"line {number}: a token id is negative")
        spans += [[len(ids), len(ids) + len(tokens)]] if len(tokens) else []
        ids += tokens.tolist()
        blocks.append(block.astype(np.int32))
        if "predicted_token_ids" in row:
            predicted.append(_numbers(source, row["predicted_token_ids"], 1, f"line {number}, predicted_token_ids"))
    if not ids:
        source.refuse("it has no token")
    whole = np.concatenate(blocks)
    if said.moe_layers is not None and said.top_k is not None and whole.shape[1] != said.top_k:
        turned = " (slots and layers are exchanged)" if whole.shape[2] == said.top_k else ""
        source.refuse(f"its second axis has {whole.shape[1]} slots, and {said.top_k} experts are chosen{turned}")
    layers, routes = layers_of_axis(source, said, whole.transpose(0, 2, 1), 1, NAME)
    arrays = {"predicted_ids": np.concatenate(predicted)} if predicted else {}
    if predicted and len(arrays["predicted_ids"]) != len(ids):
        source.refuse(f"{len(ids)} input_ids and {len(arrays['predicted_ids'])} predicted_token_ids: some are missing")
    meta = meta_of(
        source, said, "OLMoE analysis", layers, list(routes), said.experts(NAME), whole.shape[1], passes=spans,
        sequences=spans,
    )  # fmt: skip
    return routes_trace(source, meta, routes, ids, arrays)


def _numbers(source: Source, value: Any, ndim: int, what: str) -> NDArray[Any]:
    try:
        out = np.array(value)
    except (ValueError, OverflowError):
        source.refuse(f"{what} is no regular list: its rows differ in length")
    if out.dtype.kind != "i" or out.ndim != ndim:
        kind = "probabilities or gates, not ids" if out.dtype.kind == "f" and out.size else f"{out.dtype} {out.shape}"
        source.refuse(f"{what} is no list of whole numbers with {ndim} axes; it holds {kind}")
    return out
