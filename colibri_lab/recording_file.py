"""The file of a recording: laid out for a whole session, filled row by row, a sound safetensors file all the while.

Behind a header of fixed length lie the tape, which the engine maps and writes, and the tokens. Each tensor has room
for the whole session; what it does not fill yet belongs to an `__unused__.{n}` tensor (U8) behind it, so the file's
size and the place of every tensor stay. The file is sparse: rows that nobody reached take no disk.

After each pass the header is written anew, in place. Numbers are padded to one width, and the entry of a tensor and
that of its tail lie in one page of 4096 bytes, the unit in which the system copies what is written. Whatever mixture of
old and new pages a killed process leaves is therefore a sound header, in which some tensors have rows of one pass more
than others: a reader takes the passes that all of them have (docs/trace-format.md).
"""

from __future__ import annotations

import json
import mmap
import os
import tempfile
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from colibri_lab._files import local_path, must_exist
from colibri_lab.errors import ArgumentError, FileError

__all__ = ["Column", "RecordingFile", "free_bytes", "target_of"]

PAGE = 4096
PATIENCE = 0.5  # seconds that a header waits for those who have the file open


@dataclass(frozen=True)
class Column:
    """One tensor of a recording."""

    name: str
    dtype: str  # the name that safetensors has for it
    row: tuple[int, ...]  # its shape but for the first axis
    row_bytes: int
    place: int  # in the data of the file; the next column begins where its room ends
    n_rows: int  # room
    grows: str = "tokens"  # or "passes"; "fences" (a row more than tokens); "bytes"; "" for one that is whole at once
    per_token: int = 1  # rows; of bytes: at most


def free_bytes(folder: Path) -> int:
    """Bytes that this process may still write to the disk of a folder."""
    with _as_file_error(folder, "ask for the free space of"):
        disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


def target_of(to: str | os.PathLike[str], weights: Sequence[str]) -> Path:
    """Where a recording goes: `to` with `~` expanded and links followed.

    Raises ArgumentError for one of the model's own files, FileError for a folder, a device, a link to nothing, or a
    folder that is not there.
    """
    path = local_path(to)
    with _as_file_error(path, "record into"):
        if path.is_symlink():
            must_exist(path)
        target = Path(os.path.realpath(path))
        if target.is_dir():
            raise FileError(f"cannot record into {path}: it is a folder; name a file in it")
        if target.exists() and not target.is_file():
            raise FileError(f"cannot record into {path}: it is there and no regular file")
        if target.is_file() and any(os.path.samefile(target, weight) for weight in weights):
            raise ArgumentError(f"cannot record into {path}: the model reads its weights from it")
        if not target.parent.is_dir():
            raise FileError(f"cannot record into {path}: there is no folder {target.parent}")
        if not os.access(target.parent, os.W_OK | os.X_OK):
            raise FileError(f"cannot record into {path}: the folder {target.parent} may not be written")
    return target


