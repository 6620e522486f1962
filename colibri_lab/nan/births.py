"""Where values that are not finite are born: they come out of an operation all of whose inputs are finite.

The run is followed in the data's way, layer by layer. Of each point we keep which of its values are *reached*: they
are not finite, or, where the point was not recorded, something that they were computed from is not. So between two
recorded taps all is one operation. What an operation reads:

    norms and products      the token's whole row
    residual, hidden        the same element of both operands
    attn.weights            q of the token and head, k of the keys that it sees (also of earlier passes)
    attn.out                the weights of all heads and the visible v
    scores, gates           the token's whole row of logits
    routed                  by channel, the outputs of the chosen experts, and their gates

Two inferences sharpen what was not recorded: a row that came out of a norm or a product finite was finite when it went
in (Inf times 0 and Inf divided by Inf are NaN), and where a first reader has a row without one finite value, the row
that it read is taken to be reached for the readers after it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from colibri_lab.difference.taps import parse
from colibri_lab.nan.census import bad
from colibri_lab.nan.source import Birth, Source

__all__ = ["births"]

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]

_VALUES = 1 << 22  # of the widest tap of a layer, worked on at a time
_MASK = 1 << 26  # bytes of the mask of one birth of the logits


def births(
    source: Source, first: Mapping[str, int], report: Callable[[float], object] | None = None
) -> Iterator[Birth]:
    """Births in the order of the data's way, then of experts; `first`: what `first_rows` found.

    Those of a tap and expert come together; of the logits in pieces of tokens where the mask of all would fill the
    memory. `report` is called with the fraction done.
    """
    if not first:
        return
    layers = source.trace.layers
    blocks = _blocks(source.trace.n_tokens, max(16, _VALUES // _widest(source)), min(first.values()))
    stream = yield from _outside(source, first, "embed", blocks, {b.start: _nothing(b) for b in blocks})
    for layer in layers:
        run = _Layer(source, first, layer)
        stream = {block.start: run.block(block, stream[block.start]) for block in blocks}
        yield from run.found()
        if report is not None:
            report((layer + 1) / (len(layers) + 1))
    for path in ("norm", "logits"):
        stream = yield from _outside(source, first, path, blocks, {start: _row(mask) for start, mask in stream.items()})


def _outside(
    source: Source, first: Mapping[str, int], path: str, blocks: list[slice], reach: dict[int, Bools]
) -> Generator[Birth, None, dict[int, Bools]]:
    """Births of a tap outside the layers, and what is reached behind it, by the first row of each block."""
    if not source.has(path):
        return reach
    after: dict[int, Bools] = {}
    parts: list[tuple[Ints, Bools]] = []
    for block in blocks:
        if path not in first:
            after[block.start] = _nothing(block)
            continue
        width = source.trace[path].shape[-1]
        rows = []
        for part in _blocks(block.stop, max(1, _VALUES // width), block.start):
            wrong = _wrong(source, first, path, part)
            inside = slice(part.start - block.start, part.stop - block.start)
            parts += _born(np.arange(part.start, part.stop), wrong, reach[block.start][inside])
            rows.append(_compact(wrong) if path == "embed" else _row(wrong))
            if sum(mask.nbytes for _, mask in parts) > _MASK:
                yield _birth(path, None, parts)
                parts = []
        width = max(row.shape[1] for row in rows)
        after[block.start] = np.concatenate([np.broadcast_to(row, (len(row), width)) for row in rows])
    if parts:
        yield _birth(path, None, parts)
    return after


class _Layer:
    """One layer, block after block of tokens; keys and values that earlier blocks left behind stay counted."""

    def __init__(self, source: Source, first: Mapping[str, int], layer: int) -> None:
        self.source, self.first, self.layer, self.prefix = source, first, layer, f"layers.{layer}."
        self._parts: dict[tuple[str, int], list[tuple[Ints, Bools]]] = {}
        self._before: dict[str, Ints] = {}  # of k and v: (T + 1, kv heads) rows reached before each token
        self._order: Ints | None = None  # packed rows by token
        self._any = any(path.startswith(self.prefix) for path in first)

    def found(self) -> Iterator[Birth]:
        """The births, by tap in the data's way, then by expert."""
        for path, expert in sorted(self._parts, key=lambda key: (_rank(key[0]), key[1])):
            yield _birth(path, None if expert < 0 else expert, self._parts[path, expert])

    def block(self, block: slice, stream: Bools) -> Bools:
        """Follows a block of tokens; `stream`: what is reached of what enters the layer, (n, H or 1)."""
        if not (self._any or self._before or stream.any()):
            return _nothing(block)
        stream, out = self._attention(block, stream)
        branch = self._moe if self.layer in self.source.trace.moe_layers else self._mlp
        middle, made = branch(block, stream | out)
        return _compact(self._step("output", block, middle | made))

    # ---- stages ----

    def _attention(self, block: slice, stream: Bools) -> tuple[Bools, Bools]:
        """(stream as far as it is known now, what attention adds)."""
        known = self._has("attn.norm")
        if not self._before_known():
            witness = "attn.norm" if known else "attn.v" if self.source.settings.clip is None else ""
            stream = self._cleared(block, stream, witness)
        norm = self._step("attn.norm", block, _row(stream))
        if known:
            stream = stream | _whole(norm) if not self._before_known() else stream
        heads = []
        for tap in ("attn.q", "attn.k", "attn.v"):
            wrong = self._step(tap, block, _row(norm))
            heads.append(np.asarray(wrong.any(axis=2)) if wrong.ndim == 3 else _row(wrong))
            if not known:
                norm = norm | _whole(wrong)
        if not known and not self._before_known():
            stream = stream | norm
        q, k, v = heads
        sees_k, sees_v = self._seen("k", block, k), self._seen("v", block, v)
        weights = _row(q) | _row(sees_k)
        if self._has("attn.weights"):
            weights = self._weights(block, q, sees_k)
        return stream, self._step("attn.out", block, weights | _row(sees_v))

    def _weights(self, block: slice, q: Bools, sees_k: Bools) -> Bools:
        """(n, 1): whether a weight is reached that the token's context reads."""
        table = self._wrong("attn.weights", block)  # (n, heads, S)
        if table.ndim < 3:
            return table
        n_heads, keys = table.shape[1:]
        mates = np.arange(n_heads) * sees_k.shape[1] // n_heads
        rows, window = np.arange(block.start, block.stop)[:, None], self.source.window(self.layer)
        visible = np.arange(keys) <= rows
        if window is not None:
            visible &= np.arange(keys) > rows - window
        self._note("attn.weights", block, table, (q | sees_k[:, mates])[:, :, None] & visible[:, None])
        return _row(table & visible[:, None])

    def _seen(self, which: str, block: slice, reached: Bools) -> Bools:
        """(n, kv heads): whether a key that the token sees is reached."""
        before = self._before.get(which)
        if before is None or before.shape[1] != reached.shape[1]:
            before = np.zeros((self.source.trace.n_tokens + 1, reached.shape[1]), np.int64)
            self._before[which] = before
        before[block.start + 1 : block.stop + 1] = before[block.start] + np.cumsum(reached, axis=0)
        stops, window = np.arange(block.start + 1, block.stop + 1), self.source.window(self.layer)
        starts = np.zeros_like(stops) if window is None else np.maximum(stops - window, 0)
        return np.asarray(before[stops] > before[starts])

    def _mlp(self, block: slice, middle: Bools) -> tuple[Bools, Bools]:
        middle = self._cleared(block, middle, "mlp.input")
        inside = self._step("mlp.input", block, _row(middle))
        return middle | _broke(inside, middle), self._step("mlp.output", block, _row(inside))

    def _moe(self, block: slice, middle: Bools) -> tuple[Bools, Bools]:
        """(what is reached of the stream between attention and experts, of what the block returns)."""
        known = self._has("moe.input")
        middle = self._cleared(block, middle, "moe.input" if known else "moe.router_logits")
        inside = self._step("moe.input", block, _row(middle))
        if known:
            middle = middle | _broke(inside, middle)
        logits = self._step("moe.router_logits", block, _row(inside))
        if not known:
            inside = inside | _whole(logits)
            middle = middle | _row(inside)
        scores = self._step("moe.scores", block, _row(logits))
        gates = self._step("moe.gates", block, _row(logits) | _row(scores))
        routed = self._experts(block, inside, _row(gates))
        shared = self._shared(block, inside)
        made = self._step("moe.routed", block, routed) | shared
        return middle, self._step("moe.output", block, made)

    def _experts(self, block: slice, inside: Bools, routed: Bools) -> Bools:
        """What is reached of the gated sum: `routed` and the outputs of the chosen experts, by channel."""
        if not self.source.has(f"{self.prefix}moe.experts.*.tokens"):
            return routed | _row(inside)
        tokens, experts = self.source.dispatch(self.layer)
        if self._order is None:
            self._order = np.argsort(tokens, kind="stable")
        low, high = np.searchsorted(tokens, [block.start, block.stop], sorter=self._order)
        rows = self._order[low:high]
        rows = rows[np.lexsort((tokens[rows], experts[rows]))]
        tokens, experts = tokens[rows], experts[rows]

        def step(tap: str, reach: Bools) -> Bools:
            path = f"{self.prefix}moe.experts.*.{tap}"
            if not self.source.has(path):
                return reach
            if path not in self.first:
                return np.zeros((len(rows), 1), np.bool_)
            wrong = bad(self.source.trace[f"{self.prefix}moe.dispatch.{tap}"][rows], path)
            for expert in np.unique(experts[wrong.any(axis=1)]).tolist():
                mine = experts == expert
                self._keep(path.replace("*", str(expert)), expert, _born(tokens[mine], wrong[mine], reach[mine]))
            return wrong

        x = step("input", inside[tokens - block.start])
        gate, known = step("gate", _row(x)), self.source.has(f"{self.prefix}moe.experts.*.input")
        up = step("up", _row(x) if known else _row(x) | _whole(gate))
        output = step("output", _row(step("hidden", gate | up)))
        if not output.any():
            return routed
        table = np.zeros((block.stop - block.start, output.shape[1]), np.bool_)
        np.logical_or.at(table, tokens - block.start, output)
        return table | routed

    def _shared(self, block: slice, inside: Bools) -> Bools:
        """What the shared expert and its gate bring into the block's output."""
        config, prefix = self.source.config, self.prefix + "moe.shared."
        recorded = self._has("moe.shared.output")
        if not recorded and self.layer not in (config.get("shared_layers") or ()):
            return _nothing(block)
        gate = self._step("moe.shared.gate", block, _row(inside)) if self.source.has(prefix + "gate") else None
        output = self._step("moe.shared.output", block, _row(inside))
        return output if gate is None else output | gate

    # ---- steps ----

    def _has(self, tap: str) -> bool:
        return self.source.has(self.prefix + tap)

    def _before_known(self) -> bool:
        """Whether what enters the layer was recorded."""
        return self.source.has(f"layers.{self.layer - 1}.output" if self.layer else "embed")

    def _wrong(self, tap: str, block: slice) -> Bools:
        return _wrong(self.source, self.first, self.prefix + tap, block)

    def _step(self, tap: str, block: slice, reach: Bools) -> Bools:
        """What is reached behind a tap, given what is reached of all that it reads."""
        if not self._has(tap):
            return reach
        wrong = self._wrong(tap, block)
        self._note(tap, block, wrong, reach)
        return wrong

    def _note(self, tap: str, block: slice, wrong: Bools, reach: Bools) -> None:
        self._keep(self.prefix + tap, -1, _born(np.arange(block.start, block.stop), wrong, reach))

    def _keep(self, path: str, expert: int, born: list[tuple[Ints, Bools]]) -> None:
        if born:
            self._parts.setdefault((path, expert), []).extend(born)

    def _cleared(self, block: slice, reached: Bools, witness: str) -> Bools:
        """Without the rows that came out of the witness finite."""
        if not reached.any() or not (witness and self._has(witness)):
            return reached
        wrong = self._wrong(witness, block)
        return reached & _row(wrong)


