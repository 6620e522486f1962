"""What people write as the answer of an exercise, however they spell it, and what is said to it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from colibri_lab.errors import is_number

__all__ = ["Verdict", "near", "number", "pair", "paths", "several", "whole"]

TOLERANCE = 0.02  # relative: two digits that were read off are enough


@dataclass(frozen=True)
class Verdict:
    """Whether an answer is right (its truth value), and a sentence about it."""

    right: bool
    message: str

    def __bool__(self) -> bool:
        return self.right

    def __repr__(self) -> str:
        return f"{'Right' if self.right else 'Not yet'}. {self.message}"


def number(answer: object) -> float | None:
    """One number however it is wrapped; None for anything else."""
    if isinstance(answer, np.ndarray | list | tuple):
        flat = [*answer.ravel()[:2]] if isinstance(answer, np.ndarray) else answer
        answer = flat[0] if len(flat) == 1 else None
    if not isinstance(answer, str) and not is_number(answer):
        return None
    given: Any = answer
    try:
        return float(given)
    except (ValueError, OverflowError):
        return None


def whole(answer: object) -> int | None:
    """One whole number; "layers.3" and "Layer 3" count."""
    value = number(re.sub(r"(?i)^layers?[ .]", "", answer.strip()) if isinstance(answer, str) else answer)
    return int(value) if value is not None and np.isfinite(value) and value == int(value) else None


def paths(answer: object) -> list[str] | None:
    """Texts, one or several."""
    given = re.split(r"[\s,]+", answer.strip()) if isinstance(answer, str) else several(answer)
    texts = [str(path) for path in given if isinstance(path, str) and path.strip()]
    return texts if texts and len(texts) == len(given) else None


def pair(answer: object) -> tuple[int, int] | None:
    """(layer, expert) as two whole numbers, or as the path of the expert or of one of its buffers."""
    if isinstance(answer, str):
        path = r"layers\.(\d{1,9})\.(?:moe\.)?experts\.(\d{1,9})(?:\.\w+)?"
        words = r"\(?(?:layer )?(\d{1,9})[, ]+(?:expert )?(\d{1,9})\)?"
        found = re.fullmatch(path, answer.strip()) or re.fullmatch(words, answer.strip())
        return (int(found[1]), int(found[2])) if found else None
    numbers = [whole(part) for part in several(answer)]
    if len(numbers) != 2 or numbers[0] is None or numbers[1] is None:
        return None
    return numbers[0], numbers[1]


def several(answer: object) -> list[Any]:
    """What a list, a set and the like hold, as far as an answer could go; empty for anything else."""
    if not isinstance(answer, Iterable) or isinstance(answer, bytes):
        return []
    try:
        return list(islice(answer, 100))
    except (TypeError, ValueError):
        return []


def near(value: float, truth: float) -> bool:
    """Whether a number is as good as the true one."""
    return abs(value - truth) <= TOLERANCE * truth
