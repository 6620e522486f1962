"""Claim: what is not captured costs nothing: the instructions of capture "none" against an engine that cannot capture.

The other engine is the same one with core/stages.c compiled with COLIBRI_WITHOUT_CAPTURE, where no stage asks whether a
tap is kept; looking up where the rows of a buffer lie is in both, as an engine without taps has buffers too. valgrind
counts what a session's feed executes, everything in it, so neither opening nor the machine's other work is in the
figure. The model is the smallest of the suite: the more arithmetic, the less a question weighs.
valgrind runs AVX2 and hides AVX-512, so that the AVX2 path is in force under it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from harness import Cell, Sample
from models import TINY, checkpoint
from programs import FOLDER, engine_file, on_engine
from suite import Plan

DTYPE = "bf16"
TOKENS = 64
CHUNKS = {"prefill": TOKENS, "decode": 1}
COUNTER = ("--tool=callgrind", "--toggle-collect=colibri_session_feed", "--callgrind-out-file=/dev/null")
NO_LONG_VECTORS = ("-O1",)  # of the program around the engine, which is compiled for this very CPU


def counted(valgrind: str, program: Path, model: Path, chunk: int) -> tuple[int, str]:
    """(instructions of all feeds, the code path). Raises OSError with the last words of valgrind."""
    command = [valgrind, *COUNTER, str(program), str(model), str(TOKENS), str(chunk)]
    done = subprocess.run(command, capture_output=True, text=True)
    found = re.search(r"Collected : (\d+)", done.stderr)
    if done.returncode or not found:
        raise OSError(f"valgrind counts nothing: {done.stderr.strip()[-300:]}")
    return int(found[1]), done.stdout.strip()


def run(plan: Plan) -> Iterator[Cell]:
    valgrind = shutil.which("valgrind")
    if not valgrind:
        raise FileNotFoundError("valgrind is not installed")
    stages = engine_file("core/stages.o", f"{FOLDER}/without-capture", "CFLAGS=-O3 -DNDEBUG -DCOLIBRI_WITHOUT_CAPTURE")
    programs = {
        "none": on_engine("instructions", plan.cache, flags=NO_LONG_VECTORS),
        "without capture": on_engine("instructions", plan.cache, stages, flags=NO_LONG_VECTORS),
    }
    model = checkpoint(TINY, DTYPE, plan.cache)
    for work, chunk in CHUNKS.items():
        samples, isa = {}, ""
        for name, program in programs.items():
            count, isa = counted(valgrind, program, model, chunk)
            samples[name] = [Sample(count)]
        point = {"model": TINY.name, "dtype": DTYPE, "work": work, "tokens": TOKENS, "isa": isa}
        yield Cell("instructions", "instructions", point, samples, higher_is_better=False)
