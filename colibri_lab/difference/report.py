"""What a comparison found as text for a terminal, and as JSON."""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict
from typing import Any

import numpy as np

from colibri_lab.difference.result import Diff, Flip
from colibri_lab.difference.taps import AFTER, BEFORE, IN_LAYER

__all__ = ["report", "summary", "to_json"]

_COLUMNS = 100
_CELL = 6
_FLIPS = 10  # listed in a report


def summary(diff: Diff) -> str:
    """One sentence: the verdict, the place and the size."""
    first, tokens, part = diff.first_divergence, f"{diff.n_tokens} token{'s' * (diff.n_tokens != 1)}", _part(diff)
    if diff.verdict == "identical":
        bits = all(state in ("same bits", "same") for state in diff.table["state"])
        how = "the same bits everywhere" if bits else "within tolerance everywhere, the same experts"
        return f"A and B agree: {how}, over {tokens} and {len(diff.table)} taps.{part}"
    if diff.verdict == "tie" or first is None:
        ties = [flip for flip in diff.flips if flip.verdict == "tie"]
        count = f"{len(ties)} near-tie{'s' * (len(ties) != 1)}"
        start = min(ties, key=lambda flip: (flip.layer, flip.token))
        return (
            f"A and B differ only by {count} between experts that score alike (first: layer {start.layer}, token "
            f"{start.token}{_text(diff, start.token)}); either choice is right.{part}"
        )
    what = f"{first.path}, token {first.token}{_text(diff, first.token)}"
    if first.expert is not None:
        what += f", expert {first.expert}"
    of_ids = first.path.endswith(".expert_ids")
    share = f"for {100 * first.error:.3g} % of the tokens" if of_ids else f"by {first.error:.2g}"
    if diff.verdict == "downstream":
        return f"B leaves A at {what}, {share}, as a consequence: {first.cause}"
    return f"B leaves A at {what}, {share}{'' if of_ids else ' of the largest value'}."


def _part(diff: Diff) -> str:
    """What of the runs was compared, when it is not all of both."""
    a, b = diff.a.n_tokens, diff.b.n_tokens
    if diff.n_tokens == max(a, b):
        return ""
    return f" Only their common beginning was compared: {diff.n_tokens} of {a} tokens of A and {b} of B."


def report(diff: Diff) -> str:
    """All parts, one below the other."""
    count = f"{diff.n_tokens} token{'s' * (diff.n_tokens != 1)}"
    parts = [
        f"{diff.verdict.upper()}: {summary(diff)}",
        f"A  {diff.names[0]}\nB  {diff.names[1]}\n{count} compared. {diff.tolerance.words}",
    ]
    if diff.verdict == "defect" and diff.first_divergence is not None:
        parts.append(diff.first_divergence.cause)
    if diff.diagnosis is not None:
        parts.append(_diagnosis(diff))
    parts.append(_map(diff))
    if diff.flips:
        parts.append(_flips(diff))
    if diff.prediction is not None and len(diff.prediction.kl):
        parts.append(_prediction(diff))
    if diff.notes:
        parts.append("Notes\n" + "\n".join(f"- {note}" for note in diff.notes))
    return "\n\n".join("\n".join(_wrapped(line) for line in part.split("\n")) for part in parts) + "\n"


