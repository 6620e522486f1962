"""What the tests of recordings share."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]


def header_of(path: Path) -> bytes:
    """The length and the JSON text."""
    with path.open("rb") as file:
        size = file.read(8)
        return size + file.read(int.from_bytes(size, "little"))


def python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=120, cwd=ROOT
    )


def raw(array: Any) -> bytes:
    """The bytes of an array, row by row."""
    return np.ascontiguousarray(array).tobytes()
