"""Every tap of a pass by name, in gdb, wherever a program stands inside a stage of the engine.

    make -C csrc OUT=../build-debug CFLAGS="-O0 -g"
    gdb -x tools/gdb/colibri.py --args build-debug/colibri_cli MODEL --ids 1,2,3
    (gdb) break aggregate_routed
    (gdb) run
    (gdb) colibri                        what can be printed here, with shapes
    (gdb) p expert_output[3][127]        channel 127 of the first row of expert 3 in this layer
    (gdb) p *expert_output[3]@128        the whole row
    (gdb) p moe_gates[0][1]              token 0 of the tile, slot 1

Whenever the program stops, each tap becomes a convenience variable named after its path: layers.{l}.moe.gates is
$moe_gates, layers.{l}.moe.experts.{e}.output is $expert_output. Those of an expert are indexed [expert][i], where i
runs over its rows one after the other; an expert without rows has a null pointer. All others are indexed
[row][channel], row 0 being the first of the tile. Names that begin with moe_, expert_ or mlp_ work without the $ too. A
tap shows what is in memory: what the stages before this one wrote, and leftovers where none has written yet.

This reads memory and calls nothing, so it works on core files as well. It needs debugging information (-g), and a stage
whose local variables were not optimised away (-O0).
"""

from __future__ import annotations

import itertools
import struct

import gdb

PLAIN = ("moe_", "expert_", "mlp_")  # beginnings of names that the engine's source does not use
AXES = {
    "H": "hidden_size", "V": "vocab_size", "E": "num_experts", "k": "top_k", "I": "moe_intermediate_size",
    "heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "head_dim": "head_dim",
}  # fmt: skip


class Stage:
    """The innermost stage on the stack: its session, its layer and the taps of its tile."""

    def __init__(self, session: gdb.Value, layer: int, name: str) -> None:
        self.session, self.layer, self.name = session, layer, name
        self.config = session["model"]["config"]
        self.tokens, self.first = int(session["tile_tokens"]), int(session["tile_first"])
        self.kinds = gdb.parse_and_eval("tap_kinds")
        self.numbers = {field.name: field.enumval for field in gdb.lookup_type("tap").strip_typedefs().fields()}
        self.count = self.numbers["TAP_COUNT"]

    def size(self, axis: str) -> int:
        """How long the axis of that name is."""
        if axis == "E+1":
            return int(self.config["num_experts"]) + 1
        return int(self.config[AXES[axis]]) if axis in AXES else 1

    def slot(self, tap: int) -> gdb.Value:
        """Where rows of a tap lie, as the engine's layout says."""
        per_layer = "{l}" in self.path(tap)
        layer = self.layer if per_layer else 0
        return self.session["layout"]["slots"][layer * self.count + tap]

    def path(self, tap: int) -> str:
        return str(self.kinds[tap]["path"].string())

    def axes(self, tap: int) -> list[str]:
        return str(self.kinds[tap]["axes"].string()).split(",")

    def element(self, tap: int) -> gdb.Type:
        names = {"COLIBRI_F32": "float", "COLIBRI_I32": "int", "COLIBRI_I64": "long"}
        return gdb.lookup_type(names[str(self.kinds[tap]["dtype"])])

    def rows(self, tap: int) -> gdb.Value | None:
        """A pointer to the tile's first row; None where this session has no rows of it."""
        slot = self.slot(tap)
        row_bytes = int(slot["row_bytes"])
        if row_bytes == 0 or not self.exists(tap):
            return None
        first = self.axes(tap)[0]
        row = 0
        if bool(slot["kept"]):
            row = {"N": self.first * self.size("k"), "passes": int(self.session["n_passes"])}.get(first, self.first)
        block = self.session["tape" if bool(slot["kept"]) else "scratch"]
        start = int(block["pages"]["data"]) + int(slot["offset"]) + row * row_bytes
        kind = self.element(tap)
        for axis in reversed(self.axes(tap)[1:]):
            kind = kind.array(self.size(axis) - 1)
        return gdb.Value(start).cast(kind.pointer())

    def exists(self, tap: int) -> bool:
        """Whether this layer has the tap, and its rows lie one after the other (attn.weights lie head by head)."""
        scope, moe = str(self.kinds[tap]["scope"]), bool(self.config["is_moe"][self.layer])
        shared = int(self.config["shared_expert_intermediate_size"]) > 0
        here = {"COLIBRI_SCOPE_DENSE": not moe, "COLIBRI_SCOPE_MOE": moe, "COLIBRI_SCOPE_SHARED": moe and shared}
        return here.get(scope, True) and self.axes(tap)[0] != "heads"

    def stored_as(self, tap: int) -> int:
        """Without a shared expert, what the block returns is the gated sum itself."""
        shared = int(self.config["shared_expert_intermediate_size"]) > 0
        return self.numbers["TAP_MOE_ROUTED"] if tap == self.numbers["TAP_MOE_OUTPUT"] and not shared else tap

    def of_experts(self, tap: int) -> gdb.Value | None:
        """An array of E pointers to the first row of each expert in this layer."""
        if not bool(self.config["is_moe"][self.layer]):
            return None
        packed = self.rows(self.numbers["TAP_DISPATCH_" + self.path(tap).rpartition(".")[2].upper()])
        offsets = self.rows(self.numbers["TAP_DISPATCH_OFFSETS"])
        if packed is None or offsets is None:
            return None
        starts = [int(offsets.dereference()[e]) for e in range(self.size("E") + 1)]
        zero, width = self.first * self.size("k"), packed.type.target().sizeof
        at = [int(packed) + (a - zero) * width if b > a else 0 for a, b in itertools.pairwise(starts)]
        kind = self.element(tap).pointer().array(self.size("E") - 1)
        return gdb.Value(struct.pack(f"={len(at)}Q", *at), kind)

    def variables(self) -> dict[str, tuple[gdb.Value, str]]:
        """Name -> (value, shape) of every tap that has rows here."""
        out = {}
        for tap in range(self.count):
            expert = "{e}" in self.path(tap)
            value = self.of_experts(tap) if expert else self.rows(self.stored_as(tap))
            if value is not None:
                path = self.path(tap).replace("layers.{l}.", "").replace("moe.experts.{e}.", "expert.")
                name, inner = path.replace(".", "_"), [str(self.size(axis)) for axis in self.axes(tap)[1:]]
                rows = {"T": self.tokens, "N": self.tokens * self.size("k"), "passes": 1}.get(self.axes(tap)[0], "n_e")
                shape = ", ".join([*([str(self.size("E"))] if expert else []), str(rows), *inner])
                out[name] = (value, f"({shape}) {self.kinds[tap]['what'].string()}")
        return out


