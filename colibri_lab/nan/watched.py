"""What only the watch table of a run knows: values between two taps that broke and left finite ones behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from colibri_lab.difference.taps import parse
from colibri_lab.nan.census import bad
from colibri_lab.nan.source import Birth, Source

__all__ = ["swallowed"]

_BEHIND = {
    "attn.q.product": ("attn.q",), "attn.k.product": ("attn.k",), "attn.v.product": ("attn.v",),
    "attn.scores": ("attn.weights", "attn.out"), "attn.context": ("attn.out",),
    "moe.shared.inner.gate": ("moe.shared.output",), "moe.shared.inner.up": ("moe.shared.output",),
    "moe.shared.inner.hidden": ("moe.shared.output",), "moe.shared.gate.product": ("moe.shared.gate",),
    "mlp.inner.gate": ("mlp.output",), "mlp.inner.up": ("mlp.output",), "mlp.inner.hidden": ("mlp.output",),
}  # fmt: skip
"""The taps behind a point that is none, the first one first."""


def swallowed(source: Source) -> Iterator[Birth]:
    """Births without a value in their tap: of a token in which a point before it broke although the tap is finite.

    A sigmoid makes 0 or 1 of an infinity, a softmax 0 of −Inf, a clip its bound. Each point counts once, at the first
    token in which it broke.
    """
    for row in () if source.watch is None else source.watch.table:
        path = _tap_behind(source, row)
        if path is None:
            continue
        token = int(row["token"])
        held = source.rows(path, [token])
        tap = parse(path)
        if held is not None and tap is not None and not bad(held, path).any():
            yield Birth(path, tap.layer, tap.stage, None, np.array([token]), np.zeros(held.shape, np.bool_))


def _tap_behind(source: Source, row: Any) -> str | None:
    """The first recorded tap behind a point that broke; None for one that did not, or is a tap itself."""
    if not row["n_nan"] + row["n_inf"]:
        return None
    prefix = f"layers.{row['layer']}."
    for tap in _BEHIND.get(str(row["point"]).removeprefix(prefix), ()):
        if source.has(prefix + tap):
            return prefix + tap
    return None
