"""vLLM's routed experts, as people save them: a .npy, a .npz, or the JSON of a response.

Three layouts exist. The early capturer gives int32 [tokens, all layers, k] with zeros in dense layers; later ones
[prompt tokens, layers with experts, k] and [generated tokens, …] apart, int16 or as narrow as the ids allow; over HTTP
these are nested lists, null when lost. −1 stands for a token that came from the prefix cache. None of them says which
layers the axis counts or how many experts there are.
"""

from __future__ import annotations

import itertools
import re
import zipfile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.errors import ArgumentError
from colibri_lab.formats import npy
from colibri_lab.formats.routes import layers_of_axis, meta_of, routes_trace, token_ids, widened
from colibri_lab.formats.sizes import Said
from colibri_lab.formats.source import Source
from colibri_lab.trace import Trace

NAME = "vllm"
ABOUT = "routed experts of vLLM (.npy, .npz or JSON)"
USES = {"config", "layers", "experts", "top_k", "ids"}

_KEY = re.compile(rb'"(?:prompt_)?routed_experts"\s*:\s*[\[n]')
_IDS = ("token_ids", "ids", "input_ids")


def recognise(source: Source) -> bool:
    """A NumPy array, an archive of arrays, a nested list of numbers, or JSON with `routed_experts` as a list."""
    if source.head.startswith(npy.MAGIC):
        return True
    if source.head.startswith(b"PK"):
        try:
            with zipfile.ZipFile(source.path) as archive:
                return any(name.endswith(".npy") for name in archive.namelist())
        except npy.BAD_ZIP:
            return b".npy" in source.head[:300]
    start = (source.text or "").lstrip()
    if re.match(r"\[\s*\[\s*\[\s*-?\d", start):
        return True
    return start.startswith("{") and '"exp_ids"' not in start[:200] and _KEY.search(source.mapped()) is not None


def load(source: Source, said: Said) -> Trace:
    """Routes of one request."""
    text = not source.head.startswith((npy.MAGIC, b"PK"))
    parts = _from_json(source, source.json()) if text else _from_arrays(source, npy.arrays(source))
    blocks = [widened(source, block, "its array") for block in parts["routes"]]
    for block in blocks:
        if block.ndim != 3:
            source.refuse(f"an array of shape {block.shape} is no [tokens, layers, k]")
    if len({block.shape[1:] for block in blocks}) > 1:
        source.refuse(f"prompt and generation disagree: {blocks[0].shape[1:]} and {blocks[1].shape[1:]} (layers, k)")
    wide = blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
    layers, routes = layers_of_axis(source, said, wide, 1, NAME)
    ids, missing = token_ids(source, said, len(wide), parts["ids"])
    bounds = [0, *np.cumsum([len(block) for block in blocks]).tolist()]
    bounds[-1] = len(ids)
    passes = [[a, b] for a, b in itertools.pairwise(bounds) if b > a]
    meta = meta_of(
        source, said, "vllm", layers, list(routes), said.experts(NAME), wide.shape[2], passes=passes,
        passes_known=False,  # prompt and generation, each of which may have been run in several
        rows_missing=missing,
    )  # fmt: skip
    return routes_trace(source, meta, routes, ids, missing=missing)


def _from_arrays(source: Source, found: dict[str, NDArray[Any]]) -> dict[str, Any]:
    routes = [found[name] for name in ("prompt_routed_experts", "routed_experts") if name in found]
    if not routes:
        cubes = [name for name, array in found.items() if array.ndim == 3]
        if len(found) == 1:
            cubes = list(found)
        if len(cubes) != 1:
            source.refuse(
                f"it holds the arrays {', '.join(found) or 'none'}; name them prompt_routed_experts and routed_experts"
            )
        routes = [found[cubes[0]]]
    prompt = found.get("prompt_token_ids")
    rest = next((found[name] for name in _IDS if name in found), None)
    listed = [part for part in (prompt, rest) if part is not None]
    if any(part.ndim != 1 or part.dtype.kind not in "iu" for part in listed):
        source.refuse("its token ids are no list of whole numbers")
    return {"routes": routes, "ids": [int(i) for part in listed for i in part.tolist()] if listed else None}


def _from_json(source: Source, value: Any) -> dict[str, Any]:
    if isinstance(value, list):
        return {"routes": [_nested(source, value, "the list")], "ids": None}
    choices = value.get("choices", value.get("outputs"))
    choice: Any = {}
    if choices is not None:
        if not isinstance(choices, list) or not all(isinstance(one, dict) for one in choices):
            source.refuse("its choices are no list of objects")
        if len(choices) != 1:
            raise ArgumentError(f"{source.path} holds {len(choices)} choices; save the one to import by itself")
        choice = choices[0]
    routes = []
    for place, name in ((value, "prompt_routed_experts"), (choice, "prompt_routed_experts"), (choice, "routed_experts"),
                        (value, "routed_experts")):  # fmt: skip
        if name in place:
            if place[name] is None:
                source.refuse(f"{name} is null: the server lost the routes (preemption, or the capture was off)")
            routes.append(_nested(source, place[name], name))
    if not routes:
        source.refuse("it has no routed_experts")
    prompt = value.get("prompt_token_ids", choice.get("prompt_token_ids"))
    rest = next((place[name] for place in (choice, value) for name in _IDS if place.get(name) is not None), None)
    listed = [part for part in (prompt, rest) if part is not None]
    if not all(isinstance(part, list) and all(type(i) is int and 0 <= i < 1 << 62 for i in part) for part in listed):
        source.refuse("its token ids are no list of whole numbers")
    return {"routes": routes, "ids": [i for part in listed for i in part] if listed else None}


def _nested(source: Source, value: Any, what: str) -> NDArray[Any]:
    try:
        array = np.array(value)
    except (ValueError, OverflowError):
        source.refuse(f"{what} is no regular [tokens, layers, k]: its rows differ in length")
    if array.dtype.kind not in "iuf" or array.ndim != 3:
        source.refuse(f"{what} is no [tokens, layers, k] of whole numbers; its shape is {array.shape}")
    return array
