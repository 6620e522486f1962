"""Differences planted in a computation: where they first show, and what is named as the fault.

The cases of tests/planted/seen_* were written beside the rules, those of unseen_* by somebody who had not read them.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tests.planted.case import Case
from tests.planted.outcomes import Outcome, counted, outcome

HERE = Path(__file__).parent


def cases(start: str) -> list[Case]:
    """All cases of the modules of tests/planted whose names begin so."""
    found: dict[str, Case] = {}
    for path in sorted((HERE / "planted").glob(f"{start}_*.py")):
        module = importlib.import_module(f"tests.planted.{path.stem}")
        if hasattr(module, "cases"):
            found |= {case.name: case for case in module.cases()}
    return list(found.values())


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    """By the name of a case, for those that ran."""
    return {}


SEEN = cases("seen")


@pytest.mark.parametrize("case", SEEN, ids=lambda case: case.name)
def test_a_planted_difference_is_found_where_it_first_shows(
    case: Case, tmp_path: Path, outcomes: dict[str, Outcome]
) -> None:
    """The first divergent tap is exact, and the Python that is to confirm the fault runs."""
    found = outcomes[case.name] = outcome(case, tmp_path)
    assert found.path == case.expected, found
    assert not found.failed, found


def test_of_the_seen_half_98_in_100_are_named(outcomes: dict[str, Outcome]) -> None:
    """The kind is right in at least 98 %."""
    right, wrong = counted(SEEN, outcomes)
    print(f"\nseen: {right} of {len(SEEN)} named; not: {wrong}")
    assert len(SEEN) >= 100 and right >= 0.98 * len(SEEN), wrong
