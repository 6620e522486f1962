"""`colibri-lab nan`: exit codes for a script, a report for a reader."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from checkpoints import read_checkpoint, write_checkpoint

import colibri_lab as lab
from colibri_lab import _cli
from colibri_lab.testing import tiny_model

IDS = "3,1,4,1,5"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A clean model, one with an Inf in an expert that is used, one with NaN in an expert that is never used."""
    base = tmp_path_factory.mktemp("nan")
    clean = tiny_model(base / "clean")
    config, tensors = read_checkpoint(clean)
    session = lab.open(clean).session(capture="routing", max_tokens=8)
    session.feed([3])
    used = set(session.tape["layers.1.moe.expert_ids"].ravel().tolist())
    made = {"clean": clean}
    for name, expert, value in (("broken", min(used), np.inf), ("idle", min(set(range(4)) - used), np.nan)):
        planted = {key: array.copy() for key, array in tensors.items()}
        planted[f"model.layers.1.block_sparse_moe.experts.{expert}.w1.weight"][3, 2] = value
        made[name] = write_checkpoint(base / name, config, planted)
    return made


def run(*arguments: object) -> int:
    return _cli.main(["nan", *map(str, arguments)])


def test_a_clean_run_exits_with_0_and_says_what_comes_closest(folders, capsys) -> None:
    assert run(folders["clean"], "--ids", IDS) == 0
    said = capsys.readouterr().out
    session = lab.open(folders["clean"]).session(capture="all", max_tokens=5)
    session.feed([3, 1, 4, 1, 5])
    assert said == f"Clean. Closest to overflow: {lab.nan.headroom(session).closest('float16')}.\n"


def test_the_bundled_model_is_the_default(capsys) -> None:
    assert run("--text", "The Queen") == 0
    assert capsys.readouterr().out.startswith("Clean. Closest to overflow: layer ")


def test_B4_a_bad_weight_that_is_used_exits_with_1_and_is_named(folders, tmp_path: Path, capsys) -> None:
    out = tmp_path / "out.json"
    assert run(folders["broken"], "--ids", "3", "--weights", "--json", out) == 1
    said = capsys.readouterr().out
    assert said.startswith("WEIGHT VALUE: layers.1.moe.experts.") and ".gate[3, 2] is +Inf" in said
    assert "Weights that hold NaN or Inf\n" in said and "expert 1 received 1 token\n" in said.replace("\n    ", " ")
    assert said.endswith(f"\nNext: colibri-lab nan {folders['broken']} --ids 3 --cures\n")
    assert "lab.nan" not in said and "found.propagation" not in said
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["clean"] is False and found["origins"][0]["kind"] == "weight value"
    assert found["origins"][0]["layer"] == 1 and found["weights"][0]["inf"] == 1


def test_B3_a_bad_weight_that_no_token_met_is_told_in_the_clean_case(folders, tmp_path: Path, capsys) -> None:
    out = tmp_path / "out.json"
    assert run(folders["idle"], "--ids", "3", "--json", out) == 0
    said = capsys.readouterr().out
    assert said.startswith("Clean. Closest to overflow: ") and "was never used" in said
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["clean"] is True and found["weights"][0]["tokens"] == 0 and found["closest"]["format"] == "float16"


def scaled(folder: Path, clean: Path, name: str, factor: float) -> Path:
    config, tensors = read_checkpoint(clean)
    return write_checkpoint(folder, config, {**tensors, name: tensors[name] * np.float32(factor)})


def test_a_finite_run_beyond_the_format_is_said_to_be_beyond_it(folders, tmp_path: Path, capsys) -> None:
    """Exit code 0, since all is finite; where, how large and by how much, and that finite is not right."""
    sick = scaled(tmp_path / "sick", folders["clean"], "model.layers.1.block_sparse_moe.experts.1.w3.weight", 1e14)
    assert run(sick, "--ids", "3", "--json", tmp_path / "out.json") == 0
    first, second = capsys.readouterr().out.splitlines()[:2]
    found = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    session = lab.open(sick).session(capture="all", max_tokens=1)
    session.feed([3])
    row = max(lab.nan.headroom(session).table, key=lambda row: float(row["absmax"]))
    closest = found["closest"]
    assert (closest["path"], closest["absmax"], closest["token"]) == (row["path"], row["absmax"], 0)
    assert closest["bits"] == np.log2(65504 / row["absmax"]) < 0 and closest["expert"] in (None, 1)
    assert first.startswith("Clean in float32, but beyond float16: layer 1, ") and " at token 0" in first
    assert f" is {-closest['bits']:.1f} doublings too large; --emulate float16 shows what happens." in first
    assert second.startswith("Finite is not right: layer 1, expert 1, up, ") and "beyond 2^24" in second
    assert found["huge"][0]["path"] == "layers.1.moe.experts.*.up" and found["huge"][0]["expert"] == 1


def test_a_run_with_little_room_is_warned_of(folders, tmp_path: Path, capsys) -> None:
    """Under 2 bits; a run with more is not."""
    session = lab.open(folders["clean"]).session(capture="all", max_tokens=1)
    session.feed([3])
    factor = 40000 / float(np.abs(session.trace()["logits"]).max())
    near = scaled(tmp_path / "near", folders["clean"], "lm_head.weight", factor)
    assert run(near, "--ids", "3") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Clean. Closest to overflow: logits, 0.7 bit in float16."
    assert lines[1].startswith("Warning: fewer than 2 bits are left. Logits: 0.7 bit left in float16, ")
    assert run(folders["clean"], "--ids", "3") == 0
    assert "Warning" not in capsys.readouterr().out


