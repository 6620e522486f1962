"""What the routing explorer draws, computed from a `Trace` with NumPy alone.

Lm MoE layers, T tokens, E experts, k chosen. The unit of transfer is a *block*, all tokens of one MoE layer; a *column*
is one token through all layers, with every expert's value. Both are computed when asked for, so the first picture needs
one block and one column only.

`values` are what the bars of the token card show: the router logits, or the selection scores where these rank the
experts differently (a bias or a mask added before the choice). Load, entropy and margin are those of
`colibri_lab.routing`, the margin taken on `values`.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.errors import ArgumentError
from colibri_lab.routing import chance_band, load, row_entropy, row_margin
from colibri_lab.trace import Trace

__all__ = ["HAS_MINUS_INF", "HAS_NAN", "HAS_PLUS_INF", "NEAR_TIE", "UNRANKED", "UNRECORDED", "ExplorerData"]

# Bits of `flags`, one byte per layer and token. `explorer/store.js` has the same list.
HAS_NAN = 1
"""A router logit (or score) is NaN."""
HAS_PLUS_INF = 2
"""A router logit is +Inf."""
HAS_MINUS_INF = 4
"""A router logit is −Inf."""
UNRANKED = 8
"""The numbers give no ranking: the token went to its experts, but the choice means nothing."""
UNRECORDED = 16
"""The trace holds no expert ids for this token."""
NEAR_TIE = 32
"""The margin is under one bfloat16 step at the size of the values compared."""

_EVERY_VALUE_BELOW = 4 << 20  # bytes: blocks carry all values when those of the whole trace are fewer
_SAMPLE = 64  # tokens looked at to tell whether scores and logits rank alike

Array = NDArray[Any]


class ExplorerData:
    """Routing of one trace, layer by layer. Layers are counted 0 … Lm−1 here; `layers[i]` is the model's number of
    layer i.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.layers = trace.moe_layers
        self.tokens = trace.n_tokens
        self.experts = trace.num_experts
        self.top_k = trace.top_k
        self.every_value = 4 * len(self.layers) * self.tokens * self.experts <= _EVERY_VALUE_BELOW
        self._id_type: type[np.unsignedinteger[Any]] = np.uint8 if self.experts < 255 else np.uint16

    # ---- one layer ----

    def ids(self, layer: int) -> Array:
        """(T, k) integers, -1 where none was recorded."""
        return np.asarray(self._tap(layer, "expert_ids"))

    def values(self, layer: int) -> Array | None:
        """(T, E) float32, the numbers the choice was made on (see the module), or None when the trace has none."""
        return self._optional(layer, "scores" if self.by_score[layer] else "router_logits")

    @cached_property
    def by_score(self) -> list[bool]:
        """Of each layer, whether `values` are selection scores because logits would rank the experts differently."""
        return [self._ranked_by_score(layer) for layer in range(len(self.layers))]

    def _ranked_by_score(self, layer: int) -> bool:
        logits, scores = self._optional(layer, "router_logits"), self._optional(layer, "scores")
        if logits is None or scores is None:
            return logits is None and scores is not None
        z, s = logits[:_SAMPLE].astype(np.float64), scores[:_SAMPLE].astype(np.float64)
        usable = ((z < np.inf) & (s < np.inf)).all(axis=1)  # −Inf is how an expert is masked
        z, s = z[usable], s[usable]
        ranked = np.take_along_axis(s, np.lexsort((s, z), axis=1), axis=1)  # of equal logits, either may come first
        slack = 1e-6 * np.abs(ranked).max(initial=0.0, where=np.isfinite(ranked))
        return bool((ranked[:, 1:] < ranked[:, :-1] - slack).any())

    def block(self, layer: int) -> dict[str, Array]:
        """All tokens of one layer.

        ids (T, k) uint8 or uint16, all ones where unrecorded · gates (T, k) float32 · margin (T,) float32 · entropy
        (T,) float32, of softmax(router_logits) over ln E, 0 … 1 · flags (T,) uint8 · values (T, E) float32 when the
        whole trace is small. Margin and entropy are NaN where there is no ranking or nothing was recorded; the margin
        also where no expert is left out.
        """
        return self._numbers(layer, slice(None), self.every_value)

    def cell(self, layer: int, token: int) -> dict[str, Array]:
        """One token in one layer: ids, gates (k,), margin, entropy, flags and, where recorded, values (E,)."""
        return {name: array[0] for name, array in self._numbers(layer, slice(token, token + 1), True).items()}

    def column(self, token: int) -> dict[str, Array]:
        """One token through all layers: ids, gates (Lm, k), margin, entropy, flags (Lm,) and values (Lm, E) where
        recorded.
        """
        rows = [self._numbers(layer, slice(token, token + 1), True) for layer in range(len(self.layers))]
        common = set.intersection(*(set(row) for row in rows)) if rows else set()
        return {
            name: np.concatenate([row[name] for row in rows]) for name in (rows[0] if rows else {}) if name in common
        }

    # ---- all layers ----

    @cached_property
    def load(self) -> Array:
        """(Lm, E) uint32: tokens sent to each expert, as `routing.load` counts them (no slot without an expert)."""
        return load(self.trace).astype(np.uint32)

    def recorded(self, layer: int) -> Array:
        """(T,) bool: tokens of which the trace holds an expert id, be it for some of the k slots only."""
        return np.asarray((self.ids(layer) >= 0).any(axis=1))

    def overview(self) -> dict[str, Array]:
        """load (Lm, E) uint32 · counted (Lm,) uint32 tokens recorded · band (Lm, 2) uint32, the 95 % range of chance ·
        kind (T,) uint32 vocabulary id.
        """
        counted = [int(self.recorded(layer).sum()) for layer in range(len(self.layers))]
        bands = {n: [round(n * share) for share in chance_band(n, self.top_k, self.experts)] for n in set(counted)}
        return {
            "load": self.load,
            "counted": np.array(counted, np.uint32),
            "band": np.array([bands[n] for n in counted], np.uint32).reshape(len(self.layers), 2),
            "kind": np.array(self.trace.ids, np.int64).astype(np.uint32),
        }

    def facts(self) -> dict[str, Any]:
        """The JSON part of the head: sizes, names, texts."""
        return {
            "tokens": self.tokens, "experts": self.experts, "top_k": self.top_k, "layers": self.layers,
            "texts": list(self.trace.texts),
            "by_score": self.by_score,
            "every_value": self.every_value, "gate_top": self.gate_top,
            "gates": self.has_gates,
        }  # fmt: skip

    @cached_property
    def has_gates(self) -> bool:
        """Whether the trace holds the gates; a recording of routes alone has none."""
        return bool(self.layers) and self._optional(0, "gates") is not None

    @cached_property
    def gate_top(self) -> float:
        """The gate at the strong end of the scale: 1 for k ≤ 2, else a round number that 95 % of the gates stay below;
        more is marked as clipped.
        """
        parts = [g for layer in range(len(self.layers)) if (g := self._optional(layer, "gates")) is not None]
        gates = (
            np.abs(np.concatenate([part.ravel()[:: max(1, part.size // 4096)].astype(np.float64) for part in parts]))
            if parts
            else np.zeros(0)
        )
        gates = gates[np.isfinite(gates)]
        if gates.size == 0 or (self.top_k <= 2 and gates.max() <= 1.0):
            return 1.0
        aim = max(float(np.quantile(gates, 0.95)), 1e-6)
        power = 10.0 ** np.floor(np.log10(aim))
        return float(next(step for step in (1, 2, 5, 10) if step * power >= aim * (1 - 1e-9)) * power)

    # ---- choosing ----

    def first_choice(self, layer: int, token: int) -> int:
        """The strongest expert of a token; 0 where none was recorded."""
        ids = self.ids(layer)[token]
        return int(next((expert for expert in ids if expert >= 0), 0))

    def check(self, layer: object, token: object, expert: object) -> dict[str, int | None]:
        """A complete selection: the model's layer number, token row, expert. `None` for expert means the first choice.

        Raises ArgumentError naming what does not exist and what does. In an empty trace token and expert are None.
        """
        if not self.layers:
            raise ArgumentError("this model has no layer with experts, so there is nothing to select")
        number = _whole("layer", layer)
        if number not in self.layers:
            span = (
                f"{self.layers[0]} to {self.layers[-1]}"
                if _contiguous(self.layers)
                else ", ".join(map(str, self.layers))
            )
            raise ArgumentError(f"Layer {number} has no experts to show: layers with experts are {span}.")
        if self.tokens == 0:
            if token is not None or expert is not None:
                raise ArgumentError("There is no token to select: nothing has run yet.")
            return {"layer": number, "token": None, "expert": None}
        row = _whole("token", token)
        if not 0 <= row < self.tokens:
            raise ArgumentError(f"Token {row} does not exist: tokens are 0 to {self.tokens - 1}.")
        chosen = self.first_choice(self.layers.index(number), row) if expert is None else _whole("expert", expert)
        if not 0 <= chosen < self.experts:
            raise ArgumentError(f"Expert {chosen} does not exist: layer {number} has experts 0 to {self.experts - 1}.")
        return {"layer": number, "token": row, "expert": chosen}

    # ---- inside ----

    def _tap(self, layer: int, name: str) -> Array:
        return self.trace[f"layers.{self.layers[layer]}.moe.{name}"]

    def _optional(self, layer: int, name: str) -> Array | None:
        path = f"layers.{self.layers[layer]}.moe.{name}"
        found: Array | None = self.trace.get(path)
        return found

    def _flags(self, layer: int, rows: slice) -> Array:
        flags = np.zeros(self.ids(layer)[rows].shape[0], np.uint8)
        logits, scores = self._optional(layer, "router_logits"), self._optional(layer, "scores")
        if logits is not None:
            for row in _not_finite(logits[rows]):
                flags[row] |= _strange(logits[rows][row])
        if scores is not None:
            for row in _not_finite(scores[rows]):
                found = _strange(scores[rows][row]) & ~HAS_MINUS_INF  # −Inf is how a score is masked
                # NaN scores follow from strange logits, which are what the card lists and counts.
                flags[row] |= (UNRANKED if found else 0) if logits is not None else found
        gates = self._optional(layer, "gates")
        if gates is not None:
            flags[~np.isfinite(gates[rows]).all(axis=1)] |= UNRANKED
        flags[(flags & (HAS_NAN | HAS_PLUS_INF)) != 0] |= UNRANKED
        flags[(self.ids(layer)[rows] < 0).all(axis=1)] |= UNRECORDED
        return flags

    def _numbers(self, layer: int, rows: slice, with_values: bool) -> dict[str, Array]:
        ids = self.ids(layer)[rows]
        gates, values = self._optional(layer, "gates"), self.values(layer)
        flags = self._flags(layer, rows)
        usable = (flags & (UNRANKED | UNRECORDED)) == 0
        nothing = np.full(len(ids), np.nan, np.float32)
        margin, entropy = nothing, nothing
        if values is not None and self.top_k < self.experts:
            gap, size = row_margin(values[rows], self.top_k)
            margin = _float32(np.where(usable, gap, np.nan))
            flags[usable & (gap < _bfloat16_step(size))] |= NEAR_TIE
        logits = self._optional(layer, "router_logits")
        if logits is not None:
            entropy = _float32(np.where(usable, row_entropy(logits[rows], normalised=True), np.nan))
        packed = {
            "ids": np.where(ids < 0, np.iinfo(self._id_type).max, ids).astype(self._id_type),
            "gates": np.full(ids.shape, np.nan, np.float32) if gates is None else _float32(gates[rows]),
            "margin": margin, "entropy": entropy, "flags": flags,
        }  # fmt: skip
        if with_values and values is not None:
            packed["values"] = _float32(values[rows])
        return packed


def _float32(numbers: Array) -> NDArray[np.float32]:
    """As it is sent; what float32 cannot hold becomes infinite."""
    with np.errstate(over="ignore"):
        return np.asarray(numbers, np.float32)


def _not_finite(numbers: Array) -> Array:
    """Rows that may hold a NaN or an infinity: those whose sum is not finite (it may also have overflowed)."""
    with np.errstate(invalid="ignore", over="ignore"):
        return np.flatnonzero(~np.isfinite(numbers.sum(axis=1)))


def _strange(row: Array) -> int:
    """The flags of what is not finite in one row."""
    kinds = ((HAS_NAN, np.isnan(row)), (HAS_PLUS_INF, np.isposinf(row)), (HAS_MINUS_INF, np.isneginf(row)))
    return sum(flag for flag, where in kinds if where.any())


def _bfloat16_step(size: NDArray[np.float64]) -> NDArray[np.float64]:
    """How far neighbouring bfloat16 numbers of this size are apart: 8 significant bits. For 0 and Inf 1/128."""
    exponent = np.floor(np.log2(np.where(np.isfinite(size) & (size > 0), size, 1.0)))
    return np.asarray(np.exp2(exponent - 7), np.float64)


def _whole(what: str, value: object) -> int:
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return int(value)
    raise ArgumentError(f"The selected {what} must be a whole number, not {value!r}.")


def _contiguous(numbers: list[int]) -> bool:
    return numbers == list(range(numbers[0], numbers[-1] + 1))