def to_json(diff: Diff) -> str:
    """See `Diff.to_json`."""
    columns = diff.table.dtype.names or ()
    prediction = diff.prediction
    whole = {
        "names": diff.names,
        "tokens": diff.n_tokens,
        "verdict": diff.verdict,
        "summary": summary(diff),
        "tolerance": asdict(diff.tolerance),
        "first_divergence": None if diff.first_divergence is None else asdict(diff.first_divergence),
        "diagnosis": None if diff.diagnosis is None else asdict(diff.diagnosis),
        "flips": [asdict(flip) for flip in diff.flips],
        "table": [dict(zip(columns, row.tolist(), strict=True)) for row in diff.table],
        "prediction": None if prediction is None else {
            "positions": prediction.positions.tolist(), "kl": prediction.kl.tolist(),
            "same_top": prediction.same_top.tolist(), "agreement": prediction.agreement.tolist(), "cut": prediction.cut,
        },
        "notes": diff.notes,
    }  # fmt: skip
    return json.dumps(_plain(whole), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not np.isfinite(value):
        return str(value)
    return value


# ---- parts ----


def _diagnosis(diff: Diff) -> str:
    found = diff.diagnosis
    assert found is not None
    lines = [f"Likely fault: {found.words}"]
    for attempt in found.attempts:
        mark = {"explains": "✓", "tried": "✗", "excluded": "–"}[attempt.state]
        left = f"left over {attempt.left_over:.2g}" if attempt.left_over is not None else ""
        lines.append(f"  {mark} {attempt.words}  {'; '.join(filter(None, (left, attempt.note)))}".rstrip())
    if found.confirm:
        lines += ["Confirm it yourself:", *(f"  {line}" for line in found.confirm.splitlines())]
    return "\n".join(lines)


def _map(diff: Diff) -> str:
    """Taps downwards, layers to the right; as many layers as fit, from the first that is beyond tolerance."""
    table = {(int(row["layer"]), _kind(row["path"])): row for row in diff.table}
    layers = sorted({layer for layer, _ in table if layer >= 0})
    kinds = [kind for kind in IN_LAYER if any((layer, kind) in table for layer in layers)]
    name = max([len(kind) for kind in kinds] + [6])
    fit = max(1, (_COLUMNS - name - 2) // (_CELL + 1))
    shown, left_out = layers, ""
    if len(layers) > fit:
        first = diff.first_divergence
        start = layers.index(first.layer) - 2 if first is not None and first.layer in layers else 0
        start = min(max(0, start), len(layers) - fit)
        shown = layers[start : start + fit]
        left_out = f" (layers {shown[0]} to {shown[-1]} of {len(layers)})"
    lines = [f"Largest difference ÷ largest value; ! beyond tolerance, = same bits{left_out}"]
    lines += [f"{kind:<{name}}  {_cell(diff, table[-1, kind])}" for kind in BEFORE if (-1, kind) in table]
    if shown:
        lines.append(" " * name + "  " + " ".join(f"{layer:>{_CELL}}" for layer in shown))
    for kind in kinds:
        cells = [_cell(diff, table[layer, kind]) if (layer, kind) in table else "" for layer in shown]
        lines.append((f"{kind:<{name}}  " + " ".join(f"{cell:>{_CELL}}" for cell in cells)).rstrip())
    lines += [f"{kind:<{name}}  {_cell(diff, table[-1, kind])}" for kind in AFTER if (-1, kind) in table]
    return "\n".join(lines)


def _kind(path: str) -> str:
    return path.split(".", 2)[2] if path.startswith("layers.") else path


def _cell(diff: Diff, row: Any) -> str:
    state = row["state"]
    if state in ("same", "same bits"):
        return "="
    if state in ("tie", "flips"):
        return f"{'≈' if state == 'tie' else '↓' if _all_downstream(diff, int(row['layer'])) else '!'}{row['flips']}"
    size = f"{row['max_rel']:.0e}".replace("e-0", "e-").replace("e+0", "e+") if np.isfinite(row["max_rel"]) else "inf"
    return f"!{size}" if state == "beyond" else size


def _all_downstream(diff: Diff, layer: int) -> bool:
    return all(flip.verdict != "defect" for flip in diff.flips if flip.layer == layer)


def _flips(diff: Diff) -> str:
    counts = {kind: sum(flip.verdict == kind for flip in diff.flips) for kind in ("tie", "defect", "downstream")}
    lines = [
        f"Tokens with other experts: {len(diff.flips)} in all, {counts['tie']} ties, {counts['defect']} defects, "
        f"{counts['downstream']} downstream; largest effect first"
    ]
    lines += [_flip(diff, flip) for flip in diff.flips[:_FLIPS]]
    if len(diff.flips) > _FLIPS:
        lines.append(f"  … {len(diff.flips) - _FLIPS} more")
    return "\n".join(lines)


def _flip(diff: Diff, flip: Flip) -> str:
    ids = f"{' '.join(map(str, flip.ids_a))} → {' '.join(map(str, flip.ids_b))}"
    sizes = f"margin {flip.margin:.2g}" + ("" if np.isnan(flip.moved) else f", moved {flip.moved:.2g}")
    place = f"layer {flip.layer}, token {flip.token}{_text(diff, flip.token)}"
    return f"  {flip.verdict}: {place}, {ids}; {sizes}. {flip.cause}"


def _prediction(diff: Diff) -> str:
    found = diff.prediction
    assert found is not None
    count, fine = len(found.kl), ~np.isnan(found.kl)
    known = found.kl[fine]
    lines = [f"Prediction: the top token agrees at {int(found.same_top[fine].sum())} of {len(known)} positions."]
    if len(known):
        worst = int(np.nanargmax(found.kl))
        token = int(found.positions[worst])
        lines.append(
            f"KL(A‖B) is {float(known.mean()):.2g} nats on average and {float(known.max()):.2g} at most, after token "
            f"{token}{_text(diff, token)}; {float(found.agreement[fine].mean()):.0%} of A's five likeliest are among "
            "B's."
        )
    if len(known) < count:
        lines.append(f"{count - len(known)} positions hold NaN and have no distribution.")
    if found.cut:
        lines.append(f"It ends there because {found.cut}.")
    return "\n".join(lines)


def _text(diff: Diff, token: int) -> str:
    """The token's text in brackets, when the trace knows it."""
    text = diff.a.texts[token] or diff.b.texts[token] if token < len(diff.a.texts) else ""
    return f" {text!r:.24}" if text else ""


def _wrapped(line: str) -> str:
    if len(line) <= _COLUMNS:
        return line
    indent = " " * (len(line) - len(line.lstrip()) + (2 if line.lstrip().startswith(("- ", "✓", "✗", "–")) else 0))
    return textwrap.fill(line, _COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