def test_weights_are_looked_at_without_a_text(folders, tmp_path: Path, capsys) -> None:
    """1 when some are not finite; what is about a run is refused."""
    assert run(folders["idle"], "--weights", "--json", tmp_path / "out.json") == 1
    assert ".gate: 1 NaN, the first at [3, 2]" in capsys.readouterr().out
    found = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert found["clean"] is False and found["weights"][0]["nan"] == 1
    assert run(folders["clean"], "--weights") == 0
    assert "weights are finite. Nothing was run." in capsys.readouterr().out
    assert run(folders["clean"], "--weights", "--emulate", "float16") == 2
    assert "--emulate is about a run" in capsys.readouterr().err


def test_the_help_lists_every_format(capsys) -> None:
    with pytest.raises(SystemExit):
        run("--help")
    said = capsys.readouterr().out
    for name in ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"):
        assert name in said


def test_cures_are_tried_on_demand_and_shown_in_the_view(folders, tmp_path: Path, capsys, monkeypatch) -> None:
    shown = []
    monkeypatch.setattr(lab.NanTracer, "to_html", lambda view, path: shown.append(view._cures_message()["rows"]))
    assert run(folders["broken"], "--ids", "3", "--cures", "--html", tmp_path / "page.html") == 1
    said = capsys.readouterr().out
    gone = {row["name"]: row["gone"] for row in shown[0]}
    assert gone["ablate"] is True and gone["weight"] is True and "Next:" not in said
    assert "\nCures\n" in said and "✓ Switch off expert" in said and "✓ Replace layers.1.moe.experts." in said


def test_a_run_can_be_in_another_format(folders, capsys) -> None:
    assert run(folders["clean"], "--ids", IDS, "--emulate", "bfloat16") == 0
    assert capsys.readouterr().out.endswith("in bfloat16.\n")


def test_a_trace_file_is_searched(folders, tmp_path: Path, capsys) -> None:
    session = lab.open(folders["broken"]).session(capture="all", max_tokens=5)
    session.feed([3, 1])
    session.trace().save(tmp_path / "run.safetensors")
    assert run(tmp_path / "run.safetensors") == 1
    assert "layer 1, expert " in capsys.readouterr().out


def test_the_model_of_a_trace_tries_cures_and_shows_its_weights(folders, tmp_path: Path, capsys) -> None:
    """The line that follows a search without it says how; another model is refused."""
    trace = tmp_path / "run.safetensors"
    session = lab.open(folders["broken"]).session(capture="all", max_tokens=5)
    session.feed([3])
    session.trace().save(trace)
    assert run(trace) == 1
    assert capsys.readouterr().out.endswith(f"\nNext: colibri-lab nan {trace} --model CHECKPOINT --cures\n")
    assert run(trace, "--model", folders["broken"], "--cures", "--weights") == 1
    said = capsys.readouterr().out
    assert "✓ Replace layers.1.moe.experts." in said and "Weights that hold NaN or Inf\n" in said
    assert run(trace, "--model", folders["clean"]) == 2
    assert "made by another model" in capsys.readouterr().err
    assert run(folders["clean"], "--ids", "3", "--model", folders["clean"]) == 2
    assert "--model is for traces" in capsys.readouterr().err


def test_the_view_is_written_as_one_file(folders, tmp_path: Path, capsys) -> None:
    for name, code in (("broken", 1), ("clean", 0)):
        assert run(folders[name], "--ids", "3", "--html", tmp_path / f"{name}.html") == code
        assert "<html" in (tmp_path / f"{name}.html").read_text(encoding="utf-8").lower()


def test_a_wrong_path_is_told_for_what_it_is(folders, tmp_path: Path, capsys) -> None:
    """With a text or without, and with what was meant perhaps."""
    readme, empty, clean = tmp_path / "README.md", tmp_path / "empty", folders["clean"]
    readme.write_text("Weights of a model, with a licence.", encoding="utf-8")
    empty.mkdir()
    for path, words in [
        ("/no/such", "there is nothing at '/no/such'"),
        (f"{clean}x", f"near it there is '{clean}'"),
        (readme, "is a text that is no recording, neither a checkpoint"),
        (clean / "config.json", f"is a JSON text; the checkpoint beside it is opened by its folder: '{clean}'"),
        (empty, "is an empty folder: a checkpoint is a folder with config.json"),
        (clean.parent, f"is a folder without config.json: a checkpoint is a folder with config.json and its weights; "
                       f"in it, '{folders['broken']}' has one"),
    ]:  # fmt: skip
        for more in ([], ["--text", "a"], ["--weights"]):
            assert run(path, *more) == 2
            said = capsys.readouterr().err
            assert said.startswith("colibri-lab: ") and words in said and "run already" not in said


def test_trouble_exits_with_2_and_one_sentence(folders, tmp_path: Path, capsys) -> None:
    """Never a traceback, and never 1, which means that NaN or Inf were found."""
    session = lab.open(folders["clean"]).session(capture="all", max_tokens=5)
    session.feed([3])
    trace = tmp_path / "run.safetensors"
    session.trace().save(trace)
    for arguments, words in [
        ([folders["clean"]], "--text or --ids"),
        (["no-such-file"], "no-such-file"),
        ([folders["clean"], "--text", ""], "the text after --text is blank"),
        (["--text", " \n"], "the text after --text is blank"),
        ([trace, "--ids", "3"], "is a trace"),
        ([trace, "--emulate", "float16"], "is a trace"),
        ([trace, "--weights"], "has no weights"),
        ([trace, "--json", trace], "replace what is read"),
        ([folders["clean"], "--ids", "3", "--emulate", "float17"], "float17"),
    ]:
        assert run(*arguments) == 2, arguments
        said = capsys.readouterr()
        assert said.err.startswith("colibri-lab: ") and words in said.err and said.out == ""
