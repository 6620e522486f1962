"""Claim: the matrix product, with its fixed order of sums, runs near the multiply-add peak on weights that come from
memory.

A C program (c/kernel.c) on the engine's own objects, so it needs the source tree and a C compiler; nothing of Python,
models or threads stands between. Each round is one run of the program, which measures the peak before and after every
figure.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator

from harness import Cell, Sample
from limits import MEASURING
from programs import on_engine
from suite import Plan

MEGABYTES = 144  # at least 128 MiB, more than any cache here holds


def run(plan: Plan, megabytes: int = MEGABYTES) -> Iterator[Cell]:
    program = on_engine("kernel", plan.cache, MEASURING[1])
    for threads in plan.threads:
        cells: dict[tuple[str, int, int], Cell] = {}
        for _ in range(plan.process_rounds):
            command = [str(program), str(threads), str(megabytes), str(min(plan.seconds, 0.5))]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=dict(os.environ))
            for line in map(json.loads, done.stdout.splitlines()):
                key = (line["dtype"], line["K"], line["rows"])
                if key not in cells:
                    point = {"dtype": key[0], "threads": threads, "K": key[1], "rows": key[2], "isa": line["isa"]}
                    cells[key] = Cell("kernel", "GFLOP/s", point, {"colibri": []})
                limit = (line["before"] + line["after"]) / 2
                cells[key].samples["colibri"].append(Sample(line["gflops"], limit, (line["before"], line["after"])))
        yield from cells.values()
