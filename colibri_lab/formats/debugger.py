"""Dumps of the model debugger of transformers (`model_addition_debugger_context`): a tree of calls as JSON.

A tensor is a leaf {shape, dtype, value …}, where `value` is what torch printed (4 decimals; tensors of more than 1,000
elements are cut by torch and left out here) or, with use_repr=False, the name of a safetensors file beside the tree.
Modules that have children keep no output, so a layer's output is read as the next one's input. Fused experts are one
call, so there are no expert rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, deserialize

from colibri_lab.formats.routes import check_layer, meta_of, token_ids
from colibri_lab.formats.sizes import Said
from colibri_lab.formats.source import Source
from colibri_lab.trace import Trace

NAME = "transformers_debug"
ABOUT = "model debugger of transformers (…_debug_tree_FULL_TENSORS.json)"
USES = {"config", "layers", "experts", "top_k", "ids"}

_FIRST = re.compile(r'\{\s*"module_path"\s*:')
_LAYER = re.compile(r"(?:.*\.)?layers\.(\d{1,4})(?:\.(.+))?")
_SIZE = re.compile(r"torch\.Size\(\[([\d, ]{0,120})\]\)")
_NUMBER = re.compile(r"-?(?:\d+\.?\d*(?:e[+-]?\d+)?|inf|nan)|True|False")
_TAIL = re.compile(r"\]\s*,\s*(?:dtype|device|grad_fn|requires_grad)=")
_BLOCKS = ("mlp", "block_sparse_moe", "feed_forward", "moe")
_ROUTERS = ("gate", "router")
_DTYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1",
    "BOOL": "?", "BF16": "bfloat16",
}  # fmt: skip

Array = NDArray[Any]


def recognise(source: Source) -> bool:
    """An object whose first key is module_path."""
    return _FIRST.match((source.text or "").lstrip()) is not None


def load(source: Source, said: Said) -> Trace:
    """Every tensor of the dump that is a tap of ours."""
    tree = source.json()
    dump = _Dump(source)
    for node in _nodes(source, tree):
        dump.take(node)
    return dump.trace(said, str(tree.get("module_path", "")))


def _nodes(source: Source, tree: Any) -> Iterator[dict[str, Any]]:
    """All calls, parents first."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if not isinstance(node, dict) or not isinstance(node.get("module_path"), str):
            source.refuse("a node of its tree is no call: no module_path")
        yield node
        children = node.get("children") or []
        if not isinstance(children, list):
            source.refuse(f"the children of {node['module_path']} are no list")
        waiting += children[::-1]


