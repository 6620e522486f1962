"""Paths that a caller gives: one meaning everywhere they are taken, and a sentence for each that names no file."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import colibri_lab as lab
from colibri_lab.identity import model_identity
from colibri_lab.sniff import read_json
from colibri_lab.testing import synthetic_trace, tiny_model
from colibri_lab.widgets.html import write_page

TRACE = synthetic_trace(2, 4, 2, 5)
READERS: dict[str, Callable[[Any], Any]] = {
    "open": lab.open, "load_trace": lab.load_trace, "identity": lambda path: model_identity([path]),
}  # fmt: skip
TAKERS = READERS | {
    "save": TRACE.save, "to_html": lambda path: write_page(path, "page"),
    "doctor": lab.doctor, "tokenizer": lab.Tokenizer.load, "tiny_model": tiny_model,
}  # fmt: skip


@pytest.mark.parametrize("take", TAKERS.values(), ids=TAKERS)
@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("a\0b", "NUL"), ("", "is empty"), (3, "a path is a text"), (None, "a path is a text"), (["x"], "a path is a"),
        ("\ud800", "no name in this file system"), ("~no-such-user-here/x", "no home folder that '~no-such-user-here'"),
    ],
)  # fmt: skip
def test_what_names_no_file_is_refused_with_a_sentence(take: Callable[[Any], Any], path: Any, words: str) -> None:
    """By everything that takes a path. (`lab.open(None)` is the bundled model, a list of paths one recording.)"""
    if (take is lab.open and path is None) or (take is lab.load_trace and isinstance(path, list)):
        return
    with pytest.raises((lab.ArgumentError, lab.FileError), match=words):
        take(path)


def test_a_tilde_is_the_home_folder_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model, a trace and a report written and read under `~`; nothing named `~` appears."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    folder = tiny_model("~/m")
    assert folder == tmp_path / "home" / "m" and lab.open("~/m").path == folder and lab.doctor(Path("~/m")).ok
    TRACE.save("~/run.safetensors")
    assert lab.load_trace(Path("~/run.safetensors")).ids == TRACE.ids and os.listdir(tmp_path) == ["home"]
    assert lab.Tokenizer.load("~/m") is None and write_page("~/page.html", "é") == tmp_path / "home" / "page.html"
    assert model_identity(["~/m/model.safetensors"]) == model_identity([folder / "model.safetensors"])


@pytest.mark.parametrize("letter", ["x", "é"])
def test_a_name_of_every_length_that_the_system_takes_is_saved_and_read(tmp_path: Path, letter: str) -> None:
    """255 bytes are a name like any other; one more is refused by name, and leaves nothing behind."""
    name = letter * (255 // len(letter.encode()))
    TRACE.save(tmp_path / name)
    assert lab.load_trace(tmp_path / name).ids == TRACE.ids
    for use in (TRACE.save, lab.load_trace, lab.open):
        with pytest.raises(lab.FileError, match=f"{letter}'?: File name too long"):
            use(tmp_path / (name + letter))
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("use", [*READERS.values(), TRACE.save], ids=[*READERS, "save"])
def test_a_link_that_points_to_nothing_is_told_so(tmp_path: Path, use: Callable[[Path], Any]) -> None:
    """The link and its target are named, also when the link is a folder on the way; it stays a link."""
    link = tmp_path / "link"
    link.symlink_to("gone")
    for path in (link, link / "below") if use != TRACE.save else (link,):
        with pytest.raises(lab.FileError, match="link' is a link that points to nothing: 'gone'"):
            use(path)
    assert link.is_symlink() and any("points to nothing" in problem for problem in lab.doctor(link).problems)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_of_a_checkpoint_that_links_to_nothing_is_told_so(tmp_path: Path, name: str) -> None:
    """As in a download cache whose files were removed."""
    folder = tiny_model(tmp_path / "m")
    (folder / name).unlink()
    (folder / name).symlink_to("gone")
    with pytest.raises(lab.FileError, match=rf"{name} is a link that points to nothing"):
        lab.open(folder)


def test_saving_through_a_link_keeps_the_link(tmp_path: Path) -> None:
    """What it points to is replaced, as for any other program that writes there."""
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    TRACE.save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and lab.load_trace(tmp_path / "file").ids == TRACE.ids


def test_a_circle_of_links_is_refused(tmp_path: Path) -> None:
    """By the system's own words."""
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    for use in (lab.open, lab.load_trace, TRACE.save):
        with pytest.raises(lab.FileError, match="symbolic links"):
            use(tmp_path / "a")


BUNDLED = Path(lab.__file__).parent / "bundled" / "tiny-colibri"


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_a_byte_order_mark_is_refused_by_its_name(tmp_path: Path, name: str) -> None:
    """JSON allows none, and transformers refuses such files too; doctor tells it before anything is opened."""
    folder = Path(shutil.copytree(BUNDLED, tmp_path / "m"))
    (folder / name).write_bytes(b"\xef\xbb\xbf" + (folder / name).read_bytes())
    with pytest.raises(lab.FormatError, match=rf"{re.escape(name)}.*BOM"):
        lab.open(folder).tokenizer  # noqa: B018
    assert any(name in problem and "BOM" in problem for problem in lab.doctor(folder).problems)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff", "is not JSON"), (b"plain words", "is not JSON"), (b"[1]", "holds a list, not an object"),
        (b"<!DOCTYPE html>", "is a web page"), (b"{", "is not JSON"), (b"\xef\xbb\xbf<html>", "is a web page"),
    ],
)  # fmt: skip
def test_a_file_that_should_be_json_is_told_what_it_is(tmp_path: Path, content: bytes, words: str) -> None:
    """By what it holds, never by what a weight file should hold."""
    (tmp_path / "f.json").write_bytes(content)
    with pytest.raises(lab.FormatError, match=words):
        read_json(tmp_path / "f.json")
