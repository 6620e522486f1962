"""The house rules that no linter knows: imports, flags, sizes, commands, environments, missing tools."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import colibri_lab as lab
from colibri_lab import _core

ROOT = Path(__file__).resolve().parent.parent
CODE = {".py", ".c", ".h", ".cpp", ".hpp", ".js", ".css"}
BUILD_FILES = ("CMakeLists.txt", "Makefile", "pyproject.toml", "environment.yml", "run")


@cache
def tracked() -> tuple[Path, ...]:
    """The files of the repository; in an unpacked archive all that is no product of a build."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode == 0:
        return tuple(path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file())
    products = re.compile(r"^(\.venv|\.git|build.*|dist|workbench|.*cache.*|.*\.egg-info)$")
    files = (path for path in ROOT.rglob("*") if path.is_file())
    return tuple(path for path in files if not any(map(products.match, path.relative_to(ROOT).parts)))


def texts() -> dict[str, str]:
    found = {}
    for path in tracked():
        data = path.read_bytes()
        if b"\0" not in data[:8192]:
            found[str(path.relative_to(ROOT))] = data.decode("utf-8")
    return found


def run_python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **variables})


# ---- importing ---------------------------------------------------------------------------------------------------


def test_importing_the_package_loads_no_heavy_library() -> None:
    """`import colibri_lab` loads neither torch, a plotting library nor a widget library; its seconds are printed."""
    heavy = ("torch", "transformers", "matplotlib", "ipywidgets", "anywidget", "IPython", "traitlets")
    code = f"""
import sys, time
start = time.perf_counter()
import colibri_lab
print(f"{{time.perf_counter() - start:.3f}} s")
print(*[name for name in {heavy!r} if name in sys.modules])
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    seconds, loaded = done.stdout.split("\n")[:2]
    print("import colibri_lab:", seconds)
    assert loaded == ""


def test_every_public_name_has_a_docstring() -> None:
    """help() answers for every name in __all__ and for every public method of its classes."""
    silent = []
    for name in lab.__all__:
        thing = getattr(lab, name)
        if not inspect.getdoc(thing):
            silent.append(name)
        if inspect.isclass(thing) and thing.__module__.startswith("colibri_lab"):
            for attribute, value in vars(thing).items():
                described = isinstance(value, property | classmethod | staticmethod) or inspect.isfunction(value)
                if described and not attribute.startswith("_") and not inspect.getdoc(value):
                    silent.append(f"{name}.{attribute}")
    assert not silent


def test_I1_the_process_keeps_its_floating_point_mode() -> None:
    """Subnormal results are the same before the import, after it, after a run, and in a new thread."""
    code = """
import threading
product = lambda: (2.2250738585072014e-308 * 0.25).hex()
before = product()
import colibri_lab as lab
from colibri_lab import _core
after_import = product()
lab.open().session().feed("Once upon a time")
seen = [after_import, product()]
worker = threading.Thread(target=lambda: seen.append(product()))
worker.start()
worker.join()
assert seen == [before] * 3, (before, seen)
print(before)
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "0x0.4000000000000p-1022"


# ---- flags and sizes ---------------------------------------------------------------------------------------------


def test_I1_no_build_file_loosens_arithmetic_or_ties_a_build_to_this_cpu() -> None:
    """-ffast-math, its parts, -Ofast and -march=native appear in no build file."""
    banned = re.compile(r"-ffast-math|-Ofast|-ffinite-math|-funsafe-math|-march=native|-mtune=native|fp-contract=fast")
    builds = {name: text for name, text in texts().items() if Path(name).name in BUILD_FILES}
    assert len(builds) >= 6
    for name, text in builds.items():
        assert not banned.search(text), name


def test_I2_a_build_with_finite_math_is_refused(tmp_path: Path) -> None:
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


def test_no_file_outgrows_600_lines() -> None:
    """A file of code can be read in one sitting; what grows is split along the data."""
    lines = {name: text.count("\n") for name, text in texts().items() if Path(name).suffix in CODE}
    assert not {name: n for name, n in lines.items() if n > 600}


def test_no_tracked_file_names_a_machine_or_a_registry() -> None:
    """Nothing in the repository depends on where it was written."""
    machine = re.compile(r"""(^|[\s"'(=])/(work|root|home)/""", re.MULTILINE)
    registry = re.compile(r"https?://[\w.-]*(index|registry|mirror|packages)[\w.-]*/")
    found = {name: match for name, text in texts().items() if (match := machine.search(text) or registry.search(text))}
    assert not found


# ---- commands and environments -----------------------------------------------------------------------------------


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", ".ci/run"])
def test_every_make_command_that_a_page_names_exists(page: str) -> None:
    """Documentation and CI call only targets that the Makefile has."""
    text = (ROOT / page).read_text(encoding="utf-8")
    named = set(re.findall(r"(?:`|^\s*|&& |; )make ([a-z][a-z-]*)", text, flags=re.MULTILINE))
    assert named and named <= make_targets(), named - make_targets()