class _Dump:
    """What was found so far: arrays by tap, token ids, and what was cut."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.arrays: dict[str, Array] = {}
        self.routers: dict[int, list[Array]] = {}
        self.applied: dict[int, list[Array]] = {}
        self.inputs: dict[int, Array] = {}
        self.outputs: dict[int, Array] = {}
        self.layers: set[int] = set()
        self.ids: list[int] | None = None
        self.cut: list[str] = []
        self.leaves = self.printed = 0

    def take(self, node: dict[str, Any]) -> None:
        """Reads the tensors of one call that are taps."""
        path = node["module_path"]
        into, out = _leaves(node.get("inputs")), _leaves(node.get("outputs"))
        found = _LAYER.fullmatch(path)
        if found is None:
            last = path.rpartition(".")[2]
            if last == "embed_tokens":
                self.keep("embed", out)
                self.tokens(into)
            elif last == "norm":
                self.keep("norm", out)
                self.first(into, "the last layer's output", lambda array: self.outputs.setdefault(-1, array))
            elif last == "lm_head":
                self.keep("logits", out)
            return
        layer, part = int(found[1]), found[2] or ""
        self.layers.add(layer)
        block, _, inner = part.partition(".")
        if not part and layer:
            self.first(into, f"layers.{layer - 1}.output", lambda array: self.outputs.setdefault(layer - 1, array))
        elif part == "input_layernorm":
            self.keep(f"layers.{layer}.attn.norm", out)
        elif part in ("self_attn.o_proj", "self_attn.dense", "attention.o_proj"):
            self.keep(f"layers.{layer}.attn.out", out)
        elif block in _BLOCKS and not inner:
            self.first(into, f"the input of {path}", lambda array: self.inputs.setdefault(layer, array))
        elif block in _BLOCKS and inner in _ROUTERS:
            self.routers[layer] = [array for leaf in out if (array := self.value(leaf, path)) is not None]
        elif block in _BLOCKS and inner == "experts":
            self.applied[layer] = [array for leaf in into if (array := self.value(leaf, path)) is not None]
            self.keep(f"layers.{layer}.moe.routed", out)
        elif block in _BLOCKS and inner == "down_proj":
            self.keep(f"layers.{layer}.mlp.output", out)

    def keep(self, tap: str, leaves: list[dict[str, Any]]) -> None:
        self.first(leaves, tap, lambda array: self.arrays.setdefault(tap, array))

    def first(self, leaves: list[dict[str, Any]], what: str, use: Any) -> None:
        """The first tensor of a call, if it has one and it is whole."""
        if leaves and (array := self.value(leaves[0], what)) is not None:
            use(array)

    def tokens(self, leaves: list[dict[str, Any]]) -> None:
        if leaves and (array := self.value(leaves[0], "the token ids")) is not None:
            if array.dtype.kind not in "iu" or (array.size and array.min() < 0):
                self.source.refuse("its token ids are no whole numbers, or negative")
            self.ids = [int(i) for i in array.ravel()]

    def value(self, leaf: dict[str, Any], what: str) -> Array | None:
        """The tensor of a leaf with its batch axis of 1 taken off; None when torch cut it."""
        size = _SIZE.fullmatch(str(leaf.get("shape")))
        if size is None:
            self.source.refuse(f"{what} has the shape {leaf.get('shape')!r:.60}, which is none")
        shape = tuple(int(n) for n in size[1].split(",") if n.strip())
        self.leaves += 1
        if "value" not in leaf:
            self.source.refuse("its tensors have no values: a summary; open the …_FULL_TENSORS.json beside it")
        value = leaf["value"]
        if isinstance(value, str):
            array = self.file(value, what)
        elif isinstance(value, list) and all(isinstance(line, str) for line in value):
            printed = self.parse("\n".join(value), shape, str(leaf.get("dtype")), what)
            if printed is None:
                self.cut.append(what)
                return None
            array = printed
        else:
            self.source.refuse(f"{what} has a value that is neither printed lines nor the name of a file")
        if array.shape != shape:
            self.source.refuse(f"{what} has the shape {array.shape} and {shape} is claimed")
        if array.ndim < 2:
            self.source.refuse(f"{what} has the shape {shape}, and tokens with columns are expected")
        if (array.ndim == 3 or what == "the token ids") and shape[0] != 1:
            self.source.refuse(f"{what} has a batch of {shape[0]}; record one sequence at a time, without padding")
        return array[0] if array.ndim == 3 or what == "the token ids" else array

    def parse(self, text: str, shape: tuple[int, ...], dtype: str, what: str) -> Array | None:
        self.printed += 1
        if "..." in text:
            return None
        start = text.find("[")
        body = _TAIL.split(text[start:] if start >= 0 else "")[0]
        numbers = _NUMBER.findall(body)
        if len(numbers) != math.prod(shape):
            self.source.refuse(f"{what} shows {len(numbers)} numbers, and its shape {shape} needs {math.prod(shape)}")
        try:
            if re.fullmatch(r"torch\.u?int\d+", dtype):
                return np.array([int(n) for n in numbers], np.int64).reshape(shape)
            with np.errstate(over="ignore"):
                return np.array([float(n) for n in numbers]).astype(np.float32).reshape(shape)
        except (ValueError, OverflowError):
            self.source.refuse(f"{what} shows what are no numbers of {dtype}")

    def file(self, name: str, what: str) -> Array:
        plain = name.removeprefix("./")
        if not plain or "/" in plain or "\\" in plain or "\0" in plain or plain in (".", ".."):
            self.source.refuse(f"{what} names the file {name!r:.80}, which is not beside the tree")
        beside = Source(self.source.path.parent / plain)
        try:
            found = dict(deserialize(beside.whole()))  # type: ignore[no-untyped-call]
        except SafetensorError as error:
            beside.refuse(f"it is no sound safetensors file: {error}")
        entry = found.get("data")
        if entry is None or entry["dtype"] not in _DTYPES:
            beside.refuse(f"it has no tensor 'data' of a known type, but {', '.join(found) or 'nothing'}")
        kind = _DTYPES[entry["dtype"]]
        if kind == "bfloat16":
            import ml_dtypes

            return np.frombuffer(entry["data"], ml_dtypes.bfloat16).reshape(entry["shape"])
        return np.frombuffer(entry["data"], kind).reshape(entry["shape"])

    # ---- at the end ----

    def trace(self, said: Said, name: str) -> Trace:
        """The taps as a Trace."""
        source = self.source
        if not self.leaves:
            source.refuse("it has no tensor of a module that is known here")
        every = sorted(self.layers)
        gaps = sorted(set(range(every[-1] + 1 if every else 0)) - self.layers)
        total = said.num_hidden_layers or len(every)
        if gaps or len(every) != total:
            missing = gaps[0] if gaps else len(every)
            source.refuse(f"layer {missing} is missing (the debugger prunes; record with do_prune_layers=False)")
        moe = [layer for layer in every if layer in self.routers or layer in self.applied]
        if said.moe_layers is not None and tuple(moe) != said.moe_layers:
            source.refuse(f"it has routers in the layers {moe!s:.80}, and layers= or config= says others")
        for layer in moe:
            self.routing(layer, said)
        for layer, array in self.inputs.items():
            self.arrays[f"layers.{layer}.{'moe' if layer in moe else 'mlp'}.input"] = array
        for layer, array in self.outputs.items():
            self.arrays[f"layers.{layer if layer >= 0 else total - 1}.output"] = array
        if not self.arrays:
            source.refuse(
                f"all {len(self.cut)} tensors that are taps were cut by torch's printing; record with use_repr=False"
            )
        experts, k = self.sizes(said, moe)
        rows = {path: len(array) for path, array in self.arrays.items()}
        longest = max(rows.values())
        short = next((path for path, count in rows.items() if count != longest), None)
        if short is not None:
            source.refuse(f"'{short}' has {rows[short]} rows and another tap {longest}: rows are missing")
        ids, missing_rows = token_ids(source, said, longest, self.ids)
        if missing_rows:
            source.refuse(f"it has {longest} rows and {len(ids)} token ids")
        meta = meta_of(
            source, said, "transformers model debugger", total, moe, experts, k, passes=[[0, longest]],
            model_class=name, cut=self.cut, printed=bool(self.printed),
        )  # fmt: skip
        return Trace(self.arrays, ids=ids, texts=[], meta=meta)

    def routing(self, layer: int, said: Said) -> None:
        """Logits (or scores), ids and gates of one layer, by what its router gave and its experts were given."""
        source, path = self.source, f"layers.{layer}.moe"
        given = self.routers.get(layer, [])
        wide = [array for array in given if array.dtype.kind not in "iu"]
        chosen = [array for array in (*self.applied.get(layer, []), *given) if array.dtype.kind in "iu"]
        if chosen:
            k = chosen[0].shape[1]
            self.arrays[f"{path}.expert_ids"] = chosen[0]
            floats = [array for array in (*self.applied.get(layer, []), *given) if array.dtype.kind not in "iu"]
            gates = [array for array in floats if array.shape == chosen[0].shape]
            if gates:
                self.arrays[f"{path}.gates"] = gates[-1 if layer not in self.applied else 0]
            wide = [array for array in wide if array.shape[1] != k or said.num_experts == k]
        if not wide:
            return
        rows = wide[0].astype(np.float64)
        even = rows.size and (rows >= 0).all() and (abs(rows.sum(axis=1) - 1) < 1e-3 + 1e-4 * rows.shape[1]).all()
        if even and len(given) == 1:
            source.refuse(
                f"layer {layer}: what the gate gave adds up to 1 in every row: probabilities, where router logits are "
                "claimed"
            )
        # A router that gives ids as well may have turned its logits into probabilities under the same name.
        self.arrays[f"{path}.{'scores' if even else 'router_logits'}"] = wide[0]

    def sizes(self, said: Said, moe: list[int]) -> tuple[int, int]:
        """(E, k) by the arrays, or by what was said; the ids are checked on the way."""
        experts, k = said.num_experts, said.top_k
        for layer in moe:
            for tap in ("router_logits", "scores"):
                array = self.arrays.get(f"layers.{layer}.moe.{tap}")
                if array is not None and experts not in (None, array.shape[1]):
                    self.source.refuse(f"layer {layer} has {array.shape[1]} experts, and {experts} were said or seen")
                experts = experts if array is None else array.shape[1]
            ids = self.arrays.get(f"layers.{layer}.moe.expert_ids")
            if ids is not None and k not in (None, ids.shape[1]):
                self.source.refuse(f"layer {layer} has {ids.shape[1]} slots, and {k} were said or seen")
            k = k if ids is None else ids.shape[1]
        if not moe:
            return 0, 0
        experts = said.experts(NAME) if experts is None else experts
        k = said.chosen(NAME) if k is None else k
        if k > experts:
            self.source.refuse(f"{k} experts chosen of {experts} is impossible")
        for layer in moe:
            ids = self.arrays.get(f"layers.{layer}.moe.expert_ids")
            if ids is not None:
                self.arrays[f"layers.{layer}.moe.expert_ids"] = check_layer(self.source, layer, ids, experts)
        return experts, k


def _leaves(value: Any) -> list[dict[str, Any]]:
    """All tensors in the inputs or outputs of a call, in their order."""
    out, waiting = [], [value]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            if {"shape", "dtype"} <= set(node):
                out.append(node)
            else:
                waiting += list(node.values())[::-1]
        elif isinstance(node, list):
            waiting += node[::-1]
    return out
