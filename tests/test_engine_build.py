"""The engine's builds: strict flags, no wide instructions where they were not asked for, a life without Python."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import colibri_lab as lab

ROOT = Path(__file__).resolve().parent.parent
BUILD_FILES = (
    "Makefile",
    "csrc/Makefile",
    "csrc/CMakeLists.txt",
    "cpp_bindings/CMakeLists.txt",
    "pyproject.toml",
    "environment.yml",
    ".ci/run",
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which `make engine` left its objects, libraries and command line."""
    out = tmp_path_factory.mktemp("engine")
    done = subprocess.run(["make", "-C", str(ROOT / "csrc"), f"OUT={out}", "-j2"], capture_output=True, text=True)
    assert done.returncode == 0 and "warning" not in done.stderr, done.stderr
    return out


def test_I1_no_build_file_loosens_arithmetic_or_ties_a_build_to_this_cpu() -> None:
    """-ffast-math, its parts, -Ofast and -march=native appear in no build file."""
    banned = re.compile(r"-ffast-math|-Ofast|-ffinite-math|-funsafe-math|-march=native|-mtune=native|fp-contract=fast")
    for name in BUILD_FILES:
        assert not banned.search((ROOT / name).read_text(encoding="utf-8")), name


def test_I2_a_build_with_finite_math_is_refused() -> None:
    """Every compiler that folds away NaN tests is stopped by the engine's own source."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    assert compiler
    kernels = ROOT / "csrc" / "kernels"
    units = [path for path in kernels.glob("*.c") if "float32.h" in path.read_text(encoding="utf-8")]
    assert kernels / "kernels_scalar.c" in units
    strict = [compiler, "-std=c99", "-fsyntax-only", "-D_POSIX_C_SOURCE=200809L", f"-I{ROOT / 'csrc' / 'include'}"]
    for unit in units:
        isa = ["-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
        flags = isa if "avx" in unit.name else []
        for loose in ("-ffinite-math-only", "-ffast-math"):
            refused = subprocess.run([*strict, *flags, loose, unit], capture_output=True, text=True)
            assert refused.returncode != 0 and "finite" in refused.stderr.lower(), unit.name


def test_both_builds_of_the_engine_use_the_same_flags() -> None:
    """CMake and the plain Makefile agree on strictness and on the flags of each instruction set."""
    cmake = (ROOT / "csrc" / "CMakeLists.txt").read_text(encoding="utf-8")
    make = (ROOT / "csrc" / "Makefile").read_text(encoding="utf-8")
    for flag in ("-ffp-contract=off", "-Wall", "-Wextra", "-pedantic"):
        assert flag in cmake and flag in make, flag
    pattern = r'kernels_(\w+)\.c PROPERTIES COMPILE_OPTIONS "([^"]+)"'
    sets = re.findall(pattern, cmake)
    assert sets
    for name, flags in sets:
        rule = re.search(rf"kernels_{name}\.o .*ISA := (.+)", make)
        assert rule and rule.group(1).split() == flags.split(";"), name


def test_the_engine_lives_without_python(engine: Path) -> None:
    """`make engine` builds two libraries and a command line that routes as the Python package does."""
    assert (engine / "libcolibri.a").exists() and (engine / "libcolibri.so").exists()
    session = lab.open().session()
    session.feed([0, 401, 273])
    command = [engine / "colibri_cli", session.model.info["path"], "--ids", "0,401,273"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for layer, block in enumerate(printed.split("layer ")[1:]):
        rows = re.findall(r"token \d+ \(id \d+\): +(\d+) \S+ +(\d+)", block)
        assert [list(map(int, row)) for row in rows] == session.tape[f"layers.{layer}.moe.expert_ids"].tolist()


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="these registers exist on x86-64 only")
def test_I3_wide_registers_appear_only_where_a_run_time_choice_guards_them(engine: Path) -> None:
    """No object but those of the chosen instruction sets uses AVX, so that an older CPU runs everything else."""
    objdump = shutil.which("objdump")
    assert objdump, "binutils, which come with every compiler here, have no objdump"
    wide = {}
    for unit in sorted(engine.rglob("*.o")):
        code = subprocess.run([objdump, "-d", unit], capture_output=True, text=True, check=True).stdout
        wide[unit.stem] = set(re.findall(r"%([yz]mm)\d", code))
    chosen = {"kernels_scalar_fma", "kernels_avx2", "kernels_avx512"}
    assert {name: found for name, found in wide.items() if found and name not in chosen} == {}
    assert wide["kernels_avx2"] == {"ymm"} and "zmm" in wide["kernels_avx512"]
