"""Every error that colibri-lab raises on purpose.

All derive from `ColibriError`, and each also from the built-in class that a Python reader expects, so that ``except
ValueError`` works as well as ``except lab.ColibriError``. A message names the file, tensor, layer or limit at fault and
the nearest valid choice.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

__all__ = [
    "ArgumentError",
    "BusyError",
    "CapacityError",
    "ColibriError",
    "FileError",
    "FormatError",
    "NonFiniteError",
    "NotCapturedError",
    "OutOfMemoryError",
    "TapError",
    "UnsupportedError",
    "is_number",
    "is_whole",
    "nearest",
]


class ColibriError(Exception):
    """The base of all errors raised on purpose."""

    def __str__(self) -> str:
        # KeyError shows its argument's repr and OSError its errno; the reader wants the sentence.
        return str(self.args[0]) if self.args else ""


class FileError(ColibriError, OSError):
    """A path is missing, unreadable, or changed while it was mapped."""


class FormatError(ColibriError, ValueError):
    """A file's content breaks its format, or contradicts another file."""


class UnsupportedError(ColibriError, NotImplementedError):
    """Well-formed, but an architecture, option or dtype that is not run here."""


class ArgumentError(ColibriError, ValueError):
    """The caller passed something out of range."""


class CapacityError(ColibriError):
    """A session's max_tokens would be exceeded; the session stays as it was."""


class OutOfMemoryError(ColibriError, MemoryError):
    """The planned memory cannot be had; the message gives the bytes."""


class BusyError(ColibriError, RuntimeError):
    """Another thread is inside this session."""


class NotCapturedError(ColibriError, LookupError):
    """The tap exists, but this capture did not keep it; the message names the capture to ask for."""


class TapError(ColibriError, KeyError):
    """No tap or weight has this path; the message names the nearest ones."""


class NonFiniteError(ColibriError, ArithmeticError):
    """A NaN or an infinity stands where only finite numbers make sense."""


def nearest(name: str, choices: Iterable[str], count: int = 3) -> str:
    """The choices most like `name`, as a sentence's end: ``; did you mean 'a' or 'b'?`` (empty if none is near)."""
    close = difflib.get_close_matches(name, list(choices), n=count, cutoff=0.6)
    return f"; did you mean {' or '.join(repr(c) for c in close)}?" if close else ""


def is_whole(value: Any) -> bool:
    """Whether a caller's `value` is a whole number, Python's or NumPy's; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether a caller's `value` is a real number, Python's or NumPy's; True and False are none."""
    return isinstance(value, Real) and not isinstance(value, bool)
