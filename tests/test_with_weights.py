"""`model.with_weights`: a second model on the same files with other values in memory. The files stay as they are."""

from __future__ import annotations

import copy
import pickle
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checkpoints import read_safetensors, write_safetensors

import colibri_lab as lab
from colibri_lab.testing import tiny_model

IDS = [3, 1, 4, 1, 5]
SIGNALLING = 0x7FA00001


def logits(model: lab.Model) -> bytes:
    return model.session(capture="routing", max_tokens=8).feed(IDS).logits.tobytes()


def doubled(model: lab.Model, name: str) -> np.ndarray:
    return (model.weights[name] * 2).astype(model.weights[name].dtype)


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("sharded", [False, True])
def test_it_computes_as_a_checkpoint_written_with_these_values(tmp_path: Path, dtype: str, sharded: bool) -> None:
    """Attention, router, expert and norm weights; single file and shards; the original and the files do not change."""
    folder = tiny_model(tmp_path / "m", dtype=dtype, sharded=sharded)
    bytes_before = {file.name: file.read_bytes() for file in folder.iterdir()}
    model = lab.open(folder)
    before = logits(model)
    names = ["layers.0.attn.q", "layers.0.moe.router", "layers.1.moe.experts.1.down", "layers.1.moe_norm", "norm"]
    given = {name: doubled(model, name) for name in names}
    other = model.with_weights(given)

    written = shutil.copytree(folder, tmp_path / "written")
    for name in names:
        place = model.weights.describe(name)
        file = written / Path(place.file).name
        write_safetensors(file, read_safetensors(file) | {place.tensor: given[name]})
    assert logits(other) == logits(lab.open(written)) != before
    assert logits(model) == before
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == bytes_before
    assert all(other.weights[name].tobytes() == given[name].tobytes() for name in names)
    assert other.weights["layers.0.attn.k"].tobytes() == model.weights["layers.0.attn.k"].tobytes()


def test_one_expert_of_a_fused_tensor_is_replaced_alone(tmp_path: Path) -> None:
    """gate_up_proj holds gate and up of all experts; only the named slice is other."""
    model = lab.open(tiny_model(tmp_path / "m", family="qwen3_moe", fused=True))
    name = "layers.0.moe.experts.2.up"
    other = model.with_weights({name: doubled(model, name)})
    changed = [n for n in model.weights if model.weights[n].tobytes() != other.weights[n].tobytes()]
    assert changed == [name] and logits(other) != logits(model)


def test_bits_are_kept(tmp_path: Path) -> None:
    """A signalling NaN, an infinity and a subnormal stand in memory as they were given, in every stored dtype."""
    for dtype, kind, bits in (
        ("F32", np.float32, [SIGNALLING, 0xFF800000, 1]),
        ("F16", np.float16, [0x7D01, 0xFC00, 1]),
        ("BF16", ml_dtypes.bfloat16, [0x7FA1, 0xFF80, 1]),
    ):
        model = lab.open(tiny_model(tmp_path / dtype, dtype=dtype))
        value = model.weights["layers.0.moe.experts.0.gate"].copy()
        value.reshape(-1)[:3] = np.array(bits, f"u{value.itemsize}").view(kind)
        other = model.with_weights({"layers.0.moe.experts.0.gate": value})
        assert other.weights["layers.0.moe.experts.0.gate"].tobytes() == value.tobytes()
        n_nan, n_inf, _, first = other.weights.census("layers.0.moe.experts.0.gate")
        assert (n_nan, n_inf, first) == (1, 1, 0)


def test_the_array_is_copied_and_its_strides_do_not_matter(tmp_path: Path) -> None:
    """A later change of the caller's array changes nothing; a transposed view gives its values, not its memory."""
    model = lab.open(tiny_model(tmp_path / "m"))
    square = np.asfortranarray(model.weights["layers.0.attn.q"])
    other = model.with_weights({"layers.0.attn.q": square})
    before = logits(other)
    square[:] = 0
    assert logits(other) == before == logits(model)


