"""What the stages of a pass compute and touch, from the model's sizes and the experts really chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab import _cachelab

if TYPE_CHECKING:
    from colibri_lab.model import Model

__all__ = ["STAGES", "WorkOf"]

STAGES = (
    "embed", "attention", "router", "dispatcher", "expert", "shared", "aggregator", "mlp", "residual", "norm", "logits",
)  # fmt: skip
"""Names of the engine's stages, in its order."""


class WorkOf:
    """Operations and bytes of the stages of one model, tile by tile.

    A multiply-add is two operations; an RMS norm of w channels 4w, a softmax of w entries 4w and 1 for each scale, a
    rotation 3 for each channel, silu(a)·b 4, a sigmoid 3; comparisons, copies and the rotary table count as none. Bytes
    are those of every value that is read or written, each value once: weights as they are stored (W), rows as float32
    (4 bytes a value), ids and token numbers 4, row numbers 8. The rows of attention weights are left out, of which a
    thread uses one again and again. For n tokens from `start` on, with keys(t) = min(t + 1, window), A query heads and
    K key heads of d channels, E experts of width I of which k are chosen, R rows that have an expert, a shared expert
    of width S, dense layers of width D:

    - embed: 0; stored rows n·W/V, values n·(H + d)
    - attention: 4nH + 4nH(A + K)d + one for each bias + 3n(A + K)d + (norms of q and k: 4n(A + K)d) + A·Σ keys(t)·(4d +
      5); W, values n·(3H + 2Ad + d) + 2Kd for each key that any of the tokens reaches
    - router: 5nH + 2nHE + 4nE; W, values n·(4H + 2E + k), n·k ids
    - dispatcher: 0; values n·(1 + k)·H, n·k ids, token numbers and places, E + 1 offsets
    - expert: R·(6HI + 4I); W of every expert that has a row, values R·(2H + 3I)
    - shared: n·(6HS + 4S + 2H + 3); W, values n·(2H + 3S + 1)
    - aggregator: 2nkH, with a shared expert 2n(k + 1)H; values n·(k + 1)·H + nk, with a shared expert n·(k + 3)·H +
      n(k + 1); n·k places
    - mlp: 5nH + n·(6HD + 4D); W, values n·(5H + 3D)
    - residual: nH; values 3nH
    - norm: 4nH; W, values 2nH
    - logits, of one token: 2HV; W, values H + V
    """

    def __init__(self, model: Model) -> None:
        c = model.config
        self.layers = range(c.num_hidden_layers)
        self._work = _cachelab.Work(
            n_layers=c.num_hidden_layers,
            vocab=c.vocab_size,
            hidden=c.hidden_size,
            heads=c.num_attention_heads,
            key_heads=c.num_key_value_heads,
            head_dim=c.head_dim,
            n_experts=c.num_experts,
            top_k=c.top_k,
            expert_width=c.moe_intermediate_size,
            shared_width=c.shared_expert_intermediate_size or 0,
            dense_width=c.intermediate_size or 0,
        )
        for layer in self.layers:
            self._work.layer(layer, layer in c.moe_layers, layer in c.shared_layers, c.windows[layer] or 0)
        for name in model.weights:
            about = model.weights.describe(name)
            size = int(np.prod(about.shape))
            self._work.weight(name, size, size * about.dtype.itemsize)

    def tile(self, start: int, n: int, last: bool, ids: dict[int, NDArray[Any]]) -> NDArray[np.float64]:
        """(layers + 1, stages, 2): operations and bytes of the tokens `start` to `start + n − 1` of a session that
        keeps routing. Row `layers` is what lies outside layers. `last`: they end their pass, so logits of the last one
        are computed. `ids`: by MoE layer, (n, k) the chosen experts, −1 for none.
        """
        return self._work.tile(start, n, last, [ids.get(layer) for layer in self.layers])
