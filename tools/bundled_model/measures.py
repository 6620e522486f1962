"""Figures of the report that are functions of a Trace and its labels: NumPy alone, base-2 logarithms (bits)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from colibri_lab import routing
from colibri_lab.trace import Trace

COMMON = 30  # a token is judged only when the text holds it this often


def entropy_bits(p: np.ndarray) -> float:
    p = p[p > 0]
    return float(-(p * np.log2(p)).sum())


def information(a: np.ndarray, b: np.ndarray, sizes: tuple[int, int]) -> float:
    """Mutual information in bits of two integer labels (plug-in estimate)."""
    joint = np.bincount(a * sizes[1] + b, minlength=sizes[0] * sizes[1]).reshape(sizes) / len(a)
    return entropy_bits(joint.sum(1)) + entropy_bits(joint.sum(0)) - entropy_bits(joint.ravel())


def null(draw: Callable[[], np.ndarray], b: np.ndarray, sizes: tuple[int, int], times: int) -> dict[str, float]:
    """The information that labels without meaning give: `draw` shuffles them."""
    values = [information(draw(), b, sizes) for _ in range(times)]
    return {"mean": float(np.mean(values)), "p99": float(np.quantile(values, 0.99))}


def wilson(successes: np.ndarray, trials: np.ndarray, z: float = 1.96) -> np.ndarray:
    """Lower end of the 95 % interval of a share: high only when the share is high and seen often enough to tell."""
    p = successes / trials
    spread = z * np.sqrt(p * (1 - p) / trials + z * z / (4 * trials**2))
    return (p + z * z / (2 * trials) - spread) / (1 + z * z / trials)


def shuffled_among_equals(label: np.ndarray, token: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Labels shuffled among equal tokens: what is left of their information is what the token alone explains."""
    mixed = np.empty_like(label)
    mixed[np.lexsort((np.arange(len(token)), token))] = label[np.lexsort((rng.random(len(token)), token))]
    return mixed


def layer_figures(
    trace: Trace, domain: np.ndarray, window: int, domains: list[str], text_of: Callable[[int], str]
) -> list[dict[str, Any]]:
    """One dict per layer. `domain` (T,) is a number per token, in windows of `window` tokens of one domain each."""
    rng, token = np.random.default_rng(0), np.array(trace.ids)
    experts, chosen = trace.num_experts, trace.top_k
    loads, entropies, together = routing.load(trace), routing.entropy(trace), routing.coactivation(trace)
    figures = []
    for row, layer in enumerate(trace.moe_layers):
        picks = trace[f"layers.{layer}.moe.expert_ids"].astype(np.int64)
        first, load = picks[:, 0], loads[row] / loads[row].sum()
        came = np.stack([(picks == e).any(axis=1) for e in range(experts)], axis=1)
        share = np.stack([came[domain == d].mean(axis=0) for d in range(len(domains))])
        sizes, by_token = (len(domains), experts), (int(token.max()) + 1, experts)
        within = [information(shuffled_among_equals(domain, token, rng), first, sizes) for _ in range(20)]
        windows = domain[::window]
        figures.append(
            {
                "load": load.round(4).tolist(),
                "max_over_mean": round(float(load.max() * experts), 3),
                "min_over_mean": round(float(load.min() * experts), 3),
                "load_entropy_bits": round(entropy_bits(load), 3),
                "router_entropy_bits": round(float(entropies[row].mean() / math.log(2)), 3),
                "first_gate_mean": round(float(trace[f"layers.{layer}.moe.gates"][:, 0].mean()), 3),
                "domain_expert_share": {d: share[i].round(3).tolist() for i, d in enumerate(domains)},
                "preferences": [_preference(share, e, domains) for e in range(experts)],
                "domain_information_bits": round(information(domain, first, sizes), 4),
                "null_tokens_shuffled": null(lambda: rng.permutation(domain), first, sizes, 100),
                "null_windows_shuffled": null(
                    lambda windows=windows: np.repeat(rng.permutation(windows), window), first, sizes, 100
                ),
                "information_explained_by_token_alone_bits": round(float(np.mean(within)), 4),
                "token_information_bits": round(information(token, first, by_token), 4),
                "token_null": null(lambda: rng.permutation(token), first, by_token, 10),
                "coactivation": _pairs(together[row], loads[row] / len(token), chosen),
                "tokens": [_typical(token, came[:, e], text_of) for e in range(experts)],
            }
        )
    return figures


def _preference(share: np.ndarray, expert: int, domains: list[str]) -> dict[str, Any]:
    column = share[:, expert]
    best = int(column.argmax())
    lift = float(column[best] / column.mean())
    return {"expert": expert, "domain": domains[best], "share": round(float(column[best]), 3), "lift": round(lift, 2)}


def _pairs(together: np.ndarray, share: np.ndarray, chosen: int) -> list[dict[str, Any]]:
    """The four most frequent pairs; lift against two draws without replacement at the same loads."""
    both, load = together * share[:, None], share / chosen
    pairs = sorted(((float(both[a, b]), a, b) for a in range(len(share)) for b in range(a)), reverse=True)[:4]
    rows = []
    for p, a, b in pairs:
        blind = load[a] * load[b] * (1 / (1 - load[a]) + 1 / (1 - load[b]))
        rows.append({"experts": [b, a], "share": round(p, 4), "lift": round(p / float(blind), 2)})
    return rows


def _typical(token: np.ndarray, came: np.ndarray, text_of: Callable[[int], str]) -> list[dict[str, Any]]:
    """The ten common tokens that are most surely sent to an expert."""
    counts = np.bincount(token)
    chose = np.bincount(token[came], minlength=len(counts))
    rank = np.where(counts >= COMMON, wilson(chose, np.maximum(counts, 1)), -1)
    return [
        {"token": text_of(int(i)), "count": int(counts[i]), "share": round(float(chose[i] / counts[i]), 3)}
        for i in np.argsort(-rank)[:10]
    ]


def change(trace: Trace, side: np.ndarray, rng: np.random.Generator) -> list[dict[str, Any]]:
    """Where routing changes between two parts of a prompt: total variation of the shares, with a shuffled null.

    `side` (T,) is 0 or 1, and −1 for a token of neither part.
    """
    body, layers = np.flatnonzero(side >= 0), []
    for layer in trace.moe_layers:
        picks = trace[f"layers.{layer}.moe.expert_ids"]

        def shares(mask: np.ndarray, picks: np.ndarray = picks) -> np.ndarray:
            return np.bincount(picks[mask].ravel(), minlength=trace.num_experts) / mask.sum()

        def distance(labels: np.ndarray, shares: Callable[[np.ndarray], np.ndarray] = shares) -> float:
            return float(0.5 * np.abs(shares(labels == 0) - shares(labels == 1)).sum() / trace.top_k)

        shuffled = []
        for _ in range(200):
            mixed = np.full_like(side, -1)
            mixed[body] = rng.permutation(side[body])
            shuffled.append(distance(mixed))
        a, b = shares(side == 0), shares(side == 1)
        falls, rises = int(np.argmin(b - a)), int(np.argmax(b - a))
        layers.append(
            {
                "layer": layer,
                "distance": round(distance(side), 3),
                "null_p99": round(float(np.quantile(shuffled, 0.99)), 3),
                "leaves": {"expert": falls, "from": round(float(a[falls]), 2), "to": round(float(b[falls]), 2)},
                "enters": {"expert": rises, "from": round(float(a[rises]), 2), "to": round(float(b[rises]), 2)},
            }
        )
    return layers
