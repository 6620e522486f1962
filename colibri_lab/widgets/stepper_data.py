"""What the stepper's picture shows of one moment: a small dict of facts, and arrays. Pure functions of a stepper; they
only look.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from colibri_lab.errors import ArgumentError

__all__ = [
    "FIRST", "STAGES", "Walks", "bounds", "breakpoint_place", "check_look", "code_here", "comparison", "figure",
    "first_choice", "frame", "head", "parse_numbers", "rank", "stage_rank", "window",
]  # fmt: skip

Array = NDArray[Any]

STAGES = (
    "embed", "attention", "router", "dispatcher", "expert", "shared", "aggregator", "mlp", "residual", "norm", "logits",
)  # fmt: skip
"""In the order in which a pass runs them."""
FIRST = 32
"""Values of a row that are drawn."""
_LIKELY = 6  # next tokens that are listed
_ROWS = 128  # token rows around the selected one that are sent
_BINS, _VALUES = 24, 8  # of the histogram, and of a row in figures
_UNKNOWN = np.uint32(0xFFFFFFFF)


class Walks(Protocol):
    """What the view asks of a `Stepper`."""

    session: Any
    breakpoints: Any

    @property
    def ids(self) -> list[int]: ...  # noqa: D102
    @property
    def passes(self) -> list[tuple[int, int]]: ...  # noqa: D102
    @property
    def where(self) -> Any: ...  # noqa: D102
    @property
    def next(self) -> Any: ...  # noqa: D102
    @property
    def at_start(self) -> bool: ...  # noqa: D102
    @property
    def at_end(self) -> bool: ...  # noqa: D102
    @property
    def edits(self) -> list[Any]: ...  # noqa: D102
    def edit(self, path: str) -> Array: ...  # noqa: D102
    def step(self, unit: str = "stage", progress: Any = None) -> Any: ...  # noqa: D102
    def back(self, unit: str = "stage") -> Any: ...  # noqa: D102
    def run_to(self, condition: str | None = None, progress: Any = None) -> Any: ...  # noqa: D102
    def finish(self, progress: Any = None) -> Any: ...  # noqa: D102
    def locals(self) -> Mapping[str, Array]: ...  # noqa: D102
    def peek(self, path: str) -> Array: ...  # noqa: D102
    def readers(self, path: str) -> list[str]: ...  # noqa: D102
    def values(self) -> dict[str, Any]: ...  # noqa: D102
    def watch(self, expression: str) -> Any: ...  # noqa: D102
    def unwatch(self, expression: str) -> None: ...  # noqa: D102
    def fork(self) -> Any: ...  # noqa: D102
    def compare(self, fork: Any) -> Any: ...  # noqa: D102
    def undo(self) -> Any: ...  # noqa: D102
    def patch(self, path: str, array: Any, tokens: Any = None) -> Any: ...  # noqa: D102
    def force(self, layer: int, experts: Any, gates: Any = None, tokens: Any = None) -> Any: ...  # noqa: D102
    def ablate(self, layer: int, expert: int, tokens: Any = None) -> Any: ...  # noqa: D102


# ---- the walk as a whole ----


def head(walk: Walks) -> dict[str, Any]:
    """What stays the same on the whole walk: the model's sizes, tokens, passes."""
    session = walk.session
    config = session.model.config
    first = walk.passes[0][0]
    ids = [*session.ids[:first], *walk.ids]
    tokenizer = session.model.tokenizer
    return {
        "layers": config.num_hidden_layers,
        "moe": list(config.moe_layers),
        "shared": list(getattr(config, "shared_layers", ())),
        "experts": config.num_experts,
        "top_k": config.top_k,
        "ids": ids,
        "texts": [""] * len(ids) if tokenizer is None else tokenizer.texts(ids),
        "passes": [list(bounds) for bounds in walk.passes],
        "stages": list(STAGES),
        "kept": list(session.capture),
    }


def rank(where: Any) -> tuple[float, ...]:
    """Sorts places of a walk in the order in which they are come to."""
    return (where.pass_index, *stage_rank(where.stage, where.layer, where.expert))


