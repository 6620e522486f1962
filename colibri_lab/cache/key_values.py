"""The cache of keys and values: its bytes, how far a query sees, and which keys it really uses."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.errors import ArgumentError, NotCapturedError, is_number, is_whole
from colibri_lab.progress import Progress

Whole = NDArray[np.int64]

_WEIGHTS = 1 << 28  # bytes of attention weights up to which a replay takes all tokens; beyond, up to the one asked for


class KeyValueCache:
    """Made by `keys(session)`. Follows the session: what it tells is of the tokens so far.

    One row per layer, dense layers too. Keys and values are float32 here, whatever the weights are stored in, and every
    one is kept: a sliding window bounds what a query reads, not what is stored.
    """

    bytes_per_token: Whole
    """(L,): 2 · key heads · head_dim · 4, for a key and a value."""
    window: Whole
    """(L,): keys that a query sees, itself included; −1 where it sees all before it."""

    def __init__(self, session: Any) -> None:
        config = session.model.config
        self._session = session
        layers, row = int(config["num_hidden_layers"]), int(config["num_key_value_heads"]) * int(config["head_dim"])
        self.bytes_per_token = np.full(layers, 2 * row * np.dtype(np.float32).itemsize, np.int64)
        self.window = np.array([-1 if window is None else window for window in config["windows"]], np.int64)
        self.bytes_per_token.flags.writeable = self.window.flags.writeable = False
        self._replay: tuple[int, list[int], Any] | None = None  # layer, ids, session

    @property
    def tokens(self) -> int:
        """Tokens in the cache."""
        return len(self._session.ids)

    @property
    def bytes(self) -> Whole:
        """(L,): of the tokens so far."""
        return self.bytes_per_token * self.tokens

    @property
    def reserved(self) -> int:
        """Bytes of address space for the keys and values of `max_tokens`, as `session.memory()` tells it."""
        return int(self._session.memory()["kv_cache"])

    def reach(self, layer: int, token: int) -> tuple[int, int]:
        """(first, last) key that the query of `token` sees, both included; the last is its own.

        Raises ArgumentError for a layer or token that there is not.
        """
        self._check(layer, token)
        window = int(self.window[layer])
        return (max(0, token - window + 1) if window > 0 else 0), token

    def weights(self, layer: int, token: int, *, progress: Progress = None) -> NDArray[np.float32]:
        """(heads, token + 1) float32: the share of attention that each query head of `token` gives each key.

        Rows sum to 1; 0 for keys outside the window. From the tape when the session captured
        "layers.*.attn.weights"; else the tokens run once more in a session of its own that captures them for this
        layer (`source` tells), which takes heads · tokens² · 4 bytes.

        Raises ArgumentError for a layer or token that there is not, NotCapturedError when the run has edits and so
        cannot be repeated, OutOfMemoryError.
        """
        first, last = self.reach(layer, token)
        path = f"layers.{layer}.attn.weights"
        tape = self._session.tape if path in self._session.tape else self._repeated(layer, token, progress).tape
        out = np.zeros((tape[path].shape[0], last + 1), np.float32)
        out[:, first:] = tape[path][:, token, first : last + 1]
        return out

    def source(self, layer: int) -> str:
        """Where `weights` of a layer come from, as a sentence."""
        if f"layers.{layer}.attn.weights" in self._session.tape:
            return "Attention weights as the run itself computed them."
        return "Attention weights of a replay of the tokens in a session of its own."

    def used(self, layer: int, token: int, share: float = 0.9, *, progress: Progress = None) -> float:
        """How many keys hold `share` of the attention of `token`: the fewest that do, averaged over the query heads.

        For head h with weights w, taken from the largest down, n_h is the smallest n with w₁ + … + w_n ≥ share · Σ w
        (sums in float64); the answer is the mean of n_h. It lies between 1 and the number of keys in reach. Averaging
        over heads does not mean that they use the same keys. NaN when a weight is not finite.
        `share`: above 0, at most 1. Raises what `weights` raises.
        """
        if not is_number(share) or not 0 < share <= 1:
            raise ArgumentError(f"share is above 0 and at most 1; this is {share!r:.80}")
        weights = self.weights(layer, token, progress=progress)
        if not np.isfinite(weights).all():
            return float("nan")
        held = np.cumsum(-np.sort(-weights.astype(np.float64), axis=1), axis=1)
        return float(np.mean(1 + (held < share * held[:, -1:]).sum(axis=1)))

    def known(self, layer: int, token: int) -> bool:
        """Whether `weights` has them without a replay: captured, or kept from the last one."""
        return f"layers.{layer}.attn.weights" in self._session.tape or self._kept(layer, token) is not None

    def report(self) -> str:
        """A plain table: window, reach of the last token and bytes of every layer, and keys it uses where known."""
        last = self.tokens - 1
        lines = [
            f"keys and values of {self.tokens} tokens: {int(self.bytes.sum()):,} bytes, "
            f"{int(self.bytes_per_token.sum()):,} per token; {self.reserved:,} reserved for {self._session.max_tokens}",
            "layer  window  in reach of the last token  bytes/token           bytes  keys that hold 90%",
        ]
        for layer, each in enumerate(self.bytes_per_token.tolist()):
            window = "all" if self.window[layer] < 0 else str(self.window[layer])
            reach, used = "none", "no token"
            if last >= 0:
                first, _ = self.reach(layer, last)
                reach = f"{first} to {last}, {last - first + 1} keys"
                used = f"{self.used(layer, last):.1f}" if self.known(layer, last) else "not captured"
            lines.append(f"{layer:>5}  {window:>6}  {reach:>26}  {each:>11,}  {each * (last + 1):>14,}  {used:>18}")
        if last >= 0 and not all(self.known(layer, last) for layer in range(len(self.window))):
            lines[0] += "; where keys were not captured, used(layer, token) finds them by a replay"
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<KeyValueCache of {self.tokens} tokens in {len(self.window)} layers, {int(self.bytes.sum()):,} bytes>"

    # ---- inside ----

    def _check(self, layer: int, token: int) -> None:
        for name, number, count in (("layer", layer, len(self.window)), ("token", token, self.tokens)):
            if not is_whole(number) or not 0 <= number < count:
                there = f"{name}s are 0 to {count - 1}" if count else "the session is empty; feed it first"
                raise ArgumentError(f"there is no {name} {number!r:.80}; {there}")

    def _kept(self, layer: int, token: int) -> Any:
        """The session of the last replay, when it holds these weights."""
        if self._replay is None:
            return None
        of, ids, session = self._replay
        return session if of == layer and len(ids) > token and ids == self._session.ids[: len(ids)] else None

    def _repeated(self, layer: int, token: int, progress: Progress) -> Any:
        """A session of its own that holds the attention weights of a layer, for all tokens or up to this one."""
        kept = self._kept(layer, token)
        if kept is not None:
            return kept
        if self._session._edits:
            raise NotCapturedError(
                "a run with edits is not repeated, and its attention weights were not captured: make the session with "
                f'capture=["layers.{layer}.attn.weights"] or "layers.*.attn.weights" beside what else you want'
            )
        from colibri_lab.nan.replay import feed  # here: bytes and reach need nothing of it

        model, ids = self._session.model, self._session.ids
        if 4 * int(model.config["num_attention_heads"]) * len(ids) ** 2 > _WEIGHTS:
            ids = ids[: token + 1]
        self._replay = None  # before the next one takes memory
        session = model.session(
            [f"layers.{layer}.attn.weights"],
            max_tokens=len(ids),
            gate_mode=self._session.gate_mode,
            emulate=self._session.emulation,
        )
        feed(session, ids, progress, "replay")
        self._replay = layer, ids, session
        return session


def keys(session: Any) -> KeyValueCache:
    """The keys and values that a session keeps: bytes by layer, how far queries see, which keys one really uses.

    Raises ArgumentError for anything but a live session: a trace holds no cache.
    """
    if not hasattr(session, "tape") or not hasattr(session, "feed"):
        raise ArgumentError(f"keys takes a live session (model.session()); this is {session!r:.80}")
    return KeyValueCache(session)
