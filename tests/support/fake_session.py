"""A session without an engine, whose every step a test controls."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from colibri_lab.errors import BusyError
from colibri_lab.testing import synthetic_trace
from colibri_lab.trace import Trace


class Tokenizer:
    """One token per character."""

    def encode(self, text: str, special: bool = True) -> list[int]:
        return [ord(c) for c in text]


class Model:
    path = Path("a-model")
    tokenizer: Tokenizer | None = Tokenizer()


class FakeSession:
    """A session whose every step the test controls."""

    def __init__(self, max_tokens: int = 50) -> None:
        self.model, self.max_tokens = Model(), max_tokens
        self.tokens = 0
        self.refuse = 0  # calls that answer "busy"
        self.fail: Exception | None = None
        self.on_step: Any = lambda done: None

    @property
    def ids(self) -> list[int]:
        return list(range(self.tokens))

    def enter(self) -> None:
        if self.refuse:
            self.refuse -= 1
            raise BusyError("session busy: another call is inside it")

    def feed(self, x: list[int], progress: Any = None) -> None:
        self.enter()
        for i in range(len(x)):
            self.on_step(i)
            progress((i + 1) / len(x))
        if self.fail:
            raise self.fail
        self.tokens += len(x)

    def generate(self, n: int, *, progress: Any = None) -> Iterator[int]:
        for i in range(n):
            self.enter()
            self.on_step(i)
            if self.fail and i == 2:
                raise self.fail
            self.tokens += 1
            yield self.tokens - 1

    def reset(self) -> None:
        self.enter()
        self.tokens = 0

    def trace(self) -> Trace:
        self.enter()
        return synthetic_trace(4, 8, 2, self.tokens, seed=self.tokens)
