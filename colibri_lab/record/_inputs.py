"""What a caller gives as input, as rows of token ids without padding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab.errors import ArgumentError
from colibri_lab.tokenizer import Tokenizer

__all__ = ["sequences"]

Array = NDArray[Any]
_IGNORED = {"token_type_ids", "special_tokens_mask", "offset_mapping", "length"}  # tokenizers give them, models here do
# not read them


def sequences(inputs: Any, tokenizer: Callable[[], Tokenizer], vocab_size: int) -> tuple[list[list[int]], bool]:
    """(ids of every sequence, whether several were asked for).

    A text, a flat row of ids, a list of texts, rows of ids (2-D or of different lengths), or what a tokenizer returns:
    `input_ids` with `attention_mask`, whose zeros, left or right, are padding and are taken out.
    Raises ArgumentError, naming the row and place, for anything else.
    """
    mask = None
    if isinstance(inputs, Mapping):
        unknown = sorted(set(map(str, inputs)) - {"input_ids", "attention_mask"} - _IGNORED)
        if "input_ids" not in inputs or unknown:
            raise ArgumentError(
                "a batch holds input_ids and, if it is padded, attention_mask; this one has "
                f"{', '.join(map(str, inputs)) or 'nothing'}"
            )
        inputs, mask = inputs["input_ids"], inputs.get("attention_mask")
    if isinstance(inputs, str):
        rows, several = [np.array(tokenizer().encode(inputs), np.int64)], False
    elif isinstance(inputs, list | tuple) and inputs and all(isinstance(text, str) for text in inputs):
        rows, several = [np.array(tokenizer().encode(text), np.int64) for text in inputs], True
    else:
        rows, several = _rows(inputs, "input_ids")
    if mask is not None:
        rows = _unpadded(rows, _rows(mask, "attention_mask")[0])
    for number, row in enumerate(rows):
        _check(row, f"sequence {number}" if several else "the input", vocab_size)
    return [[int(token) for token in row] for row in rows], several


def _rows(values: Any, name: str) -> tuple[list[Array], bool]:
    """Rows of whole numbers; one row of a 2-D array counts as one sequence."""
    host = _host(values)
    if isinstance(host, list | tuple) and host and all(np.ndim(_host(row)) == 1 for row in host):
        parts = [np.asarray(_host(row)) for row in host]
        rows = parts
    else:
        try:
            array = np.asarray(host)
        except ValueError:
            raise ArgumentError(f"{name} are nested unevenly; give one row of token ids per sequence") from None
        if array.ndim not in (1, 2):
            raise ArgumentError(
                f"the input is a text, a row of token ids or rows of them; this is {array.dtype} of shape {array.shape}"
            )
        rows = list(np.atleast_2d(array))
    for row in rows:
        if row.size and row.dtype.kind not in "iub":
            raise ArgumentError(f"{name} are whole numbers; these are {row.dtype}: {row[:4].tolist()!r:.80}")
    return [row.astype(np.int64) if row.size else np.empty(0, np.int64) for row in rows], len(rows) > 1


def _host(values: Any) -> Any:
    """A tensor of any device as a NumPy array; everything else as it is."""
    if not hasattr(values, "detach"):
        return values
    try:
        return values.detach().cpu().numpy()
    except (TypeError, NotImplementedError, RuntimeError) as error:  # sparse, without data, of a dtype of torch alone
        raise ArgumentError(f"the input is a tensor that cannot be read as rows of numbers: {error!s:.160}") from error


def _unpadded(rows: list[Array], masks: list[Array]) -> list[Array]:
    if [len(row) for row in rows] != [len(mask) for mask in masks]:
        raise ArgumentError(
            f"attention_mask has rows of {[len(mask) for mask in masks]!s:.80} entries, input_ids of "
            f"{[len(row) for row in rows]!s:.80}"
        )
    out = []
    for number, (row, mask) in enumerate(zip(rows, masks, strict=True)):
        kept = np.flatnonzero(mask)
        if not ((mask == 0) | (mask == 1)).all() or (kept.size and kept[-1] - kept[0] + 1 != kept.size):
            raise ArgumentError(
                f"attention_mask, row {number}: padding stands left or right of one run of ones; this is "
                f"{mask.tolist()!s:.80}"
            )
        out.append(row[kept])
    return out


def _check(row: Array, what: str, vocab_size: int) -> None:
    if not row.size:
        raise ArgumentError(f"{what} has no token; give at least one")
    wrong = np.flatnonzero((row < 0) | (row >= vocab_size))
    if wrong.size:
        raise ArgumentError(
            f"{what}, place {wrong[0]}: token id {row[wrong[0]]} is outside the vocabulary of {vocab_size}"
        )
