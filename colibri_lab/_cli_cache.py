"""`colibri-lab cache`: what a cache of experts would hit on a trace, by policy and capacity, and what that would cost.

Exit codes: 0 the work was done, 2 trouble.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from colibri_lab._cache_capacity import capacities_of, keys_of
from colibri_lab._cache_tables import check_picture, check_table, draw, write_csv, write_parquet
from colibri_lab._cache_words import BOUND, beside_the_bound, ranking, table
from colibri_lab._cli_input import (
    add_input,
    add_recording,
    bar,
    check_outputs,
    input_of,
    is_checkpoint,
    profile_of,
    recording_of,
    refuse_recording,
    session_of,
)
from colibri_lab.errors import ArgumentError

if TYPE_CHECKING:
    from colibri_lab.cache import Machine
    from colibri_lab.cache.policies import Policy
    from colibri_lab.session import Session
    from colibri_lab.trace import Trace

__all__ = ["add_to", "run"]

TROUBLE = 2
POINTS = 16  # capacities that table and picture show beside those asked for
FEW = 3  # policies whose reports are printed without being asked for

Curve = NDArray[np.float64]


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand."""
    command = commands.add_parser(
        "cache",
        help="what a cache of experts would hit on a trace, by policy and capacity",
        description="Exit code 0: done; 2: trouble. docs/cache.md says what every number means.",
    )
    command.add_argument(
        "run_of", metavar="TRACE|MODEL", nargs="?", help="a trace, a recording, or a checkpoint (default: the bundled)"
    )
    add_input(command)
    command.add_argument(
        "--policy", action="append", metavar="P[,P…]", help="which to simulate, or all (default: lru); may be repeated"
    )
    command.add_argument(
        "--capacity",
        metavar="N[,N…]",
        help="experts in a cache, a share of all (60%%), or memory for all caches together (36MB; needs the size of an "
        "expert); default: half of those that could be in it",
    )
    command.add_argument(
        "--profile",
        metavar="TRACE",
        help="what static is chosen by (default: the trace itself, which looks ahead)",
    )
    command.add_argument(
        "--full", action="store_true", help=f"print the report of each policy also when there are more than {FEW}"
    )
    command.add_argument(
        "--scope", choices=["layer", "global"], default="layer", help="a cache for each layer (default), or one for all"
    )
    command.add_argument(
        "--passes",
        choices=["decode", "trace"],
        default="decode",
        help="serve every token on its own, as a decoder does (default), or the passes as they were recorded",
    )
    cost = command.add_argument_group("what a miss costs")
    cost.add_argument("--expert-bytes", type=int, metavar="N", help="size of one expert (a checkpoint says it itself)")
    cost.add_argument("--read-gbps", type=float, metavar="X", help="10^9 bytes a second that misses are read with")
    cost.add_argument("--compute-ms", type=float, metavar="Y", help="milliseconds of a token when nothing is missing")
    files = command.add_argument_group("files")
    files.add_argument("--csv", type=Path, metavar="F", help="counters by policy, capacity, layer and kind of pass")
    files.add_argument("--parquet", type=Path, metavar="F", help="the same (needs pyarrow)")
    files.add_argument("--plot", type=Path, metavar="F", help="miss ratios by capacity as a picture (.png, .svg, .pdf)")
    files.add_argument("--html", type=Path, metavar="F", help="the view of the first policy, as one offline HTML file")
    add_recording(command)
    command.set_defaults(run=run, trouble=TROUBLE)


def run(options: argparse.Namespace) -> int:
    """Simulates, prints the reports, and returns the exit code. Raises ColibriError."""
    import colibri_lab as lab
    from colibri_lab.cache.tables import table_of

    files = (options.csv, options.parquet, options.plot, options.html)
    check_outputs(files, [options.run_of, options.config, options.profile])
    policies = _policies(options.policy)
    check_picture(options.plot)
    check_table(options.parquet)
    machine = _machine(options)
    source, trace, size = _source(options)
    if machine is not None and size is None:
        raise ArgumentError("a speed needs the size of an expert: --expert-bytes")
    capacities, lines = capacities_of(options.capacity, trace, options.scope, size)
    profile = profile_of(options, "static" in policies)
    passes = None if options.passes == "decode" else "trace"
    how: dict[str, Any] = {"scope": options.scope, "passes": passes, "progress": bar()}
    simulations = [
        lab.cache.simulate(trace, policy, capacity, expert_bytes=size, **_profiled(policy, profile), **how)
        for policy in policies
        for capacity in capacities
    ]
    lines = [*simulations[0].notes, *_other_size(options, source), *lines]
    if lines:
        print(*lines, "", sep="\n")
    if options.full or len(policies) <= FEW:
        print("\n".join(table_of(simulation) + "\n" for simulation in simulations))
    points = _points(capacities, trace, options.scope)
    curves = {
        policy: _curve(trace, policy, points, {**how, **_profiled(policy, profile)})
        for policy in dict.fromkeys((*policies, BOUND))
    }
    if simulations[0].requests.sum():
        print(table(curves, points, capacities, options.scope))
        if len(policies) > FEW and (ranked := ranking(curves, points, capacities, profile is None)):
            print(ranked)
        print(*beside_the_bound(curves, points, capacities, profile is None), sep="\n")
    else:
        print("No token asks for an expert: there is nothing to hit or to miss.")
    if machine is not None:
        speeds = [(s, lab.cache.predict(s, machine)) for s in simulations]
        print("", *(f"{s.policy}, {s.capacity} experts: {speed.sentence}" for s, speed in speeds), sep="\n")
    if options.csv is not None:
        write_csv(options.csv, simulations, trace.moe_layers)
    if options.parquet is not None:
        write_parquet(options.parquet, simulations, trace.moe_layers)
    if options.plot is not None:
        draw(options.plot, points, curves, capacities, options.scope)
    if options.html is not None:
        view = lab.CacheLab(
            source,
            policy=policies[0],
            capacity=capacities[0],
            scope=options.scope,
            passes="each" if passes is None else passes,
            machine=machine,
            expert_bytes=size,
            profile=profile,
        )
        view.to_html(options.html)
    for path in files:
        if path is not None:
            print(path)
    return 0


