"""`colibri-lab nan`: whether a run holds NaN or Inf, where they were born, and how near it is to overflow.

Exit codes, in the manner of grep the other way round: 0 all is finite, 1 NaN or Inf were found, 2 trouble.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colibri_lab._cli_input import bar, ids_of, input_of, is_checkpoint
from colibri_lab._files import whole_file
from colibri_lab.errors import ArgumentError

if TYPE_CHECKING:
    from colibri_lab.nan import Cure, Found, NonFiniteWeight
    from colibri_lab.session import Session
    from colibri_lab.trace import Trace

__all__ = ["add_to", "run"]

TROUBLE = 2


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand."""
    command = commands.add_parser(
        "nan",
        help="find where NaN and Inf of a run are born, or how near it is to overflow (1: found some)",
        description="Exit code 0: all is finite; 1: NaN or Inf were found; 2: trouble.",
    )
    command.add_argument(
        "run_of", metavar="MODEL", nargs="?", help="a checkpoint, or a trace file (default: the bundled model)"
    )
    text = command.add_mutually_exclusive_group()
    text.add_argument("--text", help="what a checkpoint is run on")
    text.add_argument("--ids", help="the same as token ids: 1,2,3", type=ids_of)
    command.add_argument(
        "--emulate", metavar="FORMAT", help="keep every value in this number format, as a GPU would: float16, bfloat16"
    )
    command.add_argument("--cures", action="store_true", help="replay with one change at a time and say what helps")
    command.add_argument(
        "--weights", action="store_true", help="list the weights that hold NaN or Inf (reads them all)"
    )
    command.add_argument("--html", metavar="OUT", type=Path, help="write the view as one offline HTML file")
    command.add_argument("--json", metavar="OUT", type=Path, help="write all that was found as JSON")
    command.set_defaults(run=run, trouble=TROUBLE)


def run(options: argparse.Namespace) -> int:
    """Searches, prints the report, and returns the exit code. Raises ColibriError."""
    import colibri_lab as lab

    source = _source(options)
    session = None if isinstance(source, lab.Trace) else source
    found = lab.nan.find(source, progress=bar())
    cures = lab.nan.cures(found, progress=bar()) if found is not None and options.cures else []
    wanted = session is not None and (options.weights or found is None)
    weights = lab.nan.weights(session) if wanted else []
    print(_clean(source, weights) if found is None else _found(found, cures, weights), end="")
    if options.json is not None:
        with whole_file(options.json, "what was found") as file:
            file.write(_json(source, found, cures, weights).encode())
    if options.html is not None:
        lab.NanTracer(source if found is None else found).to_html(options.html)
        print(options.html)
    return 0 if found is None else 1


def _source(options: argparse.Namespace) -> Session | Trace:
    """A trace that was read, or a session that ran."""
    import colibri_lab as lab

    x = input_of(options)
    if options.run_of is not None and not is_checkpoint(options.run_of):
        for name, given in (("--text and --ids are", x), ("--emulate is", options.emulate)):
            if given is not None:
                raise ArgumentError(f"{options.run_of} is a trace, which was run already: {name} for checkpoints")
        if options.weights:
            raise ArgumentError(f"{options.run_of} is a trace and has no weights: --weights is for checkpoints")
        return lab.load_trace(options.run_of, progress=bar())
    if x is None:
        raise ArgumentError("say with --text or --ids what to run the model on")
    model = lab.open() if options.run_of is None else lab.open(options.run_of)
    if isinstance(x, str) and model.tokenizer is not None:
        x = model.tokenizer.encode(x)
    session = model.session(capture="all", max_tokens=max(1, len(x)), emulate=options.emulate)
    session.feed(x, progress=bar())
    return session


def _clean(source: Any, weights: list[NonFiniteWeight]) -> str:
    """One line, and one for each weight that is not finite and that no token met."""
    import colibri_lab as lab

    closest = _closest(source)
    margin = "" if closest is None else f" Closest to overflow: {closest.words}."
    lines = [f"Clean.{margin}"]
    if weights:
        lines.append("Weights that hold NaN or Inf, which did no harm on this text:")
        lines += [f"  {row}" for row in weights]
    alarms = [] if closest is None else lab.nan.headroom(source, [closest.format]).forecast()
    lines += [alarm.words for alarm in alarms if alarm.came is not False]
    return "\n".join(lines) + "\n"


def _closest(source: Any) -> Any:
    """The tap with the fewest bits left, in the run's format; of a float32 run in float16, which comes next."""
    import colibri_lab as lab

    found = lab.nan.headroom(source, ["float16"])
    return (
        found.closest() if found.dtype in ("float32", "float16") else lab.nan.headroom(source, [found.dtype]).closest()
    )


def _found(found: Found, cures: list[Cure], weights: list[NonFiniteWeight]) -> str:
    text = found.report()
    if cures:
        text = text.partition("\nNext: what would cure it")[0] + "\n" + "\n".join(["Cures", *map(_cure, cures)]) + "\n"
    if weights:
        text += "\n" + "\n".join(["Weights that hold NaN or Inf", *(f"  {row}" for row in weights)]) + "\n"
    return text


def _cure(cure: Cure) -> str:
    mark = {True: "✓", False: "✗", None: "–"}[cure.gone]
    said = {True: "gone", False: "not gone", None: ""}[cure.gone]
    kl = None if cure.kl is None or math.isnan(cure.kl) else f"KL {cure.kl:.2g} nats"
    return f"  {mark} {cure.change}: {'; '.join(part for part in (said, kl, cure.note) if part)}"


def _json(source: Any, found: Found | None, cures: list[Cure], weights: list[NonFiniteWeight]) -> str:
    closest = _closest(source) if found is None else None
    facts: dict[str, Any] = {"clean": True} if found is None else {"clean": False, **json.loads(found.to_json())}
    if closest is not None:
        facts["closest"] = {
            "path": closest.path,
            "format": closest.format,
            "bits": closest.bits,
            "token": closest.token,
        }
    facts["cures"] = [
        {"change": cure.change, "gone": cure.gone, "note": cure.note, "code": cure.code} for cure in cures
    ]
    facts["weights"] = [{"name": row.name, "nan": row.n_nan, "inf": row.n_inf, "tokens": row.tokens} for row in weights]
    return json.dumps(facts, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
