"""A fault and what a search must say of it. Nothing here knows how the search works."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

Index = int | tuple[int, ...]


@dataclass(frozen=True)
class Expected:
    """One origin. `index` lists the answers that count as right: one, but where no tap shows the point."""

    path: str
    layer: int | None
    stage: str
    token: int
    index: tuple[Index, ...]
    kinds: frozenset[str]
    expert: int | None = None
    weight: tuple[str, Index] | None = None  # the culprit

    def place_of(self, origin: Any) -> dict[str, tuple[Any, Any]]:
        """What differs: name -> (expected, found)."""
        pairs = {
            "path": (self.path, origin.path), "layer": (self.layer, origin.layer), "stage": (self.stage, origin.stage),
            "expert": (self.expert, origin.expert), "token": (self.token, int(origin.token)),
        }  # fmt: skip
        wrong = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
        if _plain(origin.index) not in self.index:
            wrong["index"] = (self.index, _plain(origin.index))
        return wrong

    def kind_of(self, origin: Any) -> dict[str, tuple[Any, Any]]:
        """What differs of the cause."""
        wrong: dict[str, tuple[Any, Any]] = {}
        if origin.kind not in self.kinds:
            wrong["kind"] = (sorted(self.kinds), origin.kind)
        elif not origin.cause.startswith(origin.kind):
            wrong["cause"] = (origin.kind, origin.cause)
        if self.weight is not None and not wrong:
            found = None if origin.weight is None else (origin.weight.name, _plain(origin.weight.index))
            name, index = self.weight
            right = {(name, index), (name, (index,) if isinstance(index, int) else index)}
            if found not in right:
                wrong["weight"] = (self.weight, found)
        return wrong


def _plain(index: Any) -> Index:
    return tuple(int(i) for i in index) if isinstance(index, tuple) else int(index)


@dataclass(frozen=True)
class Case:
    """`changes` of weights (name -> array in the stored dtype) and of the session, and all origins in order.

    `more` says that other origins may follow those that are expected. Without an expectation nothing may be found.
    """

    fault: str
    what: str  # the stage, without layer and expert
    model: str
    where: str
    changes: dict[str, np.ndarray]
    expected: tuple[Expected, ...]
    emulate: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    more: bool = True
    patient: Any = None  # the model, when it is none of `fault_models.NAMES`

    @property
    def name(self) -> str:
        tail = f" in {self.emulate}" if self.emulate else ""
        return f"{self.fault} × {self.what}: {self.model}, {self.where}{tail}"


def judge(case: Case, found: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """(what is wrong about the place, what is wrong about the kind); empty: nothing."""
    if not case.expected:
        return ({} if found is None else {"found": ("nothing", found.origin.path)}), {}
    if found is None:
        return {"found": (case.expected[0].path, "nothing")}, {}
    origins, place, kind = list(found.origins), {}, {}
    for number, expected in enumerate(case.expected):
        # the first is the first; each other one is somewhere among the rest
        rest = origins[:1] if number == 0 else [o for o in origins if not expected.place_of(o)] or origins[number:]
        if not rest:
            place[f"origin {number}"] = (expected.path, "nothing")
            continue
        place |= {f"origin {number} {key}": pair for key, pair in expected.place_of(rest[0]).items()}
        kind |= {f"origin {number} {key}": pair for key, pair in expected.kind_of(rest[0]).items()}
    if not case.more and len(origins) > len(case.expected):
        place["more"] = (len(case.expected), [o.path for o in origins])
    return place, kind


class Tally:
    """How many cases there were and which were misjudged."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self.places: list[str] = []
        self.kinds: list[str] = []

    def add(self, fault: str, what: str, name: str, place: object, kind: object) -> None:
        self.counts[fault, what] += 1
        if place:
            self.places.append(f"{name}: {place}")
        elif kind:
            self.kinds.append(f"{name}: {kind}")

    def check(self, least: int) -> None:
        total = self.counts.total()
        for (fault, what), count in sorted(self.counts.items()):
            print(f"{fault:24s} {what:24s} {count}")
        print(f"{total} cases, {len(self.places)} misplaced, {len(self.kinds)} of another kind")
        report = os.environ.get("COLIBRI_FAULT_REPORT")
        if report:
            with Path(report).open("a", encoding="utf-8") as file:
                file.writelines(f"{line}\n" for line in self.places + self.kinds)
        assert total >= least
        assert not self.places, "\n".join(self.places[:20])
        assert len(self.kinds) <= total // 100, "\n".join(self.kinds[:20])
