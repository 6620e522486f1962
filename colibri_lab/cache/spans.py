"""Half-open spans of bytes, as sorted lists without overlap."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

Span = tuple[int, int]


def joined(spans: Iterable[Span]) -> list[Span]:
    """Sorted; what overlaps or touches is one."""
    out: list[Span] = []
    for start, stop in sorted(spans):
        if out and start <= out[-1][1]:
            out[-1] = out[-1][0], max(out[-1][1], stop)
        elif stop > start:
            out.append((start, stop))
    return out


def size(spans: Iterable[Span]) -> int:
    """How many bytes."""
    return sum(stop - start for start, stop in spans)


def without(spans: Iterable[Span], others: Iterable[Span]) -> list[Span]:
    """What of `spans` lies in none of `others`."""
    out, gaps = [], joined(others)
    for start, stop in joined(spans):
        for gap_start, gap_stop in gaps[max(bisect_right(gaps, (start, start)) - 1, 0) :]:
            if gap_start >= stop:
                break
            if gap_start > start:
                out.append((start, gap_start))
            start = max(start, gap_stop)
        if start < stop:
            out.append((start, stop))
    return out


def covered(spans: Iterable[Span], others: Iterable[Span]) -> int:
    """How many bytes of `spans`, which do not overlap, lie in `others`."""
    spans = list(spans)
    return size(spans) - size(without(spans, others))
