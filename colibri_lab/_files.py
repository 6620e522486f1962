"""Paths that a caller gives, and files that appear whole or not at all. What a path means is one thing everywhere."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import IO

from colibri_lab.errors import ArgumentError, FileError

__all__ = ["local_path", "must_exist", "whole_file"]


def local_path(path: str | bytes | PathLike[str] | PathLike[bytes]) -> Path:
    """The path, its `~` or `~user` expanded; the disk is not looked at.

    Raises ArgumentError for what is no path, is empty, or holds what no file name can (a NUL, a character outside
    Unicode), FileError for a home folder that nobody has.
    """
    try:
        text = os.fsdecode(path)
        os.fsencode(text)
    except TypeError:
        raise ArgumentError(f"a path is a text or a pathlib.Path; this is {path!r:.80}") from None
    except UnicodeError:
        raise ArgumentError(f"the path {path!r:.80} is no name in this file system's encoding") from None
    if not text or "\0" in text:
        raise ArgumentError(f"the path {text!r:.80} names no file: it {'holds a NUL' if text else 'is empty'}")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        user = text.split(os.sep, 1)[0]
        raise FileError(f"'{text}': no home folder that '{user}' stands for is known; './{user}' is a name") from None


def must_exist(path: Path, hint: Callable[[Path], str] = lambda path: "") -> None:
    """Raises FileError unless there is something at `path`; a dangling link is named, `hint` ends the sentence of a
    path where nothing is.
    """
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        link = next((part for part in (path, *path.parents) if part.is_symlink() and not part.exists()), None)
        if link is None:
            raise FileError(f"there is nothing at '{path}'{hint(path)}") from None
        raise FileError(f"'{link}' is a link that points to nothing: '{os.readlink(link)}' is not there") from None
    except OSError as error:  # a name too long, a circle of links, a folder that may not be searched
        raise FileError(f"cannot read '{path}': {error.strerror}") from error


@contextmanager
def whole_file(path: Path, what: str) -> Iterator[IO[bytes]]:
    """A file to write `what` into; when the block ends without an error it becomes `path`, at once and whole.

    It is written beside `path` under a short temporary name, so that every name the system takes can be used. A link
    stays, and what it points to is replaced. Raises FileError, naming `what`, when it cannot be written.
    """
    temporary = None
    try:
        if path.is_symlink():
            must_exist(path)
        target = Path(os.path.realpath(path))
        if target.exists() and not target.is_file():  # a rename would put a file in the place of a device
            raise FileError(f"cannot write {what} to {path}: it is there and no regular file")
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=".", suffix=".part", delete=False) as handle:
            temporary = Path(handle.name)
            yield handle
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)  # a temporary file is born readable by its owner only
        os.replace(temporary, target)
    except FileError:
        raise
    except OSError as error:
        raise FileError(f"cannot write {what} to {path}: {error.strerror or error}") from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
