"""`colibri-lab cache`: what a cache of experts would hit on a trace, by policy and capacity, and what that would cost.

Exit codes: 0 the work was done, 2 trouble.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from colibri_lab._cache_tables import check_picture, check_table, draw, write_csv, write_parquet
from colibri_lab._cli_input import (
    add_input,
    add_recording,
    bar,
    check_outputs,
    input_of,
    is_checkpoint,
    recording_of,
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
BOUND: Policy = "belady"
POINTS = 16  # capacities that table and picture show beside those asked for

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
        "--capacity", metavar="N[,N…]", help="experts in a cache (default: half of those that could be in it)"
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

    files = (options.csv, options.parquet, options.plot, options.html)
    check_outputs(files, [options.run_of, options.config])
    policies = _policies(options.policy)
    check_picture(options.plot)
    check_table(options.parquet)
    machine = _machine(options)
    source, trace, size = _source(options)
    if machine is not None and size is None:
        raise ArgumentError("a speed needs the size of an expert: --expert-bytes")
    capacities = _capacities(options.capacity, trace, options.scope)
    passes = None if options.passes == "decode" else "trace"
    how: dict[str, Any] = {"scope": options.scope, "passes": passes, "progress": bar()}
    simulations = [
        lab.cache.simulate(trace, policy, capacity, expert_bytes=size, **how)
        for policy in policies
        for capacity in capacities
    ]
    print("\n".join(simulation.report().rstrip("\n") + "\n" for simulation in simulations))
    points = _points(capacities, trace, options.scope)
    curves = {policy: _curve(trace, policy, points, how) for policy in dict.fromkeys((*policies, BOUND))}
    if simulations[0].requests.sum():
        print(_table(curves, points, capacities, options.scope))
        print(*_beside_the_bound(curves, points, capacities), sep="\n")
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
    if x is None:
        raise ArgumentError("say with --text or --ids what to run the model on")
    session = session_of(options.run_of, x, "routing")
    trace = session.trace()
    size = options.expert_bytes
    return session, trace, lab.cache.expert_bytes(session.model) if size is None else size


def _keys(trace: Trace, scope: str) -> int:
    """How many experts could be in one cache."""
    return trace.num_experts * (1 if scope == "layer" else len(trace.moe_layers))


def _capacities(said: str | None, trace: Trace, scope: str) -> list[int]:
    keys = _keys(trace, scope)
    if said is None:
        return [max(trace.top_k, keys // 2)]
    try:
        found = sorted({int(part) for part in said.split(",")})
    except ValueError:
        raise ArgumentError(f"capacities are whole numbers with commas between them, not '{said:.40}'") from None
    for number in found:
        if not trace.top_k <= number <= keys:
            raise ArgumentError(
                f"a cache of {number} experts is none: a token asks for {trace.top_k} at once, and there are {keys}; "
                f"give --capacity {min(max(number, trace.top_k), keys)}"
            )
    return found


def _points(capacities: list[int], trace: Trace, scope: str) -> list[int]:
    keys, k = _keys(trace, scope), trace.top_k
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


def _table(curves: dict[Policy, Curve], points: list[int], capacities: list[int], scope: str) -> str:
    what = "a layer" if scope == "layer" else "all layers together"
    width = max(8, *(len(name) + 1 for name in curves))
    lines = [f"Misses by capacity (experts of {what}); * was asked for", ""]
    lines.append(f"{'capacity':>10}" + "".join(f"{name:>{width}}" for name in curves))
    for row, number in enumerate(points):
        mark = "*" if number in capacities else " "
        values = "".join(f"{100 * curve[row]:>{width - 2}.1f} %" for curve in curves.values())
        lines.append(f"{mark}{number:>9}{values}")
    return "\n".join(lines) + "\n"


def _beside_the_bound(curves: dict[Policy, Curve], points: list[int], capacities: list[int]) -> list[str]:
    """How far the nearest policy is from Belady's, a line for each capacity."""
    lines = []
    for number in capacities:
        hits = {name: 100 * (1 - curve[points.index(number)]) for name, curve in curves.items()}
        bound = hits.pop(BOUND)
        line = f"With {number} experts Belady, who knows what comes, would hit {bound:.1f} %"
        if hits:
            name = max(hits, key=lambda name: hits[name])
            side = "below" if hits[name] <= bound else "above"
            line += f"; {name} comes nearest: {hits[name]:.1f} %, {abs(bound - hits[name]):.1f} points {side}"
        lines.append(line + ".")
    return lines
