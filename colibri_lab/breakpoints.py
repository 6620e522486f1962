"""Named breakpoints of a stepper."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from colibri_lab.conditions import Expression, parse
from colibri_lab.errors import ArgumentError, nearest

__all__ = ["Breakpoint", "Breakpoints"]


@dataclass
class Breakpoint:
    """A condition at which `run_to` stops; `hits` counts how often it held."""

    name: str
    condition: str
    enabled: bool = True
    hits: int = 0


class Breakpoints(Mapping[str, Breakpoint]):
    """By name, in the order in which they were added."""

    def __init__(self, check: Callable[[Expression], object]) -> None:
        self._check = check
        self._points: dict[str, Breakpoint] = {}
        self._parsed: dict[str, Expression] = {}

    def add(self, condition: str, name: str | None = None) -> str:
        """Adds a breakpoint; returns its name, which is a number unless you give one.

        Raises ConditionError for a condition that cannot be read or names no tap of the model, ArgumentError for
        a name that is taken or no text.
        """
        parsed = parse(condition)
        self._check(parsed)
        if name is None:
            taken = [int(known) for known in self._points if known.isdecimal()]
            name = str(max(taken, default=0) + 1)
        if not isinstance(name, str) or not name or name in self._points:
            why = "is taken" if isinstance(name, str) and name else "is no name"
            raise ArgumentError(f"{name!r:.80} {why}; breakpoints have distinct texts as names")
        self._points[name] = Breakpoint(name, condition)
        self._parsed[name] = parsed
        return name

    def remove(self, name: str) -> None:
        """Forgets a breakpoint. Raises ArgumentError for an unknown name."""
        del self._points[self._known(name)], self._parsed[name]

    def enable(self, name: str) -> None:
        """`run_to` stops there again. Raises ArgumentError for an unknown name."""
        self._points[self._known(name)].enabled = True

    def disable(self, name: str) -> None:
        """`run_to` goes past it. Raises ArgumentError for an unknown name."""
        self._points[self._known(name)].enabled = False

    def _known(self, name: str) -> str:
        if not isinstance(name, str) or name not in self._points:
            raise ArgumentError(f"there is no breakpoint {name!r:.80}{nearest(str(name), self._points)}")
        return name

    def tests(self) -> Iterator[tuple[str, Expression]]:
        """(name, condition) of those that are enabled."""
        return ((name, self._parsed[name]) for name, point in self._points.items() if point.enabled)

    def count(self, name: str) -> None:
        """One more hit."""
        self._points[name].hits += 1

    def copy_to(self, other: Breakpoints) -> None:
        """The same breakpoints there, with no hits yet."""
        other._points = {name: replace(point, hits=0) for name, point in self._points.items()}
        other._parsed = dict(self._parsed)

    def __getitem__(self, name: str) -> Breakpoint:
        return self._points[self._known(name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._points)

    def __len__(self) -> int:
        return len(self._points)

    def __repr__(self) -> str:
        lines = [
            f"{point.name}: {point.condition}  ({'' if point.enabled else 'off, '}{point.hits} hits)"
            for point in self._points.values()
        ]
        return "\n".join(lines) or "(no breakpoints)"
