"""Steering: the part of a stepper that changes a run. Each change is recorded with its place and can be undone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from colibri_lab.errors import ArgumentError, BusyError, is_number, is_whole
from colibri_lab.interventions import Edit, RoutingEdit, RowsEdit
from colibri_lab.places import INSTEAD, Place
from colibri_lab.walk import Walk

__all__ = ["Steering"]

Array = NDArray[Any]
Tokens = int | Sequence[int] | None
GATE_MODES = ("softmax", "softmax_renormalised", "softmax_of_chosen", "raw_logits")


class Steering:
    """Changes of a run. They hold from the place where they are made on, also for later passes, until `undo`; a walk
    that goes back and comes by again meets them at the same place.

    `tokens` are rows of the session, one or several; None means all. Every method raises ArgumentError when nothing
    that it changes would be read any more, with a sentence that says where to change it instead, and TapError for a
    path, layer or expert that the model does not have.
    """

    _walk: Walk

    @property
    def edits(self) -> list[Edit]:
        """What was changed, oldest first. `edit.code` is the line of Python that did it."""
        with suppress(BusyError), self._walk.alone():
            self._walk.arrive()
        return list(self._walk.edits)

    def edit(self, path: str) -> Array:
        """A writable view of a buffer of this pass that a later stage will read:
        `stepper.edit("layers.3.moe.gates")[0, 1] = 0`.

        What was written is noted at the next call of the stepper. The view becomes read-only when its last reader has
        run, and by going back. Raises NotCapturedError when the session's capture does not keep the buffer; `patch` and
        `scale` then still change it.
        """
        with self._walk.alone():
            self._walk.arrive()
            return self._walk.lend(path)

    def patch(self, path: str, array: ArrayLike, tokens: Tokens = None) -> Edit:
        """Puts other rows into a tap, as soon as it is computed: activation patching.

        `array` has the rows of the tap that belong to `tokens` (None: all of the pass in progress, else of the next
        one) or broadcasts to them. At `moe.router_logits` the routing is decided from the new rows.
        """
        walk = self._walk
        with walk.alone():
            walk.arrive()
            given = tokens
            chosen = self._tokens(tokens)
            if chosen is None:
                chosen = tuple(range(*self._coming_pass(path)))
            kind = walk.session.model._taps.kinds[walk.tap(path).kind]
            new: Any = _numbers(f"'{path}'", array, kind.dtype)
            shape = self._row_shape(path, len(chosen))
            if shape is not None:
                try:
                    new = dict(zip(chosen, np.array(np.broadcast_to(new, shape)), strict=True))
                except ValueError:
                    raise ArgumentError(
                        f"'{path}' has rows of shape {shape} for these tokens; the array has {new.shape}"
                    ) from None
            return self._change_rows("patch", path, new, chosen, _call("patch", path, "array", tokens=given))

    def scale(self, path: str, factor: float, tokens: Tokens = None) -> Edit:
        """Multiplies the rows of a tap by a number, as soon as it is computed. 0 switches off what it carries."""
        if not is_number(factor):
            raise ArgumentError(f"a factor is a number; this is {factor!r:.80}")
        with self._walk.alone():
            self._walk.arrive()
            chosen = self._tokens(tokens)
            number = float(_numbers("a factor", factor, np.dtype(np.float32)))
            code = _call("scale", path, repr(number), tokens=tokens)
            return self._change_rows("scale", path, number, chosen, code)

    def force(
        self, layer: int, experts: int | Sequence[int], gates: Sequence[float] | None = None, tokens: Tokens = None
    ) -> Edit:
        """Sends tokens to these experts, in this order, whatever the router says; at most `top_k`, all distinct.

        `gates` None: by the gate rule from the router's logits. With fewer experts than top_k the other slots stay
        empty (id −1, gate 0).
        """
        with self._walk.alone():
            self._walk.arrive()
            ids = _several(experts)
            for expert in ids:
                self._walk.session.model._taps.check_expert(_whole("an expert", expert))
            if not 0 < len(ids) <= self._walk.top_k or len(set(ids)) < len(ids):
                raise ArgumentError(f"force takes 1 to {self._walk.top_k} distinct experts; this is {experts!r:.80}")
            given = None if gates is None else _numbers("gates", gates, np.dtype(np.float32)).reshape(-1)
            if given is not None and len(given) != len(ids):
                raise ArgumentError(f"{len(ids)} experts need as many gates; these are {len(given)}")
            code = _call("force", layer=layer, experts=[int(e) for e in ids], gates=gates, tokens=tokens)
            return self._change_routing("force", layer, (np.array(ids, np.int32), given), tokens, code)

    def ablate(self, layer: int, expert: int, tokens: Tokens = None) -> Edit:
        """Switches an expert off: it contributes nothing, and the other gates stay as they are. Its slots become empty
        (id −1, gate 0).
        """
        with self._walk.alone():
            self._walk.arrive()
            self._walk.session.model._taps.check_expert(_whole("an expert", expert))
            code = _call("ablate", layer=layer, expert=expert, tokens=tokens)
            return self._change_routing("ablate", layer, int(expert), tokens, code)

    def bias_router(self, layer: int, bias: Mapping[int, float] | ArrayLike, tokens: Tokens = None) -> Edit:
        """Adds to the router's logits before it chooses, as a bias of its weights would: (E,) numbers, or a dict from
        expert to number. Selection and gates both follow.
        """
        with self._walk.alone():
            self._walk.arrive()
            experts = self._walk.session.model.config.num_experts
            if isinstance(bias, Mapping):
                row = np.zeros(experts, np.float32)
                for expert, amount in bias.items():
                    self._walk.session.model._taps.check_expert(_whole("an expert", expert))
                    row[expert] = _numbers("a bias", amount, row.dtype)
            else:
                row = _numbers("a bias", bias, np.dtype(np.float32))
            if row.shape != (experts,):
                raise ArgumentError(f"a bias of the router has {experts} numbers; this has the shape {row.shape}")
            shown = {e: round(float(row[e]), 6) for e in np.flatnonzero(row).tolist()}
            return self._change_routing(
                "bias_router", layer, row, tokens, _call("bias_router", layer=layer, bias=shown, tokens=tokens)
            )

    def set_k(self, k: int, layer: int | None = None, tokens: Tokens = None) -> Edit:
        """Lets the router choose fewer experts, 1 to top_k; the slots beyond stay empty (id −1, gate 0). Gates follow
        the gate rule over those chosen. `layer` None: in every layer.
        """
        top_k = self._walk.top_k
        if not is_whole(k) or not 1 <= k <= top_k:
            raise ArgumentError(f"k can be 1 to {top_k}, what the model was built for; this is {k!r:.80}")
        with self._walk.alone():
            self._walk.arrive()
            return self._change_routing("set_k", layer, int(k), tokens, _call("set_k", k, layer=layer, tokens=tokens))

    def gate_mode(self, mode: str, layer: int | None = None) -> Edit:
        """Another rule for the gates of the chosen experts: "softmax" (over all experts), "softmax_renormalised",
        "softmax_of_chosen" or "raw_logits" (no published model does this). `layer` None: in every layer.
        """
        if not isinstance(mode, str) or mode not in GATE_MODES:
            raise ArgumentError(f"there is no gate mode {mode!r:.80}; there are {', '.join(GATE_MODES)}")
        with self._walk.alone():
            self._walk.arrive()
            return self._change_routing("gate_mode", layer, mode, None, _call("gate_mode", repr(mode), layer=layer))

    def undo(self) -> Edit:
        """Takes the last change back: what it had changed is run anew, up to the present place. Returns it.

        Raises ArgumentError when nothing was changed.
        """
        with self._walk.alone():
            self._walk.arrive()
            if not self._walk.edits:
                raise ArgumentError("there is nothing to undo")
            return self._walk.undo()

    # ---- inside ----

    def _change_routing(self, kind: str, layer: int | None, argument: Any, tokens: Tokens, code: str) -> Edit:
        walk, taps = self._walk, self._walk.session.model._taps
        if layer is None and kind in ("set_k", "gate_mode"):
            last = max(walk.session.model.config.moe_layers)
        else:
            last = _whole("a layer", layer)
            taps.find(f"layers.{last}.moe.gates")
        chosen = self._tokens(tokens)
        self._still_to_come(Place("router", last), chosen, f"the routing of layer {last}")
        edit = RoutingEdit(kind, code, walk.now, walk.place, chosen, layer=layer, argument=argument)
        walk.add(edit)
        return edit

    def _change_rows(self, kind: str, path: str, argument: Any, tokens: tuple[int, ...] | None, code: str) -> Edit:
        walk = self._walk
        tap = walk.tap(path)
        at = walk.writer_of(path)
        if walk.name(tap) == "moe.router_logits":
            return self._change_routing_rows(kind, tap.layer, argument, tokens, code, path)
        if walk.name(tap) in INSTEAD and not (
            walk.name(tap) == "moe.routed" and tap.layer not in walk.session.model.config.shared_layers
        ):
            instead = INSTEAD[walk.name(tap)].replace("{l}", str(tap.layer)).replace("{e}", str(max(tap.expert, 0)))
            raise ArgumentError(f"nobody reads '{path}' after {at}; change {instead}")
        here = walk.is_open and self._covers(walk.bounds(), tokens)
        if here and walk.is_written(path) and not walk.readers_of(path) and not walk.later_tokens_read(path):
            if tokens is not None or len(walk.walked) == len(walk.chunks):
                raise ArgumentError(walk.refusal(path))
        elif not here:
            self._still_to_come(at, tokens, f"'{path}'")
        edit = RowsEdit(kind, code, walk.now, walk.place, tokens, path=path, at=at, argument=argument)
        walk.add(edit)
        return edit

    def _change_routing_rows(
        self, kind: str, layer: int, argument: Any, tokens: tuple[int, ...] | None, code: str, path: str
    ) -> Edit:
        self._still_to_come(Place("router", layer), tokens, f"'{path}'")
        walk = self._walk
        edit = RoutingEdit(kind, code, walk.now, walk.place, tokens, layer=layer, argument=argument)
        walk.add(edit)
        return edit

    def _still_to_come(self, at: Place, tokens: tuple[int, ...] | None, what: str) -> None:
        """Raises ArgumentError unless the walk comes by `at`, with one of the tokens, here or later."""
        walk = self._walk
        for number in range(max(len(walk.walked) - 1, 0), len(walk.chunks)):
            if (number, at.rank) >= walk.now and self._covers(walk.chunks[number], tokens):
                return
        raise ArgumentError(
            f"{what} is decided for these tokens: {at} has run in their pass; back() to before it and change it there"
        )

    @staticmethod
    def _covers(bounds: tuple[int, int], tokens: tuple[int, ...] | None) -> bool:
        return tokens is None or any(bounds[0] <= token < bounds[1] for token in tokens)

    def _coming_pass(self, path: str) -> tuple[int, int]:
        """The pass under way, else the next one."""
        walk = self._walk
        if walk.is_open:
            return walk.bounds()
        if walk.at_end:
            raise ArgumentError(walk.refusal(path))
        return walk.chunks[len(walk.walked)]

    def _row_shape(self, path: str, tokens: int) -> tuple[int, ...] | None:
        """The shape of so many rows of a tap; None for an expert's, whose number is not known before."""
        walk = self._walk
        tap = walk.tap(path)
        kind = walk.session.model._taps.kinds[tap.kind]
        if not kind.axes.startswith("T,"):
            return None
        config = walk.session.model.config
        sizes = {
            "H": config.hidden_size, "E": config.num_experts, "k": config.top_k, "V": config.vocab_size, "1": 1,
            "heads": config.num_attention_heads, "kv_heads": config.num_key_value_heads, "head_dim": config.head_dim,
        }  # fmt: skip
        return (tokens, *(sizes[axis] for axis in kind.axes.split(",")[1:]))

    def _tokens(self, tokens: Tokens) -> tuple[int, ...] | None:
        if tokens is None:
            return None
        given = _several(tokens)
        first, stop = self._walk.chunks[0][0], self._walk.chunks[-1][1]
        for token in given:
            if not first <= _whole("a token row", token) < stop:
                raise ArgumentError(f"this walk has the token rows {first} to {stop - 1}; {token} is none of them")
        if not given:
            raise ArgumentError("tokens is empty; None means all of them")
        return tuple(int(token) for token in given)


