"""The cases planted in modules of transformers are what they say, as in test_unseen_cases."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.planted.case import Case
from tests.planted.unseen_check import check, check_clean
from tests.planted.unseen_transformers import cases, clean

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_the_expected_tap_is_the_first_to_differ(case: Case, tmp_path: Path) -> None:
    """Before it all taps agree to float noise; it differs by more than noise."""
    check(case, tmp_path)


@pytest.mark.parametrize("case", clean(), ids=lambda case: case.name)
def test_clean_pairs_agree(case: Case, tmp_path: Path) -> None:
    """No tap differs by more than float noise, no choice of experts is near a tie, and all choices are the same."""
    check_clean(case, tmp_path)
