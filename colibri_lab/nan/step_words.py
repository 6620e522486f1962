"""What a step of the way did to a value that is not finite, in a few words, from the values themselves."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from colibri_lab.nan.taps import Taps
from colibri_lab.nan.way import edges

__all__ = ["How", "how_of", "rows_text", "value_text", "words"]

Array = NDArray[Any]
Ints = NDArray[np.int64]
How = Literal["product", "norm", "attention", "activation", "gate", "residual", "router", "copy", "softmax"]

_PRODUCTS = {
    "attn.q": "q", "attn.k": "k", "attn.v": "v", "mlp.output": "the network", "moe.shared.output": "the shared expert",
    "moe.shared.gate": "the shared gate", "logits": "lm_head", "gate": "gate", "up": "up", "output": "down",
    "moe.experts.*.output": "the experts",
}  # fmt: skip


def value_text(value: float) -> str:
    """NaN, Inf or −Inf; numbers in three digits."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Inf" if value > 0 else "−Inf"
    return f"{value:.3g}".replace("-", "−")


def rows_text(rows: Ints, what: str = "row") -> str:
    """ "row 35", "rows 35–39", "rows 3, 8 and 4 more"."""
    numbers = rows.tolist()
    if len(numbers) == 1:
        return f"{what} {numbers[0]}"
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{what}s {numbers[0]}–{numbers[-1]}"
    if len(numbers) <= 3:
        return f"{what}s {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
    return f"{what}s {numbers[0]}, {numbers[1]} and {len(numbers) - 2} more"


def how_of(path: str, came_from: str) -> How:
    """What kind of operation leads to `path`."""
    name = _name(path)
    if name in ("attn.norm", "moe.input", "mlp.input", "norm"):
        return "norm"
    if name == "hidden":
        return "activation"
    if name == "attn.out":
        return "attention"
    if name == "attn.weights":
        return "softmax"
    if name in ("moe.router_logits", "moe.scores", "moe.gates"):
        return "router"
    if name == "moe.routed" or came_from.endswith(".shared.gate"):
        return "gate"
    if name == "input":
        return "copy"
    return "residual" if name in ("output of layer", "moe.output") else "product"


def words(taps: Taps, path: str, came_from: str, tokens: Ints, rows: Ints) -> str:
    """`tokens`: the token rows that were reached, `rows`: those that they read, empty where each read its own."""
    name, token = _name(path), int(tokens[0])
    made, read = taps.row(path, token), taps.row(came_from, token)
    how = how_of(path, came_from)
    if how == "attention":
        return _attention(taps, path, came_from, tokens, rows)
    if how == "router":
        return _router(taps, path, tokens)
    if how == "softmax":
        return "a score that is not finite: NaN among the weights"
    if made is None or read is None:
        return "read as it came"
    with np.errstate(all="ignore"):
        if how == "norm":
            return _norm(taps, path, token, made, read)
        if how == "activation":
            return _activation(taps, path, token, read)
        if how == "gate" and name == "moe.routed":
            return _gate(taps, path, came_from, token, made, read)
        if how in ("residual", "gate"):
            return _sum(taps, path, came_from, token, made, read)
        return _product(taps, path, name, made, read)


def _name(path: str) -> str:
    """The tap without its numbers: "attn.q", "hidden" in an expert, "output of layer"."""
    part = path.split(".")
    if len(part) == 6 and part[3] == "experts":
        return "moe.experts.*.output" if part[4] == "*" else part[5]
    name = ".".join(part[2:]) or path
    return "output of layer" if name == "output" else name


def _norm(taps: Taps, path: str, token: int, made: Array, read: Array) -> str:
    rows = [read, *_others(taps, path, "", token)]
    if any(np.isnan(row).any() for row in rows):
        return "a NaN in the mean square: NaN in the whole row"
    if np.isnan(made).all() and not np.isinf(read).all():
        return "Inf − Inf = NaN in the mean square: NaN in the whole row"
    divides = taps.source.trace.meta["producer"] == "colibri-lab"
    return "Inf ÷ Inf = NaN" if divides else "Inf × 0 = NaN"


def _others(taps: Taps, path: str, came_from: str, token: int) -> list[Array]:
    """The rows of the token in what else a tap is made of."""
    rows = (taps.row(edge.path, token) for edge in edges(taps.source, path, taps.born) if edge.path != came_from)
    return [row for row in rows if row is not None]


def _product(taps: Taps, path: str, name: str, made: Array, read: Array) -> str:
    what = _PRODUCTS.get(name, name)
    bad = np.flatnonzero(~np.isfinite(read))
    if len(bad) == 1:
        said = f"{value_text(float(read[bad[0]]))} × column {bad[0]} of {what}, any weight"
        return said + (f": {_mixed(taps, path, made, read)}" if np.isinf(read[bad[0]]) and np.isnan(made).any() else "")
    if np.isnan(read).any():
        return f"NaN × any weight of {what} = NaN"
    return f"Inf × weights of {what}" + (f": {_mixed(taps, path, made, read)}" if np.isnan(made).any() else "")