def test_tied_weights_are_one(tmp_path: Path) -> None:
    """Either name replaces both; two values for one tensor are refused; the same twice is fine."""
    model = lab.open(tiny_model(tmp_path / "m", tied=True))
    value, other_value = doubled(model, "embed"), model.weights["embed"] + 1
    for names in (["embed"], ["lm_head"], ["embed", "lm_head"]):
        other = model.with_weights(dict.fromkeys(names, value))
        assert other.weights["embed"].tobytes() == other.weights["lm_head"].tobytes() == value.tobytes()
        again = other.with_weights({"embed": other_value})
        assert again.weights["lm_head"].tobytes() == other_value.tobytes()
    with pytest.raises(lab.ArgumentError, match="tied"):
        model.with_weights({"embed": value, "lm_head": other_value})


def test_replacements_add_up_and_say_so(tmp_path: Path) -> None:
    """A second call keeps the first; identity differs for other values and is equal for equal ones; info and repr."""
    model = lab.open(tiny_model(tmp_path / "m"))
    one = model.with_weights({"norm": doubled(model, "norm")})
    two = one.with_weights({"layers.0.attn.k": doubled(model, "layers.0.attn.k")})
    both = model.with_weights({name: doubled(model, name) for name in ("layers.0.attn.k", "norm")})
    assert two.info["replaced_weights"] == ["norm", "layers.0.attn.k"] and model.info["replaced_weights"] == []
    assert logits(two) == logits(both) != logits(one)
    assert two.identity == both.identity and len({model.identity, one.identity, two.identity}) == 3
    session = one.session(max_tokens=8)
    session.feed(IDS)
    assert session.trace().meta["model_identity"] == one.identity
    assert "1 replaced" in repr(one) and "replaced" not in repr(model)
    assert one.weights.describe("norm").file_offset == model.weights.describe("norm").file_offset
    assert one.weights.describe("norm").replaced and not model.weights.describe("norm").replaced


def test_what_does_not_fit_is_refused_by_a_sentence(tmp_path: Path) -> None:
    """Unknown names with the nearest, other shapes and dtypes with both; the model goes on."""
    model = lab.open(tiny_model(tmp_path / "m", dtype="BF16"))
    value = model.weights["norm"]
    with pytest.raises(lab.TapError, match=r"no weight 'nrm'.*did you mean 'norm'"):
        model.with_weights({"nrm": value})
    with pytest.raises(lab.ArgumentError, match=r"norm is bfloat16 \[32\].*not float32 \[32\]"):
        model.with_weights({"norm": value.astype(np.float32)})
    with pytest.raises(lab.ArgumentError, match=r"norm is bfloat16 \[32\].*not bfloat16 \[31\]"):
        model.with_weights({"norm": value[:31]})
    assert logits(model.with_weights({})) == logits(model)


def test_rules_of_models_hold(tmp_path: Path) -> None:
    """It closes when nobody uses it, outlives its original, cannot be pickled, and notices a changed file."""
    folder = tiny_model(tmp_path / "m")
    model = lab.open(folder)
    other = model.with_weights({"norm": doubled(model, "norm")})
    view = other.weights["norm"]
    model.close()
    with pytest.raises(lab.BusyError):
        other.close()
    expected = view.tobytes()
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="mapped file"):
            attempt(other)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(lab.FileError):
        other.session(max_tokens=4).feed([1])
    with pytest.raises(lab.FileError):
        other.with_weights({})
    assert view.tobytes() == expected
    del view
    other.close()
    with pytest.raises(lab.ColibriError, match="closed"):
        model.with_weights({})


@pytest.mark.parametrize("nothing", [None, 3, "norm", [("norm", np.ones(3))]])
def test_it_takes_a_mapping(tmp_path: Path, nothing: Any) -> None:
    """Anything else is refused with a sentence."""
    with pytest.raises(lab.ArgumentError, match="takes a dict"):
        lab.open(tiny_model(tmp_path / "m")).with_weights(nothing)


def test_a_list_that_is_no_array_is_refused_by_the_name_of_its_weight(tmp_path: Path) -> None:
    """Rows of two lengths."""
    with pytest.raises(lab.ArgumentError, match=r"^norm is .*no array"):
        lab.open(tiny_model(tmp_path / "m")).with_weights({"norm": [[1], [1, 2]]})
