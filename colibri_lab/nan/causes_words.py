"""What one operation can say of a value of its own that is not finite: the reason, in a sentence with its numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.nan.elementary import Break
from colibri_lab.nan.result import Kind, Operand
from colibri_lab.numerics import format_of

__all__ = ["Reason", "bracketed", "break_reason", "ends_at", "largest", "number", "overflow", "stored"]


@dataclass(frozen=True)
class Reason:
    """Why a value is not finite. `words` follow the kind and a colon."""

    kind: Kind
    words: str
    operands: tuple[Operand, ...] = ()
    exact: float | None = None
    weight: tuple[str, tuple[int, ...]] | None = None  # name and element of the weight that is the culprit
    needs: tuple[str, ...] = ()


def number(value: Any) -> str:
    """As one reads it: "74,875", "412.25", "−1e+20", "NaN", "+Inf": the fewest digits that tell the float32 apart."""
    x = float(value)
    if math.isnan(x):
        return "NaN"
    if math.isinf(x):
        return "+Inf" if x > 0 else "−Inf"
    if x == int(x) and abs(x) < 1e9:
        return f"{int(x):,}".replace("-", "−")
    with np.errstate(over="ignore"):
        single = np.float32(x)
    if 1e-4 <= abs(x) < 1e7:
        text = f"{float(str(single)):,}" if float(single) == x else f"{x:,.8g}"
    else:
        text = _scientific(x, single)
    return text.replace("-", "−")


def _scientific(x: float, single: np.float32) -> str:
    text = np.format_float_scientific(single, trim="-") if float(single) == x else f"{x:.6e}"
    digits, power = text.split("e")
    digits = digits.rstrip("0").rstrip(".") if "." in digits else digits
    return f"{digits}e{int(power)}"


def bracketed(value: float) -> str:
    """Behind an operator: a negative number in brackets."""
    return f"({number(value)})" if math.copysign(1, value) < 0 and value == value else number(value)


def ends_at(dtype: str) -> str:
    """ "float16 ends at 65,504"."""
    return f"{dtype} ends at {number(format_of(dtype).largest)}"


def largest(dtype: str) -> Operand:
    """The largest number of a format, as an operand to stand beside the others."""
    value = format_of(dtype).largest
    return Operand(f"largest {dtype}", value, dtype if dtype in ("float16", "bfloat16") else "float32")


def overflow(told: str, exact: float, dtype: str, *operands: Operand) -> Reason:
    """ "412.25 × 181.625 = 74,875, and float16 ends at 65,504". `told`: all before the result."""
    words = f"{told} = {number(exact)}, and {ends_at(dtype)}"
    return Reason("overflow", words, (*operands, largest(dtype)), exact)


def stored(told: str, value: float, dtype: str) -> Reason:
    """A value that float32 holds and the format it is stored in does not."""
    operands = Operand(told, value), largest(dtype)
    return Reason("overflow", f"{told} = {number(value)}, and {ends_at(dtype)}", operands, value)


def break_reason(
    broke: Break, names: tuple[str, str], dtype: str, total: float | None, places: NDArray[Any] | None = None
) -> Reason:
    """The reason for a break in a sum of products of finite numbers.

    `names`: what the two factors are called; `total`: the exact value of the whole sum, told when it would have fitted;
    `places`: the number of each element, when it is not its position (keys of a window, experts of slots).
    """
    one, other = Operand(names[0], broke.a), Operand(names[1], broke.b)
    before = Operand("partial sum", broke.before)
    place = broke.place if places is None else int(places[broke.place])
    if broke.step == "opposite":
        words = f"partial sums {broke.place} and {broke.other} overflowed with opposite signs"
        sums = (broke.place, broke.before), (broke.other, broke.a)
        operands = tuple(Operand(f"partial sum {lane}", value) for lane, value in sums)
        return Reason("inf − inf", words + _whole(total, dtype), operands, total)
    if broke.step == "product":
        told = f"{number(broke.a)} × {bracketed(broke.b)} (element {place} of the sum)"
        reason = overflow(told, broke.a * broke.b, dtype, one, other)
    elif broke.step == "sum":
        which = "the sum" if broke.other < 0 else f"partial sum {broke.other}"
        told = f"{which}, {number(broke.before)} + {bracketed(broke.a)} × {bracketed(broke.b)} (element {place})"
        reason = overflow(told, broke.exact, dtype, before, one, other)
    elif broke.step == "fold":
        told = f"partial sums {broke.place} and {broke.other}, {number(broke.before)} + {bracketed(broke.a)}"
        reason = overflow(told, broke.exact, dtype, before, Operand(f"partial sum {broke.other}", broke.a))
    else:
        told = f"with its bias, {number(broke.before)} + {bracketed(broke.a)}"
        reason = overflow(told, broke.exact, dtype, Operand("sum", broke.before), Operand("bias", broke.a))
    exact = total if total is not None else reason.exact
    return Reason(reason.kind, reason.words + _whole(total, dtype), reason.operands, exact)


def _whole(total: float | None, dtype: str) -> str:
    """That the sum as a whole would have fitted."""
    if total is None or not abs(total) <= format_of(dtype).largest:
        return ""
    return f"; the whole sum, {number(total)}, would have fitted"
