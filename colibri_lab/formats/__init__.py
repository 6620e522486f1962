"""Recordings of other programs, each read by a small module of its own into a `Trace`.

A format has a `NAME` (what `format=` takes), `ABOUT` (one line), `USES` (the keywords that it takes), `recognise` (by
content alone) and `load`. `docs/formats.md` has the table.
"""

from __future__ import annotations

from typing import Any

from colibri_lab.formats import debugger, kl_base, olmoe, route_trace, sglang, sglang_recorder, usage, vllm
from colibri_lab.formats.counts_csv import MoeTrace, SglangCsv
from colibri_lab.formats.imatrix import Imatrix, ImatrixDat
from colibri_lab.formats.sizes import said
from colibri_lab.formats.source import Source

__all__ = ["FORMATS", "Source", "recognise", "said"]

FORMATS: dict[str, Any] = {
    one.NAME: one
    for one in (
        vllm, sglang, sglang_recorder, SglangCsv, Imatrix, ImatrixDat, MoeTrace, kl_base, debugger, olmoe, route_trace,
        usage,
    )
}  # fmt: skip
"""All formats by name."""


def recognise(source: Source) -> list[str]:
    """Names of the formats that take the file for theirs: one, or none."""
    return [name for name, one in FORMATS.items() if one.recognise(source)]
