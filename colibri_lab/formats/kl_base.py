"""llama.cpp's base file for KL divergence: log probabilities of the second half of each window, in 16 bits.

After "_logits_" come the window length, the vocabulary, the number of windows and all token ids; then per window one
record per row from half the window to its last token but one: scale and minimum as float32, and a code per word with
ln p = scale · code + minimum (floored 16 below the largest). The first half of every window is not there: its rows are
NaN, and `logits.recorded` (T,) tells which are.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from colibri_lab.errors import ArgumentError
from colibri_lab.formats.routes import meta_of
from colibri_lab.formats.sizes import Said
from colibri_lab.formats.source import Reader, Source
from colibri_lab.progress import shown
from colibri_lab.trace import Trace

NAME = "kl_base"
ABOUT = "base file of llama.cpp's KL divergence (_logits_)"
USES = {"config", "layers", "experts", "top_k", "windows"}

_MAGIC = b"_logits_"
_MOST = 1 << 30  # bytes of logits that are decoded without being asked for
_OFF = 0.02  # how far a row's probabilities may be from 1 in all: 16 bits over a range of 16, floored


def recognise(source: Source) -> bool:
    """The magic."""
    return source.head.startswith(_MAGIC)


def load(source: Source, said: Said) -> Trace:
    """Token ids and log probabilities of all windows, or of `windows=`."""
    reader = Reader(source, source.mapped(), "the base file")
    reader.take(8, "the magic")
    length, vocabulary, windows = (reader.number("i", what) for what in ("the window", "the vocabulary", "the windows"))
    if length < 4 or vocabulary < 2 or windows < 1:
        source.refuse(f"{windows} windows of {length} tokens over {vocabulary} words cannot be")
    ids = np.frombuffer(reader.take(4 * length * windows, "the token ids"), "<i4").reshape(windows, length)
    if ids.min() < 0 or ids.max() >= vocabulary:
        source.refuse(f"token ids outside 0 to {vocabulary - 1}")
    first, codes = length // 2, 2 * ((vocabulary + 1) // 2)
    rows, record = length - 1 - first, 8 + 2 * codes
    if reader.left != windows * rows * record:
        source.refuse(
            f"{windows} windows of {rows} rows need {windows * rows * record} bytes and {reader.left} are there: it "
            "was "
            "cut short, or written by another version"
        )
    chosen = _chosen(said, windows, 4 * length * vocabulary)
    logits = np.full((len(chosen) * length, vocabulary), np.nan, np.float32)
    recorded = np.zeros(len(logits), np.bool_)
    base = reader.at
    with shown(said.progress, len(chosen), "windows", source.path.name) as report:
        for place, window in enumerate(chosen):
            _decode(source, reader.data, logits[place * length + first :], base + window * rows * record, rows, window)
            recorded[place * length + first : place * length + first + rows] = True
            if report is not None:
                report((place + 1) / len(chosen))
    spans = [[place * length, (place + 1) * length] for place in range(len(chosen))]
    moe = said.moe_layers if said.num_experts and said.top_k else None
    meta = meta_of(
        source, said, "llama.cpp perplexity", said.num_hidden_layers or 0 if moe else 0, moe or (),
        said.num_experts or 0 if moe else 0, said.top_k or 0 if moe else 0, passes=spans, sequences=spans,
        logits_kind="log_probabilities", logits_floor=16, windows=list(chosen),
    )  # fmt: skip
    arrays = {"logits": logits, "logits.recorded": recorded}
    return Trace(arrays, ids=ids[list(chosen)].ravel().tolist(), texts=[], meta=meta)


def _decode(source: Source, data: memoryview, out: NDArray[np.float32], at: int, rows: int, window: int) -> None:
    """The log probabilities of one window from byte `at` on, into the first `rows` rows of `out`."""
    words = out.shape[1]
    record = 8 + 4 * ((words + 1) // 2)
    for row, place in enumerate(range(at, at + rows * record, record)):
        scale, lowest = np.frombuffer(data, "<f4", 2, place)
        line = out[row]
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused below
            np.multiply(np.frombuffer(data, "<u2", words, place + 8), scale, out=line, casting="unsafe")
            line += lowest
            total = float(np.exp(line.astype(np.float64)).sum())
        if not (scale >= 0 and abs(total - 1) <= _OFF + 1.2e-7 * words):  # each floored word adds up to e^-16
            source.refuse(
                f"window {window}, row {row} of those recorded: probabilities add up to {total:.4g}; these are no log "
                "probabilities"
            )


def _chosen(said: Said, windows: int, size: int) -> list[int]:
    """The windows to decode; ArgumentError when there is no such window, or all are too many to take unasked."""
    if said.windows is None:
        if windows * size > _MOST:
            raise ArgumentError(
                f"its {windows} windows decode to {windows * size:,} bytes; name those to read, such as "
                f"windows=range({max(1, _MOST // size)})"
            )
        return list(range(windows))
    wrong = [window for window in said.windows if window >= windows]
    if wrong or not said.windows:
        raise ArgumentError(
            f"there is no window {wrong[0] if wrong else 'in windows='}; windows are 0 to {windows - 1}"
        )
    return list(said.windows)
