"""A program: record with whichever release of transformers is on the path, and hold the traces to what is known.

Prints the release, then one line per comparison with its largest error; an AssertionError ends it. The goldens were
recorded once, by another program, with transformers 5.24; the engine is ours. The older releases load checkpoints that
they saved themselves as well.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from compare import assert_agrees, errors
from goldens import REFERENCE, expected_taps, golden_of
from transformers import AutoConfig, AutoModelForCausalLM

import colibri_lab as lab

FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
EVERYTHING = ["all", "layers.*.attn.weights"]
SIZES = {
    "vocab_size": 61, "hidden_size": 64, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 3, "num_experts_per_tok": 3, "max_position_embeddings": 256, "head_dim": 16,
}  # fmt: skip
OWN = {
    "mixtral": {"num_local_experts": 9, "sliding_window": 7},
    "qwen2_moe": {"num_experts": 9, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
                  "mlp_only_layers": [1], "norm_topk_prob": False},
    "qwen3_moe": {"num_experts": 9, "moe_intermediate_size": 32, "mlp_only_layers": [0], "norm_topk_prob": True},
    "olmoe": {"num_experts": 9, "clip_qkv": 0.7, "norm_topk_prob": True},
}  # fmt: skip


def drawn(family: str):
    """A small model of this release with weights large enough for its routers to be decided."""
    torch.manual_seed(3)
    settings = {name: value for name, value in (SIZES | OWN[family]).items()}
    if family in ("qwen2_moe", "olmoe"):
        settings.pop("head_dim")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.mul_(8 if "experts" in name or "gate.weight" in name else 4)
    return model


def against_goldens() -> None:
    """Checkpoints that this release did not write, config in the older spelling where the newer one came with 5."""
    for family in (*FAMILIES, "mixtral_swa", "qwen2_moe_step", "qwen3_moe_yarn"):
        golden = golden_of(family)
        trace = lab.record.transformers(REFERENCE / family, golden["input_ids"], capture="all")
        expected = expected_taps(golden)
        if family == "qwen2_moe_step" and transformers.__version__.startswith("4."):
            # Windows in every second layer came with 5; before, all layers had one, and the trace shows where it tells.
            assert errors(trace, expected)["layers.1.attn.out"] > 0.1
            expected = {path: tap for path, tap in expected.items() if path.startswith(("embed", "layers.0."))}
        print("golden", family, trace.meta["library"]["expert_rows"], f"{assert_agrees(trace, expected):.1e}")


def against_the_engine(folder: Path) -> None:
    """Every tap of a model that this release built and saved, in both attentions; its output bytes stay."""
    ids = np.random.default_rng(0).integers(0, 61, 30).tolist()
    for family in FAMILIES:
        drawn(family).save_pretrained(folder / family)
        session = lab.open(folder / family).session(capture=EVERYTHING)
        session.feed(ids)
        for attention in ("eager", "sdpa"):
            model = AutoModelForCausalLM.from_pretrained(folder / family, attn_implementation=attention)
            with torch.no_grad():
                before = model(torch.tensor([ids])).logits[0].numpy()
            trace = lab.record.transformers(model, ids, capture=EVERYTHING)
            assert trace["logits"].tobytes() == before.tobytes(), (family, attention)
            assert set(trace) == set(session.trace()), set(trace) ^ set(session.trace())
            assert trace.meta["library"]["attention"] == attention
            worst = assert_agrees(trace, {path: session.tape[path] for path in compared(session)})
            print("engine", family, attention, trace.meta["library"]["expert_rows"], f"{worst:.1e}")


def compared(session) -> list[str]:
    """Every stored path, packed rows expert by expert: inside an expert, two runs may order tokens as they like."""
    trace = session.trace()
    plain = [path for path in trace if ".dispatch." not in path]
    taps = ("tokens", "input", "gate", "up", "hidden", "output")
    return plain + [
        f"layers.{layer}.moe.experts.{expert}.{tap}"
        for layer in trace.moe_layers
        for expert in range(trace.num_experts)
        for tap in taps
    ]


if __name__ == "__main__":
    torch.set_num_threads(1)
    print("transformers", transformers.__version__, flush=True)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    against_goldens()
    with tempfile.TemporaryDirectory() as folder:
        against_the_engine(Path(folder))
    print("done")
