"""The recorder where torch is not installed, its command line, and what it makes of inputs and captures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import colibri_lab as lab
from colibri_lab.record._inputs import sequences
from colibri_lab.record._plan import wanted

BUNDLED = Path(lab.__file__).parent / "bundled" / "tiny-colibri"
WITHOUT = """
import importlib.abc, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
"""


def without(missing: str, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs code in an interpreter in which `missing` cannot be imported."""
    command = [sys.executable, "-c", WITHOUT.format(missing=missing) + code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


# ---- without torch ----


def test_without_torch_the_recorder_says_what_to_install() -> None:
    code = """
import colibri_lab as lab
try:
    lab.record.transformers(sys.argv[1], "Once")
except lab.UnsupportedError as error:
    print(error)
"""
    done = without("torch", code, str(BUNDLED))
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        "recording runs the model in PyTorch, and torch is not installed; pip install 'colibri-lab[hf]'\n"
    )


def test_without_torch_everything_else_works() -> None:
    """Importing the recorder, running the engine, its trace and an analysis load no torch."""
    code = """
import colibri_lab as lab
lab.record
session = lab.open().session()
session.feed("Once")
lab.routing.load(session.trace())
print("torch" in sys.modules, "transformers" in sys.modules)
"""
    done = without("torch", code)
    assert (done.returncode, done.stdout) == (0, "False False\n"), done.stderr


def test_without_torch_the_command_line_says_what_to_install_and_fails(tmp_path: Path) -> None:
    code = "from colibri_lab.record.__main__ import main\nsys.exit(main(sys.argv[1:]))"
    out = tmp_path / "run.safetensors"
    done = without("torch", code, str(BUNDLED), "--text", "Once", "--out", str(out))
    assert done.returncode == 1 and not done.stdout and not out.exists()
    assert done.stderr.endswith("torch is not installed; pip install 'colibri-lab[hf]'\n")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["model"], "the following arguments are required: --out"),
        (["model", "--out", "x"], "one of the arguments --text --ids is required"),
        (["model", "--out", "x", "--ids", "1,b"], "'1,b' is no list of whole numbers such as 1,2,3"),
        (["model", "--out", "x", "--ids", "1", "--dtype", "int8"], "invalid choice: 'int8'"),
    ],
)
def test_a_wrong_command_line_ends_with_2_and_one_sentence(arguments: list[str], sentence: str) -> None:
    done = subprocess.run([sys.executable, "-m", "colibri_lab.record", *arguments], capture_output=True, text=True)
    assert done.returncode == 2 and sentence in done.stderr.splitlines()[-1] and not done.stdout


# ---- inputs ----


class Words:
    """A tokenizer with a start token and one id per word."""

    def encode(self, text: str) -> list[int]:
        return [1, *(len(word) for word in text.split())]


def parsed(inputs: object) -> tuple[list[list[int]], bool]:
    return sequences(inputs, Words, 20)


@pytest.mark.parametrize(
    ("inputs", "rows", "several"),
    [
        ("one three", [[1, 3, 5]], False),
        (["one", "three"], [[1, 3], [1, 5]], True),
        ([4, 5], [[4, 5]], False),
        (np.array([4, 5], np.uint8), [[4, 5]], False),
        ([[4, 5]], [[4, 5]], False),
        ([[4, 5], [6]], [[4, 5], [6]], True),
        ({"input_ids": [[0, 0, 5], [4, 5, 6]], "attention_mask": [[0, 0, 1], [1, 1, 1]]}, [[5], [4, 5, 6]], True),
        ({"input_ids": np.array([[5, 0]]), "attention_mask": np.array([[True, False]])}, [[5]], False),
        ({"input_ids": [4, 5], "attention_mask": [1, 1], "token_type_ids": [0, 0]}, [[4, 5]], False),
    ],
)
def test_inputs_become_rows_of_ids_without_padding(inputs: object, rows: list[list[int]], several: bool) -> None:
    assert parsed(inputs) == (rows, several)


