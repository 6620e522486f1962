"""make_taps_page.py [--check]: writes docs/taps.md from the engine's table; --check: exit code 1 when it differs."""

import sys
from pathlib import Path

from colibri_lab._core import tap_kinds

PAGE = Path(__file__).resolve().parent.parent / "docs" / "taps.md"

HEAD = """# Taps

*Written by `tools/make_taps_page.py` from the table in the engine; do not edit.*

A tap is a named intermediate of a session: `session.tape["layers.0.moe.gates"]`. T tokens of the session, H hidden size, V vocabulary, E experts, k chosen experts, I expert width, S keys a query could see, N = T·k rows sent to experts, n_e rows sent to one expert in one pass. `{l}` is a layer, `{e}` an expert; `*` stands for any part in a `capture` list and in patterns.

*Kept at* is the lowest `capture` that keeps the tap: *none* means always, *named* only when a pattern in the list names it. A tap of an expert shows the last pass; `session.passes[i].tape[path]` shows pass i, and `tape.expert_rows(layer, expert)` joins all passes.
"""  # noqa: E501

SECTIONS = {
    "model": "Of the whole model",
    "layer": "Of every layer",
    "moe": "Of every MoE layer",
    "shared": "Of every MoE layer with a shared expert",
    "dense": "Of every dense layer",
    "expert": "Of every expert of every MoE layer",
}


def page() -> str:
    lines = [HEAD]
    for scope, title in SECTIONS.items():
        rows = [kind for kind in tap_kinds if kind.scope == scope]
        if rows:
            lines += [f"## {title}", "", "| path | axes | dtype | kept at | what |", "|---|---|---|---|---|"]
            lines += [f"| `{k.path}` | {k.axes.replace(',', ', ')} | {k.dtype} | {k.level} | {k.what} |" for k in rows]
            lines += [""]
    return "\n".join(lines)


if __name__ == "__main__":
    if "--check" not in sys.argv:
        PAGE.write_text(page(), encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != page():
        sys.exit(f"{PAGE.name} is out of date: run python tools/make_taps_page.py")
