"""One planted difference: what was done, where, and which tap must be the first to show it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from colibri_lab.trace import Trace


@dataclass(frozen=True)
class Case:
    """A pair of runs, made on demand. The difference lies in how the second was computed, never in its arrays."""

    name: str
    """Unique and readable: "unseen-mixtral-L1-norm_epsilon-numpy"."""
    kind: str
    """A fault kind of `Diagnosis.fault`, or "clean"."""
    family: str
    """mixtral, qwen2_moe, qwen3_moe or olmoe; others only from a NumPy forward pass."""
    layer: int | None
    """The layer it was planted in; None when it lies outside layers or in all of them."""
    expected: str
    """The first tap path that must differ, in data-flow order; experts as "layers.1.moe.experts.*.output"."""
    make: Callable[[Path], tuple[Trace, Trace, Path | None]]
    """Given an empty folder: (a = reference, b = suspect, folder of the reference checkpoint or None)."""
