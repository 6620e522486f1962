"""Numbers that are not numbers: where a checkpoint's weights hold NaN or Inf, and whether any token ever met them."""

from __future__ import annotations

import re
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np

from colibri_lab.errors import ArgumentError, NotCapturedError

__all__ = ["NonFiniteWeight", "weights"]

_EXPERT = re.compile(r"layers\.(\d+)\.moe\.experts\.(\d+)\.")


@dataclass(frozen=True)
class NonFiniteWeight:
    """One weight that holds NaN or Inf, counted by bit pattern in its stored dtype."""

    name: str
    shape: tuple[int, ...]
    n_nan: int
    n_inf: int
    first: tuple[int, ...]
    """Index of the first NaN or Inf."""
    tokens: int | None
    """Tokens of the session that were sent to this expert; None for other weights, or when that is not known."""

    def __str__(self) -> str:
        parts = [f"{count} {what}" for count, what in ((self.n_nan, "NaN"), (self.n_inf, "Inf")) if count]
        expert = _EXPERT.match(self.name)
        use = ""
        if expert and self.tokens is not None:
            received = f"received {self.tokens} token{'s' * (self.tokens != 1)}" if self.tokens else "was never used"
            use = f"; expert {expert[2]} {received}"
        return f"{self.name}: {' and '.join(parts)}, the first at {list(self.first)}{use}"


_counted: weakref.WeakKeyDictionary[Any, dict[str, tuple[int, int, int, int]]] = weakref.WeakKeyDictionary()


def weights(model_or_session: Any, *, used: bool = False) -> list[NonFiniteWeight]:
    """The weights of a model that hold NaN or Inf, in the order in which a forward pass meets them; [] when all are
    finite.

    Of a session, each expert's weight also tells how many tokens were sent there: an expert that no token chose takes
    part in no arithmetic, so its NaN harm nothing yet. Reads every weight once.

    `used`: only what the tokens of a session have met. The weights of an expert are then read when it is first found
    used and remembered for the model, so that a call after every pass reads no more than the experts that are new: for
    a large model, of which a prompt meets few experts. Needs a capture with the expert ids ("routing" or more).

    Raises FileError when a file changed under the model, ArgumentError for what is neither a model nor a session and
    for `used` without a session, NotCapturedError when `used` cannot tell who was used.
    """
    session = model_or_session if hasattr(model_or_session, "tape") else None
    model = session.model if session is not None else model_or_session
    table = getattr(model, "weights", None)
    if table is None:
        raise ArgumentError(f"a model or a session has weights; this is a {type(model_or_session).__name__}")
    if used and session is None:
        raise ArgumentError("used=True is about what the tokens of a session met; pass the session, not its model")
    known = _counted.setdefault(model, {}) if used else {}
    met = _met(session) if used else None
    found = []
    for name in table:
        expert = _EXPERT.match(name)
        if met is not None and expert is not None and int(expert[2]) not in met[int(expert[1])]:
            continue
        if name not in known:
            known[name] = table.census(name)
        n_nan, n_inf, _, first = known[name]
        if n_nan or n_inf:
            shape = tuple(int(size) for size in table.describe(name).shape)
            place = tuple(int(i) for i in np.unravel_index(first, shape))
            found.append(NonFiniteWeight(name, shape, n_nan, n_inf, place, _tokens(session, name)))
    return found


def _met(session: Any) -> dict[int, set[int]]:
    """The experts of each layer that the session's tokens chose."""
    layers = session.model.config["moe_layers"]
    return {layer: set(np.unique(session.tape[f"layers.{layer}.moe.expert_ids"]).tolist()) for layer in layers}


def _tokens(session: Any, name: str) -> int | None:
    expert = _EXPERT.match(name)
    if session is None or expert is None:
        return None
    try:
        ids = session.tape[f"layers.{expert[1]}.moe.expert_ids"]
    except NotCapturedError:
        return None
    return int((ids == int(expert[2])).any(axis=1).sum())