def stage_rank(stage: str | None, layer: int | None, expert: int | None) -> tuple[float, float, float]:
    """Sorts places within a pass; no stage is the start."""
    if stage is None:
        return -2.0, 0.0, 0.0
    if stage not in STAGES:
        raise ArgumentError(f"no stage is named {stage!r:.40}; stages are {', '.join(STAGES)}")
    depth = -1.0 if stage == "embed" else math.inf if stage in ("norm", "logits") else float(layer or 0)
    return depth, float(STAGES.index(stage)), float(-1 if expert is None else expert)


def bounds(walk: Walks) -> tuple[int, int]:
    """(start, stop) of the token rows of the pass under way or just done, or of the first one."""
    number = walk.where.pass_index - first_pass(walk)
    start, stop = walk.passes[max(0, min(number, len(walk.passes) - 1))]
    return start, stop


def first_pass(walk: Walks) -> int:
    """The number in its session of the first pass of a walk."""
    return sum(1 for chunk in walk.session.passes if chunk.start < walk.passes[0][0])


def window(start: int, stop: int, token: int) -> tuple[int, int]:
    """The rows around a token of which everything is sent."""
    first = max(start, min(token - _ROWS // 2, stop - _ROWS))
    return first, min(stop, first + _ROWS)


def code_here(walk: Walks) -> str:
    """One line of Python that leads a stepper from the start to this place."""
    where = walk.where
    if where.stage is None:
        return "stepper.where"
    if walk.at_end:
        return "stepper.finish()"
    parts = [f"stage == '{where.stage}'"]
    parts[:0] = [] if where.layer is None else [f"layer == {where.layer}"]
    parts += [] if where.expert is None else [f"expert == {where.expert}"]
    parts += [] if len(walk.passes) == 1 else [f"token == {bounds(walk)[0]}"]
    return f'stepper.run_to("{" and ".join(parts)}")'


def breakpoint_place(condition: str) -> list[Any] | None:
    """[layer, stage] of a condition that asks for one cell of the map: `layer == 3 and stage == 'router'`, with more
    or less beside it; None for others.
    """
    try:
        tree = ast.parse(condition, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    found: dict[str, Any] = {}
    for part in tree.values if isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.And) else [tree]:
        match part:
            case ast.Compare(ast.Name(name), [ast.Eq()], [ast.Constant(value)]) if name in ("layer", "stage"):
                found[name] = value
    if found.get("stage") in ("embed", "norm", "logits"):
        return [None, found["stage"]]
    return [found["layer"], found["stage"]] if len(found) == 2 else None


# ---- one moment ----


def frame(walk: Walks, look: Mapping[str, int]) -> tuple[dict[str, Any], dict[str, Array]]:
    """Facts and arrays of the place where `walk` stands, around the token, in the layer and at the expert of `look`.

    Arrays, n token rows of the window, T of the pass, k slots: logits (n, E), gates (n, k), ids (T, k) int32; outputs
    (n, k, FIRST), lengths (n, k) of the chosen experts' outputs where `there` (n, k) uint8; total (n, FIRST),
    total_length (n,) of what the block adds; shared, shared_length, shared_gate likewise; load (L, E) uint32 rows by
    expert, all ones where not known; histograms (B, bins) uint32, spans (B, 2) and values (B, 8) of the buffers. What
    is not there at this moment is left out.
    """
    where, after = walk.where, walk.next
    start, stop = bounds(walk)
    layer, token = look["layer"], look["token"]
    rows = window(start, stop, token)
    picture = {} if where.stage is None else _layer(walk, layer, (start, stop), rows)
    chosen = _chosen(picture, token - start, look["expert"], where)
    buffers, numbers = ([], {}) if where.stage is None else _buffers(walk, chosen, token, start)
    facts = {
        "place": {"pass": where.pass_index, "stage": where.stage, "layer": where.layer, "expert": where.expert},
        "next": None if after is None else {"stage": after.stage, "layer": after.layer, "expert": after.expert},
        "reason": where.reason,
        "hits": list(where.tokens) if where.reason not in ("", "end") else [],
        "rows": [start, stop],
        "window": list(rows),
        "look": dict(look),
        "buffers": buffers,
        "breakpoints": _breakpoints(walk, where),
        "watches": _watches(walk, token),
        "likely": _likely(walk) if where.stage == "logits" else [],
        "code": code_here(walk),
    }
    arrays = {**picture, **numbers, "load": _load(walk, where)}
    return facts, arrays


def _likely(walk: Walks) -> list[tuple[str, float | None]]:
    """The likeliest next tokens and their probabilities; None where the logits hold NaN."""
    z = np.array(walk.session.logits, np.float64)
    with np.errstate(invalid="ignore"):
        p = np.exp(z - z.max())
        p /= p.sum()
    tokenizer = walk.session.model.tokenizer
    return [
        (
            f"<{number}>" if tokenizer is None else tokenizer.texts([number])[0],
            float(p[number]) if p[number] >= 0 else None,
        )
        for number in np.argsort(-p, kind="stable")[:_LIKELY].tolist()
    ]


def _layer(walk: Walks, layer: int, rows: tuple[int, int], part: tuple[int, int]) -> dict[str, Array]:
    """The numbers of the layer picture."""
    near = slice(part[0] - rows[0], part[1] - rows[0])
    base = f"layers.{layer}.moe."
    out: dict[str, Array] = {}
    for name, tap in (("logits", "router_logits"), ("gates", "gates")):
        array = _peek(walk, base + tap)
        if array is not None:
            out[name] = np.array(array[near], np.float32)
    ids = _peek(walk, base + "expert_ids")
    if ids is not None:
        out["ids"] = np.array(ids, np.int32)
        out |= _outputs(walk, base, out["ids"][near], part[0])
    for name, tap in (("total", "output"), ("shared", "shared.output")):
        array = _peek(walk, base + tap)
        if array is not None:
            out[name] = np.array(array[near, :FIRST], np.float32)
            out[name + "_length"] = _lengths(array[near])
    gate = _peek(walk, base + "shared.gate")
    if gate is not None:
        out["shared_gate"] = np.array(gate[near, 0], np.float32)
    return out


def _outputs(walk: Walks, base: str, ids: Array, first: int) -> dict[str, Array]:
    """What the chosen experts gave back for each row, before the gates."""
    there = np.zeros(ids.shape, np.uint8)
    lengths = np.zeros(ids.shape, np.float32)
    values: Array | None = None
    for expert in np.unique(ids[ids >= 0]).tolist():
        rows, tokens = _peek(walk, f"{base}experts.{expert}.output"), _peek(walk, f"{base}experts.{expert}.tokens")
        if rows is None or tokens is None or len(rows) != len(tokens):
            continue
        if values is None:
            values = np.zeros((*ids.shape, min(FIRST, rows.shape[1])), np.float32)
        packed = {int(t): i for i, t in enumerate(tokens.tolist())}
        for row, slot in np.argwhere(ids == expert).tolist():
            at = packed.get(first + row)
            if at is not None:
                there[row, slot] = 1
                values[row, slot] = rows[at, :FIRST]
                lengths[row, slot] = _lengths(rows[at : at + 1])[0]
    return {} if values is None else {"outputs": values, "lengths": lengths, "there": there}


def _chosen(picture: Mapping[str, Array], row: int, expert: int | None, where: Any) -> set[int]:
    """Experts whose buffers are listed: those of the selected token, the selected one, the one that has just run."""
    ids = picture.get("ids")
    found = set() if ids is None or not 0 <= row < len(ids) else {int(e) for e in ids[row] if e >= 0}
    return found | ({expert} if expert is not None else set()) | ({where.expert} if where.expert is not None else set())


def _buffers(walk: Walks, experts: set[int], token: int, start: int) -> tuple[list[dict[str, Any]], dict[str, Array]]:
    """The buffers in reach: facts one by one, and their numbers."""
    facts: list[dict[str, Any]] = []
    histograms, spans, values = [], [], []
    arrays = walk.locals()
    for path, array in reversed(list(arrays.items())):  # the newest first
        expert = _expert_of(path)
        if (expert is not None and expert not in experts) or ".moe.dispatch." in path:
            continue
        row = _row_of(path, array, arrays, token, start)
        size, odd, counts, span = _numbers(array)
        facts.append(
            {
                "path": path,
                "shape": list(array.shape),
                "dtype": array.dtype.name,
                "absmax": size,
                "nonfinite": odd,
                "readers": walk.readers(path),
                "row": row,
                "width": 0 if row is None else int(array[row].size),
            }
        )
        histograms.append(counts)
        spans.append(span)
        first = np.full(_VALUES, np.nan, np.float32)
        if row is not None:
            some = array[row].reshape(-1)[:_VALUES]
            first[: some.size] = some
        values.append(first)
    if not facts:
        return [], {}
    return facts, {
        "histograms": np.array(histograms, np.uint32),
        "spans": np.array(spans, np.float32),
        "values": np.array(values, np.float32),
    }


def _expert_of(path: str) -> int | None:
    parts = path.split(".")
    return int(parts[parts.index("experts") + 1]) if "experts" in parts else None


def _row_of(path: str, array: Array, arrays: Mapping[str, Array], token: int, start: int) -> int | None:
    """Which row of a buffer belongs to the selected token; None when none does."""
    if _expert_of(path) is not None:
        tokens = arrays.get(path.rpartition(".")[0] + ".tokens")
        found = [] if tokens is None else np.flatnonzero(tokens == token).tolist()
        return int(found[0]) if found else None
    if path.endswith("attn.weights") or not array.ndim:
        return None
    row = token - start
    if path == "logits" and len(array) == 1:  # only the last token's were kept
        return 0
    return row if 0 <= row < len(array) else None


def _numbers(array: Array) -> tuple[float | None, int, Array, tuple[float, float]]:
    """Largest magnitude of the finite values (None: there are none), how many are not finite, counts of the finite ones
    in equal bins, and the ends of that scale, which holds zero.
    """
    flat = array.ravel()
    finite = flat[np.isfinite(flat)]
    odd = int(flat.size - finite.size)
    if not finite.size:
        return None, odd, np.zeros(_BINS, np.uint32), (-1.0, 1.0)
    most, least = float(finite.max()), float(finite.min())
    size = max(most, -least)
    top = size or 1.0
    low = -top if least < 0 else 0.0
    bins = ((finite.astype(np.float64) - low) * (_BINS / (top - low))).astype(np.intp)
    counts = np.bincount(np.minimum(bins, _BINS - 1), minlength=_BINS)
    return size, odd, counts.astype(np.uint32), (low, top)


def _breakpoints(walk: Walks, where: Any) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "condition": point.condition,
            "enabled": bool(point.enabled),
            "hits": int(point.hits),
            "here": where.reason == f"breakpoint {name}",
            "place": breakpoint_place(point.condition),
        }
        for name, point in walk.breakpoints.items()
    ]


