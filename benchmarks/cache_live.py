"""cache_live.py: a model in a budget of experts, run for real, beside what the cost model says of it.

    python benchmarks/cache_live.py [--budgets 16,32,48] [--tokens 32] [--rounds 7] [--threads N]

One round runs every budget once and measures the machine before and after each run, with reads of the same size; the
next round goes backwards. The prediction takes the medians of all these measurements, none of the runs. The model is
random, and its embeddings are enlarged so that the residual stream tells tokens apart: else it would send all of them
to a few experts. Leaves cache-live-<cpu>-<date>-threads-<n>.json, .md and .png.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import machine
import numpy as np
from bench import default_results
from harness import bootstrap
from models import SPECS, checkpoint, default_cache
from report import table, write

FACTOR = 50  # of the embeddings
FIGURES = ("read_bytes_per_s", "seconds_per_token", "seconds_per_read")
WITHIN = 0.25  # how far a prediction may be from the median


def opened(spec_name: str, dtype: str, cache: Path) -> Any:
    """The random model with larger embeddings; its experts stay where the files have them."""
    import colibri_lab as lab

    model = lab.open(checkpoint(SPECS[spec_name], dtype, cache))
    embed = model.weights["embed"]
    return model.with_weights({"embed": (model.weights.float32("embed") * np.float32(FACTOR)).astype(embed.dtype)})


def one_run(
    model: Any, ids: Sequence[int], budget: int, policy: Any, threads: int | None
) -> tuple[Any, dict[str, Any]]:
    """A live run and its figures."""
    from colibri_lab import cache

    run = cache.live(model, ids, budget, policy, new_tokens=0, chunk=1, threads=threads, progress=False)
    return run, {
        "tokens_per_s": run.tokens_per_s,
        "read_seconds": run.read_seconds,
        "seconds": run.seconds,
        "hits": int(run.hits.sum()),
        "misses": int(run.misses.sum()),
        "bytes_read": int(run.bytes_read.sum()),
        "cold": run.cold,
        "replayed": run.agrees,
        "request_bytes": run.request_bytes,
    }


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """All rounds, as the JSON file holds them."""
    from colibri_lab import cache

    about = machine.describe()
    model = opened(options.model, options.dtype, options.cache)
    ids = np.random.default_rng(1).integers(3, model.config.vocab_size, options.tokens).tolist()
    budgets = [int(part) for part in options.budgets.split(",")]
    runs: dict[int, list[dict[str, Any]]] = {budget: [] for budget in budgets}
    simulations = {}
    probes = []

    def probe() -> None:
        probes.append(cache.measure_machine(model, threads=options.threads, progress=False))

    probe()
    probes.clear()  # the first touch of every file
    probe()
    for number in range(options.rounds):
        for budget in budgets if number % 2 == 0 else reversed(budgets):
            run, figures = one_run(model, ids, budget, options.policy, options.threads)
            simulations[budget] = run.simulation
            runs[budget].append({**figures, "probe_before": len(probes) - 1})
            probe()
            print(f"round {number + 1}, {budget} experts: {figures['tokens_per_s']:.2f} tokens/s", file=sys.stderr)
    middle = {name: statistics.median(getattr(each, name) for each in probes) for name in FIGURES}
    about["load_at_end"] = round(os.getloadavg()[0], 2)
    return {
        "machine": about,
        "arguments": {
            "model": options.model, "dtype": options.dtype, "tokens": options.tokens, "rounds": options.rounds,
            "policy": options.policy, "threads": options.threads or machine.cpus(), "experts": model.config.num_experts,
        },
        "figures": middle,
        "probes": [{name: getattr(each, name) for name in FIGURES} for each in probes],
        "budgets": [
            {
                "budget": budget,
                "predicted": asdict(cache.predict(simulations[budget], replace(probes[0], **middle))),
                "paired": [
                    cache.predict(simulations[budget], between(probes, run["probe_before"])).tokens_per_s
                    for run in runs[budget]
                ],
                "runs": runs[budget],
            }
            for budget in budgets
        ],
    }  # fmt: skip


def between(probes: Sequence[Any], number: int) -> Any:
    """A machine halfway between what was measured before a run and after it: times are averaged, not rates."""
    before, after = probes[number], probes[number + 1]
    return replace(
        before,
        read_bytes_per_s=2 / (1 / before.read_bytes_per_s + 1 / after.read_bytes_per_s),
        seconds_per_token=(before.seconds_per_token + after.seconds_per_token) / 2,
        seconds_per_read=(before.seconds_per_read + after.seconds_per_read) / 2,
    )


def page(whole: dict[str, Any]) -> str:
    """The figures as tables."""
    about, given, figures = whole["machine"], whole["arguments"], whole["figures"]
    rows = []
    for entry in whole["budgets"]:
        runs, speed = entry["runs"], entry["predicted"]
        speeds = [run["tokens_per_s"] for run in runs]
        median = statistics.median(speeds)
        off = speed["tokens_per_s"] / median - 1
        paired = bootstrap([said / took for said, took in zip(entry["paired"], speeds, strict=True)])
        rows.append([
            f"{entry['budget']} of {given['experts']}",
            f"{runs[0]['hits'] / (runs[0]['hits'] + runs[0]['misses']):.1%}",
            f"{speed['bytes_per_token'] / 1e6:.1f} MB",
            f"{median:.2f} ({min(speeds):.2f}–{max(speeds):.2f})",
            f"{speed['tokens_per_s']:.2f}",
            f"{off:+.0%}",
            f"{paired.median:.2f} [{paired.low:.2f}, {paired.high:.2f}]",
            "yes" if all(run["replayed"] for run in runs) else "**no**",
            "yes" if all(run["cold"] for run in runs) else "**no**",
        ])  # fmt: skip
    spread = [
        f"{label} {figures[name] * scale:{form}} ({min(values) * scale:{form}}–{max(values) * scale:{form}}) {unit}"
        for name, label, scale, unit, form in (
            ("read_bytes_per_s", "cold reads", 1e-6, "MB/s", ",.0f"),
            ("seconds_per_read", "letting one go", 1e3, "ms", ".2f"),
            ("seconds_per_token", "a token with all resident", 1e3, "ms", ".1f"),
        )
        for values in [[probe[name] for probe in whole["probes"]]]
    ]
    worst = max(
        abs(entry["predicted"]["tokens_per_s"] / statistics.median(run["tokens_per_s"] for run in entry["runs"]) - 1)
        for entry in whole["budgets"]
    )
    return "\n\n".join([
        "# A budget of experts, run and predicted",
        f"{about['cpu']}, {about['date']}, load {about['load_at_start']} to {about['load_at_end']} on {about['cpus']} "
        f"CPUs; {given['model']} {given['dtype']}, {given['tokens']} tokens decoded, {given['policy']} per layer, "
        f"threads: {given['threads']}, {given['rounds']} interleaved rounds: median (lowest–highest).",
        f"Measured {len(whole['probes'])} times between the runs, with reads of "
        f"{whole['budgets'][0]['runs'][0]['request_bytes']:,} bytes: {'; '.join(spread)}.",
        table(
            ["budget", "hit rate", "read per token", "tokens/s", "predicted", "off", "predicted / measured, paired",
             "replayed", "cold"], rows
        ).rstrip("\n"),
        f"The largest error of a prediction is {worst:.0%}, {'within' if worst <= WITHIN else '**beyond**'} the "
        f"{WITHIN:.0%} asked for. Paired: each run against the measurements just before and after it.",
    ]) + "\n"  # fmt: skip


def draw(whole: dict[str, Any], path: Path) -> None:
    """Hit rate, bytes read and tokens/s by budget, side by side over one axis."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    entries, experts = whole["budgets"], whole["arguments"]["experts"]
    budgets = [entry["budget"] for entry in entries]
    figure, (hits, read, speed) = plt.subplots(1, 3, figsize=(11, 3.4), sharex=True)
    rates = [e["runs"][0]["hits"] / (e["runs"][0]["hits"] + e["runs"][0]["misses"]) for e in entries]
    hits.plot(budgets, [100 * rate for rate in rates], "o-", color="#0072B2")
    hits.plot([0, experts], [0, 100], ":", color="black", linewidth=0.8, label="uniform choice, warm: C/E")
    hits.set(title="hit rate", ylabel="% of requests", ylim=(0, 100), xlim=(0, experts))
    hits.legend(fontsize=8, loc="lower right")
    read.plot(budgets, [e["predicted"]["bytes_per_token"] / 1e6 for e in entries], "s-", color="#0072B2")
    read.set(title="read for each token", ylabel="MB")
    read.margins(y=0.1)
    read.set_ylim(bottom=0)
    speeds = [[run["tokens_per_s"] for run in e["runs"]] for e in entries]
    medians = [statistics.median(some) for some in speeds]
    spread = [[m - min(s) for m, s in zip(medians, speeds, strict=True)],
              [max(s) - m for m, s in zip(medians, speeds, strict=True)]]  # fmt: skip
    speed.errorbar(budgets, medians, yerr=spread, fmt="o-", capsize=3, color="#0072B2", label="measured, all samples")
    speed.plot(budgets, [e["predicted"]["tokens_per_s"] for e in entries], "x--", color="#D55E00", label="predicted")
    speed.set(title="speed", ylabel="tokens/s")
    speed.set_ylim(bottom=0)
    speed.legend(fontsize=8, loc="lower right")
    for axes in (hits, read, speed):
        axes.set_xlabel("experts kept in each layer")
    figure.suptitle(f"{whole['machine']['cpu']}, {whole['machine']['date']}", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def record(whole: dict[str, Any], folder: Path) -> Path:
    """Writes cache-live-<cpu>-<date>-threads-<n>.json, .md and .png; returns the page."""
    base = folder / f"cache-live-{machine.slug(whole['machine'])}-threads-{whole['arguments']['threads']}"
    write(base.with_name(f"{base.name}.json"), json.dumps(whole, indent=1) + "\n")
    write(base.with_name(f"{base.name}.md"), page(whole))
    draw(whole, base.with_name(f"{base.name}.png"))
    return base.with_name(f"{base.name}.md")


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    out.add_argument("--model", default="fine", choices=SPECS)
    out.add_argument("--dtype", default="bf16", choices=("f32", "bf16"))
    out.add_argument("--budgets", default="16,32,48", help="experts in each layer (default: %(default)s)")
    out.add_argument("--policy", default="lru")
    out.add_argument("--tokens", type=int, default=32)
    out.add_argument("--rounds", type=int, default=7)
    out.add_argument("--threads", type=int)
    out.add_argument("--cache", type=Path, default=default_cache())
    out.add_argument("--results", type=Path, default=default_results())
    return out


def main() -> int:
    options = parser().parse_args()
    print(record(measured(options), options.results).read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
