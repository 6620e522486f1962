"""What a recording session and a reader of recordings refuse, and that they go on afterwards."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from recordings import assert_same, header_of, python

import colibri_lab as lab
from colibri_lab import recording, recording_file
from colibri_lab.errors import ArgumentError, FileError, FormatError, OutOfMemoryError


@pytest.fixture(scope="module")
def model() -> Iterator[lab.Model]:
    yield lab.open()


def folder(path: Path) -> Path:
    (path / "folder").mkdir()
    return path / "folder"


def dangling(path: Path) -> Path:
    (path / "link").symlink_to(path / "nothing")
    return path / "link"


@pytest.mark.parametrize(
    ("make", "error", "sentence"),
    [
        (folder, FileError, "it is a folder; name a file in it"),
        (lambda path: path / "none" / "run", FileError, "there is no folder .*none"),
        (lambda path: "/dev/null", FileError, "no regular file"),
        (dangling, FileError, "points to nothing"),
        (lambda path: "", ArgumentError, "is empty"),
        (lambda path: 5, ArgumentError, "a path is a text"),
        (lambda path: path / ("x" * 300), FileError, "name too long"),
    ],
)
def test_a_place_that_cannot_be_recorded_into_is_named(
    model: lab.Model, tmp_path: Path, make: Callable[[Path], Any], error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        model.session(max_tokens=8, to=make(tmp_path))
    assert not list(tmp_path.glob(".*.part"))


def test_a_folder_that_may_not_be_written_is_named(tmp_path: Path) -> None:
    code = """
import os, sys, colibri_lab as lab
model = lab.open()
model.session(max_tokens=8, to=sys.argv[1] + "/other")  # imports what it needs
os.chmod(sys.argv[1], 0o555)
if os.geteuid() == 0:
    os.seteuid(65534)
try:
    model.session(max_tokens=8, to=sys.argv[1] + "/run")
except lab.FileError as error:
    print(error)
