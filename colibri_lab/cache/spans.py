"""Half-open spans of bytes; sorted and apart from one another once they are `joined`."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

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


def without(spans: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """What of `spans` lies in none of `others`; both as `joined` gives them."""
    out = []
    for start, stop in spans:
        for number in range(max(bisect_right(others, (start, start)) - 1, 0), len(others)):
            gap_start, gap_stop = others[number]
            if gap_start >= stop:
                break
            if gap_start > start:
                out.append((start, gap_start))
            start = max(start, gap_stop)
        if start < stop:
            out.append((start, stop))
    return out


def covered(spans: Sequence[Span], others: Sequence[Span]) -> int:
    """How many bytes of `spans` lie in `others`; both as `joined` gives them."""
    return size(spans) - size(without(spans, others))
