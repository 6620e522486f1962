"""The description's claims about speed and size, each measured here, each with a verdict.

    python benchmarks/claims/run.py                         everything, some ten minutes; 3.2 GB of cache
    python benchmarks/claims/run.py --quick                 seconds: small memory, the bundled model, no peers
    python benchmarks/claims/run.py --claims gates,layout   some of them
    python benchmarks/claims/run.py --report RESULT.json    the page of an earlier run

Results are RESULTS/claims-<cpu>-<date>.json and .md. What needs torch says so aloud when torch is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # where the suite's own modules are

import machine
import models
from bench import default_results, words
from contenders import ContenderError
from report import table, write

from claims import alignment, gates, huge_pages, layout, load, memory, selection, size, speed
from claims.claim import Plan, Result, lines, missing

CLAIMS: dict[str, Callable[[Plan], list[Result]]] = {
    "selection": selection.run,
    "gates": gates.run,
    "alignment": alignment.run,
    "huge_pages": huge_pages.run,
    "layout": layout.run,
    "size": size.run,
    "load": load.run,
    "memory": memory.run,
    "speed": speed.run,
}


def measure(name: str, plan: Plan) -> list[Result]:
    """The results of one script; what fails is a result that says so."""
    try:
        return CLAIMS[name](plan)
    except (OSError, ContenderError) as error:
        return [missing(name, (sys.modules[f"claims.{name}"].__doc__ or "").split("\n\n")[0], str(error))]


def busy(about: dict[str, Any]) -> bool:
    return max(about["load_at_start"], about["load_at_end"]) > 0.5 * about["cpus"]


def page(about: dict[str, Any], arguments: dict[str, Any], results: Sequence[Result]) -> str:
    """The verdicts in one table, the figures below it."""
    head = [
        "# The description's claims, measured",
        f"{about['cpu']}, {about['cpus']} CPUs, {about['system']}, {about['date']}; load {about['load_at_start']} at the"
        f" start, {about['load_at_end']} at the end; {arguments['rounds']} interleaved samples; median (lowest–highest),"
        " ratios with a bootstrap 95 % interval.",
    ]
    if busy(about):
        head.append(
            "**Provisional: others were using the machine.** Ratios are taken side by side; absolute figures are low."
        )
    verdicts = table(
        ["claim", "said", "here", "verdict", "why"],
        [[r.claim, r.said, r.figure, f"**{r.verdict}**", r.why] for r in results],
    )
    parts = [*head, verdicts]
    for result in results:
        found = lines([result])
        if found:
            parts += [f"## {result.claim}", table(["what", "where", "figure"], found)]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def save(whole: dict[str, Any], folder: Path) -> Path:
    base = folder / f"claims-{machine.slug(whole['machine'])}"
    write(base.with_name(f"{base.name}.json"), json.dumps(whole, indent=1, ensure_ascii=False) + "\n")
    results = [Result.from_json(r) for r in whole["results"]]
    target = base.with_name(f"{base.name}.md")
    write(target, page(whole["machine"], whole["arguments"], results))
    return target


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        prog="claims", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--quick", action="store_true", help="small memory, the bundled model, no peers")
    options.add_argument("--claims", type=words, default=list(CLAIMS), help=f"default: {','.join(CLAIMS)}")
    options.add_argument("--samples", type=int, default=5, help="interleaved samples of each figure (default: 5)")
    options.add_argument("--seconds", type=float, help="of one sample, at least (default: 0.2, quick: 0.02)")
    options.add_argument("--cache", type=Path, default=models.default_cache(), help="default: %(default)s")
    options.add_argument("--results", type=Path, default=default_results(), help="default: %(default)s")
    options.add_argument("--report", type=Path, metavar="JSON", help="write the page of this result again")
    return options


def main() -> int:
    options = parser()
    given = options.parse_args()
    if given.report:
        print(save(json.loads(given.report.read_text(encoding="utf-8")), given.report.parent))
        return 0
    for name in given.claims:
        if name not in CLAIMS:
            options.error(f"--claims: '{name}' is none of {', '.join(CLAIMS)}")
    if given.samples < 1:
        options.error("--samples must be positive")
    seconds = given.seconds if given.seconds is not None else 0.02 if given.quick else 0.2
    plan = Plan(given.cache, given.samples, seconds, given.quick)
    about, results = machine.describe(), []
    for name in given.claims:
        for result in measure(name, plan):
            print(result, flush=True)
            results.append(result)
    about["load_at_end"] = round(os.getloadavg()[0], 2)
    arguments = {"quick": given.quick, "claims": given.claims, "rounds": given.samples, "seconds": seconds}
    whole = {"machine": about, "arguments": arguments, "results": [r.as_json() for r in results]}
    print(save(whole, given.results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
