"""A file to import: its first bytes for recognition, bounded reading, and errors that name it.

Nothing here allocates by what a file claims: a length is compared with what is there before a byte is read.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from colibri_lab.errors import FileError, FormatError
from colibri_lab.progress import Progress, shown

__all__ = ["Reader", "Source"]

_HEAD = 1 << 16  # bytes looked at for recognition
_LONGEST_LINE = 1 << 26  # of a text format; one JSON row of 2,048 tokens has some hundred kilobytes
_REPORT_EVERY = 1 << 20  # bytes between two reports of progress


class Source:
    """One file: `path`, `size`, `head` (its first 64 KiB)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.size = path.stat().st_size
            with path.open("rb") as handle:
                self.head = handle.read(_HEAD)
        except OSError as error:
            raise FileError(f"cannot read {path}: {error.strerror or error}") from error

    def refuse(self, why: str) -> NoReturn:
        """Raises FormatError: the file's name and `why`."""
        raise FormatError(f"{self.path}: {why}")

    @cached_property
    def text(self) -> str | None:
        """The head as text, None when it is none (a NUL, or not UTF-8)."""
        head = self.head.removeprefix(b"\xef\xbb\xbf")
        try:
            text = head.decode()
        except UnicodeDecodeError as error:
            if error.start < len(head) - 4 or self.size <= _HEAD:
                return None
            text = head[: error.start].decode()  # the head ends inside a character
        return None if "\0" in text else text

    @property
    def first_line(self) -> str:
        """The first line of a text, without its end; "" when the head is no text."""
        return (self.text or "").partition("\n")[0].rstrip("\r")

    def whole(self) -> bytes:
        """All bytes of the file."""
        try:
            return self.path.read_bytes()
        except OSError as error:
            raise FileError(f"cannot read {self.path}: {error.strerror or error}") from error

    def mapped(self) -> memoryview:
        """The file as bytes that are read where they are used."""
        try:
            with self.path.open("rb") as handle:
                return memoryview(mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ))
        except (OSError, ValueError) as error:
            raise FileError(f"cannot read {self.path}: {error}") from error

    def json(self) -> Any:
        """The JSON value that the file holds; raises FormatError when it holds none."""
        return self.parse_json(self.whole().removeprefix(b"\xef\xbb\xbf"), "the file")

    def parse_json(self, raw: bytes, what: str) -> Any:
        """One JSON value; raises FormatError naming `what` and where it breaks."""
        try:
            return json.loads(raw)
        except (ValueError, RecursionError) as error:
            self.refuse(f"{what} is no JSON, or was cut short: {error}")

    def lines(self, progress: Progress, label: str) -> Iterator[tuple[int, str]]:
        """(number from 1, line without its end) of a text, streamed; the last line must have an end as well.

        Raises FormatError for a line that is no text, is too long, or was cut.
        """
        try:
            with self.path.open("rb") as handle, shown(progress, self.size, "B", label) as report:
                done, told, number = 0, 0, 0
                while raw := handle.readline(_LONGEST_LINE):
                    number += 1
                    done += len(raw)
                    if not raw.endswith(b"\n"):
                        self.refuse(f"line {number} has no end: the file was cut short (or a line is far too long)")
                    if report is not None and done - told >= _REPORT_EVERY:
                        report(done / self.size)
                        told = done
                    try:
                        yield number, raw.removeprefix(b"\xef\xbb\xbf" if number == 1 else b"").decode().rstrip("\r\n")
                    except UnicodeDecodeError:
                        self.refuse(f"line {number} is no text: {raw[:40]!r}")
        except OSError as error:
            if isinstance(error, FileError):
                raise
            raise FileError(f"cannot read {self.path}: {error.strerror or error}") from error


class Reader:
    """Little-endian values one after the other out of bytes; what is missing raises FormatError and says where."""

    def __init__(self, source: Source, data: bytes | memoryview, what: str) -> None:
        self.source, self.what, self.at = source, what, 0
        self.data = memoryview(data)

    @property
    def left(self) -> int:
        """Bytes that were not read yet."""
        return len(self.data) - self.at

    def take(self, size: int, what: str) -> memoryview:
        """The next `size` bytes."""
        if not 0 <= size <= self.left:
            self.source.refuse(
                f"{self.what} is cut short or damaged: {what} needs {size} bytes at byte {self.at} and {self.left} are "
                "left"
            )
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, code: str, what: str) -> Any:
        """One value by its `struct` letter, such as "i" or "Q"."""
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code), what))[0]

    def string(self, code: str, limit: int, what: str) -> str:
        """A text behind its length of type `code`, at most `limit` bytes long."""
        length = self.number(code, f"the length of {what}")
        if not 0 <= length <= limit:
            self.source.refuse(f"{what} claims a length of {length}; at most {limit} makes sense")
        try:
            return str(self.take(length, what), "utf-8")
        except UnicodeDecodeError:
            self.source.refuse(f"{what} is no text")