def _watches(walk: Walks, token: int) -> list[dict[str, Any]]:
    """Each watch as text. What differs by token is shown for the selected one, if the moment is about it."""
    where = walk.where
    start, stop = bounds(walk)
    out = []
    for text, value in walk.values().items():
        shown: str | None = None
        of: int | None = None
        if isinstance(value, np.ndarray) and value.ndim:
            rows = list(where.tokens) if where.stage == "expert" else list(range(start, stop))
            at = rows.index(token) if token in rows and len(rows) == len(value) else len(value) - 1
            if len(value):
                shown = figure(value[at])
                of = rows[at] if len(rows) == len(value) else None
        elif value is not None:
            shown = figure(value)
        out.append({"text": text, "value": shown, "token": of})
    return out


def figure(value: Any, form: str = ".4g") -> str:
    """A value of any kind in few characters."""
    if isinstance(value, np.ndarray):
        more = " …" if value.size > 8 else ""
        return " ".join(figure(v) for v in value.ravel()[:8].tolist()) + more
    if isinstance(value, (bool, np.bool_)):
        return str(bool(value))
    if isinstance(value, (float, np.floating)):
        return f"{float(value):{form}}".replace("-", "−").replace("nan", "NaN").replace("inf", "Inf")
    return str(value)


def _load(walk: Walks, where: Any) -> Array:
    """(L, E) rows that each expert got in this pass, in the layers whose router has run."""
    config = walk.session.model.config
    load = np.full((config.num_hidden_layers, max(1, config.num_experts)), _UNKNOWN, np.uint32)
    here = stage_rank(where.stage, where.layer, where.expert)
    for layer in config.moe_layers:
        if stage_rank("router", layer, None) > here:
            break
        ids = _peek(walk, f"layers.{layer}.moe.expert_ids")
        if ids is not None:
            load[layer] = np.bincount(ids[ids >= 0].ravel(), minlength=load.shape[1])
    return load


