"""`load_trace`: a trace from a file of ours or of another program, told apart by content."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from colibri_lab._files import local_path, must_exist
from colibri_lab.errors import ArgumentError, FileError, FormatError, nearest
from colibri_lab.progress import Progress
from colibri_lab.sniff import not_safetensors
from colibri_lab.trace import Trace
from colibri_lab.trace_file import load_trace as load_own

__all__ = ["load_trace"]

_OWN = "colibri"


def load_trace(
    path: str | PathLike[str] | Sequence[str | PathLike[str]],
    format: str | None = None,
    *,
    config: Any = None,
    layers: int | Sequence[int] | None = None,
    experts: int | None = None,
    top_k: int | None = None,
    ids: Sequence[int] | None = None,
    start: int | None = None,
    windows: int | Sequence[int] | None = None,
    progress: Progress = None,
) -> Trace:
    """Opens a trace, or a recording of vLLM, SGLang, llama.cpp, transformers, OLMoE or JustVugg/colibri.

    The format is recognised by content; `format` forces one by name ("colibri" is ours). What a format does not say is
    asked for and never guessed:

    - `config`: a config.json or its folder, a model, or a dict: says layers, experts and top_k at once;
    - `layers`: how many layers there are, all with experts, or the numbers of those with experts;
    - `experts`, `top_k`: experts of a layer, and how many of them a token is sent to;
    - `ids`: the token ids; without them they are −1, not recorded;
    - `start`: the first token that an SGLang payload has a row for;
    - `windows`: which windows of a KL base to decode.

    `path` may be a list: the files of several ranks of one SGLang recording. Recordings that keep counts and no tokens
    give a trace without tokens that holds `layers.{l}.moe.load`. Long files show their `progress`.

    Raises FileError for what cannot be read, FormatError for a file that is none of these, is damaged, or holds what
    cannot be routes, and ArgumentError naming the keyword that is missing, unknown or of no use for the format.
    """
    from colibri_lab import formats

    several = isinstance(path, list | tuple)
    listed: list[Any] = list(path) if isinstance(path, list | tuple) else [path]
    paths = [local_path(one) for one in listed]
    names = [_OWN, *formats.FORMATS]
    if format is not None and format not in names:
        close = nearest(str(format), names)
        raise ArgumentError(f"there is no format {format!r:.80}{close}; formats: {', '.join(names)}")
    if not paths:
        raise ArgumentError("load_trace takes a path or a list of paths, not an empty one")
    given = {
        name: value
        for name, value in dict(
            config=config, layers=layers, experts=experts, top_k=top_k, ids=ids, start=start, windows=windows
        ).items()
        if value is not None
    }
    for one in paths:
        must_exist(one)
    if format == _OWN or (format is None and not several and _is_safetensors(paths[0])):
        _no_use(_OWN, given, set())
        return load_own(paths[0])
    for one in paths:
        if not one.is_file():
            raise FileError(f"'{one}' is {'a folder' if one.is_dir() else 'no regular file'}, not a recording")
    sources = [formats.Source(one) for one in paths]
    found = [_named(source, format) for source in sources]
    if len(set(found)) > 1:
        raise ArgumentError(f"the files of a list are of one recording; these are {', '.join(found)}")
    importer = formats.FORMATS[found[0]]
    _no_use(found[0], given, importer.USES)
    what = formats.said(**given, progress=progress)
    try:
        if len(sources) == 1:
            trace = importer.load(sources[0], what)
        elif hasattr(importer, "load_ranks"):
            trace = importer.load_ranks(sources, what)
        else:
            raise ArgumentError(f"a recording of the format '{found[0]}' is one file; give them one by one")
    except FormatError as error:
        if str(paths[0]) in str(error) or len(paths) > 1:
            raise
        raise FormatError(f"{paths[0]}: {error}") from error
    if not isinstance(trace, Trace):
        raise AssertionError(f"{found[0]} made a {type(trace).__name__}")
    return trace


def _is_safetensors(path: Path) -> bool:
    try:
        return not_safetensors(path) is None
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror or error}") from error


def _named(source: Any, format: str | None) -> str:
    from colibri_lab import formats

    claims = formats.recognise(source)
    if format is not None:
        if format not in claims:
            other = f"; it looks like {claims[0]}" if claims else ""
            source.refuse(f"it is no file of the format '{format}' ({formats.FORMATS[format].ABOUT}){other}")
        return format
    if not claims:
        readable = "; ".join(f"{name}: {inspect.cleandoc(one.ABOUT)}" for name, one in formats.FORMATS.items())
        what = not_safetensors(source.path)
        source.refuse(
            f"it is {what or 'nothing that is known'}, not a trace. What can be read: colibri: a trace of ours "
            f"(safetensors); {readable}"
        )
    return claims[0]


def _no_use(format: str, given: dict[str, Any], uses: Any) -> None:
    unused = [name for name in given if name not in uses]
    if unused:
        takes = ", ".join(f"{name}=" for name in sorted(uses)) or "none, for it says all itself"
        raise ArgumentError(f"the format '{format}' has no use for {unused[0]}=; keywords it takes: {takes}")
