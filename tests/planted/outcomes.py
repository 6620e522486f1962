"""What lab.diff said of a planted difference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import colibri_lab as lab
from colibri_lab.difference.diagnosis import starred
from tests.planted.case import Case

STRICT = 1e-4
"""Of each tap's largest value: what float32 stays far below, and 16 bits do not."""


@dataclass(frozen=True)
class Outcome:
    """`failed` is what went wrong in the Python that confirms, "" when nothing did."""

    kind: str | None
    path: str
    words: str
    failed: str


def outcome(case: Case, folder: Path) -> Outcome:
    """Makes the case and compares."""
    a, b, checkpoint = case.make(folder)
    model = lab.open(checkpoint) if checkpoint is not None else None
    d = lab.diff(a, b, model=model, progress=False)
    if d.first_divergence is None:  # one says it computes in 16 bits, and differs by no more: asked strictly
        d = lab.diff(a, b, model=model, tolerance=STRICT, progress=False)
    if d.first_divergence is None or d.diagnosis is None:
        return Outcome(None, "", d.verdict, "")
    failed = ""
    try:
        exec(d.diagnosis.confirm, {"d": d, "a": a, "b": b, "model": model})
    except Exception as error:
        failed = f"{error!r} in\n{d.diagnosis.confirm}"
    kind = d.diagnosis.fault or "unknown"
    return Outcome(kind, starred(d.first_divergence.path), d.diagnosis.words, failed)


def counted(cases: Sequence[Case], outcomes: Mapping[str, Outcome]) -> tuple[int, list[str]]:
    """(how many kinds are right, the others in words); a case that did not run counts as wrong."""
    wrong = []
    for case in cases:
        found = outcomes.get(case.name)
        if found is None or found.kind != case.kind:
            wrong.append(f"{case.name}: {found.kind + ', ' + found.words if found and found.kind else 'nothing'}")
    return len(cases) - len(wrong), wrong
