"""What the stages of a pass compute and touch, from the model's sizes and the experts really chosen.

Operations are floating-point ones; a multiply-add is two. An RMS norm of w channels is 4w, a softmax of w entries 4w
(subtract, exp, add, divide), a rotation 6 for each pair of channels, silu(a)·b 4 and a sigmoid 3. Comparisons (top-k),
copies and the rotary table count as none.

Bytes are those of every value that a stage reads or writes, each value once however often it is read: the weights, the
rows that come in, the rows in between, the rows that go out, and the keys and values in reach. The rows of attention
weights are left out: a thread uses one of them again and again. Rows are float32, weights as they are stored.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from colibri_lab.model import Model

__all__ = ["STAGES", "WorkOf"]

STAGES = (
    "embed", "attention", "router", "dispatcher", "expert", "shared", "aggregator", "mlp", "residual", "norm", "logits",
)  # fmt: skip
"""Names of the engine's stages, in its order."""

F32, ID, PLACE = 4, 4, 8  # bytes of a value, an expert id, a row number


class WorkOf:
    """Operations and bytes of the stages of one model, tile by tile."""

    def __init__(self, model: Model) -> None:
        self.config = model.config
        shape = {name: model.weights.describe(name).shape for name in model.weights}
        self._sizes: Counter[str] = (
            Counter()
        )  # by name, a bias with its matrix; "layers.0.attn." has all that lie below
        for name in model.weights:
            size = int(np.prod(shape[name])) * model.weights.describe(name).dtype.itemsize
            parts = name.removesuffix(".bias").split(".")
            self._sizes[".".join(parts)] += size
            for depth in range(1, len(parts)):
                self._sizes[".".join(parts[:depth]) + "."] += size
        self._qk_norm = [shape.get(f"layers.{layer}.attn.q_norm") is not None for layer in range(self._layers)]
        self._biased = [
            sum(int(np.prod(shape.get(f"layers.{layer}.attn.{part}.bias", (0,)))) for part in "qkvo")
            for layer in range(self._layers)
        ]

    @property
    def _layers(self) -> int:
        return int(self.config.num_hidden_layers)

    def tile(self, start: int, n: int, last: bool, ids: dict[int, NDArray[Any]]) -> NDArray[np.float64]:
        """(layers + 1, stages, 2): operations and bytes of the tokens `start` to `start + n − 1` of a session that
        keeps routing. Row `layers` is what lies outside layers. `last`: they end their pass, so logits of the last one
        are computed. `ids`: by MoE layer, (n, k) the chosen experts.
        """
        out = np.zeros((self._layers + 1, len(STAGES), 2))

        def put(layer: int, stage: str, work: tuple[float, float]) -> None:
            out[layer, STAGES.index(stage)] = work

        outside = self._layers
        put(outside, "embed", self.embed(n))
        put(outside, "norm", self.norm(n))
        put(outside, "logits", self.logits(1 if last else 0))
        for layer in range(self._layers):
            put(layer, "attention", self.attention(layer, start, n))
            put(layer, "residual", self.residual(n))
            if layer not in ids:
                put(layer, "mlp", self.mlp(layer, n))
                continue
            put(layer, "router", self.router(layer, n))
            put(layer, "dispatcher", self.dispatcher(n))
            put(layer, "expert", self.expert(layer, ids[layer]))
            put(layer, "aggregator", self.aggregator(layer, n))
            if layer in self.config.shared_layers:
                put(layer, "shared", self.shared(layer, n))
        return out

    # ---- outside layers ----

    def embed(self, n: int) -> tuple[float, float]:
        """n·H values of the stored table, widened; cos and sin of n positions, d/2 each. No operations."""
        row = self._weights("embed") / self.config.vocab_size
        return 0.0, n * (row + F32 * self.config.hidden_size + F32 * self.config.head_dim)

    def norm(self, n: int) -> tuple[float, float]:
        """4·n·H operations; n·H values in and out, and the H weights."""
        size = n * self.config.hidden_size
        return 4.0 * size, self._weights("norm") + 2 * F32 * size

    def logits(self, n: int) -> tuple[float, float]:
        """2·n·H·V operations for the n tokens whose logits are wanted; the whole of lm_head when there is one."""
        if n == 0:
            return 0.0, 0.0
        hidden, vocab = self.config.hidden_size, self.config.vocab_size
        return 2.0 * n * hidden * vocab, self._weights("lm_head") + F32 * n * (hidden + vocab)

    # ---- in each layer ----

    def attention(self, layer: int, start: int, n: int) -> tuple[float, float]:
        """With A query heads and K key heads of d channels, and keys(t) = min(t + 1, window) in reach of token t:
        4nH for the norm, 2nH(2A + 2K)d for the four projections and one for each bias, 4n(A + K)d for norms of q and k
        where there are some, 3n(A + K)d for the rotation, and A·Σ keys(t)·(4d + 5): q·k, its scale, softmax, the
        weighted sum. Bytes: weights; n rows in, normed and out (H), q and context (A·d), cos and sin (d); k and v (K·d)
        of every key that any of the tokens reaches.
        """
        c = self.config
        heads, keys, dim, hidden = c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.hidden_size
        window = c.windows[layer] or start + n
        reach = sum(min(token + 1, window) for token in range(start, start + n))
        first = max(0, start + 1 - window)
        flops = 4 * n * hidden + 2 * n * hidden * (2 * heads + 2 * keys) * dim + n * self._biased[layer]
        flops += (4 * self._qk_norm[layer] + 3) * n * (heads + keys) * dim + heads * reach * (4 * dim + 5)
        rows = n * (3 * hidden + 2 * heads * dim + dim) + (start + n - first) * 2 * keys * dim
        return float(flops), self._weights(f"layers.{layer}.attn.", f"layers.{layer}.attn_norm") + F32 * rows

    def router(self, layer: int, n: int) -> tuple[float, float]:
        """nH to add attention to the stream, 4nH for the norm, 2nHE for the logits, 4nE for a softmax. Bytes: weights;
        the stream, attn.out, their sum and its norm (H); logits and scores (E); ids and gates (k).
        """
        c = self.config
        flops = n * c.hidden_size * (5 + 2 * c.num_experts) + 4 * n * c.num_experts
        rows = n * (4 * c.hidden_size + 2 * c.num_experts + c.top_k)
        weights = self._weights(f"layers.{layer}.moe.router", f"layers.{layer}.moe_norm")
        return float(flops), weights + F32 * rows + ID * n * c.top_k

    def dispatcher(self, n: int) -> tuple[float, float]:
        """No operations. Bytes: n·k ids, places and token numbers, E + 1 offsets; n rows in, n·k rows out (H)."""
        c = self.config
        places = n * c.top_k * (2 * ID + PLACE) + (c.num_experts + 1) * PLACE
        return 0.0, float(places + F32 * n * (1 + c.top_k) * c.hidden_size)

    def expert(self, layer: int, ids: NDArray[Any]) -> tuple[float, float]:
        """R = the rows that have an expert: R·(6HI + 4I). Bytes: the weights of each expert that has a row, once; R
        rows in and out (H), and gate, up and hidden (I).
        """
        c = self.config
        chosen = ids[ids >= 0]
        rows, width = chosen.size, c.moe_intermediate_size
        weights = sum(self._weights(f"layers.{layer}.moe.experts.{expert}.") for expert in np.unique(chosen))
        return rows * self._network(width), weights + F32 * rows * (2 * c.hidden_size + 3 * width)

    def shared(self, layer: int, n: int) -> tuple[float, float]:
        """n·(6HS + 4S) for the network of width S, and n·(2H + 3) for its gate. Bytes as of an expert, and n gates."""
        c = self.config
        width = c.shared_expert_intermediate_size
        weights = self._weights(f"layers.{layer}.moe.shared.", f"layers.{layer}.moe.shared_gate")
        flops = n * (self._network(width) + 2 * c.hidden_size + 3)
        return flops, weights + F32 * n * (2 * c.hidden_size + 3 * width + 1)

    def aggregator(self, layer: int, n: int) -> tuple[float, float]:
        """2·n·k·H; 2·n·H more where a shared expert is added. Bytes: n·k rows in and their gates and places, n rows
        out; with a shared expert its rows and gates, and n rows out once more.
        """
        c = self.config
        shared = layer in c.shared_layers
        rows = n * (c.top_k + 1 + 2 * shared) * c.hidden_size + n * (c.top_k + shared)
        return 2.0 * n * (c.top_k + shared) * c.hidden_size, float(F32 * rows + PLACE * n * c.top_k)

    def mlp(self, layer: int, n: int) -> tuple[float, float]:
        """nH and 4nH as the router, then n·(6HD + 4D) for the network of width D. Bytes: weights; the stream, attn.out,
        their sum, its norm and the rows out (H); gate, up and hidden (D).
        """
        c = self.config
        width = c.intermediate_size
        weights = self._weights(f"layers.{layer}.mlp.", f"layers.{layer}.moe_norm")
        flops = n * (5 * c.hidden_size + self._network(width))
        return flops, weights + F32 * n * (5 * c.hidden_size + 3 * width)

    def residual(self, n: int) -> tuple[float, float]:
        """n·H sums; two rows in, one out (H)."""
        size = n * self.config.hidden_size
        return float(size), 3.0 * F32 * size

    # ---- inside ----

    def _network(self, width: int) -> float:
        """Of one row through gate, up, silu(gate)·up and down."""
        return float(6 * self.config.hidden_size * width + 4 * width)

    def _weights(self, *names: str) -> float:
        """Bytes of the weights of these names with their biases; of all that lie below a name that ends with a dot."""
        return float(sum(self._sizes[name] for name in names))
