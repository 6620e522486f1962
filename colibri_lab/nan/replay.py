"""A run once more in a session of its own, with everything captured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from colibri_lab.errors import CapacityError, OutOfMemoryError
from colibri_lab.nan.source import Source
from colibri_lab.progress import Progress, shown
from colibri_lab.trace import Trace

__all__ = ["emulation_of", "feed", "is_complete", "obstacle", "replay", "watched"]

_CHUNK = 512  # tokens of a pass of the replay: bounds scratch memory; the bytes are the same
_WEIGHTS = 1 << 26  # bytes of attention weights that are captured as well


def is_complete(source: Source) -> bool:
    """Whether all taps of a run of our own were captured."""
    return "all" in source.trace.meta.get("capture", ())


def obstacle(source: Source) -> str:
    """Why a run cannot be replayed, as the end of a sentence; "" when it can."""
    meta, model = source.trace.meta, source.model
    if source.trace.edits:
        return "it has edits"
    if meta["producer"] != "colibri-lab":
        return f"another program made it ({meta['producer']})"
    if model is None or not hasattr(model, "session"):
        return "its model is not open: pass model="
    if meta.get("model_identity", model.identity) != model.identity:
        return "the model that is open is another one"
    return ""


def emulation_of(trace: Trace) -> Any:
    """The lab.Emulation under which a trace was made; None for plain float32."""
    import colibri_lab as lab  # whoever replays has a model, hence the engine

    said = trace.meta.get("emulation")
    said = json.loads(said) if isinstance(said, str) else said
    return lab.Emulation.from_record(said) if isinstance(said, Mapping) else None


def replay(source: Source, progress: Progress) -> Source:
    """The same tokens in a session that watches and captures all, attention weights too where they are small.

    What does not fit ends at the first token that has a value that is not finite. Raises OutOfMemoryError or
    CapacityError when that does not fit either.
    """
    n, layers = source.trace.n_tokens, len(source.trace.layers)
    capture = ["all"]
    if 4 * layers * int(source.model.config["num_attention_heads"]) * n * n <= _WEIGHTS:
        capture.append("layers.*.attn.weights")
    try:
        session = _session(source, capture, n)
    except (OutOfMemoryError, CapacityError):
        tokens = watched(source, progress).table["token"]
        n = int(tokens[tokens >= 0].min(initial=n - 1)) + 1
        session = _session(source, ["all"], n)
    feed(session, source.trace.ids[:n], progress, "replay")
    return Source(session.trace(), source.model, session.watch)


def watched(source: Source, progress: Progress) -> Any:
    """The watch table of the same tokens: whether anything was not finite, at next to no memory."""
    session = _session(source, ["logits"], source.trace.n_tokens)
    feed(session, source.trace.ids, progress, "watch")
    return session.watch


def _session(source: Source, capture: list[str], n: int) -> Any:
    trace = source.trace
    return source.model.session(
        capture, max_tokens=n, gate_mode=trace.meta.get("gate_mode"), watch="watch", emulate=emulation_of(trace)
    )


def feed(session: Any, ids: list[int], progress: Progress, label: str) -> None:
    """Feeds a session in passes that bound scratch memory, as one call to whoever looks at the progress."""
    with shown(progress, len(ids), "tokens", label) as report:
        for start in range(0, len(ids), _CHUNK):
            part = ids[start : start + _CHUNK]

            def done(share: float, start: int = start, size: int = len(part)) -> None:
                if report is not None:
                    report((start + share * size) / len(ids))

            session.feed(part, progress=done)
            done(1.0)
