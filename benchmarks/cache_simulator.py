"""cache_simulator.py: requests per second of the cache simulator on one core, and its memory on long traces.

    python benchmarks/cache_simulator.py [--tokens 1000000,10000000] [--experts 128] [--top-k 8] [--rounds 5]

Speed: one round takes a sample of every analysis, the next goes backwards; median and range of CPU time, ids taken from
a trace in memory. Memory: each length of trace is a file in a temporary folder, opened and analysed by a process
of its own; counted is what its private memory grows by at most while it analyses (the pages of the file are the
system's, which takes them back when it wants to). Leaves cache-simulator-<cpu>-<date>.json and .md.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine
import numpy as np
from bench import default_results
from harness import Sample, interleave, summary
from report import table, write

import colibri_lab as lab
from colibri_lab.testing import synthetic_trace
from colibri_lab.trace import Trace

SHORT = 200_000  # requests of each trace whose speed is measured, times layers
LONG = ("lru", "belady", "lfu")  # curves of the long traces
STEP = 1 << 16


def routes(tokens: int, experts: int, k: int, seed: int) -> np.ndarray:
    """(tokens, k) int32 distinct experts, some busier than others, half of the tokens like the one before."""
    rng = np.random.default_rng(seed)
    taste = 3 * rng.random(experts, np.float32)
    noise = rng.gumbel(size=(tokens, experts)).astype(np.float32)
    noise[1::2] = 0.5 * noise[1::2] + 0.5 * noise[: len(noise[1::2]) * 2 : 2]
    return np.argpartition(-(taste + noise), k - 1, axis=1)[:, :k].astype(np.int32)


def in_memory(tokens: int, layers: int, experts: int, k: int) -> Trace:
    """A trace of ids alone."""
    arrays = {f"layers.{layer}.moe.expert_ids": routes(tokens, experts, k, layer) for layer in range(layers)}
    meta = {**synthetic_trace(layers, experts, k, 1).meta, "passes": [[0, tokens]]}
    return Trace(arrays, ids=[0] * tokens, texts=[], meta=meta)


def on_disk(path: Path, tokens: int, experts: int, k: int) -> None:
    """The same of one layer as a trace file, written in pieces; the tokens are id 0 without a text."""
    synthetic_trace(1, experts, k, 1).save(path)
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header: dict[str, Any] = {"__metadata__": json.loads(whole[8 : 8 + length])["__metadata__"]}
    sizes = {
        "tokens.ids": ("I64", [tokens]),
        "tokens.text_offsets": ("I64", [tokens + 1]),
        "tokens.passes": ("I64", [1, 2]),
        "layers.0.moe.expert_ids": ("I32", [tokens, k]),
        "tokens.text": ("U8", [0]),
    }
    at = 0
    for name, (kind, shape) in sizes.items():
        n_bytes = {"I64": 8, "I32": 4, "U8": 1}[kind] * int(np.prod(shape))
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, at + n_bytes]}
        at += n_bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)  # what is not written is 0
        file.seek(8 + len(text) + header["tokens.passes"]["data_offsets"][0])
        file.write(np.array([0, tokens], np.int64).tobytes())
        block = routes(min(tokens, STEP), experts, k, 0)
        for start in range(0, tokens, STEP):  # each piece with its experts renamed, so that none repeats another
            names = np.random.default_rng(start).permutation(experts).astype(np.int32)
            file.write(names[block[: tokens - start]].tobytes())


# ---- speed ----


def analyses(layers: int, experts: int, k: int) -> dict[str, tuple[int, Callable[[], object]]]:
    """Name -> requests and what is timed."""
    trace = in_memory(SHORT // k, layers, experts, k)
    one = in_memory(SHORT // k * 4, 1, experts, k)
    many = layers * trace.n_tokens * k
    out: dict[str, tuple[int, Callable[[], object]]] = {}
    for policy in ("lru", "lfu", "belady"):
        out[f"curve {policy}, per layer"] = (
            one.n_tokens * k,
            lambda p=policy: lab.cache.miss_ratio_curve(one, p, progress=False),
        )
    out[f"curve lru, global ({layers} × {experts})"] = (
        many,
        lambda: lab.cache.miss_ratio_curve(trace, "lru", "global", progress=False),
    )
    for policy in lab.cache.POLICIES:
        out[f"simulate {policy}, {experts // 4} of {experts}"] = (
            one.n_tokens * k,
            lambda p=policy: lab.cache.simulate(one, p, experts // 4, progress=False),
        )
    return out


def timed(requests: int, work: Callable[[], object]) -> Sample:
    start = time.process_time()
    work()
    return Sample(requests / (time.process_time() - start) / 1e6)


# ---- memory ----


def private_bytes() -> int:
    """Memory of this process that no file stands behind."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this system does not tell RssAnon")


