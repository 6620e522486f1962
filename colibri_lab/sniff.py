"""What a file is that should be safetensors or JSON and is not: the sentence a person needs after a failed download."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from colibri_lab.errors import FileError, FormatError

__all__ = ["not_safetensors", "read_json"]

_JSON = "a JSON text"

# First bytes of what is met in place of weights.
_KNOWN = (
    (
        b"version https://git-lfs.github.com/spec/",
        "a Git LFS pointer (the download fetched the pointer, not the file; run git lfs pull)",
    ),
    (b"<!", "a web page (a failed download)"),
    (b"<h", "a web page (a failed download)"),
    (b"<?", "an XML text (a failed download)"),
    (b"GGUF", "a GGUF file (llama.cpp)"),
    (b"PK\x03\x04", "a zip archive (PyTorch .bin or .pt files are such pickles; they are never opened here)"),
    (b"\x80", "a Python pickle (never opened here, since loading one runs code)"),
    (b"\x93NUMPY", "a NumPy .npy file"),
    (b"PAR1", "a Parquet table (traces are written as one for other programs, and not read from it)"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"{", _JSON),
)


def not_safetensors(path: Path) -> str | None:
    """A phrase such as "a Git LFS pointer" for a file that cannot be safetensors; None when its first bytes allow it.

    Reads 64 bytes and the size; allocates nothing by what the file claims. Raises OSError as `open` does.
    """
    if path.is_dir():
        return "a folder"
    if not path.is_file() and path.exists():
        return "no regular file (a pipe or a device)"
    size = path.stat().st_size
    with path.open("rb") as handle:
        head = handle.read(64)
    if size == 0:
        return "an empty file"
    if len(head) >= 9 and int.from_bytes(head[:8], "little") <= size - 8 and head[8:9] == b"{":
        return None
    known = _known(head)
    if known is not None:
        return known
    if size < 8:
        return f"too short for any header ({size} bytes)"
    length = int.from_bytes(head[:8], "little")
    if length > size - 8:
        return f"cut short or no safetensors at all: its header claims {length} bytes and the file has {size}"
    return "no safetensors file: no JSON header follows its length"


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object that a small file beside a checkpoint holds.

    Raises FileError when it cannot be read, FormatError with what it is when it holds none: not JSON (a byte order mark
    included, as in transformers), or JSON of another kind.
    """
    try:
        if file.exists() and not file.is_file():
            raise FormatError(f"{file} is {not_safetensors(file)}, not JSON")
        raw = file.read_bytes()
    except OSError as error:
        raise FileError(f"cannot read {file}: {error.strerror or error}") from error
    try:
        value = json.loads(raw.decode())
    except (ValueError, RecursionError) as error:
        what = _known(raw[:64])
        raise FormatError(f"{file} is {f'not JSON: {error}' if what in (None, _JSON) else what}") from error
    if not isinstance(value, dict):
        raise FormatError(f"{file} holds a {type(value).__name__}, not an object")
    return value


def _known(head: bytes) -> str | None:
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    return next((what for start, what in _KNOWN if head.startswith(start) or text.startswith(start)), None)