def _several(value: Any) -> list[Any]:
    """One whole number or several, as a list."""
    if is_whole(value):
        return [value]
    try:
        return list(value)
    except TypeError:
        raise ArgumentError(f"this takes a whole number or a list of them, not {value!r:.80}") from None


def _numbers(what: str, value: Any, dtype: np.dtype[Any]) -> Array:
    """An array of its own. Raises ArgumentError for what is no real number."""
    try:
        given = np.asarray(value)
        if given.dtype.kind in "biuf" or given.dtype.kind == "V":  # V: bfloat16
            with np.errstate(over="ignore"):
                return np.array(value, dtype)
    except (TypeError, ValueError, OverflowError):
        pass
    raise ArgumentError(f"{what} takes numbers that {dtype} can hold; this is {value!r:.80}")


def _whole(what: str, value: Any) -> int:
    if not is_whole(value):
        raise ArgumentError(f"{what} is a whole number; this is {value!r:.80}")
    return int(value)


def _plain(value: Any) -> Any:
    """As one types it: arrays and NumPy's numbers as Python's."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def _call(name: str, *arguments: Any, **named: Any) -> str:
    """The line of Python, without the arguments that are None. The first text is a path."""
    texts = [f'"{arguments[0]}"', *map(str, arguments[1:])] if name in ("patch", "scale") else list(map(str, arguments))
    texts += [f"{key}={_plain(value)!r}" for key, value in named.items() if value is not None]
    return f"stepper.{name}({', '.join(texts)})"
