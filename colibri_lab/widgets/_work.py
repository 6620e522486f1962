"""One piece of work of a view: what it asks of a session, how far it is, how it ends, and errors as sentences."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from colibri_lab.errors import ColibriError
from colibri_lab.trace import Trace
from colibri_lab.widgets._wire import Status

__all__ = ["RunsPrompts", "Stopped", "Work", "sentence", "short", "trace_of"]

_REPORTS_PER_SECOND = 10


class RunsPrompts(Protocol):
    """What the explorer asks of a session."""

    model: Any

    @property
    def ids(self) -> list[int]:
        """Tokens so far."""

    @property
    def max_tokens(self) -> int:
        """Tokens it holds at most."""

    def feed(self, x: Any, progress: Any = None) -> Any:
        """Runs tokens as one pass."""

    def generate(self, n: int, *, progress: Any = None) -> Iterator[Any]:
        """Continues token by token."""

    def reset(self) -> None:
        """Forgets all tokens."""

    def trace(self) -> Trace:
        """Everything captured so far."""


class Stopped(Exception):
    """Stop was pressed; raised out of a progress report to end a pass."""


class Work:
    """Tells `tell` how far `what` is, at most ten times a second, and hears the event `stop`."""

    def __init__(self, what: str, stop: threading.Event, tell: Callable[[Status], object]) -> None:
        self.left = "Nothing was changed."
        """What an error or Stop leaves behind, as a sentence."""
        self._what, self._stop, self._tell = what, stop, tell
        self._started = self._last = time.monotonic()

    def report(self, done: int, total: int) -> None:
        """Raises Stopped when Stop was pressed."""
        if self._stop.is_set():
            raise Stopped
        now = time.monotonic()
        if now - self._last >= 1 / _REPORTS_PER_SECOND:
            self._last = now
            left = round((now - self._started) * (total - done) / done) if done else 0
            self._tell({"state": "working", "text": self._what, "done": done, "total": total, "seconds_left": left})

    def hear(self, share: float) -> None:
        """The same for a share of the whole, 0 to 1."""
        self.report(round(1000 * share), 1000)


def short(text: str) -> str:
    """The beginning of a prompt, in quotes, on one line."""
    words = " ".join(text.split())
    return f"“{words[:40]}…”" if len(words) > 40 else f"“{words}”"


def sentence(error: BaseException) -> str:
    """An error as one sentence; one that is not ours with its kind in front."""
    words = str(error).strip() or type(error).__name__
    column = getattr(error, "column", None)
    if column is not None:  # of a condition, whose caret needs lines of its own
        words = f"{words.splitlines()[0]} (column {column + 1})"
    if not isinstance(error, ColibriError):
        words = f"{type(error).__name__}: {words}"
    return words[0].upper() + words[1:] + ("" if words.endswith((".", "!", "?")) else ".")


def trace_of(error: BaseException) -> str:
    """The traceback as text, shown on demand."""
    return "".join(traceback.format_exception(error))
