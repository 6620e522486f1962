"""A forward pass in NumPy float32, written from the formulas, whose every step can be replaced.

A fault is a method of `Forward` done wrongly: `faulty(gates=my_gates)` is the class with that method replaced, so the
difference spreads through the rest of the computation as it would in a real port. `Forward(...).run(ids)` is a Trace.
It covers mixtral, qwen2_moe, qwen3_moe and olmoe, and routers with a correction bias (deepseek_v3, glm4_moe, dots1,
minimax_m2, ernie4_5_moe) on plain grouped-query attention.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from checkpoints import expert_count, expert_names, head_dim, moe_prefix

from colibri_lab.trace import Trace

F32 = np.float32
_NOT_MOE = re.compile(r"embed|norm|logits|.*\.attn\.(norm|q|weights|out)|.*\.mlp\..*|layers\.\d+\.output"
                      r"|.*\.dispatch\.(gate|up|hidden)")  # fmt: skip


def sigmoid(x: np.ndarray) -> np.ndarray:
    return (1 / (1 + np.exp(-x))).astype(F32)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def taken(values: np.ndarray, ids: np.ndarray) -> np.ndarray:
    return np.take_along_axis(values, ids, -1)


class Forward:
    """One model and one timeline of tokens. Every method may be replaced; `site` is the tap path of what it makes."""

    def __init__(self, config: dict, tensors: Mapping[str, np.ndarray]):
        self.config, self.tensors, self.family = config, tensors, config["model_type"]
        self.cache: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.rows: dict[str, list[np.ndarray]] = defaultdict(list)

    # ---- small steps, each a place for a fault ----

    def value(self, site: str, x: np.ndarray) -> np.ndarray:
        """Every intermediate value on its way, before it is recorded and used."""
        return x

    def linear(self, x: np.ndarray, name: str) -> np.ndarray:
        y = x @ self.tensors[name + ".weight"].T
        return y + self.tensors[name + ".bias"] if name + ".bias" in self.tensors else y

    def epsilon(self, site: str) -> float:
        return self.config["rms_norm_eps"]

    def norm(self, x: np.ndarray, name: str, site: str) -> np.ndarray:
        square = np.square(x).mean(-1, keepdims=True)
        return x / np.sqrt(square + F32(self.epsilon(site))) * self.tensors[name + ".weight"]

    def positions(self, start: int, stop: int, layer: int, part: str) -> np.ndarray:
        """Positions of the rows of one pass; part is "q" or "k"."""
        return np.arange(start, stop)

    def theta(self, layer: int) -> float:
        return self.config["rope_parameters"]["rope_theta"]

    def rotate(self, x: np.ndarray, positions: np.ndarray, layer: int, part: str) -> np.ndarray:
        """x [T, heads, head_dim]; channel j turns with channel j + head_dim / 2."""
        cos, sin = self.angles(positions, x.shape[-1], layer)
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def angles(self, positions: np.ndarray, width: int, layer: int) -> tuple[np.ndarray, np.ndarray]:
        exponents = np.arange(0, width, 2, dtype=F32) / F32(width)
        angles = positions[:, None].astype(F32) * (F32(1) / F32(self.theta(layer)) ** exponents)
        return np.cos(angles)[:, None, :], np.sin(angles)[:, None, :]

    def window(self, layer: int) -> int:
        """How many keys a query sees, itself included; 0 is all."""
        width = self.config.get("sliding_window") or 0
        if self.family == "mixtral":
            return width
        if not self.config.get("use_sliding_window"):
            return 0
        return width if self.family == "qwen3_moe" or layer % 2 == 0 else 0

    def visible(self, query: np.ndarray, key: np.ndarray, layer: int) -> np.ndarray:
        seen = key <= query
        return seen & (key > query - self.window(layer)) if self.window(layer) else seen

    def attention_scale(self, layer: int) -> float:
        return head_dim(self.config) ** -0.5

    def probabilities(self, logits: np.ndarray, layer: int) -> np.ndarray:
        chosen_by_sigmoid = self.family in ("deepseek_v3", "glm4_moe", "dots1", "minimax_m2")
        return sigmoid(logits) if chosen_by_sigmoid else softmax(logits)

    def scores(self, probabilities: np.ndarray, layer: int) -> np.ndarray:
        """What the choice is made by: probabilities, corrected and limited to groups where the family does so."""
        bias = self.tensors.get(f"{self.prefix(layer)}gate.e_score_correction_bias")
        corrected = probabilities if bias is None else probabilities + bias
        groups, kept = self.config.get("n_group", 1), self.config.get("topk_group", 1)
        if groups > kept:
            grouped = corrected.reshape(len(corrected), groups, -1)
            best = np.argsort(-np.sort(grouped, -1)[..., -2:].sum(-1), axis=-1, kind="stable")[:, :kept]
            open_groups = np.zeros(grouped.shape[:2], bool)
            np.put_along_axis(open_groups, best, True, -1)
            corrected = np.where(open_groups[..., None], grouped, F32(-np.inf)).reshape(corrected.shape)
        return corrected

    def renormalises(self, layer: int) -> bool:
        return self.family == "mixtral" or bool(self.config.get("norm_topk_prob"))

    def gates(
        self, logits: np.ndarray, probabilities: np.ndarray, scores: np.ndarray, ids: np.ndarray, layer: int
    ) -> np.ndarray:
        gates = taken(probabilities, ids)
        if self.renormalises(layer):
            gates = gates / gates.sum(-1, keepdims=True)
        return gates * F32(self.gate_scale(layer))

    def gate_scale(self, layer: int) -> float:
        return self.config.get("routed_scaling_factor", 1.0)

    def activation(self, x: np.ndarray, site: str) -> np.ndarray:
        return x * sigmoid(x)

    def combine(self, gate: np.ndarray, up: np.ndarray, site: str) -> np.ndarray:
        return self.activation(gate, site) * up

    def projections(self, x: np.ndarray, prefix: str, names: Sequence[str], site: str) -> list[np.ndarray]:
        """(gate, up) of one gated MLP; site is its path without a last part."""
        return [self.linear(x, prefix + names[0]), self.linear(x, prefix + names[1])]

    def expert_weights(self, expert: int, layer: int) -> str:
        """The prefix of the weights that do the work of an expert."""
        return f"{self.prefix(layer)}experts.{expert}."

    def prefix(self, layer: int) -> str:
        return moe_prefix(self.config, layer)

    # ---- the way through ----

    def keep(self, site: str, x: np.ndarray) -> np.ndarray:
        """The value as it goes on, recorded."""
        x = self.value(site, x)
        self.rows[site].append(x)
        return x

    def attention(self, layer: int, x: np.ndarray, start: int) -> np.ndarray:
        path, prefix, width = f"layers.{layer}.attn.", f"model.layers.{layer}.self_attn.", head_dim(self.config)
        stop, clip = start + len(x), self.config.get("clip_qkv")
        q, k, v = (self.linear(x, f"{prefix}{part}_proj") for part in "qkv")
        if self.family == "olmoe":
            q, k = self.norm(q, prefix + "q_norm", path + "q"), self.norm(k, prefix + "k_norm", path + "k")
            if clip:
                q, k, v = (np.clip(part, -F32(clip), F32(clip)) for part in (q, k, v))
        q, k, v = (part.reshape(len(x), -1, width) for part in (q, k, v))
        if self.family == "qwen3_moe":
            q, k = self.norm(q, prefix + "q_norm", path + "q"), self.norm(k, prefix + "k_norm", path + "k")
        q = self.keep(path + "q", self.rotate(q, self.positions(start, stop, layer, "q"), layer, "q"))
        k = self.keep(path + "k", self.rotate(k, self.positions(start, stop, layer, "k"), layer, "k"))
        v = self.keep(path + "v", v)
        if start:
            k, v = (np.concatenate(pair) for pair in zip(self.cache[layer], (k, v), strict=True))
        self.cache[layer] = k, v
        seen = self.visible(np.arange(start, stop)[:, None], np.arange(stop)[None], layer)
        weights, mixed = np.zeros((q.shape[1], len(x), stop), F32), np.zeros_like(q)
        for head in range(q.shape[1]):
            kv_head = head * k.shape[1] // q.shape[1]
            scores = q[:, head] @ k[:, kv_head].T * F32(self.attention_scale(layer))
            weights[head] = softmax(np.where(seen, scores, F32(-np.inf)))
        weights = self.keep(path + "weights", weights)
        for head in range(q.shape[1]):
            mixed[:, head] = weights[head] @ v[:, head * k.shape[1] // q.shape[1]]
        mixed = self.value(path + "mixed", mixed.reshape(len(x), -1))
        return self.keep(path + "out", self.linear(mixed, prefix + "o_proj"))

    def mlp(self, x: np.ndarray, prefix: str, names: Sequence[str], site: str) -> dict[str, np.ndarray]:
        gate, up = self.projections(x, prefix, names, site)
        gate, up = self.value(site + "gate", gate), self.value(site + "up", up)
        hidden = self.value(site + "hidden", self.combine(gate, up, site + "hidden"))
        output = self.value(site + "output", self.linear(hidden, prefix + names[2]))
        return {"input": x, "gate": gate, "up": up, "hidden": hidden, "output": output}

    def moe(self, layer: int, x: np.ndarray, start: int) -> np.ndarray:
        path, prefix, k = f"layers.{layer}.moe.", self.prefix(layer), self.config["num_experts_per_tok"]
        x = self.keep(path + "input", x)
        logits = self.keep(path + "router_logits", self.linear(x, prefix + "gate"))
        probabilities = self.value(path + "probabilities", self.probabilities(logits, layer))
        scores = self.keep(path + "scores", self.scores(probabilities, layer))
        ids = self.keep(path + "expert_ids", np.argsort(-scores, axis=-1, kind="stable")[:, :k].astype(np.int32))
        gates = self.keep(path + "gates", self.gates(logits, probabilities, scores, ids, layer))
        routed, offset = np.zeros_like(x), sum(map(len, self.rows[path + "dispatch.tokens"]))
        offsets = [offset]
        for expert in range(expert_count(self.config)):
            tokens, slots = np.nonzero(ids == expert)
            parts = self.mlp(
                x[tokens], self.expert_weights(expert, layer), expert_names(self.config), path + "experts."
            )
            routed[tokens] += gates[tokens, slots, None] * parts["output"]
            self.rows[path + "dispatch.tokens"].append((tokens + start).astype(np.int32))
            for name, rows in parts.items():
                self.rows[f"{path}dispatch.{name}"].append(rows)
            offsets.append(offsets[-1] + len(tokens))
        self.rows[path + "dispatch.offsets"].append(np.array([offsets], np.int64))
        names = ("shared_expert.", "shared_experts.")
        shared = next((name for name in names if f"{prefix}{name}up_proj.weight" in self.tensors), None)
        out = routed
        if shared:
            rows = self.mlp(x, prefix + shared, ("gate_proj", "up_proj", "down_proj"), path + "shared.")["output"]
            if prefix + "shared_expert_gate.weight" in self.tensors:
                gate = self.keep(path + "shared.gate", self.shared_gate(x, prefix + "shared_expert_gate", layer))
                added = gate * rows
            else:
                added = rows
            self.rows[path + "shared.output"].append(rows)
            routed = self.keep(path + "routed", routed)
            out = routed + added
        else:
            out = self.keep(path + "routed", routed)
        return self.keep(path + "output", out)

    def shared_gate(self, x: np.ndarray, name: str, layer: int) -> np.ndarray:
        return sigmoid(self.linear(x, name))

    def layer(self, layer: int, x: np.ndarray, start: int) -> np.ndarray:
        name, path = f"model.layers.{layer}.", f"layers.{layer}."
        inner = self.keep(path + "attn.norm", self.norm(x, name + "input_layernorm", path + "attn.norm"))
        x = x + self.attention(layer, inner, start)
        routes = self.prefix(layer) + "gate.weight" in self.tensors
        site = path + ("moe.input" if routes else "mlp.input")
        inner = self.norm(x, name + "post_attention_layernorm", site)
        if routes:
            x = x + self.moe(layer, inner, start)
        else:
            inner = self.keep(site, inner)
            rows = self.mlp(inner, name + "mlp.", ("gate_proj", "up_proj", "down_proj"), path + "mlp.")["output"]
            self.rows[path + "mlp.output"].append(rows)
            x = x + rows
        return self.keep(path + "output", x)

    def one_pass(self, ids: Sequence[int], start: int) -> None:
        x = self.keep("embed", self.tensors["model.embed_tokens.weight"][np.asarray(ids)])
        for layer in range(self.config["num_hidden_layers"]):
            x = self.layer(layer, x, start)
        x = self.keep("norm", self.norm(x, "model.norm", "norm"))
        self.keep("logits", x @ self.tensors["lm_head.weight"].T)

    def run(self, ids: Sequence[int], capture: Sequence[str] = ("all",), chunks: Sequence[int] = ()) -> Trace:
        """A trace of `ids`, fed in passes of the given lengths (one pass when there are none)."""
        passes, start = [], 0
        for length in chunks or [len(ids)]:
            self.one_pass(ids[start : start + length], start)
            passes.append([start, start + length])
            start += length
        arrays = {}
        for path, rows in self.rows.items():
            if path.endswith("attn.weights"):
                if len(capture) > 1:
                    arrays[path] = np.concatenate([np.pad(w, ((0, 0), (0, 0), (0, len(ids) - w.shape[2])))
                                                   for w in rows], axis=1)  # fmt: skip
            elif capture[0] == "all" or not _NOT_MOE.fullmatch(path):
                arrays[path] = np.concatenate(rows)
        return Trace(arrays, ids=ids, texts=[], meta=self.meta(passes, capture))

    def meta(self, passes: list[list[int]], capture: Sequence[str]) -> dict:
        layers = range(self.config["num_hidden_layers"])
        rule = "softmax" if self.family in ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe") else "biased_choice"
        return {
            "producer": "numpy",
            "producer_version": "1",
            "model_type": self.family,
            "num_hidden_layers": len(layers),
            "moe_layers": [layer for layer in layers if self.prefix(layer) + "gate.weight" in self.tensors],
            "num_experts": expert_count(self.config),
            "top_k": self.config["num_experts_per_tok"],
            "gate_rule": rule + "_renormalised" * Forward.renormalises(self, 0),
            "passes": passes,
            "edits": [],
            "capture": list(capture),
            "arithmetic": "float32",
            "config": self.config,
        }


def faulty(**methods: Callable) -> type[Forward]:
    """`Forward` with these methods (or attributes) in place of its own."""
    return type("Faulty", (Forward,), methods)
