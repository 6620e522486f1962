"""The texts of tokens as trace files have them: bytes and offsets, of which strings are made when asked for."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from colibri_lab.errors import FormatError

__all__ = ["Utf8Texts"]

_TOKENS, _BYTES = 1 << 16, 1 << 20  # looked at at a time


@dataclass(frozen=True, slots=True, eq=False)
class Utf8Texts:
    """T texts: `data` (bytes,) uint8, all of them in UTF-8, one after the other; text t is [offsets[t], offsets[t+1]).
    `offsets` (T+1,) int64.
    """

    data: NDArray[Any]
    offsets: NDArray[Any]

    @classmethod
    def of(cls, texts: Iterable[str]) -> Self:
        """Strings as bytes; what UTF-8 has no bytes for (a lone surrogate) becomes a backslash and its number."""
        encoded = [text.encode("utf-8", "backslashreplace") for text in texts]
        offsets = np.concatenate([[0], np.cumsum([len(text) for text in encoded])]).astype(np.int64)
        return cls(np.frombuffer(b"".join(encoded), np.uint8), offsets)

    @classmethod
    def empty(cls, tokens: int) -> Self:
        """So many tokens without a text."""
        return cls(np.empty(0, np.uint8), np.zeros(tokens + 1, np.int64))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def strings(self, start: int = 0, stop: int | None = None) -> list[str]:
        """The texts of tokens [start, stop), as of a slice.

        Bytes of a recording that went on to write there since they were checked may be no UTF-8 any more: they show as
        backslashes and numbers.
        """
        out: list[str] = []
        for first, end in _pieces(*slice(start, stop).indices(len(self))[:2], _TOKENS):
            fences = self.offsets[first : end + 1]
            raw, cuts = self.data[fences[0] : fences[-1]].tobytes(), (fences - fences[0]).tolist()
            out += [raw[a:b].decode("utf-8", "backslashreplace") for a, b in pairwise(cuts)]
        return out

    def check(self, tokens: int) -> None:
        """Raises FormatError unless these are the texts of so many tokens. Makes no strings, and reads in pieces."""
        data, offsets = self.data, self.offsets
        fences = offsets.dtype == np.int64 and offsets.shape == (tokens + 1,)
        if not fences or data.dtype != np.uint8 or data.ndim != 1 or not self._rise():
            raise FormatError(
                f"tokens.text_offsets must be {tokens + 1} int64 rising from 0 to the length of tokens.text "
                f"({data.size})"
            )
        decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            for start, stop in _pieces(0, len(data), _BYTES):
                decoder.decode(data[start:stop].tobytes(), final=stop == len(data))
        except UnicodeDecodeError as error:
            raise FormatError(f"tokens.text is not UTF-8: {error}") from error
        for start, stop in _pieces(0, tokens, _TOKENS):
            begins = offsets[start:stop]
            inside = data[begins[begins < len(data)]] & 0xC0 == 0x80  # a byte that goes on with a character
            if inside.any():
                raise FormatError(
                    f"tokens.text is not UTF-8 where token {start + int(inside.argmax())} begins: inside a character"
                )

    def _rise(self) -> bool:
        offsets = self.offsets
        return bool(offsets[0] == 0 and offsets[-1] == len(self.data)) and all(
            bool((offsets[start + 1 : stop + 1] >= offsets[start:stop]).all())
            for start, stop in _pieces(0, len(self), _TOKENS)
        )


def _pieces(start: int, stop: int, step: int) -> Iterable[tuple[int, int]]:
    return ((first, min(first + step, stop)) for first in range(start, stop, step))
