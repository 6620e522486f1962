"""colibri-lab: a workbench for looking inside Mixture-of-Experts language models.

    import colibri_lab as lab

    model = lab.open()                          # the small bundled model; or a folder with a checkpoint
    session = model.session(capture="moe")
    session.feed("The engine counts its gates.")
    session.tape.gates(0)                       # (T, k): a read-only view of the engine's own memory
    lab.RoutingExplorer(session)                # in JupyterLab

Names load when they are first used: analyses and traces work without the compiled engine, and no widget, plotting or
torch library is imported before it is needed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy  # noqa: F401  (nothing here works without it: loaded now, lab.open() takes milliseconds)

from colibri_lab.errors import (
    ArgumentError,
    BusyError,
    CapacityError,
    ColibriError,
    FileError,
    FormatError,
    NonFiniteError,
    NotCapturedError,
    OutOfMemoryError,
    TapError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from colibri_lab import cache, exercises, nan, numerics, record, routing, testing
    from colibri_lab._doctor import doctor
    from colibri_lab.compare import Comparison
    from colibri_lab.conditions import ConditionError
    from colibri_lab.difference.result import Diff
    from colibri_lab.difference.tolerance import tolerance
    from colibri_lab.difference.verdict import diff
    from colibri_lab.emulation import Emulation
    from colibri_lab.generate import Token
    from colibri_lab.loading import load_trace
    from colibri_lab.model import Model, open
    from colibri_lab.places import Where
    from colibri_lab.profiling import profile
    from colibri_lab.progress import show_progress
    from colibri_lab.session import Pass, Session
    from colibri_lab.stepper import Stepper
    from colibri_lab.tape import Tape
    from colibri_lab.tokenizer import Tokenizer
    from colibri_lab.trace import Trace
    from colibri_lab.widgets.cache import CacheLab
    from colibri_lab.widgets.diff import DiffView
    from colibri_lab.widgets.explorer import RoutingExplorer
    from colibri_lab.widgets.nan import NanTracer
    from colibri_lab.widgets.stepper import TokenStepper

__all__ = [
    "ArgumentError",
    "BusyError",
    "CacheLab",
    "CapacityError",
    "ColibriError",
    "Comparison",
    "ConditionError",
    "Diff",
    "DiffView",
    "Emulation",
    "FileError",
    "FormatError",
    "Model",
    "NanTracer",
    "NonFiniteError",
    "NotCapturedError",
    "OutOfMemoryError",
    "Pass",
    "RoutingExplorer",
    "Session",
    "Stepper",
    "TapError",
    "Tape",
    "Token",
    "TokenStepper",
    "Tokenizer",
    "Trace",
    "UnsupportedError",
    "Where",
    "cache",
    "diff",
    "doctor",
    "exercises",
    "load_trace",
    "nan",
    "numerics",
    "open",
    "profile",
    "record",
    "routing",
    "show_progress",
    "testing",
    "tolerance",
]

__version__ = "0.1.0"

# Name -> the module that defines it; a module stands for itself.
_LAZY = {
    "Model": "model", "open": "model", "Pass": "session", "Session": "session", "Tape": "tape", "Token": "generate",
    "Tokenizer": "tokenizer", "Trace": "trace", "load_trace": "loading", "doctor": "_doctor", "nan": "nan",
    "DiffView": "widgets.diff", "RoutingExplorer": "widgets.explorer", "TokenStepper": "widgets.stepper",
    "NanTracer": "widgets.nan", "CacheLab": "widgets.cache",
    "routing": "routing", "cache": "cache", "numerics": "numerics", "testing": "testing", "show_progress": "progress",
    "ConditionError": "conditions", "Stepper": "stepper", "Where": "places", "Comparison": "compare",
    "exercises": "exercises", "record": "record", "Emulation": "emulation",
    "profile": "profiling",
    "Diff": "difference.result", "diff": "difference.verdict", "tolerance": "difference.tolerance",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'colibri_lab' has no attribute '{name}'")
    module = import_module(f"colibri_lab.{_LAZY[name]}")
    value = module if _LAZY[name] == name else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__") and name.endswith("__"))})
