"""Trace files: one ordinary safetensors file that any safetensors reader opens; docs/trace-format.md specifies it.

Tensors are the trace's arrays under their tap paths, and the tokens as `tokens.ids` (T,) int64, `tokens.text` u8 (all
texts as UTF-8, one after the other), `tokens.text_offsets` (T+1,) int64 and `tokens.passes` (P, 2) int64.
`__metadata__` has one entry per entry of `trace.meta`, all strings: the names in `_PLAIN` as they are, every other as
JSON, and `format` and `format_version`, by which a trace is recognised.

There are two layouts. `save_trace` writes the compact one. A recording (`colibri_lab.recording_file`) has room behind
each tensor, and may have been left in the middle of writing its header: it is cut to the passes that all tensors have.

The writer is our own because saving twice must give the same bytes, and the safetensors library writes metadata in
random order. The reader lets the library check the header, then maps the file: arrays are read when they are used, so a
trace may be larger than memory. A mapped file must not be shortened while its trace is in use (replacing it by rename,
as `save_trace` does, is safe).
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_lab._files import local_path, must_exist, whole_file
from colibri_lab.errors import ArgumentError, FileError, FormatError, UnsupportedError
from colibri_lab.sniff import not_safetensors
from colibri_lab.trace import Trace, check_values
from colibri_lab.utf8_texts import Utf8Texts

__all__ = [
    "EDITS",
    "FORMAT_VERSION",
    "dtype_name",
    "is_trace",
    "load_trace",
    "quiet",
    "recording_metadata",
    "save_trace",
]

Array = NDArray[Any]

FORMAT = "colibri-trace"
FORMAT_VERSION = 1
EDITS = "edits.log"  # of a recording: lines of JSON, each saying how many edits of before stay and which are added

_PLAIN = ("producer", "producer_version", "model_type", "model_identity", "gate_rule")
_KEPT = ("format", "format_version", "layout", "aliases")  # entries that are the file's own
_TOKENS = ("tokens.ids", "tokens.text", "tokens.text_offsets", "tokens.passes")
_RECORDING = "recording"
_HEADS = ".attn.weights"  # (heads, tokens, tokens)
_LONGEST_HEADER = 8 + 100_000_000  # what the safetensors library reads
_TRIES = 1000  # a file that is being recorded may change while its header is read
_BLOCK = 1 << 22  # elements written at a time
_DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
}
_NUMPY_NAMES = {code: name for name, code in _DTYPES.items()}
_QUIET = {
    "float16": (np.uint16, 0x7E00),
    "bfloat16": (np.uint16, 0x7FC0),
    "float32": (np.uint32, 0x7FC00000),
    "float64": (np.uint64, 0x7FF8 << 48),
}


def quiet(array: Array) -> Array:
    """The array with every NaN as the one quiet NaN of its dtype (0x7FC00000 in float32); itself if it has none."""
    if array.dtype.name not in _QUIET:
        return array
    nan = np.isnan(array)
    if not nan.any():
        return array
    unsigned, bits = _QUIET[array.dtype.name]
    out = array.copy()
    out.view(unsigned)[nan] = bits
    return out


# ---- writing ----


def save_trace(trace: Trace, path: str | PathLike[str]) -> None:
    """Writes `trace` to `path`, under a temporary name first, so that nobody meets half a file. `~` is the home folder.

    The same trace gives the same bytes. NaN are written as the quiet NaN of their dtype.
    Raises ArgumentError for a meta entry that JSON cannot hold or a name that the form keeps for itself,
    UnsupportedError for a dtype without a safetensors name, FileError when the file cannot be written.
    """
    target = local_path(path)
    tensors = _tensors(trace)
    header = _header(tensors, _metadata({name: trace.meta[name] for name in trace.meta if name != "passes"}))
    with whole_file(target, "the trace") as handle:
        handle.write(len(header).to_bytes(8, "little") + header)
        for array in tensors.values():
            for block in _blocks(array):
                handle.write(quiet(block).tobytes())


def _tensors(trace: Trace) -> dict[str, Array]:
    """All tensors of the file, widest dtype first so that each lies at a multiple of its item size."""
    texts = trace.utf8_texts()
    tokens = {
        "tokens.ids": trace.token_ids(),
        "tokens.text": texts.data,
        "tokens.text_offsets": texts.offsets,
        "tokens.passes": np.array(trace.passes, np.int64).reshape(-1, 2),
    }
    for name in trace:
        if name in tokens or name in ("__metadata__", EDITS):
            raise ArgumentError(f"'{name}' is a name that trace files keep for themselves; give the array another")
        _check_name(name)
    both = {name: _little(array) for name, array in {**tokens, **trace}.items()}
    for name, array in both.items():
        if array.dtype.name not in _DTYPES:
            raise UnsupportedError(
                f"'{name}' is {array.dtype}, which safetensors has no name for; it takes {', '.join(_DTYPES)}"
            )
    return dict(sorted(both.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))


def _little(array: Any) -> Any:
    return array.astype(array.dtype.newbyteorder("<")) if array.dtype.byteorder == ">" else array


def dtype_name(dtype: np.dtype[Any]) -> str:
    """What safetensors calls a dtype."""
    return _DTYPES[dtype.name]


def recording_metadata(meta: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, str]:
    """`__metadata__` of a recording, but for what grows (passes, edits). `aliases`: taps whose rows are those of
    another.
    """
    own = {"layout": _RECORDING, "aliases": json.dumps(aliases, sort_keys=True)}
    return {**_metadata(meta), **own}


def _metadata(meta: Mapping[str, Any]) -> dict[str, str]:
    out = {"format": FORMAT, "format_version": str(FORMAT_VERSION)}
    for name in meta:
        if name in _KEPT:
            raise ArgumentError(f"meta['{name}'] is an entry that trace files keep for themselves; name it otherwise")
        _check_name(name)
    for name in sorted(meta):
        try:
            text = str(meta[name]) if name in _PLAIN else json.dumps(meta[name], ensure_ascii=False, sort_keys=True)
        except (TypeError, ValueError, RecursionError) as error:
            raise ArgumentError(f"meta['{name}'] cannot be written as JSON: {error}") from error
        out[name] = text.encode("utf-8", "backslashreplace").decode()  # a path may hold bytes that are not UTF-8
    return out


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or any("\ud800" <= letter <= "\udfff" for letter in name):
        raise ArgumentError(f"{name!r:.80} is no name for a trace file, whose names are Unicode texts")


def _header(tensors: Mapping[str, Array], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    position = 0
    for name, array in tensors.items():
        end = position + array.nbytes
        entries[name] = {
            "dtype": _DTYPES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def _blocks(array: Array) -> Iterator[Array]:
    """The array in row-major order, a bounded number of elements at a time."""
    if array.flags.c_contiguous or array.ndim < 2:
        flat = array.reshape(-1)
        for start in range(0, flat.size, _BLOCK):
            yield flat[start : start + _BLOCK]
    else:
        for row in array:
            yield from _blocks(row)


# ---- reading ----


def load_trace(path: str | PathLike[str]) -> Trace:
    """Opens a trace file: it is mapped, and data are read when they are used; ids, offsets and texts are checked now.

    Raises FileError when the file cannot be read, FormatError with what it is when it is no trace, or with what is
    wrong in it.
    """
    file = local_path(path)
    entries, metadata, mapped, start = _mapped(file)
    data = memoryview(mapped)[start:]
    if metadata.get("format") != FORMAT:
        some = ", ".join(f"'{name}'" for name in list(entries)[:3]) or "no tensors"
        raise FormatError(
            f"{file} is a safetensors file but no trace (it holds {some}); model weights are opened with lab.open"
        )
    if metadata.get("format_version") != str(FORMAT_VERSION):
        version = metadata.get("format_version", "")
        raise FormatError(f"{file} is a trace of format version '{version:.20}'; this program reads {FORMAT_VERSION}")
    try:
        arrays = {
            name: _array(name, entry, data) for name, entry in entries.items() if not name.startswith("__unused__.")
        }
        meta = _meta(metadata)
        if metadata.get("layout") == _RECORDING:
            arrays = _complete(arrays, meta.get("top_k"))
            meta["edits"] = _edits(arrays.pop(EDITS))
            arrays |= _aliases(metadata.get("aliases", "{}"), arrays)
        if "tokens.passes" in arrays:
            passes = _pairs(arrays.pop("tokens.passes")).tolist()
            meta.setdefault("passes", passes)  # a file may say them there instead
        ids, texts = _tokens(arrays)
        trace = Trace(arrays, ids=ids, texts=texts, meta=meta)
        check_values(trace)
    except (FormatError, ArgumentError) as error:
        raise FormatError(f"{file}: {error}") from error
    trace.mapped = mapped
    return trace


# ---- a recording ----


def _complete(arrays: dict[str, Array], top_k: Any) -> dict[str, Array]:
    """The tensors of a recording, cut to the passes that all of them have: writing the header may have been broken off,
    and rows of closed passes never change.
    """
    missing = [name for name in (*_TOKENS, EDITS) if name not in arrays]
    if missing or not isinstance(top_k, int) or top_k < 0:
        raise FormatError(f"a recording without {', '.join(missing) or 'a sound top_k'}")
    passes, fences = _pairs(arrays["tokens.passes"]), arrays["tokens.text_offsets"]
    axes = {name: 3 if name.endswith(_HEADS) else 1 for name in arrays}
    if fences.dtype != np.int64 or any(array.ndim < axes[name] for name, array in arrays.items()):
        raise FormatError("a recording whose tensors have no rows, or whose tokens.text_offsets are no int64")
    stops = [0, *passes[:, 1].tolist()]

    def rows(name: str, count: int) -> int:
        if name in ("tokens.passes", EDITS) or name.endswith(".dispatch.offsets"):
            return count
        if name == "tokens.text":
            return int(fences[stops[count]])
        return int(stops[count]) * (top_k if ".dispatch." in name else 1) + (name == "tokens.text_offsets")

    def has(count: int) -> bool:
        if not 0 <= stops[count] < len(fences):
            return False
        return all(
            name == EDITS or (array.shape[1] if name.endswith(_HEADS) else len(array)) >= rows(name, count)
            for name, array in arrays.items()
        )

    count = len(passes)
    while count and not has(count):
        count -= 1
    if not has(count):
        raise FormatError("a recording of which not even the beginning is there")
    n = stops[count]
    return {
        name: array if name == EDITS else array[:, :n, :n] if name.endswith(_HEADS) else array[: rows(name, count)]
        for name, array in arrays.items()
    }


def _edits(log: Array) -> list[Any]:
    edits: list[Any] = []
    try:
        for line in log.tobytes().decode().split("\n")[:-1]:
            change = json.loads(line)
            edits = edits[: change["keep"]] + change["add"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise FormatError(f"{EDITS} is broken: {error!r:.80}") from error
    return edits


def _aliases(text: str, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """The arrays of the taps whose rows are those of another."""
    try:
        return {path: arrays[same] for path, same in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise FormatError(f"the metadata entry 'aliases' is broken: {error!r:.80}") from error


def _pairs(passes: Array) -> Array:
    if passes.dtype != np.int64 or passes.ndim != 2 or passes.shape[1] != 2:
        raise FormatError(f"tokens.passes must be pairs of int64; it is {passes.dtype} of shape {passes.shape}")
    return passes


# ---- the file ----


def is_trace(path: str | PathLike[str]) -> bool:
    """Whether a file says of itself that it is a trace, sound or not; False for one that is no safetensors file."""
    try:
        return _mapped(local_path(path))[1].get("format") == FORMAT
    except (FileError, FormatError):
        return False


def _mapped(file: Path) -> tuple[dict[str, Any], dict[str, str], mmap.mmap, int]:
    """Tensor entries and metadata of a header that the library has found sound, the mapped file, where data begin."""
    from safetensors import SafetensorError, safe_open

    must_exist(file)
    try:
        wrong = not_safetensors(file)
        if wrong is not None:
            raise FormatError(f"{file} is {wrong}, not a trace")
        with file.open("rb") as handle:
            whole = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        start = min(8 + int.from_bytes(whole[:8], "little"), len(whole), _LONGEST_HEADER)
        for remaining in reversed(range(_TRIES)):
            header = whole[:start]
            try:
                with safe_open(file, framework="numpy"):  # checks sizes, offsets, overlaps and coverage
                    pass
            except SafetensorError:
                if not remaining or header == whole[:start]:
                    raise
            if header == whole[:start]:  # else a recording went on meanwhile
                break
    except OSError as error:
        if isinstance(error, FileError):
            raise
        raise FileError(f"cannot read {file}: {error.strerror or error}") from error
    except SafetensorError as error:
        raise FormatError(f"{file} is not a sound safetensors file: {error}") from error
    entries = json.loads(header[8:])
    metadata = entries.pop("__metadata__", None) or {}
    return entries, metadata, whole, start


def _array(name: str, entry: Mapping[str, Any], data: memoryview) -> Array:
    numpy_name = _NUMPY_NAMES.get(entry["dtype"])
    if numpy_name is None:
        raise FormatError(f"'{name}' has the dtype {entry['dtype']}, which no trace uses")
    if numpy_name == "bfloat16":
        import ml_dtypes

        dtype = np.dtype(ml_dtypes.bfloat16)
    else:
        dtype = np.dtype(numpy_name)
    begin, end = entry["data_offsets"]
    flat = np.frombuffer(data[begin:end], dtype)
    try:
        return flat.reshape(entry["shape"])
    except (ValueError, OverflowError) as error:  # more axes, or a longer one beside an empty one, than NumPy has
        raise FormatError(f"'{name}' has a shape that makes no sense: {entry['shape']!s:.60}") from error


def _tokens(arrays: dict[str, Array]) -> tuple[Array, Utf8Texts]:
    """Takes the three token tensors out of `arrays` and checks them."""
    missing = [name for name in ("tokens.ids", "tokens.text", "tokens.text_offsets") if name not in arrays]
    if missing:
        raise FormatError(f"the tensor '{missing[0]}' is missing")
    ids, text, offsets = (arrays.pop(name) for name in ("tokens.ids", "tokens.text", "tokens.text_offsets"))
    if ids.ndim != 1 or ids.dtype != np.int64 or ids.min(initial=0) < -1:
        raise FormatError("tokens.ids must be a list of int64 ids, none negative but −1 (not recorded)")
    texts = Utf8Texts(text, offsets)
    texts.check(len(ids))
    return ids, texts


def _meta(metadata: Mapping[str, str]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in metadata.items():
        if name in _KEPT:
            continue
        try:
            out[name] = value if name in _PLAIN else json.loads(value)
        except (ValueError, RecursionError) as error:
            raise FormatError(f"the metadata entry '{name}' is not JSON: {value!r:.60}") from error
    return out
