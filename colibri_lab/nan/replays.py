"""A run once more with one change, and how the new run compares with another one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.nan.replay import emulation_of
from colibri_lab.nan.result import Found
from colibri_lab.nan.search import find
from colibri_lab.nan.source import Source
from colibri_lab.numerics import headroom_bits
from colibri_lab.trace import Trace

__all__ = ["Change", "Rerun", "emulation_of", "kl_of", "rerouted", "run", "run_code", "tightest"]

Report = Callable[[float], object]

_WEIGHTS = 1 << 26  # bytes of attention weights that are captured as well
_CHUNK = 512  # tokens of a pass without a stepper: bounds scratch memory; the bytes are the same


@dataclass(frozen=True)
class Change:
    """What is other than in the run that fell ill: its model, its emulation, or calls of a stepper."""

    model: Any
    emulation: Any  # lab.Emulation or None
    steer: Callable[[Any], object] | None = None  # called with the stepper
    model_code: tuple[str, ...] = ()  # lines that make `model`
    steer_code: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rerun:
    """The new run and what is still not finite in it (None: nothing)."""

    trace: Trace
    found: Found | None


def run(trace: Trace, change: Change, report: Report) -> Rerun:
    """The tokens of `trace` with one change, everything captured, searched anew. Interrupts end it within a second."""
    session = change.model.session(**_options(trace, change))
    n = trace.n_tokens
    if change.steer is not None:
        stepper = session.stepper(trace.ids, chunk=None)
        change.steer(stepper)
        stepper.finish(progress=lambda done: report(0.8 * done))
    else:
        for start in range(0, n, _CHUNK):
            part = trace.ids[start : start + _CHUNK]
            first, share = start / n, len(part) / n
            session.feed(part, progress=lambda done, at=first, of=share: report(0.8 * (at + done * of)))
    found = find(session, progress=False)
    report(1.0)
    return Rerun(session.trace(), found)


def run_code(trace: Trace, change: Change, opened: str) -> str:
    """The same as Python; it uses `found`, what `lab.nan.find` gave. `opened`: how to come by the model."""
    options = {name: value for name, value in _options(trace, change).items() if value is not None}
    texts = [repr(options.pop("capture"))]
    texts += [f"{name}={_emulation_code(v) if name == 'emulate' else repr(v)}" for name, v in options.items()]
    session = f"session = model.session({', '.join(texts)})"
    lines = [f"model, ids = {opened}, found.trace.ids", *change.model_code, session]
    if change.steer_code:
        lines += ["stepper = session.stepper(ids, chunk=None)", *change.steer_code, "stepper.finish()"]
    else:
        lines.append("session.feed(ids)")
    return "\n".join([*lines, "left = lab.nan.find(session)", "print(left)"])


def _options(trace: Trace, change: Change) -> dict[str, Any]:
    """Arguments of model.session for such a run; those that are None say what is so anyway."""
    config, n, capture = change.model.config, trace.n_tokens, ["all"]
    if 4 * len(trace.layers) * int(config["num_attention_heads"]) * n * n <= _WEIGHTS:
        capture.append("layers.*.attn.weights")
    mode = trace.meta.get("gate_mode")
    options = {
        "capture": capture, "max_tokens": n, "gate_mode": mode if mode != config["gate_rule"] else None,
        "watch": "watch",  # what lies between the taps counts too
    }  # fmt: skip
    return options if change.emulation is None else {**options, "emulate": change.emulation}


def _emulation_code(emulation: Any) -> str:
    given = {"storage": emulation.storage}
    if emulation.accumulation is not None:
        given["accumulation"] = emulation.accumulation
    if emulation.flush_subnormals:
        given["flush_subnormals"] = True
    if emulation.saturate:
        given["saturate"] = emulation.saturate
    return f"lab.Emulation({', '.join(f'{name}={value!r}' for name, value in given.items())})"


# ---- comparing ----


def tightest(trace: Trace) -> tuple[float, str] | None:
    """(bits left, tap path) of the tap that is nearest to the largest number of its format; None without any."""
    source, found = Source(trace), None
    for path in trace:
        array = trace[path]
        if array.dtype.kind in "iu" or not array.size:
            continue
        bits = headroom_bits(array, source.format(path.replace(".dispatch.", ".experts.*.")))
        if np.isfinite(bits) and (found is None or bits < found[0]):
            found = (bits, path)
    if found is None or ".dispatch." not in found[1]:
        return found
    layer, tap = int(found[1].split(".")[1]), found[1].rpartition(".")[2]
    row = int(np.abs(np.asarray(trace[found[1]], np.float32)).max(axis=1).argmax())
    return found[0], f"layers.{layer}.moe.experts.{source.dispatch(layer)[1][row]}.{tap}"


def kl_of(reference: Trace, trace: Trace) -> float | None:
    """KL(reference ‖ trace) in nats of the last next-token distribution; None when one of them is not finite."""
    a, b = (_log_softmax(each["logits"][-1]) for each in (reference, trace))
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return None
    return max(0.0, float((np.exp(a) * (a - b)).sum()))


def rerouted(reference: Trace, trace: Trace, off: tuple[int, int] | None) -> int:
    """Tokens × layers with other experts than in `reference`; `off`: (layer, expert) that was switched off, whose empty
    slot does not count.
    """
    count = 0
    for layer in trace.moe_layers:
        before, after = (np.array(each[f"layers.{layer}.moe.expert_ids"]) for each in (reference, trace))
        if off is not None and off[0] == layer:
            before[before == off[1]] = -1
        count += int((np.sort(before, axis=1) != np.sort(after, axis=1)).any(axis=1).sum())
    return count


def _log_softmax(logits: NDArray[Any]) -> NDArray[np.float64]:
    wide = np.asarray(logits, np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        wide = wide - wide.max()
        return np.asarray(wide - np.log(np.exp(wide).sum()))
