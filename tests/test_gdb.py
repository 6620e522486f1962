"""The helper for gdb: with the command line stopped inside a stage, taps print by name."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import colibri_lab as lab
from colibri_lab._engine import core

ROOT = Path(__file__).resolve().parent.parent
HELPER = ROOT / "tools" / "gdb" / "colibri.py"
IDS = [0, 401, 273, 30, 7, 1500, 401]


@pytest.fixture(scope="module")
def debug_cli(tmp_path_factory):
    """colibri_cli as docs/debugging.md says to build it."""
    out = tmp_path_factory.mktemp("debug")
    command = ["make", "-C", ROOT / "csrc", f"OUT={out}", "CFLAGS=-O0 -g", "-j2"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out / "colibri_cli"


def gdb(cli, capsys, commands: list[str]) -> str | None:
    """What gdb prints for these commands; None, said aloud, where there is no gdb or it may not trace."""
    reason = "gdb is not installed"
    if program := shutil.which("gdb"):
        options = [word for command in commands for word in ("-ex", command)]
        ids = ",".join(map(str, IDS))
        command = [
            program,
            "-nx",
            "-batch",
            "-x",
            HELPER,
            *options,
            "--args",
            cli,
            lab.open().info["path"],
            "--ids",
            ids,
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        printed = done.stdout + done.stderr
        if "ptrace: Operation not permitted" not in printed:
            assert "Python Exception" not in printed and "colibri: no" not in printed, printed
            return printed
        reason = "this system forbids tracing"
    with capsys.disabled():
        print(f"\nthe helper for gdb was not run: {reason}")
    return None


def floats(text: str) -> list[np.float32]:
    return [np.float32(number) for number in re.findall(r"-?\d+\.?\d*(?:e[-+]\d+)?", text)]


def test_S11_the_output_of_an_expert_prints_in_the_aggregator_by_its_name(debug_cli, capsys):
    """In every layer, p expert_output[3][127] is channel 127 of expert 3, and gates are those of the Python package."""
    session = lab.open().session(capture="all")
    session.feed(IDS)
    width, layers = session.model.config.hidden_size, session.model.config.num_hidden_layers
    experts = range(session.model.config.num_experts)
    prints = [f"p expert_output[{e}][{width - 1}]" for e in experts]
    prints += [*(f"p *expert_output[{e}]@{width}" for e in experts), "p moe_gates[6]", "colibri"]
    script = ["set print elements 0", "set print repeats 0", "set confirm off", "break aggregate_routed", "run"]
    for _ in range(layers):
        script += ["echo ----\\n", *prints, "continue"]
    printed = gdb(debug_cli, capsys, script)
    if printed is None:
        return
    stops = printed.split("----\n")[1:]
    assert len(stops) == layers
    for layer, stop in enumerate(stops):
        assert f"stage_aggregator, layer {layer}, tokens 0 to {len(IDS) - 1}" in stop
        assert re.search(rf"^  expert_output +\({len(experts)}, n_e, {width}\) ", stop, flags=re.MULTILINE)
        values = re.findall(r"^\$\d+ = (.+)$", stop, flags=re.MULTILINE)
        used = [e for e in experts if len(session.tape[f"layers.{layer}.moe.experts.{e}.tokens"])]
        rows = [session.tape[f"layers.{layer}.moe.experts.{e}.output"][0] for e in used]
        assert floats(" ".join(values[: len(used)])) == [row[-1] for row in rows]
        for value, row in zip(values[len(used) : 2 * len(used)], rows, strict=True):
            assert floats(value) == row.tolist()
        assert floats(values[2 * len(used)]) == session.tape.gates(layer)[6].tolist()


def test_a_value_set_in_gdb_is_what_the_engine_goes_on_with(debug_cli, capsys):
    """Gates of the last token set to 0 in layer 0: another sum, so other routing below it."""
    script = [
        "set confirm off",
        "break aggregate_routed",
        "run",
        "set var moe_gates[6][0] = 0",
        "set var moe_gates[6][1] = 0",
    ]
    printed = gdb(debug_cli, capsys, [*script, "finish", "p moe_routed[6][0]", "p moe_routed[0][0] != 0", "kill"])
    if printed is not None:
        assert re.findall(r"^\$\d+ = (.+)$", printed, flags=re.MULTILINE) == ["0", "1"]


def test_outside_a_stage_the_helper_says_where_to_stop(debug_cli, capsys):
    printed = gdb(debug_cli, capsys, ["set confirm off", "break main", "run", "colibri", "kill"])
    assert printed is None or "does not stand inside a stage; try: break aggregate_routed" in printed


def test_names_without_a_dollar_are_no_names_of_the_engine():
    """They are macros of gdb, which would take the place of a variable or field of the same name."""
    plain = re.search(r"^PLAIN = \((.+)\)", HELPER.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert plain
    begins = tuple(re.findall(r'"(\w+)"', plain[1]))
    paths = [kind.path for kind in core.tap_kinds]
    names = {path.replace("layers.{l}.", "").replace("moe.experts.{e}.", "expert.").replace(".", "_") for path in paths}
    names = {name for name in names if name.startswith(begins)}
    assert len(names) > 15
    for source in sorted((ROOT / "csrc").rglob("*.[ch]")):
        assert not names & set(re.findall(r"\b[a-z]\w*", source.read_text(encoding="utf-8"))), source.name
