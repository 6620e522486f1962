"""The addresses that a stage reads its weights from, in the order of the engine's kernels.

One token on one thread, as in decoding: each weight matrix passes by once. The kernels read a few rows of a matrix side
by side, far apart, 16 columns of each in turn (csrc/kernels/lanes_matmul.h); how many depends on the instruction set.
Of the chosen experts, gate and up come expert by expert in the order of their numbers, then every down
(csrc/core/experts.c). Left out are activations, some KiB that are used again at once, and the keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from colibri_lab.cache.checks import open_model
from colibri_lab.errors import ArgumentError, is_whole, nearest

Layout = Literal["file", "together", "apart"]

STAGES = ("attention", "router", "expert", "shared", "mlp", "norm", "logits")
"""Stages that read weights matrix by matrix; dispatcher, aggregator and residual read none, embed one row."""

ROWS = {"avx512": 8, "avx2": 4, "neon": 4, "sse2": 1, "scalar": 1}
"""Rows of a matrix that are read side by side for a single token, by instruction set (TILE_W1 of its kernels)."""

_STEP = 16  # columns that a kernel takes of a row before it turns to the next row
_LINE = 64
_PIECE = 1 << 16  # addresses of a piece, about
_WORK, _GROUP = 1 << 22, 48  # multiply-adds between two looks at the clock, in whole groups of outputs (machine.c)
_BASE = 1 << 40  # where a layout of its own begins


@dataclass(frozen=True)
class _Matrix:
    base: int
    rows: int
    cols: int
    size: int  # bytes of an element


def stage_addresses(
    model: Any,
    stage: str,
    layer: int | None = None,
    *,
    experts: Sequence[int] | NDArray[np.integer[Any]] | None = None,
    layout: Layout | Mapping[str, int] = "file",
    isa: str | None = None,
) -> Iterator[NDArray[np.int64]]:
    """The addresses in bytes, one for each 16 columns of a weight row that are read, as pieces of int64 arrays.

    `stage`: "attention", "router", "expert", "shared", "mlp" of a layer; "norm", "logits" of none. "expert" takes the
    `experts` that the token chose. `layout` "file": where the model's weights really lie now. "together" and "apart":
    where experts would lie with the three matrices of each next to each other, or with all gates of a layer, then all
    ups, then all downs, as fused checkpoints hold them; other weights stay. Or addresses of your own by weight name.
    `isa` None: the kernels in force (`model.info["isa"]`). A piece has some 65,536 addresses, whatever the model's
    size.

    Raises ArgumentError for a stage, layer, expert, layout or isa that is not there; TapError for a weight name.
    """
    tile = ROWS.get(open_model(model, "stage_addresses").info["isa"] if isa is None else isa)
    if tile is None:
        raise ArgumentError(f"there is no instruction set {isa!r:.40}; there are {', '.join(ROWS)}")
    names = _order(model, stage, layer, experts)
    bases = layout if isinstance(layout, Mapping) else placed(model, layout)
    return _addresses([_matrix(model, name, bases) for name in names], tile)


def placed(model: Any, layout: Layout) -> dict[str, int]:
    """Addresses in bytes of all experts' matrices in a layout, by weight name; {} for "file". Each begins on a line."""
    if layout not in ("file", "together", "apart"):
        raise ArgumentError(f"a layout is 'file', 'together' or 'apart', or a mapping, not {layout!r:.80}")
    if layout == "file":
        return {}
    out, base, kinds = {}, _BASE, ("gate", "up", "down")
    for layer in model.config.moe_layers:
        experts = range(model.config.num_experts)
        pairs = [(e, kind) for e in experts for kind in kinds]
        if layout == "apart":
            pairs = [(e, kind) for kind in kinds for e in experts]
        for expert, kind in pairs:
            name = f"layers.{layer}.moe.experts.{expert}.{kind}"
            weight, out[name] = model.weights.describe(name), base
            base += -(-int(np.prod(weight.shape)) * weight.dtype.itemsize // _LINE) * _LINE
    return out


# ---- which weights, in which order ---------------------------------------------------------------------------------


def _order(model: Any, stage: str, layer: int | None, experts: Any) -> list[str]:
    """Names of the weights that a stage reads, in order."""
    if stage not in STAGES:
        raise ArgumentError(f"no stage {stage!r:.40} reads weight matrices{nearest(str(stage), STAGES)}; those that do "
                            f"are {', '.join(STAGES)}")  # fmt: skip
    if experts is not None and stage != "expert":
        raise ArgumentError(f"experts= is for the stage 'expert'; {stage!r} reads the same weights for every token")
    if stage in ("norm", "logits"):
        if layer is not None:
            raise ArgumentError(f"the stage {stage!r} comes after all layers; leave out layer={layer!r:.40}")
        return ["norm"] if stage == "norm" else ["lm_head"]
    config, base = model.config, f"layers.{layer}."
    of = {"router": config.moe_layers, "expert": config.moe_layers, "shared": config.shared_layers}
    every = range(config.num_hidden_layers)
    layers = [n for n in every if n not in config.moe_layers] if stage == "mlp" else list(of.get(stage, every))
    if not is_whole(layer) or layer not in layers:
        there = f"it is in {layers!s:.80}" if layers else "no layer of this model has it"
        raise ArgumentError(f"layer {layer!r:.40} has no stage {stage!r}; {there}")
    if stage == "attention":
        return _attention(model, base)
    if stage == "router":
        return [base + "moe_norm", base + "moe.router"]
    if stage == "mlp":
        return [base + "moe_norm", *(f"{base}mlp.{kind}" for kind in ("gate", "up", "down"))]
    if stage == "shared":
        return [*(f"{base}moe.shared.{kind}" for kind in ("gate", "up", "down")),
                *(name for name in [base + "moe.shared_gate"] if name in model.weights)]  # fmt: skip
    chosen = [] if experts is None else sorted(int(e) for e in np.asarray(experts).reshape(-1))
    if not chosen or len(set(chosen)) < len(chosen) or not 0 <= chosen[0] <= chosen[-1] < config.num_experts:
        raise ArgumentError(
            f"experts= names the distinct experts that the token chose, 0 to {config.num_experts - 1}; this is "
            f"{experts!r:.80}"
        )
    names = [f"{base}moe.experts.{e}.{kind}" for e in chosen for kind in ("gate", "up")]
    return names + [f"{base}moe.experts.{e}.down" for e in chosen]


def _attention(model: Any, base: str) -> list[str]:
    config, attn = model.config, base + "attn."
    names = [base + "attn_norm"]
    names += [name for kind in "qkv" for name in (f"{attn}{kind}", f"{attn}{kind}.bias")]
    for kind, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads)):
        names += [f"{attn}{kind}_norm"] * (heads if config.qk_norm == "head" else 1)
    return [name for name in (*names, attn + "o", attn + "o.bias") if name in model.weights]


