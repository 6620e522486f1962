"""Text to token ids and back, over the `tokenizers` library and a checkpoint's own tokenizer.json.

Ids are those of the library by construction. Text is put together from bytes (see `streaming`), so that what a
generation streams and what `decode` gives are the same.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterable, Mapping
from functools import cached_property
from operator import index
from os import PathLike
from pathlib import Path
from typing import Any, SupportsIndex

from colibri_lab._files import local_path
from colibri_lab.errors import ArgumentError, FileError, FormatError
from colibri_lab.sniff import read_json
from colibri_lab.streaming import TextStream

__all__ = ["Tokenizer", "end_ids"]

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """A checkpoint's tokenizer. Make one with `Tokenizer.load(folder)`.

    Attributes:
        eos_ids: ids that end a text, from generation_config.json, else config.json, else the tokenizer's own end token.
        bos_id: id of the start token, or None.
        special_tokens: strings by role (`bos_token`, `eos_token` …), as tokenizer_config.json names them.
        chat_templates: Jinja source by name; `default` is the ordinary one. Empty when the checkpoint has none.
    """

    def __init__(
        self,
        inner: Any,
        *,
        eos_ids: Iterable[int] = (),
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        self._inner = inner
        self._inner.no_truncation()
        self._inner.no_padding()
        self.special_tokens = dict(special_tokens or {})
        self.chat_templates = dict(chat_templates or {})
        self.bos_id: int | None = self._id_of("bos_token")
        own_end = self._id_of("eos_token")
        self.eos_ids: tuple[int, ...] = tuple(eos_ids) or (() if own_end is None else (own_end,))
        self._pieces: dict[tuple[int, bool], bytes] = {}
        kinds = _decoder_kinds(json.loads(inner.to_str()).get("decoder"))
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        self._anchor = None if self._byte_level else self._find_anchor()

    @classmethod
    def load(cls, folder: str | PathLike[str]) -> Tokenizer | None:
        """The tokenizer of a checkpoint folder; None when it has no tokenizer.json.

        Raises FormatError, naming the file, when tokenizer.json or a file beside it is broken, or when the tokenizer
        has ids that the model's vocab_size does not cover (a larger vocab_size is common and fine).
        """
        import tokenizers

        path = local_path(folder)
        file = path / "tokenizer.json"
        if not file.is_file():
            return None
        try:
            inner = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception for everything
            read_json(file)  # says better what is wrong with a file that is no JSON at all
            raise FormatError(f"{file} is no tokenizer that the tokenizers library reads: {error}") from error
        config = _read(path / "config.json")
        settings = {**_read(path / "special_tokens_map.json"), **_read(path / "tokenizer_config.json")}
        vocab_size, largest = config.get("vocab_size"), max(inner.get_vocab().values(), default=-1)
        if isinstance(vocab_size, int) and largest >= vocab_size:
            token = inner.id_to_token(largest)
            raise FormatError(
                f"{file} has the token {token!r} with id {largest}, but config.json gives vocab_size {vocab_size}: "
                "tokenizer and model do not belong together"
            )
        return cls(
            inner,
            eos_ids=end_ids(path),
            special_tokens=_special_tokens(settings),
            chat_templates=_chat_templates(path, settings),
        )

    @property
    def vocab_size(self) -> int:
        """Number of ids the tokenizer knows, added tokens included; the model's own may be larger."""
        return int(self._inner.get_vocab_size(with_added_tokens=True))

    @cached_property
    def longest(self) -> int:
        """At least the bytes that the text of one token can have in UTF-8, as `texts` gives it."""
        names = self._inner.get_vocab(with_added_tokens=True)
        return 64 + 4 * max((len(name.encode("utf-8", "replace")) for name in names), default=0)  # U+FFFD for a byte: 3

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids of `text`. `special` lets the tokenizer add its own tokens (such as `<s>`) around it.

        Special tokens written in the text are always taken as tokens. A start token that is then there twice gives a
        warning.
        Raises ArgumentError for what is no text, or not Unicode (a lone surrogate).
        """
        if not isinstance(text, str):
            raise ArgumentError(f"encode takes a text; this is {text!r:.80}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ArgumentError(
                f"the text has a lone surrogate at character {error.start}; it is not valid Unicode"
            ) from None
        ids: list[int] = self._inner.encode(text, add_special_tokens=special).ids
        if self.bos_id is not None and ids[:2] == [self.bos_id] * 2:
            token = self.special_tokens["bos_token"]
            hint = "use special=False for text that already has it" if special else "the text itself has it twice"
            warnings.warn(f"the start token {token!r} stands twice at the beginning; {hint}", stacklevel=2)
        return ids

    def decode(self, ids: Iterable[SupportsIndex], special: bool = True) -> str:
        """The text of `ids`; `special=False` leaves special tokens out.

        Equals the library's decode for whole text. Bytes that form no character are shown as U+FFFD, ids that the
        tokenizer does not know as ⟨id⟩. Raises ArgumentError for what are no ids.
        """
        hidden = frozenset() if special else self._special_ids()
        return "".join(TextStream(self).all(token_id for token_id in _whole(ids) if token_id not in hidden))

    def texts(self, ids: Iterable[SupportsIndex]) -> list[str]:
        """One readable text per token, which joined are `decode(ids)`.

        A character spelled by several tokens belongs to the last of them, and the others have "". Raises ArgumentError
        for what are no ids.
        """
        return TextStream(self).all(_whole(ids))

    def token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it (with `Ġ` or `▁` for a space), or None."""
        (number,) = _whole([token_id])
        name: str | None = self._inner.id_to_token(number) if 0 <= number < 2**32 else None  # what the library takes
        return name

    def piece(self, token_id: int, first: bool = False) -> bytes:
        """The bytes that one token adds to a text; `first` at its start, where some tokenizers drop a space."""
        key = (token_id, first)
        if key not in self._pieces:
            self._pieces[key] = self._piece(token_id, first)
        return self._pieces[key]

    def __repr__(self) -> str:
        chat = f", chat templates {', '.join(self.chat_templates)}" if self.chat_templates else ""
        return f"<Tokenizer of {self.vocab_size} tokens, ends at {list(self.eos_ids)}{chat}>"

    # ---- inside ----

    def _piece(self, token_id: int, first: bool) -> bytes:
        name = self.token(token_id)
        if name is None:
            return f"⟨{token_id}⟩".encode()
        if self._byte_level:
            # Added tokens are spelled as they are; a piece is one only if every character stands for a byte.
            return bytes(_BYTES[c] for c in name) if all(c in _BYTES for c in name) else name.encode()
        byte = _BYTE.fullmatch(name) if self._byte_fallback else None
        if byte is not None and not (first and name == "<0x20>"):
            return bytes([int(byte[1], 16)])
        if first or self._anchor is None:
            return self._library([token_id]).encode()
        return self._library([self._anchor, token_id])[len(self._library([self._anchor])) :].encode()

    def _library(self, ids: list[int]) -> str:
        return str(self._inner.decode(ids, skip_special_tokens=False))

    def _find_anchor(self) -> int | None:
        """An ordinary token, after which the others are decoded as they are inside a text."""
        special = self._special_ids()
        for name, token_id in sorted(self._inner.get_vocab().items(), key=lambda item: item[1]):
            if token_id not in special and not _BYTE.fullmatch(name) and self._library([token_id]).isalpha():
                return int(token_id)
        return None

    def _special_ids(self) -> frozenset[int]:
        return frozenset(i for i, token in self._inner.get_added_tokens_decoder().items() if token.special)

    def _id_of(self, role: str) -> int | None:
        token = self.special_tokens.get(role)
        found: int | None = None if token is None else self._inner.token_to_id(token)
        return found


