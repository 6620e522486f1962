"""`colibri-lab nan`: whether a run holds NaN or Inf, where they were born, and how near it is to overflow.

Exit codes, in the manner of grep the other way round: 0 all is finite, 1 NaN or Inf were found, 2 trouble.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colibri_lab._cli_input import add_input, bar, check_outputs, input_of, is_checkpoint, session_of
from colibri_lab._files import whole_file
from colibri_lab.errors import ArgumentError

if TYPE_CHECKING:
    from colibri_lab.nan import Cure, Found, NonFiniteWeight
    from colibri_lab.nan.margins import Headroom, Margin
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
    add_input(command)
    command.add_argument(
        "--model",
        metavar="PATH",
        help="with a trace: the checkpoint that made it, which explains causes and tries cures",
    )
    command.add_argument(
        "--emulate",
        metavar="FORMAT",
        help="keep every value in this number format, as a GPU would: float16, bfloat16, float8_e4m3fn, float8_e5m2 "
        "(or float32)",
    )
    command.add_argument("--cures", action="store_true", help="replay with one change at a time and say what helps")
    command.add_argument(
        "--weights", action="store_true", help="list the weights that hold NaN or Inf (reads them all; needs no text)"
    )
    command.add_argument("--html", metavar="OUT", type=Path, help="write the view as one offline HTML file")
    command.add_argument("--json", metavar="OUT", type=Path, help="write all that was found as JSON")
    command.set_defaults(run=run, trouble=TROUBLE)


def run(options: argparse.Namespace) -> int:
    """Searches, prints the report, and returns the exit code. Raises ColibriError."""
    import colibri_lab as lab

    check_outputs((options.json, options.html), [options.run_of, options.model])
    on_disk = options.run_of is None or is_checkpoint(options.run_of)
    if options.weights and options.model is None and input_of(options) is None and on_disk:
        return _weights_alone(options)
    source = _source(options)
    model = None if options.model is None else lab.open(options.model)
    found = lab.nan.find(source, model=model, progress=bar())
    cures = lab.nan.cures(found, progress=bar(), model=model) if found is not None and options.cures else []
    whose = model if isinstance(source, lab.Trace) else source
    weights = lab.nan.weights(whose) if whose is not None and (options.weights or found is None) else []
    following = "" if cures else _following(options, source)
    print(_clean(source, weights) if found is None else _found(found, cures, weights, following), end="")
    if options.json is not None:
        with whole_file(options.json, "what was found") as file:
            file.write(_json(source, found, cures, weights).encode())
    if options.html is not None:
        lab.NanTracer(source if found is None else found, cures=cures, model=model).to_html(options.html)
        print(options.html)
    return 0 if found is None else 1


def _source(options: argparse.Namespace) -> Session | Trace:
    """A trace that was read, or a session that ran."""
    import colibri_lab as lab

    x = input_of(options)
    if options.run_of is not None and not is_checkpoint(options.run_of):
        trace = lab.load_trace(options.run_of, progress=bar())
        for name, given in (("--text and --ids are", x), ("--emulate is", options.emulate)):
            if given is not None:
                raise ArgumentError(f"{options.run_of} is a trace, which was run already: {name} for checkpoints")
        if options.weights and options.model is None:
            raise ArgumentError(f"{options.run_of} is a trace and has no weights: name the checkpoint with --model")
        return trace
    if options.model is not None:
        raise ArgumentError("--model is for traces; the checkpoint to run stands alone")
    if x is None:
        raise ArgumentError("say with --text or --ids what to run the model on")
    return session_of(options.run_of, x, "all", emulate=options.emulate)


def _clean(source: Any, weights: list[NonFiniteWeight]) -> str:
    """One line, and one for each weight that is not finite and that no token met."""
    room = _room(source)
    lines = [_verdict(source, room, room.closest()), *_oversized(room)]
    if weights:
        lines.append("Weights that hold NaN or Inf, which did no harm on this text:")
        lines += [f"  {row}" for row in weights]
    lines += [alarm.words for alarm in room.forecast() if alarm.came is not False]
    return "\n".join(lines) + "\n"


def _room(source: Any) -> Headroom:
    """The headroom in the run's format; of a float32 run in float16, which comes next."""
    import colibri_lab as lab

    found = lab.nan.headroom(source, ["float16"])
    return found if found.dtype in ("float32", "float16") else lab.nan.headroom(source, [found.dtype])


