"""The words for what a search for NaN and Inf found: a sentence, a page of text, and JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import textwrap
from collections.abc import Iterable
from typing import Any

import numpy as np

from colibri_lab.nan.causes_words import number
from colibri_lab.nan.result import Found, Operand, Origin, Step
from colibri_lab.nan.step_words import rows_text
from colibri_lab.nan.words import bits_left, place, shown, tap_kind

__all__ = ["before_origin", "born", "report", "summary", "to_json"]

_COLUMNS = 100
_ORIGINS = 8  # in a report
_STEPS = 12
_LITTLE = 2.0  # bits


def summary(found: Found) -> str:
    """Cause, place, damage, how many more, and the headroom before it."""
    origin, count = found.origin, len(found.origins)
    parts = [f"{_capital(origin.cause).rstrip('.')}.", f"Born in {born(found, origin)}.", damage(found)]
    if count > 1:
        parts.append(f"It is the first of {count} independent origins.")
    parts.append(before_origin(found, origin))
    return " ".join(part for part in parts if part)


def born(found: Found, origin: Origin) -> str:
    """As in "layer 3, expert 5, hidden = act(gate) · up, token 35 '·+=', neuron 117"."""
    where = place(origin.point or origin.path)
    operation = origin.operation
    last = where.rpartition(", ")[2]
    if operation.startswith(f"{last} ="):  # the operation says the name again
        where = f"{where.removesuffix(last)}{operation}"
    elif operation:
        where += f", {operation}"
    return f"{where}, token {origin.token}{_text(found, origin.token)}, {_index(origin)}"


def damage(found: Found) -> str:
    """What it ruined, as a sentence."""
    way = found.propagation
    n = len(way.ruined) + len(way.clean)
    if not n:
        return ""
    last = f"the {way.last}" if way.last == "logits" else way.last or "the last tap"
    if not way.ruined:
        return f"It ruined {last} of none of {n} token{'s' * (n != 1)}."
    return f"It ruined {last} of {len(way.ruined)} of {n} token{'s' * (n != 1)}."


def before_origin(found: Found, origin: Origin) -> str:
    """ "Headroom had fallen to 0.9 bit one layer earlier." where an overflow had fewer than 2 bits left in the layer
    before it that has the same tap; else "".
    """
    if origin.kind not in ("overflow", "inf − inf", "0 × inf") or origin.layer is None:
        return ""
    kind = tap_kind(origin.path)
    rows = [row for row in found.map if 0 <= row["layer"] < origin.layer and tap_kind(str(row["path"])) == kind]
    if not rows:
        return ""
    last = max(rows, key=lambda row: int(row["layer"]))
    back = origin.layer - int(last["layer"])
    if not last["bits_left"] < _LITTLE or last["n_nan"] or last["n_inf"]:
        return ""
    ago = "one layer" if back == 1 else f"{back} layers"
    return f"Headroom had fallen to {bits_left(float(last['bits_left']))} {ago} earlier."


def report(found: Found, terminal: bool = False) -> str:
    """All parts, one below the other, at most 100 columns wide. In a `terminal` what is left out is pointed to as one
    gets at it there, and the next step, which depends on the command, is not said.
    """
    trace, count = found.trace, len(found.origins)
    tokens = f"{trace.n_tokens} token{'s' * (trace.n_tokens != 1)}"
    parts = [
        found.origin.kind.upper() + summary(found)[len(found.origin.kind) :],
        f"{trace.meta.get('model_name') or trace.meta['model_type']}, {found.dtype}, {tokens}",
    ]
    for order, origin in enumerate(found.origins[:_ORIGINS]):
        parts.append(_origin(found, origin, f"Origin {order + 1} of {count}" if count > 1 else "Origin"))
    if count > _ORIGINS:
        parts.append(_more(count - _ORIGINS, "origin", "found.origins", terminal))
    parts += [_way(found, terminal), _clean(found)]
    if found.notes:
        parts.append("Notes\n" + "\n".join(f"- {note}" for note in found.notes))
    if not terminal:
        parts.append("Next: what would cure it\n  lab.nan.cures(found)")
    return "\n\n".join("\n".join(_wrapped(line) for line in part.split("\n")) for part in parts if part) + "\n"


def to_json(found: Found) -> str:
    """Summary, origins, propagation, the map and notes."""
    columns = found.map.dtype.names or ()
    plain: dict[str, Any] = {
        "summary": summary(found),
        "dtype": found.dtype,
        "tokens": found.trace.n_tokens,
        "origins": [_origin_facts(origin) for origin in found.origins],
        "propagation": dataclasses.asdict(found.propagation),
        "map": [dict(zip(columns, row.tolist(), strict=True)) for row in found.map],
        "notes": list(found.notes),
    }
    return json.dumps(_named(plain), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


# ---- parts ----


def _origin(found: Found, origin: Origin, title: str) -> str:
    lines = [f"{title}: {born(found, origin)}", f"  path: {origin.path}", f"  cause: {origin.cause}"]
    rows = origin.tokens or (origin.token,)
    values = f"{origin.n_values} value{'s' * (origin.n_values != 1)}"
    lines.append(f"  born non-finite: {values} in {rows_text(np.array(rows), 'token')}")
    if origin.weight is not None and origin.weight.file:
        at = "" if origin.weight.offset is None else f", byte {origin.weight.offset:,}"
        called = f", {origin.weight.file_name}" if origin.weight.file_name else ""
        lines.append(f"  in the file: {origin.weight.file}{called}{at}")
    if origin.exact is not None:
        lines.append(f"  exact value: {number(origin.exact)}")
    came_out = [] if math.isnan(origin.value) else [Operand("result", origin.value, origin.dtype)]
    lines += _operands([*origin.operands, *came_out])
    if origin.needs:
        lines.append(f"  what would decide: {', '.join(origin.needs)}")
    return "\n".join(lines)


def _operands(operands: list[Operand]) -> list[str]:
    """A small table: name, value, bit pattern in hex, and sign, exponent and fraction."""
    if not operands:
        return []
    cells = [(one.name, number(one.value), one.hex, " ".join(one.fields)) for one in operands]
    wide = [max(len(row[column]) for row in cells) for column in range(3)]
    wide[0] = min(wide[0], _COLUMNS - 44 - wide[1] - wide[2])  # the bits of a float32 and their gaps take 34
    out = ["  operands: value, bits (sign, exponent, fraction)"]
    for name, value, code, fields in cells:
        name = name if len(name) <= wide[0] else f"{name[: wide[0] - 1]}…"
        out.append(f"    {name:<{wide[0]}}  {value:>{wide[1]}}  {code:<{wide[2]}}  {fields}")
    return out


def _more(count: int, what: str, where: str, terminal: bool) -> str:
    words = f"… {count} more {what}{'s' * (count != 1)}"
    return f"{words}: --json OUT writes them" if terminal else f"{words} in {where}"


def _way(found: Found, terminal: bool) -> str:
    """The first steps from each layer on, steps of one layer that do the same left out."""
    steps = found.propagation.steps
    if not steps:
        return ""
    lines = ["The way"]
    chosen = _condensed(steps)
    for step in chosen[:_STEPS]:
        lines.append(f"  {step.path}, {rows_text(np.array(step.tokens), 'token')}: {step.words}")
    left = len(steps) - len(chosen[:_STEPS])
    if left:
        lines.append(f"  {_more(left, 'step', 'found.propagation.steps', terminal)}")
    return "\n".join(lines)


def _condensed(steps: Iterable[Step]) -> list[Step]:
    """The steps that tell something new: one for each way of travelling in each layer, and the last tap."""
    told, out = set(), []
    for step in steps:
        key = (step.layer, step.how)
        if key not in told or step.path == "logits":
            told.add(key)
            out.append(step)
    return out


def _clean(found: Found) -> str:
    way = found.propagation
    lines = [damage(found)]
    if way.clean:
        kept = rows_text(np.array(way.clean), "token")
        lines.append(f"{_capital(kept)} {'stay' if len(way.clean) > 1 else 'stays'} clean.")
    if way.cache:
        layers = sorted({layer for layer, _ in way.cache})
        lines.append(
            f"k or v rows that later tokens read are not finite in layer{'s' * (len(layers) > 1)} "
            f"{', '.join(map(str, layers))}: whatever this session is fed next is ruined too."
        )
    if way.routing:
        first = way.routing[0]
        lines.append(f"From layer {first[0]} on, expert ids of {rows_text(np.array(first[1]), 'token')} mean nothing.")
    return "\n".join(line for line in [*lines, *way.swallowed] if line)


def _index(origin: Origin) -> str:
    index, kind = origin.index, tap_kind(origin.point or origin.path)
    if isinstance(index, tuple):
        second = "key" if kind.endswith(("scores", "weights")) and kind.startswith("attn") else "channel"
        return f"head {index[0]}, {second} {index[1]}"
    if kind.endswith((".gate", ".up", ".hidden")):
        return f"neuron {index}"
    if kind in ("moe.router_logits", "moe.scores"):
        return f"expert {index}"
    if kind == "moe.gates":
        return f"slot {index}"
    return f"id {index}" if kind == "logits" else f"channel {index}"


def _text(found: Found, token: int) -> str:
    text = found.trace.texts[token] if token < len(found.trace.texts) else ""
    return f" {shown(text)}" if text else ""


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _origin_facts(origin: Origin) -> dict[str, Any]:
    facts = dataclasses.asdict(origin)
    for entry, operand in zip(facts["operands"], origin.operands, strict=True):
        entry["hex"] = operand.hex
    return facts


def _named(value: Any) -> Any:
    """NaN and infinities as strings."""
    if isinstance(value, dict):
        return {key: _named(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_named(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _wrapped(line: str) -> str:
    if len(line) <= _COLUMNS:
        return line
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.fill(line, _COLUMNS, subsequent_indent=indent, break_on_hyphens=False)
