"""What the tests of recordings share."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from colibri_lab.trace import Trace

ROOT = Path(__file__).resolve().parents[2]


def header_of(path: Path) -> bytes:
    """The length and the JSON text."""
    with path.open("rb") as file:
        size = file.read(8)
        return size + file.read(int.from_bytes(size, "little"))


def python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs code in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=120, cwd=ROOT
    )


def raw(array: Any) -> bytes:
    """The bytes of an array, row by row."""
    return np.ascontiguousarray(array).tobytes()


def assert_same(a: Trace, b: Trace) -> None:
    """Both are the same object to a reader: tokens, meta, and every array by its bytes."""
    assert (a.ids, a.texts, a.meta) == (b.ids, b.texts, b.meta)
    assert set(a) == set(b)
    for path in a:
        assert (a[path].dtype, a[path].shape) == (b[path].dtype, b[path].shape), path
        assert raw(a[path]) == raw(b[path]), path
