"""The compiled simulators, or a sentence that says how to build them."""

from __future__ import annotations

try:
    from colibri_lab import _cachelab as cachelab
except ImportError as error:
    raise ImportError(
        "colibri_lab._cachelab, the compiled cache simulator, is not here: install the package with `pip install .` "
        "(or `pip install -e .` to work on it) in the folder that holds pyproject.toml; `make lab` does it for you. "
        f"({error})"
    ) from error

__all__ = ["cachelab"]