def _matrix(model: Any, name: str, bases: Mapping[str, int]) -> _Matrix:
    weight = model.weights.describe(name)
    rows, cols = (1, *weight.shape) if len(weight.shape) == 1 else weight.shape
    base = bases[name] if name in bases else _address(model, name)
    return _Matrix(int(base), int(rows), int(cols), weight.dtype.itemsize)


def _address(model: Any, name: str) -> int:
    """Where the engine reads a weight: in the mapped file, at any byte; one that was replaced, where its array lies."""
    weight = model.weights.describe(name)
    if weight.replaced:
        return int(model.weights[name].ctypes.data)
    return int(next(start for file, start, _ in model._engine.files() if file == weight.file) + weight.file_offset)


# ---- addresses -----------------------------------------------------------------------------------------------------


def _addresses(matrices: list[_Matrix], tile: int) -> Iterator[NDArray[np.int64]]:
    for matrix in matrices:
        yield from _product(matrix, tile)


def _product(w: _Matrix, tile: int) -> Iterator[NDArray[np.int64]]:
    """All rows of a matrix for one row of x: blocks of outputs, of each first `tile` runs side by side, then what is
    left row by row. A vector is a matrix of one row.
    """
    row_bytes = w.cols * w.size
    columns = np.arange(0, row_bytes, _STEP * w.size)
    if w.base % _LINE or row_bytes % _LINE:
        columns = np.append(columns, row_bytes - 1)  # a row may end in a line that no step begins in
    block = max(1, _WORK // (w.cols * _GROUP)) * _GROUP
    for start in range(0, w.rows, block):
        stop = min(start + block, w.rows)
        run = (stop - start) // tile
        side_by_side = start + np.arange(run)[:, None] + run * np.arange(tile)
        for rows in (side_by_side, np.arange(start + tile * run, stop)[:, None]):
            step = max(1, _PIECE // (rows.shape[1] * len(columns)))
            for at in range(0, len(rows), step):
                begins = w.base + rows[at : at + step] * row_bytes
                yield (begins[:, None, :] + columns[None, :, None]).reshape(-1)
