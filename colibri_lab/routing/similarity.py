"""How alike experts are: their weights, what they answer, and whether the router prefers loud ones.

Weights come as a mapping by the names of `model.weights`: `layers.{l}.moe.experts.{e}.gate` and `.up` [I, H], `.down`
[H, I], with biases as `name.bias`. (After arXiv 2406.18219.)
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from colibri_lab.errors import ArgumentError, is_whole
from colibri_lab.routing.alignment import pairing
from colibri_lab.routing.experts import ACTIVATIONS, Experts, expert_weight
from colibri_lab.routing.intervals import student_quantile
from colibri_lab.routing.measured import Measured, Ratios
from colibri_lab.routing.streaming import BLOCK, Accumulator, check_level, expert_ids, in_blocks
from colibri_lab.trace import HasTrace, Trace, trace_of

__all__ = ["NormGate", "OutputSimilarity", "norm_gate_correlation", "output_similarity", "weight_similarity"]

Floats = NDArray[np.float64]
Weights = Mapping[str, Any]

PARTS = ("gate", "up", "down")
_NULLS = 4  # pairs of experts whose scrambled alignment is the chance value
_NUMBERS = 1 << 23  # in the outputs of all experts of a step: 64 MB


def weight_similarity(
    weights: Weights,
    layer: int,
    experts: Sequence[int],
    align: Literal["exact", "greedy"] | None = "exact",
    level: float = 0.95,
) -> Measured:
    """Cosine of the flattened gate, up and down matrices of pairs of experts, (3, n, n) for n `experts`.

    A neuron is a row of gate, a row of up and a column of down; their order means nothing, so the neurons of j are
    paired with those of i before the matrices are compared: one pairing for all three, with the largest sum of the
    three cosines ("exact": Hungarian, O(I³) per pair; "greedy": a lower bound, quick; None: as they stand).

    Chance: 0 as they stand. A best pairing finds something in noise too, so with `align` chance is measured: the same
    pairing where each neuron's numbers are put in another order (up to 4 pairs of experts, fixed seed), (3, 1, 1).
    Interval: Student's t over neurons. Raises TapError for a missing weight, ArgumentError for shapes that differ.
    """
    check_level(level)
    if isinstance(experts, str) or not all(map(is_whole, experts)):
        raise ArgumentError(f"experts are whole numbers, not {experts!r:.80}")
    loaded = [_neurons(weights, layer, int(expert)) for expert in experts]
    if len({tuple(part.shape for part in parts) for parts in loaded}) > 1:
        raise ArgumentError(f"the experts {list(experts)!s:.60} of layer {layer} differ in shape")
    n = len(loaded)
    value = np.ones((3, n, n))
    reach = np.zeros((3, n, n))
    for i in range(n):
        for j in range(i + 1, n):
            cosine, error = _aligned(loaded[i], loaded[j], align, level)
            value[:, i, j] = value[:, j, i] = cosine
            reach[:, i, j] = reach[:, j, i] = error
    words = (
        "Cosine of gate, up and down of two experts; chance: "
        + ("0." if align is None else "neurons in scrambled order, aligned alike.")
        + " Interval: Student's t over neurons."
    )
    return Measured(value, value - reach, value + reach, _scrambled(loaded, align), level, words)


def _neurons(weights: Weights, layer: int, expert: int) -> tuple[Floats, ...]:
    """gate, up, down with one row per neuron, (I, H) each."""
    gate, up, down = (expert_weight(weights, layer, expert, part) for part in PARTS)
    return gate, up, down.T


def _aligned(a: tuple[Floats, ...], b: tuple[Floats, ...], align: Any, level: float) -> tuple[Floats, Floats]:
    """Three cosines and the reach of their intervals."""
    norms = [np.sqrt((x * x).sum() * (y * y).sum()) for x, y in zip(a, b, strict=True)]
    order = np.arange(len(a[0]))
    if align is not None:
        with np.errstate(divide="ignore", invalid="ignore"):
            order = pairing(np.nan_to_num(sum(x @ y.T / size for x, y, size in zip(a, b, norms, strict=True))), align)
    cosines, reaches = [], []
    for x, y, size in zip(a, b, norms, strict=True):
        with np.errstate(divide="ignore", invalid="ignore"):
            xy, xx, yy = (x * y[order]).sum(axis=1), (x * x).sum(axis=1), (y * y).sum(axis=1)[order]
            cosine = xy.sum() / size
            pull = xy / size - cosine / 2 * (xx / xx.sum() + yy / yy.sum())  # a neuron's part in the cosine
            n = len(pull)
            spread = np.sqrt((pull * pull).sum() * n / (n - 1)) if n > 1 else np.nan
        cosines.append(cosine)
        reaches.append(spread * float(student_quantile(n - 1, level)))
    return np.array(cosines), np.array(reaches)


def _scrambled(loaded: list[tuple[Floats, ...]], align: Any) -> Floats:
    """(3, 1, 1) mean cosine when every neuron of the second expert has its numbers in another order."""
    if align is None or len(loaded) < 2:
        return np.zeros((3, 1, 1))
    rng = np.random.default_rng(0)
    pairs = [(i, (i + 1) % len(loaded)) for i in range(min(_NULLS, len(loaded)))]
    found = []
    for i, j in pairs:
        other = tuple(rng.permuted(part, axis=1) for part in loaded[j])
        found.append(_aligned(loaded[i], other, align, 0.95)[0])
    return np.asarray(np.mean(found, axis=0).reshape(3, 1, 1))


class DenseAccumulator(Accumulator):
    """An accumulator that runs every expert on the recorded inputs of the layers: E/k times the work of the model."""

    def __init__(self, weights: Weights, activation: str | None, block: int) -> None:
        super().__init__(block)
        if activation is not None and activation not in ACTIVATIONS:
            raise ArgumentError(f"no activation is called {activation!r:.80}; there are {', '.join(ACTIVATIONS)}")
        self.weights, self.activation = weights, activation

    def options(self) -> dict[str, Any]:
        """What was asked for at the start, weights apart."""
        return {"activation": self.activation, **super().options()}

    def _taps(self, trace: Trace) -> tuple[str, ...]:
        return ("input",)

    def _add(self, trace: Trace, *more: Any) -> None:
        config = trace.meta.get("config") or {}
        activation = self.activation or config.get("hidden_act", "silu")
        for row, layer in enumerate(trace.moe_layers):
            inputs = trace[f"layers.{layer}.moe.input"]
            run = Experts(self.weights, layer, trace.num_experts, activation)
            width = trace.num_experts * max(1, inputs.shape[1])
            step = self.block * max(1, _NUMBERS // (width * self.block))
            for start in range(0, len(inputs), step):
                rows = slice(start, min(start + step, len(inputs)))
                self._outputs(trace, row, layer, rows, run(inputs[rows].astype(np.float64)))

    @abstractmethod
    def _outputs(self, trace: Trace, row: int, layer: int, rows: slice, outputs: Floats) -> None:
        """Takes the (E, rows, H) outputs of some tokens of a layer."""


class OutputSimilarity(DenseAccumulator):
    """Mean over tokens of the cosine of two experts' outputs when all experts run, (Lm, E, E).

    `weights`: a mapping such as `model.weights`. `activation`: None takes `hidden_act` of the trace's config, or silu.
    Chance: 0, independent directions; a single cosine of such has the standard deviation 1/√H. Tokens with an output
    that is zero or not finite are left out for that pair. Needs `moe.input`.
    """

    def __init__(self, weights: Weights, activation: str | None = None, block: int = BLOCK) -> None:
        super().__init__(weights, activation, block)

    def _add(self, trace: Trace, *more: Any) -> None:
        shape = (len(trace.moe_layers), trace.num_experts, trace.num_experts)
        self.sums["cosine"] = Ratios(shape, shape)
        super()._add(trace)

    def _outputs(self, trace: Trace, row: int, layer: int, rows: slice, outputs: Floats) -> None:
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            units = outputs / np.sqrt((outputs * outputs).sum(axis=2, keepdims=True))
        known = np.isfinite(units).all(axis=2)  # (E, rows)
        units = np.where(known[:, :, None], units, 0.0).transpose(1, 0, 2)
        cosine = np.matmul(units, units.transpose(0, 2, 1))  # (rows, E, E)
        both = known.T[:, :, None] & known.T[:, None, :]
        self.sums["cosine"].add(in_blocks(cosine, self.block), in_blocks(both, self.block), row)

    def result(self, level: float = 0.95) -> Measured:
        """Mean cosines per layer."""
        level = self._checked(level)
        measured: Measured = self.sums["cosine"].mean(level, 0.0, "Mean cosine of two experts' outputs; chance: 0.")
        return measured


def output_similarity(
    trace: Trace | HasTrace, weights: Weights, activation: str | None = None, level: float = 0.95
) -> Measured:
    """`OutputSimilarity` of one trace."""
    return OutputSimilarity(weights, activation).add(trace).result(level)


class NormGate(DenseAccumulator):
    """Mean over tokens of the rank correlation (Spearman, ties share ranks) of output norm and gate, (Lm,).

    With `weights` all E experts run and the norms are ranked against the selection scores (router logits where no
    scores were kept). Without, the recorded outputs of the k chosen experts are ranked against their gates, which
    needs the experts' outputs and says little for small k. Chance: 0. Tokens with equal ranks throughout, or numbers
    that are not finite, are left out.
    """

    def __init__(self, weights: Weights | None = None, activation: str | None = None, block: int = BLOCK) -> None:
        super().__init__({} if weights is None else weights, activation, block)
        self.dense = weights is not None

    def options(self) -> dict[str, Any]:
        """What was asked for at the start, weights apart."""
        return {"dense": self.dense, **super().options()}

    def _taps(self, trace: Trace) -> tuple[str, ...]:
        return ("input",) if self.dense else ("experts.0.output", "gates")

    def _add(self, trace: Trace, *more: Any) -> None:
        self.sums["rank"] = Ratios((len(trace.moe_layers),), (len(trace.moe_layers),))
        if self.dense:
            super()._add(trace)
            return
        for row, layer in enumerate(trace.moe_layers):
            norms, gates = _recorded_norms(trace, layer), trace[f"layers.{layer}.moe.gates"].astype(np.float64)
            step = self.block * 128
            for start in range(0, len(norms), step):
                self._count(row, norms[start : start + step], gates[start : start + step])

    def _outputs(self, trace: Trace, row: int, layer: int, rows: slice, outputs: Floats) -> None:
        scores = trace.get(f"layers.{layer}.moe.scores")
        if scores is None:
            scores = trace[f"layers.{layer}.moe.router_logits"]
        with np.errstate(invalid="ignore", over="ignore"):
            norms = np.sqrt((outputs * outputs).sum(axis=2)).T
        self._count(row, norms, scores[rows].astype(np.float64))

    def _count(self, row: int, norms: Floats, gates: Floats) -> None:
        rho = _spearman(norms, gates)
        known = np.isfinite(rho)
        self.sums["rank"].add(in_blocks(np.where(known, rho, 0.0), self.block), in_blocks(known, self.block), row)

    def result(self, level: float = 0.95) -> Measured:
        """Mean rank correlation per layer."""
        level = self._checked(level)
        measured: Measured = self.sums["rank"].mean(level, 0.0, "Rank correlation of output norm and gate; chance: 0.")
        return measured

    def add(self, trace: Trace | HasTrace) -> Self:
        """Counts one trace."""
        return self._take(trace_of(trace))


def norm_gate_correlation(
    trace: Trace | HasTrace, weights: Weights | None = None, activation: str | None = None, level: float = 0.95
) -> Measured:
    """`NormGate` of one trace."""
    return NormGate(weights, activation).add(trace).result(level)


def _recorded_norms(trace: Trace, layer: int) -> Floats:
    """(T, k) norms of the chosen experts' outputs, slot by slot; NaN where a slot has none."""
    prefix = f"layers.{layer}.moe.dispatch."
    ids, tokens, outputs = expert_ids(trace, layer), trace[prefix + "tokens"], trace[prefix + "output"]
    norms = np.full(ids.shape, np.nan)
    for offsets in trace[prefix + "offsets"].tolist():
        for expert in range(trace.num_experts):
            for start in range(offsets[expert], offsets[expert + 1], 4096):
                rows = slice(start, min(start + 4096, offsets[expert + 1]))
                x = outputs[rows].astype(np.float64)
                token = tokens[rows]
                norms[token, (ids[token] == expert).argmax(axis=1)] = np.sqrt((x * x).sum(axis=1))
    return norms


def _spearman(a: Floats, b: Floats) -> Floats:
    """Row by row, (rows,); NaN where a row has one rank only or a number that is not finite."""
    x, y = _ranks(a), _ranks(b)
    x, y = x - x.mean(axis=1, keepdims=True), y - y.mean(axis=1, keepdims=True)
    odd = ~(np.isfinite(a).all(axis=1) & np.isfinite(b).all(axis=1))
    with np.errstate(divide="ignore", invalid="ignore"):
        rho = (x * y).sum(axis=1) / np.sqrt((x * x).sum(axis=1) * (y * y).sum(axis=1))
    return np.asarray(np.where(odd, np.nan, rho))


def _ranks(x: Floats) -> Floats:
    """Ranks within each row from 1; equal values share the mean of theirs."""
    below = np.zeros(x.shape)
    equal = np.zeros(x.shape)
    for column in range(x.shape[1]):
        below += x[:, column, None] < x
        equal += x[:, column, None] == x
    return below + (equal + 1) / 2
