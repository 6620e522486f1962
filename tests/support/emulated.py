"""An emulated run once more in NumPy, operation by operation from the recorded inputs of each tap.

The order of sums is the engine's (16 lanes and a fold; one chain for a weighted sum), so results agree bit for bit.
Rounding is what `astype` of NumPy and ml_dtypes does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import ml_dtypes
import numpy as np
from oracle import inverse_frequencies

F32 = np.float32


def rounded(x: np.ndarray, kind: str) -> np.ndarray:
    """float32 values as a format keeps them, widened again."""
    if kind == "float32":
        return np.asarray(x, F32)
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(x, F32).astype(np.dtype(getattr(ml_dtypes, kind, kind))).astype(F32)


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a · b + c with one rounding: in float64 the product is exact, and the sum is rounded to odd before it narrows."""
    with np.errstate(invalid="ignore", over="ignore"):
        product, addend = np.asarray(a, np.float64) * b, np.asarray(c, np.float64)
        total = product + addend
        shadow = total - product
        error = (product - (total - shadow)) + (addend - shadow)
        step = np.where((error > 0) == (total > 0), 1, -1)
        bits = np.atleast_1d(total).view(np.int64).reshape(np.shape(total))
        inexact = np.isfinite(total) & (error != 0) & (bits & 1 == 0)
        return np.asarray(bits + np.where(inexact, step, 0), np.int64).view(np.float64).astype(F32)


def fold(lanes: np.ndarray, kind: str) -> np.ndarray:
    for half in (8, 4, 2, 1):
        with np.errstate(invalid="ignore", over="ignore"):
            lanes = rounded(lanes[..., :half] + lanes[..., half : 2 * half], kind)
    return lanes[..., 0]


def dot(a: np.ndarray, b: np.ndarray, kind: str) -> np.ndarray:
    """Sums over the last axis of a and b, which broadcast."""
    lanes = np.zeros((*np.broadcast_shapes(a.shape, b.shape)[:-1], 16), F32)
    for start in range(0, a.shape[-1], 16):
        part = slice(start, min(start + 16, a.shape[-1]))
        here = lanes[..., : part.stop - start]
        here[...] = rounded(fma(a[..., part], b[..., part], here), kind)
    return fold(lanes, kind)


def chain(factors: np.ndarray, rows: np.ndarray, kind: str) -> np.ndarray:
    """The weighted sum of rows (n, width)."""
    total = np.zeros(rows.shape[1], F32)
    for factor, row in zip(factors, rows, strict=True):
        total = rounded(fma(factor, row, total), kind)
    return total


def exp(x: np.ndarray) -> np.ndarray:
    """The engine's own, of csrc/kernels/float32.h, for the numbers between its limits."""
    x = np.clip(x, F32(-104), F32(89))
    shifted = fma(x, F32(1.44269504), F32(12582912))
    n = shifted - F32(12582912)
    r = fma(n, F32(float.fromhex("0x1.bd0106p-13")), fma(n, F32(-0.693359375), x))
    q = F32(float.fromhex("0x1.6d10fcp-10"))
    for name in ("0x1.120b62p-7", "0x1.55551ap-5", "0x1.5554dep-3", "0x1p-1"):
        q = fma(q, r, F32(float.fromhex(name)))
    e = F32(1) + fma(r * r, q, r)
    power = n.astype(np.int32)
    first = power >> 1
    with np.errstate(over="ignore", under="ignore"):
        return e * np.ldexp(F32(1), first) * np.ldexp(F32(1), power - first)


def softmax(x: np.ndarray, first: int = 0) -> np.ndarray:
    """Of one row."""
    e = exp(x - x.max())
    lanes = np.zeros(16, F32)
    for i, value in enumerate(e):
        lanes[(first + i) % 16] += value
    return e / fold(lanes, "float32")


def norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    root = np.sqrt(dot(x, x, "float32") / F32(x.shape[-1]) + F32(eps))
    return weight * (x / root[..., None])


