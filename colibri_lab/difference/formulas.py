"""The formulas of the architectures in float64 NumPy, and what they need to know of a configuration.

Sources: Zhang & Sennrich 2019 (RMSNorm), Su et al. 2021 (rotary), Peng et al. 2023 (YaRN), Shazeer 2020 (gated MLP),
Jiang et al. 2024 (Mixtral). Angles are products of float32 numbers, as the reference makes them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from colibri_lab.trace import Trace

Array = NDArray[Any]
F64 = NDArray[np.float64]

_EXPERT = re.compile(r"layers\.(\d+)\.moe\.experts\.(\d+|\*)\.(\w+)")


class Missing(Exception):
    """A replay needs what neither trace nor model holds; the message names it."""


def relative(found: Array, wanted: Array) -> float:
    """Root of the summed squares of `found - wanted` over that of `wanted`: 0 is equal, 1 is nothing in common."""
    wide = np.asarray(wanted, np.float64)
    size = float(np.linalg.norm(wide))
    return float(np.linalg.norm(np.asarray(found, np.float64) - wide)) / size if size else math.inf


def expert_of(path: str) -> tuple[int, str, str] | None:
    """(layer, expert number or "*", tap) of a path inside an expert, else None."""
    match = _EXPERT.fullmatch(path)
    return (int(match[1]), match[2], match[3]) if match else None


def silu(x: F64) -> F64:
    """x / (1 + exp(-x))."""
    return x * sigmoid(x)


def sigmoid(x: F64) -> F64:
    """1 / (1 + exp(-x)), without overflow."""
    return 0.5 * (1 + np.tanh(0.5 * np.asarray(x)))


def softmax(x: F64) -> F64:
    """Over the last axis."""
    e = np.exp(x - x.max(-1, keepdims=True))
    return cast(F64, e / e.sum(-1, keepdims=True))


def rms_norm(x: F64, weight: F64, eps: float) -> F64:
    """weight · x / sqrt(mean(x²) + eps)."""
    return cast(F64, x / np.sqrt(np.square(x).mean(-1, keepdims=True) + eps) * weight)


def gated(gate: F64, up: F64) -> F64:
    """silu(gate) · up."""
    return silu(gate) * up


def rotate_halves(x: F64, angles: F64) -> F64:
    """Channel j turns with channel j + d/2. x (T, heads, head_dim), angles (T, d/2); channels beyond d stay."""
    half = angles.shape[-1]
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def frequencies_of(rope: Mapping[str, Any], width: int) -> tuple[F64, float]:
    """((width / 2,) turns per position in radians, factor on cos and sin) of the rope kinds that the engine knows."""
    single = np.float32
    theta = float(rope.get("rope_theta") or 1e4)
    powers = np.power(np.float64(single(theta)), np.arange(0, width, 2) / np.float64(width)).astype(single)
    plain = (single(1) / powers).astype(np.float64)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return plain, 1.0
    factor = float(rope["factor"])
    original = float(rope.get("original_max_position_embeddings") or rope["max_position_embeddings"])
    if kind == "linear":
        return plain / factor, 1.0
    if kind == "llama3":
        low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
        length = 2 * math.pi / plain
        blend = (original / length - low) / (high - low)
        middle = (1 - blend) * plain / factor + blend * plain
        slow = np.where(length > original / low, plain / factor, middle)
        return np.where(length < original / high, plain, slow).astype(single).astype(np.float64), 1.0
    if kind == "yarn":
        turns = [float(rope.get("beta_fast") or 32), float(rope.get("beta_slow") or 1)]
        ends = [width * math.log(original / (turn * 2 * math.pi)) / (2 * math.log(theta)) for turn in turns]
        if rope.get("truncate", True):
            ends = [math.floor(ends[0]), math.ceil(ends[1])]
        first, last = max(ends[0], 0), min(ends[1], width - 1)
        ramp = np.clip((np.arange(width // 2) - first) / ((last - first) or 0.001), 0, 1)
        grown = rope.get("attention_factor") or (0.1 * math.log(factor) + 1 if factor > 1 else 1.0)
        return plain * (1 - ramp) + ramp * plain / factor, float(grown)
    raise Missing(f"rope type '{kind}' is not known here")


@dataclass(frozen=True)
class Settings:
    """What the formulas need of a configuration."""

    eps: float
    head_dim: int | None
    qk_norm: str  # "none", "head" or "full"
    clip: float | None
    windows: tuple[int | None, ...]  # keys a query sees in each layer, itself included
    gate_rule: str
    top_k: int
    hidden: int
    rope: dict[str, Any] = field(default_factory=dict)


def settings_of(config: Mapping[str, Any], trace: Trace) -> Settings:
    """Reads the engine's config, or one as the hub spells it. What is not said there is taken from the trace."""
    family, layers = str(config.get("model_type") or trace.meta["model_type"]), len(trace.layers)
    rope = {key.removeprefix("rope_"): value for key, value in config.items() if key.startswith("rope_")}
    rope = {"rope_type": rope.get("type"), **rope, "rope_theta": rope.get("theta")}
    rope.update({key: value for key, value in (config.get("rope_scaling") or {}).items()})
    rope.update({key: value for key, value in (config.get("rope_parameters") or {}).items()})
    rope["max_position_embeddings"] = config.get("max_position_embeddings")
    window = config.get("sliding_window")
    if family.startswith("qwen") and not config.get("use_sliding_window"):
        window = None
    kinds = config.get("layer_types") or ["sliding_attention"] * layers
    windows = config.get("windows") or [window if kind == "sliding_attention" else None for kind in kinds]
    qk_norm = {"qwen3_moe": "head", "olmoe": "full"}.get(family, "none")
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    width = config.get("head_dim") or (hidden // heads if hidden and heads else None)
    eps = config.get("rms_norm_eps")
    return Settings(
        eps=float((1e-6 if family.startswith("qwen") else 1e-5) if eps is None else eps),
        head_dim=width,
        qk_norm=str(config.get("qk_norm") or qk_norm),
        clip=config.get("clip_qkv"),
        windows=tuple(windows),
        gate_rule=str(config.get("gate_rule") or trace.meta["gate_rule"]),
        top_k=trace.top_k,
        hidden=int(hidden or 0),
        rope=rope,
    )


@dataclass(frozen=True)
class Seen:
    """Which keys a query sees: those up to itself, `window` of them when there is one."""

    window: int | None = None
    ahead: int = 0  # 1: the next token as well, -1: not even itself

    def __call__(self, queries: Array, keys: Array) -> NDArray[np.bool_]:
        """(queries, keys) bool."""
        seen = keys <= queries + self.ahead
        return seen if self.window is None else seen & (keys > queries - self.window)


SCORE_RULES: dict[str, Callable[[Array], Array]] = {"softmax": softmax, "sigmoid": sigmoid, "logits": np.asarray}
"""What scores are made of."""


@dataclass(frozen=True)
class GateRule:
    """gates = factor · base[ids], divided by their sum ("sum"), the root of their squares ("root"), or as they are."""

    base: str  # "softmax", "sigmoid", "logits", "scores"
    norm: str = "none"
    factor: float = 1.0

    def __call__(self, logits: F64, scores: F64, ids: Array) -> F64:
        """(T, k) from (T, E), (T, E), (T, k)."""
        table = scores if self.base == "scores" else SCORE_RULES[self.base](logits)
        chosen = np.take_along_axis(table, ids, -1)
        if self.norm == "sum":
            chosen = chosen / chosen.sum(-1, keepdims=True)
        elif self.norm == "root":
            chosen = chosen / np.sqrt(np.square(chosen).sum(-1, keepdims=True))
        return self.factor * chosen


GATE_RULES = {
    "softmax": GateRule("softmax"),
    "softmax_renormalised": GateRule("softmax", "sum"),
    "softmax_of_chosen": GateRule("softmax", "sum"),  # the same numbers: exp(z) over the sum of the chosen exp(z)
    "raw_logits": GateRule("logits"),
}
