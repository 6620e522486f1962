"""Tokenizer: ids of the library, readable text, end tokens, and broken files named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from colibri_lab.errors import ArgumentError, FormatError
from colibri_lab.tokenizer import Tokenizer

FIXTURE = Path(__file__).parent / "fixtures" / "tokenizer"
GOLDEN = json.loads((FIXTURE / "golden.json").read_text(encoding="utf-8"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FIXTURE, tmp_path / "model"))


def write(folder: Path, name: str, **content: Any) -> None:
    (folder / name).write_text(json.dumps(content), encoding="utf-8")


def load(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer.load(folder)
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize("case", GOLDEN["texts"], ids=[case["text"] for case in GOLDEN["texts"]])
def test_D2_ids_and_text_are_those_of_transformers(case: dict[str, Any]) -> None:
    tokenizer = load(FIXTURE)
    assert tokenizer.encode(case["text"]) == case["transformers_ids"]
    assert tokenizer.decode(case["transformers_ids"], special=False) == case["decode_skip"]


@pytest.mark.parametrize(
    ("text", "token"),
    [
        (".<|im_end|>", 361),
        ("x<|im_end|>", 361),
        (" \n<think>(", 362),
        ("好<|bos|><|bos|>x", 358),
        ("你<|im_start|>好", 360),
    ],
)
def test_D2_added_tokens_are_seen_whatever_stands_before_them(text: str, token: int) -> None:
    tokenizer = load(FIXTURE)
    assert token in tokenizer.encode(text, special=False)


@pytest.mark.parametrize(
    "text",
    [
        ".<|im_end|>",
        "a  b",
        "    if x:",
        "(abc",
        " 20",
        "it's IT'S",
        "12345678",
        "你好\n\n  def f(x):\r\n\t# é",
        "🙂🙂 <think> ",
    ],
)
def test_D2_ids_equal_the_librarys_and_text_comes_back(text: str) -> None:
    tokenizer = load(FIXTURE)
    ids = tokenizer.encode(text)
    assert ids == tokenizers.Tokenizer.from_file(str(FIXTURE / "tokenizer.json")).encode(text).ids
    assert tokenizer.decode(ids) == text == "".join(tokenizer.texts(ids))


class TestText:
    def test_there_is_one_text_per_token_and_a_split_character_belongs_to_its_last_token(self) -> None:
        tokenizer = load(FIXTURE)
        ids = tokenizer.encode("é好", special=False)
        assert len(tokenizer.texts(ids)) == len(ids) and "".join(tokenizer.texts(ids)) == "é好"
        assert tokenizer.texts(ids[:-1])[-1] in ("é", "\ufffd", "")

    def test_an_id_that_the_tokenizer_does_not_know_is_shown_as_a_number(self) -> None:
        assert load(FIXTURE).texts([64, 5000, -1]) == ["a", "⟨5000⟩", "⟨-1⟩"]

    def test_special_tokens_are_shown_unless_left_out(self) -> None:
        tokenizer = load(FIXTURE)
        assert (
            tokenizer.decode([358, 64, 361]) == "<|bos|>a<|im_end|>"
            and tokenizer.decode([358, 64, 361], special=False) == "a"
        )

    def test_a_lone_surrogate_is_refused(self) -> None:
        with pytest.raises(ArgumentError, match="lone surrogate at character 1"):
            load(FIXTURE).encode("a\ud800")

    def test_long_text_is_neither_cut_nor_padded(self, folder: Path) -> None:
        file = json.loads((folder / "tokenizer.json").read_text())
        file["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
        write(folder, "tokenizer.json", **file)
        assert len(load(folder).encode("a b c d e f g")) > 6


class TestSettings:
    def test_the_generation_config_names_the_end_tokens_before_the_config(self, folder: Path) -> None:
        write(folder, "config.json", eos_token_id=5, vocab_size=400)
        assert load(folder).eos_ids == (361, 359)
        write(folder, "generation_config.json", eos_token_id=7)
        assert load(folder).eos_ids == (7,)
        (folder / "generation_config.json").unlink()
        assert load(folder).eos_ids == (5,)
        write(folder, "config.json", eos_token_id=None)
        assert load(folder).eos_ids == (361,)  # <|im_end|>, the tokenizer's own

    def test_special_tokens_are_strings_or_objects(self, folder: Path) -> None:
        write(folder, "tokenizer_config.json", bos_token={"content": "<|bos|>", "lstrip": False}, eos_token=None)
        (folder / "generation_config.json").unlink()
        tokenizer = load(folder)
        assert (
            tokenizer.special_tokens == {"bos_token": "<|bos|>"} and tokenizer.bos_id == 358 and tokenizer.eos_ids == ()
        )

    def test_a_folder_without_a_tokenizer_has_none(self, tmp_path: Path) -> None:
        assert Tokenizer.load(tmp_path) is None

    def test_a_larger_vocabulary_of_the_model_is_fine_and_a_smaller_one_is_not(self, folder: Path) -> None:
        write(folder, "config.json", vocab_size=384)
        assert load(folder).vocab_size == 363
        write(folder, "config.json", vocab_size=362)
        with pytest.raises(
            FormatError,
            match=r"tokenizer\.json has the token '<think>' with id 362, but config.json gives vocab_size 362",
        ):
            load(folder)

    @pytest.mark.parametrize(
        "content", ["", "{", "[]", '{"version": "1.0"}', "version https://git-lfs.github.com/spec/v1\n"]
    )
    def test_a_broken_tokenizer_file_is_named(self, content: str, folder: Path) -> None:
        (folder / "tokenizer.json").write_text(content)
        with pytest.raises(FormatError, match=r"tokenizer\.json"):
            load(folder)

    @pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
    def test_a_broken_file_beside_it_is_named(self, name: str, folder: Path) -> None:
        (folder / name).write_text("[" * 100_000)
        with pytest.raises(FormatError, match=name.replace(".", r"\.")):
            load(folder)

    @pytest.mark.parametrize("value", ["2", [1, None], True, -1, {"a": 1}])
    def test_end_tokens_that_are_no_ids_are_refused(self, value: Any, folder: Path) -> None:
        write(folder, "generation_config.json", eos_token_id=value)
        with pytest.raises(FormatError, match="eos_token_id"):
            load(folder)
