"""One MoE block during one pass: what its router decided and what every expert received and gave.

The library keeps expert rows nowhere, so the calls inside the block are watched: a matrix product whose weight is a
part of an expert's parameters has that expert's rows as input and output. Nothing is computed twice, and what is kept
is what the model used. Where an implementation hides its products (a kernel of its own), the rows are computed again.

Slots: (token, place) pairs, numbered t·k + place. Packed rows: all slots ordered by expert, then by token.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.errors import UnsupportedError
from colibri_lab.record._family import Layer
from colibri_lab.record._store import Store

__all__ = ["SEEN", "BlockRun"]

Array = NDArray[Any]
_ROLES = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}
_PACKED = ("input", "gate", "up", "hidden", "output")


SEEN = frozenset(
    ("linear", "topk", "index_add_", "where", "sort", "argsort", "grouped_mm", "_grouped_mm", "bmm")
)
"""Names of the functions that a block is shown."""


class BlockRun:
    """Fed by hooks and by every torch function called while the block runs; `finish` fills the store."""

    def __init__(self, layer: Layer, num_experts: int, top_k: int, store: Store, torch: Any) -> None:
        self.layer, self.num_experts, self.top_k, self.store, self._torch = layer, num_experts, top_k, store, torch
        self.path = f"layers.{layer.number}.moe."
        self.stacked = hasattr(layer.experts, "gate_up_proj")
        self.experts: Any = layer.experts
        self.x: Any = None
        self.router_output: Any = None
        self.logits: Any = None
        self.scores: Any = None
        self.ids: Any = None
        self.gates: Any = None
        self.routed: Any = None
        self.recomputed = False
        self._where: Any = None  # (places among the k, tokens) of the expert that comes next
        self._where_places: Array | None = None  # the same as packed rows
        self._sorted: Any = None
        self._batched = 0
        self._filled: dict[str, int] = {}
        self._packed: dict[str, Any] = {}
        self._order: Array | None = None
        self._roles: dict[int, tuple[str, int]] = {}
        self._names = [name for name in _PACKED if f"{self.path}dispatch.{name}" in store.wanted]

    # ---- hooks ----

    def enter_experts(self, x: Any, ids: Any, gates: Any) -> None:
        """What the stacked experts are called with: rows (T, H), ids and gates (T, k)."""
        self.x, self.ids, self.gates = x, ids, gates

    # ---- watching ----

    def see(self, name: str, args: tuple[Any, ...], out: Any) -> None:
        """One torch function of SEEN inside the block, after it ran."""
        if name == "linear":
            self._see_linear(args, out)
        elif name == "topk":
            if tuple(args[0].shape) == (self.store.tokens, self.num_experts):
                self.scores = args[0]
                if not self.stacked:
                    self.ids, self.gates = out[1], out[0]  # gates are normalised in place
        elif name == "index_add_" and not self.stacked:
            self.routed = args[0]  # grows in place
        elif not self._names:
            return
        elif name == "where" and len(args) == 1:
            self._where, self._where_places = out, None
        elif name in ("sort", "argsort") and args[0].numel() == self.store.tokens * self.top_k and self._sorted is None:
            self._sorted = out if name == "argsort" else out[1]
        elif name in ("grouped_mm", "_grouped_mm"):
            self._see_grouped(args, out)
        elif name == "bmm" and self.stacked:
            self._see_batched(args, out)

    def _see_linear(self, args: tuple[Any, ...], out: Any) -> None:
        x, weight = args[0], args[1]
        if weight is getattr(self.layer.router, "weight", None):
            self.logits = out
            return
        if not self._names or self.ids is None:
            return
        role, expert = self._role(weight)
        if role is None or self._where is None or len(self._where) != 2:
            return
        if self._where_places is None:
            tokens = self._where[1].cpu().numpy()
            start, stop = self._spans()[expert]
            mine = self._packed_tokens[start:stop]
            if len(tokens) != len(mine) or not len(mine):
                return
            within = np.searchsorted(mine, tokens)
            if not np.array_equal(mine[np.minimum(within, len(mine) - 1)], tokens):
                return
            self._where_places = start + within
        if x.shape[0] == len(self._where_places):
            self._fill(role, self._where_places, x, out)

    def _see_grouped(self, args: tuple[Any, ...], out: Any) -> None:
        """One product for all experts; its rows are slots in the order of the sort that came before."""
        experts = self.experts
        if not self.stacked or self._sorted is None or self.ids is None or out.shape[0] != self._sorted.numel():
            return
        roles = {experts.gate_up_proj.data_ptr(): "gate_up", experts.down_proj.data_ptr(): "down"}
        role = roles.get(args[1].data_ptr())
        if role is not None:
            self._fill(role, self._places_of_slots()[self.store.host(self._sorted, np.int64)], args[0], out)

    def _see_batched(self, args: tuple[Any, ...], out: Any) -> None:
        """One product per slot, weight first: the first of two is gate and up, the second down."""
        slots = self.store.tokens * self.top_k
        if self.ids is None or args[0].shape[0] != slots or args[1].shape[-1] != 1:
            return
        role = ("gate_up", "down")[min(self._batched, 1)]
        self._batched += 1
        self._fill(role, self._places_of_slots(), args[1].squeeze(-1), out.squeeze(-1))

    def _role(self, weight: Any) -> tuple[str | None, int]:
        """What a weight is: gate_up, gate, up or down of which expert; (None, −1) for any other."""
        experts = self.experts
        if self.stacked:
            for role, stack in (("gate_up", experts.gate_up_proj), ("down", experts.down_proj)):
                if weight.shape == stack.shape[1:]:
                    expert, rest = divmod(weight.data_ptr() - stack.data_ptr(), weight.numel() * weight.element_size())
                    if rest == 0 and 0 <= expert < self.num_experts:
                        return role, expert
            return None, -1
        if id(weight) not in self._roles:  # at the first look, and again when weights are moved in for the call
            self._roles = {
                id(part.weight): (_ROLES[name], number)
                for number, expert in enumerate(experts)
                for name, part in expert.named_children()
                if name in _ROLES and hasattr(part, "weight")
            }
        return self._roles.get(id(weight), (None, -1))

    def _fill(self, role: str, places: Array, x: Any, out: Any) -> None:
        if role == "down":
            self._write("hidden", places, x)
            self._write("output", places, out)
            return
        if role != "up":
            self._write("input", places, x)
        if role == "gate_up" and ("gate" in self._names or "up" in self._names):
            gate, up = out.chunk(2, -1)
            self._write("gate", places, gate)
            self._write("up", places, up)
        elif role != "gate_up":
            self._write(role, places, out)

    def _write(self, name: str, places: Array, rows: Any) -> None:
        if name not in self._names:
            return
        torch, packed = self._torch, self._packed
        if name not in packed:
            shape = (self.store.tokens * self.top_k, rows.shape[-1])
            packed[name] = torch.empty(shape, dtype=torch.float32, device="cpu")
            self._filled[name] = 0
        rows = rows.detach()
        first, last = int(places[0]), int(places[-1])
        if last - first + 1 == len(places) and (places[1:] > places[:-1]).all():
            packed[name][first : last + 1].copy_(rows)
        else:
            packed[name].index_copy_(0, torch.from_numpy(places), rows.to(device="cpu", dtype=torch.float32))
        self._filled[name] += len(places)

    # ---- where packed rows stand ----

    def _sort(self) -> Array:
        """(N,) slots in packed order."""
        if self._order is None:
            ids = self.store.host(self.ids, np.int64).ravel()
            if ids.size != self.store.tokens * self.top_k or ids.min() < 0 or ids.max() >= self.num_experts:
                raise UnsupportedError(
                    f"layer {self.layer.number}: the router gave ids of shape {tuple(self.ids.shape)} from {ids.min()} "
                    f"to {ids.max()}; {self.store.tokens} tokens × {self.top_k} of {self.num_experts} are expected"
                )
            self._order = np.argsort(ids, kind="stable")
            counts = np.bincount(ids, minlength=self.num_experts)
            self._offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
            self._bounds = list(itertools.pairwise(self._offsets.tolist()))
            self._packed_tokens = self._order // self.top_k
            self._slot_places = np.empty_like(self._order)
            self._slot_places[self._order] = np.arange(len(self._order))
        return self._order

    def _tokens(self) -> Array:
        self._sort()
        return self._packed_tokens

    def _places_of_slots(self) -> Array:
        self._sort()
        return self._slot_places

    def _spans(self) -> list[tuple[int, int]]:
        """Packed rows [start, stop) of every expert."""
        self._sort()
        return self._bounds

    # ---- the end of the block ----

    def finish(self, x: Any, out: Any) -> None:
        """`x`: what the block was called with; `out`: what it returned."""
        torch, store, path = self._torch, self.store, self.path
        self.x = x.reshape(-1, x.shape[-1]) if self.x is None else self.x
        self._router()
        if self.ids is None:
            return
        if path + "expert_ids" in store.wanted:
            store.put(path + "expert_ids", store.host(self.ids.reshape(store.tokens, self.top_k), np.int32))
        gates = self.gates if self.stacked else self.gates.to(x.dtype)  # as older blocks round them before use
        store.keep(path + "gates", gates, self.top_k)
        if not self.stacked:
            store.keep(path + "routed", out if self.routed is None else self.routed)
        if path + "dispatch.tokens" in store.wanted:
            self._sort()
            store.put(path + "dispatch.tokens", self._packed_tokens.astype(np.int32))
            store.put(path + "dispatch.offsets", self._offsets[None])
        if any(self._filled.get(name) != store.tokens * self.top_k for name in self._names):
            self._compute_again(torch)
        for name in self._names:
            store.put(f"{path}dispatch.{name}", self._packed[name].numpy())

    def _router(self) -> None:
        """Logits from the product with the router's weight; else what the router returned, if those are logits."""
        store, path, torch = self.store, self.path, self._torch
        shape = (store.tokens, self.num_experts)
        logits = self.logits
        if logits is None:
            first = self.router_output[0] if isinstance(self.router_output, tuple) else self.router_output
            if first is None:
                return
            if first.numel() == shape[0] * shape[1]:
                first = first.reshape(shape)
            probabilities = tuple(first.shape) == shape and are_probabilities(store.host(first))
            weight: Any = getattr(self.layer.router, "weight", None)
            if tuple(first.shape) != shape or (probabilities and weight is None):
                what = "probabilities (every row sums to 1)" if probabilities else f"the shape {tuple(first.shape)}"
                raise UnsupportedError(
                    f"layer {self.layer.number}: the router {type(self.layer.router).__name__} returned {what}, not "
                    f"logits of shape {shape}, and its logits cannot be had otherwise"
                )
            logits = torch.nn.functional.linear(self.x.to(weight.dtype), weight) if probabilities else first
        store.keep(path + "router_logits", logits, self.num_experts)
        scores = torch.softmax(logits.float(), -1) if self.scores is None else self.scores
        store.keep(path + "scores", scores, self.num_experts)

    def _compute_again(self, torch: Any) -> None:
        """Expert rows by the block's own parts, where watching did not see them all."""
        self.recomputed = True
        experts, linear = self.experts, torch.nn.functional.linear
        tokens = torch.from_numpy(self._tokens()).to(self.x.device)
        rows = self.x[tokens]
        self._packed.clear()
        self._filled.clear()
        if self.stacked and "output" in self._names:  # its own forward, one expert per row and nothing weighed
            ids = self.ids.reshape(-1)[torch.from_numpy(self._sort()).to(self.ids.device)]
            ones = torch.ones((len(rows), 1), dtype=self.gates.dtype, device=rows.device)
            self._write("output", np.arange(len(rows)), experts.forward(rows, ids[:, None], ones))
        for expert, (start, stop) in enumerate(self._spans()):
            if start == stop:
                continue
            places, part = np.arange(start, stop), rows[start:stop]
            self._write("input", places, part)
            if self.stacked:
                if not {"gate", "up", "hidden"} & set(self._names):
                    continue
                gate, up = linear(part, experts.gate_up_proj[expert]).chunk(2, -1)
                hidden = experts.act_fn(gate) * up
            else:
                child = {_ROLES[name]: module for name, module in experts[expert].named_children() if name in _ROLES}
                gate, up = child["gate"](part), child["up"](part)
                hidden = experts[expert].act_fn(gate) * up
                self._write("output", places, child["down"](hidden))
            self._write("gate", places, gate)
            self._write("up", places, up)
            self._write("hidden", places, hidden)


def are_probabilities(rows: Array) -> bool:
    """Whether every row is non-negative and sums to 1, within what 16-bit floats allow: no logits do that."""
    return bool(rows.size and (rows >= 0).all() and (abs(rows.sum(-1) - 1) < 1e-2).all())
