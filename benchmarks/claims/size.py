"""Claims: `libcolibri.so` has 32 KB, and less than 1 MB is resident before a model is opened.

The stripped library of `make engine`, with the kernels of every instruction set; and the resident bytes of a C program
that does nothing, before and after it has loaded the library (a fresh process for each sample).
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from pathlib import Path

from harness import Cell, Sample, interleave
from limits import SOURCES, compile_c

from claims.claim import FAILS, HOLDS, NOT_YET, UNMEASURABLE, Plan, Result, median, missing
from claims.engine import NotBuiltError, shared_library

SAID_SIZE = "libcolibri.so has 32 KB"
SAID_RESIDENT = "less than 1 MB resident before a model is opened"


def stripped_bytes(library: Path) -> int:
    with tempfile.TemporaryDirectory() as folder:
        small = Path(folder) / library.name
        if not shutil.which("strip"):
            raise FileNotFoundError("strip (binutils) is not here")
        subprocess.run(["strip", "-o", str(small), str(library)], check=True)
        return small.stat().st_size


def start(program: Path, library: Path, key: str) -> Sample:
    done = subprocess.run([str(program), str(library)], capture_output=True, text=True, check=True)
    line = json.loads(done.stdout)
    return Sample(line[key] / 1e6, extra=line)


def run(plan: Plan) -> list[Result]:
    try:
        library = shared_library(plan)
        size = stripped_bytes(library)
        program = compile_c(SOURCES / "resident.c", plan.cache, "-D_POSIX_C_SOURCE=200809L", "-ldl")
    except OSError as error:
        verdict = NOT_YET if isinstance(error, NotBuiltError) else UNMEASURABLE
        claims = {"size": SAID_SIZE, "resident": SAID_RESIDENT}
        return [missing(name, said, str(error), verdict) for name, said in claims.items()]
    verdict = HOLDS if size <= 32_000 else FAILS
    why = "the kernels of every instruction set, attention, taps, and readers of JSON and safetensors in one library"
    results = [
        Result("size", SAID_SIZE, f"{size / 1e3:.0f} KB stripped", verdict, why, facts={"bytes, stripped": size})
    ]
    if not Path("/proc/self/statm").exists():
        return [*results, missing("resident", SAID_RESIDENT, "the system does not tell resident bytes in /proc")]
    asked = {
        "a program that does nothing": lambda: start(program, library, "before"),
        "with the library": lambda: start(program, library, "after"),
    }
    cell = Cell("resident", "MB", {}, interleave(asked, plan.rounds), higher_is_better=False)
    both, bare = median(cell, "with the library"), median(cell, "a program that does nothing")
    added = both - bare
    why = f"the library adds {added:.2f} MB to a process that has {bare:.1f} MB without it (the C library, mostly)"
    verdict = HOLDS if added < 1.0 else FAILS
    return [*results, Result("resident", SAID_RESIDENT, f"{added:.2f} MB added", verdict, why, [cell])]
