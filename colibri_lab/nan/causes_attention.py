"""Attention between its products: heads made ready, scores, softmax, and the weighted sum of the values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from colibri_lab.nan.causes_base import Operation, Weight, Where, finite
from colibri_lab.nan.causes_rows import norm_reason
from colibri_lab.nan.causes_words import Reason, bracketed, break_reason, number, overflow
from colibri_lab.nan.elementary import F32, chain_break, dot, dot_break, fma, rms_norm, rotate, rounded, softmax
from colibri_lab.nan.result import Operand

__all__ = ["Context", "Heads", "Scores", "Softmax"]


def _visible(seen: Sequence[range], n_keys: int) -> NDArray[np.bool_]:
    """(rows, 1, S): which keys each query sees."""
    keys = np.arange(n_keys)
    return np.stack([(keys >= each.start) & (keys < each.stop) for each in seen])[:, None]


class Heads(Operation):
    """q, k or v from their product (rows, heads · d): normed, clipped, rotated, as far as the family does it.

    `norm` is (weight, eps, per head) or None, `clip` a limit or None, `angles` (rows, d / 2) float32 or None, `grown`
    the factor on their cosines and sines.
    """

    def __init__(
        self, point: str, dtype: str, made: F32, head_dim: int, norm: tuple[Weight, float, bool] | None,
        clip: float | None, angles: F32 | None, grown: float,
    ) -> None:  # fmt: skip
        which = point[-1]
        steps = ["head norm" if norm and norm[2] else "norm" if norm else "", "clip" if clip else "",
                 "rotation" if angles is not None else ""]  # fmt: skip
        done = ", ".join(step for step in steps if step)
        super().__init__(point, f"{which} = {done} of its product" if done else f"{which} = its product", dtype)
        self.made, self.head_dim, self.norm, self.clip = made, head_dim, norm, clip
        self.angles, self.grown = angles, grown

    def _by_head(self, x: F32) -> F32:
        return x.reshape(len(x), -1, self.head_dim)

    @cached_property
    def _normed(self) -> F32:
        """(rows, heads, d)."""
        if self.norm is None:
            return self._by_head(self.made)
        weight, eps, per_head = self.norm
        x = self._by_head(self.made) if per_head else self.made
        return self._by_head(rms_norm(x, weight.array, eps))

    @cached_property
    def _clipped(self) -> F32:
        with np.errstate(invalid="ignore"):
            return np.clip(self._normed, -self.clip, self.clip) if self.clip else self._normed

    @cached_property
    def _turns(self) -> tuple[F32, F32]:
        assert self.angles is not None
        wide = self.angles.astype(np.float64)
        with np.errstate(all="ignore"):
            grown = np.float32(self.grown)
            return np.cos(wide).astype(np.float32) * grown, np.sin(wide).astype(np.float32) * grown

    def raw(self) -> F32:
        """(rows, heads, d)."""
        return self._clipped if self.angles is None else rotate(self._clipped, *self._turns)

    def ready(self) -> NDArray[np.bool_]:
        """A norm reads the head or the row, a rotation the pair."""
        x = self._by_head(self.made)
        if self.norm is not None:
            return finite(x, -1 if self.norm[2] else (1, 2))
        each = finite(x)
        if self.angles is not None:
            half = self.head_dim // 2
            both = each[..., :half] & each[..., half : 2 * half]
            return np.concatenate([both, both, each[..., 2 * half :]], axis=-1)
        return each

    def _sources(self, channel: int) -> list[int]:
        """The channels that a channel is made of, itself first."""
        half = self.head_dim // 2
        if self.angles is None or channel >= 2 * half:
            return [channel]
        return [channel, channel + half if channel < half else channel - half]

    def culprits(self, where: Where) -> NDArray[np.int64]:
        """The weight of the norm, by channel; both channels of a pair have the lower one's when both are bad."""
        if self.norm is None:
            return super().culprits(where)
        first, per_head = self.norm[0].first_bad, self.norm[2]
        _, heads, channels = where
        base = np.zeros_like(heads) if per_head else heads * self.head_dim
        found = first[base + channels]
        if self.angles is not None:
            half = self.head_dim // 2
            paired = channels < 2 * half
            partner = np.where(paired, np.where(channels < half, channels + half, channels - half), channels)
            other = first[base + partner]
            found = np.where(found < 0, other, np.where(other < 0, found, np.minimum(found, other)))
        return np.asarray(found, np.int64)

    def cause(self, place: tuple[int, ...], came: float) -> Reason | None:
        """The norm of one of the channels, the constants of the rotation, or its sums."""
        row, head, channel = place
        for source in self._sources(channel):
            if self.norm is not None and not np.isfinite(self._normed[row, head, source]):
                weight, eps, per_head = self.norm
                x = self._by_head(self.made)[row, head] if per_head else self.made[row]
                at = source if per_head else head * self.head_dim + source
                return norm_reason(x, weight, at, eps, float(self._normed[row, head, source]))
        if self.angles is None:
            return None
        return self._rotation(row, head, channel)

    def _rotation(self, row: int, head: int, channel: int) -> Reason:
        assert self.angles is not None
        half = self.head_dim // 2
        pair, low = channel % half, channel < half
        angle, cos, sin = float(self.angles[row, pair]), *(float(t[row, pair]) for t in self._turns)
        if not math.isfinite(angle):
            words = f"the rotary angle of pair {pair} is {number(angle)}"
            return Reason("scale", words, (Operand("angle", angle),))
        if not (math.isfinite(cos) and math.isfinite(sin)):
            words = f"cosine and sine of pair {pair} are multiplied by {number(self.grown)}"
            return Reason("scale", words, (Operand("attention factor", self.grown), Operand("cos", cos)))
        a, b = (float(self._clipped[row, head, c]) for c in (pair, pair + half))
        one, other = (a * cos, -b * sin) if low else (b * cos, a * sin)
        x, y, sign = (a, b, "−") if low else (b, a, "+")
        operands = Operand("x", x), Operand("cos", cos), Operand("its pair", y), Operand("sin", sin)
        with np.errstate(over="ignore"):
            ends = np.isinf(np.float32(one)) and np.isinf(np.float32(other))
        told = f"{number(x)} × {bracketed(cos)} {sign} {bracketed(y)} × {bracketed(sin)}"
        if ends and (one > 0) != (other > 0):
            return Reason("inf − inf", f"{told}: both products overflow, with opposite signs", operands, one + other)
        return overflow(told, one + other, "float32", *operands)


