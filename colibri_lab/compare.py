"""What changed between two walks through the same tokens: routing, residual stream, next token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.errors import ArgumentError

if TYPE_CHECKING:
    from colibri_lab.stepper import Stepper
    from colibri_lab.walk import Walk

__all__ = ["Comparison", "Rerouted", "TokenChange", "compare"]

_TOP = 5  # next tokens of either run that are listed


@dataclass(frozen=True)
class Rerouted:
    """A token that goes to other experts: ids by descending score, −1 for an empty slot."""

    layer: int
    token: int
    before: tuple[int, ...]
    after: tuple[int, ...]


@dataclass(frozen=True)
class TokenChange:
    """A next token and its probability in either run."""

    id: int
    text: str
    p: float
    p_fork: float


@dataclass(frozen=True)
class Comparison:
    """From the original to the fork.

    `identical`: every compared byte is the same (gates, residual stream, logits). `routing`: tokens whose set of
    experts differs. `residual` (L, T) float64: ‖b − a‖ / ‖a‖ of `layers.{l}.output`, 0 where equal, NaN where not
    finite. `kl`: KL(a ‖ b) of the last distribution in nats, at least 0; NaN when logits hold NaN. `top`: the likeliest
    next tokens of either run.
    """

    identical: bool
    routing: list[Rerouted]
    residual: NDArray[np.float64]
    kl: float
    top: list[TokenChange]

    def __repr__(self) -> str:
        return f"<Comparison: {self}>"

    def __str__(self) -> str:
        if self.identical:
            return "Same bits everywhere."
        layers: dict[int, int] = {}
        for flip in self.routing:
            layers[flip.layer] = layers.get(flip.layer, 0) + 1
        moved = ", ".join(f"{count} in layer {layer}" for layer, count in layers.items())
        changed = np.flatnonzero((self.residual != 0).any(axis=1))
        first = f"from layer {changed[0]} on" if len(changed) else "in no layer"
        best, best_fork = max(self.top, key=lambda t: t.p), max(self.top, key=lambda t: t.p_fork)
        same = (
            f"the top token stays {best.text!r}" if best.id == best_fork.id
            else f"the top token turns from {best.text!r} to {best_fork.text!r}"
        )  # fmt: skip
        return (
            f"KL {self.kl:.3g} nats; {same} ({best.p:.2f} to {best.p_fork:.2f}). The residual stream differs {first}. "
            f"Tokens with other experts: {moved or 'none'}."
        )


@dataclass
class _Run:
    """What a walk computed, from its first token to its last."""

    ids: dict[int, list[NDArray[Any]]]
    gates: dict[int, list[NDArray[Any]]]
    stream: dict[int, list[NDArray[Any]]]
    logits: NDArray[Any]


def compare(original: Stepper, fork: Stepper) -> Comparison:
    """See `Stepper.compare`."""
    if not hasattr(fork, "_walk"):
        raise ArgumentError(f"compare takes another stepper, such as fork() gives; this is {fork!r:.80}")
    a, b = original._walk, fork._walk
    if a.chunks != b.chunks or a.session._ids[: a.base] != b.session._ids[: b.base] or (a.ids != b.ids).any():
        raise ArgumentError("these two walk through different tokens or passes; compare a stepper with its fork")
    if a.session.model is not b.session.model:
        raise ArgumentError("these two walk through different models; compare a stepper with its fork")
    with a.alone():
        a.arrive()
        first = _run(a)
    with b.alone():
        b.arrive()
        second = _run(b)
    return _compared(first, second, a.base, original._text_of)


def _run(walk: Walk) -> _Run:
    """Runs the whole walk anew, with its edits, in a session of its own."""
    walk = walk.fork((-1, 0))
    run = _Run({}, {}, {}, np.empty(0))
    while not walk.at_end:
        place = walk.advance()
        if place.stage == "router":
            for name, into in (("expert_ids", run.ids), ("gates", run.gates)):
                into.setdefault(place.layer, []).append(np.array(walk.read(f"layers.{place.layer}.moe.{name}")))
        elif place.stage == "residual":
            run.stream.setdefault(place.layer, []).append(np.array(walk.read(f"layers.{place.layer}.output")))
    run.logits = walk.engine.logits()
    return run


def _compared(a: _Run, b: _Run, base: int, text_of: Callable[[int], str]) -> Comparison:
    routing = []
    identical = same_bits(a.logits, b.logits)
    for layer in a.ids:
        before, after = np.concatenate(a.ids[layer]), np.concatenate(b.ids[layer])
        identical &= same_bits(np.concatenate(a.gates[layer]), np.concatenate(b.gates[layer]))
        moved = (np.sort(before, axis=1) != np.sort(after, axis=1)).any(axis=1)
        routing += [
            Rerouted(layer, base + token, tuple(before[token].tolist()), tuple(after[token].tolist()))
            for token in np.flatnonzero(moved).tolist()
        ]
    residual = []
    for layer in a.stream:
        x, y = np.concatenate(a.stream[layer]).astype(np.float64), np.concatenate(b.stream[layer]).astype(np.float64)
        identical &= same_bits(x, y)
        with np.errstate(all="ignore"):
            change = np.linalg.norm(y - x, axis=1) / np.linalg.norm(x, axis=1)
        residual.append(np.where((x == y).all(axis=1), 0.0, change))
    p, q = log_softmax(a.logits), log_softmax(b.logits)
    with np.errstate(all="ignore"):
        terms = np.where(np.exp(p) > 0, np.exp(p) * (p - q), 0.0)
    listed = dict.fromkeys(
        [*np.argsort(-p, kind="stable")[:_TOP].tolist(), *np.argsort(-q, kind="stable")[:_TOP].tolist()]
    )
    chances = [
        TokenChange(number, text_of(number), float(np.exp(p[number])), float(np.exp(q[number]))) for number in listed
    ]
    kl = float(terms.sum())
    return Comparison(identical and not routing, routing, np.array(residual), max(kl, 0.0) if kl == kl else kl, chances)


def same_bits(a: NDArray[Any], b: NDArray[Any]) -> bool:
    """Equal values, where any NaN is the same NaN."""
    return a.shape == b.shape and bool(
        ((a == b) & (np.signbit(a) == np.signbit(b)) | (np.isnan(a) & np.isnan(b))).all()
    )


def log_softmax(logits: NDArray[Any]) -> NDArray[np.float64]:
    """In float64."""
    z = logits.astype(np.float64)
    with np.errstate(all="ignore"):
        z = z - z.max()
        return np.asarray(z - np.log(np.exp(z).sum()))
