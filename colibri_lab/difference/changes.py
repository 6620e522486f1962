"""What a fault does to one point of a replay: small callables whose repr is the Python that makes them again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from colibri_lab.difference.formulas import SCORE_RULES, GateRule, frequencies_of, rms_norm, rotate_halves, softmax
from colibri_lab.difference.maths import Change, Replay, rows_of
from colibri_lab.difference.variants import rounded

Array = NDArray[Any]


@dataclass(frozen=True)
class Fault:
    """A kind of fault at a place: the changes that turn the right computation into the faulty one."""

    kind: str
    words: str  # "gate and up swapped (w1, w3) in expert 5 of layer 2"
    changes: Mapping[str, Change]
    rounding: bool = False  # rounds on the way: values at a boundary may fall to the other side


@dataclass(frozen=True)
class Is:
    """This value, whatever it was: `Is(1e-5)`, `Is(Seen(15))`."""

    value: Any

    def __call__(self, value: Any, replay: Replay) -> Any:
        """The value to use."""
        return self.value


@dataclass(frozen=True)
class Use:
    """Another function: `Use(gelu)`."""

    function: Callable[..., Any]

    def __call__(self, value: Any, replay: Replay) -> Any:
        """The function to use."""
        return self.function

    def __repr__(self) -> str:
        return f"Use({self.function.__name__})"


@dataclass(frozen=True)
class Through:
    """The value through a function: `Through(transposed)`."""

    function: Callable[[Any], Any]

    def __call__(self, value: Any, replay: Replay) -> Any:
        """function(value)."""
        return self.function(value)

    def __repr__(self) -> str:
        return f"Through({self.function.__name__})"


@dataclass(frozen=True)
class Times:
    """The value times a factor."""

    factor: float

    def __call__(self, value: Any, replay: Replay) -> Any:
        """factor · value."""
        return self.factor * value


@dataclass(frozen=True)
class Plus:
    """The value plus a constant or a row of constants."""

    term: Any

    def __call__(self, value: Any, replay: Replay) -> Any:
        """value + term, the term beginning at the replay's first row when it is one per token."""
        return value + np.asarray(self.term)


@dataclass(frozen=True)
class Moved:
    """Positions moved by whole steps, one per token row or the same for all."""

    steps: tuple[int, ...]

    def __call__(self, value: Any, replay: Replay) -> Any:
        """Positions of the rows of `value`."""
        return value + (self.steps[0] if len(self.steps) == 1 else np.asarray(self.steps)[np.asarray(value)])


@dataclass(frozen=True)
class Rounded:
    """The value rounded to "bfloat16" or "float16" and widened again."""

    dtype: str

    def __call__(self, value: Any, replay: Replay) -> Any:
        """Nearest representable, ties to even."""
        return rounded(value, self.dtype)


@dataclass(frozen=True)
class Weight:
    """Another weight of the model in this place."""

    name: str

    def __call__(self, value: Any, replay: Replay) -> Any:
        """The other weight."""
        return replay.given.weight(self.name)


@dataclass(frozen=True)
class Tap:
    """Another value of the pass in this place."""

    path: str

    def __call__(self, value: Any, replay: Replay) -> Any:
        """The other tap."""
        return replay.get(self.path)