class RecordingFile:
    """A file with the given columns and metadata, under a temporary name until `put`. It is locked while open.

    Raises FileError when it cannot be made.
    """

    def __init__(self, target: Path, columns: Sequence[Column], metadata: Mapping[str, str]) -> None:
        self.target, self.columns, self.process = target, list(columns), os.getpid()
        ends = [column.place for column in self.columns[1:]]
        last = self.columns[-1]
        ends.append(last.place + last.n_rows * last.row_bytes)
        self._ends = ends
        self._width = len(str(ends[-1]))
        self._template = self._header_template(metadata)
        self._published: tuple[int, int, dict[str, int]] | None = None
        self._patience = PATIENCE
        text = self._header(0, 0, {})
        unit = max(PAGE, mmap.PAGESIZE)
        self.data_start = (8 + len(text) + unit - 1) // unit * unit
        self.n_bytes = self.data_start + ends[-1]
        self._temporary: str | None = None
        self.descriptor = -1
        try:
            with _as_file_error(target, "record into"):
                self.descriptor, self._temporary = tempfile.mkstemp(dir=target.parent, prefix=".", suffix=".part")
                _lock(self.descriptor)
                mask = os.umask(0)
                os.umask(mask)
                os.fchmod(self.descriptor, 0o666 & ~mask)  # a temporary file is born readable by its owner only
                os.ftruncate(self.descriptor, self.n_bytes)
                self.publish(0, 0, {})
        except BaseException:
            self.close()
            raise
        _RECORDED_HERE.add(self)

    # ---- what the header says ----

    def _header_template(self, metadata: Mapping[str, str]) -> str:
        """The header's text with a place of fixed width for every number that grows: rows and end of a column, length
        and beginning of what it leaves unused.
        """
        number = f"%{self._width}d"
        parts = ['{"__metadata__":' + json.dumps(dict(metadata), ensure_ascii=False).replace("%", "%%") + ","]
        length = 8 + len((parts[0] % ()).encode())
        for index, (column, end) in enumerate(zip(self.columns, self._ends, strict=True)):
            shape = "".join(f",{size}" for size in column.row)
            text = (
                f'"{column.name}":{{"dtype":"{column.dtype}","shape":[{number}{shape}],'
                f'"data_offsets":[{column.place},{number}]}},'
                f'"__unused__.{index}":{{"dtype":"U8","shape":[{number}],"data_offsets":[{number},{end}]}}'
            ) + (",", "}")[index + 1 == len(self.columns)]
            size = len(text % (0, 0, 0, 0))
            if length // PAGE != (length + size - 1) // PAGE:
                parts.append(" " * (-length % PAGE))
                length += len(parts[-1])
            parts.append(text)
            length += size
        return "".join(parts)

    def _header(self, n_tokens: int, n_passes: int, sizes: Mapping[str, int]) -> bytes:
        """The header's text for so many rows, without the spaces that fill it up."""
        whole = {"tokens": n_tokens, "fences": n_tokens + 1, "passes": n_passes}
        numbers: list[int] = []
        for column, end in zip(self.columns, self._ends, strict=True):
            if column.grows in whole:
                n = whole[column.grows] * column.per_token
            else:
                n = sizes.get(column.name, 0) if column.grows else column.n_rows
            stop = column.place + n * column.row_bytes
            numbers += (n, stop, end - stop, stop)
        return (self._template % tuple(numbers)).encode()

    def publish(self, n_tokens: int, n_passes: int, sizes: Mapping[str, int]) -> None:
        """Writes the header for so many rows; `sizes`: bytes of the columns that grow by bytes. The data are there."""
        state = n_tokens, n_passes, dict(sizes)
        if state == self._published:
            return
        text = self._header(*state)
        header = (self.data_start - 8).to_bytes(8, "little") + text + b" " * (self.data_start - 8 - len(text))
        from colibri_lab._engine import core

        with _as_file_error(self.target, "record into"):
            # Nobody should read the header while it changes: who opens the file now waits there, and who has it open
            # gets time to read the header: less each time that it was in vain, since somebody keeps it open.
            alone = core.write_alone(self.descriptor, header, 0, self._patience)
            self._patience = PATIENCE if alone else max(self._patience / 4, 0.001)
        self._published = state

    # ---- what lies in it ----

    def write(self, place: int, data: bytes) -> None:
        """Puts bytes at a place of the data."""
        with _as_file_error(self.target, "record into"):
            done = 0
            while done < len(data):
                done += os.pwrite(self.descriptor, data[done:], self.data_start + place + done)

    def check_room(self, start: int, stop: int) -> None:
        """Before rows of the tokens [start, stop) are written: raises FileError, with the bytes, when the disk has no
        room for them; what is there stays.

        Nothing is allocated ahead: the system would have to convert each reserved page when it is written, which
        makes a recording a third slower. Should another program take the room in between, the engine says so.
        """
        need, left = self._bytes_of(start, stop), free_bytes(self.target.parent)
        if need > left:
            more = stop - start
            raise FileError(
                f"cannot record {more} more token{'s' * (more > 1)} into {self.target}: they need {need} bytes of disk "
                f"and {left} are left; what is recorded stays"
            )

    def _bytes_of(self, start: int, stop: int) -> int:
        """Of the rows of the tokens [start, stop), at most."""
        total = 0
        for column in self.columns:
            if column.grows:
                total += ((stop - start) * column.per_token + (column.grows == "fences")) * column.row_bytes
            else:  # (heads, tokens, tokens): some lines of each head
                total += column.n_rows * (stop - start) * (column.row_bytes // column.row[0])
        return total

    # ---- its name ----

    def put(self, before: RecordingFile | None = None) -> None:
        """Gives the file its name. In the place of `before` (the file that this session recorded into until now), or
        of any other that nobody records into.

        Raises FileError when another session records there, or when the file that is there is no longer `before`.
        """
        assert self._temporary is not None
        with _as_file_error(self.target, "record into"):
            if before is not None:
                if not before.is_there():
                    raise FileError(
                        f"cannot go on recording into {self.target}: it is no longer the file that this session made"
                    )
                os.replace(self._temporary, self.target)
            elif self._take_name():
                os.unlink(self._temporary)
        self._temporary = None

    def _take_name(self) -> bool:
        """Whether the file has a second name now, that of the target; else it was renamed."""
        assert self._temporary is not None
        while True:
            try:
                os.link(self._temporary, self.target)  # unlike a rename: only when nothing is there
                return True
            except FileExistsError:
                pass
            except OSError:  # a file system without links
                if not self.target.exists():
                    os.replace(self._temporary, self.target)
                    return False
            with suppress(FileNotFoundError):
                old = os.open(self.target, os.O_RDONLY)
                try:
                    if not _lock(old) and not self._of_this_process(old):
                        raise FileError(
                            f"cannot record into {self.target}: another process is recording into it; choose another "
                            "file, or end that recording first"
                        )
                    if os.path.samestat(os.fstat(old), os.stat(self.target)):  # else another was faster
                        os.replace(self._temporary, self.target)
                        return False
                finally:
                    os.close(old)

    def _of_this_process(self, descriptor: int) -> bool:
        """Whether a file that somebody records into is one of this process, such as that of a notebook cell which is
        run again. Its session goes on without a name for its file, and a warning says so.
        """
        there = os.fstat(descriptor)
        for other in _RECORDED_HERE:
            if other is self or other.descriptor < 0 or other.process != os.getpid():
                continue
            if os.path.samestat(os.fstat(other.descriptor), there):
                warnings.warn(
                    f"{self.target} was being recorded by another session of this process; it is a new file now, and "
                    "that session goes on without one (session.trace().save(…) keeps what it has)",
                    stacklevel=7,
                )
                return True
        return False

    def is_there(self) -> bool:
        """Whether the target still is this file."""
        with suppress(OSError):
            return os.path.samestat(os.fstat(self.descriptor), os.stat(self.target))
        return False

    def close(self) -> None:
        """Lets go of the file; one that has no name yet goes. Twice is fine."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
        if self._temporary is not None:
            with suppress(OSError):
                os.unlink(self._temporary)
            self._temporary = None


_RECORDED_HERE: weakref.WeakSet[RecordingFile] = weakref.WeakSet()


def _lock(descriptor: int) -> bool:
    """Locks a file while it is open; False when another has it. A file system without locks is taken as it is."""
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


@contextmanager
def _as_file_error(path: Path, what: str) -> Iterator[None]:
    try:
        yield
    except FileError:
        raise
    except OSError as error:
        raise FileError(f"cannot {what} {path}: {error.strerror or error}") from error
