"""A comparison as the view needs it: small facts for JSON, heavy things as arrays. Everything here is bounded: a run of
thousands of tokens through a hundred layers sends no more than a view can show.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.difference.pair import Pair
from colibri_lab.difference.result import Diff
from colibri_lab.difference.taps import parse
from colibri_lab.errors import ArgumentError, TapError, is_whole, nearest
from colibri_lab.trace import Trace
from colibri_lab.widgets.diff_values import Figures, figures, rerouted

__all__ = ["DiffData", "kind_of", "layer_of", "of_expert"]

_FLIPS = 300  # sent; the ones with the largest consequence
_LIKELY = 5  # next tokens of each run
_POINTS = 700  # values to scatter
_PAGE_POINTS = 120_000  # values to scatter in all of a saved page
_PAGE_TOKENS = 200  # positions whose next tokens a saved page holds
_KEPT = 32  # taps whose figures are kept

Array = NDArray[Any]
Selection = Mapping[str, Any]


def layer_of(path: str) -> int | None:
    """The layer in a tap path, or None outside the layers."""
    tap = parse(path)
    return None if tap is None or tap.layer < 0 else tap.layer


def kind_of(path: str) -> str:
    """A tap path without its layer: "moe.gates"; "embed" stays."""
    tap = parse(path)
    return path if tap is None else tap.kind


def of_expert(path: str) -> bool:
    """Whether the tap has a row for each token and expert."""
    tap = parse(path)
    return tap is not None and tap.of_experts


class DiffData:
    """What a DiffView shows of one `Diff`."""

    def __init__(self, diff: Diff, model: Any = None) -> None:
        self.diff = diff
        self._models = [model, *(getattr(trace, "model", None) for trace in (diff.a, diff.b))]
        self._pair = Pair(diff.a, diff.b)
        self.paths = [str(path) for path in diff.table["path"]]
        self._at = {path: i for i, path in enumerate(self.paths)}
        self._kept = lru_cache(_KEPT)(self._figures)

    # ---- the selection ----

    def start(self) -> dict[str, Any]:
        """Where to look first: at the first divergence, else at the weightiest flip, else at what comes nearest to its
        tolerance.
        """
        diff = self.diff
        first = diff.first_divergence
        if first is not None:
            path = self.known(first.path)[0]
            return self.check({"path": path, "token": first.token, "expert": first.expert}, {})
        for flip in diff.flips:
            path = f"layers.{flip.layer}.moe.expert_ids"
            if path in self._at:
                return self.check({"path": path, "token": flip.token}, {})
        closest = self.closest()
        return self.check({"path": self.paths[closest] if closest is not None else None}, {})

    def closest(self) -> int | None:
        """The row of the table that comes nearest to its tolerance; None when nothing was compared."""
        table = self.diff.table
        if not len(table):
            return None
        allowed = table["tolerance"] > 0
        share = np.where(allowed, table["max_rel"] / np.where(allowed, table["tolerance"], 1), 0)
        return int(np.argmax(np.nan_to_num(share, nan=-1.0, posinf=np.inf)))

    def known(self, path: str) -> tuple[str, int | None]:
        """A path as the table has it, and its expert when it names one. Raises TapError for one that is not there."""
        if path in self._at:
            return path, None
        tap = parse(path)
        if tap is not None and tap.path in self._at:
            return tap.path, int(path.split(".")[4])
        raise TapError(f"the comparison has no tap '{path:.80}'{nearest(path, self._at)}")

    def check(self, wish: Selection, old: Selection) -> dict[str, Any]:
        """The whole selection that a wish stands for: keys left out keep their value; a layer alone goes to the same
        tap there. Raises TapError or ArgumentError, naming the nearest valid choice.
        """
        unknown = set(wish) - {"path", "layer", "token", "expert"}
        if unknown:
            names = ", ".join(sorted(map(str, unknown)))
            raise ArgumentError(f"A selection has path, layer, token and expert, not {names}.")
        path, named = old.get("path"), None
        if wish.get("path") is not None:
            path, named = self.known(str(wish["path"]))
        elif "path" in wish or path is None:
            path = self.paths[0] if self.paths and old else path
        layer = wish.get("layer", ...)
        if layer is not ... and layer is not None and path is not None and layer != layer_of(path):
            if wish.get("path") is not None and path != old.get("path"):
                raise ArgumentError(f"'{path}' is not in layer {layer!r:.20}: give the path or the layer.")
            path = self._in_layer(path, layer)
        return {
            "path": path,
            "layer": None if path is None else layer_of(path),
            "token": self._token(wish["token"] if "token" in wish else old.get("token"), path),
            "expert": self._expert(wish, old, named, path),
        }

    def _in_layer(self, path: str, layer: Any) -> str:
        """The same tap in another layer, or that layer's last one when it stands outside the layers."""
        kind = kind_of(path)
        wanted = f"layers.{layer}.{kind}"
        if wanted in self._at:
            return wanted
        there = [p for p in self.paths if layer_of(p) == layer]
        if there and layer_of(path) is None:
            return there[-1]
        have = [n for n in (layer_of(p) for p in self.paths if kind_of(p) == kind) if n is not None]
        if not have or not is_whole(layer):
            raise ArgumentError(f"there is no layer {layer!r:.20} in this comparison.")
        best = min(have, key=lambda n: abs(n - int(layer)))
        raise ArgumentError(f"layer {layer} has no {kind} in this comparison; the nearest that has is {best}.")

    def _token(self, token: Any, path: str | None) -> int | None:
        n = self.diff.n_tokens
        if not n:
            return None
        if token is None:
            first = int(self.diff.table["token"][self._at[path]]) if path is not None else -1
            return first if 0 <= first < n else n - 1
        if not is_whole(token) or not 0 <= token < n:
            raise ArgumentError(f"there is no token {token!r:.20} in common; tokens are 0 to {n - 1}.")
        return int(token)

    def _expert(self, wish: Selection, old: Selection, named: int | None, path: str | None) -> int | None:
        if path is None or not of_expert(path):
            return None
        stays = old.get("path") is not None and layer_of(path) == layer_of(old["path"]) and of_expert(old["path"])
        before = named if named is not None else old["expert"] if stays else None
        expert = wish.get("expert", before)
        last = self.diff.a.num_experts - 1
        if expert is not None and (not is_whole(expert) or not 0 <= expert <= last):
            raise ArgumentError(f"there is no expert {expert!r:.20}; experts are 0 to {last}, or None for all.")
        return None if expert is None else int(expert)

    # ---- what is sent ----

    def facts(self) -> dict[str, Any]:
        """What the comparison found, small enough for JSON."""
        diff = self.diff
        first, closest = diff.first_divergence, self.closest()
        a, n = diff.a, diff.n_tokens
        return {
            "names": list(diff.names), "made": [_made(diff.a), _made(diff.b)], "lengths": [a.n_tokens, diff.b.n_tokens],
            "edited": [len(diff.a.edits), len(diff.b.edits)],
            "tokens": n, "ids": a.ids[:n], "texts": a.texts[:n], "experts": a.num_experts, "top_k": a.top_k,
            "verdict": diff.verdict, "paths": self.paths, "states": [str(s) for s in diff.table["state"]],
            "stages": [str(s) for s in diff.table["stage"]],
            "tolerance": [diff.tolerance.relative, diff.tolerance.words, len(diff.tolerance.by_tap)],
            "closest": closest,
            "first": None if first is None else {
                "path": self.known(first.path)[0], "layer": first.layer, "stage": first.stage, "token": first.token,
                "expert": first.expert, "error": figure(first.error), "cause": first.cause,
            },
            "diagnosis": self._diagnosis(), "notes": list(diff.notes),
            "flips": self._flips(),
            "cut": None if diff.prediction is None else diff.prediction.cut,
        }  # fmt: skip

    def _flips(self) -> dict[str, Any]:
        """How many, by verdict and layer; verdicts and causes of those that are sent."""
        flips = self.diff.flips
        layers: dict[int, Counter[str]] = {}
        for flip in flips:
            layers.setdefault(flip.layer, Counter())[flip.verdict] += 1
        return {
            "all": len(flips), "counts": dict(Counter(flip.verdict for flip in flips)),
            "layers": [[layer, dict(counts)] for layer, counts in layers.items()],
            "causes": [flip.cause for flip in flips[:_FLIPS]], "verdicts": [flip.verdict for flip in flips[:_FLIPS]],
        }  # fmt: skip

    def _diagnosis(self) -> dict[str, Any] | None:
        found = self.diff.diagnosis
        if found is None:
            return None
        attempts = [
            {
                "words": a.words,
                "state": a.state,
                "note": a.note,
                "left": None if a.left_over is None else figure(a.left_over),
            }
            for a in found.attempts
        ]
        return {"fault": found.fault, "words": found.words, "confirm": found.confirm, "attempts": attempts}

    def overview(self) -> dict[str, Array]:
        """Arrays that come with the facts: the table's columns, the flips, the prediction, the load of each expert."""
        diff = self.diff
        table, flips = diff.table, diff.flips[:_FLIPS]
        k = max((max(len(f.ids_a), len(f.ids_b)) for f in flips), default=1)
        arrays: dict[str, Array] = {
            **{name: table[name].astype(np.float32) for name in ("max_abs", "max_rel", "cosine", "ulp", "tolerance")},
            "layer": table["layer"].astype(np.int32), "token": table["token"].astype(np.int32),
            "moved": table["flips"].astype(np.int32),
            "flip_layer": np.array([f.layer for f in flips], np.int32),
            "flip_token": np.array([f.token for f in flips], np.int32),
            "flip_a": _padded([f.ids_a for f in flips], k), "flip_b": _padded([f.ids_b for f in flips], k),
            "flip_numbers": np.array([[f.margin, f.moved, f.consequence] for f in flips], np.float32).reshape(-1, 3),
            "load": self._load(),
        }  # fmt: skip
        seen = diff.prediction
        if seen is not None:
            arrays |= {
                "positions": seen.positions.astype(np.int32), "kl": seen.kl.astype(np.float32),
                "same_top": seen.same_top.astype(np.uint8), "agreement": seen.agreement.astype(np.float32),
                "used": self._used(seen.positions),
            }  # fmt: skip
        return arrays

    def _load(self) -> Array:
        """(layers, E) uint32: tokens that A sent to each expert; for the colours of more than eight experts."""
        trace, experts = self.diff.a, self.diff.a.num_experts
        load = np.zeros((len(trace.layers), experts), np.uint32)
        for layer in trace.moe_layers:
            ids = trace.get(f"layers.{layer}.moe.expert_ids")
            if ids is not None:
                load[layer] = np.bincount(ids[ids >= 0].ravel(), minlength=experts)[:experts]
        return load

    def _used(self, positions: Array) -> Array:
        """Whether the token at each position used the expert of the first divergence."""
        first = self.diff.first_divergence
        if first is None or first.expert is None:
            return np.zeros(len(positions), np.uint8)
        ids = self.diff.a.get(f"layers.{first.layer}.moe.expert_ids")
        if ids is None:
            return np.zeros(len(positions), np.uint8)
        return np.asarray((ids[positions] == first.expert).any(axis=1), np.uint8)

    def values(self, path: str, expert: int | None, token: int | None) -> Figures:
        """One tap side by side: see `diff_values`."""
        return self._kept(path, expert, token, _POINTS)

    def _figures(self, path: str, expert: int | None, token: int | None, points: int) -> Figures:
        if kind_of(path) == "moe.expert_ids":
            return rerouted(self._pair, path)
        first = self.diff.first_divergence
        always = [] if first is None else [first.token]
        tolerance = self.diff.tolerance.of(path)
        if expert is None:
            return figures(self._pair, path, None, token, points, tolerance, always)
        whole, by_expert = self.values(path, None, token)
        facts, arrays = figures(self._pair, path, expert, token, points, tolerance, always, whole["largest"])
        return facts, {**arrays, **{name: by_expert[name] for name in ("expert_rows", "expert_beyond")}}

    def next_tokens(self, token: int) -> Figures:
        """The likeliest next tokens after one token in both runs: `chances` (m, 2) float32. Facts say their texts."""
        logits = [trace.get("logits") for trace in (self.diff.a, self.diff.b)]
        facts: dict[str, Any] = {"token": token, "next": []}
        if any(x is None for x in logits):
            return facts, {"chances": np.zeros((0, 2), np.float32)}
        chances = np.stack([_softmax(x[token].astype(np.float64)) for x in logits], axis=1)
        order = np.argsort(-np.nan_to_num(chances, nan=-1.0), axis=0, kind="stable")[:_LIKELY]
        best = np.unique(order)
        best = best[np.argsort(-chances[best].max(axis=1), kind="stable")][: _LIKELY + 1]
        facts["next"] = [[int(i), self._piece(int(i))] for i in best]
        facts["top"] = [int(i) for i in order[0]]
        return facts, {"chances": chances[best].astype(np.float32)}

    def _piece(self, token_id: int) -> str:
        """A vocabulary entry as text: by the model's tokenizer, else as it stands in the traces."""
        for model in self._models:
            tokenizer = getattr(model, "tokenizer", None)
            if tokenizer is not None:
                return str(tokenizer.piece(token_id).decode("utf-8", "ignore"))
        return self._seen().get(token_id, "")

    def _seen(self) -> dict[int, str]:
        return {i: text for trace in (self.diff.b, self.diff.a) for i, text in zip(trace.ids, trace.texts, strict=True)}

    # ---- for a page without a kernel ----

    def page_values(self, selection: Selection) -> list[Figures]:
        """Every tap, with fewer points the more there are; the selected one last and in full."""
        points = max(24, min(400, _PAGE_POINTS // max(1, len(self.paths))))
        every = [self._figures(path, None, None, points) for path in self.paths]
        path, expert, token = (selection[name] for name in ("path", "expert", "token"))
        if path is not None:
            every.append(self.values(path, None, token))
        if expert is not None:
            every.append(self.values(path, expert, token))
        return every

    def page_tokens(self, selection: Selection) -> list[int]:
        """Positions whose next tokens a page holds: those with the largest KL, and the selected one."""
        seen = self.diff.prediction
        if seen is None:
            return []
        order = np.argsort(-np.nan_to_num(seen.kl, nan=np.inf), kind="stable")[:_PAGE_TOKENS]
        chosen = {int(t) for t in seen.positions[order]}
        return sorted(chosen | {int(t) for t in seen.positions if t == selection["token"]})


def figure(value: float) -> float | str:
    """A number for JSON, which knows no NaN and no infinities: those as words that the browser reads back."""
    return float(value) if math.isfinite(value) else str(float(value))


def _made(trace: Trace) -> str:
    """What made a trace, in a few words: producer and arithmetic."""
    words = [str(trace.meta.get("producer", "")), str(trace.meta.get("arithmetic", ""))]
    return ", ".join(word for word in words if word)


def _padded(rows: list[tuple[int, ...]], width: int) -> Array:
    full = np.full((len(rows), width), -1, np.int32)
    for i, row in enumerate(rows):
        full[i, : len(row)] = row
    return full


def _softmax(logits: Array) -> Array:
    with np.errstate(invalid="ignore", over="ignore"):
        e = np.exp(logits - np.nanmax(logits)) if not np.isnan(logits).all() else logits
        return np.asarray(e / e.sum())