def _mixed(taps: Taps, path: str, made: Array, read: Array) -> str:
    """How Inf became NaN in a product: by a weight that is 0, else by infinities of both signs."""
    weight = taps.source.weight(path[: -len("output")] + "down") if ".experts." in path else None
    if weight is None or weight.shape != (made.size, read.size):
        return "Inf − Inf or Inf × 0 = NaN"
    row = weight[int(np.flatnonzero(np.isnan(made))[0])].astype(np.float32)
    return "Inf × 0 = NaN" if np.isnan(row * read).any() else "Inf − Inf = NaN"


def _activation(taps: Taps, path: str, token: int, read: Array) -> str:
    """hidden = act(gate) · up, at the first place that is not finite."""
    made, base = taps.row(path, token), path.rpartition(".")[0]
    gates, ups = taps.row(base + ".gate", token), taps.row(base + ".up", token)
    if made is None or gates is None or ups is None:
        return "act(gate) · up"
    place = int(np.flatnonzero(~np.isfinite(made) & ~np.isfinite(read))[0])
    gate, up, out = float(gates[place]), float(ups[place]), value_text(float(made[place]))
    if gate == -math.inf:
        return "act(−Inf) = −Inf ÷ Inf = NaN"
    if np.isinf(gate) and up == 0:
        return "Inf × 0 = NaN"
    if np.isinf(up) and math.isfinite(gate) and np.isnan(made[place]):
        return f"act({value_text(gate)}) = 0, 0 × {value_text(up)} = NaN"
    return f"act({value_text(gate)}) × {value_text(up)} = {out}"


def _gate(taps: Taps, path: str, came_from: str, token: int, made: Array, read: Array) -> str:
    """× gate 0.71, then + expert 4."""
    prefix = path.rpartition(".")[0] + "."
    if came_from.endswith(".gates"):
        return "× a gate that is NaN" if np.isnan(read).any() else "× a gate that is Inf"
    ids, gates = taps.source.rows(prefix + "expert_ids", [token]), taps.source.rows(prefix + "gates", [token])
    expert = came_from.split(".")[4] if ".experts." in came_from else "*"
    if ids is None or gates is None or expert == "*":
        return "× their gates, then summed"
    slot = np.flatnonzero(ids[0] == int(expert))
    if not len(slot):
        return "× its gate, then summed"
    gate = float(gates[0, slot[0]])
    others = [str(number) for number in ids[0].tolist() if number >= 0 and number != int(expert)]
    listed = ", ".join(others[:3]) + " …" * (len(others) > 3)
    then = f", then + expert{'s' * (len(others) > 1)} {listed}" if others else ""
    zero = ": Inf × 0 = NaN" if gate == 0 and np.isinf(read).any() and np.isnan(made).any() else ""
    return f"× gate {value_text(gate) if not math.isfinite(gate) else f'{gate:.2g}'}{zero}{then}"


def _sum(taps: Taps, path: str, came_from: str, token: int, made: Array, read: Array) -> str:
    if read.size != made.size:
        return f"× a gate that is {value_text(float(read[0]))}"
    lost = np.flatnonzero(~np.isfinite(made) & ~np.isfinite(read))
    if not len(lost):
        return "in the sum"
    value, out = float(read[lost[0]]), float(made[lost[0]])
    others = [float(row[lost[0]]) for row in _others(taps, path, came_from, token) if row.size == made.size]
    if np.isinf(value) and np.isnan(out):
        if any(math.isnan(other) for other in others):
            return f"{value_text(value)} + NaN = NaN"
        if -value in others:
            return "Inf − Inf = NaN"
    return f"{value_text(value)} + anything = {value_text(out)}"


def _attention(taps: Taps, path: str, came_from: str, tokens: Ints, rows: Ints) -> str:
    base = path.rpartition(".")[0]
    if not len(rows):
        names = [name for name in ("q", "k", "v") if _bad(taps, f"{base}.{name}", tokens).any()]
        return f"its own {_and(names)}" if names else "its own weights, which are softmax of q · k"
    layer = int(path.split(".")[1])
    window = taps.source.window(layer)
    near = rows if window is None else rows[rows > int(tokens[0]) - window]
    rows = near[near <= int(tokens[-1])]
    names = [name for name in ("k", "v") if _bad(taps, f"{base}.{name}", rows).any()]
    of = _and(names) if names else came_from
    read = "all read" if len(tokens) > 1 and len(rows) == 1 else "reads" if len(tokens) == 1 else "read"
    return f"{read} {rows_text(rows)} of {of}"


def _bad(taps: Taps, path: str, rows: Ints) -> NDArray[np.bool_]:
    return taps.bad(path)[rows] if taps.source.has(path) else np.zeros(0, np.bool_)


def _router(taps: Taps, path: str, tokens: Ints) -> str:
    base = path.rpartition(".")[0]
    judge = next((base + tap for tap in (".scores", ".router_logits") if taps.source.has(base + tap)), path)
    rows = taps.flat(judge, tokens)
    if np.isnan(rows).any():
        return "router ids mean nothing"
    return "some experts score Inf" if (rows == np.inf).any() else "some experts score −Inf and are never chosen"


def _and(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
