"""The exceptions: one base, the expected built-in classes, sentences."""

from __future__ import annotations

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
