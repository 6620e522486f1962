"""Profile: what the stages of a pass took and what they did in that time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.profiling.counters import COUNTERS
from colibri_lab.profiling.limits import Limits
from colibri_lab.profiling.report import report_of
from colibri_lab.profiling.roofline import roofline_of

__all__ = ["TABLE", "Profile"]

NUMBERS = ("seconds", "fastest", "slowest", "flops", "bytes", "experts", "faults", *COUNTERS)
TABLE = np.dtype([("phase", "U8"), ("layer", "i4"), ("stage", "U12"), *((name, "f8") for name in NUMBERS)])


@dataclass(frozen=True, repr=False)
class Profile:
    """Where the time of a pass went. `report()` is the plain text of it.

    `table`: a structured array, one row for each phase ("prefill": the whole prompt in one pass; "decode": one token,
    the mean of `decode_tokens`), layer (−1 outside layers) and stage. `seconds` is the median over the repeats,
    `fastest` and `slowest` their spread. `flops` and `bytes`: docs/profile.md says what counts. `experts`: how many
    different ones worked, NaN at other stages. `faults`: page faults of the first run, in which memory of the session
    and perhaps of the weights was touched for the first time; it counts for no time. `cycles`, `instructions`,
    `l1d_misses`, `llc_misses`, `dtlb_misses`: medians over as many runs again, so that counting costs no measured time;
    NaN where the counter cannot be had.

    `counters`: by name the sum over the prefill, or in words why there is none.
    `faults`: by phase, page faults of the first run: `minor`, and `major` ones, which waited for a disk.
    `repeat_seconds`: (repeats, rows of the table); `wall_seconds`: (repeats, 2) what the calls for prefill and for one
    token took in all.
    """

    table: NDArray[Any]
    limits: Limits
    counters: Mapping[str, float | str]
    faults: Mapping[str, Mapping[str, float]]
    repeat_seconds: NDArray[np.float64]
    wall_seconds: NDArray[np.float64]
    tokens: int
    decode_tokens: int
    threads: int
    counted_share: float
    """Of the time in which counters were to count, the share in which they did: below 1 the system took turns, and
    their figures are scaled up. NaN without counters.
    """

    def roofline(self) -> NDArray[Any]:
        """One row for each phase and stage, its layers together: `seconds`, `flops`, `bytes`, `intensity` (operations
        for each byte), `flops_per_s`, `bytes_per_s`, `limit_flops_per_s` = min(peak, intensity × read rate),
        `share_of_limit` (the least time that the limits allow ÷ seconds), `bound` ("read" or "compute"), and a `note`
        where the share is above 1: what lies in a cache comes faster than memory could give it.
        """
        return roofline_of(self.table, self.limits)

    def report(self) -> str:
        """All of it as plain text."""
        return report_of(self)

    def __repr__(self) -> str:
        return self.report()
