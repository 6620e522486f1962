"""Number formats against NumPy's and ml_dtypes' own numbers."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import colibri_lab as lab
from colibri_lab import numerics
from colibri_lab.errors import ArgumentError
from colibri_lab.testing import synthetic_trace

TYPES: dict[str, Any] = {
    "float64": np.float64,
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}


@pytest.mark.parametrize("name", list(TYPES))
def test_a_formats_limits_are_those_of_its_dtype(name: str) -> None:
    kind, info = numerics.format_of(name), ml_dtypes.finfo(TYPES[name])
    assert kind is numerics.format_of(TYPES[name]) is numerics.format_of(np.dtype(TYPES[name]))
    assert kind.largest == float(info.max) and kind.fraction == info.nmant and 2.0**kind.lowest == float(info.tiny)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_spacing_is_the_gap_to_the_next_number_of_the_format(name: str) -> None:
    """All finite numbers of the format, in order: the gap above each, subnormals and zero included."""
    bits = np.arange(2 ** (8 * np.dtype(TYPES[name]).itemsize - 1)).astype(f"u{np.dtype(TYPES[name]).itemsize}")
    with np.errstate(invalid="ignore"):  # its NaNs
        values = bits.view(TYPES[name]).astype(np.float64)
    values = values[np.isfinite(values)]
    np.testing.assert_array_equal(numerics.spacing(values[:-1], name), np.diff(values))
    np.testing.assert_array_equal(numerics.spacing(-values[:-1], name), np.diff(values))


def test_spacing_of_wide_formats_is_numpys() -> None:
    x = np.concatenate([np.random.default_rng(0).lognormal(0, 20, 1000).astype(np.float32), [0, 1e-45, 1e-38, 3e38]])
    x = x.astype(np.float32)
    np.testing.assert_array_equal(numerics.spacing(x), np.spacing(x))
    x64 = x.astype(np.float64) * 1.1
    np.testing.assert_array_equal(numerics.spacing(x64, "float64"), np.spacing(x64))


def test_the_floor_of_logits_between_8_and_16() -> None:
    assert numerics.spacing([8.0, 15.9], "bf16").tolist() == [0.0625] * 2
    assert numerics.spacing([8.0, 15.9], "fp16").tolist() == [0.0078125] * 2


def test_what_a_format_can_not_hold_has_no_spacing() -> None:
    assert np.isnan(numerics.spacing([70000.0, math.inf, math.nan], "float16")).all()


def test_ulp_distance_counts_the_numbers_between() -> None:
    one = np.float32(1)
    assert numerics.ulp_distance(one, np.nextafter(one, np.float32(2))) == 1
    largest = np.finfo(np.float32).max
    a = np.array([0.0, -1e-45, 1e-45, 1.0, np.nan, np.nan, np.inf], np.float32)
    b = np.array([-0.0, 1e-45, 1e-45, 2.0, np.nan, 1.0, largest], np.float32)
    assert numerics.ulp_distance(a, b).tolist() == [0, 2, 0, 1 << 23, 0, 1 << 32, 1]
    x = np.random.default_rng(1).standard_normal(100).astype(np.float32)
    y = x.copy()
    for _ in range(5):
        y = np.nextafter(y, np.float32(np.inf))
    assert (numerics.ulp_distance(x, y) == 5).all() and (numerics.ulp_distance(y, x) == 5).all()


def test_headroom_is_counted_in_doublings() -> None:
    assert numerics.headroom_bits([1.0, -16376.0], "float16") == 2
    assert numerics.headroom_bits([65504.0], "float16") == 0
    assert numerics.headroom_bits([131008.0], "float16") == -1
    assert numerics.headroom_bits([65504.0], "bfloat16") > 100
    assert numerics.headroom_bits(np.zeros(3)) == numerics.headroom_bits([]) == math.inf
    assert numerics.headroom_bits([math.inf]) == -math.inf and math.isnan(numerics.headroom_bits([1.0, math.nan]))
    assert numerics.headroom_bits(np.array([2.0**10], ml_dtypes.bfloat16)) == pytest.approx(math.log2(65504) - 10)


def test_the_largest_magnitude_of_a_long_array_is_found_in_pieces() -> None:
    x = np.zeros((3, 700_000), np.float32)
    x[2, 5] = -7
    assert numerics.absmax(x) == 7
    x[0, 0] = np.nan
    assert math.isnan(numerics.absmax(x))


def test_headroom_of_a_trace_is_by_tap() -> None:
    trace = synthetic_trace(2, 4, 2, 10, hidden=4)
    found = lab.numerics.headroom(trace)
    assert "layers.1.moe.gates" in found and "layers.1.moe.expert_ids" not in found
    x = np.abs(trace["layers.1.moe.output"]).max()
    assert found["layers.1.moe.output"] == pytest.approx(math.log2(65504 / x))


@pytest.mark.parametrize("wrong", ["int8", "bloat16", 7, object()])
def test_what_is_no_format_is_refused(wrong: Any) -> None:
    with pytest.raises(ArgumentError, match="no number format is called"):
        numerics.format_of(wrong)
