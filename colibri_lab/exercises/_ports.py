"""Ports of the bundled model with a fault in each: what the exercises of notebook 03 diagnose.

The fault is in the computation: an altered copy of the checkpoint runs through the engine. What comes back is the trace
alone, as one gets it from somebody else's program.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.errors import ArgumentError, is_whole, nearest
from colibri_lab.model import open
from colibri_lab.trace import Trace
from colibri_lab.trace_file import load_trace

__all__ = ["TEXT", "port", "recording"]

TEXT = "3 * 7 = 21\nThe Queen of Hearts, she counts her gates"

Tensors = dict[str, NDArray[Any]]


def _one(tensors: Tensors) -> None:
    expert = "model.layers.3.block_sparse_moe.experts.6."
    tensors[f"{expert}w1.weight"], tensors[f"{expert}w3.weight"] = (
        tensors[f"{expert}w3.weight"], tensors[f"{expert}w1.weight"],
    )  # fmt: skip


def _two(tensors: Tensors) -> None:
    name = "model.layers.4.block_sparse_moe.gate.weight"
    tensors[name] = tensors[name] * tensors[name].dtype.type(0.5)


def _three(tensors: Tensors) -> None:
    name = "model.layers.2.self_attn.q_proj.weight"
    heads = tensors[name].reshape(4, 32, -1)
    tensors[name] = heads[[0, 2, 1, 3]].reshape(tensors[name].shape)


_FAULTS: dict[int, Callable[[Tensors], None]] = {1: _one, 2: _two, 3: _three}


def port(number: int) -> Trace:
    """The trace of port `number` (1 to 3) of the bundled model, run on `lab.exercises.TEXT` with capture "all".

    Raises ArgumentError for a port that does not exist.
    """
    if not is_whole(number) or number not in _FAULTS:
        raise ArgumentError(f"there are ports 1 to {len(_FAULTS)}, and no port {number!r:.40}")
    return _run(int(number))


@cache
def _run(number: int) -> Trace:
    import ml_dtypes  # noqa: F401  (safetensors names bfloat16 through it)
    from safetensors.numpy import load_file, save_file

    source, plant = open().path, _FAULTS[number]
    with TemporaryDirectory(prefix="colibri-port-") as folder:
        for file in source.iterdir():
            if file.name != "model.safetensors":
                shutil.copy(file, folder)
        tensors = load_file(source / "model.safetensors")
        plant(tensors)
        save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, f"{folder}/model.safetensors")
        session = open(folder).session(capture="all")
        session.feed(TEXT)
        trace = session.trace()
        arrays = {path: trace[path].copy() for path in trace}  # nothing stays mapped in a folder that goes
    meta = {**trace.meta, "producer": f"port {number}", "model_name": f"port-{number}"}
    return Trace(arrays, ids=trace.ids, texts=trace.texts, meta=meta)


def recording(name: str) -> Trace:
    """What Hugging Face transformers made of the bundled model, recorded beforehand with `lab.record.transformers`.

    "float32": `TEXT`, every tap. "bfloat16-eager" and "bfloat16-sdpa": an English text with what the routers read and
    decided, in bfloat16, by two attention kernels. `meta["library"]` has the versions. Raises ArgumentError for another
    name.
    """
    files = sorted((open().path.parent / "reference").glob("transformers-*.safetensors"))
    known = {file.stem.removeprefix("transformers-"): file for file in files}
    if name not in known:
        there = ", ".join(known)
        raise ArgumentError(f"there is no recording {name!r:.40}{nearest(str(name), known)}; there are {there}")
    return load_trace(known[name])
