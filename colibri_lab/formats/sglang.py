"""SGLang's routed experts of one request: base64 of flat little-endian int32, logically [rows, layers, k].

The shape is not in the payload. Rows go from `routed_experts_start_len` (`start=`) to the last token but one: the last
token sampled was never run. The payload stands alone in a file, as a JSON string, or inside the JSON of a response
(`meta_info.routed_experts`, or `sgl_ext` of a choice).
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from colibri_lab.errors import ArgumentError
from colibri_lab.formats.routes import layers_of_axis, meta_of, routes_trace, token_ids
from colibri_lab.formats.sizes import Said
from colibri_lab.formats.source import Source
from colibri_lab.trace import Trace

NAME = "sglang"
ABOUT = "routed experts of an SGLang request (base64, alone or in the response)"
USES = {"config", "layers", "experts", "top_k", "ids", "start"}

_KEY = re.compile(rb'"routed_experts"\s*:\s*"')
_PAYLOAD = re.compile(r'"?[A-Za-z0-9+/]{16,}={0,2}"?\s*')
_LOOKED_AT = 4096  # characters of a bare payload that must look like expert ids


def recognise(source: Source) -> bool:
    """JSON with `routed_experts` as a string, or base64 that decodes to small whole numbers."""
    start = (source.text or "").lstrip()
    if start.startswith(("{", "[")):
        return _KEY.search(source.mapped()) is not None
    if not _PAYLOAD.fullmatch(start):
        return False
    some = start.strip('"')[:_LOOKED_AT]
    values = np.frombuffer(base64.b64decode(some[: len(some) // 16 * 16]), "<i4")
    return bool(values.size and (values >= -1).all() and (values < 1 << 16).all())


def load(source: Source, said: Said) -> Trace:
    """Routes of one request."""
    start = source.head.lstrip()[:1]
    payload, info = (
        _from_json(source, source.json()) if start in (b"{", b"[", b'"') else (str(source.whole(), "latin-1"), {})
    )
    try:
        flat = np.frombuffer(base64.b64decode("".join(payload.split()), validate=True), "u1")
    except (binascii.Error, ValueError) as error:
        source.refuse(f"its payload is no base64, or was cut short: {error}")
    if len(flat) % 4:
        source.refuse(f"its payload has {len(flat)} bytes, no whole number of int32: it was cut short")
    k, moe = said.chosen(NAME), said.moe_layers
    said.experts(NAME)
    if moe is None:
        said.axis(0, NAME)
        raise AssertionError("axis raises")
    row_sizes = {layers * k: layers for layers in (len(moe), said.num_hidden_layers or moe[-1] + 1)}
    ids = said.ids if said.ids is not None else info.get("ids")
    numbers = flat.view("<i4")
    expected: tuple[int, ...] | None = None
    if ids is not None:
        expected = (len(ids) - 1 - said.start, len(ids) - said.start)
    if ids is None and "tokens" in info:
        expected = (info["tokens"] - 1 - said.start,)
    fits = [
        layers
        for size, layers in row_sizes.items()
        if numbers.size % size == 0 and (expected is None or numbers.size // size in expected)
    ]
    if not fits:
        rows = "" if expected is None else f" of {expected[0]} rows (tokens less start= less the last one)"
        source.refuse(
            f"{numbers.size} numbers are no [rows, layers, k]{rows} for {' or '.join(map(str, row_sizes.values()))} "
            f"layers and {k} experts per token: rows are missing, or a size is wrong"
        )
    if len(fits) > 1:
        raise ArgumentError(
            f"{numbers.size} numbers fit {fits[0]} layers with experts and all {fits[1]} layers; give ids=, by which "
            "the rows are counted"
        )
    cube = numbers.reshape(-1, fits[0], k)
    layers, routes = layers_of_axis(source, said, cube, 1, NAME)
    all_ids, missing = token_ids(source, said, len(cube), info.get("ids"), said.start)
    meta = meta_of(
        source, said, "sglang", layers, list(routes), said.experts(NAME), k, rows_missing=missing, start=said.start
    )
    return routes_trace(source, meta, routes, all_ids, before=said.start, missing=missing)


def _from_json(source: Source, value: Any) -> tuple[str, dict[str, Any]]:
    """The payload and what the response says beside it: `ids`, or the number of `tokens`."""
    if isinstance(value, str):
        return value, {}
    found = [node for node in _nodes(value) if isinstance(node.get("routed_experts"), str)]
    if len(found) != 1:
        raise ArgumentError(f"{source.path} holds {len(found)} payloads of routed experts; save one by itself")
    node, info = found[0], {}
    prompt, made = node.get("prompt_tokens"), node.get("completion_tokens")
    if type(prompt) is int and type(made) is int:
        info["tokens"] = prompt + made
    return node["routed_experts"], info


def _nodes(value: Any) -> Iterator[dict[str, Any]]:
    """Every object in a JSON value."""
    waiting = [value]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            yield node
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node
