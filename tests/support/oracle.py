"""An independent forward pass of mixtral, qwen2_moe, qwen3_moe and olmoe in NumPy float64, straight from the formulas.

It reads a config as the hub spells it (before or since transformers 5) and the hub-named tensors, loops where looping
is clearest, and returns every value the engine's tape has a path for. The only float32 in it is what the reference
itself rounds: the rotary frequencies and the angles (position times frequency).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from checkpoints import expert_count, expert_names, head_dim, is_moe, moe_prefix

F32 = np.float32


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + eps) * weight


def rope_parameters(config: dict) -> dict:
    """Rope settings under the names of transformers 5, whichever way the config spells them."""
    if "rope_parameters" in config:
        return config["rope_parameters"]
    default_theta = 1e6 if config["model_type"] == "mixtral" else 1e4
    rope = {"rope_theta": config.get("rope_theta", default_theta), **(config.get("rope_scaling") or {})}
    rope.setdefault("rope_type", rope.get("type", "default"))
    return rope


def inverse_frequencies(config: dict) -> tuple[np.ndarray, float]:
    """([head_dim / 2] float32, factor on cos and sin). YaRN as Peng et al. 2023; llama3 as Llama 3.1 scales."""
    rope, width = rope_parameters(config), head_dim(config)
    exponents = np.arange(0, width, 2, dtype=F32) / F32(width)
    powers = np.power(np.float64(F32(rope["rope_theta"])), exponents.astype(np.float64)).astype(F32)
    plain = F32(1) / powers
    kind, original = rope["rope_type"], rope.get("original_max_position_embeddings", config["max_position_embeddings"])
    if kind == "default":
        return plain, 1.0
    factor = rope["factor"]
    if kind == "linear":
        return plain / F32(factor), 1.0
    if kind == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        wavelengths = 2 * math.pi / plain.astype(np.float64)
        blend = (original / wavelengths - low) / (high - low)
        middle = (1 - blend) * plain / factor + blend * plain
        slow = np.where(wavelengths > original / low, plain / factor, middle)
        return np.where(wavelengths < original / high, plain, slow).astype(F32), 1.0
    if kind == "yarn":

        def dimension(rotations: float) -> float:
            return width * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))

        first, last = dimension(rope.get("beta_fast") or 32), dimension(rope.get("beta_slow") or 1)
        if rope.get("truncate", True):
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, width - 1)
        span = last - first if last != first else 0.001
        ramp = np.clip((np.arange(width // 2) - first) / span, 0, 1)
        blended = plain.astype(np.float64) * (1 - ramp) + ramp / (factor * powers.astype(np.float64))
        attention_factor = rope.get("attention_factor") or (0.1 * math.log(factor) + 1 if factor > 1 else 1.0)
        return blended.astype(F32), attention_factor
    raise ValueError(kind)


def rotate(x: np.ndarray, frequencies: np.ndarray, factor: float) -> np.ndarray:
    """x [T, heads, head_dim]; channel j turns with channel j + head_dim / 2."""
    angles = (np.arange(len(x), dtype=F32)[:, None] * frequencies).astype(np.float64)[:, None, :]
    cos, sin = np.cos(angles) * factor, np.sin(angles) * factor
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def window(config: dict, layer: int) -> int:
    """How many keys a query sees, itself included; 0 is all."""
    family, width = config["model_type"], config.get("sliding_window") or 0
    if family == "mixtral":
        return width
    if family == "olmoe" or not config.get("use_sliding_window"):
        return 0
    if family == "qwen2_moe":
        kinds = config.get("layer_types")
        slides = (
            kinds[layer] == "sliding_attention"
            if kinds
            else layer % 2 == 0 and layer < config.get("max_window_layers", 28)
        )
        return width if slides else 0
    return width


def top_k(scores: np.ndarray, k: int) -> np.ndarray:
    """[T, k] ids by descending score, equal scores by ascending id."""
    return np.argsort(-scores, axis=-1, kind="stable")[:, :k]


class Oracle:
    """One forward pass over `ids`; `taps` maps tape paths to arrays, weights of the softmax of attention included."""

    def __init__(self, config: dict, tensors: Mapping[str, np.ndarray]):
        self.config = config
        self.tensors = {name: value.astype(np.float64) for name, value in tensors.items()}
        self.taps: dict[str, np.ndarray] = {}

    def linear(self, x: np.ndarray, name: str) -> np.ndarray:
        y = x @ self.tensors[name + ".weight"].T
        return y + self.tensors[name + ".bias"] if name + ".bias" in self.tensors else y

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        default = 1e-6 if self.config["model_type"].startswith("qwen") else 1e-5
        return rms_norm(x, self.tensors[name + ".weight"], self.config.get("rms_norm_eps", default))

    def attention(self, layer: int, x: np.ndarray) -> np.ndarray:
        config, family, path = self.config, self.config["model_type"], f"layers.{layer}.attn."
        prefix, width, n_tokens = f"model.layers.{layer}.self_attn.", head_dim(self.config), len(x)
        q, k, v = (self.linear(x, f"{prefix}{name}_proj") for name in "qkv")
        if family == "olmoe":
            q, k = self.norm(q, prefix + "q_norm"), self.norm(k, prefix + "k_norm")
            clip = config.get("clip_qkv")
            if clip is not None:
                q, k, v = (np.clip(value, -clip, clip) for value in (q, k, v))
        q, k, v = (value.reshape(n_tokens, -1, width) for value in (q, k, v))
        if family == "qwen3_moe":
            q, k = self.norm(q, prefix + "q_norm"), self.norm(k, prefix + "k_norm")
        frequencies, factor = inverse_frequencies(config)
        q, k = rotate(q, frequencies, factor), rotate(k, frequencies, factor)

        query, key = np.arange(n_tokens)[:, None], np.arange(n_tokens)[None, :]
        seen = key <= query
        if window(config, layer):
            seen &= key > query - window(config, layer)
        weights = np.zeros((q.shape[1], n_tokens, n_tokens))
        mixed = np.zeros_like(q)
        for head in range(q.shape[1]):
            kv_head = head * k.shape[1] // q.shape[1]
            scores = q[:, head] @ k[:, kv_head].T / math.sqrt(width)
            weights[head] = softmax(np.where(seen, scores, -np.inf))
            mixed[:, head] = weights[head] @ v[:, kv_head]
        out = self.linear(mixed.reshape(n_tokens, -1), prefix + "o_proj")
        self.taps |= {
            path + "norm": x,
            path + "q": q,
            path + "k": k,
            path + "v": v,
            path + "weights": weights,
            path + "out": out,
        }
        return out

    def mlp(self, x: np.ndarray, prefix: str, names: Sequence[str]) -> dict[str, np.ndarray]:
        gate, up = self.linear(x, prefix + names[0]), self.linear(x, prefix + names[1])
        hidden = silu(gate) * up
        return {"input": x, "gate": gate, "up": up, "hidden": hidden, "output": self.linear(hidden, prefix + names[2])}

    def moe(self, layer: int, x: np.ndarray) -> np.ndarray:
        config, family, path = self.config, self.config["model_type"], f"layers.{layer}.moe."
        k = config["num_experts_per_tok"]
        prefix = moe_prefix(config, layer)
        if prefix + "gate.weight" not in self.tensors:  # stacked experts are stored under `mlp`, whatever the family
            prefix = f"model.layers.{layer}.mlp."
        logits = self.linear(x, prefix + "gate")
        scores = softmax(logits)
        ids = top_k(scores, k)
        gates = np.take_along_axis(scores, ids, -1)
        if family == "mixtral" or config.get("norm_topk_prob"):
            gates /= gates.sum(-1, keepdims=True)
        routed = np.zeros_like(x)
        for expert in range(expert_count(config)):
            tokens, slots = np.nonzero(ids == expert)
            parts = self.mlp(x[tokens], f"{prefix}experts.{expert}.", expert_names(config))
            routed[tokens] += gates[tokens, slots, None] * parts["output"]
            here = f"{path}experts.{expert}."
            self.taps |= {here + "tokens": tokens} | {here + name: value for name, value in parts.items()}
        self.taps |= {
            path + "input": x,
            path + "router_logits": logits,
            path + "scores": scores,
            path + "expert_ids": ids,
        }
        self.taps |= {path + "gates": gates, path + "routed": routed}
        out = routed
        if family == "qwen2_moe":
            shared = self.mlp(x, prefix + "shared_expert.", ("gate_proj", "up_proj", "down_proj"))["output"]
            gate = 1 / (1 + np.exp(-self.linear(x, prefix + "shared_expert_gate")))
            out = routed + gate * shared
            self.taps |= {path + "shared.output": shared, path + "shared.gate": gate}
        self.taps[path + "output"] = out
        return out

    def forward(self, ids: Sequence[int]) -> dict[str, np.ndarray]:
        x = self.tensors["model.embed_tokens.weight"][np.asarray(ids)]
        self.taps = {"embed": x}
        for layer in range(self.config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}."
            x = x + self.attention(layer, self.norm(x, prefix + "input_layernorm"))
            inner = self.norm(x, prefix + "post_attention_layernorm")
            if is_moe(self.config, layer):
                x = x + self.moe(layer, inner)
            else:
                out = self.mlp(inner, prefix + "mlp.", ("gate_proj", "up_proj", "down_proj"))["output"]
                self.taps |= {f"layers.{layer}.mlp.input": inner, f"layers.{layer}.mlp.output": out}
                x = x + out
            self.taps[f"layers.{layer}.output"] = x
        normed = self.norm(x, "model.norm")
        head = self.tensors.get("lm_head.weight", self.tensors["model.embed_tokens.weight"])
        self.taps |= {"norm": normed, "logits": normed @ head.T}
        return self.taps


def smallest_margin(taps: Mapping[str, np.ndarray], k: int) -> float:
    """The narrowest gap between the last chosen and the first unchosen router logit, over all tokens and layers."""
    gaps = [math.inf]
    for path, logits in taps.items():
        if path.endswith(".router_logits") and logits.shape[-1] > k:
            ordered = -np.sort(-logits, axis=-1)
            gaps.append(float((ordered[:, k - 1] - ordered[:, k]).min()))
    return min(gaps)