def _lengths(rows: Array) -> Array:
    with np.errstate(all="ignore"):
        return np.asarray(np.sqrt((rows.astype(np.float64) ** 2).sum(axis=-1)), np.float32)


def _peek(walk: Walks, path: str) -> Array | None:
    """Rows of the pass, or None when they are not there (now, or with this capture)."""
    with suppress(ArgumentError, LookupError):
        return walk.peek(path)
    return None


# ---- two runs ----


def comparison(found: Any, first: int) -> tuple[dict[str, Any], dict[str, Array]]:
    """A `Comparison` as facts and arrays: residual (L, T), chances (n, 2), kl (1,). `first`: the walk's first row."""
    layers: dict[int, int] = {}
    for flip in found.routing:
        layers[flip.layer] = layers.get(flip.layer, 0) + 1
    facts = {
        "identical": bool(found.identical),
        "tokens": [[change.id, change.text] for change in found.top],
        "rerouted": [[layer, count] for layer, count in sorted(layers.items())],
        "flips": [_flip(flip) for flip in found.routing[:200]],
        "first": first,
    }
    arrays = {
        "residual": np.array(found.residual, np.float32),
        "chances": np.array([[change.p, change.p_fork] for change in found.top], np.float32).reshape(-1, 2),
        "kl": np.array([found.kl], np.float32),
    }
    return facts, arrays


