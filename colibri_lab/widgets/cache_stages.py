"""A profile of the stages for the browser: points under the roofline, sentences, counters."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["LETTERS", "profile_facts", "stage_words"]

LETTERS = {
    "attention": "A", "router": "R", "dispatcher": "D", "expert": "E", "shared": "S", "aggregator": "G",
    "residual": "+", "mlp": "F", "embed": "M", "norm": "N", "logits": "L",
}  # fmt: skip
"""How stages are marked in the picture."""

_NAMES = {"expert": "experts", "shared": "shared expert", "mlp": "dense layers"}
_LIMIT = {"read": "read limit", "compute": "FMA limit"}
_DOES = {"read": "reading", "compute": "multiply-adds"}
_ROWS = {
    "seconds": "time", "bytes": "bytes touched", "faults": "page faults, first run",
    "cycles": "cycles", "instructions": "instructions",
    "l1d_misses": "L1d misses", "llc_misses": "LLC misses", "dtlb_misses": "dTLB misses",
}  # fmt: skip
"""Columns of the profile's table that are shown, and their names."""

_FAR = 0.5  # of the nearest limit; below it something else costs most of the time


def profile_facts(profile: Any) -> dict[str, Any]:
    """`lab.profile` for the browser: `points` by stage and pass where arithmetic was done, `unplaced` the stages
    without any, `limits` in bytes/s and FLOP/s, `words`, `counters` with
    values or the reason why there are none.
    """
    seconds = _seconds(profile)
    points: list[dict[str, Any]] = []
    unplaced: list[dict[str, Any]] = []
    for row in profile.roofline():
        phase, stage = str(row["phase"]), str(row["stage"])
        whole = sum(spent for (of, _), spent in seconds.items() if of == phase)
        point = {
            "phase": phase,
            "stage": _NAMES.get(stage, stage),
            "letter": LETTERS.get(stage, stage[:1].upper()),
            "seconds": seconds.get((phase, stage), 0.0),
            "part": seconds.get((phase, stage), 0.0) / whole if whole else 0.0,
        }
        placed = all(np.isfinite(row[name]) and row[name] > 0 for name in ("intensity", "flops_per_s"))
        if placed:
            point |= {"intensity": float(row["intensity"]), "rate": float(row["flops_per_s"])}
            point |= {"share": float(row["share_of_limit"]), "bound": str(row["bound"])}
        (points if placed else unplaced).append(point)
    limits = profile.limits
    decode = [point for point in points + unplaced if point["phase"] == "decode"] or points
    return {
        "reason": "",
        "points": points,
        "unplaced": unplaced,
        "slowest": max(decode, key=lambda point: float(point["seconds"]))["stage"] if decode else "",
        "limits": {"read": float(limits.read_bytes_per_s), "flops": float(limits.flops_per_s)},
        "remark": (
            f"{_count(profile.tokens, 'token')}, {_count(profile.threads, 'thread')}, measured in a plain session"
        ),
        "words": stage_words(points, unplaced, limits),
        "counters": _counters(profile),
    }


def stage_words(points: list[dict[str, Any]], unplaced: list[dict[str, Any]], limits: Any) -> list[str]:
    """What the profile says, a sentence or two for each kind of pass; **bold** as in Markdown."""
    rates = {"read": f"{limits.read_bytes_per_s / 1e9:.3g} GB/s", "compute": f"{limits.flops_per_s / 1e9:.3g} GFLOP/s"}
    out = []
    for phase in ("decode", "prefill"):
        stages = [point for point in points + unplaced if point["phase"] == phase]
        if not stages:
            continue
        slowest = max(stages, key=lambda point: float(point["seconds"]))
        words = f"{phase.capitalize()}: most time goes to **{slowest['stage']}** ({100 * slowest['part']:.0f} %)"
        if "bound" not in slowest:
            out.append(f"{words}, which does no arithmetic.")
            continue
        bound, share = slowest["bound"], slowest["share"]
        if share < _FAR:
            nearest = f"the nearest limit is {_DOES[bound]} ({rates[bound]}), at **{100 * share:.0f} %**"
            out.append(f"{words}; {nearest}: something else costs most of its time.")
            continue
        words += f", at **{100 * share:.0f} %** of the {_LIMIT[bound]} ({rates[bound]}), the one that binds."
        if share > 1:
            words += " Memory gives no more than that limit, so part of it comes from the processor's caches."
        out.append(words)
    experts = {point["phase"]: point for point in points if point["letter"] == "E"}
    if len(experts) == 2:
        more = experts["prefill"]["intensity"] / experts["decode"]["intensity"]
        out.append(f"In prefill each byte of the experts that is read serves {more:.1f} times as much arithmetic.")
    return out


def _seconds(profile: Any) -> dict[tuple[str, str], float]:
    """Time by (phase, stage), all layers together."""
    out: dict[tuple[str, str], float] = {}
    for row in profile.table:
        key = (str(row["phase"]), str(row["stage"]))
        out[key] = out.get(key, 0.0) + float(row["seconds"])
    return out


def _counters(profile: Any) -> list[dict[str, str | None]]:
    """Rows of a table: of the prefill and of one decoded token, what was touched and what the machine counted; None
    where it counts nothing, and the reason.
    """
    rows: list[dict[str, str | None]] = []
    for name, words in _ROWS.items():
        reason = profile.counters.get(name)
        known = not isinstance(reason, str)
        cells = {phase: _amount(name, _sum(profile, phase, name)) if known else None for phase in ("prefill", "decode")}
        why = "" if known else str(reason).removeprefix("not available here: ")
        rows.append({"name": words, **cells, "reason": why})
    return rows


def _sum(profile: Any, phase: str, name: str) -> float:
    return float(profile.table[name][profile.table["phase"] == phase].sum())


def _amount(name: str, value: float) -> str | None:
    if not np.isfinite(value):
        return None
    if name == "seconds":
        return f"{1000 * value:.3g} ms"
    return f"{value / 1e6:,.2f} MB" if name == "bytes" else f"{value:,.0f}"


def _count(n: int, one: str) -> str:
    return f"{n} {one}" if n == 1 else f"{n} {one}s"
