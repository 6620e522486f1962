"""opening.py KIND PATH: opens the weights in one way in this fresh process and prints, as a line of JSON, the seconds
until the call returned and until every byte was read once. Imports do not count.

    colibri, pickle, "torch.load", "torch.load, mmap"     the ways
    save PICKLE TARGET                                    writes what torch.save makes of the pickle
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (the dtypes of the pickle)
import numpy as np


def read(arrays: Iterable[np.ndarray[Any, Any]]) -> int:
    """A sum over all bytes, so that all are read."""
    return sum(int(a.reshape(-1).view(np.uint8).sum(dtype=np.uint64)) for a in arrays)


def tensors_of(path: Path) -> dict[str, Any]:
    """The pickle's arrays as tensors; PyTorch knows bfloat16 but not NumPy's."""
    import torch

    with path.open("rb") as file:
        arrays = pickle.load(file)
    return {
        name: torch.from_numpy(a.view(np.int16)).view(torch.bfloat16) if a.dtype.itemsize == 2 else torch.from_numpy(a)
        for name, a in arrays.items()
    }


def main() -> None:
    kind, path = sys.argv[1], Path(sys.argv[2])
    if kind == "save":
        import torch

        target = Path(sys.argv[3])
        partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
        torch.save(tensors_of(path), partial)
        os.replace(partial, target)
        return
    if kind == "colibri":
        from colibri_lab.model import open as open_model

        begin = time.perf_counter()
        weights = open_model(path).weights
        opened = time.perf_counter() - begin
        read(weights[name] for name in weights)
    elif kind == "pickle":
        begin = time.perf_counter()
        with path.open("rb") as file:
            arrays = pickle.load(file)
        opened = time.perf_counter() - begin
        read(arrays.values())
    else:
        import torch

        begin = time.perf_counter()
        tensors = torch.load(path, mmap=kind.endswith("mmap"), weights_only=True)
        opened = time.perf_counter() - begin
        read(tensor.view(torch.uint8).numpy() for tensor in tensors.values())
    print(json.dumps({"open": opened, "touched": time.perf_counter() - begin}))


if __name__ == "__main__":
    main()