def find_stage() -> Stage | None:
    """The innermost frame that has a session `s`, and a layer `l` where it is inside one."""
    frame = gdb.newest_frame()
    while frame is not None:
        names = arguments(frame)
        if "s" in names:
            session = frame.read_var("s").dereference()
            if session.type.strip_typedefs().unqualified().tag == "session":
                return Stage(session, int(frame.read_var("l")) if "l" in names else 0, frame.name())
        frame = frame.older()
    return None


def arguments(frame: gdb.Frame) -> set[str]:
    """Names of the arguments of a frame's function; none without debugging information."""
    try:
        block = frame.block()
    except RuntimeError:
        return set()
    while block.function is None:
        block = block.superblock
    return {symbol.name for symbol in block if symbol.is_argument}


def update(_event: object = None) -> None:
    """Sets the variables for where the program stands; leaves them alone outside a stage."""
    try:
        stage = find_stage()
        if stage is None:
            return
        for name, (value, _) in stage.variables().items():
            gdb.set_convenience_variable(name, value)
            if name.startswith(PLAIN):
                gdb.execute(f"macro define {name} ${name}")
    except gdb.error as error:
        gdb.write(f"colibri: {error}\n")


class Colibri(gdb.Command):
    """What of the engine can be printed here: the names of taps, their shapes, and what they are."""

    def __init__(self) -> None:
        super().__init__("colibri", gdb.COMMAND_DATA)

    def invoke(self, _argument: str, _from_tty: bool) -> None:
        stage = find_stage()
        if stage is None:
            raise gdb.GdbError("colibri: the program does not stand inside a stage; try: break aggregate_routed")
        last = stage.first + stage.tokens - 1
        gdb.write(f"{stage.name}, layer {stage.layer}, tokens {stage.first} to {last}\n")
        for name, (_, shape) in stage.variables().items():
            gdb.write(f"  {'' if name.startswith(PLAIN) else '$'}{name:24} {shape}\n")


Colibri()
gdb.events.stop.connect(update)
