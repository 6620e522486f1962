"""The panels below the timeline: what is in memory now, what limits each stage, keys and values.

Each panel has a name, which is also that of its ES module and of its place in the page: "residency", "roofline",
"keys". `shown` gives what each of them draws, as facts for JSON and arrays for `pack`; the browser calls the module's
`html(panel, view)` with both as one object. A button with `data-panel="residency" data-do="warm"` comes back as
`act("residency", "warm", selection, progress)`, in a thread of its own; afterwards `shown` is asked again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from colibri_lab.errors import ArgumentError
from colibri_lab.widgets.cache_data import CacheData

__all__ = ["Panels"]


class Panels:
    """What the view shows of the machine, beside what it simulates."""

    def __init__(self, data: CacheData) -> None:
        self.data = data

    def shown(self, selection: Mapping[str, Any]) -> list[tuple[str, tuple[dict[str, Any], dict[str, Any]]]]:
        """(name, (facts, arrays)) of every panel that has something to show."""
        return []

    def doing(self, name: str, act: str) -> str:
        """What a button does, as the words shown while it works."""
        return f"{act} of {name}"

    def act(self, name: str, act: str, selection: Mapping[str, Any], progress: Any) -> None:
        """Does what a button says."""
        raise ArgumentError(f"There is no panel {name!r:.40}.")
