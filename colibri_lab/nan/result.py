"""What a search for NaN and Inf found, as plain data: no array is worked on here."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from colibri_lab.trace import Trace

__all__ = ["KINDS", "MAP", "Cure", "Found", "Kind", "Operand", "Origin", "Propagation", "Step", "WeightPlace"]

Kind = Literal[
    "weight value", "overflow", "inf − inf", "0 × inf", "0/0", "masked row", "variance", "scale", "embedding", "edit",
    "uninitialised", "unknown",
]  # fmt: skip
KINDS: tuple[str, ...] = get_args(Kind)
"""The kinds of cause, with which the sentence `Origin.cause` begins."""

MAP = np.dtype([
    ("path", "U96"),        # tap path; experts of a layer are one row: "layers.2.moe.experts.*.hidden"
    ("layer", "i4"),        # -1 outside layers
    ("stage", "U12"),
    ("n", "i8"),            # values looked at
    ("n_nan", "i8"),
    ("n_inf", "i8"),        # both signs
    ("n_negative_inf", "i8"),
    ("n_subnormal", "i8"),  # of the format the value is stored in
    ("absmax", "f8"),       # largest finite magnitude; 0 for no value
    ("bits_left", "f8"),    # log2(largest number of the run's format / absmax); inf for 0
    ("state", "U10"),       # "finite", "near" (under 2 bits left), "subnormal" (5 % or more), "origin", "passed"
])  # fmt: skip
"""Columns of `scan` and `Found.map`: one row per tap in the order of the data's way."""

_SHAPES = {
    "float64": (11, 52), "float32": (8, 23), "float16": (5, 10), "bfloat16": (8, 7), "float8_e4m3fn": (4, 3),
    "float8_e5m2": (5, 2),
}  # fmt: skip
"""Bits of exponent and fraction by format."""


@dataclass(frozen=True)
class Operand:
    """One number that took part in the operation that broke, as it was read or made."""

    name: str  # "act(gate)", "up", "product", "largest float16"
    value: float
    dtype: str = "float32"  # name of one of `numerics.FORMATS`
    bits: int | None = None  # as stored, when the value does not tell (the payload of a NaN); None: those of the value

    @property
    def pattern(self) -> int:
        """The bits as a whole number."""
        if self.bits is not None:
            return self.bits
        kind = {"bfloat16": "float32", "float8_e5m2": "float16", "float8_e4m3fn": "float16"}.get(self.dtype, self.dtype)
        value = self.value / 256 if self.dtype == "float8_e4m3fn" else self.value  # exponents of float16 then
        with np.errstate(over="ignore"):
            stored = np.array([value]).astype(kind)
        word = int(stored.view(f"u{stored.dtype.itemsize}")[0])
        if self.dtype == "float8_e4m3fn":
            return word >> 8 & 0x80 | (word >> 7 & 0x7F if np.isfinite(value) else 0x7F)
        return word >> {"bfloat16": 16, "float8_e5m2": 8}.get(self.dtype, 0)

    @property
    def fields(self) -> tuple[str, str, str]:
        """Sign, exponent and fraction as texts of 0 and 1."""
        exponent, fraction = _SHAPES[self.dtype]
        text = format(self.pattern, f"0{1 + exponent + fraction}b")
        return text[0], text[1 : 1 + exponent], text[1 + exponent :]

    @property
    def hex(self) -> str:
        """As in "0x7C00"."""
        exponent, fraction = _SHAPES[self.dtype]
        return f"0x{self.pattern:0{(1 + exponent + fraction) // 4}X}"


@dataclass(frozen=True)
class WeightPlace:
    """One element of a weight, and where it lies."""

    name: str
    index: tuple[int, ...]
    value: float
    dtype: str
    bits: int
    file: str = ""  # name of the file, "" when not known
    offset: int | None = None  # of the element, in bytes from the start of the file
    file_name: str = ""  # what the file calls the tensor, "" when not known

    @property
    def signalling(self) -> bool:
        """Whether it is a signalling NaN: first bit of the fraction 0."""
        fraction = _SHAPES[self.dtype][1]
        return bool(np.isnan(self.value)) and not self.bits >> (fraction - 1) & 1


