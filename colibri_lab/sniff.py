"""What a file is that should be safetensors and is not: the sentence a person needs after a failed download."""

from __future__ import annotations

from pathlib import Path

__all__ = ["not_safetensors"]

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
    (b"\x1f\x8b", "a gzip archive"),
    (b"{", "a JSON text"),
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
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    for start, what in _KNOWN:
        if head.startswith(start) or text.startswith(start):
            return what
    if size < 8:
        return f"too short for any header ({size} bytes)"
    length = int.from_bytes(head[:8], "little")
    if length > size - 8:
        return f"cut short or no safetensors at all: its header claims {length} bytes and the file has {size}"
    return "no safetensors file: no JSON header follows its length"