@dataclass(frozen=True)
class FusedRows:
    """Rows of the gate or up matrix when the fused [gate; up] tensor is cut in another way.

    `how`: "halves of blocks" (gate and up alternate in blocks of `size` rows and are cut into halves), "blocks of
    halves" (the reverse), or "cut late" (rows `size` to `size` + I are gate, the rest up).
    """

    prefix: str  # "layers.0.moe.experts.3."
    part: str  # "gate" or "up"
    how: str
    size: int = 1

    def __call__(self, value: Any, replay: Replay) -> Any:
        """The rows (I, H) that such a reader takes."""
        gate, up = (cast(Array, replay.given.weight(self.prefix + name)) for name in ("gate", "up"))
        wide = len(gate)
        if self.how == "halves of blocks":
            blocks = [half.reshape(wide // self.size, self.size, -1) for half in (gate, up)]
            fused = np.stack(blocks, axis=1).reshape(2 * wide, -1)
        elif self.how == "blocks of halves":
            pairs = np.concatenate([gate, up]).reshape(wide // self.size, 2, self.size, -1)
            fused = np.concatenate([pairs[:, 0].reshape(wide, -1), pairs[:, 1].reshape(wide, -1)])
        else:
            fused = np.roll(np.concatenate([gate, up]), -self.size, axis=0)
        return fused[:wide] if self.part == "gate" else fused[wide:]


@dataclass(frozen=True)
class Theta:
    """Rotary frequencies of a plain rotation with this base, over `width` channels (None: as many as now)."""

    theta: float
    width: int | None = None

    def __call__(self, value: Any, replay: Replay) -> Any:
        """(width / 2,) frequencies; scaled as the configuration scales them."""
        rope = {**replay.given.settings.rope, "rope_theta": self.theta}
        return frequencies_of(rope, self.width or 2 * len(value))[0]


@dataclass(frozen=True)
class Unscaled:
    """Rotary frequencies without the configuration's rope scaling."""

    def __call__(self, value: Any, replay: Replay) -> Any:
        """(width / 2,) plain frequencies."""
        return frequencies_of({"rope_theta": replay.given.settings.rope.get("rope_theta")}, 2 * len(value))[0]


@dataclass(frozen=True)
class Biased:
    """A score rule with a bias per expert: rule(logits) + bias."""

    rule: str  # "softmax", "sigmoid", "logits"
    bias: tuple[float, ...]

    def __call__(self, logits: Array) -> Array:
        """(T, E)."""
        return cast(Array, SCORE_RULES[self.rule](logits) + np.asarray(self.bias))


@dataclass(frozen=True)
class PerHead:
    """A norm over each `width` channels of a projection instead of over all."""

    width: int

    def __call__(self, value: Any, replay: Replay) -> Callable[[Array, Array, float], Array]:
        """The norm's rule."""

        def rule(x: Array, weight: Array, eps: float) -> Array:
            heads = rms_norm(x.reshape(len(x), -1, self.width), np.ones(1), eps)
            return heads.reshape(x.shape) * weight

        return rule


@dataclass(frozen=True)
class Turned:
    """Heads rotated by these frequencies, which should not be."""

    frequencies: tuple[float, ...]

    def __call__(self, value: Any, replay: Replay) -> Any:
        """(T, heads, head_dim), rotated in half style."""
        return rotate_halves(value, np.asarray(replay.rows)[:, None] * np.asarray(self.frequencies))


class Order(tuple[int, ...]):
    """Numbers in an order, written as the ranges that they are made of: the confirming Python stays short."""

    def __repr__(self) -> str:
        parts, start = [], 0
        while start < len(self):
            step = self[start + 1] - self[start] if start + 1 < len(self) else 1
            stop = start + 1
            while stop < len(self) and self[stop] - self[stop - 1] == step != 0:
                stop += 1
            long = stop - start > 2
            stop = stop if long else start + 1
            end = self[start] + step * (stop - start)
            parts.append(
                str(self[start]) if not long else f"*range({self[start]}, {end}{f', {step}' if step != 1 else ''})"
            )
            start = stop
        return f"({', '.join(parts)}{',' * (len(parts) == 1)})"


@dataclass(frozen=True)
class _Ordered:
    order: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "order", Order(self.order))


@dataclass(frozen=True)
class Columns(_Ordered):
    """Columns (the last axis) in another order."""

    def __call__(self, value: Any, replay: Replay) -> Any:
        """value[..., order]."""
        return value[..., list(self.order)]


@dataclass(frozen=True)
class Renumbered(_Ordered):
    """Expert e is called order[e]."""

    def __call__(self, value: Any, replay: Replay) -> Any:
        """order[value], from the ids that the other run chose."""
        ids = replay.given.other[replay.given.target][replay.rows]
        return np.asarray(self.order)[np.asarray(ids)]


@dataclass(frozen=True)
class Choice:
    """The k best of the scores rounded to a dtype, equal ones by number."""

    k: int
    dtype: str

    def __call__(self, value: Any, replay: Replay) -> Any:
        """(T, k) ids."""
        scores = replay.get(replay.given.target.replace("expert_ids", "scores"))
        return np.argsort(-rounded(scores, self.dtype), axis=-1, kind="stable")[:, : self.k]


@dataclass(frozen=True)
class Chosen:
    """The k best of a score without bias."""

    rule: str
    k: int

    def __call__(self, value: Any, replay: Replay) -> Any:
        """(T, k) ids."""
        logits = replay.get(replay.given.target.replace("expert_ids", "router_logits"))
        return np.argsort(-SCORE_RULES[self.rule](logits), axis=-1, kind="stable")[:, : self.k]


@dataclass(frozen=True)
class Scores:
    """Scores by another rule of the same logits, with a bias per expert or none."""

    rule: str
    bias: tuple[float, ...] = ()

    def __call__(self, value: Any, replay: Replay) -> Any:
        """(T, E)."""
        made = SCORE_RULES[self.rule](replay.get(replay.given.target.replace("scores", "router_logits")))
        return made + np.asarray(self.bias) if self.bias else made


@dataclass(frozen=True)
class Gates:
    """Gates by a rule, a bias per expert added to its base first, the logits multiplied before."""

    rule: GateRule
    bias: tuple[float, ...] | None = None
    factor: float = 1.0

    def __call__(self, value: Any, replay: Replay) -> Any:
        """(T, k)."""
        path = replay.given.target.removesuffix("gates")
        logits = replay.get(path + "router_logits") * self.factor
        scores = replay.given.known(path + "scores", replay.rows)
        ids = replay.get(path + "expert_ids").astype(np.intp)
        if self.bias is None:
            return self.rule(logits, softmax(logits) if scores is None else scores, ids)
        table = SCORE_RULES[self.rule.base](logits) + np.asarray(self.bias)
        return GateRule("scores", self.rule.norm, self.rule.factor)(logits, table, ids)


@dataclass(frozen=True)
class OtherGates:
    """The other run's gates renormalised ("sum", "root"), brought to given sums ("loosened"), "reversed" or "even".

    `on_value`: made of the value itself.
    """

    how: str
    sums: tuple[float, ...] = ()
    on_value: bool = False

    def __call__(self, value: Any, replay: Replay) -> Any:
        """(T, k)."""
        gates = value if self.on_value else np.asarray(replay.given.other[replay.given.target][replay.rows], np.float64)
        if self.how == "reversed":
            return gates[:, ::-1]
        if self.how == "even":
            return np.full_like(gates, 1 / gates.shape[-1])
        if self.how == "root":
            return gates / np.sqrt(np.square(gates).sum(-1, keepdims=True))
        unit = gates / gates.sum(-1, keepdims=True)
        return unit * np.asarray(self.sums)[:, None] if self.how == "loosened" else unit


@dataclass(frozen=True)
class Applied:
    """Other gates in the weighted sum than the tape shows."""

    path: str
    rule: GateRule

    def __call__(self, value: Any, replay: Replay) -> Any:
        """(T, k)."""
        logits, ids = replay.get(self.path + "router_logits"), replay.get(self.path + "expert_ids").astype(np.intp)
        return self.rule(logits, softmax(logits), ids)


@dataclass(frozen=True)
class Squared:
    """The value times this tap once more."""

    path: str

    def __call__(self, value: Any, replay: Replay) -> Any:
        """value · tap."""
        return value * replay.get(self.path)


@dataclass(frozen=True)
class OtherExpert:
    """What another expert gave for the same tokens in the other run."""

    layer: int
    expert: int
    tap: str

    def __call__(self, value: Any, replay: Replay) -> Any:
        """Rows of the other expert where it has them, else the value."""
        rows = rows_of(replay.given.other, self.layer, self.expert, self.tap)
        point = replay.given.target
        del point
        return value if rows is None or len(rows[1]) != len(value) else rows[1].astype(np.float64)


@dataclass(frozen=True)
class FusedColumns(_Ordered):
    """Columns of [gate, up] of the other run: which row of the fused tensor stands in each place."""

    layer: int
    expert: int

    def __call__(self, value: Any, replay: Replay) -> Any:
        """(n, I)."""
        both = []
        for part in ("gate", "up"):
            rows = rows_of(replay.given.other, self.layer, self.expert, part)
            assert rows is not None
            tokens = rows_of(replay.given.trace, self.layer, self.expert, part)
            assert tokens is not None
            keep = np.isin(rows[0], tokens[0])
            both.append(rows[1][keep].astype(np.float64))
        return np.concatenate(both, axis=1)[: len(value), list(self.order)]


@dataclass(frozen=True)
class Rolled:
    """Rows one later (+1) or earlier (-1) than they should be."""

    step: int

    def __call__(self, value: Any, replay: Replay) -> Any:
        """The rows moved; those from outside stay as they are."""
        out = np.array(value)
        if self.step > 0:
            out[self.step :] = value[: -self.step]
        else:
            out[: self.step] = value[-self.step :]
        return out


@dataclass(frozen=True)
class RowFactors:
    """Each row times a factor of its own."""

    factors: tuple[float, ...]

    def __call__(self, value: Any, replay: Replay) -> Any:
        """(T, H)."""
        return value * np.asarray(self.factors)[:, None]


@dataclass(frozen=True)
class TurnedBefore:
    """What a norm reads, rotated first."""

    head_dim: int

    def __call__(self, value: Any, replay: Replay) -> Any:
        """In the shape that came."""
        heads = value.reshape(len(value), -1, self.head_dim)
        frequencies = frequencies_of(replay.given.settings.rope, self.head_dim)[0]
        angles = np.asarray(replay.rows)[:, None] * frequencies
        return rotate_halves(heads, angles).reshape(value.shape)


@dataclass(frozen=True)
class Warmer:
    """Softmax of the logits times a factor."""

    factor: float

    def __call__(self, value: Any, replay: Replay) -> Any:
        """(T, E)."""
        return softmax(self.factor * replay.get(replay.given.target.replace("scores", "router_logits")))


@dataclass(frozen=True)
class Leaning:
    """The k best of the scores plus a bias per expert."""

    k: int
    bias: tuple[float, ...]

    def __call__(self, value: Any, replay: Replay) -> Any:
        """(T, k) ids."""
        scores = replay.get(replay.given.target.replace("expert_ids", "scores")) + np.asarray(self.bias)
        return np.argsort(-scores, axis=-1, kind="stable")[:, : self.k]


@dataclass(frozen=True)
class SoftmaxOfScores:
    """Softmax over the chosen probabilities instead of the chosen logits."""

    def __call__(self, value: Any, replay: Replay) -> Any:
        """(T, k)."""
        path = replay.given.target.removesuffix("gates")
        scores = replay.given.known(path + "scores", replay.rows)
        scores = softmax(replay.get(path + "router_logits")) if scores is None else scores
        return softmax(np.take_along_axis(scores, replay.get(path + "expert_ids").astype(np.intp), -1))


@dataclass(frozen=True)
class Reordered:
    """Channels of each head put into another order by `parted` or `joined`, of a projection or of heads."""

    order: Callable[[Array, Array], Array]
    head_dim: int

    def __call__(self, value: Any, replay: Replay) -> Any:
        """In the shape that came."""
        heads = value.reshape(len(value), -1, self.head_dim)
        return self.order(heads, np.empty((1, self.head_dim // 2))).reshape(value.shape)

    def __repr__(self) -> str:
        return f"Reordered({self.order.__name__}, {self.head_dim})"
