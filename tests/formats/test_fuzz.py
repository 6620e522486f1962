"""Every golden cut at sampled lengths and with random bytes flipped: it loads, or raises lab.ColibriError, nothing
else, and never with more than 64 MB.
"""

from __future__ import annotations

import random
import tracemalloc
from pathlib import Path

import pytest
from format_goldens import GOLDENS, Golden

import colibri_lab as lab

LIMIT = 64 << 20
CUTS, FLIPS = 30, 50


def attempt(path: Path, golden: Golden) -> bool:
    """Whether the file loaded; anything but a ColibriError goes through."""
    try:
        trace = lab.load_trace(path, progress=False, **golden.say)
    except lab.ColibriError as error:
        assert str(error)
        return False
    trace.save(path.with_name("out.safetensors"))
    return True


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda golden: golden.name)
def test_a_damaged_file_loads_or_says_why(golden: Golden, tmp_path: Path) -> None:
    """Truncation at every sampled length; one to four bytes flipped."""
    path = golden.write(tmp_path)
    sound, rng = path.read_bytes(), random.Random(golden.name)
    assert attempt(path, golden)
    tracemalloc.start()
    try:
        step = max(1, len(sound) // CUTS)
        for length in range(0, len(sound), step):
            path.write_bytes(sound[:length])
            attempt(path, golden)
        for _ in range(FLIPS):
            damaged = bytearray(sound)
            for _ in range(rng.randint(1, 4)):
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
            path.write_bytes(damaged)
            attempt(path, golden)
        assert tracemalloc.get_traced_memory()[1] < LIMIT
    finally:
        tracemalloc.stop()
