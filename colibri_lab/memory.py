"""Where memory goes: the panels of `model.memory()` and `session.memory()`.

Resident size alone misleads: most of it is weights that lie in the page cache, which other processes share and the
system takes back when memory is short. So files, anonymous memory and huge pages are told apart, as the system's own
table of mappings (`/proc/self/smaps`) tells them. Where there is no such table, the sizes that need it are −1.
"""

from __future__ import annotations

import html
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from colibri_lab._engine import core
from colibri_lab._mappings import Mapping, mappings

if TYPE_CHECKING:
    from colibri_lab.model import Model
    from colibri_lab.session import Session

__all__ = ["MemoryPanel", "model_memory", "session_memory"]

UNKNOWN = -1  # bytes that this system does not tell
PROCESS_SIZES = {  # as /proc/self/status calls them
    "VmRSS": "resident",
    "RssFile": "file",
    "RssAnon": "anonymous",
    "RssShmem": "shared",
    "HugetlbPages": "hugetlb",
}


class MemoryPanel(dict[str, Any]):
    """Sizes in bytes by name; shown as a small table."""

    def __init__(self, title: str, rows: list[tuple[str, str]], values: dict[str, Any]) -> None:
        super().__init__(values)
        self._title, self._rows = title, rows

    def __repr__(self) -> str:
        width = max(len(name) for name, _ in self._rows)
        return "\n".join([self._title, *(f"  {name:<{width}}  {text}" for name, text in self._rows)])

    def _repr_html_(self) -> str:
        cell = '<td style="text-align:left;padding:0 1em 0 0">'
        rows = "".join(f"<tr>{cell}{html.escape(a)}</td>{cell}{html.escape(b)}</td></tr>" for a, b in self._rows)
        return f"<table><caption>{html.escape(self._title)}</caption>{rows}</table>"


def session_memory(session: Session) -> MemoryPanel:
    """What `Session.memory` returns."""
    return _session_figures(session, mappings()).panel


def model_memory(model: Model) -> MemoryPanel:
    """What `Model.memory` returns."""
    engine, table = model._engine, mappings()
    files = [(address, size) for _, address, size in engine.files() if size]
    file_use = _use(table, files)
    blocks = {block.address: block for block in engine.blocks()}
    sessions = [_session_figures(session, table) for session in list(model._sessions)]
    kept = [block for address, block in blocks.items() if all(address not in session.addresses for session in sessions)]
    anonymous, kept_use = (_use(table, _ranges(some)) for some in (blocks.values(), kept))
    n_failed, failed_bytes = core.failed_unmaps()
    values: dict[str, Any] = {
        "mapped": sum(size for _, size in files),
        "resident": file_use.resident,
        "huge_file": file_use.huge,
        "reserved": sum(block.mapped for block in blocks.values()),
        "anonymous": anonymous.resident,
        "huge": anonymous.huge,
        "swapped": anonymous.swapped,
        "kept_by_views": {"reserved": sum(block.mapped for block in kept), "resident": kept_use.resident},
        "copied_bytes": sum(session.panel["copied_bytes"] for session in sessions),
        "failed_unmaps": n_failed,
        "users": engine.users(),
        "sessions": [session.panel for session in sessions],
        "process": _process(),
    }
    process = values["process"]
    rows = [
        (
            "weights in files",
            f"{_size(values['mapped'])} mapped, {_in_memory(file_use)}; the page cache's own, given back when memory "
            "is short",
        ),
        ("anonymous", f"{_size(values['reserved'])} reserved, {_in_memory(anonymous)}"),
        *((f"session {number}", session.line) for number, session in enumerate(sessions, 1)),
        ("kept by views alone", f"{_size(kept_use.resident)} in memory"),
        ("copied", f"{_size(values['copied_bytes'])} by resets under live views"),
        (
            "whole process",
            f"{_size(process['resident'])} in memory: {_size(process['file'])} from files, "
            f"{_size(process['anonymous'])} anonymous, {_size(process['shared'])} shared; "
            f"{_size(process['hugetlb'])} more from the pool of huge pages",
        ),
    ]
    if n_failed:
        rows.append(("not given back", f"{_size(failed_bytes)}: the system refused {n_failed} unmappings"))
    return MemoryPanel(f"memory of {model.path.name or model.path}", rows, values)


