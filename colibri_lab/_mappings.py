"""The system's own table of this process' mappings (`/proc/self/smaps`)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

__all__ = ["Mapping", "mappings"]

_LINES = re.compile(  # those that count: where a mapping lies, its sizes, its flags
    r"^(?:([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ (\d+)|"
    r"(Rss|Swap|AnonHugePages|FilePmdMapped|Private_Hugetlb|Shared_Hugetlb): +(\d+) kB|"
    r"VmFlags:(.*))",
    re.MULTILINE,
)


class Mapping(NamedTuple):
    """Addresses [start, stop), what the pages are of, and how much of it is where."""

    start: int
    stop: int
    inode: int  # of the file; 0: anonymous
    sizes: dict[str, int]  # in bytes, by the names of the table
    flags: set[str]  # two letters each: "lo" is locked


def mappings() -> list[Mapping] | None:
    """Every mapping of this process, by address; None where the system has no such table."""
    try:
        text = Path("/proc/self/smaps").read_bytes().decode("ascii", "replace")
    except OSError:
        return None
    found: list[Mapping] = []
    for start, stop, inode, name, kilobytes, flags in _LINES.findall(text):
        if start:
            found.append(Mapping(int(start, 16), int(stop, 16), int(inode), {}, set()))
        elif name:
            found[-1].sizes[name] = int(kilobytes) * 1024
        else:
            found[-1].flags.update(flags.split())
    return found