def grown(work: Callable[[], object]) -> tuple[int, float]:
    """Most that private memory grew by while `work` ran, and its seconds."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed would hide what is taken
    before, most, done = private_bytes(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            most[0] = max(most[0], private_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    return max(0, most[0] - before), seconds


def child(path: str) -> int:
    """In a process of its own: what each analysis of one file takes, as JSON."""
    lab.cache.miss_ratio_curve(in_memory(100, 1, 8, 2), progress=False)  # all modules are loaded
    loaded: list[Trace] = []
    out: dict[str, Any] = {"load_trace": grown(lambda: loaded.append(lab.load_trace(path)))[0]}
    trace = loaded[0]
    for policy in LONG:
        out[f"curve {policy}"] = grown(lambda p=policy: lab.cache.miss_ratio_curve(trace, p, progress=False))
    out["simulate lru"] = grown(lambda: lab.cache.simulate(trace, "lru", trace.num_experts // 4, progress=False))
    print(json.dumps(out))
    return 0


def memory(tokens: int, experts: int, k: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "long.safetensors"
        on_disk(path, tokens, experts, k)
        done = subprocess.run(
            [sys.executable, __file__, "--child", str(path)], capture_output=True, text=True, check=True
        )
    return dict(json.loads(done.stdout))


# ---- the page ----


def page(whole: dict[str, Any]) -> str:
    speed = [
        [name, f"{s['median']:.1f}", f"{s['low']:.1f} to {s['high']:.1f}", str(s["n"])]
        for name, s in whole["speed"].items()
    ]
    lengths = list(whole["memory"])
    names = list(next(iter(whole["memory"].values())))
    rows = []
    for name in names:
        cells = [whole["memory"][length][name] for length in lengths]
        rows.append([name, *(f"{(c if isinstance(c, int) else c[0]) / 1e6:.1f} MB" for c in cells)])
    return (
        f"# The cache simulator on {whole['machine']['cpu']}\n\nMillion requests per second of CPU time, one core.\n\n"
        + table(["analysis", "median", "range", "samples"], speed)
        + f"\n\nPrivate memory that an analysis adds, by tokens of the trace ({whole['experts']} experts, "
        f"top-{whole['top_k']}, one layer).\n\n" + table(["analysis", *(f"{int(n):,}" for n in lengths)], rows) + "\n"
    )


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    out.add_argument("--tokens", default="1000000,10000000")
    out.add_argument("--layers", type=int, default=48, help="of the global cache (default: %(default)s)")
    out.add_argument("--experts", type=int, default=128)
    out.add_argument("--top-k", type=int, default=8)
    out.add_argument("--rounds", type=int, default=5)
    out.add_argument("--results", type=Path, default=default_results())
    out.add_argument("--child", help=argparse.SUPPRESS)
    return out


def main() -> int:
    options = parser().parse_args()
    if options.child:
        return child(options.child)
    experts, k = options.experts, options.top_k
    work = analyses(options.layers, experts, k)
    taken = interleave({name: lambda job=job: timed(*job) for name, job in work.items()}, options.rounds)
    whole = {
        "machine": machine.describe(),
        "experts": experts,
        "top_k": k,
        "speed": {name: vars(summary(samples)) for name, samples in taken.items()},
        "samples": {name: [sample.value for sample in samples] for name, samples in taken.items()},
        "memory": {tokens: memory(int(tokens), experts, k) for tokens in options.tokens.split(",")},
    }
    base = options.results / f"cache-simulator-{machine.slug(whole['machine'])}"
    write(base.with_name(f"{base.name}.json"), json.dumps(whole, indent=1) + "\n")
    write(base.with_name(f"{base.name}.md"), page(whole))
    print(page(whole))
    return 0


if __name__ == "__main__":
    sys.exit(main())
