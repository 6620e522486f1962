"""The way of one origin as boxes and arrows in three columns: its layer, the next one, and what was ruined in the end.

A box is a dict: `column`, `title`, `sub`, `mark` ("nan", "+inf", "-inf" or ""), `label` (what the step into it did),
`source` (number of the box it comes from, or None), and `path`, `token`, `expert` to go to (None: nowhere).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from colibri_lab.nan.result import Found, Origin, Propagation, Step

__all__ = ["layer_of", "mark_of", "tap_name", "token_words", "tree"]

_BOXES = 6  # of a column
_RANGES = 4  # runs of tokens that are spelt out
_SHORT = 2  # the same in a box

Box = dict[str, Any]

_NAMES = {
    "embed": "embedding", "norm": "last norm", "logits": "logits",
    "attn.norm": "norm before attention", "attn.q": "queries", "attn.k": "keys", "attn.v": "values",
    "attn.weights": "attention weights", "attn.out": "attention", "moe.input": "norm before the experts",
    "moe.router_logits": "router", "moe.scores": "router scores", "moe.gates": "gates",
    "moe.shared.gate": "gate of the shared expert", "moe.shared.output": "shared expert",
    "moe.routed": "sum of the experts", "moe.output": "output of the experts", "mlp.input": "norm before the network",
    "mlp.output": "dense network", "output": "residual stream",
}  # fmt: skip


def layer_of(path: str) -> int | None:
    """The layer in a tap path; None outside the layers."""
    return int(path.split(".")[1]) if path.startswith("layers.") else None


def _kind_of(path: str) -> str:
    return path.split(".", 2)[2] if path.startswith("layers.") else path


def _expert_of(path: str) -> int | None:
    parts = path.split(".")
    return int(parts[4]) if ".moe.experts." in path and parts[4].isdecimal() else None


def tap_name(path: str) -> str:
    """A tap in words: "expert 5 hidden", "residual stream"."""
    kind = _kind_of(path)
    if kind.startswith("moe.experts."):
        number, tap = kind.split(".")[2:4]
        return f"expert {tap}" if number == "*" else f"expert {number} {tap}"
    return _NAMES.get(kind, kind)


def _runs(rows: Sequence[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for row in rows:
        if runs and row == runs[-1][-1] + 1:
            runs[-1].append(row)
        else:
            runs.append([row])
    return runs


def token_words(tokens: Sequence[int]) -> str:
    """Token rows in words: "token 35", "tokens 0–34", "tokens 1, 4–6 and 12 more"."""
    rows = sorted(tokens)
    runs = _runs(rows)
    shown = [str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs[:_RANGES]]
    left = sum(map(len, runs[_RANGES:]))
    more = f" and {left:,} more" if left else ""
    return f"token{'s' * (len(rows) != 1)} {', '.join(shown)}{more}"


def mark_of(value: float) -> str:
    """The mark of a value that is no ordinary number; "" for one that is."""
    return "nan" if math.isnan(value) else "" if math.isfinite(value) else "+inf" if value > 0 else "-inf"


def _tokens(tokens: Sequence[int]) -> str:
    """The same for a box, where there is little room."""
    return f"{len(tokens):,} tokens" if len(_runs(sorted(tokens))) > _SHORT else token_words(tokens)


def _values(count: int) -> str:
    return f"{count:,} value{'s' * (count != 1)}"


def tree(found: Found, number: int) -> dict[str, Any]:
    """`columns` (their headings) and `boxes` of origin `number`."""
    origin = found.origins[number]
    steps, reached = _followed(found, origin)
    here = [step for step in steps if step.layer == origin.layer and origin.path != "embed"]
    later = [step.layer for step in steps if step.layer is not None and step.layer != origin.layer]
    after = later[0] if later else None
    there = [step for step in steps if step.layer == after] if later else []
    boxes: list[Box] = [_origin_box(origin)]
    at = {origin.path: 0}  # where a path is drawn
    _add(boxes, at, here, column=0)
    _add(boxes, at, there, column=1)
    _outcome(boxes, found.propagation, origin, reached, _carrier(boxes, at, steps, found.propagation.last))
    last = found.propagation.last or "the last tap"
    first = "embedding" if origin.path == "embed" else _place(origin.layer, last)
    middle = "" if after is None else f"layer {after}"
    end = f"layer {after + 1} to {last}" if after is not None and found.trace.layers[-1] > after else last
    return {"columns": [first, middle, end if end != first else "in the end"], "boxes": boxes}


def _place(layer: int | None, last: str) -> str:
    return last if layer is None else f"layer {layer}"


def _followed(found: Found, origin: Origin) -> tuple[list[Step], set[int]]:
    """The steps that this origin leads to, in order, with the tokens that it reaches there, and the tokens that it
    ruins in the end.

    Rows of different origins can meet in one tap. A step hands on the same token's row; attention, and a step into
    tokens that have no such row, read earlier rows.
    """
    way, born = found.propagation, set(origin.tokens or (origin.token,))
    held: dict[str, set[int]] = {}  # path -> tokens of all origins
    for other in found.origins:
        held.setdefault(other.path, set()).update(other.tokens or (other.token,))
    mine = {origin.path: born}
    steps: list[Step] = []
    for step in way.steps:
        rows = mine.get(step.came_from, set())
        looks_back = step.how == "attention" and not step.came_from.endswith(".attn.q")
        tokens = {
            token for token in step.tokens
            if token in rows or (rows and token > min(rows) and (looks_back or token not in held[step.came_from]))
        }  # fmt: skip
        held.setdefault(step.path, set()).update(step.tokens)
        if tokens:
            mine.setdefault(step.path, set()).update(tokens)
            steps.append(replace(step, tokens=tuple(sorted(tokens))))
    if len(found.origins) == 1 or (origin.path == way.last and origin.weight is not None):
        return steps, set(way.ruined)  # every token reads a weight of the last product
    end = way.last if way.last in mine or way.last in held or not steps else steps[-1].path
    return steps, mine.get(end, set()) & set(way.ruined)


def _carrier(boxes: Sequence[Box], at: dict[str, int], steps: Sequence[Step], last: str) -> int:
    """The box that the last tap is made from: back from there to the first that is drawn."""
    for step in reversed(steps):
        if step.path == last:
            if last in at:
                break
            last = step.came_from
    return at.get(last, len(boxes) - 1)


def _origin_box(origin: Origin) -> Box:
    index = origin.index if isinstance(origin.index, tuple) else (origin.index,)
    return {
        "column": 0, "title": f"{tap_name(origin.path)}[{', '.join(map(str, index))}]",
        "sub": f"{_tokens(origin.tokens or (origin.token,))}: {_values(origin.n_values)}",
        "mark": mark_of(origin.value) or "nan", "label": "", "source": None, "path": origin.path,
        "token": origin.token, "expert": origin.expert,
    }  # fmt: skip


def _add(boxes: list[Box], at: dict[str, int], steps: Sequence[Step], column: int) -> None:
    """Adds the boxes of one layer: what follows at the same stage shares one, and too many are counted."""
    groups: list[list[Step]] = []
    for step in steps:
        if groups and _group(groups[-1][-1], column) == _group(step, column):
            groups[-1].append(step)
        else:
            groups.append([step])
    keep = _BOXES - 1 if len(groups) > _BOXES else _BOXES
    for group in groups[: keep - 1] + groups[-1:] if len(groups) > keep else groups:
        if len(groups) > keep and group is groups[-1]:
            boxes.append(_skipped(groups[keep - 1 : -1], column, len(boxes) - 1))
            at.update({step.path: len(boxes) - 1 for skipped in groups[keep - 1 : -1] for step in skipped})
        inside = {step.path for step in group}
        entry = max((step for step in group if step.came_from not in inside), key=lambda step: len(step.tokens))
        boxes.append(_step_box(group, column, entry.words, at.get(entry.came_from, len(boxes) - 1)))
        at.update({step.path: len(boxes) - 1 for step in group})


def _group(step: Step, column: int) -> tuple[Any, ...]:
    own = _expert_of(step.path) if column == 0 else None
    return step.stage, step.how == "norm", own


def _skipped(groups: Sequence[Sequence[Step]], column: int, source: int) -> Box:
    names = ", ".join(dict.fromkeys(group[-1].stage for group in groups))
    count = sum(map(len, groups))
    return {
        "column": column, "title": f"⋯ {count} more step{'s' * (count != 1)}", "sub": names, "mark": "", "label": "",
        "source": source, "path": None, "token": None, "expert": None,
    }  # fmt: skip


def _step_box(group: Sequence[Step], column: int, label: str, source: int) -> Box:
    last = group[-1]
    many = column and last.stage == "expert"
    experts = {_expert_of(step.path) for step in group}
    title = f"{len(experts)} experts" if many and len(experts) > 1 else tap_name(last.path)
    tokens = sorted({token for step in group for token in step.tokens})
    return {
        "column": column, "title": title, "sub": f"{_tokens(tokens)}: {_values(last.n_values)}",
        "mark": mark_of(last.value), "label": label, "source": source, "path": last.path,
        "token": tokens[0] if tokens else None, "expert": _expert_of(last.path),
    }  # fmt: skip


def _outcome(boxes: list[Box], way: Propagation, origin: Origin, reached: set[int], source: int) -> None:
    """What this origin ruined in the end, and what it did not: a clean token is a box too."""
    born = set(origin.tokens) | {origin.token}
    words = f"{way.last or 'last tap'}: not finite"
    direct = reached if origin.path == way.last else reached & born
    before = reached and way.clean and max(way.clean) < min(reached)
    they = "it comes" if len(way.clean) == 1 else "they come"
    ends: list[tuple[set[int], str, str, int | None]] = [
        (direct, words, "nan", source), (reached - direct, words, "nan", source),
        (set(way.ruined) - reached, "ruined by another origin", "", None),
        (set(way.clean), f"clean: {they} before" if before else "clean", "", None),
    ]  # fmt: skip
    for tokens, sub, mark, comes_from in ends:
        if tokens:
            rows = sorted(tokens)
            boxes.append({
                "column": 2, "title": _tokens(rows), "sub": sub, "mark": mark, "label": "", "source": comes_from,
                "path": way.last or None, "token": rows[0], "expert": None,
            })  # fmt: skip
