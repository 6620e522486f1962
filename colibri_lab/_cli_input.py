"""What subcommands that run a checkpoint or read a trace have in common."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colibri_lab._files import local_path
from colibri_lab.errors import ArgumentError, FileError, FormatError
from colibri_lab.sniff import not_safetensors

if TYPE_CHECKING:
    from colibri_lab.session import Session
    from colibri_lab.trace import Trace

__all__ = [
    "add_input", "add_recording", "bar", "check_outputs", "ids_of", "input_of", "is_checkpoint", "profile_of",
    "recording_of", "refuse_recording", "session_of",
]  # fmt: skip

_SAID = ("layers", "experts", "top_k", "start")  # what lab.load_trace may have to be told


def add_input(command: argparse.ArgumentParser) -> None:
    """Adds --text and --ids."""
    text = command.add_mutually_exclusive_group()
    text.add_argument("--text", help="what a checkpoint is run on")
    text.add_argument("--ids", help="the same as token ids: 1,2,3", type=ids_of)


def add_recording(command: argparse.ArgumentParser) -> None:
    """Adds what a recording of another program may not say itself."""
    group = command.add_argument_group("recordings of other programs: what they do not say")
    group.add_argument("--config", metavar="PATH", help="config.json of the model, or its folder: says all at once")
    group.add_argument("--layers", metavar="N|N,M…", help="how many layers there are, or which have experts")
    group.add_argument("--experts", metavar="N", type=int, help="experts of a layer")
    group.add_argument("--top-k", metavar="N", type=int, help="how many of them a token is sent to")
    group.add_argument(
        "--start", metavar="TOKEN", type=int, help="the first token that an SGLang payload has a row for"
    )


def recording_of(options: argparse.Namespace, path: str) -> Trace:
    """The trace or recording at a path. Raises ColibriError in the words of the command line."""
    import colibri_lab as lab

    said = {name: value for name in ("config", *_SAID) if (value := getattr(options, name)) is not None}
    if "layers" in said:
        numbers = _whole(said["layers"], "--layers")
        said["layers"] = numbers if "," in said["layers"] else numbers[0]
    try:
        return lab.load_trace(path, progress=bar(), **said)
    except ArgumentError as error:
        words = re.sub(rf"\b({'|'.join(('config', *_SAID))})=", lambda m: "--" + m[1].replace("_", "-"), str(error))
        raise ArgumentError(words.replace(" (a config.json, a model, or a dict)", " (a config.json)")) from error


def refuse_recording(options: argparse.Namespace) -> None:
    """Raises ArgumentError when a checkpoint is told what only recordings have to be told."""
    for name in ("config", *_SAID):
        if getattr(options, name) is not None:
            words = "--" + name.replace("_", "-")
            raise ArgumentError(f"{words} is for recordings of other programs; a checkpoint says all that itself")


def profile_of(options: argparse.Namespace, used: bool) -> Trace | None:
    """The trace that --profile names; None without it. Raises ArgumentError when nothing is chosen by it."""
    path = options.profile
    if path is None:
        return None
    if not used:
        raise ArgumentError("--profile is what the policy static is chosen by: add --policy static")
    if is_checkpoint(path):
        raise ArgumentError(f"--profile names a trace or recording; '{path}' is a checkpoint")
    if options.run_of is not None and os.path.realpath(path) == os.path.realpath(options.run_of):
        raise ArgumentError(f"'{path}' is the trace itself, which static takes without --profile: name another one")
    return recording_of(options, path)


def session_of(path: str | None, x: str | list[int], capture: str, **options: Any) -> Session:
    """A session that ran `x` on the checkpoint at a path (None: the bundled model); `options` are of the session."""
    import colibri_lab as lab

    model = lab.open() if path is None else lab.open(path)
    if isinstance(x, str) and model.tokenizer is not None:
        x = model.tokenizer.encode(x)
    session = model.session(capture=capture, max_tokens=max(1, len(x)), **options)
    session.feed(x, progress=bar())
    return session


def bar() -> bool | None:
    """Bars are for a terminal; in a log they would run into the lines."""
    return None if sys.stderr.isatty() else False


def check_outputs(outputs: Iterable[Path | None], inputs: Iterable[str | None]) -> None:
    """Raises ArgumentError for a file to write that would replace one that is read, or another one that is written."""
    taken = {os.path.realpath(local_path(path)): "what is read from there" for path in inputs if path is not None}
    for output in outputs:
        if output is None:
            continue
        place = os.path.realpath(local_path(output))
        if place in taken:
            raise ArgumentError(f"'{output}' would replace {taken[place]}: give it a name of its own")
        taken[place] = "another file that is written there"


def is_checkpoint(path: str) -> bool:
    """Whether a path is a model to run rather than a trace or recording to read.

    Raises FileError or FormatError for what is none of them: what it is, and what was meant perhaps.
    """
    import colibri_lab as lab
    from colibri_lab.trace_file import is_trace

    file = local_path(path)
    if not file.exists():
        lab.open(file)  # raises, and names what lies near
    if file.is_dir():
        if not (file / "config.json").exists():
            raise FileError(_no_checkpoint(file))
        return True
    beside = file.with_name("config.json").exists()
    if beside and file.name.endswith((".safetensors", ".index.json")):
        return not is_trace(file)
    if file.is_file() and not _is_read(file):
        raise FormatError(_nothing_known(file, beside))
    return False


def _is_read(file: Path) -> bool:
    """Whether a file is safetensors, or of one of the formats that `lab.load_trace` knows."""
    from colibri_lab import formats

    return not_safetensors(file) is None or bool(formats.recognise(formats.Source(file)))


def _no_checkpoint(folder: Path) -> str:
    inside = sorted(entry.name for entry in folder.iterdir())
    near = [str(folder / name) for name in inside if (folder / name / "config.json").is_file()]
    what = "a folder without config.json" if inside else "an empty folder"
    meant = f"; in it, '{near[0]}' has one" if near else ""
    return f"'{folder}' is {what}: a checkpoint is a folder with config.json and its weights{meant}"


def _nothing_known(file: Path, beside: bool) -> str:
    with file.open("rb") as handle:
        is_text = b"\0" not in handle.read(64)
    what = str(not_safetensors(file))
    if is_text and what.startswith(("cut short", "no safetensors")):  # its letters were taken for a length
        what = "a text that is no recording"
    if beside:
        return f"'{file}' is {what}; the checkpoint beside it is opened by its folder: '{file.parent}'"
    return (
        f"'{file}' is {what}, neither a checkpoint (a folder with config.json and its weights) nor a trace or "
        "recording that lab.load_trace reads"
    )


def input_of(options: argparse.Namespace) -> str | list[int] | None:
    """What --text or --ids say; None without them. Raises ArgumentError for a text without a word."""
    if options.text is not None and not options.text.strip():
        raise ArgumentError("the text after --text is blank: give it a word or more, or token ids with --ids")
    return options.ids if options.text is None else str(options.text)


def ids_of(text: str) -> list[int]:
    """Token ids of "1,2,3"."""
    try:
        return _whole(text, "ids")
    except ArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _whole(text: str, what: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ArgumentError(f"{what} are whole numbers with commas between them, not '{text:.40}'") from None
