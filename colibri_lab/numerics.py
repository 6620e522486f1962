"""Number formats: their spacing, their range, and how far arrays are from both.

Formats go by name: float64, float32, float16, bfloat16, float8_e4m3fn, float8_e5m2. All results are float64 or int64;
nothing here rounds to a format that NumPy lacks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.errors import ArgumentError, nearest
from colibri_lab.trace import HasTrace, trace_of

__all__ = ["FORMATS", "Format", "absmax", "format_of", "headroom", "headroom_bits", "spacing", "ulp_distance"]


@dataclass(frozen=True)
class Format:
    """A binary floating-point format."""

    name: str
    fraction: int  # stored bits of the significand
    lowest: int  # exponent of the smallest normal number: 2^lowest
    largest: float  # the largest finite number


FORMATS = {
    entry.name: entry
    for entry in (
        Format("float64", 52, -1022, float(np.finfo(np.float64).max)),
        Format("float32", 23, -126, float(np.finfo(np.float32).max)),
        Format("float16", 10, -14, 65504.0),
        Format("bfloat16", 7, -126, (2 - 2.0**-7) * 2.0**127),
        Format("float8_e4m3fn", 3, -6, 448.0),
        Format("float8_e5m2", 2, -14, 57344.0),
    )
}
"""The formats by name."""

_SHORT = {"f64": "float64", "f32": "float32", "f16": "float16", "fp16": "float16", "fp32": "float32", "half": "float16",
          "bf16": "bfloat16", "float": "float32", "float8_e4m3": "float8_e4m3fn"}  # fmt: skip


def format_of(dtype: Any) -> Format:
    """The format of a dtype or of its name ("bfloat16", "bf16", "torch.bfloat16", np.float16).

    Raises ArgumentError for what is no floating-point format, with the nearest one.
    """
    if isinstance(dtype, Format):
        return dtype
    try:
        name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    name = name.removeprefix("torch.").lower()
    name = _SHORT.get(name, name)
    if name not in FORMATS:
        raise ArgumentError(f"no number format is called {name!r:.80}{nearest(name, FORMATS) or _LISTED}")
    return FORMATS[name]


_LISTED = f"; there are {', '.join(FORMATS)}"


def spacing(magnitude: Any, dtype: Any = "float32") -> NDArray[np.float64]:
    """The distance between neighbouring numbers of a format at a magnitude: 2^(exponent − fraction bits).

    In [8, 16) that is 0.0625 for bfloat16 and 0.0078125 for float16. Below the smallest normal number it stays that of
    the subnormals; Inf and NaN have NaN, and so has what the format can not hold.
    """
    kind, size = format_of(dtype), np.abs(np.asarray(magnitude, np.float64))
    valid = size <= kind.largest  # False for NaN
    _, exponent = np.frexp(np.where(valid, size, 1.0))  # size = m · 2^exponent with m in [1/2, 1); 0 has exponent 0
    exponent = np.where(size == 0, kind.lowest, np.maximum(exponent - 1, kind.lowest))
    return np.asarray(np.where(valid, np.ldexp(1.0, exponent - kind.fraction), np.nan))


def ulp_distance(a: Any, b: Any) -> NDArray[np.int64]:
    """How many float32 numbers lie from a to b, element by element: 0 for equal ones (+0 and −0 too), 1 for neighbours.

    Both are taken as float32. Two NaN are 0 apart; a NaN and a number 2^32, which is more than any two numbers are.
    """
    x, y = np.broadcast_arrays(np.asarray(a, np.float32), np.asarray(b, np.float32))
    apart = np.abs(_ordered(x) - _ordered(y))
    nan_x, nan_y = np.isnan(x), np.isnan(y)
    return np.asarray(np.where(nan_x | nan_y, np.where(nan_x & nan_y, 0, 1 << 32), apart))


def _ordered(x: NDArray[np.float32]) -> NDArray[np.int64]:
    """float32 as whole numbers in the same order: sign and magnitude made one line through 0."""
    bits = np.ascontiguousarray(x).view(np.int32).astype(np.int64)
    return np.asarray(np.where(bits < 0, -(bits & 0x7FFFFFFF), bits))


def absmax(array: Any) -> float:
    """The largest magnitude; NaN when a NaN is there, 0 for an empty array. Works in pieces: no copy of the whole."""
    flat = np.asarray(array).reshape(-1)
    largest = 0.0
    for start in range(0, flat.size, 1 << 20):
        piece = flat[start : start + (1 << 20)]
        if piece.dtype.kind != "f":
            piece = piece.astype(np.float64)
        largest = float(np.maximum(largest, np.abs(piece).max()))
    return largest


def headroom_bits(array: Any, dtype: Any = "float16") -> float:
    """log2(largest number of the format / largest magnitude of the array): doublings until it overflows.

    Below 2 is a warning, below 0 an overflow (−Inf when the array holds an infinity); +Inf for all zeros and for an
    empty array, NaN when a NaN is there. bfloat16 reaches as far as float32: its risk is coarse spacing (see
    `spacing`), not overflow.
    """
    size = absmax(array)
    if size == 0:
        return float("inf")
    if not np.isfinite(size):
        return -size
    (top, up), (part, down) = (math.frexp(x) for x in (format_of(dtype).largest, size))
    return math.log2(top / part) + up - down  # no overflow, and whole where the quotient is a power of two


def headroom(trace: Any | HasTrace, dtype: Any = "float16") -> dict[str, float]:
    """`headroom_bits` of every floating-point array of a trace, by tap path: which stage comes nearest to overflow."""
    arrays = trace_of(trace)
    return {path: headroom_bits(array, dtype) for path, array in arrays.items() if array.dtype.kind not in "iu"}
