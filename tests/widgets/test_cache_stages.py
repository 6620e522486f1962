"""A profile as the panels of CacheLab show it: points by stage, sentences that follow, counters or reasons."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from colibri_lab.widgets.cache_stages import LETTERS, profile_facts

COUNTERS = ("cycles", "instructions", "l1d_misses", "llc_misses", "dtlb_misses")
REFUSED = "the system refuses it (perf_event_paranoid is 3)"
READ, FLOPS = 10e9, 80e9


def profile(**seconds: float) -> Any:
    """A profile of two layers; `decode_expert=0.004` gives a stage other seconds than the usual ones."""
    usual = {"attention": 0.001, "router": 0.0002, "dispatcher": 0.0001, "expert": 0.003}
    intensity = {("decode", "expert"): 1.0, ("prefill", "expert"): 16.0}
    rows, roof = [], []
    for phase in ("prefill", "decode"):
        for stage, spent in usual.items():
            spent = seconds.get(f"{phase}_{stage}", spent)
            per_byte = 0.0 if stage == "dispatcher" else intensity.get((phase, stage), 2.0)
            for layer in (0, 1):
                rows.append((phase, layer, stage, spent, 1e6 * per_byte, 1e6, 4.0, 1e5, *[np.nan] * 4))
            rate = per_byte * 1e6 / spent
            limit = min(FLOPS, READ * per_byte)
            bound = "compute" if READ * per_byte > FLOPS else "read"
            roof.append((phase, stage, per_byte or np.nan, rate or np.nan, rate / limit if limit else np.nan, bound))
    names = [("phase", "U8"), ("layer", "i4"), ("stage", "U12"), ("seconds", "f8"), ("flops", "f8"), ("bytes", "f8")]
    table = np.array(rows, [*names, ("faults", "f8"), *((name, "f8") for name in COUNTERS)])
    columns = [("phase", "U8"), ("stage", "U12"), ("intensity", "f8"), ("flops_per_s", "f8"), ("share_of_limit", "f8")]
    return SimpleNamespace(
        table=table,
        roofline=lambda: np.array(roof, [*columns, ("bound", "U7")]),
        limits=SimpleNamespace(read_bytes_per_s=READ, flops_per_s=FLOPS, threads=2),
        counters={"cycles": 8e5, **{name: f"not available here: {REFUSED}" for name in COUNTERS[1:]}},
        tokens=28,
        threads=2,
    )


def test_every_stage_with_arithmetic_is_a_point_and_the_others_are_told() -> None:
    facts = profile_facts(profile())
    assert {(p["phase"], p["stage"]) for p in facts["points"]} == {
        (phase, stage) for phase in ("prefill", "decode") for stage in ("attention", "router", "experts")
    }
    assert {p["stage"] for p in facts["unplaced"]} == {"dispatcher"}
    assert facts["remark"] == "28 tokens, 2 threads, measured in a plain session"


def test_parts_of_a_pass_sum_to_one() -> None:
    facts = profile_facts(profile())
    for phase in ("prefill", "decode"):
        parts = [p["part"] for p in facts["points"] + facts["unplaced"] if p["phase"] == phase]
        assert sum(parts) == pytest.approx(1)


def test_the_slowest_stage_of_a_decoded_token_leads() -> None:
    facts = profile_facts(profile(decode_attention=0.009))
    assert facts["slowest"] == "attention"
    part = 0.009 / (0.009 + 0.0002 + 0.0001 + 0.003)
    assert facts["words"][0].startswith(f"Decode: most time goes to **attention** ({100 * part:.0f} %)")


def test_words_name_the_limit_that_binds_and_how_near_it_is() -> None:
    decode, prefill, experts = profile_facts(profile())["words"]
    assert decode.endswith("something else costs most of its time.")
    assert "the nearest limit is reading (10 GB/s), at **" in decode and "binds" not in decode
    assert "the nearest limit is multiply-adds (80 GFLOP/s), at **" in prefill
    assert "16.0 times as much arithmetic" in experts


def test_more_than_memory_gives_is_said_to_come_from_caches() -> None:
    decode = profile_facts(fast())["words"][0]
    assert "**200 %** of the read limit" in decode and "processor's caches" in decode


def fast() -> Any:
    """Experts take all the time, and read twice what memory gives."""
    found = profile(decode_expert=0.5)
    roof = found.roofline()
    roof["share_of_limit"][(roof["phase"] == "decode") & (roof["stage"] == "expert")] = 2.0
    found.roofline = lambda: roof
    return found


def test_a_counter_is_a_sum_or_a_reason_and_never_zero() -> None:
    rows = {row["name"]: row for row in profile_facts(profile())["counters"]}
    assert rows["cycles"]["prefill"] == f"{8 * 1e5:,.0f}"
    assert rows["bytes touched"]["decode"] == "8.00 MB" and rows["page faults, first run"]["prefill"] == "32"
    for name in ("instructions", "L1d misses", "LLC misses", "dTLB misses"):
        assert rows[name]["prefill"] is None and rows[name]["decode"] is None and rows[name]["reason"] == REFUSED


def test_letters_of_stages_differ() -> None:
    assert len(set(LETTERS.values())) == len(LETTERS)
