"""Widgets of a notebook cell: when a cell runs again, what it made before is closed, so that re-running does not pile
up traces.

A cell is known by the id that the notebook front end sends along. Without one (plain Python, consoles) nothing is ever
closed here.
"""

from __future__ import annotations

import sys
import weakref
from typing import Protocol

__all__ = ["remember"]


class Closable(Protocol):
    """A widget, as far as this file is concerned."""

    def close(self) -> None:
        """Lets go of everything."""


_made: dict[str, tuple[int, list[weakref.ref[Closable]]]] = {}


def remember(widget: Closable) -> None:
    """Notes that the running cell made `widget` and closes what earlier runs of the same cell made."""
    cell, run = _running_cell()
    if cell is None:
        return
    then, earlier = _made.get(cell, (run, []))
    if then != run:
        for reference in earlier:
            old = reference()
            if old is not None:
                old.close()
        earlier = []
    _made[cell] = (run, [*earlier, weakref.ref(widget)])


def _running_cell() -> tuple[str | None, int]:
    """The id of the cell that runs and the number of its execution; (None, 0) outside a notebook."""
    if "IPython" not in sys.modules:
        return None, 0
    from IPython import get_ipython

    shell = get_ipython()
    if shell is None or not hasattr(shell, "get_parent"):
        return None, 0
    metadata = shell.get_parent().get("metadata", {})
    cell = metadata.get("cellId") or metadata.get("cell_id")
    return (str(cell) if cell else None), int(shell.execution_count)
