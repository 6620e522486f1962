"""The command line: exit codes, sentences instead of tracebacks, and files that appear where they were asked for."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

import colibri_lab as lab
from colibri_lab import __version__, _cli


def colibri_lab(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs the command line in a process of its own, away from the checkout."""
    command = [sys.executable, "-m", "colibri_lab._cli", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=os.environ)


@pytest.mark.parametrize("arguments", [["nonsense"], ["explore", "text"], ["notebooks"], ["doctor"]])
def test_a_wrong_command_line_exits_with_2(arguments: list[str], tmp_path: Path) -> None:
    """Usage and the fault go to standard error."""
    done = colibri_lab(*arguments, folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: colibri-lab") and done.stdout == ""


def test_every_command_has_help(tmp_path: Path) -> None:
    """--help names all commands."""
    done = colibri_lab("--help", folder=tmp_path)
    assert done.returncode == 0
    for command in ("lab", "notebooks", "info", "explore", "doctor", "diff", "nan", "cache", "bench"):
        assert re.search(rf"^ +{command}\b", done.stdout, flags=re.MULTILINE), command


def test_info_tells_versions_and_the_model(tmp_path: Path) -> None:
    """`info` works without an argument, on the bundled model."""
    done = colibri_lab("info", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "colibri-lab" in done.stdout and "mixtral" in done.stdout


def test_info_describes_the_model_that_is_named(tmp_path: Path) -> None:
    """By a bare path or by --model: what `model.info` has, beside what the machine runs; both at once are refused."""
    folder = Path(__file__).parent / "fixtures" / "reference" / "olmoe"
    done = colibri_lab("info", str(folder), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    told = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    for name, value in lab.open(folder).info.items():
        assert [name, str(value)] in told, name
    assert colibri_lab("info", "--model", str(folder), folder=tmp_path).stdout == done.stdout
    assert colibri_lab("info", str(folder), "--model", str(folder), folder=tmp_path).returncode == 2


@pytest.mark.parametrize(
    ("variable", "choices"), [("COLIBRI_HUGE_PAGES", ("madvise", "all", "hugetlb", "off")), ("COLIBRI_CPUS", ("1 to",))]
)
def test_info_names_a_variable_that_means_nothing(
    variable: str, choices: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What no session would take is an error line with the allowed values, below all that can be told."""
    monkeypatch.setenv(variable, "nonsense")
    done = colibri_lab("info", folder=tmp_path)
    assert done.returncode == 1 and "mixtral" in done.stdout
    (line,) = done.stderr.splitlines()
    assert f'{variable} is "nonsense"' in line and all(choice in line for choice in choices)


@pytest.mark.parametrize(
    "command", [["info"], ["info", "--model"], ["explore", "text", "--html", "out.html", "--model"]]
)
def test_G3_a_wrong_path_is_one_sentence(command: list[str], tmp_path: Path) -> None:
    """A path that is not there is named, without a traceback, and nothing is written."""
    done = colibri_lab(*command, "no/such/folder", folder=tmp_path)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1 and "no/such/folder" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_page_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    """The folder that is missing is named."""
    done = colibri_lab("explore", "a", "--html", "missing/out.html", folder=tmp_path)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1 and "missing" in done.stderr


def test_explore_writes_one_offline_page(tmp_path: Path) -> None:
    """The page holds the text and asks for nothing from a network."""
    done = colibri_lab("explore", "Once upon a time", "--html", "out.html", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "out.html"
    page = (tmp_path / "out.html").read_text(encoding="utf-8")
    assert "<html" in page.lower() and "Once" in page
    for request in ('src="http', "src='http", 'href="http', "@import", 'from "http', "fetch("):
        assert request not in page, request


def test_doctor_says_what_is_wrong(tmp_path: Path) -> None:
    """A healthy folder exits with 0, an unhealthy one with 1, and both tell."""
    bundled = Path(_cli.__file__).parent / "bundled" / "tiny-colibri"
    assert colibri_lab("doctor", str(bundled), folder=tmp_path).returncode == 0
    done = colibri_lab("doctor", str(tmp_path), folder=tmp_path)
    assert done.returncode == 1
    assert str(tmp_path) in done.stdout + done.stderr and "Traceback" not in done.stderr


def test_notebooks_are_copied_and_never_overwritten(tmp_path: Path) -> None:
    """A copy that its user edited stays; --force brings the shipped one back."""
    target = tmp_path / "mine"
    assert colibri_lab("notebooks", "mine", folder=tmp_path).returncode == 0
    first = target / "00_first_look.ipynb"
    shipped = first.read_bytes()
    assert json.loads(shipped)["metadata"]["language_info"]["version"] == platform.python_version()
    first.write_text("edited")
    (target / _cli.FIRST_NOTEBOOK).unlink()
    done = colibri_lab("notebooks", "mine", folder=tmp_path)
    assert done.returncode == 0 and "left alone" in done.stdout
    assert first.read_text() == "edited" and (target / _cli.FIRST_NOTEBOOK).exists()
    assert colibri_lab("notebooks", "mine", "--force", folder=tmp_path).returncode == 0
    assert first.read_bytes() == shipped


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path: Path) -> None:
    """And stays as it is."""
    (tmp_path / "taken").write_text("mine")
    done = colibri_lab("notebooks", "taken", folder=tmp_path)
    assert done.returncode == 1 and "'taken' is a file" in done.stderr
    assert (tmp_path / "taken").read_text() == "mine"


def test_version_is_told(tmp_path: Path) -> None:
    done = colibri_lab("--version", folder=tmp_path)
    assert done.stdout.strip() == f"colibri-lab {__version__}"


def test_a_text_that_is_too_long_is_refused_with_the_limit(tmp_path: Path) -> None:
    """In the words of the command line, which has no max_tokens."""
    done = colibri_lab("explore", "word " * 600, "--html", "out.html", folder=tmp_path)
    assert done.returncode == 1 and "512 tokens" in done.stderr and "max_tokens" not in done.stderr


def test_arguments_behind_the_dashes_go_to_jupyter_lab_unchanged() -> None:
    """`make lab ARGS=...` reaches JupyterLab word by word."""
    words = ["--no-browser", "--port=1234", "--ServerApp.root_dir=/tmp/a b"]
    options = _cli.parser().parse_args(["lab", "workbench", "--", *words])
    command = _cli.lab_command(options.arguments, root=False)
    assert options.folder == Path("workbench")
    assert command[:3] == [sys.executable, "-m", "jupyterlab"] and command[-len(words) :] == words


def test_root_is_let_in() -> None:
    """In a container one is root, which JupyterLab refuses unless it is told otherwise."""
    assert "--allow-root" in _cli.lab_command([], root=True)


def test_without_a_command_the_notebooks_open() -> None:
    """`colibri-lab` alone is `colibri-lab lab`."""
    alone, named = _cli.parser().parse_args([]), _cli.parser().parse_args(["lab"])
    assert vars(alone) == vars(named)


def test_a_terminal_without_unicode_gets_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Signs that it cannot show come as their numbers."""
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = colibri_lab("doctor", str(tmp_path), folder=tmp_path)
    assert done.returncode == 1 and "\\u2717" in done.stdout and "Traceback" not in done.stderr


def test_bench_hands_its_arguments_to_the_suite(tmp_path: Path) -> None:
    """The help is the suite's own, and so is the exit code."""
    done = colibri_lab("bench", "--help", folder=tmp_path)
    assert done.returncode == 0 and "--contexts" in done.stdout
    done = colibri_lab("bench", "--models", "huge", folder=tmp_path)
    assert done.returncode == 2 and "none of coarse, fine" in done.stderr