@dataclass(frozen=True)
class Origin:
    """The first operation whose inputs are all finite and whose output is not.

    `point` names what the operation makes (docs/nan.md lists the points), `path` is the tap in which that lies, or the
    first tap behind it: attention scores count as `attn.weights`, the context of the heads as `attn.out`, the residual
    stream between attention and experts as `moe.input` (`mlp.input`), what is inside a dense network or a shared expert
    as its output. `index` is the place in the token's row of the point: a whole number where the row has one axis,
    (head, channel) for q, k, v and the context, (head, key) for scores and `attn.weights`.
    """

    path: str
    layer: int | None
    stage: str
    token: int  # the first token row
    index: int | tuple[int, ...]  # the first of that row
    kind: Kind
    cause: str  # a sentence that begins with its kind
    expert: int | None = None
    point: str = ""  # "layers.3.moe.experts.5.hidden", "layers.3.middle"
    operation: str = ""  # "hidden = act(gate) · up"
    value: float = float("nan")  # what came out
    dtype: str = "float32"  # the format of the run at that place: what decides where overflow begins
    exact: float | None = None  # what came out of exact arithmetic, where that makes sense
    operands: tuple[Operand, ...] = ()
    weight: WeightPlace | None = None  # the culprit, when it is a weight
    tokens: tuple[int, ...] = ()  # all token rows in which this operation broke
    n_values: int = 1  # how many values of the tap are born non-finite here
    needs: tuple[str, ...] = ()  # taps that would decide, when the kind is "unknown"


@dataclass(frozen=True)
class Step:
    """One step of the way from an origin: values of `path` that are not finite because those of `came_from` are not."""

    path: str  # experts with their number
    came_from: str  # path of an earlier step or of the origin
    layer: int | None
    stage: str
    tokens: tuple[int, ...]
    n_values: int
    n_nan: int
    value: float  # the first of them
    how: Literal["product", "norm", "attention", "activation", "gate", "residual", "router", "copy", "softmax"]
    words: str  # what the step did: "Inf × 0 = NaN", "all read row 35 of k and v"


@dataclass(frozen=True)
class Propagation:
    """How it travelled and what it ruined."""

    steps: tuple[Step, ...] = ()  # in the order of the data's way
    ruined: tuple[int, ...] = ()  # token rows whose logits (or last recorded tap) are not finite
    clean: tuple[int, ...] = ()  # the others
    last: str = ""  # the tap that `ruined` speaks of: "logits", or the last one that was recorded for all tokens
    cache: tuple[tuple[int, tuple[int, ...]], ...] = ()  # (layer, token rows) of k or v that later tokens read
    routing: tuple[tuple[int, tuple[int, ...]], ...] = ()  # (layer, token rows) whose expert ids mean nothing
    swallowed: tuple[str, ...] = ()  # where a value that is not finite came in and a finite one came out; sentences


@dataclass(frozen=True)
class Cure:
    """One change with which the run was replayed."""

    kind: Literal["ablate", "clamp", "precision", "weight"]
    change: str  # "Switch off expert 5 in layer 3"
    gone: bool | None  # whether all that was looked at is finite now; None: not tried
    note: str = ""  # why it was not tried; what is left
    left: Origin | None = None  # the origin that remains
    headroom: tuple[float, str] | None = None  # (bits, tap path): the tightest one after the change
    kl: float | None = None  # nats, of the last next-token distribution against the run without the disease
    rerouted: int | None = None  # tokens × layers that went to other experts than in that run
    code: str = ""  # Python that does the same


@dataclass(frozen=True, repr=False, eq=False)
class Found:
    """NaN or Inf in a run; made by `lab.nan.find`."""

    trace: Trace
    origins: tuple[Origin, ...]  # independent ones, in the order of the data's way, then of tokens
    propagation: Propagation
    map: NDArray[Any]  # dtype MAP
    dtype: str  # format of the run: "float32", or what was emulated or recorded
    notes: tuple[str, ...] = field(default=())  # what is not known, and which capture would tell; one sentence each

    @property
    def origin(self) -> Origin:
        """The first of `origins`."""
        return self.origins[0]

    @property
    def summary(self) -> str:
        """Cause, place, operands and damage in one or two sentences."""
        from colibri_lab.nan.report import summary

        return summary(self)

    def report(self) -> str:
        """All that was found as plain text, 100 columns wide."""
        from colibri_lab.nan.report import report

        return report(self)

    def to_json(self) -> str:
        """Everything but the values of the run, as JSON text; NaN and infinities are the strings "nan", "inf"."""
        from colibri_lab.nan.report import to_json

        return to_json(self)

    def __repr__(self) -> str:
        return f"<Found: {self.summary}>"

    def _repr_html_(self) -> str:
        return f"<b>{escape(self.origin.kind)}</b> {escape(self.summary)}<pre>{escape(self.report())}</pre>"