@pytest.mark.parametrize(
    ("inputs", "sentence"),
    [
        ([], "the input has no token"),
        ("", None),
        ([[4], []], "sequence 1 has no token"),
        ([4, 20], "the input, place 1: token id 20 is outside the vocabulary of 20"),
        ([[4], [-1]], "sequence 1, place 0: token id -1 is outside the vocabulary of 20"),
        ([1.5], "whole numbers"),
        (None, "the input is a text, a row of token ids or rows of them"),
        (7, "the input is a text, a row of token ids or rows of them"),
        ([[[1]]], "the input is a text, a row of token ids or rows of them"),
        ([1, [2]], "nested unevenly"),
        ({"inputs_embeds": [1]}, "a batch holds input_ids and, if it is padded, attention_mask; this one has"),
        ({"input_ids": [1], "position_ids": [0]}, "this one has input_ids, position_ids"),
        ({"input_ids": [[1, 2]], "attention_mask": [[1]]}, "attention_mask has rows of [1] entries, input_ids of [2]"),
        ({"input_ids": [[1, 2, 3]], "attention_mask": [[1, 0, 1]]}, "attention_mask, row 0: padding stands left or"),
        ({"input_ids": [[1, 2]], "attention_mask": [[2, 2]]}, "attention_mask, row 0"),
        ({"input_ids": [[1], [2]], "attention_mask": [[1], [0]]}, "sequence 1 has no token"),
    ],
)
def test_inputs_that_are_none_are_refused_by_row_and_place(inputs: object, sentence: str | None) -> None:
    if sentence is None:
        assert parsed(inputs) == ([[1]], False)  # an empty text still has the start token
        return
    with pytest.raises(lab.ArgumentError) as caught:
        parsed(inputs)
    assert sentence in str(caught.value)


# ---- captures ----

MODEL = lab.open()


@pytest.mark.parametrize(
    "capture",
    [
        "routing",
        "moe",
        "all",
        "logits",
        "layers.*.moe.gates",
        "layers.1.*",
        "*",
        "layers.0.moe.experts.3.gate",
        "layers.*.moe.experts.1*.input",
        "layers.0.moe.dispatch.offsets",
        "layers.*.attn.weights",
        "*.weights",
        ["routing", "norm", "layers.2.attn.out"],
    ],
)
def test_a_capture_keeps_what_a_session_keeps_but_for_the_cache(capture: str | list[str]) -> None:
    """The engine resolves the same patterns; keys and values, which its cache always holds, are told apart."""
    every = MODEL.session(capture=["all", "layers.*.attn.weights"])
    every.feed([1, 2])
    session = MODEL.session(capture=capture)
    session.feed([1, 2])
    cache = {path for path in every.trace() if path.endswith((".attn.k", ".attn.v"))}
    _, kept = wanted(capture, list(every.trace()), MODEL.config.num_experts)
    assert kept - cache == set(session.trace()) - cache
    assert bool(kept & cache) == (capture in ("all", "*", "layers.1.*"))


@pytest.mark.parametrize(
    ("capture", "sentence"),
    [
        ("none", 'capture "none" would record nothing'),
        ("al", 'capture "al" names no tap of this model; did you mean \'all\'?'),
        ("layers.0.moe.gate", "did you mean 'layers.0.moe.gates'"),
        ([], "capture takes a level or a list of tap patterns"),
        (3, "capture takes a level or a list of tap patterns"),
        (["moe", 3], "capture takes a level or a list of tap patterns"),
    ],
)
def test_a_capture_that_names_nothing_is_refused(capture: object, sentence: str) -> None:
    with pytest.raises(lab.ArgumentError) as caught:
        wanted(capture, ["logits", "layers.0.moe.gates"], 8)
    assert sentence in str(caught.value)


@pytest.mark.parametrize("capture", ["*" * 60 + "x", "*a" * 40 + "x"])
def test_a_pattern_of_many_stars_is_answered_at_once(capture: str) -> None:
    """Each star is tried at one place; trying all would outlive the person who waits."""
    code = f"from colibri_lab.record._plan import wanted\nwanted({capture!r}, ['layers.0.moe.dispatch.hidden'], 64)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "names no tap of this model" in done.stderr


def test_stars_stand_for_any_run_of_characters() -> None:
    paths = ["logits", "layers.0.output", "layers.0.moe.output", "layers.10.moe.output"]
    for capture, kept in (
        ("*", paths), ("layers.*.output", paths[1:]), ("*0*.moe.*", paths[2:]), ("l*o*t*t", paths[1:]),
        ("**output", paths[1:]), ("logits*", paths[:1]), ("*0.output", paths[1:2]), ("layers.*.moe.*.*", []),
    ):  # fmt: skip
        if kept:
            assert wanted(capture, paths, 4)[1] == set(kept), capture
        else:
            with pytest.raises(lab.ArgumentError):
                wanted(capture, paths, 4)
