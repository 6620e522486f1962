"""Model identity: equal for equal weights wherever they lie, different for a changed header, size or sampled block."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from colibri_lab.errors import FileError
from colibri_lab.identity import model_identity
from colibri_lab.testing import tiny_model


def test_a_copy_elsewhere_has_the_same_identity_and_another_seed_has_not(tmp_path: Path) -> None:
    files = sorted(tiny_model(tmp_path / "a", sharded=True).glob("*.safetensors"))
    copied = sorted(Path(shutil.copytree(tmp_path / "a", tmp_path / "b")).glob("*.safetensors"))
    assert model_identity(files) == model_identity(reversed(copied)) != model_identity(files[1:])
    assert model_identity(files).startswith("sampled-sha256:")
    other = tiny_model(tmp_path / "c", sharded=True, seed=1)
    assert model_identity(sorted(other.glob("*.safetensors"))) != model_identity(files)


def test_a_change_is_noticed_in_header_size_first_and_last_block(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    content = bytearray((100).to_bytes(8, "little") + bytes(100) + bytes(40 * 64 * 1024 + 5))
    file.write_bytes(content)
    seen = {model_identity([file])}
    for place in (50, 108, len(content) - 1):
        content[place] ^= 1
        file.write_bytes(content)
        os.utime(file, ns=(place, place))
        seen.add(model_identity([file]))
    file.write_bytes(content + b"\0")
    assert len(seen | {model_identity([file])}) == 5


def test_a_full_hash_sees_every_byte_and_a_sampled_one_does_not(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    content = bytearray((2).to_bytes(8, "little") + b"{}" + bytes(64 * 64 * 1024))
    file.write_bytes(content)
    sampled, full = model_identity([file]), model_identity([file], full=True)
    content[10 + 64 * 1024 + 7] = 1  # in the second block, which is not sampled
    file.write_bytes(content)
    os.utime(file, ns=(1, 1))
    assert model_identity([file]) == sampled and model_identity([file], full=True) != full


def test_a_file_with_a_lying_header_length_is_hashed_whole_and_a_missing_one_is_named(tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes((2**60).to_bytes(8, "little") + b"abc")
    assert model_identity([tmp_path / "w"])
    with pytest.raises(FileError, match="nothing"):
        model_identity([tmp_path / "nothing"])
