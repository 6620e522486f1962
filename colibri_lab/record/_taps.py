"""Hooks on a model for the time of one forward pass: every tap of the trace, and the model as it was afterwards."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from colibri_lab.errors import BusyError, UnsupportedError
from colibri_lab.record._experts import SEEN, BlockRun
from colibri_lab.record._family import Anatomy, Layer
from colibri_lab.record._store import Store
from colibri_lab.trace import EXPERT_TAPS

__all__ = ["Pass", "sources"]

_ONE_AT_A_TIME = threading.Lock()  # the rotation is a function of the family's module, which all its models share
_here = threading.local()  # `.records`: whether this thread does


def sources(parts: Anatomy) -> dict[str, str]:
    """For every path that this model has the module that fills it, as the model spells it."""
    named = parts.names
    found = {"embed": named[parts.embed], "norm": named[parts.norm]}
    found["logits"] = "the output layer, which this model does not have," if parts.head is None else named[parts.head]
    for layer in parts.layers:
        path = f"layers.{layer.number}."
        attention = named[layer.attention]
        rotary = f"apply_rotary_pos_emb of {attention}"
        found |= {
            path + "attn.norm": named[layer.norm],
            path + "attn.q": rotary,
            path + "attn.k": rotary,
            path + "attn.v": f"{attention}.v_proj",
            path + "attn.out": attention,
            path + "attn.weights": attention,
            path + "output": named[layer.module],
        }
        kind, block = ("mlp" if layer.router is None else "moe"), named[layer.block]
        found |= {f"{path}{kind}.input": block, f"{path}{kind}.output": block}
        if layer.router is not None:
            router, experts = f"{named[layer.router]} ({type(layer.router).__name__})", named[layer.experts]
            found |= {f"{path}moe.{tap}": router for tap in ("router_logits", "scores", "expert_ids", "gates")}
            found |= {
                f"{path}moe.{tap}": experts
                for tap in ("routed", "dispatch.offsets", *(f"dispatch.{tap}" for tap in EXPERT_TAPS))
            }
        if layer.shared is not None:
            found |= {f"{path}moe.shared.output": named[layer.shared]}
            found |= {f"{path}moe.shared.gate": named[layer.shared_gate]}
    return found


class Pass:
    """One forward pass of one sequence. `run` fills the store."""

    def __init__(self, parts: Anatomy, store: Store, torch: Any, report: Callable[[int], object]) -> None:
        self.parts, self.store, self._torch, self._report = parts, store, torch, report
        self.expert_rows = "observed"
        self._block: BlockRun | None = None
        self._busy = False  # inside a hook of ours: what runs there is none of the model's
        self._rotated: tuple[Any, Any] | None = None
        self._value: Any = None

    def run(self, ids: list[int]) -> None:
        """Calls the model on one row of ids. Everything is undone at the end, whatever ends it."""
        torch, device = self._torch, _device(self.parts)
        row = torch.tensor([ids], dtype=torch.long, device=device)
        positions = torch.arange(len(ids), dtype=torch.long, device=device)[None]
        with _alone(), torch.no_grad(), self._installed():
            self.parts.model(input_ids=row, position_ids=positions, use_cache=False)

    @contextmanager
    def _installed(self) -> Iterator[None]:
        with ExitStack() as undo:
            undo.enter_context(_evaluating(self.parts.model))
            undo.enter_context(self._watching())
            undo.enter_context(self._rotation())
            for module, how, hook in self._hooks():
                undo.callback(getattr(module, how)(hook, **_OPTIONS[how]).remove)
            yield

    # ---- hooks ----

    def _hooks(self) -> Iterator[tuple[Any, str, Callable[..., None]]]:
        parts = self.parts
        yield _after(parts.embed, lambda out: self.store.keep("embed", out))
        for layer in parts.layers:
            yield from self._layer_hooks(layer)
        yield _after(parts.norm, lambda out: self.store.keep("norm", out))
        if parts.head is not None:
            yield _after(parts.head, lambda out: self.store.keep("logits", out))

    def _layer_hooks(self, layer: Layer) -> Iterator[tuple[Any, str, Callable[..., None]]]:
        path, store = f"layers.{layer.number}.", self.store
        yield _after(layer.norm, lambda out: store.keep(path + "attn.norm", out))
        yield from self._attention_hooks(layer)
        if layer.router is None:
            yield _before(layer.block, lambda args, kwargs: store.keep(path + "mlp.input", args[0]))
            yield _after(layer.block, lambda out: store.keep(path + "mlp.output", _first(out)))
        else:
            yield from self._moe_hooks(layer)

        def end(out: Any) -> None:
            store.keep(path + "output", _first(out))
            self._report(layer.number)

        yield _after(layer.module, end)

    def _attention_hooks(self, layer: Layer) -> Iterator[tuple[Any, str, Callable[..., None]]]:
        path, store, module = f"layers.{layer.number}.attn.", self.store, layer.attention
        mask: list[Any] = [None]

        def start(args: Any, kwargs: Any) -> None:
            self._rotated = self._value = None
            mask[0] = kwargs.get("attention_mask", args[2] if len(args) > 2 else None)

        def value(out: Any) -> None:
            self._value = out  # clipped in place by some families: read when attention ends

        def end(out: Any) -> None:
            if self._rotated is not None:
                for name, rotated in zip("qk", self._rotated, strict=True):
                    store.keep(path + name, rotated[0].transpose(0, 1), *rotated.shape[1::2])
            if self._value is not None:
                store.keep(path + "v", self._value, self._value.shape[-1] // module.head_dim, module.head_dim)
            if path + "weights" in store.wanted:
                given = out[1] if isinstance(out, tuple) and len(out) > 1 else None
                store.put(path + "weights", store.host(self._weights(module, mask[0]) if given is None else given[0]))
            store.keep(path + "out", _first(out))

        yield _before(module, start)
        if hasattr(module, "v_proj"):
            yield _after(module.v_proj, value)
        yield _after(module, end)

    def _weights(self, module: Any, mask: Any) -> Any:
        """(heads, T, T) in float32 from q, k and the mask, for implementations that return no weights."""
        torch = self._torch
        if self._rotated is None:
            raise UnsupportedError(f"attn.weights cannot be computed: {type(module).__name__} calls no known rotation")
        hidden = "flash" in str(getattr(module.config, "_attn_implementation", ""))
        if hidden or (mask is not None and mask.dim() != 4):
            raise UnsupportedError(
                "attn.weights are not to be had from this attention implementation; load the model with "
                "attn_implementation='eager'"
            )
        query, key = (rotated[0].float() for rotated in self._rotated)
        key = key.repeat_interleave(query.shape[0] // key.shape[0], 0)
        scores = query @ key.transpose(1, 2) * getattr(module, "scaling", module.head_dim**-0.5)
        if mask is None:
            mask = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).tril()[None, None]
        mask = mask[0, ..., : key.shape[1]]
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask.float()
        return torch.softmax(scores, -1)

    def _moe_hooks(self, layer: Layer) -> Iterator[tuple[Any, str, Callable[..., None]]]:
        path, store, parts = f"layers.{layer.number}.moe.", self.store, self.parts
        given: list[Any] = [None]

        def start(args: Any, kwargs: Any) -> None:
            given[0] = args[0] if args else kwargs["hidden_states"]
            store.keep(path + "input", given[0])
            self._block = BlockRun(layer, parts.num_experts, parts.top_k, store, self._torch)

        def router(out: Any) -> None:
            if self._block is not None:
                self._block.router_output = out

        def experts(args: Any, kwargs: Any) -> None:
            names = ("hidden_states", "top_k_index", "top_k_weights")
            values = [*args, *(kwargs[name] for name in names[len(args) :])]
            if self._block is not None:
                self._block.enter_experts(*values[:3])

        def routed(out: Any) -> None:  # now: some releases add the shared expert to it in place
            store.keep(path + "routed", _first(out))

        def end(out: Any) -> None:
            block, self._block = self._block, None
            if block is not None:
                block.finish(given[0], _first(out))
                if block.recomputed:
                    self.expert_rows = "recomputed"
            given[0] = None
            store.keep(path + "output", _first(out))

        yield _before(layer.block, start)
        yield _after(layer.router, router)
        if hasattr(layer.experts, "gate_up_proj"):
            yield _before(layer.experts, experts)
            yield _after(layer.experts, routed)
        if layer.shared is not None:
            yield _after(layer.shared, lambda out: store.keep(path + "shared.output", out))
            yield _after(layer.shared_gate, lambda out: store.keep(path + "shared.gate", self._torch.sigmoid(out)))
        yield _after(layer.block, end)

    # ---- watching functions ----

    def _watching(self) -> Any:
        """A mode in which every torch function of this thread is shown to the block that runs."""
        from torch.overrides import TorchFunctionMode

        outer = self

        class Watch(TorchFunctionMode):
            def __torch_function__(
                self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
            ) -> Any:
                out = func(*args, **kwargs) if kwargs else func(*args)
                block = outer._block
                if block is not None and func.__name__ in SEEN:
                    block.see(func.__name__, args, out)
                return out

        return Watch()

    @contextmanager
    def _rotation(self) -> Iterator[None]:
        """The family's apply_rotary_pos_emb, with its results noted on the way."""
        thread, name = threading.get_ident(), "apply_rotary_pos_emb"
        types = {kind for layer in self.parts.layers for kind in type(layer.attention).__mro__}
        modules = [module for module in {sys.modules.get(kind.__module__) for kind in types} if hasattr(module, name)]
        originals = [(module, getattr(module, name)) for module in modules]

        def noting(original: Callable[..., Any]) -> Callable[..., Any]:
            def rotate(*args: Any, **kwargs: Any) -> Any:
                out = original(*args, **kwargs)
                if threading.get_ident() == thread:
                    self._rotated = out
                return out

            return rotate

        try:
            for module, original in originals:
                setattr(module, name, noting(original))
            yield
        finally:
            for module, original in originals:
                setattr(module, name, original)