def _wrong(source: Source, first: Mapping[str, int], path: str, block: slice) -> Bools:
    """Which values of a recorded tap are not finite: (n, *row shape), or (n, 1) when all are."""
    if block.stop > first.get(path, block.stop):
        rows = source.rows(path, block)
        assert rows is not None
        recorded = source.recorded(path)
        return bad(rows, path, None if recorded is None else recorded[block])
    return _nothing(block)


def _born(tokens: Ints, wrong: Bools, reach: Bools) -> list[tuple[Ints, Bools]]:
    """The rows with births, if any."""
    if not wrong.any():
        return []
    born = wrong & ~reach.reshape(*reach.shape, *[1] * (wrong.ndim - reach.ndim))
    rows = np.flatnonzero(born.reshape(len(born), -1).any(axis=1))
    return [(tokens[rows], born[rows])] if len(rows) else []


def _birth(path: str, expert: int | None, parts: list[tuple[Ints, Bools]]) -> Birth:
    tap = parse(path)
    assert tap is not None
    tokens = np.concatenate([part for part, _ in parts])
    mask = np.concatenate([part for _, part in parts])
    order = np.argsort(tokens, kind="stable")
    return Birth(path, None if tap.layer < 0 else tap.layer, tap.stage, expert, tokens[order], mask[order])


