"""Claim: raw router logits as gates, without softmax, save 12 % of the router's cycles "without loss".

Speed: the engine's router, one token at a time, by Mixtral's rule and with raw logits, and its matrix product alone.
Loss: the bundled model over eight kinds of text, both ways: Kullback-Leibler divergence from the model's own
distribution of the next token, changes of its first choice, and how well the text itself is predicted.
"""

from __future__ import annotations

import ctypes
from functools import partial
from typing import Any

import numpy as np
from harness import Cell, Sample, interleave
from numpy.typing import NDArray
from report import ratio_text

import colibri_lab as lab
from claims.claim import FAILS, HOLDS, Plan, Result, judged, times
from claims.engine import BF16, GATES_RAW, GATES_RENORMALISED, Matrix, stages

SAID = "raw logits as gates save 12 % of the router's cycles without loss"
RULES = {"model's rule": (GATES_RENORMALISED, 0), "raw logits": (GATES_RAW, 0), "product alone": (GATES_RAW, 1)}
ROUTERS = ((8, 2, 1024), (8, 2, 4096), (64, 8, 1024))  # experts, chosen, hidden size; the second is Mixtral 8x7B
TOKENS = 64
TEXTS = (
    "In the beginning God created the heaven and the earth. And the earth was without form, and void;",
    "Emma était assise près de la fenêtre; elle regardait les gens du village passer dans la rue.",
    "Mi amo subió al navío con los marineros, y yo le seguí lleno de miedo.",
    "def gather(self, names):\n    for name in names:\n        self.items.append(name)\n    return self.items",
    "for (i = 0; i < n; ++i) {\n   out[i] = (unsigned char) (data[i] & 255);\n}",
    "12 + 30 = 42\n25 + 17 = 42\n64 - 8 = 56\n7 * 9 = 63",
    '{"id": 512, "name": "Ada Stone", "age": 36, "city": "Lima", "active": true}',
    "<table>\n    <tr><th>Name</th><th>City</th></tr>\n    <tr><td>Ada</td><td>Lima</td></tr>\n  </table>",
)


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    normalised: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return normalised


def divergence(model: lab.Model, texts: tuple[str, ...] = TEXTS) -> dict[str, float]:
    """What raw logits do to the next-token distributions of `model` over some texts; nats."""
    kl, changed = [], []
    surprise: dict[str, list[NDArray[np.float64]]] = {"model": [], "raw": []}
    for text in texts:
        found = {}
        for name, mode in (("model", None), ("raw", "raw_logits")):
            session = model.session(capture="logits", gate_mode=mode)
            session.feed(text)
            found[name] = log_softmax(session.tape["logits"])
            following = np.asarray(session.ids[1:])
            surprise[name].append(-found[name][np.arange(len(following)), following])
        p, q = found["model"], found["raw"]
        kl.append((np.exp(p) * (p - q)).sum(axis=1))
        changed.append(p.argmax(axis=1) != q.argmax(axis=1))
    nats = np.concatenate(kl)
    return {
        "tokens": float(len(nats)),
        "KL, mean (nats)": float(nats.mean()),
        "KL, median (nats)": float(np.median(nats)),
        "first choice changed": float(np.concatenate(changed).mean()),
        "perplexity, model's rule": float(np.exp(np.concatenate(surprise["model"]).mean())),
        "perplexity, raw logits": float(np.exp(np.concatenate(surprise["raw"]).mean())),
    }


def router(plan: Plan, experts: int, top_k: int, hidden: int, rule: tuple[int, int]) -> Sample:
    """Nanoseconds of one token's routing."""
    library: Any = stages(plan)
    drawn = np.random.default_rng(0)
    weights = (drawn.standard_normal((experts, hidden), dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)
    x = drawn.standard_normal((TOKENS, hidden), dtype=np.float32)
    matrix = Matrix(weights.ctypes.data, BF16, experts, hidden)
    seconds, tokens = 0.0, 0
    while seconds < plan.seconds:
        seconds += library.route_seconds(ctypes.byref(matrix), x.ctypes.data, TOKENS, top_k, *rule)
        tokens += TOKENS
    return Sample(1e9 * seconds / tokens)


def run(plan: Plan) -> list[Result]:
    model = lab.open()
    facts: dict[str, Any] = divergence(model)
    before, after = facts["perplexity, model's rule"], facts["perplexity, raw logits"]
    loss = (
        f"the first choice of the next token changes at {facts['first choice changed']:.0%} of {facts['tokens']:.0f}"
        f" places and perplexity goes from {before:.1f} to {after:.1f}"
    )
    lossless = facts["first choice changed"] == 0
    try:
        stages(plan)
    except OSError as error:
        facts["router's time"] = f"not measured: {error}"
        figure = f"KL {facts['KL, mean (nats)']:.2f} nats"
        return [Result("gates", SAID, figure, HOLDS if lossless else FAILS, loss, [], facts)]
    cells = []
    for experts, top_k, hidden in ROUTERS:
        asked = {name: partial(router, plan, experts, top_k, hidden, rule) for name, rule in RULES.items()}
        point = {"experts": experts, "chosen": top_k, "hidden": hidden}
        cells.append(Cell("router", "ns a token", point, interleave(asked, plan.rounds), higher_is_better=False))
    for cell in cells:
        name = f"raw / rule, {cell.point['experts']} experts, hidden {cell.point['hidden']}"
        facts[name] = ratio_text(times(cell, "raw logits", "model's rule"))
    gain = times(cells[1], "model's rule", "raw logits")
    saved = 1 - 1 / gain.median
    figure = f"{saved:.0%} of the router saved (Mixtral's sizes); KL {facts['KL, mean (nats)']:.2f} nats"
    verdict = judged(gain, 1 / (1 - 0.12)) if lossless else FAILS
    return [Result("gates", SAID, figure, verdict, f"{loss}; what is saved is part of the router alone", cells, facts)]
