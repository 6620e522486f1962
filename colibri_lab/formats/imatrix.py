"""llama.cpp's importance matrices: how often each expert was used, and the mean square of what it read.

The GGUF form keeps sums of squares `<weight>.in_sum2` and counts `<weight>.counts` per expert. The older `.dat` keeps
one number of calls per weight: how often each expert was used is lost, and an expert that was never used stands there
with ones. Both give `layers.{l}.moe.input_mean_square` (E, H), NaN for an expert without a token.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.formats import gguf
from colibri_lab.formats.routes import counts_trace, meta_of
from colibri_lab.formats.sizes import LIMIT, Said
from colibri_lab.formats.source import Reader, Source
from colibri_lab.trace import Trace

__all__ = ["Imatrix", "ImatrixDat"]

_BLOCK = re.compile(r"blk\.(\d{1,5})\.")
_EXPERTS = re.compile(r"blk\.(\d{1,5})\.ffn_(gate|up|gate_up|down)_exps\.weight")
_READS_INPUT = ("gate", "up", "gate_up")  # the others read what the expert made of it
_EXACT = 1 << 24  # whole numbers that float32 tells apart
_LONGEST = 1024  # bytes of a weight's name

Array = NDArray[Any]


class Imatrix:
    """The GGUF form."""

    NAME = "imatrix"
    ABOUT = "importance matrix of llama.cpp (GGUF)"
    USES = frozenset({"config", "layers", "experts", "top_k"})

    @staticmethod
    def recognise(source: Source) -> bool:
        """The magic of a GGUF; whether it is an importance matrix is said when it is read."""
        return source.head.startswith(gguf.MAGIC)

    @staticmethod
    def load(source: Source, said: Said) -> Trace:
        """Counts per expert."""
        values, tensors = gguf.read(source, source.mapped())
        if values.get("general.type") != "imatrix":
            source.refuse(
                f"it is a GGUF of type {values.get('general.type', 'model')!r:.40}, not an importance matrix "
                "('imatrix')"
            )
        layers = 0
        counts: dict[int, NDArray[np.int64]] = {}
        squares: dict[int, Array] = {}
        for name in tensors:
            block = _BLOCK.match(name)
            layers = max(layers, int(block[1]) + 1) if block else layers
            found = _EXPERTS.fullmatch(name.removesuffix(".counts"))
            if found is None or not name.endswith(".counts"):
                continue
            layer, weight = int(found[1]), name.removesuffix(".counts")
            here = _counts(source, name, tensors[name])
            if not np.array_equal(counts.setdefault(layer, here), here):
                source.refuse(
                    f"layer {layer}: the counts of '{weight}' are not those of the layer's other experts' weights"
                )
            sums = tensors.get(f"{weight}.in_sum2")
            if sums is None or sums.ndim != 2 or len(sums) != len(here):
                source.refuse(f"'{weight}.in_sum2' is missing or has not {len(here)} rows")
            if found[2] in _READS_INPUT and layer not in squares:
                with np.errstate(all="ignore"):  # sums are what they are; no token gives NaN
                    squares[layer] = (sums / np.where(here == 0, np.nan, here)[:, None]).astype(np.float32)
        if not counts:
            source.refuse(
                "it has no weight of experts (blk.N.ffn_*_exps.weight): a model without experts, or dense layers"
            )
        k, experts = said.chosen(Imatrix.NAME), len(next(iter(counts.values())))
        _check_sizes(source, said, counts, experts)
        tokens = _tokens(source, tensors, counts, k)
        moe = sorted(counts)
        meta = meta_of(
            source, said, "llama.cpp imatrix", max(layers, said.num_hidden_layers or 0), moe, experts, k,
            chunks=values.get("imatrix.chunk_count"), chunk_size=values.get("imatrix.chunk_size"),
            datasets=values.get("imatrix.datasets"), tokens_counted=tokens,
            counts_exact=all(int(row.max()) < _EXACT for row in counts.values()),
        )  # fmt: skip
        extra = {f"layers.{layer}.moe.input_mean_square": rows for layer, rows in squares.items()}
        return counts_trace(source, meta, {layer: counts[layer] for layer in moe}, extra)


def _counts(source: Source, name: str, raw: Array) -> NDArray[np.int64]:
    flat = raw.ravel().astype(np.float64)
    if not (np.isfinite(flat).all() and (flat >= 0).all() and (flat == np.floor(flat)).all() and (flat < 2**62).all()):
        source.refuse(f"'{name}' holds {flat[:4].tolist()} …, which are no counts")
    if not 1 < len(flat) <= LIMIT:
        source.refuse(f"'{name}' has one count for all experts: it was made of an older file that had lost them")
    return flat.astype(np.int64)


def _check_sizes(source: Source, said: Said, counts: dict[int, Any], experts: int) -> None:
    other = next((layer for layer, row in counts.items() if len(row) != experts), None)
    if other is not None:
        source.refuse(f"layer {other} has {len(counts[other])} experts and another has {experts}")
    if said.num_experts not in (None, experts):
        source.refuse(f"it has {experts} experts, and there are {said.num_experts}: check experts= or config=")
    if said.moe_layers is not None and set(said.moe_layers) != set(counts):
        source.refuse(f"it has experts in the layers {sorted(counts)!s:.80}, and layers= or config= says others")


def _tokens(source: Source, tensors: dict[str, Any], counts: dict[int, Any], k: int) -> int | None:
    """Tokens counted, by the counts of a weight that every token passes; None when the file does not tell.

    The counts of the experts must be k times as many.
    """
    for layer, row in counts.items():
        total = int(row.sum())
        if total % k:
            source.refuse(f"the counts of layer {layer} add up to {total}, no multiple of top_k={k}")
    every = {
        int(found[1]): float(raw.ravel()[0])
        for name, raw in tensors.items()
        if raw.size == 1 and name.endswith(".counts") and (found := _BLOCK.match(name)) and ".attn_" in name
    }
    for layer, tokens in every.items():
        total = int(counts[layer].sum()) if layer in counts else 0
        if total and tokens > 0 and total % tokens == 0 and total // tokens != k:
            source.refuse(f"layer {layer} counted {total / tokens:.0f} experts per token, and top_k={k} was given")
    return int(max(every.values())) if every and np.isfinite(max(every.values())) else None


class ImatrixDat:
    """The older form. No magic: recognised by its first entry."""

    NAME = "imatrix_dat"
    ABOUT = "importance matrix of llama.cpp, older form (.dat)"
    USES = frozenset({"config", "layers", "experts", "top_k"})

    @staticmethod
    def recognise(source: Source) -> bool:
        """A small number of entries, then a name such as blk.0.attn_q.weight behind its length."""
        head = source.head
        if len(head) < 16:
            return False
        entries, length = (int.from_bytes(head[at : at + 4], "little") for at in (0, 4))
        name = head[8 : 8 + length]
        return 1 <= entries < 1 << 20 and 4 <= length < 256 and re.fullmatch(rb"[\w.]+\.weight", name) is not None

    @staticmethod
    def load(source: Source, said: Said) -> Trace:
        """Mean squares of what the experts read; no counts, for the file has lost them."""
        k, experts = said.chosen(ImatrixDat.NAME), said.experts(ImatrixDat.NAME)
        reader = Reader(source, source.mapped(), "the matrix")
        entries, layers = reader.number("i", "the number of entries"), 0
        if not 1 <= entries <= reader.left // 13:
            source.refuse(f"it claims {entries} entries in {reader.left} bytes: damaged, or cut short")
        squares: dict[int, Array] = {}
        for _ in range(entries):
            name = reader.string("i", _LONGEST, "a weight's name")
            calls, count = reader.number("i", f"the calls of '{name}'"), reader.number("i", f"the values of '{name}'")
            if calls < 1 or count < 1:
                source.refuse(f"'{name}' has {count} values of {calls} calls, which cannot be")
            values = np.frombuffer(reader.take(count * 4, f"'{name}'"), "<f4")
            block, found = _BLOCK.match(name), _EXPERTS.fullmatch(name)
            layers = max(layers, int(block[1]) + 1) if block else layers
            if found is None or found[2] not in _READS_INPUT or int(found[1]) in squares:
                continue
            if count % experts:
                source.refuse(
                    f"'{name}' has {count} values, no multiple of {experts} experts: check experts= or config="
                )
            with np.errstate(invalid="ignore"):  # a NaN is refused below
                rows = values.reshape(experts, -1) / np.float32(calls)
            if not (np.isfinite(rows).all() and (rows >= 0).all()):
                source.refuse(f"'{name}' has a mean square that is negative or not finite")
            unused = (rows == 1).all(axis=1)
            squares[int(found[1])] = np.where(unused[:, None], np.float32(np.nan), rows)
        if reader.left:
            chunks, length = reader.number(
                "i", "the last chunk"), reader.number("i", "the length of the dataset's name"
            )
            if chunks < 0 or length != reader.left:
                source.refuse(f"behind its last entry {reader.left} bytes are left and {length} are claimed: damaged")
        if not squares:
            source.refuse(
                "it has no weight of experts (blk.N.ffn_*_exps.weight): a model without experts, or cut entries"
            )
        moe = sorted(squares)
        if said.moe_layers is not None and set(said.moe_layers) != set(moe):
            source.refuse(f"it has experts in the layers {moe!s:.80}, and layers= or config= says others")
        meta = meta_of(
            source, said, "llama.cpp imatrix, older form", max(layers, said.num_hidden_layers or 0), moe, experts, k,
            counts="lost by the format", passes=[],
        )  # fmt: skip
        arrays = {f"layers.{layer}.moe.input_mean_square": squares[layer] for layer in moe}
        return Trace(arrays, ids=[], texts=[], meta=meta)

