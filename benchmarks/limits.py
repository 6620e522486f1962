"""limits.py: what the machine can do: bytes read and multiply-adds per second, through csrc/cachelab, compiled at first
use.

The read ceiling walks the mapped weight files as tokens do: all matrices of a layer in their order, of its experts as
many as a token chooses (drawn anew each time), every matrix split by rows over the threads. How many places a thread
reads in turn and how far ahead it prefetches is tried once per thread count; the fastest way is the ceiling.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import random
import shutil
import statistics
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
from models import made

SOURCES = Path(__file__).parent / "c"
CSRC = Path(__file__).resolve().parent.parent / "csrc"
MEASURING = [CSRC / "cachelab" / "limits.c", CSRC / "cachelab" / "fma.c"]
NATIVE = ("-march=native", "-mcpu=native", "-O3")  # the first that the compiler takes; the last says nothing new
WAYS = [(streams, ahead) for streams in (1, 2, 4, 8) for ahead in (0, 512, 2048)]
TRIALS = 3
FMA_ROUNDS = 20_000_000  # a tenth of a second on a core that does 100 GFLOP/s with 8 lanes and 12 chains


class Range(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("rows", ctypes.c_int64), ("row_bytes", ctypes.c_int64))


def compiler() -> str:
    """The system's C compiler. Raises FileNotFoundError when there is none."""
    for name in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        if name and shutil.which(name):
            return name
    raise FileNotFoundError("no C compiler (cc, gcc, clang) to build the measurement of the machine's limits")


def compile_c(source: Path, cache: Path, *arguments: str, depends: bytes = b"") -> Path:
    """Compiles one C file for this machine, once for each content of it, the headers beside it and `depends`."""
    command = [compiler(), "-O3", "-ffp-contract=fast", "-pthread"]
    text = (
        source.read_bytes()
        + b"".join(header.read_bytes() for header in sorted(SOURCES.glob("*.h")))
        + " ".join([*command, *arguments]).encode()
        + depends
    )
    target = cache / "bin" / f"{source.stem}-{hashlib.sha256(text).hexdigest()[:16]}"

    def build(partial: Path) -> None:
        for native in NATIVE:
            done = subprocess.run(
                [*command, native, str(source), *arguments, "-o", str(partial)], capture_output=True, text=True
            )
            if done.returncode == 0:
                return
        raise OSError(f"{command[0]} cannot compile {source.name}: {done.stderr.strip()[:500]}")

    return made(target, build)


def measuring_library(cache: Path) -> Path:
    """The workbench's own measurement of a machine (colibri_cachelab.h), as a shared library. Raises OSError."""
    if not all(source.is_file() for source in MEASURING):
        raise FileNotFoundError("the engine's sources are not here; run the suite in the source tree")
    first, *others = map(str, MEASURING)
    flags = ("-shared", "-fPIC", "-D_POSIX_C_SOURCE=200809L", f"-I{CSRC / 'include'}")
    depends = b"".join(path.read_bytes() for path in (*MEASURING, *sorted((CSRC / "include").glob("*.h"))))
    return compile_c(Path(first), cache, *others, *flags, depends=depends)


class Limits:
    """The read stream and the multiply-adds of this machine, for the weights of one model."""

    def __init__(self, cache: Path) -> None:
        library = ctypes.CDLL(str(measuring_library(cache)))
        self._read_seconds, self._fma_rate = library.cachelab_read_seconds, library.cachelab_fma_rate
        self._read_seconds.restype = self._fma_rate.restype = ctypes.c_double
        self._read_seconds.argtypes = (ctypes.POINTER(Range), ctypes.c_int64, *[ctypes.c_int] * 3)
        self._fma_rate.argtypes = (ctypes.c_char_p, ctypes.c_int, ctypes.c_int64)
        self._mapped: dict[str, np.ndarray[Any, Any]] = {}
        self._steps: list[dict[str, Any]] = []
        self._ways: dict[int, tuple[int, int]] = {}
        self._random = random.Random(0)

    def map(self, steps: list[dict[str, Any]]) -> None:
        """`steps` of one token, in order: {"choose": k, "of": [[matrix, ...], ...]}, a matrix being file, offset,
        rows, row_bytes.
        """
        self._steps, self._ways = steps, {}
        for name in {matrix[0] for step in steps for group in step["of"] for matrix in group}:
            if name not in self._mapped:
                with open(name, "rb") as file:
                    self._mapped[name] = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        everything = [matrix for step in steps for group in step["of"] for matrix in group]
        self._seconds(everything, threads=1, way=(1, 0))  # every page is mapped before anything counts

    def token_bytes(self) -> int:
        """Bytes of weights that one token reads."""
        return sum(
            step["choose"] * sum(rows * row_bytes for _, _, rows, row_bytes in step["of"][0]) for step in self._steps
        )

    def read_gbs(self, threads: int, seconds: float) -> float:
        """The read ceiling now, in GB/s, over about `seconds`."""
        if threads not in self._ways:
            figures = {way: statistics.median(self._stream(threads, way, 1) for _ in range(TRIALS)) for way in WAYS}
            self._ways[threads] = max(figures, key=lambda way: figures[way])
        way = self._ways[threads]
        once = self._stream(threads, way, 1)
        tokens = max(1, round(seconds * once * 1e9 / self.token_bytes()))
        return self._stream(threads, way, tokens)

    def way(self, threads: int) -> dict[str, int]:
        streams, ahead = self._ways[threads]
        return {"streams_per_thread": streams, "prefetch_bytes": ahead}

    def fma_gflops(self, threads: int) -> float:
        """Multiply-adds now, in GFLOP/s (each counts as two operations)."""
        return float(self._fma_rate(None, threads, FMA_ROUNDS)) * 1e-9

    def _stream(self, threads: int, way: tuple[int, int], tokens: int) -> float:
        matrices = [
            matrix
            for _ in range(tokens)
            for step in self._steps
            for group in sorted(self._random.sample(range(len(step["of"])), step["choose"]))
            for matrix in step["of"][group]
        ]
        return tokens * self.token_bytes() / self._seconds(matrices, threads, way) * 1e-9

    def _seconds(self, matrices: list[tuple[str, int, int, int]], threads: int, way: tuple[int, int]) -> float:
        ranges = (Range * len(matrices))()
        for place, (file, offset, rows, row_bytes) in zip(ranges, matrices, strict=True):
            place.data, place.rows, place.row_bytes = self._mapped[file].ctypes.data + offset, rows, row_bytes
        seconds = float(self._read_seconds(ranges, len(matrices), threads, *way))
        if seconds <= 0:
            raise OSError(f"{threads} threads could not be made")
        return seconds
