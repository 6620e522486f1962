"""Norms, activations, routing, and sums by element."""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from colibri_lab.nan.causes_base import Array, Operation, Weight, Where, finite, weight_reason
from colibri_lab.nan.causes_words import Reason, bracketed, break_reason, number, overflow
from colibri_lab.nan.elementary import (
    F32,
    chain,
    chain_break,
    dot,
    fma,
    rms_norm,
    root_of,
    rounded,
    sigmoid,
    silu,
    softmax,
)
from colibri_lab.nan.result import Operand

__all__ = ["Add", "AddScaled", "Copy", "Gated", "Gates", "Norm", "Routed", "RouterScores", "Sigmoid", "norm_reason"]


def norm_reason(x: F32, weight: Weight, place: int, eps: float, came: float) -> Reason | None:
    """Why weight · x / sqrt(mean of x² + eps) is not finite at one place of a finite row x (n,)."""
    root, value = float(root_of(x, eps)[0]), float(x[place])
    with np.errstate(all="ignore"):
        part = float(np.float32(value) / np.float32(root))
    if weight.bad[place]:
        return weight_reason(weight, place, part, "x / root", came)
    with np.errstate(all="ignore"):
        mean = float(dot(x, x) / np.float32(len(x)))
    single = float(np.float32(eps))
    added = f"mean square {number(mean)} + eps {number(single)}"
    operands = Operand("mean square", mean), Operand("eps", single), Operand("x", value)
    if not math.isfinite(single):
        return Reason("scale", f"eps of the norm is {number(single)}", operands[1:])
    if math.isnan(root) or root == 0:
        what = f"its root is {number(root)}" if root == 0 else "it has no root"
        done = f" and {number(value)} / 0 is {number(part)}" if root == 0 else ""
        return Reason("variance", f"{added} = {number(mean + single)}: {what}{done}", operands)
    scale = float(weight.array[place])
    exact = scale * (value / math.sqrt(float(np.mean(np.square(x.astype(np.float64)))) + single))
    told = f"{number(scale)} × {bracketed(part)}"
    return overflow(told, exact, "float32", Operand(weight.name, scale), Operand("x / root", part))


class Norm(Operation):
    """RMSNorm of x (rows, n)."""

    def __init__(self, point: str, words: str, dtype: str, x: F32, weight: Weight, eps: float) -> None:
        super().__init__(point, words, dtype)
        self.x, self.weight, self.eps = x, weight, eps

    def raw(self) -> F32:
        """(rows, n)."""
        return rms_norm(self.x, self.weight.array, self.eps)

    def ready(self) -> NDArray[np.bool_]:
        """Every element reads the mean square of its row."""
        return finite(self.x, -1)

    def culprits(self, where: Where) -> NDArray[np.int64]:
        """By element."""
        return self.weight.first_bad[where[1]]

    def cause(self, place: tuple[int, ...], came: float) -> Reason | None:
        """Weight, mean square, or the product of the two."""
        return norm_reason(self.x[place[0]], self.weight, place[1], self.eps, came)

    def beyond(self, place: tuple[int, ...], raw: float) -> Reason:
        """The product with its factors."""
        row, channel = place
        scale, root = float(self.weight.array[channel]), float(root_of(self.x[row], self.eps)[0])
        part = float(np.float32(self.x[row, channel]) / np.float32(root))
        operands = Operand(self.weight.name, scale), Operand("x / root", part)
        return overflow(f"{number(scale)} × {bracketed(part)}", scale * part, self.dtype, *operands)


class Add(Operation):
    """a + b, element by element."""

    def __init__(self, point: str, words: str, dtype: str, a: F32, b: F32, names: tuple[str, str]) -> None:
        super().__init__(point, words, dtype)
        self.a, self.b, self.names = a, b, names

    def raw(self) -> F32:
        """The sum."""
        with np.errstate(all="ignore"):
            return self.a + self.b

    def ready(self) -> NDArray[np.bool_]:
        """Both elements."""
        return finite(self.a) & finite(self.b)

    def cause(self, place: tuple[int, ...], came: float) -> Reason | None:
        """Only overflow is left."""
        return self.beyond(place, 0.0)

    def beyond(self, place: tuple[int, ...], raw: float) -> Reason:
        """The sum with its two numbers."""
        a, b = float(self.a[place]), float(self.b[place])
        one, other = (Operand(name, value) for name, value in zip(self.names, (a, b), strict=True))
        return overflow(f"{number(a)} + {bracketed(b)}", a + b, self.dtype, one, other)


class Gated(Operation):
    """act(gate) · up."""

    def __init__(self, point: str, dtype: str, gate: F32, up: F32) -> None:
        super().__init__(point, "hidden = act(gate) · up", dtype)
        self.gate, self.up = gate, up

    @cached_property
    def _act(self) -> F32:
        return silu(self.gate)

    def raw(self) -> F32:
        """(rows, I)."""
        with np.errstate(all="ignore"):
            return self._act * self.up

    def ready(self) -> NDArray[np.bool_]:
        """Both elements."""
        return finite(self.gate) & finite(self.up)

    def cause(self, place: tuple[int, ...], came: float) -> Reason | None:
        """Only overflow is left: act of a finite number is finite, at most the number itself."""
        return self.beyond(place, 0.0)

    def beyond(self, place: tuple[int, ...], raw: float) -> Reason:
        """The product with its factors."""
        act, up = float(self._act[place]), float(self.up[place])
        operands = Operand("act(gate)", act), Operand("up", up), Operand("gate", float(self.gate[place]))
        return overflow(f"{number(act)} × {bracketed(up)}", act * up, self.dtype, *operands)


