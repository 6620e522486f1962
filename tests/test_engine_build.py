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
    assert "cold_sources CONFIGURE_DEPENDS model/*.c api/*.c" in cmake and "filter model/% api/%" in make
    assert "APPEND PROPERTY COMPILE_OPTIONS -Os)" in cmake and "SMALL := -Os\n" in make


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


# What x86-64 had not in the beginning, by the name of the instruction: AVX and everything after it begins with v; then
# SSE3, SSSE3, SSE4.1, SSE4.2, AES and SHA, bit manipulation, and single ones. tzcnt is missing: older CPUs run it as
# bsf, and compilers use that.
LATER = re.compile(
    r"v(?!er[rw]$)\w+|"
    r"addsubp[sd]|h(add|sub)p[sd]|lddqu|mov(ddup|shdup|sldup)|fisttp\w*|monitor|mwait|"
    r"pabs[bwd]|palignr|ph(add|sub)(s?w|d)|pmaddubsw|pmulhrsw|pshufb|psign[bwd]|"
    r"(p?blend\w+|dpp[sd]|extractps|insertps|movntdqa|mpsadbw|packusdw|pcmpeqq|pextr[bdq]|phminposuw|pinsr[bdq])|"
    r"pm(ax|in)(sb|sd|ud|uw)|pmov[sz]x\w+|pmuldq|pmulld|ptest|round[ps][sd]|"
    r"crc32\w*|pcmp[ei]str[im]|pcmpgtq|popcnt\w*|lzcnt\w*|aes\w+|pclmul\w+|sha\d\w+|"
    r"andn|bextr|bls(i|msk|r)|bzhi|mulx|pdep|pext|rorx|sarx|shlx|shrx|adcx|adox|"
    r"movbe\w*|xgetbv|rd(rand|seed)|cmpxchg16b|x(save|rstor)\w*"
)
LATER_CODE = {
    "-msse3": "float f(__m128 a) { return _mm_cvtss_f32(_mm_hadd_ps(a, a)); }",
    "-mssse3": "__m128i f(__m128i a, __m128i b) { return _mm_shuffle_epi8(a, b); }",
    "-msse4.1": "__m128i f(__m128i a, __m128i b) { return _mm_mullo_epi32(a, b); }",
    "-msse4.2": "unsigned f(unsigned a, unsigned b) { return _mm_crc32_u32(a, b); }",
    "-mpopcnt": "int f(unsigned a) { return __builtin_popcount(a); }",
    "-mavx": "__m128 f(__m128 a, __m128 b) { return _mm_add_ps(a, b); }",
    "-mavx2": "__m256i f(__m256i a, __m256i b) { return _mm256_add_epi8(a, b); }",
    "-mbmi": "unsigned f(unsigned a, unsigned b) { return ~a & b; }",
    "-mbmi2": "unsigned long f(unsigned long a, unsigned b) { return a << b; }",
    "-mlzcnt": "int f(unsigned a) { return __builtin_clz(a); }",
}
X86_64 = platform.machine() in ("x86_64", "AMD64")


def later_instructions(unit: Path) -> set[str]:
    """The instructions of an object file that the first x86-64 CPU did not have."""
    objdump = shutil.which("objdump")
    assert objdump, "binutils, which come with every compiler here, have no objdump"
    command = [objdump, "-d", "--no-show-raw-insn", unit]
    code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    words = re.findall(r"^ *[0-9a-f]+:\t(?:(?:rep\w*|lock|notrack|bnd|data16|cs|ds) )*(\w+)", code, re.MULTILINE)
    assert words or unit.stem == "kernels_neon"
    return {word for word in words if LATER.fullmatch(word)}


@pytest.mark.skipif(not X86_64, reason="this is about the instructions of x86-64")
def test_I3_no_object_but_the_chosen_ones_goes_beyond_the_first_x86_64(engine: Path) -> None:
    """Everything that runs before and beside the run-time choice is made of instructions that every x86-64 has."""
    chosen = {"kernels_avx512", "kernels_avx2", "kernels_scalar_fma", "fma"}  # fma is beside the engine, and asks
    later = {unit.stem: later_instructions(unit) for unit in sorted(engine.rglob("*.o"))}
    assert later.pop("select") == {"xgetbv"}  # asked for only after CPUID said that it exists
    assert {name: found for name, found in later.items() if found and name not in chosen} == {}
    assert all({name for name in later[unit] if name.startswith("vfmadd")} for unit in chosen)


@pytest.mark.skipif(not X86_64, reason="this is about the instructions of x86-64")
@pytest.mark.parametrize("flag", LATER_CODE)
def test_I3_a_later_instruction_would_be_found(flag: str, tmp_path: Path) -> None:
    """The list of names knows what a compiler makes of some code for each generation."""
    source, unit = tmp_path / "unit.c", tmp_path / "unit.o"
    source.write_text(f"#include <immintrin.h>\n{LATER_CODE[flag]}\n")
    subprocess.run(["cc", "-O2", flag, "-c", source, "-o", unit], check=True)
    assert later_instructions(unit)


def test_the_stripped_library_stays_small(engine: Path, tmp_path: Path) -> None:
    """At most 400 KB with the kernels of every instruction set."""
    small = tmp_path / "libcolibri.so"
    subprocess.run(["strip", "-o", small, engine / "libcolibri.so"], check=True)
    assert small.stat().st_size <= 400_000
