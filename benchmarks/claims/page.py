"""page.py: results as files and pages, and a quick run beside a recorded one for the notebook."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import machine
from report import table, write

from claims.catalogue import measure
from claims.claim import Plan, Result, lines, quick

RESULTS = Path(__file__).resolve().parent.parent / "results"
NOW = "now, quick: provisional"
BUSY = 0.5  # load for each CPU above which absolute figures are called provisional


def conditions(about: dict[str, Any]) -> str:
    return f"{about['cpu']}, {about['date']}, load {about['load_at_start']} to {about['load_at_end']}"


def busy(about: dict[str, Any]) -> bool:
    return bool(max(about["load_at_start"], about["load_at_end"]) > BUSY * about["cpus"])


def page(about: dict[str, Any], arguments: dict[str, Any], results: Sequence[Result]) -> str:
    """The verdicts in one table, the figures below it."""
    head = [
        "# The description's claims, measured",
        f"{conditions(about)}; {about['cpus']} CPUs, {about['system']}; {arguments['rounds']} interleaved samples:"
        " median (lowest–highest); ratios with a bootstrap 95 % interval.",
    ]
    if busy(about):
        head.append("**Provisional**: others were using the machine. What was measured side by side was slowed alike.")
    if arguments["quick"]:
        head.append("**Provisional, a quick run**: short samples, small memory, the bundled model, no peers.")
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
    """Writes claims-<cpu>-<date>.json and .md; returns the page."""
    base = folder / f"claims-{machine.slug(whole['machine'])}"
    write(base.with_name(f"{base.name}.json"), json.dumps(whole, indent=1, ensure_ascii=False) + "\n")
    results = [Result.from_json(r) for r in whole["results"]]
    target = base.with_name(f"{base.name}.md")
    write(target, page(whole["machine"], whole["arguments"], results))
    return target


# ---- for the notebook ---------------------------------------------------------------------------------------------


@dataclass
class Text:
    """Markdown that a notebook draws."""

    markdown: str

    def _repr_markdown_(self) -> str:
        return self.markdown

    def __repr__(self) -> str:
        return self.markdown


def recorded(folder: Path = RESULTS) -> dict[str, Any]:
    """The newest full run that was kept."""
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("claims-*.json"))]
    if not runs:
        raise FileNotFoundError(f"no claims-*.json in {folder}: python benchmarks/claims/run.py makes one")
    return max(runs, key=lambda run: str(run["machine"]["date"]))


def beside(name: str, plan: Plan | None = None, folder: Path = RESULTS) -> Text:
    """One script run quickly now, beside what was recorded: verdicts, then figures."""
    run = recorded(folder)
    now = measure(name, plan or quick())
    kept = {r.claim: r for r in map(Result.from_json, run["results"])}
    then = [kept[r.claim] for r in now if r.claim in kept]
    parts = []
    for result in now:
        full = kept.get(result.claim)
        parts.append(f"**{result.claim}**, said: *{result.said}*")
        rows = [[NOW, result.figure, result.verdict, result.why]]
        if full:
            rows.append(["recorded", full.figure, f"**{full.verdict}**", full.why])
        parts.append(table(["", "figure", "verdict", "why"], rows))
    figures: dict[tuple[str, str], list[str]] = {}
    for column, results in enumerate((now, then)):
        for what, where, text in lines(results):
            figures.setdefault((what, where), ["–", "–"])[column] = text
    rows = [[what, where, *pair] for (what, where), pair in figures.items()]
    if rows:
        parts.append(table(["what", "where", NOW, "recorded"], rows))
    return Text("\n\n".join(part.rstrip("\n") for part in parts))


def verdicts(folder: Path = RESULTS) -> Text:
    """All verdicts of the recorded run, and under which conditions it was made."""
    run = recorded(folder)
    rows = [[r["claim"], r["said"], r["figure"], f"**{r['verdict']}**"] for r in run["results"]]
    word = "provisional, since others were using the machine" if busy(run["machine"]) else "on a quiet machine"
    return Text(
        f"Recorded on {conditions(run['machine'])} ({word}).\n\n" + table(["claim", "said", "here", "verdict"], rows)
    )
