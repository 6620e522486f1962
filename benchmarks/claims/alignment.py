"""Claim: matrices that begin at a multiple of 64 bytes multiply 22 % faster.

The engine's kernel on the same memory, read from its first byte and from its fifth (so that most loads of 32 bytes
cross the end of a cache line every second time), with one row and with 64, from memory and from the cache.
"""

from __future__ import annotations

from functools import partial

from harness import Cell, interleave, paired_ratio
from report import ratio_text

from claims.claim import HIDDEN, WIDTH, Plan, Result, judged, missing
from claims.engine import F32, Pages, products, stages, unit

SAID = "64-byte alignment makes the matrix product 22 % faster"
PLACES = {"aligned": 0, "off by 4 bytes": 4}
ONE = WIDTH * HIDDEN * 4


def matrices(at: int, count: int) -> list[tuple[int, int, int]]:
    return [(at + i * ONE, WIDTH, HIDDEN) for i in range(count)]


def run(plan: Plan) -> list[Result]:
    try:
        stages(plan)
        pages = Pages((plan.megabytes << 20) + 4096, huge=False)
    except OSError as error:
        return [missing("alignment", SAID, str(error))]
    cells = []
    for weights, count in (("memory", plan.megabytes * (1 << 20) // ONE), ("cache", 1)):
        for m in (1, 64):
            asked = {
                name: products(plan, partial(matrices, pages.address + offset, count), F32, m)
                for name, offset in PLACES.items()
            }
            point = {"weights from": weights, "rows": m}
            cells.append(Cell("product", unit(m), point, interleave(asked, plan.rounds)))
    gains = {
        f"aligned / not, from {c.point['weights from']}, {c.point['rows']} rows": paired_ratio(*c.samples.values())
        for c in cells
    }
    best = max(gains.values(), key=lambda gain: gain.median)
    gemm = gains["aligned / not, from memory, 64 rows"]
    why = f"64 rows from memory decide: {gemm.median - 1:+.0%}; the best of the four cases: {best.median - 1:+.0%}"
    facts = {name: ratio_text(gain) for name, gain in gains.items()}
    return [Result("alignment", SAID, f"{ratio_text(gemm)}×", judged(gemm, 1.22), why, cells, facts)]