def _rank(path: str) -> tuple[float, int]:
    tap = parse(path)
    assert tap is not None
    return tap.rank


def _nothing(block: slice) -> Bools:
    return np.zeros((block.stop - block.start, 1), np.bool_)


def _row(reached: Bools) -> Bools:
    """(n, 1): whether anything of the row is reached."""
    return np.asarray(reached.reshape(len(reached), -1).any(axis=1))[:, None]


def _whole(wrong: Bools) -> Bools:
    """(n, 1): whether no value of the row is finite."""
    return np.asarray(wrong.reshape(len(wrong), -1).all(axis=1))[:, None]


def _broke(after: Bools, before: Bools) -> Bools:
    """(n, 1): rows in which a norm broke although nothing came in, so that what it read may have."""
    return _row(after) & ~_row(before)


def _compact(mask: Bools) -> Bools:
    """(n, 1) where each row is reached as a whole or not at all."""
    return mask[:, :1].copy() if np.array_equal(mask, np.broadcast_to(mask[:, :1], mask.shape)) else mask


def _blocks(stop: int, step: int, first: int = 0) -> list[slice]:
    return [slice(start, min(start + step, stop)) for start in range(first, stop, step)]


def _widest(source: Source) -> int:
    """The most numbers that a token has in a tap of a layer."""
    widths = [1]
    for path in source.trace:
        tap = parse(path)
        if tap is None or tap.layer < 0:
            continue
        array = source.trace[path]
        widths.append(array.size // max(array.shape[1 if tap.kind == "attn.weights" else 0], 1) * (
            source.trace.top_k if tap.of_experts else 1
        ))  # fmt: skip
    return max(widths)
