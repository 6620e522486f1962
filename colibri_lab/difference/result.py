"""What a comparison of two traces found, as plain data: no array is worked on here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from colibri_lab.trace import Trace

__all__ = ["Attempt", "Diagnosis", "Diff", "Divergence", "Flip", "Prediction", "Tolerance", "Values", "Verdict"]

Verdict = Literal["identical", "tie", "defect", "downstream"]

TABLE = np.dtype([
    ("path", "U96"),        # experts of a layer are one row: "layers.2.moe.experts.*.output"
    ("max_abs", "f8"),      # largest |B - A|
    ("max_rel", "f8"),      # largest |B - A| over the largest |A| of the tap
    ("cosine", "f8"),       # of the two tensors as vectors; NaN when one is all zeros
    ("ulp", "f8"),          # largest distance in float32 steps
    ("layer", "i4"),        # -1 outside layers
    ("stage", "U12"),
    ("tolerance", "f8"),    # what max_rel was held against
    ("state", "U12"),       # "same bits", "within", "beyond", or for expert ids "same", "tie", "flips"
    ("token", "i4"),        # the first token row beyond tolerance (else the worst one); -1 when there is none
    ("flips", "i4"),        # tokens with another set of experts; 0 for other taps
])  # fmt: skip
"""Columns of `Diff.table`, one row per compared tap in the order of the data's way."""


@dataclass(frozen=True)
class Tolerance:
    """How far two runs may stray before it counts: declared before they are compared."""

    relative: float  # of the largest value of a tap, where `by_tap` says nothing
    by_tap: dict[str, float]  # tap path (experts as "*") -> relative; measured from a pair that should be equal
    words: str  # how it was declared, one sentence
    drift: float = np.inf  # by how much a norm, q or k of B may be a multiple of A's; see `drift_of`

    def drift_of(self, path: str, numbers: float) -> float:
        """How far from 1 the factor f in B ≈ f · A may be, for a tap that a norm has just scaled.

        Roundings have either sign: in the mean over n numbers of like size they leave their size over √n, whatever the
        depth. A constant that differs, such as the epsilon of a norm, shows in full.
        """
        return self.drift + self.of(path) / math.sqrt(max(numbers, 1.0))

    def of(self, path: str) -> float:
        """The relative tolerance of a tap."""
        return self.by_tap.get(path, self.relative)


@dataclass(frozen=True)
class Divergence:
    """The first tap at which B leaves A."""

    path: str
    layer: int | None
    stage: str
    token: int
    error: float  # largest |B - A| over the largest |A| of the tap
    cause: str  # a sentence
    expert: int | None = None


@dataclass(frozen=True)
class Flip:
    """A token that the two runs sent to different experts."""

    layer: int
    token: int
    ids_a: tuple[int, ...]
    ids_b: tuple[int, ...]
    margin: float  # in A: s(k) - s(k+1); NaN when scores were not kept
    moved: float  # how far the scores of the exchanged experts moved towards each other, B against A
    verdict: Literal["tie", "defect", "downstream"]
    cause: str  # a sentence: which stage upstream moved the score, by how much
    consequence: float  # largest change that the token's block output suffered, relative; NaN when not kept


@dataclass(frozen=True)
class Attempt:
    """One fault that was tried as an explanation."""

    fault: str  # a kind: "swapped_gate_up"
    words: str  # "gate and up swapped (w1, w3)"
    state: Literal["explains", "tried", "excluded"]
    left_over: float | None  # relative error that remains when A is computed with this fault; None when not tried
    note: str = ""  # why it is excluded, or what the number says


@dataclass(frozen=True)
class Diagnosis:
    """The likely fault behind the first divergence, and all that was tried."""

    fault: str | None  # kind of the explanation; None when none explains
    words: str  # the likely fault in one sentence
    attempts: tuple[Attempt, ...]
    confirm: str  # Python that confirms it when run; "" when there is none


@dataclass(frozen=True)
class Prediction:
    """What the differences do to the next-token distributions, on the common prefix only."""

    positions: NDArray[np.int64]  # token rows with logits in both
    kl: NDArray[np.float64]  # KL(A || B) in nats, one per position
    same_top: NDArray[np.bool_]  # whether both have the same likeliest token
    agreement: NDArray[np.float64]  # share of A's 5 likeliest that are among B's 5
    cut: str  # why it ends before the longer run does; "" when both have the same tokens


@dataclass(frozen=True)
class Values:
    """One tap of both runs, row by row."""

    path: str
    tokens: NDArray[np.int64]  # (n,) token row of each row
    experts: NDArray[np.int64] | None  # (n,) for expert rows
    a: NDArray[Any]  # (n, ...)
    b: NDArray[Any]


@dataclass(frozen=True, repr=False, eq=False)
class Diff:
    """Two traces compared; made by `lab.diff`."""

    a: Trace
    b: Trace
    names: tuple[str, str]  # what to call A and B
    n_tokens: int  # length of the common prefix
    tolerance: Tolerance
    verdict: Verdict
    first_divergence: Divergence | None
    flips: tuple[Flip, ...]  # by consequence, largest first
    table: NDArray[Any]  # dtype TABLE
    diagnosis: Diagnosis | None  # None when there is nothing to explain
    prediction: Prediction | None  # None when one of them holds no logits
    notes: tuple[str, ...]  # what could not be compared, and why; one sentence each

    @property
    def summary(self) -> str:
        """The verdict in one sentence: what it is, where, and how large."""
        from colibri_lab.difference.report import summary

        return summary(self)

    @property
    def exit_code(self) -> int:
        """0 when the two agree ("identical", "tie"), else 1: for scripts."""
        return 0 if self.verdict in ("identical", "tie") else 1

    def report(self) -> str:
        """All that was found as plain text, 100 columns wide."""
        from colibri_lab.difference.report import report

        return report(self)

    def values(self, path: str) -> Values:
        """The rows of one tap of both runs in one order (a copy where they had to be brought into it).

        `path` as in `table`, or with an expert's number: "layers.2.moe.experts.5.output". Raises TapError when it is
        not in both runs.
        """
        from colibri_lab.difference.pair import Pair

        return Pair(self.a, self.b).rows(path)

    def to_json(self) -> str:
        """Everything but the values of the two runs, as JSON text; NaN and infinities are the strings "nan", "inf"."""
        from colibri_lab.difference.report import to_json

        return to_json(self)

    def __repr__(self) -> str:
        return f"<Diff of {self.n_tokens} tokens, {len(self.table)} taps: {self.summary}>"

    def _repr_html_(self) -> str:
        return f"<b>{self.verdict}</b> {escape(self.summary)}<pre>{escape(self.report())}</pre>"
