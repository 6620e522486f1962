"""Doctor: what is wrong with a checkpoint folder, in sentences, before anything is loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from checkpoints import read_checkpoint, write_checkpoint

from colibri_lab._doctor import doctor
from colibri_lab.testing import tiny_model

TOKENIZER = Path(__file__).parent / "fixtures" / "tokenizer"


def edit_index(folder: Path, change: Callable[[dict[str, str]], None]) -> None:
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    change(index["weight_map"])
    file.write_text(json.dumps(index))


def shard(folder: Path, number: int) -> Path:
    return folder / f"model-{number:05d}-of-00003.safetensors"


def test_a_sound_folder_is_healthy_and_its_facts_are_told(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "m", "qwen3_moe", vocab=400, sharded=True, dtype="BF16")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        shutil.copy(TOKENIZER / name, folder / name)
    report = doctor(folder)
    assert report.ok and str(report).startswith(f"{folder}: healthy")
    for fact in (
        "qwen3_moe, 2 layers, num_experts 4",
        "weights: 3 files",
        "BF16",
        "363 tokens, with a chat template, ends at (361, 359)",
    ):
        assert fact in str(report)
    assert "add_bos_token true, but tokenizer.json does not add a start token" in str(report)


SICKNESSES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "config.json is missing"),
    "broken config": (lambda f: (f / "config.json").write_text("{"), "config.json is not JSON"),
    "config is a pointer": (
        lambda f: (f / "config.json").write_text("version https://git-lfs.github.com/spec/v1\n"),
        "config.json is a Git LFS pointer",
    ),
    "broken generation config": (
        lambda f: (f / "generation_config.json").write_text("{"),
        "generation_config.json is not JSON",
    ),
    "two numbers of experts": (
        lambda f: (f / "config.json").write_text('{"model_type": "mixtral", "num_experts": 4, "num_local_experts": 8}'),
        "contradicts itself",
    ),
    "missing shard": (lambda f: shard(f, 2).unlink(), "1 of 3 weight files are missing: model-00002"),
    "shard is a pointer": (
        lambda f: shard(f, 2).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
        "is a Git LFS pointer",
    ),
    "shard is a web page": (
        lambda f: shard(f, 2).write_text("<!DOCTYPE html>"),
        "model-00002-of-00003.safetensors is a web page",
    ),
    "shard is empty": (lambda f: shard(f, 2).write_bytes(b""), "is an empty file"),
    "shard is cut": (
        lambda f: shard(f, 2).write_bytes(shard(f, 2).read_bytes()[:-4]),
        "model-00002-of-00003.safetensors cannot be read",
    ),
    "tensor not in its shard": (
        lambda f: edit_index(f, lambda m: m.update({"model.extra": "model-00001-of-00003.safetensors"})),
        "model.extra",
    ),
    "tensor not in the index": (
        lambda f: edit_index(f, lambda m: m.pop("model.norm.weight")),
        "in a file and not in the index: model.norm",
    ),
    "shard outside the folder": (
        lambda f: edit_index(f, lambda m: m.update({"model.norm.weight": "../elsewhere.safetensors"})),
        "outside the folder",
    ),
    "no weight map": (lambda f: (f / "model.safetensors.index.json").write_text("{}"), "no weight_map"),
    "pickles only": (
        lambda f: (
            [shard(f, n).unlink() for n in (1, 2, 3)]
            + [(f / "model.safetensors.index.json").unlink(), (f / "pytorch_model.bin").write_bytes(b"\x80")]
        ),
        "its weights are pickles only",
    ),
    "broken tokenizer": (lambda f: (f / "tokenizer.json").write_text("{}"), "tokenizer.json is no tokenizer"),
    "tokenizer is a pointer": (
        lambda f: (f / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\n"),
        "tokenizer.json is a Git LFS pointer",
    ),
    "tokenizer of another model": (lambda f: shutil.copy(TOKENIZER / "tokenizer.json", f), "do not belong together"),
}


@pytest.mark.parametrize("name", SICKNESSES)
def test_a_sick_folder_gets_a_sentence(name: str, tmp_path: Path) -> None:
    make_sick, words = SICKNESSES[name]
    folder = tiny_model(tmp_path / "m", sharded=True)
    make_sick(folder)
    report = doctor(folder)
    assert not report.ok and any(words in problem for problem in report.problems), str(report)


def test_what_is_odd_but_harmless_is_a_note(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "m", sharded=True)
    tiny_model(folder)
    (folder / "optimizer.pt").write_bytes(b"\x80")
    report = doctor(folder)
    assert report.ok
    assert any("the single file is the one that is read" in note for note in report.notes)
    assert any("never opened" in note and "optimizer.pt" in note for note in report.notes)
    assert any("no tokenizer.json" in note for note in report.notes)


def test_a_path_to_nothing_is_told_so(tmp_path: Path) -> None:
    assert doctor(tmp_path / "m").problems == [f"there is nothing at '{tmp_path / 'm'}'"]


def test_a_file_stands_for_its_folder(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "m")
    assert doctor(folder / "model.safetensors").ok


def test_a_name_too_long_for_the_system_is_a_problem_and_no_error(tmp_path: Path) -> None:
    """In the index, and as the path itself."""
    folder = tiny_model(tmp_path / "m", sharded=True)
    edit_index(folder, lambda names: names.update({"lm_head.weight": "x" * 400}))
    for path in (folder, tmp_path / ("y" * 400)):
        assert any("too long" in problem for problem in doctor(path).problems)


def test_a_device_is_no_checkpoint_and_no_error() -> None:
    """Its folder is looked at, as for a file."""
    assert any("config.json is missing" in problem for problem in doctor("/dev/null").problems)


def test_B3_weights_that_are_not_finite_are_named_on_demand(tmp_path: Path) -> None:
    """Reading all of them is asked for; without it headers alone are looked at."""
    config, tensors = read_checkpoint(tiny_model(tmp_path / "clean"))
    name = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    tensors[name] = tensors[name].copy()
    tensors[name][1, 3:5] = np.nan, np.inf
    folder = write_checkpoint(tmp_path / "sick", config, tensors)
    assert doctor(folder).ok and doctor(tmp_path / "clean", values=True).ok
    assert "weights are finite" in str(doctor(tmp_path / "clean", values=True))
    report = doctor(folder, values=True)
    assert report.opens and report.problems == ["layers.1.moe.experts.2.up: 1 NaN and 1 Inf, the first at [1, 3]"]