def test_every_link_of_a_page_leads_somewhere() -> None:
    """Relative links of the documentation point at files of the repository."""
    for name, text in texts().items():
        if name.endswith(".md"):
            for target in re.findall(r"\]\(([^)#\s]+)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text):
                if not target.startswith(("http", "mailto:")):
                    assert (ROOT / name).parent.joinpath(target).exists(), (name, target)


def test_the_make_help_lists_every_target_that_a_person_calls() -> None:
    """`make help` documents itself from the Makefile."""
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    for target in ("lab", "test", "test-browser", "test-torch", "engine", "lint", "bench", "soak", "clean"):
        assert re.search(rf"^  make {target} ", done.stdout, flags=re.MULTILINE), target


def test_the_page_of_taps_is_the_engines_table() -> None:
    """docs/taps.md says what the engine says."""
    script = ROOT / "tools" / "make_taps_page.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def project() -> dict[str, Any]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)["project"]


def test_the_engine_lives_without_python(tmp_path: Path) -> None:
    """`make engine` builds two libraries and a command line that routes as the Python package does."""
    subprocess.run(["make", "-C", str(ROOT / "csrc"), f"OUT={tmp_path}", "-j2"], check=True, capture_output=True)
    assert (tmp_path / "libcolibri.a").exists() and (tmp_path / "libcolibri.so").exists()
    session = lab.open().session()
    session.feed([0, 401, 273])
    command = [tmp_path / "colibri_cli", session.model.info["path"], "--ids", "0,401,273"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for layer, block in enumerate(printed.split("layer ")[1:]):
        rows = re.findall(r"token \d+ \(id \d+\): +(\d+) \S+ +(\d+)", block)
        assert [list(map(int, row)) for row in rows] == session.tape[f"layers.{layer}.moe.expert_ids"].tolist()


def test_the_version_is_one() -> None:
    """The package, its metadata and the engine agree on the version, and the changelog has an entry for it."""
    cmake = (ROOT / "csrc" / "CMakeLists.txt").read_text(encoding="utf-8")
    assert f"project(colibri VERSION {lab.__version__} " in cmake
    assert project()["version"] == lab.__version__ == _core.__version__
    assert f"\n## {lab.__version__} " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_conda_environment_covers_every_dependency() -> None:
    """environment.yml names each dependency of the project with versions that pip would accept too."""
    with (ROOT / "environment.yml").open(encoding="utf-8") as file:
        environment = yaml.safe_load(file)
    assert [name for name in environment["channels"] if name != "nodefaults"] == ["conda-forge"]
    entries = [entry for entry in environment["dependencies"] if isinstance(entry, str)]
    conda = {re.split(r"[<>=!]", entry)[0]: entry for entry in entries}
    assert {"c-compiler", "cxx-compiler", "cmake", "ninja", "scikit-build-core", "pybind11", "pip"} <= set(conda)
    assert re.fullmatch(r"python=3\.\d+", conda["python"])
    about = project()
    wanted = [*about["dependencies"], *about["optional-dependencies"]["lab"], *about["optional-dependencies"]["test"]]
    for text in wanted:
        requirement = Requirement(text)
        entry = conda.get(requirement.name) or conda.get(f"{requirement.name}-base")
        assert entry, requirement.name
        lowest = entry.partition(">=")[2]
        assert lowest and requirement.specifier.contains(Version(lowest)), entry
    assert SpecifierSet(about["requires-python"]).contains(conda["python"].partition("=")[2])


def machine_without(tmp_path: Path, *programs: str) -> dict[str, str]:
    """An environment whose PATH holds every program of this machine except some."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for place in reversed(os.environ["PATH"].split(os.pathsep)):
        for program in Path(place).glob("*") if Path(place).is_dir() else ():
            link = folder / program.name
            link.unlink(missing_ok=True)
            link.symlink_to(program)
    for pattern in programs:
        for link in folder.glob(pattern):
            link.unlink()
    return {**{k: v for k, v in os.environ.items() if k not in ("CC", "CXX", "PYTHON")}, "PATH": str(folder)}


@pytest.mark.parametrize(
    ("programs", "sentence"),
    [
        (("python*", "pypy*"), "Python 3.11 or newer is missing: install it"),
        (("cc", "gcc", "clang"), "A C compiler is missing: install gcc or clang"),
        (("c++", "g++", "clang++"), "A C++ compiler is missing: install g++ or clang++"),
    ],
)
def test_a_missing_prerequisite_is_named(tmp_path: Path, programs: tuple[str, ...], sentence: str) -> None:
    """Without Python or a compiler, `make` says so in one sentence before it creates anything."""
    command = ["sh", str(ROOT / "tools" / "make_venv.sh"), str(tmp_path / "venv")]
    done = subprocess.run(command, env=machine_without(tmp_path, *programs), capture_output=True, text=True)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1 and sentence in done.stderr
    assert not (tmp_path / "venv").exists()
