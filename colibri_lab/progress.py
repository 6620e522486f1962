"""Progress of long calls: a tqdm bar that appears after a second, a function of yours, or nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Progress", "show_progress", "shown"]

Progress = bool | Callable[[float], object] | None
"""What a `progress` parameter takes: None as `show_progress` says, True or False, or a function called with the
fraction done.
"""

DELAY = 1.0
"""Seconds before a bar appears, so that short calls stay silent."""

_enabled = True


def show_progress(enabled: bool) -> None:
    """Turns the bars of this process on or off; the parameter `progress=` of a call wins over it."""
    global _enabled
    _enabled = bool(enabled)


@contextmanager
def shown(progress: Progress, total: int, unit: str, label: str) -> Iterator[Callable[[float], object] | None]:
    """Gives a function to call with the fraction done, or None when nobody wants to know; the bar goes at the end."""
    if callable(progress):
        yield progress
        return
    if not (_enabled if progress is None else progress):
        yield None
        return
    started, bar = time.monotonic(), None

    def report(done: float) -> None:
        nonlocal bar
        if bar is None and time.monotonic() - started >= DELAY:
            bar = _bar(total, unit, label, time.monotonic() - started)
        if bar is not None:
            bar.update(int(done * total) - bar.n)

    try:
        yield report
    finally:
        if bar is not None:
            bar.total = bar.n  # in a notebook tqdm keeps a bar that is short of its total, in red, as a failure
            bar.close()


def _bar(total: int, unit: str, label: str, elapsed: float) -> Any:
    from tqdm.auto import tqdm  # here, because it loads a widget library inside notebooks

    bar = tqdm(total=total, unit=f" {unit}", desc=label, leave=False, mininterval=0.1)
    bar.start_t -= elapsed  # it was born late; its rate counts from the beginning
    bar.last_print_t -= elapsed
    return bar
