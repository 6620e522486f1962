"""How far two traces are apart, tap by tap in data-flow order, with plain NumPy."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from colibri_lab.trace import Trace
from tests.planted.case import Case

NOISE = 6e-6
"""What two float32 runs of these models may differ by, relative to the largest value of a tap."""
CLEAR = {"norm_epsilon": 3e-6}
"""By how much an expected tap must differ: 1e-5, and a small epsilon a little less."""

_LAYER = (
    "attn.norm", "attn.q", "attn.k", "attn.v", "attn.weights", "attn.out", "moe.input", "moe.router_logits",
    "moe.scores", "moe.expert_ids", "moe.gates", "moe.experts.*.input", "moe.experts.*.gate", "moe.experts.*.up",
    "moe.experts.*.hidden", "moe.experts.*.output", "moe.shared.gate", "moe.shared.output", "moe.routed", "moe.output",
    "mlp.input", "mlp.output", "output",
)  # fmt: skip


def order(trace: Trace) -> list[str]:
    """Every tap path in data-flow order; those of experts stand for all experts of a layer."""
    return ["embed", *(f"layers.{layer}.{tap}" for layer in trace.layers for tap in _LAYER), "norm", "logits"]


def by_expert(trace: Trace, layer: int, values: np.ndarray) -> np.ndarray:
    """(T, E): what belongs to each chosen expert, NaN elsewhere."""
    ids = trace[f"layers.{layer}.moe.expert_ids"]
    out = np.full((len(ids), trace.num_experts), np.nan)
    np.put_along_axis(out, ids, values, -1)
    return out


def expert_rows(trace: Trace, path: str) -> dict[tuple[int, int], np.ndarray]:
    """(token, expert) -> row."""
    layer, tap = int(path.split(".")[1]), path.rpartition(".")[2]
    out = {}
    for expert in range(trace.num_experts):
        parts = trace.expert_rows(layer, expert)
        out |= {(int(token), expert): row for token, row in zip(parts["tokens"], parts[tap], strict=True)}
    return out


def distance(a: Trace, b: Trace, path: str) -> float | None:
    """Largest difference relative to the largest value of `a`; None when not both hold the tap."""
    if ".experts.*." in path:
        stored = path.replace("experts.*", "dispatch")
        if stored not in a or stored not in b:
            return None
        rows, others = expert_rows(a, path), expert_rows(b, path)
        both = sorted(rows.keys() & others.keys())
        x, y = (np.array([side[key] for key in both]) for side in (rows, others))
    elif path not in a or path not in b:
        return None
    elif path.endswith(".expert_ids"):
        return float((np.sort(a[path], -1) != np.sort(b[path], -1)).any())
    else:
        x, y = a[path], b[path]
        if path.endswith(".moe.gates"):
            layer = int(path.split(".")[1])
            x, y = by_expert(a, layer, x), by_expert(b, layer, y)
            both = ~(np.isnan(x) | np.isnan(y))
            x, y = x[both], y[both]
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if not x.size:
        return 0.0
    finite = np.isfinite(x)
    if (finite != np.isfinite(y)).any():
        return np.inf
    return float(np.abs(x[finite] - y[finite]).max() / np.abs(x[finite]).max())


def distances(a: Trace, b: Trace) -> dict[str, float]:
    """Of every tap that both hold, in data-flow order."""
    every = {path: distance(a, b, path) for path in order(a)}
    return {path: value for path, value in every.items() if value is not None}


def flips(a: Trace, b: Trace) -> int:
    """Rows of tokens and layers in which different experts were chosen."""
    paths = [f"layers.{layer}.moe.expert_ids" for layer in a.moe_layers]
    return sum(int((np.sort(a[path], -1) != np.sort(b[path], -1)).any(-1).sum()) for path in paths)


def smallest_margin(trace: Trace) -> float:
    """The narrowest gap between the last chosen and the first other value of what top-k compares.

    Softmax keeps the order, so logits say it for softmax routers, in one unit at every token.
    """
    tap = "scores" if trace.meta["gate_rule"].startswith("biased") else "router_logits"
    ordered = [-np.sort(-trace[f"layers.{layer}.moe.{tap}"], axis=-1) for layer in trace.moe_layers]
    return min(float((s[:, trace.top_k - 1] - s[:, trace.top_k]).min()) for s in ordered)


def check(case: Case, folder: Path) -> tuple[float, float]:
    """(largest distance before the expected tap, distance of it); raises AssertionError unless the case is one."""
    a, b, _ = case.make(folder)
    assert a.ids == b.ids
    found = distances(a, b)
    assert case.expected in found, f"{case.name}: {case.expected} was not captured; first of {list(found)[:12]}"
    before = max([value for path, value in list(found.items())[: list(found).index(case.expected)]], default=0.0)
    here = found[case.expected]
    first = next((path for path, value in found.items() if value > NOISE), None)
    assert before < NOISE, f"{case.name}: already {first} differs by {found[first]:.1e}, before {case.expected}"
    assert here > CLEAR.get(case.kind, 1e-5), f"{case.name}: {case.expected} differs by only {here:.1e}"
    assert here > 5 * before, f"{case.name}: {case.expected} differs by {here:.1e}, what comes before by {before:.1e}"
    return before, here


def check_clean(case: Case, folder: Path) -> None:
    """Raises AssertionError unless both runs agree to float noise and no choice of experts is near a tie."""
    a, b, _ = case.make(folder)
    found = distances(a, b)
    worst = max(found, key=lambda path: found[path])
    assert found[worst] < 2 * NOISE, f"{case.name}: {worst} differs by {found[worst]:.1e}"
    assert flips(a, b) == 0
    assert smallest_margin(a) > 1e-4
