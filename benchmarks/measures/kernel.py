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
from pathlib import Path

from harness import Cell, Sample
from limits import SOURCES, compile_c
from suite import Plan

ROOT = Path(__file__).resolve().parent.parent.parent
MEGABYTES = 144  # at least 128 MiB, more than any cache here holds


def build(cache: Path) -> Path:
    """The program, on the engine as it is now. Raises OSError with the compiler's words."""
    if not (ROOT / "csrc" / "Makefile").is_file():
        raise FileNotFoundError("the engine's sources are not here; run the suite in the source tree")
    library = ROOT / "build-engine" / "libcolibri.a"
    done = subprocess.run(
        ["make", "-C", str(ROOT / "csrc"), "../build-engine/libcolibri.a"], capture_output=True, text=True
    )
    if done.returncode:
        raise OSError(f"the engine does not compile: {done.stderr.strip()[-500:]}")
    flags = ("-D_POSIX_C_SOURCE=200809L", "-D_DEFAULT_SOURCE", f"-I{ROOT / 'csrc' / 'include'}")
    return compile_c(SOURCES / "kernel.c", cache, *flags, str(library), "-lm", depends=library.read_bytes())


def run(plan: Plan, megabytes: int = MEGABYTES) -> Iterator[Cell]:
    program = build(plan.cache)
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