@contextmanager
def _alone() -> Iterator[None]:
    """One recording at a time; another thread waits for its turn, and a hook inside this one would wait for ever."""
    if getattr(_here, "records", False):
        raise BusyError("a recording runs on this thread already: a hook or progress= of it started another one")
    with _ONE_AT_A_TIME:
        _here.records = True
        try:
            yield
        finally:
            _here.records = False


_OPTIONS: dict[str, dict[str, bool]] = {"register_forward_pre_hook": {"with_kwargs": True}, "register_forward_hook": {}}


def _before(module: Any, hook: Callable[[Any, Any], None]) -> tuple[Any, str, Callable[..., None]]:
    return module, "register_forward_pre_hook", lambda _module, args, kwargs: hook(args, kwargs)


def _after(module: Any, hook: Callable[[Any], None]) -> tuple[Any, str, Callable[..., None]]:
    return module, "register_forward_hook", lambda _module, _args, out: hook(out)


def _first(out: Any) -> Any:
    return out[0] if isinstance(out, tuple) else out


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Without dropout; afterwards every module trains or not as before."""
    before = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in before:
            module.training = training


def _device(parts: Anatomy) -> str:
    """Where ids go. A model spread over devices moves them itself."""
    device = parts.embed.weight.device
    return "cpu" if device.type == "meta" else str(device)
