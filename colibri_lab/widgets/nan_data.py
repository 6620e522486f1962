"""What a search for NaN and Inf found, as the view needs it: small facts for JSON, the map's columns as arrays.

Numbers that are no numbers never go through JSON: there they are the words "nan", "inf", "-inf".
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.difference.taps import parse
from colibri_lab.errors import ArgumentError, TapError, is_whole, nearest
from colibri_lab.nan.margins import Headroom
from colibri_lab.nan.result import MAP, Cure, Found, Operand, Origin
from colibri_lab.numerics import FORMATS
from colibri_lab.trace import Trace
from colibri_lab.widgets.nan_tree import layer_of, mark_of, tap_name, token_words, tree

__all__ = ["STATES", "NanData", "figure", "number_text"]

STATES = ("finite", "near", "subnormal", "origin", "passed")
"""States of the map, in the order of their codes."""

_ORIGINS = 200  # sent
_FORETOLD, _SMALL = 3, 12  # likewise
_EXPECTED = 2.0  # bits of headroom under which it is warned; as `scan` has it
_COMPARED = ("float16", "bfloat16", "float32")  # formats whose headroom is drawn
_OVERFLOWS = ("overflow", "inf − inf", "0 × inf")
_COUNTS = ("n", "n_nan", "n_inf", "n_negative_inf", "n_subnormal")

Array = NDArray[Any]
Selection = Mapping[str, Any]


class NanData:
    """What a NanTracer shows: a `Found`, or a clean run with its map."""

    def __init__(self, found: Found | None, trace: Trace | None, table: Array, dtype: str = "float32") -> None:
        self.found, self.trace, self.table, self.dtype = found, trace, table, dtype
        self.room: Headroom | None = None
        """How a clean run stands to `format`: what is foretold, and what would be too small for it."""
        self.replayed: Array | None = None
        """Largest magnitudes of the taps in a run of the same tokens in float32; NaN where that has no such tap."""
        self.paths = [str(path) for path in table["path"]]
        self._at = {path: i for i, path in enumerate(self.paths)}

    @classmethod
    def clean(cls, trace: Trace | None, table: Array | None = None, dtype: str = "float32") -> NanData:
        """Of a run in which everything is finite."""
        return cls(None, trace, np.zeros(0, MAP) if table is None else table, dtype)

    @classmethod
    def of(cls, found: Found) -> NanData:
        """Of what a search found."""
        return cls(found, found.trace, found.map, found.dtype)

    @property
    def origins(self) -> tuple[Origin, ...]:
        """Those that are listed; a run can have thousands."""
        return () if self.found is None else self.found.origins[:_ORIGINS]

    @property
    def tokens(self) -> int:
        """Token rows of the run."""
        return 0 if self.trace is None else self.trace.n_tokens

    # ---- the selection ----

    def start(self) -> dict[str, Any]:
        """Where to look first: at the first origin, else at what comes nearest to overflow."""
        if self.found is not None:
            return self.at_origin(0)
        nearest_row = self.closest()
        return self.check({"path": None if nearest_row is None else self.paths[nearest_row]}, {})

    def at_origin(self, number: int) -> dict[str, Any]:
        """The selection that an origin stands for."""
        origin = self.origins[number]
        return self.check({"path": self.shown_at(origin.path), "token": origin.token, "expert": origin.expert}, {})

    def known(self, path: str) -> str:
        """A path as the map has it: experts of a layer share a row. Raises TapError for one that is not there."""
        row = self._row(path)
        if row is None:
            raise TapError(f"the map has no tap '{path:.80}'{nearest(path, self._at)}")
        return row

    def _row(self, path: str) -> str | None:
        parts = path.split(".")
        one = ".moe.experts." in path and len(parts) > 5 and parts[4].isascii() and parts[4].isdigit()
        shared = ".".join([*parts[:4], "*", *parts[5:]]) if one else path
        return next((name for name in (path, shared) if name in self._at), None)

    def is_of(self, row: str, origin: Origin) -> bool:
        """Whether a row of the map is an origin's own tap."""
        return self._row(origin.path) == row

    def shown_at(self, path: str) -> str | None:
        """Where the map shows an origin's tap: there, or when it was not recorded at the first tap behind it."""
        row = self._row(path)
        if row is not None:
            return row
        here = parse(path)
        ranks = sorted((tap.rank, tap.path) for tap in map(parse, self.paths) if tap is not None)
        behind = [path for rank, path in ranks if here is not None and rank > here.rank]
        return next(iter(behind or self.paths[-1:]), None)

    def check(self, wish: Selection, old: Selection) -> dict[str, Any]:
        """The whole selection that a wish stands for: keys left out keep their value; a layer alone goes to the same
        tap there. Raises TapError or ArgumentError, naming the nearest valid choice.
        """
        unknown = set(wish) - {"path", "layer", "token", "expert"}
        if unknown:
            names = ", ".join(sorted(map(str, unknown)))
            raise ArgumentError(f"A selection has path, layer, token and expert, not {names}.")
        path = old.get("path")
        if wish.get("path") is not None:
            path = self.known(str(wish["path"]))
        layer = wish.get("layer", ...)
        if layer is not ... and layer is not None and path is not None and layer != layer_of(path):
            if wish.get("path") is not None and path != old.get("path"):
                raise ArgumentError(f"'{path}' is not in layer {layer!r:.20}: give the path or the layer.")
            path = self._in_layer(path, layer)
        return {
            "path": path,
            "layer": None if path is None else layer_of(path),
            "token": self._token(wish.get("token", old.get("token"))),
            "expert": self._expert(wish, old, path),
        }

    def _in_layer(self, path: str, layer: Any) -> str:
        """The same tap in another layer, or that layer's last one when it stands outside the layers."""
        kind = path.split(".", 2)[2] if path.startswith("layers.") else path
        if is_whole(layer) and f"layers.{layer}.{kind}" in self._at:
            return f"layers.{layer}.{kind}"
        there = [p for p in self.paths if is_whole(layer) and layer_of(p) == layer]
        if there:
            return there[-1]
        have = sorted({n for n in map(layer_of, self.paths) if n is not None})
        hint = f"; layers are {have[0]} to {have[-1]}" if have else ""
        raise ArgumentError(f"there is no layer {layer!r:.20} in this map{hint}.")

    def _token(self, token: Any) -> int | None:
        if not self.tokens:
            return None
        if token is None:
            return self.tokens - 1
        if not is_whole(token) or not 0 <= token < self.tokens:
            raise ArgumentError(f"there is no token {token!r:.20}; tokens are 0 to {self.tokens - 1}.")
        return int(token)

    def _expert(self, wish: Selection, old: Selection, path: str | None) -> int | None:
        if path is None or ".moe.experts." not in path:
            return None
        parts = str(wish.get("path") or "").split(".")
        named = int(parts[4]) if len(parts) > 4 and parts[4].isdecimal() else None
        stays = layer_of(str(old.get("path"))) == layer_of(path) if old.get("path") else False
        expert = wish.get("expert", named if named is not None else old.get("expert") if stays else None)
        last = -1 if self.trace is None else self.trace.num_experts - 1
        if expert is not None and (not is_whole(expert) or not 0 <= expert <= last):
            raise ArgumentError(f"there is no expert {expert!r:.20}; experts are 0 to {last}, or None for all.")
        return None if expert is None else int(expert)

    # ---- what is sent ----

    def facts(self) -> dict[str, Any]:
        """What was found, small enough for JSON."""
        found, trace = self.found, self.trace
        return {
            "title": self.title(), "clean": found is None, "empty": trace is not None and not trace.n_tokens,
            "dtype": self.dtype, "tokens": self.tokens,
            "ids": [] if trace is None else trace.ids, "texts": [] if trace is None else trace.texts,
            "experts": 0 if trace is None else trace.num_experts,
            "paths": self.paths, "names": [tap_name(path) for path in self.paths],
            "formats": {name: FORMATS[name].largest for name in dict.fromkeys((self.format, *_COMPARED))},
            "foretold": self._foretold(), "small": self._small(),
            "format": self.format, "closest": self._closest_facts(), "warned": _EXPECTED,
            "origins": [{**_origin_facts(origin), "at": self.shown_at(origin.path)} for origin in self.origins],
            "all_origins": 0 if found is None else len(found.origins),
            "way": None if found is None else self._way(),
            "notes": [] if found is None else list(found.notes),
        }  # fmt: skip

    @property
    def format(self) -> str:
        """The format that the headroom is counted in first: of the origin when it overflowed, else of the run where
        that is narrow, else float16.
        """
        first = None if self.found is None else self.found.origin
        if first is not None and first.kind in _OVERFLOWS and first.dtype in FORMATS:
            return first.dtype
        return "float16" if self.dtype not in FORMATS or self.dtype in ("float32", "float64") else self.dtype

    def _foretold(self) -> list[str]:
        """Layers that would overflow `format` and that the layers before them foretell, in words."""
        ahead = [] if self.room is None else [forecast for forecast in self.room.forecast() if forecast.came]
        return [forecast.words for forecast in ahead[:_FORETOLD]]

    def _small(self) -> list[list[Any]]:
        """Taps with values too small for full precision in `format`, the largest share first: [name, count, of]."""
        if self.room is None:
            return []
        rows = self.room.subnormals
        rows = rows[rows["share"] > 0]
        most = rows[np.argsort(-rows["share"], kind="stable")][:_SMALL]
        return [[_named(str(r["path"])), int(r["n_subnormal"] + r["n_zero"]), int(r["n"])] for r in most]

    def title(self) -> str:
        """Which run, in one line."""
        trace = self.trace
        if trace is None:
            return "a clean run"
        name = str(trace.meta.get("model_name") or trace.meta.get("producer", ""))
        words = ["bundled model" if name == "tiny-colibri" else name]
        words.append(f"emulated {self.dtype}" if trace.meta.get("emulation") else self.dtype)
        words.append(f"{self.tokens:,} token{'s' * (self.tokens != 1)}")
        return " · ".join(word for word in words if word)

    def _way(self) -> dict[str, Any]:
        assert self.found is not None
        way = self.found.propagation
        return {
            "ruined": len(way.ruined), "clean": len(way.clean), "last": way.last,
            "ruined_words": token_words(way.ruined) if way.ruined else "",
            "cache": [[layer, token_words(tokens)] for layer, tokens in way.cache],
            "routing": [[layer, token_words(tokens)] for layer, tokens in way.routing],
            "swallowed": list(way.swallowed[:8]),
        }  # fmt: skip

    def closest(self) -> int | None:
        """The row of the map with the largest finite magnitude: what overflows first; None for an empty map."""
        absmax = np.where(np.isfinite(self.table["absmax"]), self.table["absmax"], -1.0)
        return int(np.argmax(absmax)) if len(absmax) and absmax.max() > 0 else None

    def _closest_facts(self) -> dict[str, Any] | None:
        row = self.closest()
        if row is None:
            return None
        largest = FORMATS[self.format].largest
        path = self.paths[row]
        bits = math.log2(largest / float(self.table["absmax"][row]))
        return {"path": path, "layer": layer_of(path), "name": tap_name(path), "bits": figure(bits)}

    def overview(self) -> dict[str, Array]:
        """The map's columns, one value per tap."""
        table = self.table
        most = np.iinfo(np.uint32).max
        codes = {name: code for code, name in enumerate(STATES)}
        with np.errstate(over="ignore"):
            sizes = {name: table[name].astype(np.float32) for name in ("absmax", "bits_left")}
        return {
            **{name: np.minimum(table[name], most).astype(np.uint32) for name in _COUNTS}, **sizes,
            "state": np.array([codes[str(state)] for state in table["state"]], np.uint8),
            "layer": table["layer"].astype(np.int32),
        }  # fmt: skip

    def replay_with(self, table: Array) -> None:
        """Takes the sizes of the same run in float32, of `scan`."""
        sizes = dict(zip((str(path) for path in table["path"]), table["absmax"], strict=True))
        with np.errstate(over="ignore"):
            self.replayed = np.array([sizes.get(path, np.nan) for path in self.paths], np.float32)

    def origin(self, number: int) -> dict[str, Any]:
        """The way of one origin as boxes and arrows."""
        assert self.found is not None
        return {"number": number, **tree(self.found, number)}

    def cell(self, path: str | None, token: int | None, expert: int | None) -> dict[str, Any]:
        """In which tokens the values of a tap are not finite, and how many of one token's row."""
        where: dict[str, Any] = {"path": path, "token": token, "expert": expert}
        rows = None if path is None or self.trace is None else self._rows(path, expert)
        if rows is None:
            return {**where, "recorded": False}
        tokens, values = rows
        flat = values.reshape(len(values), math.prod(values.shape[1:]))  # also of an expert without a token
        bad = ~np.isfinite(flat)
        ill = np.unique(tokens[bad.any(axis=1)])
        own = flat[tokens == token]
        finite = np.abs(own[np.isfinite(own)])
        return {
            **where, "recorded": True, "bad": len(ill), "bad_words": token_words(ill.tolist()) if len(ill) else "",
            "n": int(own.size), "n_nan": int(np.isnan(own).sum()), "n_inf": int(np.isinf(own).sum()),
            "absmax": figure(float(finite.max())) if finite.size else None,
        }  # fmt: skip

    def _rows(self, path: str, expert: int | None) -> tuple[Array, Array] | None:
        """Token rows of a tap and their values, experts' rows with the token each belongs to."""
        assert self.trace is not None
        stored = path.replace(".experts.*.", ".dispatch.")
        values = self.trace.get(stored)
        if values is None or values.dtype.kind == "i" or len(values) == 0:
            return None
        if path.endswith(".attn.weights"):
            values = np.moveaxis(values, 1, 0)  # (heads, tokens, keys)
        if stored == path:
            return np.arange(len(values)), values
        layer, tap = layer_of(path), path.rsplit(".", 1)[1]
        if expert is not None and layer is not None:
            own = self.trace.expert_rows(layer, expert)
            return own["tokens"], own[tap]
        return self.trace[stored.rpartition(".")[0] + ".tokens"], values


