"""recording_cost.py: what `lab.record.transformers` costs beside the plain forward pass of the same loaded model.

    python benchmarks/recording_cost.py [--models coarse,fine] [--layers 2] [--tokens 8,64,512] [--rounds 9]

One round takes a sample of the plain pass and of every capture, the next goes backwards; a cost is the median of the
ratios within rounds, with its bootstrap interval. Two layers of coarse or fine are some 900 MB of float32 weights, far
more than a cache holds, and all layers cost the same. Needs torch and transformers (pip install 'colibri-lab[hf]').
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import Sample, interleave, paired_ratio, summary
from models import SPECS, checkpoint, default_cache, variant

CAPTURES = ("routing", "moe", "all")
DTYPES = {"f32": "float32", "bf16": "bfloat16"}


def timed(work: Callable[[], object]) -> Sample:
    start = time.perf_counter()
    work()
    return Sample(time.perf_counter() - start)


def contenders(model: Any, ids: list[int]) -> dict[str, Callable[[], Sample]]:
    """The plain pass first; everything is run once before it is measured."""
    import torch

    import colibri_lab as lab

    row = torch.tensor([ids])

    def plain() -> None:
        with torch.no_grad():
            model(row, use_cache=False)

    work: dict[str, Callable[[], object]] = {"plain": plain}
    for capture in CAPTURES:
        work[capture] = lambda capture=capture: lab.record.transformers(model, ids, capture=capture, progress=False)
    for job in work.values():
        job()
    return {name: lambda job=job: timed(job) for name, job in work.items()}


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    out.add_argument("--models", default="coarse,fine")
    out.add_argument("--layers", type=int, default=2)
    out.add_argument("--tokens", default="8,64,512")
    out.add_argument("--dtype", default="f32", choices=DTYPES)
    out.add_argument("--threads", type=int)
    out.add_argument("--rounds", type=int, default=9)
    out.add_argument("--cache", type=Path, default=default_cache())
    return out


def main() -> int:
    options = parser().parse_args()
    import numpy as np
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    if options.threads:
        torch.set_num_threads(options.threads)
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    print(f"{'model':16} {'experts':11} {'tokens':>6} {'plain ms':>9}   " + "   ".join(f"{c:^20}" for c in CAPTURES))
    for name in options.models.split(","):
        spec = variant(SPECS[name], layers=options.layers)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            checkpoint(spec, options.dtype, options.cache), dtype=getattr(torch, DTYPES[options.dtype])
        )
        for experts in (("eager", "grouped_mm") if hasattr(model, "set_experts_implementation") else ("modules",)):
            if experts != "modules":
                model.set_experts_implementation(experts)
            for tokens in map(int, options.tokens.split(",")):
                ids = np.random.default_rng(tokens).integers(0, spec.vocabulary, tokens).tolist()
                taken = interleave(contenders(model, ids), options.rounds)
                ratios = [paired_ratio(taken[capture], taken["plain"]) for capture in CAPTURES]
                costs = "   ".join(f"{ratio.median:5.2f} ({ratio.low:5.2f}-{ratio.high:5.2f})" for ratio in ratios)
                plain = summary(taken["plain"]).median * 1e3
                print(f"{spec.name:16} {experts:11} {tokens:6} {plain:9.1f}   {costs}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
