"""Records the bundled model as Hugging Face transformers runs it, for notebook 03 where torch is not installed.

    python tools/record_bundled.py        (needs the extra "hf"; writes colibri_lab/bundled/reference/)

A short text in float32 with every tap; and a longer one in bfloat16, by two attention kernels, with what the routers
read and decided.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import colibri_lab as lab

BUNDLED = Path(lab.__file__).parent / "bundled"
SHORT = "3 * 7 = 21\nThe Queen of Hearts, she counts her gates"
LONG = Path(__file__).parent.parent / "tests/fixtures/held_out.json"  # the English one: King James Bible
ROUTERS = [f"layers.*.moe.{tap}" for tap in ("input", "router_logits", "scores", "expert_ids", "gates")]


def main() -> None:
    model, folder = BUNDLED / "tiny-colibri", BUNDLED / "reference"
    folder.mkdir(exist_ok=True)
    lab.record.transformers(model, SHORT, capture="all").save(folder / "transformers-float32.safetensors")
    text = json.loads(LONG.read_text(encoding="utf-8"))["english"]["text"]
    for attention in ("eager", "sdpa"):
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, attn_implementation=attention).eval()
        trace = lab.record.transformers(loaded, text, capture=ROUTERS)
        trace.save(folder / f"transformers-bfloat16-{attention}.safetensors")
    for path in sorted(folder.iterdir()):
        print(f"{path.name:45} {path.stat().st_size:>9,} bytes")


if __name__ == "__main__":
    main()
