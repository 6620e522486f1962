"""Weights that are not numbers: found, counted, and set against the tokens that met them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import colibri_lab as lab
from colibri_lab.testing import canonical, tiny_model

IDS = list(range(3, 27))


@pytest.fixture
def idle(tmp_path: Path) -> tuple[Path, int, int]:
    """A checkpoint, and a layer and expert of it that no token of IDS is sent to."""
    folder = tiny_model(tmp_path / "m", experts=16, top_k=1, layers=2, seed=5)
    session = lab.open(folder).session()
    session.feed(IDS)
    load = lab.routing.load(session.trace())
    layer, expert = (int(i) for i in np.unravel_index(load.argmin(), load.shape))
    assert load[layer, expert] == 0, "choose a seed with an idle expert"
    return folder, layer, expert


def poison(folder: Path, name: str, value: float, place: tuple[int, ...] | None = None) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[name][place if place is not None else ...] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_clean_weights_give_an_empty_list(tmp_path: Path) -> None:
    assert lab.nan.weights(lab.open(tiny_model(tmp_path / "m"))) == []


def test_B3_an_expert_that_nobody_chose_may_be_nan_and_is_reported(idle: tuple[Path, int, int]) -> None:
    """The result is finite and equal to the clean run; the scan still says "never used"."""
    folder, layer, expert = idle
    clean = lab.open(folder).session(capture="all")
    clean.feed(IDS)
    expected = {path: canonical(clean.tape[path]) for path in clean.tape if ".experts." not in path}
    for name in ("w1", "w2", "w3"):
        poison(folder, f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{name}.weight", np.nan)
    session = lab.open(folder).session(capture="all")
    session.feed(IDS)
    assert {path: canonical(session.tape[path]) for path in expected} == expected
    rows = lab.nan.weights(session)
    assert [row.name for row in rows] == [
        f"layers.{layer}.moe.experts.{expert}.{part}" for part in ("gate", "up", "down")
    ]
    assert all(row.tokens == 0 and row.n_nan == 24 * 32 and row.n_inf == 0 and row.first == (0, 0) for row in rows)
    assert (
        str(rows[0])
        == f"layers.{layer}.moe.experts.{expert}.gate: 768 NaN, the first at [0, 0]; expert {expert} was never used"
    )


def test_one_value_is_found_at_its_place_and_the_tokens_that_met_it_are_counted(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "m", dtype="BF16")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.block_sparse_moe.experts.2.w2.weight"][3, 7] = np.inf
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model = lab.open(folder)
    (row,) = lab.nan.weights(model)
    assert (row.name, row.first, row.n_nan, row.n_inf, row.tokens) == (
        "layers.1.moe.experts.2.down",
        (3, 7),
        0,
        1,
        None,
    )
    session = model.session()
    session.feed(IDS)
    (row,) = lab.nan.weights(session)
    assert row.tokens == lab.routing.load(session.trace())[1, 2] > 0 and f"received {row.tokens} tokens" in str(row)


@pytest.mark.parametrize("capture", ["none", "routing"])
def test_other_weights_have_no_tokens_of_their_own(capture: str, tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "m")
    poison(folder, "model.norm.weight", np.nan, (5,))
    session = lab.open(folder).session(capture=capture)
    session.feed(IDS)
    (row,) = lab.nan.weights(session)
    assert (row.name, row.shape, row.first, row.tokens) == ("norm", (32,), (5,), None)


def test_one_token_is_one_token() -> None:
    """Not "1 tokens"."""
    row = lab.nan.NonFiniteWeight("layers.1.moe.experts.3.up", (4, 4), 1, 0, (0, 0), 1)
    assert str(row).endswith("expert 3 received 1 token") and str(replace(row, tokens=2)).endswith("received 2 tokens")
