"""Claim: huge pages make the matrix product 1.83× as fast.

Two anonymous copies of the same weights, one advised onto pages of 2 MiB, one kept on small ones; how much of the first
really lies in huge pages is asked of the system. Matrices are taken in random order, with one row and with 64. Weights
that stay mapped from a file keep the file's pages, so this is about copies (and the engine's own buffers) only.
"""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

from harness import Cell, interleave, paired_ratio
from report import ratio_text

from claims.claim import HIDDEN, WIDTH, Plan, Result, judged, missing
from claims.engine import F32, Pages, products, stages, unit

SAID = "huge pages: the matrix product 1.83× as fast, TLB hits 42 % → 99.8 %"
ONE = WIDTH * HIDDEN * 4


def shuffled(pages: Pages, drawn: random.Random, limit: int) -> list[tuple[int, int, int]]:
    count = len(pages.bytes) // ONE
    return [(pages.address + i * ONE, WIDTH, HIDDEN) for i in drawn.sample(range(count), min(count, limit))]


def reserved() -> int:
    """Huge pages set aside by the administrator (nr_hugepages), which MAP_HUGETLB would need."""
    try:
        return int(Path("/proc/sys/vm/nr_hugepages").read_text())
    except OSError:
        return 0


def run(plan: Plan) -> list[Result]:
    try:
        stages(plan)
        kinds = {"4 KiB": Pages(plan.megabytes << 20, huge=False), "huge": Pages(plan.megabytes << 20, huge=True)}
    except OSError as error:
        return [missing("huge pages", SAID, str(error))]
    share = kinds["huge"].huge_bytes() / len(kinds["huge"].bytes)
    facts: dict[str, Any] = {"share of the copy in huge pages": share, "reserved huge pages (MAP_HUGETLB)": reserved()}
    if share < 0.9:
        result = missing("huge pages", SAID, f"the system gave huge pages for {share:.0%} of the copy only")
        result.facts = facts
        return [result]
    cells = []
    for m in (1, 64):
        asked = {
            name: products(plan, partial(shuffled, pages, random.Random(0), 1024 if m == 1 else 8), F32, m)
            for name, pages in kinds.items()
        }
        cells.append(Cell("product", unit(m), {"rows": m}, interleave(asked, plan.rounds)))
    one, many = (paired_ratio(c.samples["huge"], c.samples["4 KiB"]) for c in cells)
    facts |= {"huge / 4 KiB, 1 row": ratio_text(one), "huge / 4 KiB, 64 rows": ratio_text(many)}
    why = (
        f"64 rows decide: {many.median:.2f}×; one row: {one.median:.2f}×. Weights are read in order, so a page of 4 KiB"
        " costs one look-up for 64 cache lines; TLB hits themselves need counters that virtual machines rarely show"
    )
    return [Result("huge pages", SAID, f"{ratio_text(many)}×", judged(many, 1.83), why, cells, facts)]
