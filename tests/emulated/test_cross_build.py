"""The plain Makefile as a packager uses it for another architecture."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.emulated

ROOT = Path(__file__).resolve().parents[2]
TRIPLET = "aarch64-linux-gnu"
EM_AARCH64 = 183  # e_machine of an ELF file


def test_the_engine_cross_builds_for_aarch64_and_routes_there_as_here(tmp_path: Path) -> None:
    """Library, small once stripped, and command line, which prints under QEMU what the native one prints."""
    for program in (f"{TRIPLET}-gcc", f"{TRIPLET}-strip", "qemu-aarch64"):
        if shutil.which(program) is None:
            pytest.fail(f"{program} is missing: bash .ci/run emulated installs it")
    printed = {}
    for name, tools, emulator in (
        ("aarch64", [f"CC={TRIPLET}-gcc", f"AR={TRIPLET}-ar"], ["qemu-aarch64", "-L", f"/usr/{TRIPLET}"]),
        ("native", [], []),
    ):
        command = ["make", "-C", str(ROOT / "csrc"), f"OUT={tmp_path / name}", "-j2", *tools]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0 and "warning" not in done.stderr, done.stderr
        model = str(ROOT / "colibri_lab" / "bundled" / "tiny-colibri")
        route = [*emulator, str(tmp_path / name / "colibri_cli"), model, "--ids", "0,401,273"]
        printed[name] = subprocess.run(route, capture_output=True, text=True, check=True).stdout
    assert "layer 5" in printed["native"] and printed["aarch64"] == printed["native"]
    library = tmp_path / "aarch64" / "libcolibri.so"
    subprocess.run([f"{TRIPLET}-strip", str(library)], check=True)
    data = library.read_bytes()
    assert data[:4] == b"\x7fELF" and int.from_bytes(data[18:20], "little") == EM_AARCH64 and len(data) <= 400_000
