"""Arrays on their way to the browser."""

from __future__ import annotations

import numpy as np
import pytest

from colibri_lab.widgets._wire import pack


def test_G1_arrays_travel_as_bytes_so_nan_and_inf_arrive() -> None:
    """What is packed reads back bit for bit, whatever its strides, NaN payload and infinities included."""
    odd = np.array([[np.nan, np.inf], [-np.inf, -0.0]], np.float32)
    specs, buffers = pack({"a": odd.T, "b": np.arange(6, dtype=np.uint16)[::2]})
    assert specs == [{"name": "a", "dtype": "float32", "shape": [2, 2]}, {"name": "b", "dtype": "uint16", "shape": [3]}]
    assert np.frombuffer(buffers[0], "<f4").tobytes() == odd.T.copy().tobytes()
    assert np.frombuffer(buffers[1], "<u2").tolist() == [0, 2, 4]


def test_big_endian_arrays_are_turned() -> None:
    """The browser reads little endian."""
    _, buffers = pack({"a": np.array([1.5], ">f4")})
    assert np.frombuffer(buffers[0], "<f4").tolist() == [1.5]


def test_a_dtype_without_a_typed_array_is_refused_by_name() -> None:
    """float64 and int64 would be misread; the error names the array."""
    with pytest.raises(TypeError, match="array 'margin' is float64"):
        pack({"margin": np.zeros(2)})
