"""lab.record.transformers: what it keeps is what the model computed, and the model is as it was afterwards."""

from __future__ import annotations

import numpy as np
import pytest
from checkpoints import small_config
from compare import assert_agrees

import colibri_lab as lab

pytestmark = pytest.mark.torch

FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
EVERYTHING = ["all", "layers.*.attn.weights"]
SIZES = {"hidden_size": 64, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
IDS = np.random.default_rng(0).integers(0, 61, 40).tolist()


@pytest.fixture(scope="module")
def hf():
    """The recorder that the goldens come from, imported late: torch must not be needed to collect the tests."""
    import huggingface

    return huggingface


def config_of(family: str, **options) -> dict:
    """Rows of whole 16 bytes, which the grouped product needs."""
    return small_config(family) | SIZES | ({"moe_intermediate_size": 32} if "qwen" in family else {}) | options


@pytest.fixture(scope="module", params=FAMILIES)
def saved(request, hf, tmp_path_factory):
    """(family, folder, taps of the test's own recorder)"""
    model = hf.build(config_of(request.param))
    hf.randomise(model, 1)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return request.param, folder, hf.record(model, IDS)


def load(hf, folder, dtype="float32", **options):
    return hf.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(hf.torch, dtype), **options)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "batched_mm"])
def test_every_tap_is_that_of_an_independent_recorder(hf, saved, attention, experts):
    _, folder, expected = saved
    model = load(hf, folder, attn_implementation=attention, experts_implementation=experts)
    trace = lab.record.transformers(model, IDS, capture=EVERYTHING)
    assert_agrees(trace, expected)
    assert trace.meta["library"]["expert_rows"] == "observed"
    assert (trace.meta["library"]["attention"], trace.meta["library"]["experts"]) == (attention, experts)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "batched_mm"])
def test_recording_changes_no_byte_of_the_output(hf, saved, attention, experts, dtype):
    _, folder, _ = saved
    model = load(hf, folder, dtype, attn_implementation=attention, experts_implementation=experts)
    row = hf.torch.tensor([IDS])
    with hf.torch.no_grad():
        before = model(row).logits
    trace = lab.record.transformers(model, IDS, capture=EVERYTHING)
    with hf.torch.no_grad():
        after = model(row).logits
    assert trace["logits"].tobytes() == before[0].float().numpy().tobytes() == after[0].float().numpy().tobytes()
