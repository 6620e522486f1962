"""Fifty pairs of runs that are both right: no verdict but identical or tie.

A file in bfloat16 and one in float32 that hold the same values, the attentions and the expert implementations of
transformers, its releases, our engine, cached and full passes: other orders of summation, nothing else.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from checkpoints import read_checkpoint, small_config, write_checkpoint
from goldens import REFERENCE

import colibri_lab as lab

pytestmark = pytest.mark.torch

ROOT = Path(__file__).resolve().parents[2]
OLDER = ("4.57.6", "5.0.0", "5.8.0")
FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
SEEDS = (0, 1)
EVERYTHING = ["all", "layers.*.attn.weights"]
N_TOKENS = 96
SIZES = {  # grouped products of torch want rows of whole 16 bytes
    "hidden_size": 48, "head_dim": 12, "intermediate_size": 24, "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
}  # fmt: skip
REFERENCE_IDS = np.random.default_rng(7).integers(0, 60, 48).tolist()

IN_ANOTHER_RELEASE = """
import sys
import colibri_lab as lab
ids = [int(x) for x in sys.argv[1].split()]
for folder in sys.argv[2:]:
    lab.record.transformers(folder, ids, capture="all").save(folder + "/recorded.safetensors")
"""


@pytest.fixture(scope="module", params=[(family, seed) for family in FAMILIES for seed in SEEDS], ids=str)
def checkpoint(request, tmp_path_factory) -> tuple[Path, list[int]]:
    """A random checkpoint of four layers whose values bfloat16 holds exactly, and token ids."""
    import huggingface as hf

    family, seed = request.param
    own = {name: size for name, size in SIZES.items() if name in small_config(family)}
    config = small_config(family, num_hidden_layers=4, num_experts_per_tok=2 + seed, **own)
    model = hf.build(config)
    hf.randomise(model, seed)
    folder = tmp_path_factory.mktemp(family)
    model.to(hf.torch.bfloat16).save_pretrained(folder / "bf16")
    stored, tensors = read_checkpoint(folder / "bf16")
    write_checkpoint(folder, stored, {name: value.astype(np.float32) for name, value in tensors.items()})
    return folder, np.random.default_rng(seed).integers(0, config["vocab_size"], N_TOKENS).tolist()


def engine(folder: Path, ids: list[int], sizes: tuple[int, ...] = ()) -> lab.Trace:
    session, start = lab.open(folder).session(capture=EVERYTHING, max_tokens=128), 0
    for size in sizes or (len(ids),):
        session.feed(ids[start : start + size])
        start += size
    return session.trace()


def recorded(folder: Path, ids: list[int], **options) -> lab.Trace:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    return lab.record.transformers(model, ids, capture="all")


def assert_clean(a: lab.Trace, b: lab.Trace) -> None:
    d = lab.diff(a, b, progress=False)
    worst = max(d.table[d.table["tolerance"] > 0], key=lambda row: row["max_rel"] / row["tolerance"])
    path, share = worst["path"], worst["max_rel"] / worst["tolerance"]
    print(f"{d.verdict}, {len(d.table)} taps, {len(d.flips)} flips; {path} takes {share:.2f} of its tolerance")
    assert d.verdict in ("identical", "tie"), d.report()
    assert len(d.table) > 40


def test_a_bfloat16_file_and_a_float32_file_of_the_same_values(checkpoint):
    folder, ids = checkpoint
    assert_clean(engine(folder, ids), engine(folder / "bf16", ids, (40, 1, N_TOKENS - 41)))


def test_the_engine_and_transformers(checkpoint):
    folder, ids = checkpoint
    assert_clean(recorded(folder, ids, attn_implementation="eager"), engine(folder, ids))


def test_transformers_with_a_bfloat16_file_and_the_engine(checkpoint):
    folder, ids = checkpoint
    assert_clean(recorded(folder / "bf16", ids), engine(folder, ids))


def test_sdpa_and_eager_attention(checkpoint):
    folder, ids = checkpoint
    assert_clean(recorded(folder, ids, attn_implementation="eager"), recorded(folder, ids, attn_implementation="sdpa"))


def test_two_ways_to_run_the_experts(checkpoint):
    folder, ids = checkpoint
    ways = ("eager", "batched_mm")
    assert_clean(*(recorded(folder, ids, experts_implementation=way) for way in ways))


@pytest.fixture(scope="module", params=OLDER)
def by_release(request, tmp_path_factory) -> tuple[str, Path]:
    """An older release and a folder of what it recorded of each family, in one process of its own."""
    root = tmp_path_factory.mktemp(request.param)
    for family in FAMILIES:
        (root / family).mkdir()
        shutil.copy(REFERENCE / family / "model.safetensors", root / family)
        shutil.copy(REFERENCE / family / "config.legacy.json", root / family / "config.json")
    older = Path(sys.prefix) / f"transformers-{request.param}"
    assert older.is_dir(), f"{older} is missing: python tools/older_transformers.py installs it (make test-torch)"
    path = [str(older), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", IN_ANOTHER_RELEASE, " ".join(map(str, REFERENCE_IDS)),
         *(str(root / family) for family in FAMILIES)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path), "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return request.param, root


@pytest.mark.parametrize("family", FAMILIES)
def test_two_releases_of_transformers(by_release, family):
    """The older one read a config in its own spelling."""
    release, root = by_release
    other = lab.load_trace(root / family / "recorded.safetensors")
    assert other.meta["library"]["transformers"] == release
    assert_clean(recorded(REFERENCE / family, REFERENCE_IDS), other)
