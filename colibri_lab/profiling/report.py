"""A profile as plain text."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.profiling.counters import COUNTERS
from colibri_lab.profiling.roofline import ABOVE_PEAK, FROM_CACHE

if TYPE_CHECKING:
    from colibri_lab.profiling.result import Profile

__all__ = ["report_of"]

HEAD = f"{'stage':<12}{'time':>11}{'of all':>8}{'GFLOP/s':>10}{'GB/s':>8}{'flop/byte':>11}{'of limit':>10}  bound"
EXPLAINED = {
    FROM_CACHE: "served from cache: its bytes lie in a cache, so they come faster than memory could give them.",
    ABOVE_PEAK: "above the peak as measured: the measurement of the peak was slowed by something else; measure again.",
}


def report_of(profile: Profile) -> str:
    """Both phases as tables by stage, then counters and page faults, or why there are none."""
    limits = profile.limits
    lines = [
        f"Profile: {profile.tokens} tokens of prefill in one pass, then one token at a time; {profile.threads} "
        f"thread{'s' * (profile.threads != 1)}, {limits.isa}; median of {len(profile.repeat_seconds)} runs.",
        f"Limits measured before: {limits.read_bytes_per_s * 1e-9:.1f} GB/s read, {limits.flops_per_s * 1e-9:.1f} "
        "GFLOP/s.",
    ]
    roofline = profile.roofline()
    for phase, what in (("prefill", "the whole prompt"), ("decode", "one token")):
        lines += ["", *_phase(profile, roofline[roofline["phase"] == phase], f"{phase}, {what}")]
    lines += ["", *(EXPLAINED[note] for note in dict.fromkeys(roofline["note"].tolist()) if note)]
    lines += ["", *_counters(profile), *_faults(profile)]
    return "\n".join(line for i, line in enumerate(lines) if line or lines[i - 1])


def _phase(profile: Profile, roofline: NDArray[Any], title: str) -> list[str]:
    phase = str(roofline["phase"][0])
    wall = profile.wall_seconds[:, 0 if phase == "prefill" else 1]
    within = profile.repeat_seconds[:, profile.table["phase"] == phase].sum(axis=1)
    total = float(roofline["seconds"].sum())
    lines = [
        f"{title}: {_time(float(np.median(wall)))} ({_time(wall.min())} to {_time(wall.max())}), of it "
        f"{_time(float(np.median(within)))} in stages",
        HEAD,
    ]
    for row in roofline:
        lines.append(
            f"{row['stage']:<12}{_time(row['seconds']):>11}{row['seconds'] / total:>8.1%}"
            f"{row['flops_per_s'] * 1e-9:>10.2f}{row['bytes_per_s'] * 1e-9:>8.2f}{row['intensity']:>11.2f}"
            f"{row['share_of_limit']:>10.1%}  {row['bound']}{', ' if row['note'] else ''}{row['note']}"
        )
    table = profile.table
    layers = table[(table["phase"] == phase) & (table["layer"] >= 0)]
    by_layer = {int(layer): float(layers["seconds"][layers["layer"] == layer].sum()) for layer in layers["layer"]}
    slowest = max(by_layer, key=lambda layer: by_layer[layer])
    fastest = min(by_layer, key=lambda layer: by_layer[layer])
    lines.append(
        f"layers: {_time(by_layer[fastest])} (layer {fastest}) to {_time(by_layer[slowest])} (layer {slowest}) each"
    )
    return lines


def _counters(profile: Profile) -> list[str]:
    """One line for each counter; those that cannot be had for one reason share a line."""
    lines: list[str] = []
    reasons: dict[str, list[str]] = {}
    for name in COUNTERS:
        found = profile.counters[name]
        if isinstance(found, str):
            reasons.setdefault(found, []).append(name)
        else:
            lines.append(f"{name}: {found:,.0f} in prefill")
    lines += [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]
    if profile.counted_share < 1:
        lines.append(
            f"The CPU has fewer counters than these: each ran for {profile.counted_share:.0%} of the time or more "
            "and is scaled up to all of it."
        )
    return lines


def _faults(profile: Profile) -> list[str]:
    first = profile.faults["prefill"]
    waited = f", {first['major']:.0f} of a disk" if first["major"] else ""
    return [f"page faults of the first prefill: {first['minor'] + first['major']:.0f}{waited}"]


def _time(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "–"
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if seconds * factor < 1000:
            return f"{seconds * factor:.3g} {unit}" if seconds * factor < 100 else f"{seconds * factor:.0f} {unit}"
    return f"{seconds:.3g} s"
