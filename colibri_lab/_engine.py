"""The compiled engine, or a sentence that says how to build it: for generate, memory, model and session alone."""

from __future__ import annotations

try:
    from colibri_lab import _core as core
except ImportError as error:
    raise ImportError(
        "colibri_lab._core, the compiled engine, is not here: install the package with `pip install .` "
        "(or `pip install -e .` to work on it) in the folder that holds pyproject.toml; `make lab` does it for you. "
        f"Traces and analyses work without it. ({error})"
    ) from error

__all__ = ["core"]
