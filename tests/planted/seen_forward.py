"""A NumPy float32 forward pass with switches, each of which is one way to get it wrong.

Independent of colibri_lab.difference.maths: float32, loops over heads and experts, its own formulas. It reads hub-named
tensors, knows mixtral, qwen2_moe, qwen3_moe, olmoe and the sigmoid router with a correction bias of deepseek_v3, and
gives a Trace with every tap. `wrong` maps a switch to its value; it holds in `where` (a layer) or in all of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from checkpoints import expert_count, expert_names, head_dim, is_moe, moe_prefix

from colibri_lab.trace import Trace

F32 = np.float32
Array = np.ndarray


def narrow(x: Array, dtype: str) -> Array:
    return x.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16).astype(F32)


def logistic(x: Array) -> Array:
    return (1 / (1 + np.exp(-x, dtype=F32))).astype(F32)


def soft(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True), dtype=F32)
    return e / e.sum(-1, keepdims=True, dtype=F32)


class Forward:
    """One run; `trace(ids)` gives what it computed."""

    def __init__(
        self, config: Mapping[str, Any], tensors: Mapping[str, Array], wrong: Mapping[str, Any] | None = None,
        where: int | None = None, bias: Array | None = None, scaling: float = 1.0,
    ) -> None:  # fmt: skip
        self.config, self.family = dict(config), config["model_type"]
        self.tensors = {name: value.astype(F32) for name, value in tensors.items()}
        self.wrong, self.where, self.bias, self.scaling = dict(wrong or {}), where, bias, scaling
        self.layer = -1
        self.taps: dict[str, Array] = {}

    def switch(self, name: str, default: Any = None) -> Any:
        """The planted value, where it holds."""
        here = self.where is None or self.layer == self.where
        return self.wrong.get(name, default) if here else default

    def keep(self, path: str, value: Array) -> Array:
        rounding = self.switch("round " + path.split(".", 2)[-1] if path.startswith("layers.") else "round " + path)
        value = narrow(value, rounding) if rounding else value
        self.taps[path] = value.astype(F32)
        return self.taps[path]

    def linear(self, x: Array, name: str) -> Array:
        w = self.tensors[name + ".weight"]
        y = x @ w.T
        bias = self.tensors.get(name + ".bias")
        return y if bias is None or self.switch("no bias") else y + bias

    def norm(self, x: Array, name: str, which: str) -> Array:
        default = 1e-6 if self.family.startswith("qwen") else 1e-5
        eps = F32(self.switch(f"eps {which}", self.config.get("rms_norm_eps", default)))
        w = self.tensors[name + ".weight"]
        if self.switch(f"no norm {which}"):
            return x
        if self.switch(f"bf16 norm {which}"):
            x = narrow(x, "bfloat16")
            unit = narrow(x / np.sqrt(np.square(x).mean(-1, keepdims=True) + eps), "bfloat16")
            return narrow(unit * narrow(w, "bfloat16"), "bfloat16")
        mean = np.square(x).mean(-1, keepdims=True, dtype=F32)
        if self.switch(f"eps outside {which}"):
            return (x / (np.sqrt(mean) + eps) * w).astype(F32)
        return (x / np.sqrt(mean + eps) * w).astype(F32)

    def turn(self, x: Array, which: str) -> Array:
        """Rotation of (T, heads, head_dim)."""
        style = self.switch(f"rope {which}", self.switch("rope", "halves"))
        rope = self.config.get("rope_parameters") or {}
        theta = self.switch(f"theta {which}", self.switch("theta", rope.get("rope_theta", 1e4)))
        width = x.shape[-1]
        rate = (1 / np.power(float(theta), np.arange(0, width, 2) / width)).astype(F32)
        if style == "all heads":
            flat = x.reshape(len(x), 1, -1)
            rate = (1 / np.power(float(theta), np.arange(0, flat.shape[-1], 2) / flat.shape[-1])).astype(F32)
            return self.spin(flat, rate, "halves", which).reshape(x.shape)
        if style == "none":
            return x
        return self.spin(x, rate, style, which)

    def spin(self, x: Array, rate: Array, style: str, which: str) -> Array:
        start = self.switch(f"position {which}", self.switch("position", 0))
        since = self.switch("position since", 0)
        rows = np.arange(len(x))
        rows = rows + np.where(rows >= since, start, 0)
        angle = (rows.astype(F32)[:, None] * rate)[:, None, :]
        cos, sin = np.cos(angle), np.sin(angle)
        if style == "backwards":
            sin = -sin
        if style == "pairs":
            out = np.empty_like(x)
            out[..., 0::2] = x[..., 0::2] * cos - x[..., 1::2] * sin
            out[..., 1::2] = x[..., 1::2] * cos + x[..., 0::2] * sin
            return out
        half = x.shape[-1] // 2
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(F32)

    def attention(self, x: Array) -> Array:
        layer, config, width = self.layer, self.config, head_dim(self.config)
        prefix, path = f"model.layers.{layer}.self_attn.", f"layers.{layer}.attn."
        q, k, v = (self.linear(x, f"{prefix}{name}_proj") for name in "qkv")
        if self.family == "olmoe":
            q, k = self.norm(q, prefix + "q_norm", "q"), self.norm(k, prefix + "k_norm", "k")
        q, k, v = (t.reshape(len(x), -1, width) for t in (q, k, v))
        if self.switch("heads last"):
            q = q.reshape(len(x), width, -1).transpose(0, 2, 1)
        if self.family == "qwen3_moe":
            q, k = self.norm(q, prefix + "q_norm", "q"), self.norm(k, prefix + "k_norm", "k")
        q = self.keep(path + "q", self.turn(q, "q") * F32(self.switch("scale q", 1)))
        k = self.keep(path + "k", self.turn(k, "k") * F32(self.switch("scale k", 1)))
        v = self.keep(path + "v", v * F32(self.switch("scale v", 1)))
        window = self.switch("window", config.get("sliding_window") if self.family == "mixtral" else None)
        row, col = np.arange(len(x))[:, None], np.arange(len(x))[None]
        seen = col <= row + self.switch("ahead", 0)
        if window:
            seen &= col > row - window
        mixed = np.zeros_like(q)
        factor = F32(self.switch("softmax scale", 1 / math.sqrt(width)))
        for head in range(q.shape[1]):
            mate = head * k.shape[1] // q.shape[1]
            mate = head % k.shape[1] if self.switch("tiled heads") else mate
            p = soft(np.where(seen, q[:, head] @ k[:, mate].T * factor, F32(-np.inf)).astype(F32))
            if self.switch("round weights"):
                p = narrow(p, self.switch("round weights"))
            mixed[:, head] = p @ v[:, mate]
        return self.keep(path + "out", self.linear(mixed.reshape(len(x), -1), prefix + "o_proj"))

    def mlp(self, x: Array, prefix: str, names: Sequence[str], expert: int | None = None) -> dict[str, Array]:
        """A gated MLP. Expert switches hold for the experts of `experts` only, when that is given."""
        only = self.switch("experts")
        hit = only is None or expert in only
        gate, up = self.linear(x, prefix + names[0]), self.linear(x, prefix + names[1])
        act = self.switch("act", "silu") if hit else "silu"
        if hit and self.switch("swap"):
            gate, up = up, gate
        if hit and self.switch("fused"):
            both = np.concatenate([gate, up], -1)
            wide = gate.shape[-1]
            how = self.switch("fused")
            if how == "every other":
                gate, up = both[:, 0::2], both[:, 1::2]
            elif how == "halves":
                both = np.stack([gate, up], -1).reshape(len(x), 2 * wide)
                gate, up = both[:, :wide], both[:, wide:]
            else:
                both = np.roll(both, -int(how), -1)
                gate, up = both[:, :wide], both[:, wide:]
        soften = {
            "silu": lambda t: t * logistic(t),
            "gelu": lambda t: t * 0.5 * (1 + np.vectorize(math.erf, otypes=[F32])(t / math.sqrt(2))),
            "tanh": lambda t: 0.5 * t * (1 + np.tanh(0.7978845608 * (t + 0.044715 * t**3))),
            "relu": lambda t: np.maximum(t, 0),
            "none": lambda t: t,
        }[act]
        rounding = self.switch("round hidden") if hit else None
        hidden = (soften(gate) * up).astype(F32)
        hidden = narrow(hidden, rounding) if rounding else hidden
        out = self.linear(hidden, prefix + names[2]) * F32(self.switch("scale expert", 1) if hit else 1)
        return {"input": x, "gate": gate, "up": up, "hidden": hidden, "output": out}

    def router(self, x: Array, prefix: str) -> tuple[Array, Array, Array, Array]:
        """logits, scores, ids, gates."""
        config, k = self.config, self.config["num_experts_per_tok"]
        z = self.linear(x, prefix + "gate") * F32(self.switch("scale logits", 1))
        if self.switch("round logits"):
            z = narrow(z, self.switch("round logits"))
        sigmoid = self.family == "deepseek_v3"
        p = logistic(z) if sigmoid else soft(z)
        scores = p + self.bias if self.bias is not None else p
        ids = np.argsort(-scores, -1, kind="stable")[:, :k]
        base = {"raw": z, "biased": scores}.get(self.switch("gates"), p)
        gates = np.take_along_axis(base, ids, -1)
        renormalise = self.family in ("mixtral", "deepseek_v3") or config.get("norm_topk_prob")
        if self.switch("renormalise", bool(renormalise)) and self.switch("gates") != "raw":
            gates = gates / gates.sum(-1, keepdims=True)
        return z, scores, ids, gates * F32(self.switch("scaling", self.scaling)) * F32(self.switch("scale gates", 1))

    def moe(self, x: Array) -> Array:
        layer, config, path = self.layer, self.config, f"layers.{self.layer}.moe."
        prefix = moe_prefix(config, layer)
        z, scores, ids, gates = self.router(x, prefix)
        n, order = expert_count(config), self.switch("order")
        for tap, value in (("router_logits", z), ("scores", scores), ("gates", gates)):
            self.taps[path + tap] = value.astype(F32)
        self.taps[path + "expert_ids"] = ids.astype(np.int32)
        routed, packed, tokens, offsets = np.zeros_like(x), [], [], [0]
        for expert in range(n):
            rows, slots = np.nonzero(ids == expert)
            source = expert if order is None else order[expert]
            names = expert_names(config)
            parts = self.mlp(x[rows], f"{prefix}experts.{source}.", names, expert)
            factor = np.ones_like(gates[rows, slots, None]) if self.switch("ungated") else gates[rows, slots, None]
            np.add.at(routed, rows, factor * parts["output"])
            packed.append(parts)
            tokens.append(rows)
            offsets.append(offsets[-1] + len(rows))
        dispatch = path + "dispatch."
        self.taps[dispatch + "tokens"] = np.concatenate(tokens).astype(np.int32)
        self.taps[dispatch + "offsets"] = np.asarray([offsets], np.int64)
        for tap in ("input", "gate", "up", "hidden", "output"):
            self.taps[dispatch + tap] = np.concatenate([parts[tap] for parts in packed]).astype(F32)
        out = self.keep(path + "routed", routed * F32(self.switch("scale routed", 1)))
        if self.family == "qwen2_moe":
            names = ("gate_proj", "up_proj", "down_proj")
            shared = self.mlp(x, prefix + "shared_expert.", names, -1)["output"]
            gate = logistic(self.linear(x, prefix + "shared_expert_gate"))
            self.keep(path + "shared.output", shared)
            self.keep(path + "shared.gate", gate)
            out = routed + (shared if self.switch("no shared gate") else gate * shared)
        return self.keep(path + "output", out)

    def trace(self, ids: Sequence[int], capture: str = "all") -> Trace:
        """Everything, or with capture "moe" what that level keeps."""
        config, moe_layers = self.config, []
        self.layer = -1
        x = self.tensors["model.embed_tokens.weight"][np.asarray(ids)] * F32(self.wrong.get("scale embed", 1))
        x = self.keep("embed", x)
        for layer in range(config["num_hidden_layers"]):
            self.layer, prefix, path = layer, f"model.layers.{layer}.", f"layers.{layer}."
            normed = self.keep(path + "attn.norm", self.norm(x, prefix + "input_layernorm", "attention"))
            x = (x + self.attention(normed)).astype(F32)
            inner = self.norm(x, prefix + "post_attention_layernorm", "experts")
            if is_moe(config, layer):
                moe_layers.append(layer)
                x = x + self.moe(self.keep(path + "moe.input", inner)) * F32(self.switch("scale branch", 1))
            else:
                self.keep(path + "mlp.input", inner)
                out = self.mlp(inner, prefix + "mlp.", ("gate_proj", "up_proj", "down_proj"))["output"]
                x = x + self.keep(path + "mlp.output", out)
            x = self.keep(path + "output", x)
        self.layer = -1
        normed = self.keep("norm", self.norm(x, "model.norm", "final"))
        head = self.tensors.get("lm_head.weight", self.tensors["model.embed_tokens.weight"])
        self.keep("logits", normed @ head.T * F32(self.wrong.get("scale output", 1)))
        rule = "softmax_renormalised" if self.family == "mixtral" or config.get("norm_topk_prob") else "softmax"
        meta = {
            "producer": "seen-forward", "producer_version": "1", "model_type": self.family,
            "num_hidden_layers": config["num_hidden_layers"], "moe_layers": moe_layers,
            "num_experts": expert_count(config), "top_k": config["num_experts_per_tok"],
            "gate_rule": "sigmoid" if self.family == "deepseek_v3" else rule,
            "passes": [[0, len(ids)]], "edits": [], "config": config,
        }  # fmt: skip
        taps = {p: v for p, v in self.taps.items() if capture == "all" or kept_by_moe(p)}
        return Trace(taps, ids=list(ids), texts=[], meta=meta)


def kept_by_moe(path: str) -> bool:
    return (
        ".moe." in path and not path.endswith(("dispatch.gate", "dispatch.up", "dispatch.hidden"))
    ) or path.endswith(("attn.k", "attn.v"))