def _verdict(source: Any, room: Headroom, closest: Margin | None) -> str:
    """The first lines: whether there is room left, and if not, where and by how much."""
    from colibri_lab.nan.margins import LITTLE

    if closest is None:
        return "Clean."
    if closest.bits < 0:
        emulate = f"; --emulate {closest.format} shows what happens" if hasattr(source, "tape") else ""
        return (
            f"Clean in {room.dtype}, but beyond {closest.format}: {closest.spot} is {-closest.bits:.1f} doublings too "
            f"large{emulate}."
        )
    text = f"Clean. Closest to overflow: {closest.words}."
    if closest.bits < LITTLE:
        few = len(room.warnings)
        more = f" So little is left in {few} taps." if few > 1 else ""
        text += f"\nWarning: fewer than {LITTLE:.0f} bits are left. {closest.sentence}{more}"
    return text


def _oversized(room: Headroom) -> list[str]:
    """A line when the run holds what is finite and yet too large for float32 to add anything to."""
    if not room.huge:
        return []
    more = f" {len(room.huge)} taps are that large." if len(room.huge) > 1 else ""
    return [
        f"Finite is not right: {room.huge[0].spot}, is beyond 2^24, from where float32 loses what is of size 1 and is "
        f"added to it.{more}"
    ]


def _weights_alone(options: argparse.Namespace) -> int:
    """Looks for NaN and Inf in the weights of a model that is run on nothing."""
    import colibri_lab as lab

    for name, given in (("--emulate", options.emulate), ("--cures", options.cures), ("--html", options.html)):
        if given:
            raise ArgumentError(f"{name} is about a run: say with --text or --ids what to run the model on")
    model = lab.open() if options.run_of is None else lab.open(options.run_of)
    weights = lab.nan.weights(model)
    lines = ["Weights that hold NaN or Inf", *(f"  {row}" for row in weights)]
    print("\n".join(lines) if weights else f"The {len(model.weights)} weights are finite. Nothing was run.")
    if options.json is not None:
        with whole_file(options.json, "what was found") as file:
            file.write(_text({"clean": not weights, "weights": _weight_facts(weights)}).encode())
    return 1 if weights else 0


def _following(options: argparse.Namespace, source: Session | Trace) -> str:
    """The command that tries cures: a trace of ours is replayed by the model that made it, no other is."""
    import colibri_lab as lab

    if isinstance(source, lab.Trace):
        if source.meta["producer"] != "colibri-lab":
            return "colibri-lab nan CHECKPOINT --text ... --cures (the model and text of this trace)"
        made = ["--model", "CHECKPOINT" if options.model is None else options.model]
        return shlex.join(["colibri-lab", "nan", options.run_of, *made, "--cures"])
    said = input_of(options)
    given = ["--ids", ",".join(map(str, said))] if isinstance(said, list) else ["--text", str(said)]
    emulate = [] if options.emulate is None else ["--emulate", options.emulate]
    model = [] if options.run_of is None else [options.run_of]
    return shlex.join(["colibri-lab", "nan", *model, *given, *emulate, "--cures"])


def _found(found: Found, cures: list[Cure], weights: list[NonFiniteWeight], following: str) -> str:
    from colibri_lab.nan.report import report

    text = report(found, terminal=True)
    if cures:
        text += "\n" + "\n".join(["Cures", *map(_cure, cures)]) + "\n"
    if weights:
        text += "\n" + "\n".join(["Weights that hold NaN or Inf", *(f"  {row}" for row in weights)]) + "\n"
    return text + f"\nNext: {following}\n" * bool(following)


def _cure(cure: Cure) -> str:
    mark = {True: "✓", False: "✗", None: "–"}[cure.gone]
    said = {True: "gone", False: "not gone", None: ""}[cure.gone]
    kl = None if cure.kl is None or math.isnan(cure.kl) else f"KL {cure.kl:.2g} nats"
    return f"  {mark} {cure.change}: {'; '.join(part for part in (said, kl, cure.note) if part)}"


def _json(source: Any, found: Found | None, cures: list[Cure], weights: list[NonFiniteWeight]) -> str:
    room = _room(source) if found is None else None
    closest = None if room is None else room.closest()
    facts: dict[str, Any] = {"clean": True} if found is None else {"clean": False, **json.loads(found.to_json())}
    if closest is not None:
        facts["closest"] = _margin_facts(closest)
    if room is not None:
        facts["huge"] = [_margin_facts(margin) for margin in room.huge]
    facts["cures"] = [
        {"change": cure.change, "gone": cure.gone, "note": cure.note, "code": cure.code} for cure in cures
    ]
    facts["weights"] = _weight_facts(weights)
    return _text(facts)


def _margin_facts(margin: Margin) -> dict[str, Any]:
    return {name: getattr(margin, name) for name in ("path", "format", "bits", "absmax", "token", "expert")}


def _weight_facts(weights: list[NonFiniteWeight]) -> list[dict[str, Any]]:
    return [{"name": row.name, "nan": row.n_nan, "inf": row.n_inf, "tokens": row.tokens} for row in weights]


def _text(facts: dict[str, Any]) -> str:
    return json.dumps(facts, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
