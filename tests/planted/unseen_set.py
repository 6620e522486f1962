"""The whole set that needs no torch: `cases()` planted differences, `clean()` pairs without one."""

from __future__ import annotations

from tests.planted import unseen_checkpoints, unseen_configs, unseen_numpy
from tests.planted.case import Case
from tests.planted.unseen_clean import clean

__all__ = ["cases", "clean"]


def cases() -> list[Case]:
    return [case for part in (unseen_checkpoints, unseen_configs, unseen_numpy) for case in part.cases()]