class Again:
    """The recorded `taps` of an emulated session, and what each should be by the formulas."""

    def __init__(self, model, taps, emulation):
        self.model, self.taps, self.emulation = model, taps, emulation
        self.config = model.config
        spelled = json.loads((model.folder / "config.json").read_text())
        self.frequencies, self.factor = inverse_frequencies(spelled)

    def weight(self, name: str) -> np.ndarray:
        return self.model.weights.float32(name)

    def keep(self, point: str, values: np.ndarray) -> np.ndarray:
        return rounded(values, self.emulation.storage_of(point))

    def product(self, point: str, x: np.ndarray, name: str) -> np.ndarray:
        kind = self.emulation.accumulation_of(point)
        y = dot(x[:, None], self.weight(name)[None], kind)
        if name + ".bias" in self.model.weights:
            y = rounded(y + self.weight(name + ".bias").reshape(-1), kind)
        return self.keep(point, y)

    def points(self) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        """(path, expected, recorded) of every tap, in the order of the data's way."""
        eps, ids = self.config.rms_norm_eps, self.taps["ids"]
        yield "embed", self.keep("embed", self.weight("embed")[ids]), self.taps["embed"]
        x = self.taps["embed"]
        for layer in range(self.config.num_hidden_layers):
            at = f"layers.{layer}."
            yield from self.attention(layer, x)
            middle = self.keep(at + "middle", x + self.taps[at + "attn.out"])
            block = "moe" if layer in self.config.moe_layers else "mlp"
            inner = self.keep(f"{at}{block}.input", norm(middle, self.weight(at + "moe_norm").reshape(-1), eps))
            yield f"{at}{block}.input", inner, self.taps[f"{at}{block}.input"]
            yield from self.moe(layer, inner) if block == "moe" else self.mlp(layer, inner)
            output = self.keep(at + "output", middle + self.taps[f"{at}{block}.output"])
            yield at + "output", output, self.taps[at + "output"]
            x = self.taps[at + "output"]
        yield "norm", self.keep("norm", norm(x, self.weight("norm").reshape(-1), eps)), self.taps["norm"]
        yield "logits", self.product("logits", self.taps["norm"], "lm_head"), self.taps["logits"]

    def attention(self, layer: int, x: np.ndarray) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        config, at, n = self.config, f"layers.{layer}.attn.", len(x)
        normed = self.keep(
            at + "norm", norm(x, self.weight(f"layers.{layer}.attn_norm").reshape(-1), config.rms_norm_eps)
        )
        yield at + "norm", normed, self.taps[at + "norm"]
        for name in "qkv":
            rows = self.product(f"{at}{name}.product", normed, at + name)
            yield at + name, self.keep(at + name, self.prepared(name, at, rows)), self.taps[at + name]
        q, k, v, weights = (self.taps[at + name] for name in ("q", "k", "v", "weights"))
        context = np.zeros_like(q)
        expected = np.zeros_like(weights)
        window, group = config.windows[layer], q.shape[1] // k.shape[1]
        for head in range(q.shape[1]):
            for t in range(n):
                seen = slice(max(0, t + 1 - window) if window else 0, t + 1)
                sums = dot(q[t, head], k[seen, head // group], self.emulation.accumulation_of(at + "scores"))
                scores = self.keep(at + "scores", sums * F32(1 / np.sqrt(config.head_dim)))
                expected[head, t, seen] = self.keep(at + "weights", softmax(scores, seen.start))
                kind = self.emulation.accumulation_of(at + "context")
                context[t, head] = chain(expected[head, t, seen], v[seen, head // group], kind)
        yield at + "weights", expected, weights
        mixed = self.keep(at + "context", context.reshape(n, -1))
        yield at + "out", self.product(at + "out", mixed, at + "o"), self.taps[at + "out"]

    def prepared(self, name: str, at: str, rows: np.ndarray) -> np.ndarray:
        """Normalised, clipped, rotated."""
        config, shape = self.config, (len(rows), -1, self.config.head_dim)
        if name != "v" and config.qk_norm != "none":
            rows = rows.reshape(shape) if config.qk_norm == "head" else rows
            rows = norm(rows, self.weight(f"{at}{name}_norm").reshape(-1), config.rms_norm_eps).reshape(len(rows), -1)
        if config.clip_qkv:
            rows = np.clip(rows, F32(-config.clip_qkv), F32(config.clip_qkv))
        rows = rows.reshape(shape)
        if name == "v":
            return rows
        angles = (np.arange(len(rows), dtype=F32)[:, None] * self.frequencies).astype(np.float64)[:, None]
        cos, sin = (np.asarray(f(angles), F32) * F32(self.factor) for f in (np.cos, np.sin))
        a, b = np.split(rows, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def network(self, points: str, name: str, x: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """(point, values) of gate, up, hidden and output."""
        inner = points if ".experts." in points else points + "inner."
        gate, up = (self.product(inner + part, x, name + part) for part in ("gate", "up"))
        yield from ((inner + "gate", gate), (inner + "up", up))
        hidden = self.keep(inner + "hidden", gate / (F32(1) + exp(-gate)) * up)
        yield inner + "hidden", hidden
        yield points + "output", self.product(points + "output", hidden, name + "down")

    def mlp(self, layer: int, x: np.ndarray) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        at = f"layers.{layer}.mlp."
        yield at + "output", dict(self.network(at, at, x))[at + "output"], self.taps[at + "output"]

    def moe(self, layer: int, x: np.ndarray) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        config, at, taps = self.config, f"layers.{layer}.moe.", self.taps
        logits = self.product(at + "router_logits", x, at + "router")
        yield at + "router_logits", logits, taps[at + "router_logits"]
        scores = self.keep(at + "scores", np.stack([softmax(row) for row in logits]))
        yield at + "scores", scores, taps[at + "scores"]
        ids = np.argsort(-scores, axis=-1, kind="stable")[:, : config.top_k]
        yield at + "expert_ids", ids.astype(np.int32), taps[at + "expert_ids"]
        gates = np.take_along_axis(scores, ids, -1)
        if config.gate_rule == "softmax_renormalised":
            total = np.zeros(len(gates), F32)
            for slot in range(config.top_k):
                total = total + gates[:, slot]
            gates = gates / total[:, None]
        gates = self.keep(at + "gates", gates)
        yield at + "gates", gates, taps[at + "gates"]

        outputs = np.zeros((*ids.shape, x.shape[1]), F32)
        for expert in range(config.num_experts):
            tokens, slots = np.nonzero(ids == expert)
            if len(tokens):
                here = f"{at}experts.{expert}."
                for path, values in self.network(here, here, x[tokens]):
                    yield path, values, taps[path]
                outputs[tokens, slots] = taps[here + "output"]
        kind = self.emulation.accumulation_of(at + "routed")
        rows = zip(gates, outputs, strict=True)
        routed = self.keep(at + "routed", np.stack([chain(gate, rows, kind) for gate, rows in rows]))
        if layer not in config.shared_layers:  # the same rows have two names
            yield at + "output", self.keep(at + "output", routed), taps[at + "output"]
            return
        yield at + "routed", routed, taps[at + "routed"]
        shared = dict(self.network(at + "shared.", at + "shared.", x))[at + "shared.output"]
        yield at + "shared.output", shared, taps[at + "shared.output"]
        z = self.product(at + "shared.gate.product", x, at + "shared_gate")
        gate = self.keep(at + "shared.gate", F32(1) / (F32(1) + exp(-z)))
        yield at + "shared.gate", gate, taps[at + "shared.gate"]
        total = rounded(fma(gate, shared, routed), self.emulation.accumulation_of(at + "output"))
        yield at + "output", self.keep(at + "output", total), taps[at + "output"]
