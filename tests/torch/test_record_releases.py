"""The recorder in the oldest release of transformers that is supported, one from the middle, and the installed one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch

ROOT = Path(__file__).resolve().parents[2]
OLDER = ("4.57.6", "5.0.0", "5.8.0")


def record_with(release: str | None) -> list[str]:
    """What tests/support/record_in_release.py prints in a process of its own; None is the installed release."""
    path = [str(ROOT / "tests" / "support"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    if release is not None:
        folder = Path(sys.prefix) / f"transformers-{release}"
        assert folder.is_dir(), f"{folder} is missing: python tools/older_transformers.py installs it (make test-torch)"
        path.insert(0, str(folder))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "tests" / "support" / "record_in_release.py")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.mark.parametrize("release", OLDER)
def test_an_older_release_gives_the_goldens_and_the_engines_numbers(release):
    lines = record_with(release)
    assert lines[0] == f"transformers {release}" and lines[-1] == "done"
    assert len(lines) == 2 + 7 + 8 and all("observed" in line for line in lines[1:-1])


def test_the_installed_release_gives_the_goldens_and_the_engines_numbers():
    lines = record_with(None)
    assert lines[-1] == "done" and len(lines) == 2 + 7 + 8
