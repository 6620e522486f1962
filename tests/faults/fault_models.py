"""The models that faults are planted in, what a clean run of them computes, and every place where a weight acts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from goldens import REFERENCE

import colibri_lab as lab

NAMES = ("bundled", "mixtral", "mixtral_swa", "qwen3_moe", "olmoe", "qwen2_moe_step")
CAPTURE = ["all", "layers.*.attn.weights"]
N_IDS = 6  # at most as many as the shortest window sees, so that every query sees every key before it


@dataclass(frozen=True)
class Place:
    """Where a weight acts: its name, the point that its operation makes, the tap that this counts under."""

    what: str  # "attn.q", "experts.gate": a stage, without layer and expert
    weight: str
    path: str
    stage: str
    layer: int | None
    expert: int | None = None
    reads: str = ""  # tap of the operation's input, where there is one
    heads: bool = False  # a row of the point has two axes: (head, channel)


class Patient:
    """One model with the ids it is fed."""

    def __init__(self, name: str, folder: Path | None, seed: int = 0) -> None:
        self.name = name
        self.model = lab.open(folder)
        self.config = self.model.config
        self.hidden = int(self.config.hidden_size)
        self.head_dim = int(self.config.head_dim)
        self.layers = range(int(self.config.num_hidden_layers))
        random = np.random.default_rng([seed, len(name)])
        self.ids = [int(i) for i in random.permutation(int(self.config.vocab_size))[:N_IDS]]
        self._clean: dict[str | None, lab.Trace] = {}

    @property
    def tied(self) -> bool:
        embed, head = (self.model.weights.describe(name) for name in ("embed", "lm_head"))
        return (embed.file, embed.file_offset) == (head.file, head.file_offset)

    def run(
        self, changes: Mapping[str, np.ndarray] | None = None, emulate: str | None = None, **options
    ) -> lab.Session:
        """A session that was fed the ids, everything kept."""
        model = self.model.with_weights(changes) if changes else self.model
        if emulate is not None:
            options["emulate"] = emulate
        session = model.session(capture=CAPTURE, max_tokens=8, threads=1, **options)
        session.feed(self.ids)
        return session

    def clean(self, emulate: str | None = None) -> lab.Trace:
        """What the healthy model computes."""
        if emulate not in self._clean:
            self._clean[emulate] = self.run(emulate=emulate).trace()
        return self._clean[emulate]

    def weight(self, name: str) -> np.ndarray:
        """A writable copy in the stored dtype."""
        return self.model.weights[name].copy()

    def tokens(self, place: Place, trace: lab.Trace) -> list[int]:
        """The token rows that the operation works on."""
        if place.expert is not None:
            ids = trace[f"layers.{place.layer}.moe.expert_ids"]
            return [int(t) for t in np.flatnonzero((ids == place.expert).any(1))]
        return list(range(len(self.ids)))

    def inputs(self, place: Place, trace: lab.Trace) -> np.ndarray:
        """What the operation reads, a row for each of `tokens`; what no tap shows is computed in float64."""
        if place.reads == "context":
            return context(trace, place.layer or 0)
        if place.reads == "hidden":
            prefix = place.weight.removesuffix("down")
            x = trace[f"layers.{place.layer}.{'mlp' if '.mlp.' in prefix else 'moe'}.input"].astype(np.float64)
            gate, up = (x @ self.model.weights.float32(prefix + part).T.astype(np.float64) for part in ("gate", "up"))
            return gate / (1 + np.exp(-gate)) * up
        return np.asarray(trace[place.reads])

    def places(self) -> Iterator[Place]:
        """Every weight of the model in the data's way."""
        yield Place("embed", "embed", "embed", "embed", None)
        for layer in self.layers:
            yield from self._attention(layer)
            yield from self._network(layer)
        last = f"layers.{self.layers[-1]}.output"
        yield Place("norm", "norm", "norm", "norm", None, reads=last)
        yield Place("logits", "lm_head", "logits", "logits", None, reads="norm")

    def _attention(self, layer: int) -> Iterator[Place]:
        at = f"layers.{layer}.attn."
        yield Place("attn.norm", f"layers.{layer}.attn_norm", at + "norm", "attention", layer)
        for part in "qkv":
            yield Place(f"attn.{part}", at + part, at + part, "attention", layer, reads=at + "norm", heads=True)
            if at + part + ".bias" in self.model.weights:
                yield Place(f"attn.{part}.bias", f"{at}{part}.bias", at + part, "attention", layer, heads=True)
            if at + part + "_norm" in self.model.weights:
                yield Place(f"attn.{part}_norm", f"{at}{part}_norm", at + part, "attention", layer, heads=True)
        yield Place("attn.out", at + "o", at + "out", "attention", layer, reads="context")

    def _network(self, layer: int) -> Iterator[Place]:
        norm, moe, mlp = f"layers.{layer}.moe_norm", f"layers.{layer}.moe.", f"layers.{layer}.mlp."
        if mlp + "gate" in self.model.weights:
            yield Place("mlp.input", norm, mlp + "input", "mlp", layer)
            for part in ("gate", "up", "down"):
                reads = mlp + "input" if part != "down" else "hidden"
                yield Place(f"mlp.{part}", mlp + part, mlp + "output", "mlp", layer, reads=reads)
            return
        yield Place("moe.input", norm, moe + "input", "router", layer)
        yield Place("moe.router_logits", moe + "router", moe + "router_logits", "router", layer, reads=moe + "input")
        for e in range(int(self.config.num_experts)):
            at = f"{moe}experts.{e}."
            for part, reads in (("gate", "input"), ("up", "input"), ("down", "hidden")):
                tap = at + ("output" if part == "down" else part)
                yield Place(f"experts.{part}", at + part, tap, "expert", layer, e, reads=at + reads)
        if moe + "shared.gate" in self.model.weights:
            for part in ("gate", "up", "down"):
                reads = moe + "input" if part != "down" else "hidden"
                yield Place(
                    f"shared.{part}", f"{moe}shared.{part}", moe + "shared.output", "shared", layer, reads=reads
                )
            yield Place(
                "shared.gate_product", moe + "shared_gate", moe + "shared.gate", "shared", layer, reads=moe + "input"
            )


def context(trace: lab.Trace, layer: int) -> np.ndarray:
    """(T, heads * head_dim): the weighted sum of v, which no tap shows; float64, so near the engine's and not equal."""
    weights, v = trace[f"layers.{layer}.attn.weights"], trace[f"layers.{layer}.attn.v"]
    heads, n = weights.shape[0], weights.shape[1]
    v = np.repeat(v.astype(np.float64), heads // v.shape[1], axis=1)
    seen = np.tril(np.ones((n, n), bool))
    p = np.where(seen, weights[:, :, :n].astype(np.float64), 0)
    return np.einsum("hts,shd->thd", p, v).reshape(n, -1)


@cache
def patient(name: str) -> Patient:
    return Patient(name, None if name == "bundled" else REFERENCE / name)


def without_eps(name: str, folder: Path) -> Patient:
    """The same checkpoint with an eps that is 0 in float32 (open() refuses 0 itself)."""
    target = folder / f"{name}-eps0"
    target.mkdir(parents=True, exist_ok=True)
    config = json.loads((REFERENCE / name / "config.json").read_text()) | {"rms_norm_eps": 1e-60}
    (target / "config.json").write_text(json.dumps(config))
    shutil.copyfile(REFERENCE / name / "model.safetensors", target / "model.safetensors")
    return Patient(name, target)