# ---- one session ----


class _SessionFigures(NamedTuple):
    panel: MemoryPanel
    line: str  # the panel in one line
    addresses: frozenset[int]  # of its blocks


def _session_figures(session: Session, table: list[Mapping] | None) -> _SessionFigures:
    blocks, planned = session._engine.blocks(), session._engine.memory()
    tape, scratch = blocks[:2]
    use = _use(table, _ranges(blocks))
    values: dict[str, Any] = {
        **planned,
        "rounding": sum(block.mapped - block.planned for block in blocks),
        "resident": use.resident,
        "huge": use.huge,
        "swapped": use.swapped,
        "pages": {
            name: {"kind": block.pages, "bytes": block.page_bytes, "why": block.why}
            for name, block in (("tape", tape), ("scratch", scratch))
        },
    }
    what = f"{session._engine.length} of {session.max_tokens} tokens, capture {', '.join(session.capture)}"
    rows = [
        (
            "reserved",
            f"{_size(values['reserved'])}, and {_size(values['rounding'])} to fill whole pages; {_in_memory(use)}",
        ),
        ("tape", f"{_size(values['tape'])}, of it keys and values {_size(values['kv_cache'])}; on {_pages(tape)}"),
        ("scratch", f"{_size(values['scratch'])}; on {_pages(scratch)}"),
        ("copied", f"{_size(values['copied_bytes'])} by resets under live views"),
    ]
    return _SessionFigures(
        MemoryPanel(f"memory of a session: {what}", rows, values),
        f"{what}: {_size(values['reserved'])} reserved, {_in_memory(use)}; scratch on {_pages(scratch)}",
        frozenset(block.address for block in blocks),
    )


def _pages(block: core.Block) -> str:
    size = f"{block.page_bytes >> 20} MiB" if block.page_bytes >= 1 << 20 else f"{block.page_bytes >> 10} KiB"
    return f"{block.pages} pages of {size} ({block.why})"


def _size(count: int) -> str:
    """Bytes in words: "3.2 MB"; three figures."""
    if count < 0:
        return "unknown"
    size, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 999.5:
            break
        size, unit = size / 1000, larger
    return f"{size:.3g} {unit}"


def _in_memory(use: _Use) -> str:
    text = f"{_size(use.resident)} in memory"
    if use.resident > 0:
        text += f", {_size(use.huge)} of it on huge pages" if use.huge else ", none of it on huge pages"
    return text + (f", {_size(use.swapped)} swapped out" if use.swapped > 0 else "")


# ---- the system's table ----


class _Use(NamedTuple):
    resident: int
    huge: int
    swapped: int


def _ranges(blocks: Iterable[core.Block]) -> list[tuple[int, int]]:
    return [(block.address, block.mapped) for block in blocks]


def _use(table: list[Mapping] | None, ranges: Iterable[tuple[int, int]]) -> _Use:
    """What lies in memory of (address, bytes). Neither files nor blocks share a mapping with anything else."""
    if table is None:
        return _Use(UNKNOWN, UNKNOWN, UNKNOWN)
    resident = huge = swapped = 0
    spans = sorted((address, address + size) for address, size in ranges)
    place = 0
    for mapping in table:
        while place < len(spans) and spans[place][1] <= mapping.start:
            place += 1
        if place == len(spans):
            break
        if mapping.stop > spans[place][0]:
            pool = mapping.sizes.get("Private_Hugetlb", 0) + mapping.sizes.get("Shared_Hugetlb", 0)
            resident += mapping.sizes.get("Rss", 0) + pool
            huge += mapping.sizes.get("AnonHugePages", 0) + mapping.sizes.get("FilePmdMapped", 0) + pool
            swapped += mapping.sizes.get("Swap", 0)
    return _Use(resident, huge, swapped)


def _process() -> dict[str, int]:
    """The whole process: what its resident size consists of."""
    sizes = dict.fromkeys(PROCESS_SIZES.values(), UNKNOWN)
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return sizes
    for line in lines:
        key, _, rest = line.partition(":")
        if key in PROCESS_SIZES:
            sizes[PROCESS_SIZES[key]] = int(rest.split()[0]) * 1024
    return sizes
