"""`colibri-lab diff`: compares two runs and says where, by how much and why they part.

Exit codes as of diff(1): 0 the runs agree (identical, or ties alone), 1 they differ, 2 they could not be compared.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from colibri_lab._cli_input import add_input, bar, check_outputs, input_of, is_checkpoint, session_of
from colibri_lab._files import must_exist, whole_file
from colibri_lab.errors import ArgumentError

if TYPE_CHECKING:
    from colibri_lab.session import Session
    from colibri_lab.trace import Trace

__all__ = ["add_to", "run"]

TROUBLE = 2


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand."""
    command = commands.add_parser(
        "diff",
        help="compare two runs: traces of any format, or a model beside transformers (1: they differ)",
        description="Exit code 0: the runs agree, or differ by near-ties alone; 1: they differ; 2: trouble.",
    )
    command.add_argument("a", metavar="A", help="a trace file, or a checkpoint that this engine runs; the reference")
    command.add_argument("b", metavar="B", nargs="?", help="the same; the run under test")
    command.add_argument(
        "--reference", choices=["transformers"], help="with one checkpoint: what transformers makes of it becomes A"
    )
    add_input(command)
    command.add_argument("--capture", default="all", help='what checkpoints are recorded with (default: "all")')
    command.add_argument(
        "--tolerance", type=float, help="share of a tap's largest value (default: from the number type and the depth)"
    )
    command.add_argument(
        "--noise", nargs=2, metavar=("X", "Y"), help="traces of two runs that should be equal: measures the tolerance"
    )
    command.add_argument("--model", metavar="PATH", help="the checkpoint with whose weights faults are tried")
    command.add_argument("--html", metavar="OUT", type=Path, help="write the view as one offline HTML file")
    command.add_argument("--json", metavar="OUT", type=Path, help="write all that was found as JSON")
    command.set_defaults(run=run, trouble=TROUBLE)


def run(options: argparse.Namespace) -> int:
    """Compares, prints the report, and returns the exit code. Raises ColibriError."""
    import colibri_lab as lab

    if (options.b is None) == (options.reference is None):
        raise ArgumentError("give two runs, or one checkpoint and --reference transformers")
    if options.tolerance is not None and options.noise is not None:
        raise ArgumentError("--tolerance gives the tolerance and --noise measures it; choose one")
    check_outputs((options.json, options.html), [options.a, options.b, options.model, *(options.noise or ())])
    if options.model is not None:
        must_exist(Path(options.model))  # before it is needed: most comparisons never try a fault
    a, b = _two(options) if options.reference is None else _beside_transformers(options)
    tolerance = lab.tolerance(*options.noise) if options.noise is not None else options.tolerance
    found = lab.diff(a, b, tolerance=tolerance, model=options.model, progress=bar())
    print(found.report(), end="")
    if options.json is not None:
        with whole_file(options.json, "the comparison") as file:
            file.write(found.to_json().encode())
    if options.html is not None:
        lab.DiffView(found).to_html(options.html)
        print(options.html)
    return int(found.exit_code)


def _beside_transformers(options: argparse.Namespace) -> tuple[Trace, Session]:
    """A: transformers, B: this engine, on the same ids."""
    import colibri_lab as lab

    if not is_checkpoint(options.a):
        raise ArgumentError(f"--reference runs a checkpoint with transformers; {options.a} is none")
    ours = _run(options.a, input_of(options), options.capture)
    reference = lab.record.transformers(options.a, ours.ids, capture=options.capture, progress=bar())
    if not isinstance(reference, lab.Trace):
        raise ArgumentError("one text at a time")
    return reference, ours


def _two(options: argparse.Namespace) -> tuple[Trace | Session, Trace | Session]:
    """Both sides; a checkpoint beside a trace runs on the ids of the trace."""
    import colibri_lab as lab

    paths, said = (options.a, options.b), input_of(options)
    traces = [None if is_checkpoint(path) else lab.load_trace(path, progress=bar()) for path in paths]
    if None not in traces and said is not None:
        raise ArgumentError("both are traces, which hold what they were run on: --text and --ids are for checkpoints")
    ids = next((trace.ids for trace in traces if trace is not None), None)
    sides: list[Trace | Session] = []
    for path, trace in zip(paths, traces, strict=True):
        run_on = ids if said is None else said
        sides.append(_run(path, run_on, options.capture) if trace is None else trace)
    return sides[0], sides[1]


def _run(path: str, x: str | list[int] | None, capture: str) -> Session:
    if x is None:
        raise ArgumentError(f"{path} is a checkpoint: say with --text or --ids what to run it on")
    return session_of(path, x, capture)