"""
    done = python(code, tmp_path)
    assert done.stdout.startswith(f"cannot record into {tmp_path}/run: "), (done.stdout, done.stderr)


def test_a_weight_file_of_the_model_is_never_replaced(tmp_path: Path) -> None:
    bundled = lab.open()
    for source in bundled.folder.iterdir():
        (tmp_path / source.name).write_bytes(source.read_bytes())
    bundled.close()
    model = lab.open(tmp_path)
    (weights,) = tmp_path.glob("*.safetensors")
    before = weights.read_bytes()
    os.link(weights, tmp_path / "other-name")
    (tmp_path / "link").symlink_to(weights)
    for path in (weights, tmp_path / "other-name", tmp_path / "link"):
        with pytest.raises(ArgumentError, match="the model reads its weights from it"):
            model.session(max_tokens=8, to=path)
    assert weights.read_bytes() == before


def test_a_file_is_replaced_only_when_the_recording_begins(model: lab.Model, tmp_path: Path) -> None:
    file = tmp_path / "run"
    file.write_text("precious")
    with pytest.raises(ArgumentError):
        model.session(capture="nothing-like-it", to=file)
    with pytest.raises((OutOfMemoryError, FileError)):
        model.session(capture="all", max_tokens=2**31 - 1, to=file)
    assert file.read_text() == "precious"
    (tmp_path / "link").symlink_to(file)
    session = model.session(max_tokens=8, to=tmp_path / "link")
    session.feed([1])
    assert (tmp_path / "link").is_symlink() and lab.load_trace(file).ids == [1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "run"]


def test_what_the_disk_cannot_hold_is_refused_at_the_start(
    model: lab.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bytes, with the max_tokens that would fit; without max_tokens the session takes half of the free disk."""
    need = model.session(capture="all", max_tokens=256).memory()["tape"]
    monkeypatch.setattr(recording, "free_bytes", lambda folder: 2 * need)
    assert 200 < model.session(capture="all", to=tmp_path / "half").max_tokens <= 256
    monkeypatch.setattr(recording, "free_bytes", lambda folder: need // 2)
    with pytest.raises(FileError, match=rf"needs {need} bytes of disk and {need // 2} are left; max"):
        model.session(capture="all", max_tokens=256, to=tmp_path / "run")
    monkeypatch.setattr(recording, "free_bytes", lambda folder: need)  # the tape fits, the header and tokens do not
    with pytest.raises(FileError, match=r"need \d+ bytes of disk and \d+ are left"):
        model.session(capture="all", max_tokens=256, to=tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["half"]


def test_a_disk_that_is_full_ends_no_session(
    model: lab.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pass is refused before it begins, with the bytes; session and file keep what they have."""
    file = tmp_path / "run"
    session = model.session(capture="moe", max_tokens=512, to=file)
    session.feed([1, 2])
    with monkeypatch.context() as patch:
        patch.setattr(recording_file, "free_bytes", lambda folder: 1000)
        for act in (lambda: session.feed([3] * 400), lambda: session.stepper([3] * 400, chunk=None).step()):
            with pytest.raises(FileError, match=r"cannot record \d+ more tokens .* need \d+ bytes of disk"):
                act()
    assert session.ids == [1, 2] and session.logits.shape
    assert_same(lab.load_trace(file), session.trace())
    session.feed([4])
    assert_same(lab.load_trace(file), session.trace())


def test_a_file_that_is_cut_under_the_session_is_an_error(tmp_path: Path) -> None:
    """No bus error: the pass fails, and says why."""
    code = """
import os, sys, colibri_lab as lab
session = lab.open().session(capture="all", max_tokens=64, to=sys.argv[1])
session.feed([1, 2])
os.truncate(sys.argv[1], 50000)
try:
    session.feed([3])
except lab.ColibriError as error:
    print(type(error).__name__, error)
"""
    done = python(code, tmp_path / "run")
    assert done.returncode == 0 and done.stdout.startswith("FileError the file that holds the tape could not take rows")


def test_a_limit_on_the_size_of_files_is_named(tmp_path: Path) -> None:
    code = """
import resource, sys, colibri_lab as lab
model = lab.open()
resource.setrlimit(resource.RLIMIT_FSIZE, (100000, 100000))
try:
    model.session(capture="all", max_tokens=64, to=sys.argv[1])
except lab.FileError as error:
    print(error)
"""
    done = python(code, tmp_path / "run")
    assert "cannot record into" in done.stdout and "File too large" in done.stdout, done.stderr
    assert not list(tmp_path.iterdir())


def test_broken_recordings_are_refused_by_name(model: lab.Model, tmp_path: Path) -> None:
    file = tmp_path / "run"
    session = model.session(capture="routing", max_tokens=8, to=file)
    session.feed([1, 2])
    whole = file.read_bytes()
    start = len(header_of(file))

    def place(name: str) -> int:
        found = re.search(rb'"%s":\{[^}]*"data_offsets":\[ *(\d+)' % name.encode(), whole)
        assert found
        return start + int(found[1])

    for name, offset, value, sentence in (
        ("tokens.passes", 8, 7, "passes"),  # the pass ends where nothing is: it is left out, and the rows are cut
        ("tokens.passes", 0, 1, "must follow one another"),
        ("tokens.text_offsets", 8, -1, "rising"),
        ("layers.0.moe.expert_ids", 0, 99, "outside 0 to"),
    ):
        broken = bytearray(whole)
        broken[place(name) + offset :][:1] = b""
        at = place(name) + offset
        broken[at : at + 4] = int(value).to_bytes(4, "little", signed=True)
        (tmp_path / "broken").write_bytes(broken)
        if name == "tokens.passes" and value == 7:
            assert lab.load_trace(tmp_path / "broken").ids == []
            continue
        with pytest.raises(FormatError, match=sentence):
            lab.load_trace(tmp_path / "broken")


@pytest.mark.parametrize("aliases", ["[]", "null", "{", '{"norm": "nothing"}', '{"norm": ["embed"]}', "[" * 100_000])
def test_broken_aliases_are_refused_by_name(model: lab.Model, tmp_path: Path, aliases: str) -> None:
    session = model.session(capture="routing", max_tokens=8, to=tmp_path / "run")
    session.feed([1, 2])
    broken = changed(tmp_path / "run", lambda header: header["__metadata__"].update(aliases=aliases))
    with pytest.raises(FormatError, match="'aliases' is broken"):
        lab.load_trace(broken)


@pytest.mark.parametrize("axes", [1, 2])
def test_attention_weights_of_too_few_axes_are_refused(model: lab.Model, tmp_path: Path, axes: int) -> None:
    session = model.session(capture="layers.0.attn.weights", max_tokens=1, to=tmp_path / "run")
    session.feed([1])

    def change(header: dict[str, Any]) -> None:
        del header["layers.0.attn.weights"]["shape"][axes:]  # (heads, 1, 1)

    broken = changed(tmp_path / "run", change)
    with pytest.raises(FormatError, match="tensors have no rows"):
        lab.load_trace(broken)


def changed(path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a file with another JSON header and the same data."""
    start = len(header_of(path))
    header = json.loads(header_of(path)[8:])
    change(header)
    text = json.dumps(header).encode()
    copy = path.with_name("broken")
    copy.write_bytes(len(text).to_bytes(8, "little") + text + path.read_bytes()[start:])
    return copy
