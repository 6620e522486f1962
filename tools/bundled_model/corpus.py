"""The corpus as training and report read it: documents, one long row of tokens per domain, windows of held-out text.

Needs NumPy and a tokenizer with `encode(text) -> ids` (its start token included), nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator

import numpy as np

SEPARATOR = "\x1e"
DOMAINS = ("english", "french", "spanish", "python", "c", "arithmetic", "json", "markup")
CONTEXT = 512
BOS, EOS = 0, 1
# How often a training segment comes from a domain. Spanish has the least text, so it is drawn least.
MIXTURE = dict(zip(DOMAINS, (0.20, 0.14, 0.07, 0.17, 0.16, 0.12, 0.07, 0.07), strict=True))


def documents(folder: str, domain: str, part: str) -> list[str]:
    """`part` is "train" or "val"."""
    with open(os.path.join(folder, f"{domain}.{part}.txt"), encoding="utf-8") as handle:
        return handle.read().split(SEPARATOR)


def token_row(encode: Callable[[str], Iterable[int]], texts: Iterable[str]) -> np.ndarray:
    """One domain as one long row of ids: <s> document </s> <s> document </s> …, int64."""
    return np.fromiter(_joined(encode, texts), np.int64)


def _joined(encode: Callable[[str], Iterable[int]], texts: Iterable[str]) -> Iterator[int]:
    for text in texts:
        yield from encode(text)
        yield EOS


def windows(row: np.ndarray, most: int) -> np.ndarray:
    """Consecutive windows of a row, at most `most` of them, (n, CONTEXT); each begins with <s>, as a prompt does."""
    body = CONTEXT - 1
    count = min(most, (len(row) - 1) // body)
    return np.stack([np.concatenate(([BOS], row[i * body : (i + 1) * body])) for i in range(count)])
