"""What a simulated cache did, as the view needs it: counters for every capacity, and a window of its timeline.

Pure functions of a trace and of simulations; everything is small, and what is not known is None in JSON.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab import cache
from colibri_lab.cache.requests import passes_known
from colibri_lab.errors import ArgumentError, is_whole, nearest
from colibri_lab.progress import Progress
from colibri_lab.trace import Trace
from colibri_lab.widgets.cache_places import Places

__all__ = ["OUTCOMES", "PREFETCHES", "CacheData", "sizes_of"]

OUTCOMES = ("pin", "hit", "prefetch", "late", "miss")
"""What became of a request, in the order of their codes."""

PREFETCHES = ("none", "previous", "frequency", "look-ahead", "oracle")

COUNTERS = (
    "requests", "hits", "misses", "first_uses", "not_kept", "pin_hits", "policy_hits", "prefetch_hits", "late_hits",
    "prefetched", "wasted",
)  # fmt: skip
"""Counters of a simulation that the view shows, summed over the layers."""

_STEPS = (12, 48)  # capacities of one curve at most: of a huge trace, of a small one
_WORK = 4_000_000  # requests that all capacities of one curve serve together, about
_MANY = 1000  # experts in one cache, from which on Belady's rule takes its time
_WINDOW = 512  # tokens of a timeline that are sent at once
_KEPT = 16  # simulations held for the next question

Setting = dict[str, Any]
Array = NDArray[Any]


class CacheData:
    """What a CacheLab shows of one trace. `machine` is what a prediction needs, `runs` are real runs with a budget,
    `sizes` the bytes of an expert, one for all or (Lm, E), `profile` a trace that the static policy reads. The session
    that it was made from is for the panels.
    """

    def __init__(
        self,
        trace: Trace,
        *,
        session: Any = None,
        machine: Any = None,
        runs: Sequence[Any] = (),
        sizes: Any = None,
        profile: Any = None,
    ) -> None:
        self.trace, self.session, self.machine, self.runs, self.sizes = trace, session, machine, list(runs), sizes
        self.profile = profile
        self.places = Places(trace)
        self._plans: dict[str, Any] = {}
        self._simulations: dict[tuple[Any, ...], Any] = {}
        self._counts: dict[tuple[Any, ...], dict[str, Any]] = {}

    # ---- the setting ----

    def first(self) -> Setting:
        """Where to begin: as the real run was, else LRU per layer with half of the experts."""
        if self.runs:
            run = self.runs[0]
            where = {"policy": run.policy, "capacity": int(run.capacity), "scope": run.scope, "passes": "trace"}
        else:
            half = max(self.least, self.most("layer") // 2)
            where = {"policy": "lru", "capacity": half, "scope": "layer", "passes": "each"}
        return {**where, "prefetch": "none"}

    def check(self, wish: Mapping[str, Any], old: Mapping[str, Any]) -> Setting:
        """The whole setting that a wish stands for: keys left out keep their value; with another scope alone, the
        capacity becomes the one that takes as much memory. Raises ArgumentError, naming the nearest valid choice.
        """
        unknown = set(wish) - {"policy", "capacity", "scope", "passes", "prefetch"}
        if unknown:
            names = ", ".join(sorted(map(str, unknown)))
            raise ArgumentError(f"A setting has policy, capacity, scope, passes and prefetch, not {names}.")
        new = {**old, **wish}
        for name, choices in (
            ("policy", tuple(cache.POLICIES)),
            ("scope", ("layer", "global")),
            ("passes", ("each", "trace")),
            ("prefetch", self.prefetches),
        ):
            if new[name] not in choices:
                near = nearest(str(new[name]).lower(), choices) or f"; there are {', '.join(choices)}"
                raise ArgumentError(f"there is no {name} {new[name]!r:.40}{near}")
        layers = len(self.trace.moe_layers) or 1
        if "capacity" not in wish and old and new["scope"] != old["scope"]:
            new["capacity"] = old["capacity"] * layers if new["scope"] == "global" else old["capacity"] // layers
            new["capacity"] = min(max(new["capacity"], self.least), self.most(new["scope"]))
        if new["policy"] == "static" and new["prefetch"] != "none":
            raise ArgumentError("a static cache lets nobody in, so there is no prefetch; choose another policy")
        capacity, most = new["capacity"], self.most(new["scope"])
        if not is_whole(capacity) or not self.least <= capacity <= most:
            raise ArgumentError(
                f"a cache per {new['scope']} holds {self.least} (those of one token) to {most} experts, "
                f"not {capacity!r:.20}"
            )
        return {**new, "capacity": int(capacity)}

    @property
    def least(self) -> int:
        """The smallest cache: the experts of one token and layer."""
        return self.trace.top_k

    def most(self, scope: str) -> int:
        """The largest cache: all experts that share it."""
        return self.trace.num_experts * (len(self.trace.moe_layers) or 1 if scope == "global" else 1)

    @property
    def prefetches(self) -> tuple[str, ...]:
        """What can be fetched ahead here; a look-ahead needs the model's own hidden states."""
        return tuple(kind for kind in PREFETCHES if kind != "look-ahead" or self.trace.model is not None)

    def capacities(self, setting: Mapping[str, Any]) -> list[int]:
        """The capacities that are simulated: all of them, or where those are many, some at equal distances and that
        of the setting.
        """
        least, most = self.least, self.most(setting["scope"])
        steps = min(_STEPS[1], max(_STEPS[0], _WORK // max(1, self.requests)))
        if most - least < steps:
            return list(range(least, most + 1))
        some = np.unique(np.linspace(least, most, steps).round().astype(int))
        return sorted({*some.tolist(), int(setting["capacity"])})

    def few(self, setting: Mapping[str, Any]) -> list[int]:
        """The capacities of a still picture, which the first view waits for: of a long trace the chosen one alone."""
        every = self.capacities(setting)
        quick = self.requests * len(every) <= _WORK and self.most(setting["scope"]) <= _MANY
        return every if quick else [int(setting["capacity"])]

    @property
    def requests(self) -> int:
        """Requests of the whole trace, about: every slot counts."""
        return self.trace.n_tokens * len(self.trace.moe_layers) * self.trace.top_k

    def is_quick(self, setting: Mapping[str, Any]) -> bool:
        """Whether a curve takes no noticeable time."""
        return self.is_planned(setting) and self.compares_all

    def is_planned(self, setting: Mapping[str, Any]) -> bool:
        """Whether it is known what is fetched ahead; only a look-ahead, which runs the model, takes long to know."""
        return setting["prefetch"] != "look-ahead" or "look-ahead" in self._plans

    # ---- simulations ----

    def simulate(self, setting: Mapping[str, Any]) -> Any:
        """The cache of one setting."""
        key = tuple(sorted(setting.items()))
        done = self._simulations.pop(key, None)
        if done is None:
            done = cache.simulate(
                self.trace,
                setting["policy"],
                setting["capacity"],
                setting["scope"],
                passes="trace" if setting["passes"] == "trace" else None,
                expert_bytes=self.sizes,
                profile=self.profile if setting["policy"] == "static" else None,
                prefetch=self.plan(setting["prefetch"]),
                progress=False,
            )
        self._simulations[key] = done
        for oldest in list(self._simulations)[:-_KEPT]:
            self._simulations.pop(oldest, None)  # another thread may be here too
        return done

    def plan(self, kind: Any, progress: Progress = None) -> Any:
        """What is fetched ahead; None for nothing. A look-ahead runs the router of each next layer."""
        if kind == "none":
            return None
        if kind not in self._plans:
            ahead = kind == "look-ahead"
            self._plans[kind] = (
                cache.look_ahead(self.trace, progress=progress) if ahead else cache.plan(self.trace, kind)
            )
        return self._plans[kind]

    def curve(self, setting: Mapping[str, Any], policy: str) -> dict[str, Any]:
        """Counters of `policy` for every capacity, all else as the setting has it: lists as long as `capacities`, of
        decode and prefill apart, with bytes and predicted tokens/s where they are known.
        """
        capacities = self.capacities(setting)
        found = [self.counts({**setting, "policy": policy, "capacity": capacity}) for capacity in capacities]
        return {
            "policy": policy, "capacities": capacities, "speed": [one["speed"] for one in found],
            **{name: setting[name] for name in ("scope", "passes", "prefetch")},
            **{part: _columns([one[part] for one in found]) for part in ("decode", "prefill")},
        }  # fmt: skip

    def counts(self, setting: Mapping[str, Any]) -> dict[str, Any]:
        """Counters of one simulation, of decode and prefill apart, and its predicted tokens/s."""
        key = tuple(sorted(setting.items()))
        if key not in self._counts:
            simulation = self.simulate(setting)
            parts = {part: _counters(getattr(simulation, part)) for part in ("decode", "prefill")}
            self._counts[key] = {**parts, "speed": self.speed(simulation)}
        return self._counts[key]

    def speed(self, simulation: Any) -> float | None:
        """Predicted tokens/s; None without a machine or where bytes are not known."""
        if self.machine is None or simulation.expert_bytes is None or not self.trace.n_tokens:
            return None
        return _finite(cache.predict(simulation, self.machine, resident_bytes=self.other_bytes).tokens_per_s)

    # ---- what is sent ----

    def facts(self) -> dict[str, Any]:
        """What the trace is, small enough for JSON."""
        trace, lengths = self.trace, np.diff(self._passes, axis=1)
        return {
            "title": self.title(), "tokens": trace.n_tokens, "layers": trace.moe_layers, "experts": trace.num_experts,
            "top_k": trace.top_k, "policies": dict(cache.POLICIES), "prefetches": list(self.prefetches),
            "expert_bytes": self.mean_bytes, "holes": self.places.holes,
            "longest_pass": int(lengths.max(initial=0)), "decode_tokens": int((lengths == 1).sum()),
            "own_profile": self.profile is None, "margins": self.places.recorded,
            "machine": self._machine_facts(), "imported": self.is_imported, "compares_all": self.compares_all,
            "not_finite": self.places.not_finite,
            "measured": [_measured(run) for run in self.runs],
        }  # fmt: skip

    def title(self) -> str:
        """Which run, in one line."""
        trace = self.trace
        name = str(trace.meta.get("model_name") or trace.meta.get("producer", ""))
        bundled = "bundled model" if name == "tiny-colibri" else name
        changed = "replaced" in str(trace.meta.get("model_identity", ""))
        words = [f"{bundled}, some weights replaced" if changed else bundled]
        tokens, layers = trace.n_tokens, len(trace.moe_layers)
        words.append(f"{tokens:,} token{'s' * (tokens != 1)}")
        words.append(f"{layers} MoE layer{'s' * (layers != 1)} × {trace.num_experts} experts, top-{trace.top_k}")
        return " · ".join(word for word in words if word)

    def _machine_facts(self) -> dict[str, Any] | None:
        """What a prediction rests on."""
        machine = self.machine
        if machine is None:
            return None
        limited = machine.memory_bytes is not None
        return {"source": str(machine.source), "overlap": float(machine.overlap), "limited": limited}

    @property
    def is_imported(self) -> bool:
        """Whether the recording comes from elsewhere and tells nothing of passes: the whole of it counts as one."""
        return "source" in self.trace.meta and len(self._passes) == 1

    @property
    def compares_all(self) -> bool:
        """Whether every policy gets a curve, not those alone that are drawn."""
        return self.requests * _STEPS[0] < _WORK // 4

    @cached_property
    def other_bytes(self) -> int | None:
        """Bytes of the weights that are no experts; None without an open model."""
        model = self.trace.model
        if model is None or self.sizes is None:
            return None
        every = sum(int(model.weights[name].nbytes) for name in model.weights)
        return max(0, every - int(np.sum(np.broadcast_to(self.sizes, self._shape))))

    @property
    def _shape(self) -> tuple[int, int]:
        return len(self.trace.moe_layers), self.trace.num_experts

    @property
    def mean_bytes(self) -> float | None:
        """Bytes of an expert, the mean where they differ."""
        return None if self.sizes is None else float(np.mean(np.asarray(self.sizes)))

    def bytes_of(self, setting: Mapping[str, Any]) -> float:
        """Bytes of a full cache, all layers together; experts of different sizes count by their mean."""
        caches = len(self.trace.moe_layers) if setting["scope"] == "layer" else 1
        return (self.mean_bytes or 0.0) * int(setting["capacity"]) * caches

    def timeline(
        self, setting: Mapping[str, Any], layer: int, token: int | None
    ) -> tuple[dict[str, Any], dict[str, Array]]:
        """The requests of a layer around a token, who is in the cache after each token, and each token's runner-up.

        Arrays, one entry per request: token, expert, evicted and evicted_layer (−1: nobody), outcome (its code), kept.
        inside: (tokens, bytes of E bits); before: the same for the moment before the first token. runner, behind and
        near, one entry per token: see `Places.runners_up`; ready: whether the runner-up was there as the pass began.
        """
        start, stop = self.window(token)
        simulation = self.simulate(setting)
        events = simulation.events(layer, start, stop)
        inside = np.concatenate([_before(simulation, layer, start), simulation.residents(layer, start, stop)])
        bits = np.packbits(inside, axis=1, bitorder="little")
        runner, behind, near, unit = self.places.runners_up(layer, start, stop)
        begins = self._begins(setting, start, stop)
        met = inside[np.maximum(begins - start, 0)]  # who was there as each token's pass began
        met[begins < start] = _before(simulation, layer, int(begins[0])) if len(begins) else False
        ready = (runner >= 0) & met[np.arange(len(met)), np.maximum(runner, 0)]
        facts = {
            "setting": dict(setting), "layer": layer, "start": start, "stop": stop,
            "texts": self.trace.texts[start:stop], "ids": self.trace.ids[start:stop],
            "bytes": self._layer_bytes(layer), "unit": unit,
        }  # fmt: skip
        codes = {name: code for code, name in enumerate(OUTCOMES)}
        return facts, {
            "token": events["token"].astype(np.int32), "expert": events["expert"].astype(np.int32),
            "evicted": events["evicted"].astype(np.int32),
            "evicted_layer": events["evicted_layer"].astype(np.int32), "kept": events["kept"].astype(np.uint8),
            "outcome": np.array([codes[str(name)] for name in events["outcome"]], np.uint8),
            "before": bits[0], "inside": bits[1:], "runner": runner, "behind": behind,
            "near": near.astype(np.uint8), "ready": ready.astype(np.uint8),
        }  # fmt: skip

    def _begins(self, setting: Mapping[str, Any], start: int, stop: int) -> Array:
        """The first token of the pass of each token."""
        tokens = np.arange(start, stop)
        if setting["passes"] == "each":
            return tokens
        firsts = self._passes[:, 0]
        return firsts[np.searchsorted(firsts, tokens, "right") - 1]

    @cached_property
    def _passes(self) -> Array:
        """First and last token of each pass, the last exclusive: (passes, 2). Of unknown ones, every token is one."""
        if not passes_known(self.trace):
            return np.arange(self.trace.n_tokens)[:, None] + np.arange(2)
        return np.array(self.trace.meta["passes"], np.int64).reshape(-1, 2)

    def window(self, token: int | None) -> tuple[int, int]:
        """The tokens that are sent with one: itself near the middle."""
        count = self.trace.n_tokens
        start = max(0, min((token or 0) - _WINDOW // 2, count - _WINDOW))
        return start, min(count, start + _WINDOW)

    def _layer_bytes(self, layer: int) -> list[int] | None:
        """Bytes of each expert of a layer."""
        if self.sizes is None:
            return None
        return [int(n) for n in np.broadcast_to(self.sizes, self._shape)[self.trace.moe_layers.index(layer)]]

    # ---- the selection ----

    def start(self, setting: Mapping[str, Any]) -> dict[str, Any]:
        """Where to look first: in the layer that misses most, at the miss whose runner-up came closest."""
        if not self.trace.moe_layers or not self.trace.n_tokens:
            return {"layer": None, "token": None, "expert": None}
        simulation = self.simulate(setting)
        layer = self.trace.moe_layers[int(np.argmax(simulation.misses))]
        start, stop = self.window(self.trace.n_tokens - 1)
        events = simulation.events(layer, start, stop)
        misses = events[events["outcome"] == "miss"]
        if not len(misses):
            return self.places.check({"layer": layer, "token": self.trace.n_tokens - 1, "expert": None}, {})
        behind = self.places.runners_up(layer, start, stop)[1][misses["token"] - start]
        first = int(np.argmin(np.where(np.isnan(behind), np.inf, behind))) if np.isfinite(behind).any() else -1
        return {"layer": layer, "token": int(misses[first]["token"]), "expert": int(misses[first]["expert"])}

    def next_miss(self, setting: Mapping[str, Any], where: Mapping[str, Any], by: int = 1) -> dict[str, Any] | None:
        """The miss of the layer after the selected request (`by` −1: before it); None when there is no more."""
        layer, token = where["layer"], where["token"]
        if layer is None:
            return None
        token = 0 if token is None else token
        simulation, count = self.simulate(setting), self.trace.n_tokens
        while 0 <= token < count:
            start, stop = (token, min(count, token + _WINDOW)) if by > 0 else (max(0, token + 1 - _WINDOW), token + 1)
            events = simulation.events(layer, start, stop)
            here = np.flatnonzero((events["token"] == where["token"]) & (events["expert"] == where["expert"]))
            misses = np.flatnonzero(events["outcome"] == "miss")
            if by > 0:
                misses = misses[misses > here[0]] if len(here) else misses
            else:
                misses = misses[misses < here[0]] if len(here) else misses
            if len(misses):
                one = events[misses[0 if by > 0 else -1]]
                return {"layer": layer, "token": int(one["token"]), "expert": int(one["expert"])}
            token = stop if by > 0 else start - 1
        return None


def sizes_of(trace: Trace) -> Array:
    """Bytes of each expert's weights in the open model of a trace, (Lm, E) int64."""
    weights, rows = trace.model.weights, {layer: row for row, layer in enumerate(trace.moe_layers)}
    out = np.zeros((len(rows), trace.num_experts), np.int64)
    for name in weights:
        parts = name.split(".")
        if ".moe.experts." in name:
            out[rows[int(parts[1])], int(parts[4])] += weights[name].nbytes
    return out


def _before(simulation: Any, layer: int, token: int) -> Array:
    """Who is in the cache before a token, (1, E)."""
    if token:
        return np.asarray(simulation.residents(layer, token - 1, token))
    first = np.asarray(simulation.residents(layer, 0, 1))
    return first if simulation.policy == "static" else np.zeros_like(first)  # a fixed set is there from the start


def _columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in (*COUNTERS, "bytes_read")}


def _counters(part: Any) -> dict[str, Any]:
    found: dict[str, Any] = {name: int(np.sum(getattr(part, name))) for name in COUNTERS}
    found["bytes_read"] = None if part.bytes_read is None else int(np.sum(part.bytes_read))
    return found


def _measured(run: Any) -> dict[str, Any]:
    """One real run with a budget: where it stands in the picture."""
    return {
        "policy": run.policy, "capacity": int(run.capacity), "scope": run.scope, "speed": _finite(run.tokens_per_s),
        "misses": int(np.sum(run.misses)), "requests": int(np.sum(run.requests)),
    }  # fmt: skip


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