def _flip(flip: Any) -> list[Any]:
    return [flip.layer, flip.token, list(flip.before), list(flip.after)]


def parse_numbers(texts: Sequence[Any]) -> list[float]:
    """Numbers as they were typed. Raises ArgumentError naming what is none."""
    out = []
    for text in texts:
        try:
            out.append(float(str(text).replace("−", "-").replace(",", ".")))
        except ValueError:
            raise ArgumentError(f"'{text}' is no number") from None
    return out


def check_look(walk: Walks, wish: Mapping[str, Any]) -> dict[str, int]:
    """A complete selection: a layer of the model, a token row of the walk, an expert.

    Raises ArgumentError naming what does not exist and what does.
    """
    config = walk.session.model.config
    first, last = walk.passes[0][0], walk.passes[-1][1] - 1
    limits = {
        "layer": (0, config.num_hidden_layers - 1), "token": (first, last),
        "expert": (0, max(0, config.num_experts - 1)),
    }  # fmt: skip
    out = {}
    for name, (low, high) in limits.items():
        value = wish.get(name)
        if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
            raise ArgumentError(f"The selected {name} must be a whole number, not {value!r:.40}.")
        if not low <= value <= high:
            raise ArgumentError(f"There is no {name} {value}: this walk has {low} to {high}.")
        out[name] = int(value)
    return out


def first_choice(walk: Walks, layer: int, token: int) -> int | None:
    """The strongest expert of a token, where its router has run."""
    ids = _peek(walk, f"layers.{layer}.moe.expert_ids")
    row = token - bounds(walk)[0]
    if ids is None or not 0 <= row < len(ids):
        return None
    held = [int(e) for e in ids[row] if e >= 0]
    return held[0] if held else None
