"""The helpers themselves: made-up traces are sound and plausible, tiny checkpoints have the layout of the hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colibri_lab import routing
from colibri_lab.errors import ArgumentError
from colibri_lab.testing import assert_close, canonical, synthetic_trace, tiny_model
from colibri_lab.trace import check_values


class TestSyntheticTrace:
    @pytest.mark.parametrize(
        "options", [{}, {"nonfinite": True}, {"hidden": 3, "passes": [10, 54]}, {"dense_layers": [0, 5]}]
    )
    def test_it_is_sound(self, options: dict[str, Any]) -> None:
        trace = synthetic_trace(**options)
        check_values(trace)
        for layer in trace.moe_layers:
            scores, ids = trace[f"layers.{layer}.moe.scores"], trace[f"layers.{layer}.moe.expert_ids"]
            chosen = np.take_along_axis(scores, ids, axis=1)
            finite = np.isfinite(scores).all(axis=1)
            assert (np.diff(chosen[finite], axis=1) <= 0).all()
            np.testing.assert_allclose(trace[f"layers.{layer}.moe.gates"][finite].sum(axis=1), 1, rtol=1e-6)

    def test_routing_is_uneven_but_no_expert_takes_all(self) -> None:
        load = routing.load(synthetic_trace(6, 8, 2, 500)) / 500
        assert (load.max(axis=1) > 0.35).all() and (load < 0.95).all() and (load > 0).mean() > 0.9

    def test_texts_read_like_words_and_code(self) -> None:
        trace = synthetic_trace(tokens=300)
        text = "".join(trace.texts)
        assert "def area(w, h):\n    return w * h" in text and ". " in text and len(trace.texts) == 300
        assert (
            len({(i, t) for i, t in zip(trace.ids, trace.texts, strict=True)})
            == len(set(trace.texts))
            == len(set(trace.ids))
        )

    def test_the_same_arguments_give_the_same_bytes(self) -> None:
        a, b, c = (synthetic_trace(seed=seed, hidden=2) for seed in (3, 3, 4))
        assert all(a[path].tobytes() == b[path].tobytes() for path in a) and a.texts == b.texts != c.texts

    def test_planted_values_are_there(self) -> None:
        logits = synthetic_trace(5, nonfinite=True)["layers.2.moe.router_logits"]
        assert np.isnan(logits).sum() == np.isposinf(logits).sum() == np.isneginf(logits).sum() == 1

    @pytest.mark.parametrize(
        "options", [{"top_k": 9}, {"top_k": 0}, {"passes": [3]}, {"passes": [64, 0]}, {"layers": 0}]
    )
    def test_sizes_that_contradict_each_other_are_refused(self, options: dict[str, Any]) -> None:
        with pytest.raises(ArgumentError):
            synthetic_trace(**options)


FAMILIES = ("mixtral", "qwen3_moe", "olmoe", "qwen2_moe")


class TestTinyModel:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_the_same_arguments_give_the_same_bytes(self, family: str, tmp_path: Path) -> None:
        a, b, c = (tiny_model(tmp_path / str(n), family, seed=n // 2) for n in range(3))
        assert [f.read_bytes() for f in sorted(a.iterdir())] == [f.read_bytes() for f in sorted(b.iterdir())]
        assert (a / "model.safetensors").read_bytes() != (c / "model.safetensors").read_bytes()

    @pytest.mark.parametrize("family", FAMILIES)
    def test_shards_hold_the_tensors_of_the_single_file(self, family: str, tmp_path: Path) -> None:
        from safetensors.numpy import load_file

        whole = load_file(tiny_model(tmp_path / "a", family) / "model.safetensors")
        parts = tiny_model(tmp_path / "b", family, sharded=True)
        weight_map = json.loads((parts / "model.safetensors.index.json").read_text())["weight_map"]
        joined = {name: load_file(parts / file)[name] for name, file in weight_map.items()}
        assert len(set(weight_map.values())) == 3 and joined.keys() == whole.keys()
        assert all(np.array_equal(joined[name], whole[name]) for name in whole)

    @pytest.mark.parametrize("family", FAMILIES)
    def test_the_fused_form_stacks_the_same_numbers(self, family: str, tmp_path: Path) -> None:
        from safetensors.numpy import load_file

        apart = load_file(tiny_model(tmp_path / "a", family) / "model.safetensors")
        fused = load_file(tiny_model(tmp_path / "b", family, fused=True) / "model.safetensors")
        gate, up, down = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
        block = "model.layers.1." + ("block_sparse_moe" if family == "mixtral" else "mlp")
        both = fused["model.layers.1.mlp.experts.gate_up_proj"][3]
        np.testing.assert_array_equal(both[:24], apart[f"{block}.experts.3.{gate}.weight"])
        np.testing.assert_array_equal(both[24:], apart[f"{block}.experts.3.{up}.weight"])
        np.testing.assert_array_equal(
            fused["model.layers.1.mlp.experts.down_proj"][3], apart[f"{block}.experts.3.{down}.weight"]
        )

    @pytest.mark.parametrize(
        ("family", "options"),
        [
            ("mixtrel", {}),
            ("mixtral", {"dense_layers": [0]}),
            ("olmoe", {"window": 4}),
            ("mixtral", {"bias": True}),
            ("olmoe", {"head_dim": 16}),
            ("mixtral", {"dtype": "F8"}),
        ],
    )
    def test_an_option_that_the_family_does_not_have_is_refused(
        self, family: str, options: Any, tmp_path: Path
    ) -> None:
        with pytest.raises(ArgumentError):
            tiny_model(tmp_path / "m", family, **options)
        assert not (tmp_path / "m").exists()


class TestComparators:
    def test_canonical_bytes_ignore_what_a_nan_looks_like_and_nothing_else(self) -> None:
        a = np.array([0x7FC00000, 0x3F800000, 0], np.uint32).view(np.float32)
        b = np.array([0xFF800001, 0x3F800000, 0], np.uint32).view(np.float32)
        zero = np.array([0x7FC00000, 0x3F800000, 0x80000000], np.uint32).view(np.float32)
        assert canonical(a) == canonical(b) != canonical(zero)

    def test_close_is_measured_against_the_largest_magnitude(self) -> None:
        expected = np.array([100.0, 0.0, np.nan, np.inf])
        assert_close(expected + np.array([0.004, 0.004, 0, 0]), expected)
        for wrong in (
            expected + np.array([0.006, 0, 0, 0]),
            np.array([100.0, 0, 0, np.inf]),
            np.array([100, 0, np.nan, -np.inf]),
            expected[:3],
        ):
            with pytest.raises(AssertionError):
                assert_close(wrong, expected)