class Scores(Operation):
    """q · k times the scale, for the keys that each query sees: q (rows, heads, d), k (S, kv heads, d)."""

    def __init__(
        self, point: str, dtype: str, q: F32, k: F32, seen: Sequence[range], accumulation: str | None = None
    ) -> None:
        super().__init__(point, "scores = q · k × scale", dtype)
        self.q, self.k, self.seen, self.accumulation = q, k, seen, accumulation
        self.group = q.shape[1] // k.shape[1]
        self.scale = np.float32(1 / math.sqrt(q.shape[2]))

    def raw(self) -> F32:
        """(rows, heads, S), 0 for keys that are not seen."""
        out = np.zeros((len(self.q), self.q.shape[1], len(self.k)), np.float32)
        for row, keys in enumerate(self.seen):
            mates = np.repeat(self.k[keys.start : keys.stop], self.group, axis=1).swapaxes(0, 1)  # (heads, keys, d)
            with np.errstate(all="ignore"):
                out[row, :, keys.start : keys.stop] = dot(self.q[row][:, None], mates, self.accumulation) * self.scale
        return out

    def ready(self) -> NDArray[np.bool_]:
        """The head of the query and the head of the key, where it is seen."""
        keys = np.repeat(finite(self.k, -1)[..., 0], self.group, axis=1).T  # (heads, S)
        return finite(self.q, -1) & keys & _visible(self.seen, len(self.k))

    def cause(self, place: tuple[int, ...], came: float) -> Reason | None:
        """The step of the dot product that broke."""
        row, head, key = place
        q, k = self.q[row, head], self.k[key, head // self.group]
        broke = dot_break(q, k, None, self.accumulation)
        if broke is None:
            return None
        total = math.fsum(q.astype(np.float64) * k.astype(np.float64))
        names = f"q[{head}, {broke.place}]", f"k of token {key}"
        reason = break_reason(broke, names, self.accumulation or "float32", total)
        return replace(reason, exact=total * float(self.scale))


class Softmax(Operation):
    """The softmax over the keys that each query sees."""

    def __init__(self, point: str, dtype: str, scores: F32, seen: Sequence[range]) -> None:
        super().__init__(point, "weights = softmax of the scores", dtype)
        self.scores, self.seen = scores, seen

    def raw(self) -> F32:
        """(rows, heads, S), 0 for keys that are not seen."""
        visible = _visible(self.seen, self.scores.shape[-1])
        weights = softmax(np.where(visible, self.scores, np.float32(-np.inf)))  # e^−Inf is 0 and changes no sum
        return np.where(visible, weights, np.float32(0))

    def ready(self) -> NDArray[np.bool_]:
        """The scores of the head, of the keys that are seen: the others are 0 here."""
        return finite(self.scores, -1) & _visible(self.seen, self.scores.shape[-1])

    def cause(self, place: tuple[int, ...], came: float) -> Reason | None:
        """Nothing can break here."""
        return None


class Context(Operation):
    """Σ weight · v over the keys that each query sees: weights (rows, heads, S), v (S, kv heads, d)."""

    def __init__(
        self, point: str, dtype: str, weights: F32, v: F32, seen: Sequence[range], accumulation: str | None = None
    ) -> None:
        super().__init__(point, "context = Σ weight · v", dtype)
        self.weights, self.v, self.seen, self.accumulation = weights, v, seen, accumulation
        self.group = weights.shape[1] // v.shape[1]

    def _values(self, keys: range) -> F32:
        """(heads, keys, d)."""
        return np.repeat(self.v[keys.start : keys.stop], self.group, axis=1).swapaxes(0, 1)

    def raw(self) -> F32:
        """(rows, heads, d)."""
        visible = _visible(self.seen, len(self.v))[:, 0]
        out = np.zeros((*self.weights.shape[:2], self.v.shape[-1]), np.float32)
        for key in np.flatnonzero(visible.any(0)).tolist():
            rows = np.flatnonzero(visible[:, key])
            value = np.repeat(self.v[key], self.group, axis=0)
            out[rows] = rounded(fma(self.weights[rows, :, key, None], value, out[rows]), self.accumulation)
        return out

    def ready(self) -> NDArray[np.bool_]:
        """The weights of the head and, channel by channel, the values that are seen."""
        values = np.stack([finite(self._values(keys), 1)[:, 0] for keys in self.seen])
        return finite(self.weights, -1) & values

    def cause(self, place: tuple[int, ...], came: float) -> Reason | None:
        """The step of the sum that broke."""
        row, head, channel = place
        keys = self.seen[row]
        factors, values = self.weights[row, head, keys.start : keys.stop], self._values(keys)[head, :, channel]
        broke = chain_break(factors, values, self.accumulation)
        if broke is None:
            return None
        total = math.fsum(factors.astype(np.float64) * values.astype(np.float64))
        names = "weight", f"v of token {keys[broke.place]}"
        return break_reason(broke, names, self.accumulation or "float32", total, np.asarray(keys))
