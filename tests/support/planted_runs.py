"""A small run in NumPy whose every tap passes through one door, where values can be planted: what becomes of them is
then nothing but arithmetic. Norm, grouped attention with a window, routing, experts, a shared expert, a dense layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from colibri_lab.trace import Trace

H, HEADS, KV, WIDTH, E, K, INNER, VOCAB = 6, 4, 2, 3, 4, 2, 5, 7
LAYERS, DENSE = 3, 1  # the layer without experts
WINDOW = 5  # of layer 2

Plant = tuple[str, int, tuple[int, ...]]  # (tap path, token row, index in the row)


class Run:
    """`plants` maps places to values; `born` lists those that were finite until then. `dtype` rounds each tap."""

    def __init__(self, tokens: int, plants: Mapping[Plant, float], dtype: Any = np.float32, seed: int = 0) -> None:
        self.n, self.dtype, self.plants = tokens, dtype, plants
        self.born: set[Plant] = set()
        self.taps: dict[str, np.ndarray] = {}
        self.draw = np.random.default_rng(seed)
        with np.errstate(all="ignore"):
            self.run()

    def put(self, path: str, value: np.ndarray, tokens: np.ndarray | None = None) -> np.ndarray:
        value = value.astype(self.dtype)
        tokens = np.arange(self.n) if tokens is None else tokens
        for (where, token, index), planted in self.plants.items():
            if where == path and token in tokens:
                row = int(np.flatnonzero(tokens == token)[0])
                if np.isfinite(value[(row, *index)]):
                    self.born.add((where, token, index))
                    value[(row, *index)] = planted
        self.taps[path] = value
        return value.astype(np.float32)

    def linear(self, x: np.ndarray, width: int) -> np.ndarray:
        weight = self.draw.standard_normal((width, x.shape[1])).astype(np.float32)
        # one product at a time: a matrix product of NumPy may leave out what it multiplies by zero
        return np.stack([(x * row).sum(1, dtype=np.float32) for row in weight], 1) / np.float32(x.shape[1] ** 0.5)

    @staticmethod
    def norm(x: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(1, keepdims=True, dtype=np.float32) + np.float32(1e-5))

    def run(self) -> None:
        stream = self.put("embed", self.draw.standard_normal((self.n, H)))
        for layer in range(LAYERS):
            path = f"layers.{layer}."
            middle = stream + self.attention(path, stream, WINDOW if layer == 2 else self.n)
            inner = "mlp" if layer == DENSE else "moe"
            x = self.put(f"{path}{inner}.input", self.norm(middle))
            made = self.put(path + "mlp.output", self.mlp(x)) if layer == DENSE else self.moe(path + "moe.", x)
            stream = self.put(path + "output", middle + made)
        self.put("logits", self.linear(self.put("norm", self.norm(stream)), VOCAB))

    def attention(self, path: str, stream: np.ndarray, window: int) -> np.ndarray:
        path += "attn."
        x = self.put(path + "norm", self.norm(stream))
        q = self.put(path + "q", self.linear(x, HEADS * WIDTH).reshape(self.n, HEADS, WIDTH))
        k = self.put(path + "k", self.linear(x, KV * WIDTH).reshape(self.n, KV, WIDTH))
        v = self.put(path + "v", self.linear(x, KV * WIDTH).reshape(self.n, KV, WIDTH))
        weights = np.zeros((self.n, HEADS, self.n), np.float32)
        for t in range(self.n):
            seen = slice(max(0, t - window + 1), t + 1)
            for head in range(HEADS):
                e = np.exp((scores := k[seen, head // 2] @ q[t, head]) - scores.max())
                weights[t, head, seen] = e / e.sum()
        weights = self.put(path + "weights", weights)
        self.taps[path + "weights"] = self.taps[path + "weights"].swapaxes(0, 1)
        mixed = np.zeros((self.n, HEADS, WIDTH), np.float32)
        for t in range(self.n):
            seen = slice(max(0, t - window + 1), t + 1)
            for head in range(HEADS):
                mixed[t, head] = (weights[t, head, seen, None] * v[seen, head // 2]).sum(0)
        return self.put(path + "out", self.linear(mixed.reshape(self.n, -1), H))

    def mlp(self, x: np.ndarray) -> np.ndarray:
        gate = self.linear(x, INNER)
        return self.linear(gate / (1 + np.exp(-gate)) * self.linear(x, INNER), H)

    def moe(self, path: str, x: np.ndarray) -> np.ndarray:
        logits = self.put(path + "router_logits", self.linear(x, E))
        e = np.exp(logits - logits.max(1, keepdims=True))
        scores = self.put(path + "scores", e / e.sum(1, keepdims=True))
        ids = np.argsort(-np.where(np.isnan(scores), -np.inf, scores), axis=1, kind="stable")[:, :K]
        self.taps[path + "expert_ids"] = ids.astype(np.int32)
        chosen = np.take_along_axis(scores, ids, 1)
        gates = self.put(path + "gates", chosen / chosen.sum(1, keepdims=True))
        routed = np.zeros((self.n, H), np.float32)
        for expert in range(E):
            tokens, slots = np.nonzero(ids == expert)
            here = f"{path}experts.{expert}."
            self.taps[here + "tokens"] = tokens.astype(np.int32)
            inside = self.put(here + "input", x[tokens], tokens)
            gate = self.put(here + "gate", self.linear(inside, INNER), tokens)
            up = self.put(here + "up", self.linear(inside, INNER), tokens)
            hidden = self.put(here + "hidden", gate / (1 + np.exp(-gate)) * up, tokens)
            output = self.put(here + "output", self.linear(hidden, H), tokens)
            routed[tokens] += gates[tokens, slots, None] * output
        routed = self.put(path + "routed", routed)
        shared = self.put(path + "shared.output", self.mlp(x))
        gate = self.put(path + "shared.gate", 1 / (1 + np.exp(-self.linear(x, 1))))
        return self.put(path + "output", routed + gate * shared)

    def trace(self, *without: str, passes: tuple[int, ...] = (), **meta: Any) -> Trace:
        """As a program of somebody else would record it; taps whose path ends so are left out."""
        stops = np.cumsum(passes).tolist() if passes else [self.n]
        spans = [[start, stop] for start, stop in zip([0, *stops], stops, strict=False)]
        arrays = {path: tap for path, tap in self.taps.items() if ".experts." not in path}
        for layer in range(LAYERS):
            if layer != DENSE:
                arrays |= self.dispatch(layer, spans)
        kept = {path: tap for path, tap in arrays.items() if not path.endswith(without or ("nothing",))}
        whole = {
            "producer": "planted", "producer_version": "1", "model_type": "made up", "num_hidden_layers": LAYERS,
            "moe_layers": [layer for layer in range(LAYERS) if layer != DENSE], "num_experts": E, "top_k": K,
            "gate_rule": "softmax_renormalised", "passes": spans, "edits": [],
            "config": {"model_type": "made up", "hidden_size": H, "head_dim": WIDTH, "shared_layers": [0, 2],
                       "windows": [None, None, WINDOW], "rms_norm_eps": 1e-5, "num_attention_heads": HEADS},
        }  # fmt: skip
        return Trace(kept, ids=[0] * self.n, texts=[], meta=whole | meta)

    def dispatch(self, layer: int, spans: list[list[int]]) -> dict[str, np.ndarray]:
        """Rows of experts packed pass by pass."""
        path, offsets = f"layers.{layer}.moe.", []
        parts: dict[str, list[np.ndarray]] = {}
        total = 0
        for start, stop in spans:
            row = [total]
            for expert in range(E):
                tokens = self.taps[f"{path}experts.{expert}.tokens"]
                mine = (tokens >= start) & (tokens < stop)
                total += int(mine.sum())
                row.append(total)
                for tap in ("tokens", "input", "gate", "up", "hidden", "output"):
                    parts.setdefault(tap, []).append(self.taps[f"{path}experts.{expert}.{tap}"][mine])
            offsets.append(row)
        packed = {f"{path}dispatch.{tap}": np.concatenate(rows) for tap, rows in parts.items()}
        return packed | {f"{path}dispatch.offsets": np.array(offsets, np.int64)}


def places(run: Run, among: np.random.Generator) -> Plant:
    """A random place of a random tap that exists."""
    paths = [path for path in run.taps if not path.endswith((".tokens", ".expert_ids", ".weights"))]
    while True:
        path = paths[among.integers(len(paths))]
        rows = run.taps[path]
        if len(rows):
            row = int(among.integers(len(rows)))
            index = tuple(int(among.integers(size)) for size in rows.shape[1:])
            token = int(run.taps[path.rpartition(".")[0] + ".tokens"][row]) if ".experts." in path else row
            return path, token, index
