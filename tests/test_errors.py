"""The exceptions: one base, the expected built-in classes, sentences."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from colibri_lab import errors


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("FileError", OSError),
        ("FormatError", ValueError),
        ("UnsupportedError", NotImplementedError),
        ("ArgumentError", ValueError),
        ("OutOfMemoryError", MemoryError),
        ("BusyError", RuntimeError),
        ("NotCapturedError", LookupError),
        ("TapError", KeyError),
        ("NonFiniteError", ArithmeticError),
        ("CapacityError", Exception),
    ],
)
def test_each_error_is_also_the_builtin_that_a_reader_expects(name: str, builtin: type[Exception]) -> None:
    error = getattr(errors, name)("the sentence, with 'quotes'")
    assert isinstance(error, builtin) and isinstance(error, errors.ColibriError)
    assert str(error) == "the sentence, with 'quotes'"


def test_the_nearest_names_end_a_sentence() -> None:
    assert errors.nearest("gate", ["gates", "scores"]) == "; did you mean 'gates'?"
    assert errors.nearest("zzz", ["gates", "scores"]) == ""


def test_whole_numbers_and_numbers_are_those_of_python_and_numpy_and_no_truth_values() -> None:
    """What every argument check asks; a text, None and True are none."""
    whole = [0, -3, 10**30, np.int8(1), np.uint64(2)]
    numbers = [1.5, math.nan, np.float16(1), np.float32(2), Fraction(1, 2)]
    others = [True, np.True_, "1", None, 1j, [1], np.zeros(1)]
    assert [*map(errors.is_whole, (*whole, *numbers, *others))] == [True] * 5 + [False] * 12
    assert [*map(errors.is_number, (*whole, *numbers, *others))] == [True] * 10 + [False] * 7