def _policies(said: list[str] | None) -> list[Policy]:
    from colibri_lab.cache.policies import POLICIES, check_policy

    names = [name.strip() for part in said or ["lru"] for name in part.split(",")]
    chosen = list(POLICIES) if "all" in names else [check_policy(name) for name in dict.fromkeys(names)]
    return cast("list[Policy]", chosen)


def _machine(options: argparse.Namespace) -> Machine | None:
    import colibri_lab as lab

    if (options.read_gbps is None) != (options.compute_ms is None):
        raise ArgumentError("a speed needs both --read-gbps and --compute-ms")
    if options.read_gbps is None:
        return None
    return lab.cache.Machine(1e9 * options.read_gbps, options.compute_ms / 1e3, source="given on the command line")


def _source(options: argparse.Namespace) -> tuple[Trace | Session, Trace, Any]:
    """What the view is of, its trace, and the bytes of an expert: a number, (Lm, E), or None."""
    import colibri_lab as lab

    x = input_of(options)
    if options.run_of is not None and not is_checkpoint(options.run_of):
        if x is not None:
            raise ArgumentError(
                f"{options.run_of} is a trace, which was run already: --text and --ids are for checkpoints"
            )
        trace = recording_of(options, options.run_of)
        return trace, trace, options.expert_bytes
    if options.profile is None:  # which may be a recording that has to be told
        refuse_recording(options)
    if x is None:
        raise ArgumentError("say with --text or --ids what to run the model on")
    session = session_of(options.run_of, x, "routing")
    trace = session.trace()
    size = options.expert_bytes
    return session, trace, lab.cache.expert_bytes(session.model) if size is None else size


def _profiled(policy: Policy, profile: Trace | None) -> dict[str, Any]:
    return {"profile": profile} if policy == "static" and profile is not None else {}


def _other_size(options: argparse.Namespace, source: Trace | Session) -> list[str]:
    """A line when the size given is none that the checkpoint has."""
    import colibri_lab as lab

    model, given = getattr(source, "model", None), options.expert_bytes
    own = np.unique(lab.cache.expert_bytes(model)) if given is not None and model is not None else np.empty(0, int)
    if not len(own) or own.tolist() == [given]:
        return []
    sizes = f"{own[0]:,}" if len(own) == 1 else f"{own[0]:,} to {own[-1]:,}"
    return [f"An expert counts as {given:,} bytes, as --expert-bytes says; those of the checkpoint have {sizes}."]


def _points(capacities: list[int], trace: Trace, scope: str) -> list[int]:
    keys, k = keys_of(trace, scope), trace.top_k
    return sorted({*capacities, *np.linspace(k, keys, min(POINTS, keys - k + 1)).round().astype(int).tolist()})


def _curve(trace: Trace, policy: Policy, points: list[int], how: dict[str, Any]) -> Curve:
    """(points,) share of all requests that miss."""
    from colibri_lab import cache
    from colibri_lab.cache.policies import STACKS

    if policy not in STACKS:  # its curve is a simulation for each capacity there is, which may be thousands
        found = [cache.simulate(trace, policy, point, **how) for point in points]
        return np.array([s.misses.sum() / max(1, s.requests.sum()) for s in found])
    curve = cache.miss_ratio_curve(trace, policy, **how)
    requests = cache.simulate(trace, policy, points[-1], **how).requests
    weights = requests if how["scope"] == "layer" else requests.sum(keepdims=True)
    used = weights > 0
    return np.asarray(weights[used] @ curve[used][:, points] / max(1, int(requests.sum())))
