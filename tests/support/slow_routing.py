"""The metrics of docs/metrics.md once more, token by token in plain Python: slow, nothing shared with the package."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from colibri_lab.testing import synthetic_trace
from colibri_lab.trace import Trace


def with_gaps(trace: Trace, seed: int = 0, share: float = 0.1) -> Trace:
    """The same trace with some slots empty (id −1, gate 0), whole tokens among them."""
    rng, arrays = np.random.default_rng(seed), dict(trace)
    for layer in trace.moe_layers:
        path = f"layers.{layer}.moe."
        empty = rng.random(trace[path + "expert_ids"].shape) < share
        empty[rng.random(len(empty)) < share / 2] = True
        arrays[path + "expert_ids"] = np.where(empty, -1, trace[path + "expert_ids"])
        arrays[path + "gates"] = np.where(empty, np.float32(0), trace[path + "gates"])
    return Trace(arrays, ids=trace.ids, texts=trace.texts, meta=trace.meta)


def blind(experts: int, k: int, tokens: int, layers: int = 1, seed: int = 0, ids: Sequence[int] | None = None) -> Trace:
    """A trace whose tokens choose blindly: every set of k equally likely, in every order."""
    base = synthetic_trace(layers, experts, k, 0)
    rng, arrays = np.random.default_rng(seed), {}
    for layer in range(layers):
        chosen = rng.random((tokens, experts), np.float32).argsort(axis=1)[:, :k].astype(np.int32)
        arrays[f"layers.{layer}.moe.expert_ids"] = chosen
        arrays[f"layers.{layer}.moe.router_logits"] = np.zeros((tokens, experts), np.float32)
    meta = {**base.meta, "passes": [[0, tokens]] if tokens else []}
    return Trace(arrays, ids=[0] * tokens if ids is None else list(ids), texts=[], meta=meta)


def ids_of(trace: Trace, layer: int) -> list[list[int]]:
    return trace[f"layers.{layer}.moe.expert_ids"].tolist()


def used(row: Iterable[int]) -> list[int]:
    return [e for e in row if e >= 0]


def softmax(row: Sequence[float]) -> list[float]:
    top = max(row)
    weights = [math.exp(z - top) for z in row]
    total = math.fsum(weights)
    return [w / total for w in weights]


def entropy_of(shares: Iterable[float]) -> float:
    return -math.fsum(p * math.log(p) for p in shares if p > 0)


def ratio(a: float | Fraction, b: float | Fraction) -> float:
    return float(Fraction(a) / Fraction(b)) if b else math.nan


def logits_of(trace: Trace, layer: int) -> list[list[float]]:
    return [[float(z) for z in row] for row in trace[f"layers.{layer}.moe.router_logits"]]


def mean_entropy(trace: Trace) -> list[float]:
    scale = math.log(trace.num_experts) if trace.num_experts > 1 else 1.0
    return [mean(entropy_of(softmax(row)) / scale for row in logits_of(trace, layer)) for layer in trace.moe_layers]


def gate_entropy(trace: Trace) -> list[list[float]]:
    out = []
    for layer in trace.moe_layers:
        rows = [[float(g) for g in row] for row in trace[f"layers.{layer}.moe.gates"]]
        out.append([entropy_of(g / math.fsum(row) for g in row) if any(row) else math.nan for row in rows])
    return out


def mean(values: Iterable[float]) -> float:
    known = [v for v in values if math.isfinite(v)]
    return math.fsum(known) / len(known) if known else math.nan


def counts(trace: Trace, layer: int) -> list[int]:
    return [sum(e in row for row in ids_of(trace, layer)) for e in range(trace.num_experts)]


def usage(trace: Trace) -> list[list[float]]:
    out = []
    for layer in trace.moe_layers:
        tokens = sum(bool(used(row)) for row in ids_of(trace, layer))
        out.append([ratio(n, tokens) for n in counts(trace, layer)])
    return out


def usage_entropy(trace: Trace) -> list[float]:
    out = []
    for layer in trace.moe_layers:
        n = counts(trace, layer)
        out.append(entropy_of(ratio(c, sum(n)) for c in n) if sum(n) else math.nan)
    return out


def max_violation(trace: Trace, layer: int, rows: slice = slice(None)) -> float:
    seen = Counter(e for row in ids_of(trace, layer)[rows] for e in used(row))
    total = sum(seen.values())
    average = Fraction(total, trace.num_experts)
    return float((max(seen.values()) - average) / average) if total else math.nan


def batch_violation(trace: Trace, layer: int, batch: int) -> float:
    starts = range(0, trace.n_tokens // batch * batch, batch)
    return mean(max_violation(trace, layer, slice(start, start + batch)) for start in starts)


def balance_loss(trace: Trace, form: str) -> list[float]:
    experts, k = trace.num_experts, trace.top_k
    groups = [trace.moe_layers] if form == "transformers" else [[layer] for layer in trace.moe_layers]
    out = []
    for layers in groups:
        n, p, slots, tokens = [0] * experts, [[] for _ in range(experts)], 0, 0
        for layer in layers:
            for row, z in zip(ids_of(trace, layer), logits_of(trace, layer), strict=True):
                chosen = used(row[:1] if form == "switch" else row)
                if chosen:
                    tokens, slots = tokens + 1, slots + len(chosen)
                    for e in chosen:
                        n[e] += 1
                    for e, share in enumerate(softmax(z)):
                        p[e].append(share)
        value = experts * math.fsum(ratio(n[e], slots) * math.fsum(p[e]) / tokens for e in range(experts))
        out.append(value * (k if form.startswith("transformers") else 1))
    return out


def z_loss(trace: Trace) -> list[float]:
    out = []
    for layer in trace.moe_layers:
        rows = logits_of(trace, layer)
        out.append(mean((max(z) + math.log(math.fsum(math.exp(v - max(z)) for v in z))) ** 2 for z in rows))
    return out


def agreement(a: Trace, b: Trace, layer: int, top: int) -> float:
    common = tokens = 0
    for one, two in zip(ids_of(a, layer), ids_of(b, layer), strict=False):
        one, two = one[:top], two[:top]
        if min(one + two) >= 0:
            tokens, common = tokens + 1, common + len(set(one) & set(two))
    return ratio(common, tokens * top)


def adjacent(trace: Trace, layer: int) -> list[list[float]]:
    experts = trace.num_experts
    n, own = [[0] * experts for _ in range(experts)], [0] * experts
    for row in ids_of(trace, layer):
        for e in used(row):
            own[e] += 1
        for left, right in itertools.pairwise(row):
            if left >= 0 and right >= 0:
                n[left][right] += 1
                n[right][left] += 1
    return [[ratio(n[i][j], own[i]) for j in range(experts)] for i in range(experts)]


def cross_layer(trace: Trace, first: int, second: int, zipped: bool) -> list[list[float]]:
    experts = trace.num_experts
    n, total = [[0] * experts for _ in range(experts)], 0
    for one, two in zip(ids_of(trace, first), ids_of(trace, second), strict=True):
        pairs = zip(one, two, strict=True) if zipped else ((i, j) for i in one for j in two)
        for i, j in pairs:
            if i >= 0 and j >= 0:
                n[i][j], total = n[i][j] + 1, total + 1
    return [[ratio(n[i][j], total) for j in range(experts)] for i in range(experts)]


def specialisation(trace: Trace, labels: Sequence[Any], layer: int, first: bool = False) -> list[list[float]]:
    names = sorted(set(labels) - {None})
    rows = [used(row[:1] if first else row) for row in ids_of(trace, layer)]
    out = []
    for e in range(trace.num_experts):
        mine = [[row for row, label in zip(rows, labels, strict=True) if label == name and row] for name in names]
        out.append([ratio(sum(e in row for row in group), len(group)) for group in mine])
    return out


def vocabulary(trace: Trace, layer: int, ids: Sequence[int | None], first: bool, least: int) -> dict[int, float]:
    """Share of the favourite expert, by id."""
    sent: dict[int, list[int]] = defaultdict(list)
    tokens: Counter[int] = Counter()
    seen = Counter(i for i in ids if i is not None)
    for row, token in zip(ids_of(trace, layer), ids, strict=True):
        chosen = used(row[:1] if first else row)
        if token is not None and chosen:
            sent[token] += chosen
            tokens[token] += 1
    often = (i for i, n in seen.items() if n >= least)
    return {i: ratio(max(Counter(sent[i]).values(), default=0), tokens[i]) for i in often}


def repetition(trace: Trace, layer: int, first: bool) -> float:
    rows = ids_of(trace, layer)
    same = pairs = 0
    for one, two in itertools.pairwise(rows):
        if first and one[0] >= 0 and two[0] >= 0:
            pairs, same = pairs + 1, same + (one[0] == two[0])
        elif not first and min(one + two) >= 0:
            pairs, same = pairs + 1, same + bool(set(one) & set(two))
    return ratio(same, pairs)


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    def ranks(x: Sequence[float]) -> list[float]:
        return [sum(v < w for v in x) + (sum(v == w for v in x) + 1) / 2 for w in x]

    x, y = ranks(a), ranks(b)
    middle = (len(x) + 1) / 2
    xy = math.fsum((p - middle) * (q - middle) for p, q in zip(x, y, strict=True))
    xx, yy = (math.fsum((p - middle) ** 2 for p in r) for r in (x, y))
    return xy / math.sqrt(xx * yy) if xx * yy else math.nan


def block_variance(a: Sequence[float], b: Sequence[float], block: int) -> float:
    """Of Σa / Σb, from the residuals of blocks: two passes."""
    r = math.fsum(a) / math.fsum(b)
    parts = [(math.fsum(a[i : i + block]), math.fsum(b[i : i + block])) for i in range(0, len(a), block)]
    parts = [(x, y) for x, y in parts if y]
    n = len(parts)
    return n / (n - 1) * math.fsum((x - r * y) ** 2 for x, y in parts) / math.fsum(b) ** 2
