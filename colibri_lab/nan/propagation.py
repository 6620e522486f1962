"""How values that are not finite travelled from where they were born: step by step, and what they ruined.

In the layers of the origins and in the one after the first, each tap has its steps, one for each thing that carried
something into it. Farther away a layer has steps only when more tokens are reached there; between such layers the
residual stream carries on what it has. So the number of steps does not grow with tokens or experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from colibri_lab.nan.result import Origin, Propagation, Step
from colibri_lab.nan.source import Source
from colibri_lab.nan.step_words import how_of, rows_text, value_text, words
from colibri_lab.nan.taps import Taps
from colibri_lab.nan.way import NAMED_EXPERTS, Edge, edges, layer_paths, own_experts, stage_of, stream

__all__ = ["propagate"]

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]

_SENTENCES = 12  # about what was swallowed


def propagate(source: Source, origins: Sequence[Origin]) -> Propagation:
    """The way of what `origins` made, through every tap that was recorded.

    A step's `came_from` is the path of an earlier step or of an origin. `ruined` speaks of the logits, without them of
    the last tap in the data's way that was recorded. `routing` names tokens whose router scores hold NaN, `cache` the
    rows of k or v that are not finite: later tokens that see them read them. Takes one read of the taps from the first
    origin on.
    """
    way = _Way(source, origins)
    if origins:
        way.note_born_and_swallowed()
        way.walk()
    last = way.last_recorded()
    bad = way.taps.bad(last) if last else np.zeros(source.trace.n_tokens, np.bool_)
    more = len(way.swallowed) - _SENTENCES
    told = (*way.swallowed[:_SENTENCES], *([f"and at {more} more places"] if more > 0 else []))
    return Propagation(
        tuple(way.steps), _rows(bad), _rows(~bad), last, tuple(way.cache()), tuple(way.routing()), told
    )  # fmt: skip


class _Way:
    def __init__(self, source: Source, origins: Sequence[Origin]) -> None:
        self.source, self.origins = source, origins
        born: dict[str, set[int]] = {}
        for origin in origins:
            born.setdefault(origin.path, set()).update(origin.tokens or (origin.token,))
        self.taps = Taps(source, born)
        self.steps: list[Step] = []
        self.swallowed: list[str] = []
        self._kept: dict[str, str] = {}  # path -> the path of the step or origin that stands for it
        self._roots: dict[str, set[int]] = {}  # path -> numbers of the origins whose values are in it
        for number, origin in enumerate(origins):
            self._kept[origin.path] = origin.path
            self._roots.setdefault(origin.path, set()).add(number)
        self._born = frozenset(born)
        layers = [-1 if o.layer is None else o.layer for o in origins if o.path not in ("norm", "logits")]
        self._first = min(layers, default=len(source.trace.layers))
        self._near = {*layers, self._first + 1}

    def walk(self) -> None:
        for layer in source_layers(self.source, self._first):
            near = layer in self._near
            grown = self._grown(layer)
            for path in layer_paths(self.source, layer):
                if path.endswith(".experts.*"):
                    self._experts(layer, near)
                elif self.source.has(path):
                    self._tap(path, layer, near, grown)
        for path in ("norm", "logits"):
            if self.source.has(path):
                self._tap(path, None, True, None)

    # ---- one tap ----

    def _tap(self, path: str, layer: int | None, near: bool, grown: Bools | None) -> None:
        """`grown`: in a layer far away, the tokens that are reached there for the first time."""
        roads = edges(self.source, path, self._born)
        if near or path.endswith(("attn.out", ".gates")):
            self._note_swallowed(path, roads)
        bad = self.taps.bad(path)
        if not bad.any():
            return
        shown = near and not self._folded(path)
        known = [edge for edge in roads if self._roots.get(edge.path)]
        for edge, tokens, reads in self._carriers(path, bad, known):
            came_from = self._kept.get(edge.path, edge.path)
            keep = shown
            if not near and grown is not None and grown.any():
                keep = path.endswith(".output") and "moe" not in path and "mlp" not in path
                keep = keep or (path.endswith(".attn.out") and bool(reads.any()))
                tokens = tokens & grown if path.endswith(".attn.out") else tokens
            if path.endswith((".scores", ".gates")):
                tokens = tokens & ~self._routed_away(path)
            if keep and tokens.any():
                self._step(path, edge, came_from, layer, tokens, reads)
                self._kept[path] = path
            self._kept.setdefault(path, came_from)
            self._roots.setdefault(path, set()).update(self._roots.get(edge.path, ()))

    def _carriers(self, path: str, bad: Bools, roads: list[Edge]) -> Iterator[tuple[Edge, Bools, Bools]]:
        """(what carried, into which tokens, which of its rows they read): rows empty where each reads its own."""
        covered = np.zeros(len(bad), np.bool_)
        shown: set[int] = set()
        for edge in roads:
            carried = self._carried(path, edge, bad & self.taps.bad(edge.path))
            roots = self._roots.get(edge.path, set())
            new = carried if roots - shown else carried & ~covered
            covered |= carried
            if new.any():
                shown |= roots
                yield edge, new, np.zeros(0, np.bool_)
        left = bad & ~covered
        for edge in roads:
            if edge.reach == 1 or not left.any():
                continue
            rows = self.taps.bad(edge.path)
            read = left & _sees(rows, edge.reach)
            left = left & ~read
            if read.any():
                yield edge, read, rows

    def _carried(self, path: str, edge: Edge, tokens: Bools) -> Bools:
        """Of tokens whose row is not finite here and there, those in which it was handed on."""
        if not (edge.element and tokens.any() and self.source.has(edge.path)):
            return tokens
        rows = np.flatnonzero(tokens)
        handed = (self.taps.mask(path, rows) & self.taps.mask(edge.path, rows)).any(axis=1)
        out = np.zeros_like(tokens)
        out[rows[handed]] = True
        return out

    def _step(self, path: str, edge: Edge, came_from: str, layer: int | None, tokens: Bools, reads: Bools) -> None:
        rows = np.flatnonzero(tokens)
        counts = self.taps.counts(path, rows, edge.path if edge.element else None)
        self.steps.append(
            Step(path, came_from, layer, stage_of(path), _rows(tokens), *counts, how_of(path, edge.path),
                 words(self.taps, path, edge.path, rows, np.flatnonzero(reads)))
        )  # fmt: skip

    def _folded(self, path: str) -> bool:
        """Taps that say the same as the one before: weights of attention, and what a block without a shared expert
        returns. What is born there is shown.
        """
        if path in self._born:
            return False
        return path.endswith(".attn.weights") or (
            path.endswith(".moe.output") and not self.source.has(path.replace(".output", ".shared.output"))
        )

    def _routed_away(self, path: str) -> Bools:
        """Tokens for which an earlier tap of the router has a step, which stands for the whole router."""
        earlier = {path.rpartition(".")[0] + tap for tap in (".router_logits", ".scores")} - {path}
        out = np.zeros(self.source.trace.n_tokens, np.bool_)
        for step in self.steps:
            if step.path in earlier:
                out[list(step.tokens)] = True
        return out

    # ---- experts ----

    def _experts(self, layer: int, near: bool) -> None:
        """Rows that were not finite when they came are one step; where an expert spoilt finite ones, it is named."""
        packed = self.taps.packed(layer)
        if packed is None:
            return
        behind = edges(self.source, packed.output, self._born)
        came = [_sees(self.taps.bad(edge.path), edge.reach)[packed.tokens] for edge in behind]
        spoilt = np.any([np.zeros(len(packed.tokens), np.bool_), *came], axis=0) & (packed.experts >= 0)
        rows = spoilt & packed.bad("output") if packed.has("output") else spoilt
        entry = next((edge for edge, of in zip(behind, came, strict=True) if (of & rows).any()), None)
        if entry is not None and self._roots.get(entry.path):
            came_from = self._kept.get(entry.path, entry.path)
            if near and packed.has("output"):
                tokens = tuple(np.unique(packed.tokens[rows]).tolist())
                many = len(set(packed.experts[rows].tolist()))
                said = f"the rows of {many} expert{'s' * (many > 1)}, read as they came"
                counts = _counted(packed.values("output", rows))
                self.steps.append(Step(packed.output, came_from, layer, "expert", tokens, *counts, "product", said))
                self._kept[packed.output] = packed.output
            self._stands_for(packed.output, entry.path)
        own = own_experts(self.source, layer, self._born)
        for expert, last in own.items():
            self._expert(layer, expert, ~spoilt & (packed.experts == expert), len(own) <= NAMED_EXPERTS)
            self._stands_for(packed.output, last)

    def _stands_for(self, path: str, came_from: str) -> None:
        """`path` hands on what is in `came_from`."""
        self._kept.setdefault(path, self._kept.get(came_from, came_from))
        self._roots.setdefault(path, set()).update(self._roots.get(came_from, ()))

    def _expert(self, layer: int, expert: int, rows: Bools, named: bool) -> None:
        """The way through one expert in which something was born."""
        packed = self.taps.packed(layer)
        assert packed is not None
        base = f"layers.{layer}.moe.experts.{expert}."
        reads = {
            "gate": ("input",), "up": ("input",), "hidden": ("gate", "up", "input"),
            "output": ("hidden", "gate", "up", "input"),
        }  # fmt: skip
        for tap, sources in reads.items():
            if not packed.has(tap) or not (rows & packed.bad(tap)).any():
                continue
            path, shown = base + tap, set[int]()
            covered = np.zeros_like(rows)
            for name in sources:
                if packed.has(name):
                    carried = rows & packed.bad(tap) & packed.bad(name)
                else:
                    carried = rows & packed.bad(tap) & self.taps.bad(base + name)[packed.tokens]
                element = tap == "hidden" and name != "input" and packed.has(name)
                if element:
                    places = np.flatnonzero(carried)
                    both = packed.mask(tap, places) & packed.mask(name, places)
                    carried[places] = both.any(axis=1)
                roots = self._roots.get(base + name, set())
                new = carried if roots - shown else carried & ~covered
                covered |= carried
                if not (roots and new.any()):
                    continue
                shown |= roots
                came_from = self._kept.get(base + name, base + name)
                if named:
                    value = packed.values(tap, new)
                    if element:
                        value = np.where(packed.mask(name, np.flatnonzero(new)), value, 0)
                    tokens = packed.tokens[new]
                    said = words(self.taps, path, base + name, tokens, tokens[:0])
                    self.steps.append(Step(path, came_from, layer, "expert", tuple(tokens.tolist()),
                                           *_counted(value), how_of(path, base + name), said))  # fmt: skip
                    self._kept[path] = path
                self._kept.setdefault(path, came_from)
                self._roots.setdefault(path, set()).update(roots)

    # ---- what else is told ----

    def _grown(self, layer: int) -> Bools | None:
        here = f"layers.{layer}.output"
        if not (self.source.has(here) and self.source.has(stream(layer))):
            return None
        return self.taps.bad(here) & ~self.taps.bad(stream(layer))

    def note_born_and_swallowed(self) -> None:
        """Origins at points between two taps whose tap is finite again."""
        for origin in self.origins:
            tokens = np.array(sorted(origin.tokens or (origin.token,)))
            if self.source.has(origin.path) and not self.taps.bad(origin.path)[tokens].any():
                place = f"{origin.point or origin.path}, {rows_text(tokens, 'token')}"
                self.swallowed.append(f"{place}: {value_text(origin.value)} was born, {origin.path} is finite")

    def _note_swallowed(self, path: str, roads: list[Edge]) -> None:
        bad = self.taps.bad(path)
        for edge in roads:
            rows = self.taps.bad(edge.path)
            if not rows.any() or (edge.element and ".experts." in edge.path):
                continue
            came = rows if edge.reach == 1 else _sees(rows, edge.reach)
            clean = np.flatnonzero(came & ~bad)
            if len(clean):
                what, place = self._what_came(edge.path, int(rows.argmax()))
                self.swallowed.append(
                    f"{path}, {rows_text(clean, 'token')}: {what} came in from {place}, only finite values came out"
                )
                return
        if path.endswith(("attn.norm", "moe.input", "mlp.input")) or path == "norm":
            self._note_zeros(path, bad)

    def _what_came(self, path: str, token: int) -> tuple[str, str]:
        """(value, where it was): of a tap that was not recorded what an origin there knows."""
        if not self.source.has(path):
            for origin in self.origins:
                if origin.path == path and token in (origin.tokens or (origin.token,)):
                    return value_text(origin.value), origin.point or path
        return value_text(self.taps.first_value(path, token)), path

    def _note_zeros(self, path: str, bad: Bools) -> None:
        """A norm divides by Inf what is finite."""
        rows = np.flatnonzero(bad)
        if not len(rows):
            return
        zeros = (self.taps.flat(path, rows) == 0).sum(axis=1)
        some = zeros > 0
        if some.any():
            token, count = int(rows[some][0]), int(zeros[some][0])
            more, values = int(some.sum()) - 1, "values were" if count > 1 else "value was"
            self.swallowed.append(
                f"{path}, token {token}: {count} finite {values} divided by Inf and became 0"
                + (f"; likewise in {more} more tokens" if more else "")
            )

    def last_recorded(self) -> str:
        """The tap that tells which tokens are ruined; "" when nothing of the kind was recorded."""
        layers = self.source.trace.layers
        ends = ["logits", "norm", *(f"layers.{layer}.output" for layer in reversed(layers))]
        blocks = [f"layers.{layer}.{block}.output" for layer in reversed(layers) for block in ("moe", "mlp")]
        routing = [f"layers.{layer}.moe.{tap}" for layer in reversed(layers) for tap in ("gates", "scores")]
        found = next((path for path in ends if self.source.has(path)), "")
        return found or next((path for path in [*blocks, *routing, "embed"] if self.source.has(path)), "")

    def cache(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Rows of k or v that are not finite, by layer."""
        for layer in source_layers(self.source, self._first):
            bad = np.zeros(self.source.trace.n_tokens, np.bool_)
            for path in (f"layers.{layer}.attn.k", f"layers.{layer}.attn.v"):
                if self.source.has(path):
                    bad |= self.taps.bad(path)
            if bad.any():
                yield layer, _rows(bad)

    def routing(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Tokens whose scores hold NaN, by layer."""
        for layer in source_layers(self.source, self._first):
            for path in (f"layers.{layer}.moe.scores", f"layers.{layer}.moe.router_logits"):
                if self.source.has(path):
                    rows = np.flatnonzero(self.taps.bad(path))
                    rows = rows[np.isnan(self.taps.flat(path, rows)).any(axis=1)]
                    if len(rows):
                        yield layer, tuple(rows.tolist())
                    break


def source_layers(source: Source, first: int) -> range:
    """The layers from the first origin's on."""
    return range(max(first, 0), len(source.trace.layers))


def _sees(rows: Bools, reach: int | None) -> Bools:
    """For each token whether one of the rows that it sees, its own included, is set."""
    count = np.cumsum(rows)
    if reach is not None:
        count = count - np.concatenate([np.zeros(min(reach, len(count)), count.dtype), count[:-reach]])
    return np.asarray(count > 0)


def _rows(mask: Bools) -> tuple[int, ...]:
    return tuple(np.flatnonzero(mask).tolist())


def _counted(values: NDArray[np.float32]) -> tuple[int, int, float]:
    """(values that are not finite, of these NaN, the first of them)."""
    lost = values[~np.isfinite(values)]
    return int(lost.size), int(np.isnan(lost).sum()), float(lost[0]) if lost.size else float("nan")
