"""What this machine can do at best, measured in this process: bytes read and operations in a second."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from colibri_lab import _cachelab
from colibri_lab.errors import ColibriError

__all__ = ["Limits", "measure_limits"]

STREAM_BYTES = 128 << 20
MOST_BYTES = 1 << 30
WAYS = [(streams, ahead) for streams in (1, 2, 4, 8) for ahead in (0, 512, 2048)]
"""How many places a thread reads in turn, and how many bytes ahead it prefetches: the fastest way is the limit."""
FMA_ROUNDS = 1_000_000  # some milliseconds
TRIALS = 5


@dataclass(frozen=True)
class Limits:
    """Of so many threads together: bytes read from memory in a second, and float32 operations in a second when nothing
    is read, with the instruction set `isa`. Both are the best of several trials: whatever else runs can only slow them.
    """

    read_bytes_per_s: float
    flops_per_s: float
    threads: int
    isa: str


def measure_limits(threads: int, isa: str) -> Limits:
    """Streams through at least 128 MiB, four times the last cache where the system tells its size (1 GiB at most), and
    runs multiply-adds that wait for nothing; about half a second. `isa` as `model.info["isa"]` has it; where it has no
    fused multiply-add (sse2, scalar on old CPUs) the limit is that of a multiplication and an addition.
    """
    rows = np.ones((_stream_bytes() // 4096, 4096), np.uint8)  # written: every page is its own
    trials = {way: _read(rows, threads, *way) for way in WAYS}
    best = max(trials, key=lambda way: trials[way])
    read = max(trials[best], *(_read(rows, threads, *best) for _ in range(TRIALS)))
    flops = max(_cachelab.fma_rate(isa, threads, FMA_ROUNDS) for _ in range(TRIALS))
    if read <= 0 or flops <= 0:
        raise ColibriError(f"the limits of this machine cannot be measured: {threads} threads could not be made")
    return Limits(read, flops, threads, isa)


def _read(rows: NDArray[np.uint8], threads: int, streams: int, ahead: int) -> float:
    return rows.nbytes / _cachelab.read_seconds(rows, threads, streams, ahead)


def _stream_bytes() -> int:
    """Enough that no cache holds it."""
    try:
        cache = os.sysconf("SC_LEVEL3_CACHE_SIZE")
    except (ValueError, OSError):  # a name or an answer that this system does not have
        cache = 0
    return max(STREAM_BYTES, min(4 * cache, MOST_BYTES))
