"""The way of one origin as boxes and arrows in three columns: its layer, the next one, and what was ruined in the end.

A box is a dict: `column`, `title`, `sub`, `mark` ("nan", "+inf", "-inf" or ""), `label` (what the step into it did),
`source` (number of the box it comes from, or None), and `path`, `token`, `expert` to go to (None: nowhere).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from colibri_lab.nan.result import Found, Origin, Step

__all__ = ["layer_of", "mark_of", "tap_name", "token_words", "tree"]

_BOXES = 6  # of a column
_RANGES = 4  # runs of tokens that are spelt out

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


def token_words(tokens: Sequence[int]) -> str:
    """Token rows in words: "token 35", "tokens 0–34", "tokens 1, 4–6 and 12 more"."""
    rows = sorted(tokens)
    runs: list[list[int]] = []
    for row in rows:
        if runs and row == runs[-1][-1] + 1:
            runs[-1].append(row)
        else:
            runs.append([row])
    shown = [str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs[:_RANGES]]
    left = sum(map(len, runs[_RANGES:]))
    more = f" and {left:,} more" if left else ""
    return f"token{'s' * (len(rows) != 1)} {', '.join(shown)}{more}"


def mark_of(value: float) -> str:
    """The mark of a value that is no ordinary number; "" for one that is."""
    return "nan" if math.isnan(value) else "" if math.isfinite(value) else "+inf" if value > 0 else "-inf"


def _tokens(tokens: Sequence[int]) -> str:
    """The same for a box, where there is little room."""
    gaps = tokens and max(tokens) - min(tokens) >= len(tokens)
    return f"{len(tokens):,} tokens" if gaps else token_words(tokens)


def tree(found: Found, number: int) -> dict[str, Any]:
    """`columns` (their headings) and `boxes` of origin `number`."""
    origin = found.origins[number]
    steps = _descendants(origin, found.propagation.steps)
    here = [step for step in steps if step.layer == origin.layer]
    later = [step.layer for step in steps if step.layer is not None and step.layer != origin.layer]
    after = later[0] if later else None
    there = [step for step in steps if step.layer == after] if later else []
    boxes: list[Box] = [_origin_box(origin)]
    at = {origin.path: 0}  # where a path is drawn
    _add(boxes, at, here, column=0)
    _add(boxes, at, there, column=1)
    _outcome(boxes, found, origin)
    last = found.propagation.last or "the last tap"
    first = "embedding" if origin.path == "embed" else _place(origin.layer, last)
    middle = "" if after is None else f"layer {after}"
    end = f"layer {after + 1} to {last}" if after is not None and found.trace.layers[-1] > after else last
    return {"columns": [first, middle, end if end != first else "in the end"], "boxes": boxes}


def _place(layer: int | None, last: str) -> str:
    return last if layer is None else f"layer {layer}"


def _descendants(origin: Origin, steps: Iterable[Step]) -> list[Step]:
    """The steps that this origin leads to, in order."""
    reached, found = {origin.path}, []
    for step in steps:
        if step.came_from in reached:
            reached.add(step.path)
            found.append(step)
    return found


def _origin_box(origin: Origin) -> Box:
    index = origin.index if isinstance(origin.index, tuple) else (origin.index,)
    values = f"{origin.n_values:,} value{'s' * (origin.n_values != 1)}"
    return {
        "column": 0, "title": f"{tap_name(origin.path)}[{', '.join(map(str, index))}]",
        "sub": f"{_tokens(origin.tokens or (origin.token,))}: {values}",
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
        source = at.get(group[0].came_from, len(boxes) - 1)
        boxes.append(_step_box(group, column, source))
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


def _step_box(group: Sequence[Step], column: int, source: int) -> Box:
    last = group[-1]
    many = column and last.stage == "expert"
    experts = {_expert_of(step.path) for step in group}
    title = f"{len(experts)} experts" if many and len(experts) > 1 else tap_name(last.path)
    tokens = sorted({token for step in group for token in step.tokens})
    return {
        "column": column, "title": title, "sub": f"{_tokens(tokens)}: {last.n_values:,} values",
        "mark": mark_of(last.value), "label": group[0].words, "source": source, "path": last.path,
        "token": tokens[0] if tokens else None, "expert": _expert_of(last.path),
    }  # fmt: skip


def _outcome(boxes: list[Box], found: Found, origin: Origin) -> None:
    """What was ruined in the end, and what was not: a clean token is a box too."""
    way = found.propagation
    next_layer = [i for i, box in enumerate(boxes) if box["column"] == 1]
    first = next_layer[0] if next_layer else len(boxes) - 1
    attends = (i for i in next_layer if "attention" in boxes[i]["title"] and "norm" not in boxes[i]["title"])
    own = [token for token in way.ruined if token in origin.tokens or token == origin.token]
    later = [token for token in way.ruined if token not in set(own)]
    words = f"{way.last or 'last tap'}: not finite"
    for tokens, source in ((own, first), (later, next(attends, first))):
        if tokens:
            boxes.append({
                "column": 2, "title": _tokens(tokens), "sub": words, "mark": "nan", "label": "", "source": source,
                "path": way.last or None, "token": tokens[0], "expert": None,
            })  # fmt: skip
    if way.clean:
        before = way.ruined and max(way.clean) < min(way.ruined)
        said = "clean: they come before" if before else "clean"
        said = "clean: it comes before" if before and len(way.clean) == 1 else said
        boxes.append({
            "column": 2, "title": _tokens(way.clean), "sub": said, "mark": "", "label": "", "source": None,
            "path": way.last or None, "token": way.clean[0], "expert": None,
        })  # fmt: skip
