"""torch and transformers, loaded at the first recording and nowhere else."""

from __future__ import annotations

import importlib
from typing import Any

from colibri_lab.errors import UnsupportedError

__all__ = ["OLDEST", "libraries"]

OLDEST = (4, 57)
"""The first version of transformers whose modules are known here."""


def libraries() -> tuple[Any, Any]:
    """(torch, transformers). Raises UnsupportedError that says what to install."""
    loaded = []
    for name in ("torch", "transformers"):
        try:
            loaded.append(importlib.import_module(name))
        except ImportError as error:
            missing = isinstance(error, ModuleNotFoundError) and error.name == name
            what = "is not installed" if missing else f"cannot be imported ({error})"
            raise UnsupportedError(
                f"recording runs the model in PyTorch, and {name} {what}; pip install 'colibri-lab[hf]'"
            ) from error
    torch, transformers = loaded
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if version < OLDEST:
        raise UnsupportedError(
            f"transformers {transformers.__version__} is older than {'.'.join(map(str, OLDEST))}, the first that is "
            "known here; pip install 'colibri-lab[hf]'"
        )
    return torch, transformers