def _named(path: str) -> str:
    layer = layer_of(path)
    return ("" if layer is None else f"layer {layer}, ") + tap_name(path)


def figure(value: float) -> float | str:
    """A number for JSON, which knows no NaN and no infinities: those as words that the browser reads back."""
    return float(value) if math.isfinite(value) else str(float(value))


def number_text(value: float, dtype: str = "float32") -> str:
    """A number as the reader sees it: in full where its format is narrow; NaN and ±Inf by name."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "−Inf"
    with np.errstate(over="ignore"):
        short = np.float32(value)
    text = str(short) if dtype == "float32" and np.isfinite(short) else f"{value:.9g}"
    return text.removesuffix(".0").replace("-", "−").replace("e+", "e")


def _origin_facts(origin: Origin) -> dict[str, Any]:
    index = origin.index if isinstance(origin.index, tuple) else (origin.index,)
    weight = origin.weight
    return {
        "path": origin.path, "layer": origin.layer, "stage": origin.stage, "name": tap_name(origin.path),
        "point": origin.point or origin.path, "operation": origin.operation, "token": origin.token,
        "index": [int(i) for i in index], "kind": origin.kind, "cause": origin.cause, "expert": origin.expert,
        "value": number_text(origin.value, origin.dtype), "mark": mark_of(origin.value), "dtype": origin.dtype,
        "exact": None if origin.exact is None else figure(origin.exact),
        "operands": [operand_facts(operand) for operand in origin.operands],
        "weight": None if weight is None else {
            **dataclasses.asdict(weight), "index": [int(i) for i in weight.index],
            "value": number_text(weight.value, weight.dtype), "bits": f"0x{weight.bits:X}",
            "signalling": weight.signalling,
        },
        "tokens": len(origin.tokens) or 1, "token_words": token_words(origin.tokens or (origin.token,)),
        "n_values": origin.n_values, "needs": list(origin.needs),
    }  # fmt: skip


def operand_facts(operand: Operand) -> dict[str, Any]:
    """One number of the operation that broke, with its bits."""
    return {
        "name": operand.name, "text": number_text(operand.value, operand.dtype), "mark": mark_of(operand.value),
        "dtype": operand.dtype, "hex": operand.hex, "fields": list(operand.fields),
    }  # fmt: skip


def cure_facts(cure: Cure) -> dict[str, Any]:
    """One row of the table of cures."""
    left = cure.left
    bits, path = cure.headroom or (None, "")
    return {
        "kind": cure.kind, "change": cure.change, "gone": cure.gone, "note": cure.note, "code": cure.code,
        "left": "" if left is None else f"{left.kind} in {tap_name(left.path)}"
        + ("" if left.layer is None else f", layer {left.layer}"),
        "bits": None if bits is None else figure(bits),
        "where": "" if not path else tap_name(path) + ("" if layer_of(path) is None else f", layer {layer_of(path)}"),
        "kl": None if cure.kl is None else figure(cure.kl), "rerouted": cure.rerouted,
    }  # fmt: skip
