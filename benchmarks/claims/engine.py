"""engine.py: the engine's own objects for claims that C measures, and memory laid out for them.

Needs a C compiler and the engine's sources; both are asked for by FileNotFoundError, which run.py and the notebook turn
into "not measurable".
"""

from __future__ import annotations

import ctypes
import mmap
import platform
from collections.abc import Callable, Sequence
from functools import cache as remembered
from pathlib import Path
from typing import Any

import numpy as np
from harness import Sample
from limits import SOURCES, compile_c
from programs import DEFINES, FOLDER, ROOT, engine_file

from claims.claim import Plan

CSRC = ROOT / "csrc"
FLAGS = ("-shared", "-fPIC", "-fvisibility=default", "-ffp-contract=off", f"-I{CSRC / 'include'}")
F32, BF16 = 0, 2  # colibri_dtype
TABLES = {"x86_64": "kernels_avx2", "amd64": "kernels_avx2", "aarch64": "kernels_neon", "arm64": "kernels_neon"}
GATES_RENORMALISED, GATES_RAW = 2, 4  # colibri_gate_mode
HUGE = 2 << 20


class Matrix(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int),
        ("rows", ctypes.c_int64),
        ("cols", ctypes.c_int64),
    )


def compiled(name: str, parts: Sequence[str], plan: Plan) -> ctypes.CDLL:
    """benchmarks/c/NAME.c with some files of csrc, as a library. Raises OSError when that cannot be."""
    sources = [CSRC / part for part in parts]
    for source in sources:
        if not source.is_file():
            raise FileNotFoundError("the engine's sources are not here; run this in the source tree")
    depends = b"".join(path.read_bytes() for path in sorted(CSRC.rglob("*.[ch]")))
    library = compile_c(SOURCES / f"{name}.c", plan.cache, *map(str, sources), *DEFINES, *FLAGS, "-lm", depends=depends)
    return ctypes.CDLL(str(library))


@remembered
def selection(plan: Plan) -> Any:
    """select_seconds(method, scores, rows, n, repeats, ids)."""
    function = compiled("selection", ["kernels/topk.c"], plan).select_seconds
    function.restype = ctypes.c_double
    function.argtypes = (ctypes.c_int, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p)
    return function


@remembered
def stages(plan: Plan) -> Any:
    """The library with matmul_seconds and route_seconds."""
    table = TABLES.get(platform.machine().lower())
    if table is None or (table == "kernels_avx2" and not _has_avx2()):
        raise FileNotFoundError("this CPU has neither AVX2 nor NEON")
    parts = [f"kernels/{table}.c", "kernels/topk.c", "kernels/rounding.c", "kernels/sentinel.c"]
    parts += ["core/router.c", "core/machine.c", "core/boundary.c", "core/points.c", "core/taps.c"]
    parts += ["utils/threads.c", "utils/cpu_quota.c", "utils/status.c", "utils/dtype.c"]
    library = compiled("stages", parts, plan)
    library.matmul_seconds.restype = library.route_seconds.restype = ctypes.c_double
    library.matmul_seconds.argtypes = (
        ctypes.POINTER(Matrix),
        ctypes.c_int64,
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_void_p,
    )
    library.route_seconds.argtypes = (
        ctypes.POINTER(Matrix),
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_int,
        ctypes.c_int,
    )
    return library


def _has_avx2() -> bool:
    import colibri_lab as lab

    return lab.open().info["isa"] in ("avx2", "avx512")


class NotBuiltError(FileNotFoundError):
    """What a quick plan does not build, and one command does."""


def shared_library(plan: Plan) -> Path:
    """libcolibri.so as `make engine` builds it; a quick plan takes the one that is there. Raises OSError."""
    library = ROOT / FOLDER / "libcolibri.so"
    if not plan.quick or not (CSRC / "Makefile").is_file():
        return engine_file("libcolibri.so")
    if not library.is_file():
        raise NotBuiltError("run `make engine` first: the library is not built, and a quick run does not build it")
    return library


# ---- memory -------------------------------------------------------------------------------------------------------


class Pages:
    """Anonymous memory on small pages or huge ones, filled with numbers near one in either dtype. Private, since what
    is shared gets no huge pages.
    """

    def __init__(self, n_bytes: int, huge: bool) -> None:
        self._map = mmap.mmap(-1, n_bytes + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        advice = getattr(mmap, "MADV_HUGEPAGE" if huge else "MADV_NOHUGEPAGE", None)
        if advice is None:
            raise FileNotFoundError("this system has no advice on huge pages")
        self._map.madvise(advice)
        whole = np.frombuffer(self._map, np.uint8)
        start = -whole.ctypes.data % HUGE
        self.bytes = whole[start : start + n_bytes]
        self.bytes.view(np.uint32)[:] = 0x3F803F81  # two bfloat16 near 1, or one float32
        self.address = self.bytes.ctypes.data

    def huge_bytes(self) -> int:
        """Of this memory, the bytes that lie in huge pages now; 0 where the system does not tell."""
        try:
            lines = Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines()
        except OSError:
            return 0
        inside, found = False, 0
        for line in lines:
            head = line.split(maxsplit=1)[0]
            if "-" in head and not head.endswith(":"):
                first, last = (int(part, 16) for part in head.split("-"))
                inside = first < self.address + len(self.bytes) and last > self.address
            elif inside and head == "AnonHugePages:":
                found += int(line.split()[1]) * 1024
        return found


def products(plan: Plan, choose: Callable[[], list[tuple[int, int, int]]], dtype: int, m: int) -> Callable[[], Sample]:
    """A contender: the rate (GB/s of weights for m = 1, else GFLOP/s) of products of m rows with the matrices
    (address, rows, cols) that `choose` gives anew each time; all of the same cols when m > 1.
    """
    library = stages(plan)
    widest = max(max(rows, cols) for _, rows, cols in choose())
    x, out = np.ones((m, widest), np.float32), np.empty((m, widest), np.float32)
    size = 4 if dtype == F32 else 2

    def take() -> Sample:
        seconds, bytes_read, operations = 0.0, 0, 0
        while seconds < plan.seconds:
            chosen = choose()
            matrices = (Matrix * len(chosen))(*(Matrix(at, dtype, rows, cols) for at, rows, cols in chosen))
            seconds += library.matmul_seconds(matrices, len(chosen), x.ctypes.data, m, out.ctypes.data)
            elements = sum(rows * cols for _, rows, cols in chosen)
            bytes_read, operations = bytes_read + elements * size, operations + 2 * m * elements
        return Sample((bytes_read if m == 1 else operations) / seconds * 1e-9)

    return take


def unit(m: int) -> str:
    return "GB/s" if m == 1 else "GFLOP/s"
