"""Chat templates: the text and ids of transformers, one start token, and errors in words."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

from colibri_lab.chat import encode_chat, render
from colibri_lab.errors import ArgumentError, FormatError, UnsupportedError
from colibri_lab.tokenizer import Tokenizer

FIXTURE = Path(__file__).parent / "fixtures" / "tokenizer"
GOLDEN = json.loads((FIXTURE / "golden.json").read_text(encoding="utf-8"))
USER = [{"role": "user", "content": "x"}]


def load(folder: Path = FIXTURE) -> Tokenizer:
    tokenizer = Tokenizer.load(folder)
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=[json.dumps(case["kwargs"]) for case in GOLDEN["cases"]])
def test_text_and_ids_are_those_of_transformers(case: dict[str, Any]) -> None:
    options = {"tools": GOLDEN["tools"] if case["tools"] else None, **case["kwargs"]}
    assert render(load(), GOLDEN["messages"], **options) == case["text"]
    assert encode_chat(load(), GOLDEN["messages"], **options) == case["ids"]


class TestStartToken:
    TEMPLATE = "{{ bos_token }}[INST] {{ messages[0].content }} [/INST]"

    def adding(self) -> Tokenizer:
        """A tokenizer that puts the start token before every text."""
        from tokenizers.processors import TemplateProcessing

        tokenizer = load()
        tokenizer._inner.post_processor = TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 358)])
        return tokenizer

    def test_D3_a_template_that_writes_the_start_token_gets_no_second_one(self) -> None:
        tokenizer = self.adding()
        assert tokenizer.encode("x")[0] == 358
        ids = encode_chat(tokenizer, USER, template=self.TEMPLATE)
        assert ids.count(358) == 1 and ids[0] == 358

    def test_D3_a_doubled_start_token_warns(self) -> None:
        with pytest.warns(UserWarning, match=r"'<\|bos\|>' stands twice"):
            encode_chat(self.adding(), USER, template="{{ bos_token }}" + self.TEMPLATE)
        with pytest.warns(UserWarning, match="special=False"):
            self.adding().encode("<|bos|>x")
        with pytest.warns(UserWarning, match="already ends what the session holds"):
            encode_chat(self.adding(), USER, [1, 358], template=self.TEMPLATE)

    def test_D3_one_start_token_does_not_warn(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            encode_chat(self.adding(), USER, template=self.TEMPLATE)
            self.adding().encode("<|bos|>x", special=False)


class TestEnvironment:
    def show(self, template: str, **options: Any) -> str:
        return render(load(), USER, template=template, **options)

    def test_blocks_are_trimmed(self) -> None:
        assert self.show("{% if true %}\n  {% set a = 1 %}\nx\n{% endif %}\n") == "x\n"

    def test_loops_can_break_and_continue(self) -> None:
        skip, stop = "{% if i == 1 %}{% continue %}{% endif %}", "{% if i == 4 %}{% break %}{% endif %}"
        template = "{% for i in range(9) %}" + skip + stop + "{{ i }}{% endfor %}"
        assert self.show(template) == "023"

    def test_json_is_plain_and_not_escaped_for_html(self) -> None:
        assert self.show("{{ {'b': '<é>', 'a': 1} | tojson }}") == '{"b": "<é>", "a": 1}'
        assert (
            self.show("{{ {'b': 1, 'a': [2]} | tojson(indent=1, sort_keys=true) }}")
            == '{\n "a": [\n  2\n ],\n "b": 1\n}'
        )

    def test_the_generation_tag_shows_its_body(self) -> None:
        assert self.show("a{% generation %}b{% endgeneration %}c") == "abc"

    def test_the_date_can_be_asked_for(self) -> None:
        assert re.fullmatch(r"\d{4}", self.show("{{ strftime_now('%Y') }}"))

    def test_reasoning_is_known_under_each_of_its_names(self) -> None:
        template = "{{ messages[0].reasoning_content }}|{{ messages[0].thinking }}"
        for name in ("reasoning_content", "thinking", "reasoning"):
            assert render(load(), [{"role": "assistant", name: "why"}], template=template) == "why|why"

    def test_an_entry_that_is_none_is_absent(self) -> None:
        template = "{{ 'tool_calls' in messages[0] }}"
        assert render(load(), [{"role": "user", "tool_calls": None}], template=template) == "False"

    @pytest.mark.parametrize(
        "template",
        [
            "{{ messages.__class__.__mro__ }}",
            "{{ messages.append(1) }}",
            "{{ ''.__class__.__base__.__subclasses__() }}",
        ],
    )
    def test_a_template_cannot_leave_its_sandbox(self, template: str) -> None:
        with pytest.raises(FormatError):
            self.show(template)


class TestChoice:
    def folder(self, tmp_path: Path, chat_template: Any) -> Path:
        shutil.copytree(FIXTURE, tmp_path, dirs_exist_ok=True)
        (tmp_path / "chat_template.jinja").unlink()
        settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": chat_template}))
        return tmp_path

    def test_a_template_inside_the_tokenizer_config(self, tmp_path: Path) -> None:
        assert render(load(self.folder(tmp_path, "old {{ eos_token }}")), USER) == "old <|im_end|>"

    def test_named_templates_and_tools(self, tmp_path: Path) -> None:
        named = [
            {"name": "default", "template": "d"},
            {"name": "tool_use", "template": "t"},
            {"name": "rag", "template": "r"},
        ]
        tokenizer = load(self.folder(tmp_path, named))
        assert (
            render(tokenizer, USER) == "d"
            and render(tokenizer, USER, tools=[{}]) == "t"
            and render(tokenizer, USER, template="rag") == "r"
        )
        with pytest.raises(ArgumentError, match=r"named 'rac'; known are default, tool_use, rag; did you mean 'rag'"):
            render(tokenizer, USER, template="rac")

    def test_files_of_their_own_go_before_the_tokenizer_config(self, tmp_path: Path) -> None:
        folder = self.folder(tmp_path, "old")
        (folder / "chat_template.jinja").write_text("new")
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "rag.jinja").write_text("r")
        assert render(load(folder), USER) == "new" and render(load(folder), USER, template="rag") == "r"

    def test_without_a_template_the_error_says_what_to_do(self, tmp_path: Path) -> None:
        with pytest.raises(UnsupportedError, match=r"no chat template; feed it text instead"):
            render(load(self.folder(tmp_path, None)), USER)
        with pytest.raises(UnsupportedError, match="no tokenizer"):
            encode_chat(None, USER)

    def test_a_list_that_is_no_list_of_templates_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(FormatError, match="not a name and a template"):
            load(self.folder(tmp_path, [{"name": "default"}]))


class TestErrors:
    def test_the_templates_own_words_reach_the_user(self) -> None:
        with pytest.raises(ArgumentError, match="refuses these messages: bad role wizard"):
            render(load(), [{"role": "wizard", "content": ""}])

    def test_a_broken_template_names_its_line(self) -> None:
        with pytest.raises(FormatError, match="broken in line 2"):
            render(load(), USER, template="a\n{% if %}")

    def test_a_template_that_fails_says_how(self) -> None:
        with pytest.raises(FormatError, match="TypeError"):
            render(load(), USER, template="{{ 1 + 'a' }}")

    @pytest.mark.parametrize("messages", [["text"], [{"content": "x"}], [{"role": "user", "content": object()}]])
    def test_messages_are_dicts_of_plain_data_with_a_role(self, messages: Any) -> None:
        with pytest.raises(ArgumentError, match="message"):
            render(load(), messages)
