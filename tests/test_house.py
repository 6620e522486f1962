"""The house rules that no linter knows: docstrings, sizes, pages, commands, environments, missing tools."""

from __future__ import annotations

import inspect
import os
import re
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

ROOT = Path(__file__).resolve().parent.parent
CODE = {".py", ".c", ".h", ".cpp", ".hpp", ".js", ".css"}


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


# ---- files -------------------------------------------------------------------------------------------------------


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
            prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)  # code may look like a link
            for target in re.findall(r"\]\(([^)#\s]+)", prose) + re.findall(r'(?:src|srcset)="([^"]+)"', prose):
                if not target.startswith(("http", "mailto:")):
                    assert (ROOT / name).parent.joinpath(target).exists(), (name, target)


def test_the_code_of_the_readme_runs(tmp_path: Path) -> None:
    """The Python of the README, from top to bottom in an empty folder."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) >= 2
    done = subprocess.run([sys.executable, "-c", "\n".join(blocks)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run.safetensors").exists()


def test_the_make_help_lists_every_target_that_a_person_calls() -> None:
    """`make help` documents itself from the Makefile."""
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    for target in ("lab", "test", "test-browser", "test-torch", "engine", "lint", "bench", "soak", "clean"):
        assert re.search(rf"^  make {target} ", done.stdout, flags=re.MULTILINE), target


@pytest.mark.parametrize("page", ["taps", "stepper"])
def test_a_table_of_taps_is_that_of_the_code(page: str) -> None:
    """docs/taps.md says what the engine says, docs/stepper.md who writes and reads each tap."""
    script = ROOT / "tools" / f"make_{page}_page.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_code_of_the_page_on_stepping_runs(tmp_path: Path) -> None:
    """The example at the head of docs/stepper.md, as it stands."""
    code = "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / "docs/stepper.md").read_text("utf-8"), flags=re.DOTALL))
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "KL" in done.stdout, done.stderr


def project() -> dict[str, Any]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)["project"]


def test_the_version_is_one() -> None:
    """The build of the engine says the package's version, and the changelog has an entry for it."""
    cmake = (ROOT / "csrc" / "CMakeLists.txt").read_text(encoding="utf-8")
    assert f"project(colibri VERSION {lab.__version__} " in cmake
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
