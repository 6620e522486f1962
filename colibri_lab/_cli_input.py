"""What subcommands that run a checkpoint or read a trace have in common."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

__all__ = ["bar", "ids_of", "is_checkpoint"]


def bar() -> bool | None:
    """Bars are for a terminal; in a log they would run into the lines."""
    return None if sys.stderr.isatty() else False


def is_checkpoint(path: str) -> bool:
    """Whether a path is a model to run rather than a trace to read."""
    from colibri_lab.trace_file import is_trace

    file = Path(path)
    if file.is_dir():
        return (file / "config.json").exists()
    beside = file.with_name("config.json").exists() and file.name.endswith((".safetensors", ".index.json"))
    return beside and not is_trace(path)


def ids_of(text: str) -> list[int]:
    """Token ids of "1,2,3"."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"ids are whole numbers with commas between them, not '{text:.40}'") from None


