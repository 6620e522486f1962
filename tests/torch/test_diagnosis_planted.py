"""Differences planted in modules of transformers: where they first show, and what is named as the fault."""

from __future__ import annotations

from pathlib import Path

import pytest

import colibri_lab as lab
from tests.planted import seen_torch, unseen_transformers
from tests.planted.case import Case
from tests.planted.outcomes import Outcome, counted, outcome

pytestmark = pytest.mark.torch

SEEN, UNSEEN = seen_torch.torch_cases(), list(unseen_transformers.cases())


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    """By the name of a case, for those that ran."""
    return {}


@pytest.mark.parametrize("case", [*SEEN, *UNSEEN], ids=lambda case: case.name)
def test_a_fault_in_a_module_is_found_where_it_first_shows(
    case: Case, tmp_path: Path, outcomes: dict[str, Outcome]
) -> None:
    """The first divergent tap is exact, and the Python that is to confirm the fault runs."""
    found = outcomes[case.name] = outcome(case, tmp_path)
    assert found.path == case.expected, found
    assert not found.failed, found


@pytest.mark.parametrize(("half", "cases", "share"), [("seen", SEEN, 0.98), ("unseen", UNSEEN, 0.9)])
def test_faults_in_modules_are_named(
    half: str, cases: list[Case], share: float, outcomes: dict[str, Outcome]
) -> None:
    """The kind is right in at least 98 % of the seen and 90 % of the unseen ones."""
    right, wrong = counted(cases, outcomes)
    print(f"\n{half} in transformers: {right} of {len(cases)} named; not: {wrong}")
    assert right >= share * len(cases), wrong


@pytest.mark.parametrize("case", list(unseen_transformers.clean()), ids=lambda case: case.name)
def test_a_clean_pair_is_no_defect(case: Case, tmp_path: Path) -> None:
    """The verdict is identical or tie, and there is nothing to explain."""
    a, b, checkpoint = case.make(tmp_path)
    d = lab.diff(a, b, model=checkpoint, progress=False)
    assert d.verdict in ("identical", "tie"), (d.verdict, d.first_divergence)
    assert d.diagnosis is None
