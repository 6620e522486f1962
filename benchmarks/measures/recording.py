"""Claim: a recording needs no more memory than the tape says, and it is written at the disk's rate.

A model computes more slowly than a disk writes, so a run says little about writing. Hence two figures, in MB/s of tape:

    run       TOKENS tokens in passes of CHUNK with `to=`, then fsync: bytes of the tape over the seconds from the
              first pass until all is on the disk. The same run in memory beside it tells what recording adds.
    writing   the rows of that run into a recording anew, by the engine itself: the rows are copied
              into the mapped file, header and tokens are written, the file takes its name, fsync. Nothing is
              computed, so the disk is the limit; 80 % of it or more is what is asked for.

The limit is taken just before and after each sample, over as many bytes: write() of 1 MiB at a time into a fresh file,
then fsync. Memory: by how much the anonymous memory of the process grew over the run, less what the session reserves
beside a tape that lies in a file.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from contenders import OURS
from harness import Cell, Sample, interleave
from serve import process_memory
from suite import Checkpoint

TOKENS = 2000
CHUNK = 100
BLOCK = 1 << 20


def run(checkpoint: Checkpoint) -> Iterator[Cell]:
    import colibri_lab as lab

    threads = max(checkpoint.plan.threads)
    with lab.open(checkpoint.path) as model, tempfile.TemporaryDirectory(dir=checkpoint.plan.cache) as folder:
        tokens = min(TOKENS, model.config.max_position_embeddings)
        ids = np.random.default_rng(1).integers(0, model.config.vocab_size, tokens)
        file = Path(folder) / "run.safetensors"
        written: list[Sample] = []

        def feed(to: Path | None) -> Sample:
            session = model.session(capture="moe", max_tokens=tokens, threads=threads, to=to)
            before, told = process_memory(), session.memory()
            start = time.perf_counter()
            for first in range(0, tokens, CHUNK):
                session.feed(ids[first : first + CHUNK], progress=False)
            computed = time.perf_counter() - start
            if to is not None:
                synchronise(to)
            seconds = time.perf_counter() - start
            planned = told["reserved"] - (told["tape"] if to is not None else 0)
            grown = process_memory().get("anonymous", 0) - before.get("anonymous", 0)
            extra = {"seconds": seconds, "computed": computed, "tape": told["tape"], "beyond": grown - planned}
            if to is not None:
                rate = disk(Path(folder) / "disk", told["tape"])
                start = time.perf_counter()
                session._recorded()._move_file(tokens)
                synchronise(to)
                taken = time.perf_counter() - start
                after = disk(Path(folder) / "disk", told["tape"])
                sample = Sample(told["tape"] / taken / 1e6, limit=(rate + after) / 2, probes=(rate, after))
                written.append(sample)
            return Sample(told["tape"] / seconds / 1e6, extra=extra)

        feed(None)  # touches the weights
        samples = interleave({OURS: lambda: feed(file), "in memory": lambda: feed(None)}, checkpoint.plan.rounds)
        point = checkpoint.point(threads=threads, tokens=tokens)
        yield Cell("recording run", "MB/s", point, samples)
        yield Cell("recording", "MB/s", point, {OURS: written})


def disk(file: Path, n_bytes: int) -> float:
    """MB/s of write() and fsync into a fresh file."""
    block = np.random.default_rng(0).bytes(BLOCK)
    start = time.perf_counter()
    with file.open("wb", buffering=0) as handle:
        for _ in range(n_bytes // BLOCK):
            handle.write(block)
        os.fsync(handle.fileno())
    seconds = time.perf_counter() - start
    file.unlink()
    return n_bytes // BLOCK * BLOCK / seconds / 1e6


def synchronise(file: Path) -> None:
    descriptor = os.open(file, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
