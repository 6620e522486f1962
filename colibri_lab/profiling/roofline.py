"""The roofline: the least time a stage could take on this machine beside the time it took."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.profiling.limits import Limits

__all__ = ["ROOFLINE", "roofline_of"]

NUMBERS = (
    "seconds", "flops", "bytes", "intensity", "flops_per_s", "bytes_per_s", "limit_flops_per_s", "share_of_limit",
)  # fmt: skip
ROOFLINE = np.dtype(
    [("phase", "U8"), ("stage", "U12"), *((name, "f8") for name in NUMBERS), ("bound", "U8"), ("note", "U32")]
)

FROM_CACHE = "served from cache"
ABOVE_PEAK = "above the peak as measured"


def roofline_of(table: NDArray[Any], limits: Limits) -> NDArray[Any]:
    """One row for each phase and stage of a profile's table, its layers together.

    A stage of F operations on B bytes takes at least max(F / peak, B / rate): `bound` says which of the two it is,
    "compute" or "read", and `share_of_limit` is that time ÷ seconds. Where F > 0 this is the roofline's achieved
    operations a second ÷ min(peak, intensity × rate), with intensity = F / B (Williams, Waterman, Patterson, 2009).
    """
    keys = list(dict.fromkeys(zip(table["phase"].tolist(), table["stage"].tolist(), strict=True)))
    out = np.zeros(len(keys), ROOFLINE)
    for row, (phase, stage) in zip(out, keys, strict=True):
        of = table[(table["phase"] == phase) & (table["stage"] == stage)]
        seconds, flops, n_bytes = (float(of[name].sum()) for name in ("seconds", "flops", "bytes"))
        computing, reading = flops / limits.flops_per_s, n_bytes / limits.read_bytes_per_s
        row["phase"], row["stage"], row["seconds"], row["flops"], row["bytes"] = phase, stage, seconds, flops, n_bytes
        row["intensity"] = flops / n_bytes
        row["flops_per_s"], row["bytes_per_s"] = flops / seconds, n_bytes / seconds
        row["limit_flops_per_s"] = min(limits.flops_per_s, row["intensity"] * limits.read_bytes_per_s)
        row["share_of_limit"] = max(computing, reading) / seconds
        row["bound"] = "compute" if computing > reading else "read"
        if row["share_of_limit"] > 1:
            row["note"] = FROM_CACHE if row["bound"] == "read" else ABOVE_PEAK
    return out
