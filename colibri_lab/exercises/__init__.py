"""Exercises of the notebooks that mark themselves: `lab.exercises.stepper_1(answer)` says whether an answer is right.

No answer is stored here. Each check works the truth out with the bundled model when it is first asked, takes every
usual spelling, and on a wrong answer says where to look next. It never raises: what cannot be an answer is told what
one looks like.
"""

from colibri_lab.exercises._answers import Verdict
from colibri_lab.exercises._cache import BUDGET, MACHINE, cache_1, cache_2, cache_3, cache_4
from colibri_lab.exercises._diff import diff_1, diff_2, diff_3, diff_4
from colibri_lab.exercises._nan import nan_1, nan_2, nan_3, nan_4
from colibri_lab.exercises._patients import patient
from colibri_lab.exercises._ports import TEXT, port, recording
from colibri_lab.exercises._stepper import stepper_1, stepper_2, stepper_3, stepper_4
from colibri_lab.exercises._traffic import diary, traffic

__all__ = [
    "BUDGET",
    "MACHINE",
    "TEXT",
    "Verdict",
    "cache_1",
    "cache_2",
    "cache_3",
    "cache_4",
    "diary",
    "diff_1",
    "diff_2",
    "diff_3",
    "diff_4",
    "nan_1",
    "nan_2",
    "nan_3",
    "nan_4",
    "patient",
    "port",
    "recording",
    "stepper_1",
    "stepper_2",
    "stepper_3",
    "stepper_4",
    "traffic",
]
