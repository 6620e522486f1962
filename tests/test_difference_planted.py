"""Faults planted in the computation of the NumPy forward pass: the first tap that must differ is the first found.

A is our engine, B the oracle in float64 with the fault: all but the fault is the noise of float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from checkpoints import random_tensors, small_config, write_checkpoint
from oracle import Oracle
from traced import traced

import colibri_lab as lab

FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
IDS = np.random.default_rng(5).integers(0, 60, 40).tolist()
LAYERS = 4


@cache
def checkpoint(family: str) -> tuple[dict, dict[str, np.ndarray]]:
    config = small_config(family, num_hidden_layers=LAYERS, vocab_size=64, rms_norm_eps=1e-6)
    return config, random_tensors(config, 1)


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Callable[[str], lab.Trace]:
    """The engine's trace of a family's checkpoint, everything kept."""

    @cache
    def of(family: str) -> lab.Trace:
        folder = write_checkpoint(tmp_path_factory.mktemp(family), *checkpoint(family))
        session = lab.open(folder).session(capture=["all", "layers.*.attn.weights"], max_tokens=64)
        session.feed(IDS)
        return session.trace()

    return of


class Faulty(Oracle):
    """The oracle with one thing wrong in one layer."""

    def __init__(self, family: str, fault: str, layer: int):
        config, tensors = checkpoint(family)
        super().__init__(config, tensors)
        self.fault, self.layer = fault, f"model.layers.{layer}."

    def norm(self, x, name):
        wrong = self.fault == "epsilon_" + name.removeprefix(self.layer).replace(".", "_")
        if self.fault == "epsilon_final":
            wrong = name == "model.norm"
        if not wrong:
            return super().norm(x, name)
        return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-5) * self.tensors[name + ".weight"]

    def mlp(self, x, prefix, names):
        if self.fault == "swapped" and prefix.startswith(self.layer):
            names = (names[1], names[0], names[2])
        parts = super().mlp(x, prefix, names)
        if self.fault == "gelu" and prefix.startswith(self.layer):
            from math import erf

            gate = parts["gate"]
            parts["hidden"] = gate * (1 + np.vectorize(erf)(gate / np.sqrt(2))) / 2 * parts["up"] if gate.size else gate
            parts["output"] = self.linear(parts["hidden"], prefix + names[2])
        return parts


def compared(reference, family: str, fault: str, layer: int) -> lab.Diff:
    config, _ = checkpoint(family)
    return lab.diff(reference(family), traced(Faulty(family, fault, layer).forward(IDS), config, IDS))


@pytest.mark.parametrize("family", FAMILIES)
def test_two_right_runs_agree(reference, family):
    d = compared(reference, family, "none", 0)
    assert d.verdict == "identical", d.report()


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("norm", "tap"), [("input_layernorm", "attn.norm"), ("post_attention_layernorm", "moe.input")]
)  # fmt: skip
def test_an_epsilon_of_one_norm_is_found_where_it_is_at_any_depth(reference, norm, tap, family, layer):
    """1e-5 for 1e-6: a change of 4.5e-6 over the mean square, in deep layers less than the noise of a single value."""
    d = compared(reference, family, "epsilon_" + norm, layer)
    assert d.verdict == "defect", d.report()
    assert d.first_divergence.path == f"layers.{layer}.{tap}", d.report()


@pytest.mark.parametrize("family", FAMILIES)
def test_an_epsilon_of_the_last_norm_is_found(reference, family):
    d = compared(reference, family, "epsilon_final", 0)
    assert (d.verdict, d.first_divergence.path, d.first_divergence.layer) == ("defect", "norm", None), d.report()


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("family", ("qwen3_moe", "olmoe"))
def test_an_epsilon_of_a_norm_of_queries_is_found(reference, family, layer):
    d = compared(reference, family, "epsilon_self_attn_q_norm", layer)
    assert d.first_divergence and d.first_divergence.path == f"layers.{layer}.attn.q", d.report()


@pytest.mark.parametrize("layer", (0, 3))
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("fault", "tap"), [("swapped", "gate"), ("gelu", "hidden")])
def test_a_fault_inside_the_experts_is_found_at_the_first_product(reference, fault, tap, family, layer):
    d = compared(reference, family, fault, layer)
    assert d.first_divergence.path == f"layers.{layer}.moe.experts.*.{tap}", d.report()
    assert d.first_divergence.stage == "expert" and d.first_divergence.expert is not None
    assert {flip.verdict for flip in d.flips} <= {"downstream"}
