"""The description's claims about speed and size, each measured here, each with a verdict.

    python benchmarks/claims/run.py                         everything, some ten minutes; 5 GB of cache
    python benchmarks/claims/run.py --quick                 seconds: small memory, the bundled model, no peers
    python benchmarks/claims/run.py --claims gates,layout   some of them
    python benchmarks/claims/run.py --report RESULT.json    the page of an earlier run

Results are RESULTS/claims-<cpu>-<date>.json and .md. What needs torch says so aloud when torch is missing.
"""

# ruff: noqa: E402 (the suite's modules are found once the path is set)
from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

import machine
import models
from bench import default_results, words

from claims.catalogue import CLAIMS, measure
from claims.claim import QUICK_SECONDS, Plan
from claims.page import save


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        prog="claims", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--quick", action="store_true", help="small memory, the bundled model, no peers")
    options.add_argument("--claims", type=words, default=list(CLAIMS), help=f"default: {','.join(CLAIMS)}")
    options.add_argument("--samples", type=int, default=5, help="interleaved samples of each figure (default: 5)")
    options.add_argument(
        "--seconds", type=float, help=f"of one sample (default: {Plan.seconds}, quick {QUICK_SECONDS})"
    )
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
    seconds = given.seconds if given.seconds is not None else QUICK_SECONDS if given.quick else Plan.seconds
    plan = Plan(given.cache.absolute(), given.samples, seconds, given.quick)
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
