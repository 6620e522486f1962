"""Helpers for tests, ours and yours.

- `synthetic_trace`: a trace with plausible routing at any size, no engine needed.
- `tiny_model`: a small random checkpoint on disk, in the names and layout of the hub.
- `canonical`: bytes that are equal exactly when two arrays are the same answer.
- `assert_close`, `RELATIVE_TOLERANCE`: the pass line against another implementation.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab._synthetic import synthetic_trace
from colibri_lab._tiny_model import tiny_model
from colibri_lab.trace_file import quiet

__all__ = ["RELATIVE_TOLERANCE", "assert_close", "canonical", "synthetic_trace", "tiny_model"]

Array = NDArray[Any]

RELATIVE_TOLERANCE = 5e-5
"""Largest difference to another float32 implementation, as a share of the tensor's largest magnitude."""


def canonical(array: Array) -> bytes:
    """The array's bytes, row-major, every NaN as the quiet NaN 0x7FC00000 (float32): equal bytes, equal answer."""
    return quiet(np.asarray(array)).tobytes()


def assert_close(actual: Array, expected: Array, name: str = "array", tolerance: float = RELATIVE_TOLERANCE) -> None:
    """Raises AssertionError, naming the worst element, unless `actual` is `expected` within a tolerance.

    Shapes must agree, NaN and Inf must stand at the same places, and the largest difference must be within `tolerance`
    times the largest finite magnitude of `expected`.
    """
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, f"{name}: shape {actual.shape}, expected {expected.shape}"
    finite = np.isfinite(expected)
    odd = ~finite | ~np.isfinite(actual)
    same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
    assert same[odd].all(), f"{name}: non-finite values differ at {np.argwhere(odd & ~same)[0].tolist()}"
    if not finite.any():
        return
    limit = tolerance * float(np.abs(expected[finite]).max())
    error = np.abs(np.where(odd, 0.0, actual) - np.where(odd, 0.0, expected))
    worst = np.unravel_index(int(error.argmax()), error.shape)
    place = [int(i) for i in worst]
    assert error[worst] <= limit, (
        f"{name}: differs by {error[worst]:.3g} at {place} ({actual[worst]}, expected {expected[worst]}); "
        f"allowed {limit:.3g}"
    )
