"""Chat templates: a list of messages to the text, or the ids, that the model was trained to see.

A template is untrusted code from a checkpoint: it runs in Jinja's immutable sandbox and sees plain JSON data only. The
environment is that of transformers (trimmed blocks, `break` and `continue`, `tojson`, `raise_exception`,
`strftime_now`, the `generation` tag), so the text is the same.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from colibri_lab.errors import ArgumentError, FormatError, UnsupportedError, nearest
from colibri_lab.tokenizer import Tokenizer

__all__ = ["encode_chat", "render"]

Message = Mapping[str, Any]

# One thing under three names; the first is the standard one.
_REASONING = ("reasoning_content", "thinking", "reasoning")


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    template: str | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    **variables: Any,
) -> str:
    """The messages as one text, by the checkpoint's chat template.

    `messages` are dicts with `role` and `content`. `template` is the name of one of `tokenizer.chat_templates` or Jinja
    source; by default `tool_use` when tools are given and there is one, else `default`. `variables` (such as
    enable_thinking=False) are passed on.

    Raises UnsupportedError when there is no template, ArgumentError for messages that are not plain data, or with the
    template's own words when it refuses the messages; FormatError when the template itself is broken.
    """
    source = _choose(tokenizer, template, bool(tools))
    data = _plain({"messages": [_tidy(m) for m in messages], "tools": tools, "documents": documents} | variables)
    data["add_generation_prompt"] = add_generation_prompt
    try:
        return str(_compile(source).render({**tokenizer.special_tokens, **data}))
    except jinja2.TemplateSyntaxError as error:
        raise FormatError(f"the chat template is broken in line {error.lineno}: {error.message}") from error
    except _Refused as error:
        raise ArgumentError(f"the chat template refuses these messages: {error}") from error
    except jinja2.TemplateError as error:
        raise FormatError(f"the chat template cannot be applied to these messages: {error}") from error
    except (TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
        raise FormatError(f"the chat template fails on these messages: {type(error).__name__}: {error}") from error


def encode_chat(
    tokenizer: Tokenizer | None, messages: Sequence[Message], before: Sequence[int] = (), **options: Any
) -> list[int]:
    """Token ids of the rendered messages; options as for `render`. `before` are the ids that the session already holds.

    The template writes the start token itself, so the tokenizer adds none. Warns when it then stands there twice all
    the same. Raises as `render`, and UnsupportedError when there is no tokenizer.
    """
    if tokenizer is None:
        raise UnsupportedError("this checkpoint has no tokenizer.json, so it takes token ids, not messages")
    ids = tokenizer.encode(render(tokenizer, messages, **options), special=False)
    if before and ids and before[-1] == ids[0] == tokenizer.bos_id:
        warnings.warn(
            f"the start token {tokenizer.special_tokens['bos_token']!r} already ends what the session holds, and the "
            "chat template writes it again; start the chat in an empty session",
            stacklevel=2,
        )
    return ids


def _choose(tokenizer: Tokenizer, template: str | None, with_tools: bool) -> str:
    named = tokenizer.chat_templates
    if template is not None:
        if template not in named and "{" not in template:
            known = f"known are {', '.join(named)}" if named else "this checkpoint has none"
            raise ArgumentError(f"no chat template is named '{template}'; {known}{nearest(template, named)}")
        return named.get(template, template)
    if with_tools and "tool_use" in named:
        return named["tool_use"]
    if "default" in named:
        return named["default"]
    if named:
        raise ArgumentError(
            f"this checkpoint has chat templates but no default; pass template= one of {', '.join(named)}"
        )
    raise UnsupportedError(
        'this checkpoint has no chat template; feed it text instead, as in session.feed("Question: …\\nAnswer:"), '
        "or pass template= with Jinja source"
    )


def _tidy(message: Message) -> dict[str, Any]:
    """Entries that are None left out, reasoning under each of its usual names, as transformers does."""
    if not isinstance(message, Mapping):
        raise ArgumentError(
            f"a chat message is a dict with 'role' and 'content'; this one is a {type(message).__name__}"
        )
    if "role" not in message:
        raise ArgumentError(f"a chat message needs a 'role'; this one has {', '.join(map(str, message)) or 'nothing'}")
    kept = {key: value for key, value in message.items() if value is not None}
    reasoning = next((kept[name] for name in _REASONING if name in kept), None)
    return kept if reasoning is None else {"thinking": reasoning} | kept | {"reasoning_content": reasoning}


def _plain(value: dict[str, Any]) -> dict[str, Any]:
    """A copy made of JSON types only: nothing with methods reaches the template."""
    try:
        plain: dict[str, Any] = json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise ArgumentError(f"chat messages must be plain data (strings, numbers, lists, dicts): {error}") from error
    return plain


class _Refused(jinja2.TemplateError):
    """Raised by a template through raise_exception(message)."""


class _GenerationTag(Extension):
    """`{% generation %} … {% endgeneration %}` marks the model's own words for training; here it shows its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _refuse(message: str) -> None:
    raise _Refused(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own filter escapes < and > for HTML; a model was trained on plain JSON."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda style: datetime.now().strftime(style)
    return environment.from_string(source)
