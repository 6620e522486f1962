"""make_stepper_page.py [--check]: writes the table of docs/stepper.md from colibri_lab/places.py; --check: exit code 1
when it differs.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

from colibri_lab._core import tap_kinds
from colibri_lab.places import INSTEAD, STAGES, in_layer, readers, writer

PAGE = Path(__file__).resolve().parent.parent / "docs" / "stepper.md"
BEGIN, END = "<!-- taps by tools/make_stepper_page.py -->\n", "<!-- end -->"

# A layer of each kind (experts with a shared one, dense, experts alone), and one more that is the last.
CONFIG = SimpleNamespace(num_hidden_layers=4, moe_layers=(0, 2, 3), shared_layers=(0,))
LAYERS = {"layer": (0, 1, 2, 3), "moe": (0, 2), "expert": (2,), "shared": (0,), "dense": (1,), "model": (-1,)}


def who_reads(name: str, scope: str) -> str:
    """The stages that read a tap after it is written, over all kinds of layers."""
    if name in ("attn.k", "attn.v"):
        return "the attention of later passes"
    if name == "moe.routed":
        return "residual, where no expert is shared (else nobody)"
    if name == "embed":
        return who_reads("output", "layer").replace("the next layer; norm after the last", "layer 0")
    found = {
        place.stage for layer in LAYERS[scope] for place in readers(name, layer, 0 if scope == "expert" else -1, CONFIG)
    }
    stages = sorted((stage for stage in found if name != "output" or stage != "norm"), key=STAGES.index)
    words = ", ".join(stages).replace("router, mlp", "router or mlp") or "nobody"
    return f"{words} of the next layer; norm after the last" if name == "output" else words


def table() -> str:
    lines = ["| tap | written by | still read by | else edit |", "|---|---|---|---|"]
    kinds = [(writer(in_layer(k.path), 0, 0), k) for k in tap_kinds]
    for place, kind in sorted(kinds, key=lambda pair: STAGES.index(pair[0].stage)):
        name = in_layer(kind.path)
        short = kind.path.removeprefix("layers.{l}.")
        reads = who_reads(name, kind.scope)
        instead = INSTEAD.get(name, "").replace("layers.{l}.", "")
        lines.append(f"| `{short}` | {place.stage} | {reads} | {instead} |")
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    if "--check" not in sys.argv:
        PAGE.write_text(page(text), encoding="utf-8")
    elif text != page(text):
        sys.exit(f"{PAGE.name} is out of date: run python tools/make_stepper_page.py")
