"""A run once more in a session of its own, with everything captured."""

from __future__ import annotations

from colibri_lab.nan.source import Source
from colibri_lab.progress import Progress, shown

__all__ = ["is_complete", "obstacle", "replay"]

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


def replay(source: Source, progress: Progress) -> Source:
    """The same tokens in a session with all captured, attention weights too where they are small.

    Raises OutOfMemoryError or CapacityError when that does not fit.
    """
    trace, model = source.trace, source.model
    n, layers = len(trace.ids), len(trace.layers)
    capture = ["all"]
    if 4 * layers * int(model.config["num_attention_heads"]) * n * n <= _WEIGHTS:
        capture.append("layers.*.attn.weights")
    session = model.session(capture, max_tokens=n, gate_mode=trace.meta.get("gate_mode"))
    with shown(progress, n, "tokens", "replay") as report:
        for start in range(0, n, _CHUNK):
            part = trace.ids[start : start + _CHUNK]

            def done(share: float, start: int = start, size: int = len(part)) -> None:
                if report is not None:
                    report((start + share * size) / n)

            session.feed(part, progress=done)
    return Source(session.trace(), model)
