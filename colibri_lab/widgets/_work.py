"""The work of a view: what it asks of a session, how far it is, how it ends, and errors as sentences."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from colibri_lab.errors import BusyError, ColibriError
from colibri_lab.trace import Trace
from colibri_lab.widgets._wire import Status

__all__ = ["IDLE", "RunsPrompts", "Stopped", "Work", "Working", "sentence", "short", "trace_of"]

_REPORTS_PER_SECOND = 10
IDLE: Status = {"state": "idle"}


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

    def begin(self) -> None:
        """Says that it runs, before there is anything to report."""
        self._tell({"state": "working", "text": self._what})

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


class Working:
    """A view that works, as a part of its class: how a piece of work ends, and errors shown in the view.

    The view has the synced traits `_status` and `_in_cell` and answers requests of the browser in `handle`, all but
    "seen", which `keepOwnShell` in the browser sends.
    """

    _status: Any
    _in_cell: Any  # the work holds the kernel: messages, so Stop, wait for its end
    _work: threading.Lock  # held by what is under way
    _stop: threading.Event
    send: Any

    def handle(self, request: Any) -> None:
        """Answers one request of the browser, here and now; raises what goes wrong."""
        raise NotImplementedError

    def stop(self) -> None:
        """Ends the work under way within a second."""
        self._stop.set()

    def _refuse_a_second(self) -> None:
        """The lock `_work` itself is taken by `with`, which an interrupt cannot part from letting go of it."""
        if self._work.locked():
            raise BusyError("This view is already working; stop it first.")

    @contextmanager
    def _working(self, what: str) -> Iterator[Work]:
        """One piece of work: its status, and its end by success, Stop or error."""
        self._stop.clear()
        work = Work(what, self._stop, self._tell)
        end = IDLE
        try:
            self._in_cell = threading.current_thread() is threading.main_thread()
            yield work
        except Stopped:
            end = {"state": "idle", "text": f"Stopped. {work.left}"}
        except KeyboardInterrupt:  # how Stop ends a cell's work; the cell ends with it
            end = {"state": "idle", "text": f"Stopped. {work.left}"}
            raise
        except BaseException as error:
            end = {"state": "error", "text": f"{sentence(error)} {work.left}", "traceback": trace_of(error)}
            raise
        finally:
            self._tell(end)

    def _tell(self, status: Status) -> None:
        self._status = dict(status)

    def _guarded(self, request: Any) -> None:
        """Answers a request; whatever goes wrong is shown in the view, never lost in a log."""
        if request.get("kind") == "seen":
            self.send({"kind": "heard"})  # as an answer, so that the next request comes the same way
            return
        before = self._status
        try:
            self.handle(request)
        except Exception as error:
            if self._status is before or self._status.get("state") != "error":  # else the work has told it
                text = f"{sentence(error)} Nothing was changed."
                self._tell({"state": "error", "text": text, "traceback": trace_of(error)})


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
