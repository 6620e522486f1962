"""A simulation in plain words."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from colibri_lab.cache.simulation import Counts, Simulation

_COLUMNS = {  # heading -> field; those of zeros alone are left out, but for the first three
    "requests": "requests",
    "hits": "hits",
    "misses": "misses",
    "pin": "pin_hits",
    "policy": "policy_hits",
    "prefetch": "prefetch_hits",
    "late": "late_hits",
    "first-use misses": "first_uses",
    "not kept": "not_kept",
    "prefetched": "prefetched",
    "wasted": "wasted",
    "bytes read": "bytes_read",
}


def table_of(simulation: Simulation) -> str:
    """One line per layer, and all together; the two kinds of passes when there are both."""
    s = simulation
    unit = "bytes" if s.unit == "bytes" else "experts"
    where = "each layer's cache" if s.scope == "layer" else "one cache for all layers"
    note = f" ({s.settings.profile})" if s.settings.profile else ""
    lines = [f"{s.policy}{note}, {s.capacity:,} {unit} in {where}"]
    shown = [
        name
        for number, (name, field) in enumerate(_COLUMNS.items())
        if number < 3 or (getattr(s, field) is not None and getattr(s, field).any())
    ]
    rows = [["layer", *shown[:3], "hit rate", *shown[3:]]]
    for row, layer in enumerate(s.trace.moe_layers):
        rows.append(_row(str(layer), s, shown, row))
    rows.append(_row("all", s, shown, None))
    if s.prefill.requests.any() and s.decode.requests.any():
        rows += [_row("prefill", s.prefill, shown, None), _row("decode", s.decode, shown, None)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines += ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(lines)


def _row(name: str, counts: Counts, shown: list[str], row: int | None) -> list[str]:
    values = [getattr(counts, _COLUMNS[column]) for column in shown]
    numbers = [f"{int(value.sum() if row is None else value[row]):,}" for value in values]
    rate = counts.hit_rate if row is None else float(counts.hit_rates[row])
    share = "—" if rate != rate else f"{rate:.1%}"
    return [name, *numbers[:3], share, *numbers[3:]]
