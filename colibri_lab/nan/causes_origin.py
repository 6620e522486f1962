"""An origin from the values that broke and the reason why."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from colibri_lab.nan.causes_base import Where
from colibri_lab.nan.causes_words import Reason
from colibri_lab.nan.elementary import rounded
from colibri_lab.nan.inner import tap_of
from colibri_lab.nan.result import Operand, Origin, WeightPlace
from colibri_lab.nan.source import Birth, Source

__all__ = ["origin_of"]


def origin_of(
    birth: Birth, source: Source, point: str, operation: str, where: Where, reason: Reason, words: str, came: float,
    weight: WeightPlace | None = None,
) -> Origin:  # fmt: skip
    """An origin of the values `where` (rows of the birth, then indices) of a point."""
    index = tuple(int(axis[0]) for axis in where[1:])
    return Origin(
        path=birth.path if source.has(birth.path) and point == birth.path else tap_of(point, source.trace.moe_layers),
        layer=birth.layer,
        stage=birth.stage,
        token=int(birth.tokens[where[0][0]]),
        index=index[0] if len(index) == 1 else index,
        kind=reason.kind,
        cause=f"{reason.kind}: {words}",
        expert=birth.expert,
        point=point,
        operation=operation,
        value=came,
        dtype=source.format(point),
        exact=reason.exact if reason.exact is None or math.isfinite(reason.exact) else None,
        operands=tuple(_as_stored(operand, source.dtype) for operand in reason.operands),
        weight=weight,
        tokens=tuple(int(token) for token in birth.tokens[np.unique(where[0])]),
        n_values=len(where[0]),
        needs=reason.needs,
    )


def _as_stored(operand: Operand, dtype: str) -> Operand:
    """With the bits of the run's format, when the whole run is in a narrow one and the number is one of its own."""
    if dtype not in ("float16", "bfloat16") or operand.dtype != "float32" or operand.bits is not None:
        return operand
    value = np.asarray([operand.value], np.float64).astype(np.float32)
    return replace(operand, dtype=dtype) if np.array_equal(rounded(value, dtype), value, equal_nan=True) else operand