class _OfOne(Operation):
    """A function of x that gives finite values for finite ones."""

    def __init__(self, point: str, words: str, dtype: str, x: F32) -> None:
        super().__init__(point, words, dtype)
        self.x = x

    def cause(self, place: tuple[int, ...], came: float) -> Reason | None:
        """Nothing can break here."""
        return None


class Sigmoid(_OfOne):
    """1 / (1 + e^−x)."""

    def raw(self) -> F32:
        """Element by element."""
        return sigmoid(self.x)

    def ready(self) -> NDArray[np.bool_]:
        """The element."""
        return finite(self.x)


class Copy(_OfOne):
    """The same numbers at another place."""

    def raw(self) -> F32:
        """As they are."""
        return self.x

    def ready(self) -> NDArray[np.bool_]:
        """The element."""
        return finite(self.x)


class RouterScores(_OfOne):
    """The softmax over all experts."""

    def raw(self) -> F32:
        """(rows, E)."""
        return softmax(self.x)

    def ready(self) -> NDArray[np.bool_]:
        """The row."""
        return finite(self.x, -1)


class Gates(Operation):
    """The factors of the chosen experts, by the rule of the run, from a table (rows, E) of logits or scores."""

    def __init__(self, point: str, dtype: str, table: F32, ids: Array, rule: str) -> None:
        super().__init__(point, f"gates by the rule {rule}", dtype)
        self.table, self.ids, self.rule = table, ids, rule

    @cached_property
    def _chosen(self) -> F32:
        chosen = np.take_along_axis(self.table, np.maximum(self.ids, 0).astype(np.intp), -1)
        empty = np.float32(-np.inf if self.rule == "softmax_of_chosen" else 0)
        return np.where(self.ids >= 0, chosen, empty)

    @cached_property
    def _sum(self) -> F32:
        total = np.zeros(len(self.ids), np.float32)
        for slot in range(self.ids.shape[1]):
            total = total + self._chosen[:, slot]
        return total

    def raw(self) -> F32:
        """(rows, k); 0 in a slot without an expert."""
        with np.errstate(all="ignore"):
            if self.rule == "softmax_of_chosen":
                gates = softmax(self._chosen)
            elif self.rule == "softmax_renormalised":
                gates = self._chosen / self._sum[:, None]
            else:
                gates = self._chosen
        return np.where(self.ids >= 0, gates, np.float32(0))

    def ready(self) -> NDArray[np.bool_]:
        """The row."""
        return finite(self.table, -1)

    def cause(self, place: tuple[int, ...], came: float) -> Reason | None:
        """A sum of zero: all chosen scores were rounded away."""
        score, total = float(self._chosen[place]), float(self._sum[place[0]])
        words = f"the scores of the chosen experts add up to {number(total)}, and the gates are divided by that sum"
        return Reason("0/0", words, (Operand("score", score), Operand("sum", total)))


class Routed(Operation):
    """Σ gate · output over the slots of each token: gates (rows, k), outputs (rows, k, H), 0 where a slot is empty."""

    def __init__(
        self, point: str, dtype: str, gates: F32, outputs: F32, ids: Array, accumulation: str | None = None
    ) -> None:
        super().__init__(point, "routed = Σ gate · output", dtype)
        used = ids >= 0
        self.gates = np.where(used, gates, np.float32(0))
        self.outputs = np.where(used[..., None], outputs, np.float32(0))
        self.ids, self.accumulation = ids, accumulation

    def raw(self) -> F32:
        """(rows, H)."""
        return chain(self.gates, self.outputs, self.accumulation)

    def ready(self) -> NDArray[np.bool_]:
        """All gates of the token and, channel by channel, the outputs."""
        return finite(self.gates, -1) & finite(self.outputs, 1)[:, 0]

    def cause(self, place: tuple[int, ...], came: float) -> Reason | None:
        """The step of the sum that broke."""
        row, channel = place
        factors, values = self.gates[row], self.outputs[row, :, channel]
        broke = chain_break(factors, values, self.accumulation)
        if broke is None:
            return None
        total = math.fsum(factors.astype(np.float64) * values.astype(np.float64))
        names = "gate", f"output of expert {int(self.ids[row, broke.place])}"
        return break_reason(broke, names, self.accumulation or "float32", total)


class AddScaled(Operation):
    """routed + gate · shared."""

    def __init__(
        self, point: str, dtype: str, routed: F32, gate: F32, shared: F32, accumulation: str | None = None
    ) -> None:
        super().__init__(point, "output = routed + shared gate · shared output", dtype)
        self.routed, self.gate, self.shared, self.accumulation = routed, gate, shared, accumulation

    def raw(self) -> F32:
        """(rows, H)."""
        return rounded(fma(self.gate, self.shared, self.routed), self.accumulation)

    def ready(self) -> NDArray[np.bool_]:
        """The elements and the gate of the row."""
        return finite(self.routed) & finite(self.shared) & finite(self.gate)

    def cause(self, place: tuple[int, ...], came: float) -> Reason | None:
        """Only overflow is left."""
        return self._told(place, self.accumulation or "float32")

    def beyond(self, place: tuple[int, ...], raw: float) -> Reason:
        """The sum with its numbers."""
        return self._told(place, self.dtype)

    def _told(self, place: tuple[int, ...], dtype: str) -> Reason:
        routed, gate, shared = float(self.routed[place]), float(self.gate[place[0], 0]), float(self.shared[place])
        told = f"{number(routed)} + {bracketed(gate)} × {bracketed(shared)}"
        operands = Operand("routed", routed), Operand("shared gate", gate), Operand("shared output", shared)
        return overflow(told, routed + gate * shared, dtype, *operands)
