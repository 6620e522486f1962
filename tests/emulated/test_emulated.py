"""The same bytes on other machines: aarch64 and an x86-64 without AVX, as QEMU plays them, against this CPU.

Needs an x86-64 machine with qemu-user and a cross compiler (`bash .ci/run emulated` installs them). What this CPU
itself cannot run is said aloud.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = pytest.mark.emulated

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build-emulated"
REFERENCE = sorted((ROOT / "tests/fixtures/reference").rglob("config.json"))
MODELS = ["colibri_lab/bundled/tiny-colibri", *(str(config.parent.relative_to(ROOT)) for config in REFERENCE)]
COMPILERS = {"x86_64": "cc", "aarch64": "aarch64-linux-gnu-gcc"}
EMULATORS = {  # machine -> architecture, emulator, code path in force there
    "Cortex-A53": ("aarch64", ["qemu-aarch64", "-cpu", "cortex-a53", "-L", "/usr/aarch64-linux-gnu"], "neon"),
    "Nehalem": ("x86_64", ["qemu-x86_64", "-cpu", "Nehalem"], "sse2"),
}
NATIVE = ("scalar", "sse2", "avx2", "avx512")
PROGRAMS = [
    "test_forward",
    "test_kernels",
    "test_exp",
    "test_float32",
    "test_half",
    "test_rotary",
    "test_topk",
    "test_census",
    "test_sentinel",
    "test_boundary",
    "test_select",
    "test_router",
]


def built(architecture: str) -> Path:
    """The folder with the C tests and tap_digest for an architecture."""
    compiler, out = COMPILERS[architecture], BUILD / architecture
    if shutil.which(compiler) is None:
        pytest.fail(f"{compiler} is missing: bash .ci/run emulated installs it")
    target = ["-DCMAKE_SYSTEM_NAME=Linux", f"-DCMAKE_SYSTEM_PROCESSOR={architecture}", f"-DCMAKE_C_COMPILER={compiler}"]
    for command in (
        ["cmake", "-S", ROOT / "csrc", "-B", out, "-DCMAKE_BUILD_TYPE=Release", *target],
        ["cmake", "--build", out, "--parallel", "2", "--target", "tap_digest", *PROGRAMS],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0 and "warning:" not in done.stderr, done.stdout + done.stderr
    return out


@pytest.fixture(scope="session")
def builds() -> dict[str, Path]:
    return {architecture: built(architecture) for architecture in COMPILERS}


def run(command: list[str | Path], isa: str | None = None, **more: str) -> str:
    """What a command prints; `isa` forces a code path, `more` are variables of its environment."""
    if shutil.which(command[0]) is None:
        pytest.fail(f"{command[0]} is missing: bash .ci/run emulated installs it")
    environment = {name: value for name, value in os.environ.items() if name != "COLIBRI_ISA"} | more
    if isa is not None:
        environment["COLIBRI_ISA"] = isa
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command} ended with {done.returncode}: {done.stdout[-500:]}{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="session")
def emulated(builds: dict[str, Path]) -> Iterator[dict[tuple[str, str], Future[str]]]:
    """(machine, program) -> what it prints there, two processes at a time, the longest first."""
    with ThreadPoolExecutor(2) as pool:
        commands = {
            (machine, program): [*emulator, builds[architecture] / program]
            for program in ("tap_digest", *PROGRAMS)
            for machine, (architecture, emulator, _) in EMULATORS.items()
        }
        models = {"tap_digest": MODELS}
        yield {key: pool.submit(run, [*command, *models.get(key[1], [])]) for key, command in commands.items()}
        pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="session")
def native(builds: dict[str, Path]) -> dict[str, str]:
    """Code path that this CPU has -> what tap_digest prints on it. A name that it has not leaves the best in force."""
    program = builds["x86_64"] / "tap_digest"
    return {isa: run([program, *MODELS], isa) for isa in NATIVE if run([program], isa).strip() == isa}


def taps(printed: str, isa: str) -> list[str]:
    """The lines of tap_digest after the first, which must name the code path."""
    first, *lines = printed.splitlines()
    assert first == isa
    return lines


def test_every_model_and_many_taps_are_compared(native: dict[str, str]) -> None:
    lines = taps(native["scalar"], "scalar")
    assert {line.split()[0] for line in lines} == set(MODELS) and len(lines) > 100 * len(MODELS)
    assert {line.split()[1] for line in lines} >= {"logits", "layers.0.attn.weights", "layers.0.moe.experts.0.hidden"}


def test_the_code_paths_of_this_cpu_give_the_same_bytes(native: dict[str, str], capsys) -> None:
    with capsys.disabled():
        print(f"\ncompared: {', '.join(native)}; not on this CPU: {', '.join(set(NATIVE) - set(native)) or 'none'}")
    assert len(native) >= 2
    for isa, printed in native.items():
        assert taps(printed, isa) == taps(native["scalar"], "scalar"), isa


@pytest.mark.parametrize("machine", EMULATORS)
def test_I3_an_emulated_machine_gives_the_bytes_of_this_one(emulated, native: dict[str, str], machine: str) -> None:
    """Every tap of 64 tokens, on 1, 2 and 4 threads and in random passes, of every model in the repository."""
    assert taps(emulated[machine, "tap_digest"].result(), EMULATORS[machine][2]) == taps(native["scalar"], "scalar")


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("machine", EMULATORS)
def test_I3_the_c_tests_hold_on_an_emulated_machine(emulated, machine: str, program: str) -> None:
    """Kernels, selection and forward pass; no instruction that the machine lacks."""
    printed = emulated[machine, program].result()
    assert program != "test_kernels" or f"{EMULATORS[machine][2]} agrees with scalar" in printed


def test_I3_the_package_runs_on_an_x86_64_without_avx() -> None:
    """Import and one token in Python, on the same compiled module."""
    code = """
import colibri_lab as lab
model = lab.open()
session = model.session()
session.feed([5])
print(model.info["isa"], session.logits.tobytes().hex())
"""
    here = run([sys.executable, "-c", code])
    # The OpenBLAS inside some NumPy takes a Nehalem for a Haswell, and ends when it is imported.
    there = run([*EMULATORS["Nehalem"][1], sys.executable, "-c", code], OPENBLAS_CORETYPE="Prescott")
    assert there.split()[0] == "sse2" and there.split()[1] == here.split()[1]