def _whole(ids: Iterable[SupportsIndex]) -> list[int]:
    """The ids as a list of int; a generated Token counts as its id."""
    try:
        return [index(token_id) for token_id in ids]
    except TypeError:
        raise ArgumentError(f"token ids are a row of whole numbers; this is {ids!r:.80}") from None


def _byte_alphabet() -> dict[str, int]:
    """Byte-level tokenizers spell each byte as one printable character: printable Latin-1 as itself, the others from
    U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_alphabet()


def _decoder_kinds(decoder: Any) -> set[str]:
    """Names of all steps of a decoder as tokenizer.json writes it."""
    if not isinstance(decoder, dict):
        return set()
    return {str(decoder.get("type"))}.union(*(_decoder_kinds(step) for step in decoder.get("decoders", ())))


def end_ids(folder: Path) -> tuple[int, ...]:
    """The end tokens that a checkpoint folder names: `eos_token_id` of generation_config.json, else of config.json.

    () when neither names one. Raises FormatError or FileError, naming the file, when one of them is there and cannot be
    read, or its `eos_token_id` is no id, list of ids or null.
    """
    for file in (folder / "generation_config.json", folder / "config.json"):
        value = _read(file).get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in ids):
            raise FormatError(f"{file}: eos_token_id is {value!r:.60}; it must be an id or a list of ids")
        if ids:
            return tuple(dict.fromkeys(ids))
    return ()


def _read(file: Path) -> dict[str, Any]:
    """A JSON object from a file beside the tokenizer; {} when there is no such file."""
    if file.exists() and not file.is_file():
        raise FileError(f"cannot read {file}: it is no regular file")  # reading a pipe would wait for ever
    return read_json(file) if file.exists() else {}


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Special-token strings by role; each is written as a string or as an object with `content`."""
    out = {}
    for role in _SPECIAL:
        value = settings.get(role)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            out[role] = value
    return out


def _chat_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name: from tokenizer_config.json (a string, or a list of named ones), over it the .jinja files."""
    out: dict[str, str] = {}
    written = settings.get("chat_template")
    if isinstance(written, str):
        out["default"] = written
    elif isinstance(written, list):
        for entry in written:
            if not (
                isinstance(entry, dict)
                and isinstance(entry.get("name"), str)
                and isinstance(entry.get("template"), str)
            ):
                raise FormatError(
                    f"{folder / 'tokenizer_config.json'}: chat_template holds {entry!r:.60}, not a name and a template"
                )
            out[entry["name"]] = entry["template"]
    files = [("default", folder / "chat_template.jinja")]
    files += [(file.stem, file) for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))]
    for name, file in files:
        if file.is_file():
            try:
                out[name] = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise FileError(f"cannot read {file}: {error}") from error
    return out
