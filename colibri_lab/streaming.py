"""TextStream: tokens in, text out, never half a character.

A character's bytes may be spread over several tokens (U+AE70 is EA B9 B0, three tokens in a vocabulary that spells it
by bytes). Decoding each token alone would lose it. The stream keeps the unfinished bytes back and gives the character
out with the token that completes it. `Tokenizer.decode` and `.texts` are this same stream, so the pieces always join to
the whole.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Protocol

__all__ = ["Pieces", "TextStream"]


class Pieces(Protocol):
    """What a stream needs of a tokenizer."""

    def piece(self, token_id: int, first: bool = False) -> bytes:
        """The bytes that one token adds; `first` at the start of a text, where some tokenizers drop a space."""


class TextStream:
    """Turns token ids into text, one at a time.

        stream = TextStream(tokenizer)
        for token_id in ids:
            print(stream.push(token_id), end="")
        print(stream.flush())

    What is pushed out so far is always a prefix of the text; bytes that can no longer become a character are shown as
    U+FFFD.
    """

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._first = True

    def push(self, token_id: int) -> str:
        """The text that this token completes; "" while a character is unfinished."""
        piece = self._pieces.piece(int(token_id), self._first)
        self._first = False
        return self._decoder.decode(piece)

    def flush(self) -> str:
        """U+FFFD for bytes still waiting, else "". The stream may go on afterwards."""
        return self._decoder.decode(b"", final=True)

    def unfinished(self) -> str:
        """What `flush` would give now; the bytes go on waiting."""
        state = self._decoder.getstate()
        text = self.flush()
        self._decoder.setstate(state)
        return text

    def all(self, ids: Iterable[int]) -> list[str]:
        """The text of each id, the last one with whatever `flush` gives."""
        texts = [self.push(token_id) for token_id in ids]
        rest = self.flush()
        if texts:
            texts[-1] += rest
        return texts
