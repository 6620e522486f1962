"""Traces written for other programs: ROUTE_TRACE, vLLM's arrays, Parquet. Reached as `trace.export(path, format)`.

Expert ids come back unchanged when the file is opened again. What a format cannot hold is refused, never left out in
silence or made up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from os import PathLike
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab._files import local_path, whole_file
from colibri_lab.errors import ArgumentError, NotCapturedError, UnsupportedError, nearest
from colibri_lab.trace import Trace

__all__ = ["EXPORTS", "export"]

_ROWS = 1 << 16  # token rows of one layer worked on at a time

Array = NDArray[Any]


def export(trace: Trace, path: str | PathLike[str], format: str) -> None:
    """Writes the routing of `trace` to `path`, under a temporary name first.

    - "route_trace": the text of JustVugg/colibri, one line per token and layer with 4 decimals of each gate. A token
      without a route cannot be written, and there must be gates.
    - "vllm": int32 [tokens, layers with experts, k], −1 where nothing was recorded; a `.npy`, or a `.npz` that holds
      `routed_experts` and `token_ids`.
    - "parquet": one row per token, layer and slot with the columns token, token_id, text, pass, layer, slot, expert
      (null where none), gate, score and logit (null where not recorded); the meta of the trace in the file's.
      Needs pyarrow: pip install 'colibri-lab[parquet]'.

    Raises ArgumentError for an unknown format, or a trace that the format cannot hold; NotCapturedError for a trace
    without expert ids or gates; UnsupportedError when pyarrow is missing; FileError when the file cannot be written.
    """
    if not isinstance(format, str) or format not in EXPORTS:
        raise ArgumentError(
            f"there is no export {format!r:.80}{nearest(str(format), EXPORTS)}; exports: {', '.join(EXPORTS)}"
        )
    if not trace.moe_layers or not trace.n_tokens:
        raise NotCapturedError("this trace has no token with a route: nothing to export")
    _ids(trace, trace.moe_layers[0])
    EXPORTS[format](trace, local_path(path))


def _ids(trace: Trace, layer: int) -> Array:
    return trace[f"layers.{layer}.moe.expert_ids"]


# ---- ROUTE_TRACE ----


def _route_trace(trace: Trace, path: Path) -> None:
    for layer in trace.moe_layers:
        _ = trace[f"layers.{layer}.moe.gates"]
        empty = np.flatnonzero((_ids(trace, layer) < 0).all(axis=1))
        if empty.size:
            raise ArgumentError(
                f"token {int(empty[0])} has no route in layer {layer}, and ROUTE_TRACE has no way to leave one out"
            )
    with whole_file(path, "the ROUTE_TRACE") as handle:
        call = 0
        for start, stop in trace.passes:
            for layer in trace.moe_layers:
                _route_lines(trace, layer, start, stop, call, handle)
                call += 1


def _route_lines(trace: Trace, layer: int, start: int, stop: int, call: int, handle: IO[bytes]) -> None:
    gates = trace[f"layers.{layer}.moe.gates"]
    for first in range(start, stop, _ROWS):
        rows = slice(first, min(first + _ROWS, stop))
        pairs = zip(_ids(trace, layer)[rows].tolist(), gates[rows].astype(np.float64).tolist(), strict=True)
        for row, (ids, values) in enumerate(pairs, first - start):
            chosen = " ".join(f"{e}:{g:.4f}" for e, g in zip(ids, values, strict=True) if e >= 0)
            handle.write(f"{call} {row} {layer} {chosen}\n".encode())


# ---- vLLM ----


def _vllm(trace: Trace, path: Path) -> None:
    if path.suffix not in (".npy", ".npz"):
        raise ArgumentError(f"vLLM's arrays go to a .npy (routes) or a .npz (routes and token ids), not '{path.name}'")
    shape = (trace.n_tokens, len(trace.moe_layers), trace.top_k)
    if path.suffix == ".npz":
        routes = np.stack([_ids(trace, layer).astype(np.int32) for layer in trace.moe_layers], axis=1)
        ids = trace.token_ids()
        known = {"token_ids": ids} if ids.min() >= 0 else {}
        with whole_file(path, "the arrays") as handle:
            np.savez(handle, routed_experts=routes, **known)  # type: ignore[arg-type]
        return
    with whole_file(path, "the array") as handle:
        header = {"descr": "<i4", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(handle, header)
        for first in range(0, shape[0], _ROWS):
            rows = slice(first, first + _ROWS)
            block = np.stack([_ids(trace, layer)[rows] for layer in trace.moe_layers], axis=1)
            handle.write(block.astype("<i4").tobytes())


# ---- Parquet ----


def _parquet(trace: Trace, path: Path) -> None:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UnsupportedError("Parquet is written by pyarrow: pip install 'colibri-lab[parquet]'") from None
    import json

    try:
        meta = json.dumps(trace.meta, ensure_ascii=False).encode("utf-8", "backslashreplace")
    except (TypeError, ValueError, RecursionError) as error:
        raise ArgumentError(f"the meta of this trace cannot be written as JSON: {error}") from error
    schema = pyarrow.schema(
        [
            ("token", pyarrow.int64()), ("token_id", pyarrow.int64()), ("text", pyarrow.string()),
            ("pass", pyarrow.int32()), ("layer", pyarrow.int32()), ("slot", pyarrow.int32()),
            ("expert", pyarrow.int32()), ("gate", pyarrow.float32()), ("score", pyarrow.float32()),
            ("logit", pyarrow.float32()),
        ],
        metadata={"colibri": meta},
    )  # fmt: skip
    with whole_file(path, "the Parquet file") as handle, pyarrow.parquet.ParquetWriter(handle, schema) as writer:
        for columns in _columns(trace):
            arrays = [
                pyarrow.array(columns[field.name][0], field.type, mask=columns[field.name][1]) for field in schema
            ]
            writer.write_table(pyarrow.Table.from_arrays(arrays, schema=schema))


def _columns(trace: Trace) -> Iterator[dict[str, tuple[Any, Array | None]]]:
    """(values, where null) by column, a bounded number of rows at a time."""
    of_pass = np.repeat(np.arange(len(trace.passes)), [stop - start for start, stop in trace.passes])
    token_ids, all_texts, k = trace.token_ids(), trace.utf8_texts(), trace.top_k
    for layer in trace.moe_layers:
        for first in range(0, len(token_ids), _ROWS):
            rows = slice(first, min(first + _ROWS, len(token_ids)))
            ids = _ids(trace, layer)[rows].astype(np.int32)
            tokens = np.repeat(np.arange(rows.start, rows.stop), k)
            none = ids.ravel() < 0
            known = token_ids[tokens]
            texts = np.array(all_texts.strings(rows.start, rows.stop), object)
            yield {
                "token": (tokens, None),
                "token_id": (known, known < 0),
                "text": (np.repeat(texts, k), None),
                "pass": (of_pass[tokens].astype(np.int32), None),
                "layer": (np.full(len(tokens), layer, np.int32), None),
                "slot": (np.tile(np.arange(k, dtype=np.int32), len(ids)), None),
                "expert": (ids.ravel(), none),
                "gate": _of_slots(trace.get(f"layers.{layer}.moe.gates"), rows, None, none),
                "score": _of_slots(trace.get(f"layers.{layer}.moe.scores"), rows, ids, none),
                "logit": _of_slots(trace.get(f"layers.{layer}.moe.router_logits"), rows, ids, none),
            }


def _of_slots(values: Array | None, rows: slice, ids: Array | None, none: Array) -> tuple[Array, Array]:
    """Numbers per slot (of the chosen experts, when `values` has all), null where nothing was recorded."""
    if values is None:
        return np.zeros(len(none), np.float32), np.ones(len(none), bool)
    block = values[rows].astype(np.float32)
    if ids is not None:
        block = np.take_along_axis(block, np.maximum(ids, 0), axis=1)
    return block.ravel(), none


EXPORTS: dict[str, Callable[[Trace, Path], None]] = {"route_trace": _route_trace, "vllm": _vllm, "parquet": _parquet}
"""Writers by name."""
