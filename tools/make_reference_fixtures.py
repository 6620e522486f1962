#!/usr/bin/env python3
"""Make the reference checkpoints of tests/fixtures/reference again with transformers, or check those that are there.

    python tools/make_reference_fixtures.py OUT        writes the seven folders under OUT (needs torch and transformers)
    python tools/make_reference_fixtures.py --check    makes them in a temporary folder and compares: weights by byte,
                                                       recordings within 1e-5, since another CPU rounds differently

What the folders and tensors are is told in tests/fixtures/reference/README.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path.insert(0, str(TESTS / "support"))

import torch  # noqa: E402
from checkpoints import read_safetensors, write_safetensors  # noqa: E402
from huggingface import build, load, randomise, record  # noqa: E402

N_PROMPT, N_GREEDY, VOCABULARY = 24, 16, 256
PLAIN = {"rope_type": "default", "rope_theta": 5000.0}
YARN = {
    **PLAIN,
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 512,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
}
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 2e-5,
    "rope_parameters": PLAIN,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
QWEN2 = {
    "model_type": "qwen2_moe",
    "num_hidden_layers": 4,
    "intermediate_size": 40,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
    "num_experts": 8,
    "num_experts_per_tok": 4,
}
QWEN3 = {
    "model_type": "qwen3_moe",
    "head_dim": 16,
    "intermediate_size": 40,
    "moe_intermediate_size": 20,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
}
MIXTRAL = {"model_type": "mixtral", "intermediate_size": 24}
OLMOE = {
    "model_type": "olmoe",
    "intermediate_size": 20,
    "num_experts": 8,
    "num_experts_per_tok": 4,
    "norm_topk_prob": False,
}
# folder -> (seed, options beyond COMMON); a family's namesake comes in every stored form
FOLDERS = {
    "mixtral": (1237, {**MIXTRAL, "head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2}),
    "mixtral_swa": (
        1246,
        {**MIXTRAL, "num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 7, "tie_word_embeddings": True},
    ),
    "qwen2_moe": (1245, {**QWEN2, "norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": [1]}),
    "qwen2_moe_step": (
        1251,
        {**QWEN2, "norm_topk_prob": True, "decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 6}
        | {"max_window_layers": 3},
    ),
    "qwen3_moe": (1235, {**QWEN3, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "qwen3_moe_yarn": (
        1239,
        {
            **QWEN3,
            "norm_topk_prob": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": YARN,
        },
    ),
    "olmoe": (1237, {**OLMOE, "clip_qkv": 1.5}),
}


def prompt() -> list[int]:
    """24 ids from a linear congruential generator modulo 2^16 + 1; 0, 1 and 2 are left to special tokens."""
    x, ids = 17, []
    for _ in range(N_PROMPT):
        x = (x * 75 + 74) % 65537
        ids.append(3 + x % (VOCABULARY - 3))
    return ids


def recording(model) -> dict[str, np.ndarray]:
    """The tensors of golden.safetensors."""
    ids = prompt()
    taps = record(model, ids)
    out = {"input_ids": np.array(ids), "hidden.0": taps["embed"], "final_norm": taps["norm"], "logits": taps["logits"]}
    n_layers = model.config.num_hidden_layers
    sparse = [layer for layer in range(n_layers) if f"layers.{layer}.moe.gates" in taps]
    for layer in range(n_layers):
        path = f"layers.{layer}."
        block = path + ("moe." if layer in sparse else "mlp.")
        out[f"layer.{layer}.attn_out"] = taps[path + "attn.out"]
        out[f"layer.{layer}.ffn_in"], out[f"layer.{layer}.ffn_out"] = taps[block + "input"], taps[block + "output"]
        out[f"hidden.{layer + 1}"] = taps[path + "output"]
        names = {"router_logits": "router_logits", "expert_ids": "topk_ids", "gates": "gates", "routed": "routed_out"}
        for tap, name in {**names, "shared.output": "shared_out"}.items():
            if block + tap in taps:
                out[f"moe.{layer}.{name}"] = taps[block + tap]
    out["expert.layer"] = np.array([sparse[0]])
    for expert in range(taps[f"layers.{sparse[0]}.moe.router_logits"].shape[1]):
        for tap, name in {"tokens": "tokens", "input": "in", "output": "out"}.items():
            out[f"expert.{expert}.{name}"] = taps[f"layers.{sparse[0]}.moe.experts.{expert}.{tap}"]
    out |= greedy(model, ids)
    return {name: value.astype(np.int64) if value.dtype.kind == "i" else value for name, value in sorted(out.items())}


def greedy(model, ids: list[int]) -> dict[str, np.ndarray]:
    tokens = torch.tensor([ids])
    options = {"max_new_tokens": N_GREEDY, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.no_grad():
        run = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), return_dict_in_generate=True, output_logits=True, **options
        )
    return {"greedy_ids": run.sequences[0, len(ids) :].numpy(), "greedy_logits": torch.cat(run.logits).numpy()}


def legacy_config(config: dict) -> dict:
    """The same settings in the spelling from before transformers 5."""
    config = dict(config, transformers_version="4.51.0", torch_dtype=config["dtype"])
    rope = dict(config.pop("rope_parameters"))
    del config["dtype"]
    config["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {**rope, "type": kind}
    if config["model_type"] == "qwen3_moe":
        config["num_experts"] = config.pop("num_local_experts")
    return config


def make(out: Path) -> None:
    torch.set_num_threads(1)
    for name, (seed, options) in FOLDERS.items():
        folder = out / name
        model = build({**COMMON, **options})
        randomise(model, seed)
        model.save_pretrained(folder)
        write_safetensors(folder / "golden.safetensors", recording(load(folder)))
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.legacy.json").write_text(json.dumps(legacy_config(config), indent=1))
        if name != options["model_type"]:
            continue
        model.save_pretrained(folder / "sharded", max_shard_size="120KB")
        model.save_pretrained(folder / "fused", save_original_format=False)
        for form, dtype in {"bf16": torch.bfloat16, "f16": torch.float16}.items():
            load(folder, dtype).save_pretrained(folder / form)
            write_safetensors(folder / form / "golden.safetensors", recording(load(folder / form)))
        print(f"{name}: {sum(path.stat().st_size for path in folder.rglob('*') if path.is_file()) >> 10} KiB")


def compare(made: Path, kept: Path) -> float:
    """Largest relative difference of any recorded tensor; weights and configs must be equal."""
    worst = 0.0
    files = {path.relative_to(made) for path in made.rglob("*") if path.is_file()}
    missing = files ^ {
        path.relative_to(kept) for path in kept.rglob("*") if path.is_file() and path.name != "README.md"
    }
    assert not missing, f"only on one side: {sorted(map(str, missing))}"
    for file in sorted(files):
        if file.name == "golden.safetensors":
            ours, theirs = read_safetensors(made / file), read_safetensors(kept / file)
            assert ours.keys() == theirs.keys(), file
            for name, value in theirs.items():
                if name.endswith("topk_ids"):
                    assert (np.sort(ours[name]) == np.sort(value)).all(), (file, name)
                elif value.size:
                    worst = max(worst, float(np.abs(ours[name] - value).max() / max(np.abs(value).max(), 1e-30)))
        elif file.suffix == ".json":
            assert json.loads((made / file).read_text()) == json.loads((kept / file).read_text()), file
        else:
            assert (made / file).read_bytes() == (kept / file).read_bytes(), file
    assert worst <= 1e-5, f"a recording differs by {worst:.1e}"
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--check", action="store_true", help="compare with tests/fixtures/reference")
    arguments = parser.parse_args()
    if arguments.check == (arguments.out is not None):
        parser.error("give either a folder to write or --check")
    if arguments.out:
        make(arguments.out)
        return
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder))
        worst = compare(Path(folder), TESTS / "fixtures" / "reference")
        print(f"equal; recordings within {worst:.1e}")


if __name__ == "__main__":
    main()
