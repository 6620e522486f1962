"""TextStream: characters whose bytes span tokens are neither lost nor early."""

from __future__ import annotations

import itertools

import pytest
import tokenizers
from tokenizers import decoders, models

from colibri_lab.streaming import TextStream
from colibri_lab.tokenizer import Tokenizer


def byte_fallback() -> Tokenizer:
    """Like Mixtral's: byte b has the id b + 3, words carry ▁ for a space, one leading space is dropped."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{b:02X}>": b + 3 for b in range(256)}
    vocabulary |= {word: 259 + n for n, word in enumerate(["▁a", "▁Hello", "b", "▁", "é"])}
    inner = tokenizers.Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(inner)


def byte_level() -> Tokenizer:
    """Like Qwen's: every byte is a token, spelled as one printable character."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(models.BPE({c: n for n, c in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|end|>"])
    inner.add_tokens(["<think>", "ü Ġ"])
    return Tokenizer(inner)


def test_D1_a_character_comes_with_the_token_that_completes_it() -> None:
    stream = TextStream(byte_fallback())
    assert [stream.push(i) for i in (237, 188, 179)] == ["", "", "\uae70"]
    assert stream.flush() == ""


def test_D1_an_unfinished_character_is_flushed_as_something_visible() -> None:
    stream = TextStream(byte_fallback())
    assert stream.push(237) + stream.push(188) == ""
    assert stream.flush() == "\ufffd"
    assert stream.push(261) == "b"  # and the stream goes on


IDS = [1, 260, 237, 188, 179, 259, 262, 237, 188, 261, 237, 188, 179, 240, 162, 157, 133, 263, 2, 72, 131, 3]


@pytest.mark.parametrize("cut", range(len(IDS) + 1))
def test_D1_the_stream_joins_to_the_one_shot_decode_at_every_split(cut: int) -> None:
    tokenizer = byte_fallback()
    head, tail = IDS[:cut], IDS[cut:]
    stream = TextStream(tokenizer)
    first = "".join(stream.push(i) for i in head)
    assert tokenizer.decode(IDS).startswith(first)
    assert first + "".join(stream.push(i) for i in tail) + stream.flush() == tokenizer.decode(IDS)
    stopped = TextStream(tokenizer)
    assert "".join(stopped.push(i) for i in head) + stopped.flush() == tokenizer.decode(head)


@pytest.mark.parametrize("make", [byte_fallback, byte_level])
def test_D1_whole_text_decodes_as_the_library_does(make: type) -> None:
    tokenizer = make()
    for text in ("Hello", "  a  b", "\uae70 x\uae70", "🙂é", "", "a\n\nb", "\x00\x7f"):
        ids = tokenizer.encode(text, special=False)
        for start in ([], [1]) if make is byte_fallback else ([],):
            assert tokenizer.decode(start + ids) == tokenizer._inner.decode(start + ids, skip_special_tokens=False)
            assert "".join(tokenizer.texts(start + ids)) == tokenizer.decode(start + ids)


def test_D1_any_bytes_decode_as_the_library_does_byte_level() -> None:
    tokenizer = byte_level()
    interesting = [tokenizer._inner.token_to_id(c) for c in "aêħ°ðŁ"] + [256, 257, 258]
    for ids in itertools.product(interesting, repeat=4):
        assert tokenizer.decode(ids) == tokenizer._inner.decode(list(ids), skip_special_tokens=False)
        assert "".join(tokenizer.texts(ids)) == tokenizer.decode(ids)
