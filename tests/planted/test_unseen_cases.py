"""The planted cases are what they say: the expected tap is the first to differ, clearly, and nothing before it does.

Nothing here knows how differences are found or named elsewhere: traces are compared with plain NumPy, tap by tap in
data-flow order, expert sets as sets, gates by expert id, expert rows by token and expert.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.planted import unseen_set
from tests.planted.case import Case
from tests.planted.unseen_check import check, check_clean

PLANTED, CLEAN = unseen_set.cases(), unseen_set.clean()


@pytest.mark.parametrize("case", PLANTED, ids=lambda case: case.name)
def test_the_expected_tap_is_the_first_to_differ(case: Case, tmp_path: Path) -> None:
    """Before it all taps agree to float noise; it differs by more than noise."""
    check(case, tmp_path)


@pytest.mark.parametrize("case", CLEAN, ids=lambda case: case.name)
def test_clean_pairs_agree(case: Case, tmp_path: Path) -> None:
    """No tap differs by more than float noise, no choice of experts is near a tie, and all choices are the same."""
    check_clean(case, tmp_path)


def test_names_are_unique_and_every_kind_is_there_often() -> None:
    """A set without sight of the rules must not lean on a few kinds."""
    assert len({case.name for case in PLANTED + CLEAN}) == len(PLANTED + CLEAN)
    kinds = Counter(case.kind for case in PLANTED)
    counted = {
        "norm_epsilon", "missing_renormalisation", "raw_logit_gates", "biased_gates", "swapped_gate_up", "rope_style",
        "window_off_by_one", "position_off_by_one", "expert_order", "transposed_weight", "interleaved_halves",
        "bf16_rounding", "scale_factor",
    }  # fmt: skip
    assert len(PLANTED) >= 100 and len(CLEAN) >= 20
    assert min(kinds[kind] for kind in counted) >= 5
