"""`colibri-lab diff`: exit codes for a script, a report for a reader, and every way to name the two sides."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import colibri_lab as lab
from colibri_lab import _cli

BUNDLED = lab.open().path
RECORDED = BUNDLED.parent / "reference" / "transformers-float32.safetensors"


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("port") / "port.safetensors"
    lab.exercises.port(1).save(path)
    return str(path)


def run(*arguments: object) -> int:
    return _cli.main(["diff", *map(str, arguments)])


def test_runs_that_agree_exit_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint beside a trace runs on the ids of the trace."""
    assert run(BUNDLED, RECORDED) == 0
    assert capsys.readouterr().out.startswith("IDENTICAL")


def test_runs_that_differ_exit_with_1_and_say_where(port: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The report names the tap; JSON holds the same."""
    assert run(RECORDED, port, "--json", tmp_path / "out.json") == 1
    assert "layers.3.moe.experts.*.gate" in capsys.readouterr().out
    found = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert found["verdict"] == "defect" and found["first_divergence"]["layer"] == 3


def test_ties_exit_with_0_with_a_tolerance_measured_from_noise(capsys: pytest.CaptureFixture[str]) -> None:
    """The engine beside bfloat16, where 16-bit rounding moved one token to another expert."""
    noisy = [BUNDLED.parent / "reference" / f"transformers-bfloat16-{name}.safetensors" for name in ("eager", "sdpa")]
    assert run(BUNDLED, noisy[0], "--noise", *noisy) == 0
    assert capsys.readouterr().out.startswith("TIE")


def test_a_checkpoint_beside_another_runs_on_a_text(capsys: pytest.CaptureFixture[str]) -> None:
    """Text or ids."""
    assert run(BUNDLED, BUNDLED, "--text", "The Queen", "--capture", "routing") == 0
    assert run(BUNDLED, BUNDLED, "--ids", "5,6,7", "--capture", "routing") == 0
    assert "3 tokens" in capsys.readouterr().out


def test_a_diff_writes_its_view_as_one_file(port: str, tmp_path: Path) -> None:
    """An offline page."""
    assert run(RECORDED, port, "--html", tmp_path / "diff.html") == 1
    page = (tmp_path / "diff.html").read_text(encoding="utf-8")
    assert "<html" in page.lower() and "layers.3.moe" in page


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([RECORDED], "give two runs"),
        ([RECORDED, RECORDED, "--reference", "transformers"], "give two runs"),
        ([RECORDED, "--reference", "transformers", "--text", "x"], "is none"),
        ([BUNDLED, BUNDLED], "--text or --ids"),
        ([RECORDED, RECORDED, "--tolerance", "1", "--noise", "a", "b"], "choose one"),
        ([RECORDED, RECORDED, "--tolerance", "-1"], "tolerance"),
        ([RECORDED, "no-such-file"], "no-such-file"),
        ([RECORDED, RECORDED, "--html", "a", "--json", "./a"], "replace another file"),
        ([RECORDED, "no-such-file", "--json", "no-such-file"], "replace what is read"),
        ([RECORDED, RECORDED, "--text", "x"], "both are traces"),
        ([RECORDED, RECORDED, "--model", "no-such-model"], "no-such-model"),
        ([BUNDLED / "config.json", RECORDED], f"opened by its folder: '{BUNDLED}'"),
        ([BUNDLED, BUNDLED, "--text", " "], "the text after --text is blank"),
        ([BUNDLED.parent, RECORDED], "a folder without config.json"),
        ([Path(__file__), RECORDED], "is a text that is no recording, neither a checkpoint"),
    ],
)
def test_trouble_exits_with_2_and_one_sentence(
    arguments: list[object], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Never a traceback, and never 1, which means that the runs differ."""
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert words in captured.err and captured.err.startswith("colibri-lab: ") and captured.out == ""


def test_ids_that_are_none_are_a_wrong_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        run(BUNDLED, BUNDLED, "--ids", "1,x")
    assert stop.value.code == 2 and "whole numbers" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:max_tokens=600")  # this model was made for 512
def test_a_checkpoint_runs_on_as_many_tokens_as_a_trace_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """More than a session holds when nobody says how many."""
    ids = [token % 2000 + 2 for token in range(600)]
    session = lab.open().session(capture="routing", max_tokens=len(ids))
    session.feed(ids)
    session.trace().save(tmp_path / "long.safetensors")
    assert run(tmp_path / "long.safetensors", BUNDLED, "--capture", "routing") == 0
    assert "600 tokens compared" in capsys.readouterr().out
