"""From bare expert ids or counts to a Trace, and every check that would have caught a wrong recording.

T tokens, E experts, k chosen. A recording that fails a check is refused with the layer, the token and the likely
reason; nothing is repaired.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.formats.sizes import Said
from colibri_lab.formats.source import Source
from colibri_lab.trace import Trace

__all__ = ["check_layer", "counts_trace", "layers_of_axis", "meta_of", "routes_trace", "token_ids", "widened"]

Array = NDArray[Any]


def widened(source: Source, array: Array, what: str) -> Array:
    """Expert ids of any integer type as they stand, an unsigned type's largest value where it can only be a −1 that
    wrapped included; anything else than whole numbers is refused. The values stay in their own type; see `check_layer`.
    """
    if array.dtype.kind == "f":
        source.refuse(f"{what} holds {array.dtype} numbers: gates or probabilities, not expert ids")
    if array.dtype.kind not in "iu":
        source.refuse(f"{what} holds {array.dtype}, not expert ids")
    return array


def check_layer(source: Source, layer: int, ids: Array, experts: int) -> NDArray[np.int32]:
    """(T, k) expert ids of one layer as int32, −1 where none was recorded, after all checks."""
    wide = ids.astype(np.int64)
    if ids.dtype.kind == "u" and experts <= np.iinfo(ids.dtype).max:
        wide[ids == np.iinfo(ids.dtype).max] = -1  # how −1 looks in an unsigned buffer
    outside = ((wide < -1) | (wide >= experts)).any(axis=1)
    if outside.any():
        token = int(np.flatnonzero(outside)[0])
        source.refuse(
            f"layer {layer}, token {token}: expert ids {wide[token].tolist()!s:.80} have one outside 0 to {experts - 1}"
        )
    if wide.shape[1] > 1:
        zero = (wide == 0).all(axis=1)
        if zero.any() and zero.all():
            source.refuse(
                f"layer {layer} holds zeros alone: it is a dense layer (name those with experts: layers= or config=) "
                "or "
                "its capture failed"
            )
        if zero.any():
            source.refuse(
                f"layer {layer}, token {int(np.flatnonzero(zero)[0])}: all ids are 0, which no router chooses; the "
                f"capture failed there ({int(zero.sum())} of {len(zero)} tokens)"
            )
        ordered = np.sort(wide, axis=1)
        twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(axis=1)
        if twice.any():
            token = int(np.flatnonzero(twice)[0])
            source.refuse(
                f"layer {layer}, token {token}: expert ids {wide[token].tolist()!s:.80} have one named twice; the last "
                "axis may not be the slots"
            )
    if len(wide) and (wide < 0).all():
        source.refuse(f"layer {layer} has no route of any token: a dense layer, or its capture failed")
    return wide.astype(np.int32)


def layers_of_axis(
    source: Source, said: Said, ids: Array, axis: int, format_name: str
) -> tuple[int, dict[int, NDArray[np.int32]]]:
    """Splits ids [tokens, layers, k] (or the layers at `axis` 0) by layer number, checked: (layers of the model, by
    layer). A layer without experts must be empty on an axis of all layers.
    """
    moved = np.moveaxis(ids, axis, 1)
    tokens, length, k = moved.shape
    if said.top_k is not None and k != said.top_k:
        hint = " (the layer axis seems to be last)" if length == said.top_k else ""
        source.refuse(f"its rows have {k} slots, and {said.top_k} experts are chosen per token{hint}")
    experts = said.experts(format_name)
    if k > experts:
        source.refuse(f"its rows have {k} slots and there are {experts} experts: the last axis is not the slots")
    try:
        total, places = said.axis(length, format_name, other=tokens)
    except ValueError as error:
        if type(error).__name__ == "FormatError":
            source.refuse(str(error))
        raise
    for position in set(range(length)) - set(places.values()):
        if not np.isin(moved[:, position], (0, -1)).all():
            source.refuse(f"layer {position} has routes and is none of those with experts: check layers= or config=")
    return total, {layer: check_layer(source, layer, moved[:, i], experts) for layer, i in places.items()}


def token_ids(
    source: Source, said: Said, rows: int, stated: Sequence[int] | None = None, before: int = 0
) -> tuple[list[int], int]:
    """(ids of all tokens, how many rows are missing at the end) of a recording whose `rows` rows begin at token
    `before`.

    The last token sampled was never run, so there may be one row less than tokens. Ids that nobody gave are −1.
    """
    if stated is not None and said.ids is not None and list(stated) != said.ids:
        source.refuse("ids= contradicts the token ids in the file")
    ids = said.ids if stated is None else [int(i) for i in stated]
    if ids is None:
        return [-1] * (before + rows), 0
    missing = len(ids) - before - rows
    if missing not in (0, 1):
        source.refuse(
            f"it has {rows} rows from token {before} on and there are {len(ids)} token ids; as many rows or one less "
            "are "
            f"possible, so rows {'are missing (a request that was preempted?)' if missing > 0 else 'are too many'}"
        )
    return ids, missing


def meta_of(
    source: Source,
    said: Said,
    producer: str,
    layers: int,
    moe_layers: Sequence[int],
    experts: int,
    top_k: int,
    **more: Any,
) -> dict[str, Any]:
    """The meta of an imported trace; `more` wins over what is set here."""
    return {
        "producer": producer, "producer_version": "unknown", "model_type": said.model_type,
        "num_hidden_layers": int(layers), "moe_layers": [int(n) for n in moe_layers], "num_experts": int(experts),
        "top_k": int(top_k), "gate_rule": said.gate_rule, "edits": [], "source": source.path.name,
        **({"config": said.config} if said.config else {}), **more,
    }  # fmt: skip


def routes_trace(
    source: Source,
    meta: dict[str, Any],
    routes: Mapping[int, Array],
    ids: Sequence[int],
    arrays: Mapping[str, Array] | None = None,
    before: int = 0,
    missing: int = 0,
) -> Trace:
    """A Trace of routes (rows, k) by layer; `before` and `missing` rows without a route are added at the ends."""
    if all((rows < 0).all() for rows in routes.values()):
        source.refuse("no route of any token was recorded")
    if meta["top_k"] == 1 and len(ids) > 1 and not any(rows.any() for rows in routes.values()):
        source.refuse("every token of every layer went to expert 0: the capture failed")
    padded = {
        f"layers.{layer}.moe.expert_ids": np.pad(rows, ((before, missing), (0, 0)), constant_values=-1)
        if before or missing
        else rows
        for layer, rows in routes.items()
    }
    if "passes" not in meta:  # the producer tells tokens, not how they were run
        meta = {**meta, "passes": [[0, len(ids)]] if ids else [], "passes_known": False}
    return Trace({**padded, **(arrays or {})}, ids=ids, texts=[], meta=meta)


def counts_trace(
    source: Source, meta: dict[str, Any], counts: Mapping[int, Array], arrays: Mapping[str, Array] | None = None
) -> Trace:
    """A Trace without tokens: `layers.{l}.moe.load` by layer."""
    if not any(row.any() for row in counts.values()):
        source.refuse("all counts are 0: nothing was recorded")
    empty = [layer for layer, row in counts.items() if not row.any()]
    if empty:
        source.refuse(
            f"layer {empty[0]} counted no token and others did: a dense layer (name those with experts: layers= or "
            "config=) or its capture failed"
        )
    loads = {f"layers.{layer}.moe.load": row.astype(np.int64) for layer, row in counts.items()}
    return Trace({**loads, **(arrays or {})}, ids=[], texts=[], meta={"passes": [], **meta})
