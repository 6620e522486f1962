"""A port of the bundled model with a fault in its weights, for tests that need a real comparison."""

from __future__ import annotations

import shutil
from pathlib import Path

from checkpoints import read_checkpoint, write_safetensors

import colibri_lab as lab

LAYER, EXPERT = 2, 5
TEXT = (
    "The fox counts the eggs in her nest. She writes a function:\ndef total(eggs):\n    n = 0\n    for e in eggs:\n"
    "        n += e\n    return n\n"
)


def swapped(folder: Path) -> Path:
    """The bundled model with the gate and up weights of one expert exchanged, in `folder`."""
    shutil.copytree(Path(lab.__file__).parent / "bundled/tiny-colibri", folder)
    _, tensors = read_checkpoint(folder)
    gate, up = (f"model.layers.{LAYER}.block_sparse_moe.experts.{EXPERT}.{name}.weight" for name in ("w1", "w3"))
    tensors[gate], tensors[up] = tensors[up], tensors[gate]
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def recorded(model: lab.Model, path: Path) -> Path:
    """The trace of `TEXT` through a model, in a file."""
    session = model.session(capture="all", threads=1)
    session.feed(TEXT, progress=False)
    session.trace().save(path)
    return path
