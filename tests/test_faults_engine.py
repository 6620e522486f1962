"""Faults of the engine's own arithmetic, on a build that has them; what the search must say of each."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fault_case import Tally
from fault_engine import build

from colibri_lab import _core

SEED = int(os.environ.get("COLIBRI_FAULT_SEED", "6"))


@pytest.fixture(scope="module")
def faulty_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("engine"))


def test_faults_of_the_arithmetic_are_found_where_they_happen(faulty_engine: Path) -> None:
    """NaN and Inf that no definition gives, rows that were not written, masked rows, scales: at every point."""
    script = Path(__file__).parent / "faults" / "fault_hooked.py"
    paths = os.pathsep.join([str(script.parents[2]), str(script.parent), str(script.parents[1] / "support")])
    done = subprocess.run(
        [sys.executable, str(script), str(faulty_engine), str(SEED), "5"],
        capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    out = Tally()
    for line in map(json.loads, done.stdout.splitlines()):
        out.add(line["fault"], line["what"], line["name"], line["place"], line["kind"])
    out.check(300)


def test_the_engine_in_use_knows_no_faults() -> None:
    """The hook exists in the build of these tests alone."""
    assert not hasattr(ctypes.CDLL(_core.__file__), "colibri_fault_set")
