"""The benchmark suite: this engine beside llama.cpp, transformers and the machine's own limits, on random models it
makes itself.

    python benchmarks/bench.py --quick                       a useful part in under three minutes
    python benchmarks/bench.py                               everything (hours; about 35 GB of cache)
    python benchmarks/bench.py --models fine --measures decode --samples 31
    python benchmarks/bench.py --checkpoint FOLDER           a checkpoint of your own
    python benchmarks/bench.py --report RESULT.json          the tables and the plot of an earlier run

Results are RESULTS/<cpu>-<date>.json, .md and .png. A peer that is not installed is said aloud and left out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import limits
import machine
import models
import plot
from contenders import OURS, TITLES, ContenderError, available
from harness import Cell, limit_ratio, summary
from measures import (
    batching,
    capture,
    decode,
    instructions,
    kernel,
    load,
    prefill,
    recording,
    scaling,
    steady,
    threads,
    watch,
)
from report import Run, in_cache, markdown, number, write
from suite import Checkpoint, Plan, say

OF_A_CHECKPOINT: dict[str, Callable[[Checkpoint], Iterator[Cell]]] = {
    "load": load.run,
    "prefill": prefill.run,
    "decode": decode.run,
    "batching": batching.run,
    "capture": capture.run,
    "recording": recording.run,
    "watch": watch.run,
}
OF_A_RUN: dict[str, Callable[[Plan], Iterator[Cell]]] = {
    "scaling": scaling.run,
    "kernel": kernel.run,
    "threads": threads.run,
    "instructions": instructions.run,
    "steady": steady.run,
}
MEASURES = (*OF_A_CHECKPOINT, *OF_A_RUN)
PEERS = ("llama", "transformers")
AGREEMENT_TOKENS = 16


def words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in words(text))


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        prog="colibri-lab bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument(
        "--quick",
        action="store_true",
        help="coarse bf16, all CPUs, load, prefill 128, decode 0, capture, kernel: under 3 minutes",
    )
    options.add_argument("--models", type=words, help=f"of {', '.join(models.SPECS)} (default: coarse,fine,large)")
    options.add_argument("--checkpoint", type=Path, help="a checkpoint of your own instead of the random models")
    options.add_argument("--dtypes", type=words, help="f32, bf16 (default: both; large: bf16 alone)")
    options.add_argument("--threads", type=numbers, help="default: 1 and all CPUs")
    options.add_argument("--measures", type=words, help=f"default: {','.join(MEASURES)}")
    options.add_argument("--peers", type=words, help=f"default: {','.join(PEERS)}; an empty text: none")
    options.add_argument("--prompts", type=numbers, help="tokens of the prompts (default: 16,128,512,2048)")
    options.add_argument("--contexts", type=numbers, help="tokens before decoding (default: 0,512,2048)")
    options.add_argument("--samples", type=int, help="interleaved samples of each figure (default: 5)")
    options.add_argument("--seconds", type=float, help="of one sample, at least (default: 1)")
    options.add_argument("--steady-seconds", type=float, help="of generation in the measure steady (default: 600)")
    options.add_argument(
        "--cache", type=Path, default=models.default_cache(), help="where random models are kept (default: %(default)s)"
    )
    options.add_argument(
        "--results", type=Path, default=default_results(), help="where results go (default: %(default)s)"
    )
    options.add_argument(
        "--report", type=Path, metavar="JSON", help="write tables and plot of this result again; measure nothing"
    )
    return options


def default_results() -> Path:
    here = Path(__file__).resolve().parent
    return here / "results" if (here.parent / "Makefile").exists() else Path("colibri-bench")


def filled(given: argparse.Namespace) -> argparse.Namespace:
    """The arguments with the defaults of a quick or a whole run; anything given stays. Raises ValueError for a wrong
    name.
    """
    cpus = machine.cpus()
    whole = {
        "models": ["coarse", "fine", "large"],
        "dtypes": ["f32", "bf16"],
        "threads": tuple(sorted({1, cpus})),
        "measures": list(MEASURES),
        "peers": list(PEERS),
        "prompts": (16, 128, 512, 2048),
        "contexts": (0, 512, 2048),
        "samples": 5,
        "seconds": 1.0,
        "steady_seconds": 600.0,
    }
    quick = {
        "models": ["coarse"],
        "dtypes": ["bf16"],
        "threads": (cpus,),
        "measures": ["load", "prefill", "decode", "capture", "kernel"],
        "prompts": (128,),
        "contexts": (0,),
        "seconds": 0.2,
    }
    for name, value in (whole | (quick if given.quick else {})).items():
        if getattr(given, name) is None:
            setattr(given, name, value)
    for name, known in (("models", models.SPECS), ("dtypes", models.DTYPES), ("measures", MEASURES), ("peers", PEERS)):
        for word in getattr(given, name):
            if word not in known:
                raise ValueError(f"--{name}: '{word}' is none of {', '.join(known)}")
    if not (
        given.prompts and given.threads and min(*given.prompts, *given.threads, given.samples) > 0 and given.seconds > 0
    ):
        raise ValueError("prompts, threads, samples and seconds must be positive")
    if any(context < 0 for context in given.contexts):
        raise ValueError("a context has 0 tokens or more")
    return given


def checkpoints(given: argparse.Namespace) -> Iterator[tuple[str, str, Callable[[], Path]]]:
    if given.checkpoint:
        yield given.checkpoint.name, "own", lambda: given.checkpoint
        return
    for name in given.models:
        for dtype in given.dtypes:
            if name != "large" or dtype == "bf16" or given.dtypes == ["f32"]:
                yield (
                    name,
                    dtype,
                    lambda name=name, dtype=dtype: models.checkpoint(models.SPECS[name], dtype, given.cache),
                )


def line(cell: Cell) -> str:
    """What is printed when a cell is done."""
    where = " ".join(f"{key}={value}" for key, value in cell.point.items())
    figures = []
    for name, taken in cell.samples.items():
        s, share = summary(taken), limit_ratio(taken)
        limit = f" = {share.median:.2f} of the limit" if share.pairs else ""
        figures.append(f"{TITLES.get(name, name)} {number(s.median)}{limit}{f' ({s.void} void)' if s.void else ''}")
    return f"{cell.measure:12} {where}: {', '.join(figures)} {cell.unit}"


def measure(given: argparse.Namespace, plan: Plan, run: Run, keep: Callable[[Cell], None]) -> None:
    asked = [name for name in OF_A_CHECKPOINT if name in given.measures]
    for name, dtype, path in checkpoints(given) if asked else ():
        with Checkpoint(plan, name, dtype, path(), plan.peers) as checkpoint:
            for peer, difference, largest in checkpoint.agreement(AGREEMENT_TOKENS):
                about = {"model": name, "dtype": dtype, "tokens": AGREEMENT_TOKENS, "peer": peer}
                run.agreement.append({**about, "difference": difference, "largest": largest})
            if checkpoint.weight_bytes < (least := machine.least_weights()):
                about = {"model": name, "dtype": dtype}
                run.in_cache.append({**about, "weight_bytes": checkpoint.weight_bytes, "least_bytes": least})
                say(f"warning: {in_cache(run.in_cache[-1])}")
            for measure_name in asked:
                for cell in OF_A_CHECKPOINT[measure_name](checkpoint):
                    keep(cell)
            run.missing |= {f"{TITLES[peer]} for {name} {dtype}": why for peer, why in checkpoint.left_out.items()}
    for measure_name in (n for n in OF_A_RUN if n in given.measures):
        try:
            for cell in OF_A_RUN[measure_name](plan):
                keep(cell)
        except (OSError, ContenderError) as error:
            say(f"{measure_name} is left out: {error}")
            run.missing[measure_name] = str(error)


def save(run: Run, folder: Path) -> None:
    base = folder / machine.slug(run.machine)
    run.write_json(base.with_name(f"{base.name}.json"))
    picture = base.with_name(f"{base.name}.png")
    drawn = plot.draw(run, picture)
    page = base.with_name(f"{base.name}.md")
    write(page, markdown(run, picture.name if drawn else None))
    print(page)


def main() -> int:
    options = parser()
    given = options.parse_args()
    if given.report:
        try:
            run = Run.read_json(given.report)
        except (OSError, ValueError, KeyError, TypeError) as error:
            options.error(f"--report: {given.report} is no result of this suite: {error!r}")
        save(run, given.report.parent)
        return 0
    try:
        filled(given)
    except ValueError as error:
        options.error(str(error))

    versions, missing = available([OURS, *given.peers], given.cache)
    if OURS in missing:
        say(f"the engine does not start: {missing[OURS]}")
        return 1
    try:
        limits.measuring_library(given.cache)
    except OSError as error:
        missing["the machine's limits"] = str(error)
    for name, reason in missing.items():
        say(f"{TITLES.get(name, name)} is left out: {reason}")

    small = "tiny" in given.models
    plan = Plan(
        cache=given.cache.absolute(),
        threads=given.threads,
        rounds=given.samples,
        seconds=given.seconds,
        prompts=given.prompts,
        contexts=given.contexts,
        peers=tuple(name for name in given.peers if name in versions),
        limits="the machine's limits" not in missing,
        process_rounds=min(given.samples, 2) if given.quick else given.samples,
        steady_seconds=given.steady_seconds,
        scaling_base=(models.TINY, models.TINY) if small else (models.COARSE, models.FINE),
    )
    arguments: dict[str, Any] = {
        k: getattr(given, k)
        for k in (
            "models",
            "dtypes",
            "threads",
            "measures",
            "peers",
            "prompts",
            "contexts",
            "seconds",
            "steady_seconds",
            "quick",
        )
    }
    run = Run(machine.describe(), {**arguments, "rounds": given.samples}, versions, missing)

    def keep(cell: Cell) -> None:
        run.cells.append(cell)
        print(line(cell), flush=True)

    try:
        measure(given, plan, run, keep)
    except KeyboardInterrupt:
        say(f"interrupted; {'what was measured until now is kept' if run.cells else 'nothing was measured'}")
        return 130
    except ContenderError as error:
        say(f"{TITLES.get(error.name, error.name)} failed: {error}")
        return 1
    finally:
        if run.cells:
            save(run, given.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
