"""report.json as a page for people."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

CHANCE = 2 / 8  # k / E: the share of tokens that an expert gets from a router without preference


def page(r: dict[str, Any], reading: str) -> str:
    sections = (training, lambda _: reading, loss, routing, shares, preferences, typical, together, silenced, samples)
    return "\n\n".join(text.strip() for text in (*(section(r) for section in sections), showcase(r)) if text) + "\n"


def table(header: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def visible(token: str) -> str:
    for character, shown in (("\n", "\\n"), ("`", "ˋ"), ("|", "¦"), (" ", "·"), ("\t", "\\t")):
        token = token.replace(character, shown)
    return f"`{token}`"


def block(text: str) -> str:
    return f"```\n{text}\n```"


def per_layer(title: str, words: str, header: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    return f"## {title}\n\n{words}\n\n{table(header, rows)}"


def training(r: dict[str, Any]) -> str:
    f, a = r["training"], r["against_training"]
    rows = [
        ["parameters", f"{f['parameters']:,}"],
        ["steps × tokens", f"{f['steps']:,} × {f['tokens'] // f['steps']:,}"],
        ["tokens seen", f"{f['tokens']:,}"],
        ["wall time", f"{f['seconds'] / 60:.1f} min"],
        ["peak learning rate, balance weight", f"{f['peak_lr']}, {f['balance_weight']}"],
        ["largest logit difference to transformers", f"{f['largest_logit_difference_to_transformers']:.1e}"],
    ]
    return (
        "# Report of the bundled model\n\n"
        "Written by report.py; the same numbers are in report.json. Everything below *Training* was measured through "
        f"colibri-lab's engine ({r['engine']['isa']}). Loss is in nats per token; layers and experts count from 0.\n\n"
        f"Against the training code (PyTorch) on the same {r['routing_tokens']:,} tokens: losses differ by at most "
        f"{a['loss']:.1e} nats, expert loads by {a['load']:.0e}, a domain's share of an expert by "
        f"{a['domain_expert_share']:.0e}, router entropies by {a['router_entropy_bits']:.0e} bits, informations by "
        f"{max(a['domain_information_bits'], a['token_information_bits']):.0e} bits (0e+00: no printed digit differs)."
        "\n\n"
        f"## Training\n\n{table(['what', 'value'], rows)}"
    )


def loss(r: dict[str, Any]) -> str:
    header = [
        "domain",
        "model",
        "bits per byte",
        "unigram of its domain",
        "unigram of the mixture",
        "uniform",
        "tokens",
    ]
    rows = []
    for domain, value in r["loss"].items():
        base = r["baselines"][domain]
        rows.append(
            [domain, f"**{value:.3f}**", f"{value / math.log(2) / base['bytes_per_token']:.3f}"]
            + [f"{base[kind]:.3f}" for kind in ("unigram_own_domain", "unigram_mixture", "uniform")]
            + [f"{base['held_out_tokens']:,}"]
        )
    sums = "; ".join(f"{kind} {share:.0%}" for kind, share in r["arithmetic"].items())
    return per_layer("Loss on held-out text", f"Right answers in arithmetic (greedy, 60 each): {sums}.", header, rows)


def routing(r: dict[str, Any]) -> str:
    words = (
        f"{r['routing_tokens']:,} held-out tokens, the same number from each domain. MI is the mutual information of "
        "domain and first-choice expert in bits (at most 3). The nulls shuffle the domain labels: over tokens, over "
        "whole windows (99th percentile). *Token alone* is the MI left when domains are shuffled among equal tokens: "
        "the part that the token itself explains; the rest is context."
    )
    header = "layer|max/mean load|min/mean|load entropy|router entropy|MI domain|null tokens|null windows p99"
    rows = [
        [
            number,
            *(f[name] for name in ("max_over_mean", "min_over_mean", "load_entropy_bits", "router_entropy_bits")),
            f"**{f['domain_information_bits']:.3f}**",
            f"{f['null_tokens_shuffled']['mean']:.4f}",
            f"{f['null_windows_shuffled']['p99']:.3f}",
            f"{f['information_explained_by_token_alone_bits']:.3f}",
            f"{f['token_information_bits']:.3f}",
            f"{f['token_null']['mean']:.3f}",
        ]
        for number, f in enumerate(r["layers"])
    ]
    return per_layer("Routing", words, [*header.split("|"), "token alone", "MI token", "its null"], rows)


def shares(r: dict[str, Any]) -> str:
    parts = [
        "## Share of each domain's tokens that choose an expert\n\n"
        f"With no preference every cell would be k/E = {CHANCE:.3f}; cells of at least twice that are bold."
    ]
    for number, f in enumerate(r["layers"]):
        rows = [
            [domain, *(f"**{v:.2f}**" if v >= 2 * CHANCE else f"{v:.2f}" for v in row)]
            for domain, row in f["domain_expert_share"].items()
        ]
        rows.append(["*load*", *(f"{2 * v:.2f}" for v in f["load"])])
        parts.append(f"Layer {number}\n\n{table(['domain', *_experts(f)], rows)}")
    return "\n\n".join(parts)


def preferences(r: dict[str, Any]) -> str:
    def one(x: dict[str, Any]) -> str:
        return f"e{x['expert']}: {x['domain']} ({x['share']:.0%}, {x['lift']:.1f}×)"

    rows = [[number, "; ".join(map(one, f["preferences"]))] for number, f in enumerate(r["layers"])]
    words = "Of each expert the domain that chooses it most: share of its tokens, times the expert's mean share."
    return per_layer("The strongest preferences", words, ["layer", "experts"], rows)


def typical(r: dict[str, Any]) -> str:
    parts = [
        "## Tokens most specific to each expert\n\nTokens seen at least 30 times, ranked by the lower 95 % bound of "
        "the share of their occurrences that choose the expert (shown in percent); · is a space."
    ]
    for number, f in enumerate(r["layers"]):
        rows = [
            [expert, " ".join(f"{visible(x['token'])} {100 * x['share']:.0f}" for x in tokens)]
            for expert, tokens in enumerate(f["tokens"])
        ]
        parts.append(f"Layer {number}\n\n{table(['expert', 'tokens'], rows)}")
    return "\n\n".join(parts)


def together(r: dict[str, Any]) -> str:
    def one(p: dict[str, Any]) -> str:
        return f"{p['experts'][0]}+{p['experts'][1]} ({p['share']:.1%}, {p['lift']}×)"

    rows = [[number, ", ".join(map(one, f["coactivation"]))] for number, f in enumerate(r["layers"])]
    words = "The most frequent pairs; lift compares with two draws without replacement at the same loads."
    return per_layer("Co-activation", words, ["layer", "pairs (share of tokens, lift)"], rows)


def silenced(r: dict[str, Any]) -> str:
    def one(row: dict[str, float]) -> str:
        worst = max(row, key=lambda domain: row[domain])
        return f"{worst} {row[worst]:+.2f} ({np.median(list(row.values())):+.2f})"

    rows = [[number, *map(one, layer)] for number, layer in enumerate(r["silenced"])]
    words = (
        f"Rise of the loss on {r['silenced_windows']} window(s) of each domain when the expert's output is set to 0: "
        "the domain hurt most, and the median domain."
    )
    return per_layer("When one expert is silenced", words, ["layer", *_experts(r["layers"][0])], rows)


def samples(r: dict[str, Any]) -> str:
    parts = ["## Continuations"]
    for domain, texts in r["samples"].items():
        parts.append(f"**{domain}**")
        parts += [f"{how}:\n\n{block(text)}" for how, text in texts.items()]
    return "\n\n".join(parts)


def showcase(r: dict[str, Any]) -> str:
    parts = [
        "## Showcase prompts\n\nDistance is the total variation between the expert shares of the two parts (0 same, "
        "1 disjoint); the null shuffles tokens between the parts. The three layers that change most are shown."
    ]

    def moves(side: dict[str, Any]) -> str:
        return f"expert {side['expert']}: {side['from']:.0%} → {side['to']:.0%}"

    for number, s in enumerate(r["showcase"], 1):
        best = sorted(s["layers"], key=lambda f: f["null_p99"] - f["distance"])[:3]
        rows = [[f["layer"], f["distance"], f["null_p99"], moves(f["leaves"]), moves(f["enters"])] for f in best]
        title = f"{number}. **{' → '.join(s['domains'])}** ({s['tokens']} tokens)"
        parts += [title, block(s["prompt"]), table(["layer", "distance", "null p99", "leaves", "enters"], rows)]
    return "\n\n".join(parts)


def _experts(figures: dict[str, Any]) -> list[str]:
    return [f"e{expert}" for expert in range(len(figures["load"]))]
