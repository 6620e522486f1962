"""Caches and TLBs of a processor in software: what a stream of addresses would find in them, on any machine.

Every level is a set-associative table that evicts the least recently used block of a set. An address asks the first
level, and the next one when that misses; every level that was asked then holds the block. The TLBs are asked for every
address as well, for its page. What processors add (prefetching, hashed sets, pseudo-LRU, sharing between cores, levels
that exclude one another) is left out: counts compare layouts and page sizes, they are no hardware counters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.errors import ArgumentError, is_whole

_PIECE = 1 << 20  # addresses between two looks for Ctrl-C
_LOOKS = 1 << 27  # the same in ways looked at
_MOST = 1 << 28  # entries of a table: 2 GiB of memory
_LARGEST = 1 << 40  # bytes of a line or page


@dataclass(frozen=True)
class Level:
    """A cache: `n_bytes` in sets of `ways` lines of `line_bytes`. Fully associative: n_bytes / line_bytes ways.

    Raises ArgumentError unless the line is a power of two, the bytes are a whole number of sets, and the lines no more
    than 2^28. The number of sets need not be a power of two, as in last levels made of slices.
    """

    name: str
    n_bytes: int
    ways: int
    line_bytes: int = 64

    def __post_init__(self) -> None:
        _check_block(f"a line of {self.name}", self.line_bytes)
        _check_count(f"{self.name}: ways", self.ways)
        _check_count(f"{self.name}: bytes", self.n_bytes)
        _plain(self, "n_bytes", "ways", "line_bytes")
        if self.n_bytes % (self.ways * self.line_bytes):
            raise ArgumentError(
                f"{self.name}: {self.n_bytes} bytes are no whole number of sets of {self.ways} lines of "
                f"{self.line_bytes} bytes; the nearest size is {_nearest(self.n_bytes, self.ways * self.line_bytes)}"
            )
        _check_size(self.name, "lines", self.n_bytes // self.line_bytes)

    @property
    def sets(self) -> int:
        """Sets: line number modulo this says where a line may lie."""
        return self.n_bytes // (self.ways * self.line_bytes)

    @property
    def block_bytes(self) -> int:
        """Bytes that one entry stands for: a line."""
        return self.line_bytes


@dataclass(frozen=True)
class Tlb:
    """A translation buffer: `entries` in sets of `ways`, each for a page of `page_bytes` (4,096, or 2 MiB: 1 << 21).

    Raises ArgumentError unless the page is a power of two and the entries are a whole number of sets.
    """

    name: str
    entries: int
    ways: int
    page_bytes: int = 4096

    def __post_init__(self) -> None:
        _check_block(f"a page of {self.name}", self.page_bytes)
        _check_count(f"{self.name}: ways", self.ways)
        _check_count(f"{self.name}: entries", self.entries)
        _plain(self, "entries", "ways", "page_bytes")
        if self.entries % self.ways:
            raise ArgumentError(
                f"{self.name}: {self.entries} entries are no whole number of sets of {self.ways}; the nearest number "
                f"is {_nearest(self.entries, self.ways)}"
            )
        _check_size(self.name, "entries", self.entries)

    @property
    def sets(self) -> int:
        """Sets: page number modulo this says where a page may stand."""
        return self.entries // self.ways

    @property
    def block_bytes(self) -> int:
        """Bytes that one entry stands for: a page."""
        return self.page_bytes

    @property
    def reach(self) -> int:
        """Bytes that all entries cover."""
        return self.entries * self.page_bytes


@dataclass(frozen=True)
class Count:
    """What one level or TLB was asked."""

    name: str
    accesses: int  # of the first: all addresses; of the others: the misses of the one before
    hits: int
    misses: int
    block_bytes: int  # of a line or page

    @property
    def bytes(self) -> int:
        """Bytes that its misses cover: those fetched into a cache; the pages whose address a TLB had to look up."""
        return self.misses * self.block_bytes


@dataclass(frozen=True, repr=False)
class Traffic:
    """What every level was asked, caches and TLBs apart; `traffic["L2"]` finds one by name."""

    levels: tuple[Count, ...]
    tlbs: tuple[Count, ...]

    def __getitem__(self, name: str) -> Count:
        for count in (*self.levels, *self.tlbs):
            if count.name == name:
                return count
        names = ", ".join(count.name for count in (*self.levels, *self.tlbs)) or "none"
        raise ArgumentError(f"no level or TLB is called {name!r:.80}; there are {names}")

    def report(self) -> str:
        """A plain table."""
        lines = [f"{'':<12} {'accesses':>12} {'hits':>12} {'misses':>12} {'miss ratio':>10} {'bytes':>14}"]
        for count in (*self.levels, *self.tlbs):
            ratio = f"{count.misses / count.accesses:.2%}" if count.accesses else "-"
            lines.append(
                f"{count.name:<12} {count.accesses:>12} {count.hits:>12} {count.misses:>12} {ratio:>10} "
                f"{count.bytes:>14}"
            )
        return "\n".join(lines)

    def __repr__(self) -> str:
        return self.report()


Stream = NDArray[np.integer[Any]] | Iterable[NDArray[np.integer[Any]]]


def simulate_addresses(addresses: Stream, levels: Sequence[Level] = (), tlbs: Sequence[Tlb] = ()) -> Traffic:
    """What these addresses find in empty caches and TLBs, one access each, in their order.

    `addresses`: whole numbers in bytes, one array or any iterable of arrays (such as `stage_addresses` gives), which
    are read one by one. `levels` from the nearest on, and `tlbs` likewise; both may be empty. Ctrl-C ends it.
    Raises ArgumentError for negative addresses, TLBs of different page sizes in one chain, and two of one name.
    """
    from colibri_lab._cachelab import Chain

    _check_tables("levels", levels, Level)
    _check_tables("tlbs", tlbs, Tlb)
    sides: tuple[Sequence[Level | Tlb], Sequence[Level | Tlb]] = (levels, tlbs)
    names = [table.name for tables in sides for table in tables]
    if len(set(names)) < len(names):
        raise ArgumentError(f"two levels or TLBs have the same name: {', '.join(names)}")
    if len({tlb.page_bytes for tlb in tlbs}) > 1:
        raise ArgumentError(
            "the TLBs of one chain translate pages of one size: " + ", ".join(f"{t.name} {t.page_bytes}" for t in tlbs)
        )
    chains = [Chain([(t.block_bytes.bit_length() - 1, t.sets, t.ways) for t in tables]) for tables in sides]
    step = max(1, min(_PIECE, _LOOKS // max((t.ways for tables in sides for t in tables), default=1)))
    if not isinstance(addresses, Iterable):
        raise ArgumentError(f"addresses are whole numbers, in one array or several; this is {addresses!r:.80}")
    for piece in [addresses] if isinstance(addresses, np.ndarray) else addresses:
        flat = _checked(piece)
        for start in range(0, len(flat), step):
            for chain in chains:
                chain.walk(flat[start : start + step])
    found = [
        tuple(
            Count(table.name, accesses, accesses - misses, misses, table.block_bytes)
            for table, (accesses, misses) in zip(tables, chain.counts(), strict=True)
        )
        for tables, chain in zip(sides, chains, strict=True)
    ]
    return Traffic(found[0], found[1])


def _checked(piece: Any) -> NDArray[np.int64]:
    array = np.asarray(piece)
    if array.dtype.kind not in "iu":
        raise ArgumentError(f"addresses are whole numbers; these are {array.dtype}")
    flat = array.reshape(-1)
    if flat.size and (int(flat.min()) < 0 or int(flat.max()) >= 1 << 63):
        raise ArgumentError(f"addresses are 0 to 2^63 − 1, not {flat.min()} to {flat.max()}")
    return flat.astype(np.int64)


def _check_block(what: str, size: Any) -> None:
    if not is_whole(size) or size < 1 or size & (size - 1):
        near = f"; the nearest is {1 << max(int(size).bit_length() - 1, 0)}" if is_whole(size) and size > 0 else ""
        raise ArgumentError(f"{what} is a power of two in bytes, not {size!r:.40}{near}")
    if size > _LARGEST:
        raise ArgumentError(f"{what} has at most {_LARGEST} bytes, not {size}")


def _check_count(what: str, number: Any) -> None:
    if not is_whole(number) or number < 1:
        raise ArgumentError(f"{what} must be a whole number, 1 or more; this is {number!r:.40}")


def _check_size(name: str, what: str, number: int) -> None:
    if number > _MOST:
        raise ArgumentError(f"{name}: {number} {what} are too many to keep here; there may be {_MOST}")


def _check_tables(what: str, given: Any, kind: type) -> None:
    if not isinstance(given, Sequence) or not all(isinstance(table, kind) for table in given):
        raise ArgumentError(f"{what} are a list of {kind.__name__}(…), the nearest first; this is {given!r:.80}")


def _plain(table: Level | Tlb, *names: str) -> None:
    """Python's whole numbers in place of NumPy's, which overflow."""
    for name in names:
        object.__setattr__(table, name, int(getattr(table, name)))


def _nearest(number: int, step: int) -> int:
    return max(1, round(number / step)) * step
