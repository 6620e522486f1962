"""What the CPU counts of itself during the stages, or the reason why it cannot be had."""

from __future__ import annotations

from collections.abc import Mapping

from colibri_lab import _cachelab

__all__ = ["COUNTERS", "reasons"]

COUNTERS = ("cycles", "instructions", "l1d_misses", "llc_misses", "dtlb_misses")
"""Events in user mode: cycles, instructions, reads that missed the first data cache, the last cache, the data TLB."""


def reasons(errors: Mapping[str, int]) -> dict[str, str]:
    """Why a counter cannot be had, by name, but for those that count. `errors`: name → errno, 0 when it counts."""
    paranoid = _cachelab.perf_event_paranoid()
    return {name: _cachelab.counter_reason(error, paranoid) for name, error in errors.items() if error}
