"""Claim: a mapped safetensors file loads 8× faster than a pickle (0.41 s against 3.2 s).

The same tensors as a checkpoint, as a pickle of NumPy arrays and, with PyTorch, as `torch.save` writes them; each
opened by a fresh process (claims/opening.py), files in the page cache. A mapping puts the work off, so the time until
every byte has been read once is shown beside the time until the call returns.
"""

from __future__ import annotations

import importlib.util
import json
import pickle
import subprocess
import sys
from functools import partial
from pathlib import Path

import models
from harness import Cell, Sample, interleave, paired_ratio
from report import ratio_text
from suite import say

import colibri_lab as lab
from claims.claim import UNMEASURABLE, Plan, Result, judged

SAID = "mapped safetensors load 8× faster than a pickle"
SCRIPT = Path(__file__).with_name("opening.py")


def write_pickle(checkpoint: Path, partial_file: Path) -> None:
    weights = lab.open(checkpoint).weights
    with partial_file.open("wb") as file:
        pickle.dump({name: weights[name] for name in weights}, file, protocol=5)


def open_once(kind: str, path: Path) -> Sample:
    done = subprocess.run([sys.executable, str(SCRIPT), kind, str(path)], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{kind}: {done.stderr.strip().splitlines()[-1]}")
    line = json.loads(done.stdout)
    return Sample(line["open"], extra=line)


def run(plan: Plan) -> list[Result]:
    info = lab.open().info
    folder = Path(info["path"]) if plan.quick else models.checkpoint(models.COARSE, "bf16", plan.cache)
    name = "bundled" if plan.quick else "coarse-bf16"
    pickled = models.made(plan.cache / f"{name}.pickle", partial(write_pickle, folder))
    paths = {"colibri": folder, "pickle": pickled}
    torch = not plan.quick and importlib.util.find_spec("torch") is not None
    if torch:
        saved = plan.cache / f"{name}.pt"
        if not saved.exists():
            subprocess.run([sys.executable, str(SCRIPT), "save", str(pickled), str(saved)], check=True)
        paths |= {"torch.load": saved, "torch.load, mmap": saved}
    elif not plan.quick:
        say("torch is not installed: torch.load is left out, a plain pickle stands in")
    asked = {kind: partial(open_once, kind, path) for kind, path in paths.items()}
    opened = interleave(asked, plan.rounds)
    touched = {kind: [Sample(s.extra["touched"]) for s in taken] for kind, taken in opened.items()}
    point = {"model": name, "MB": round(sum(f.stat().st_size for f in folder.glob("*.safetensors")) / 1e6)}
    cells = [
        Cell("open", "s", point, opened, higher_is_better=False),
        Cell("open, every byte read", "s", point, touched, higher_is_better=False),
    ]
    peer = "torch.load" if torch else "pickle"
    gain, whole = (paired_ratio(c.samples[peer], c.samples["colibri"]) for c in cells)
    facts = {f"{peer} / colibri, open": ratio_text(gain), f"{peer} / colibri, every byte read": ratio_text(whole)}
    why = f"opening reads headers only; until every byte was read once the gain over {peer} is {whole.median:.1f}×"
    if not torch:
        facts["torch.load"] = "left out in the quick form" if plan.quick else "torch is not installed"
        why += "; torch.load itself was not measured"
    verdict = judged(gain, 8) if torch or plan.quick else UNMEASURABLE
    return [Result("load", SAID, f"{gain.median:.0f}× {peer}", verdict, why, cells, facts)]
