"""Causes: each kind at several points, with the numbers that plain NumPy gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from checkpoints import DTYPES, expert_names, moe_prefix, random_tensors, small_config, write_checkpoint

import colibri_lab as lab
from colibri_lab.nan.causes import explain
from colibri_lab.nan.causes_attention import Heads
from colibri_lab.nan.causes_rows import Add
from colibri_lab.nan.causes_weights import coarse, cut
from colibri_lab.nan.causes_words import number
from colibri_lab.nan.inner import tap_of
from colibri_lab.nan.result import Origin
from colibri_lab.nan.source import Birth, Source
from colibri_lab.trace import Trace

REFERENCE = Path(__file__).parent / "fixtures" / "reference"
IDS = list(range(3, 15))
Tensors = dict[str, np.ndarray]
LAYER = "model.layers.1."


def birth(source: Source, path: str) -> Birth:
    """All values of a tap that are not finite, where everything before it is."""
    part = path.split(".")
    expert = int(part[4]) if part[3:4] == ["experts"] else None
    if expert is not None:
        rows = source.expert_rows(int(part[1]), expert, part[5])
        assert rows is not None
        tokens, values = rows
    else:
        values = source.rows(path)
        tokens = np.arange(len(values))
    bad = ~np.isfinite(values)
    rows_hit = bad.reshape(len(bad), -1).any(1)
    assert rows_hit.any(), f"{path} is finite"
    layer = int(part[1]) if part[0] == "layers" else None
    return Birth(path, layer, "stage", expert, tokens[rows_hit].astype(np.int64), bad[rows_hit])


class Sick:
    """A run of a small checkpoint that was changed by hand."""

    def __init__(
        self, folder: Path, family: str, change: Callable[[Tensors], None], dtype: str = "F32", **options: Any
    ) -> None:
        config = small_config(family, **options)
        tensors = {name: value.astype(DTYPES[dtype]) for name, value in random_tensors(config, 1).items()}
        change(tensors)
        self.folder = write_checkpoint(folder / "model", config, tensors)
        self.tensors, self.config = tensors, config
        self.model = lab.open(self.folder)
        session = self.model.session(capture="all")
        session.feed(IDS)
        self.trace = session.trace()
        self.source = Source(self.trace, self.model)

    def origins(self, path: str) -> list[Origin]:
        return explain(birth(self.source, path), self.source)

    def origin(self, path: str) -> Origin:
        (origin,) = self.origins(path)
        return origin


def put(name: str, index: Any, value: float) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name][index] = value

    return change


def times(**factors: float) -> Callable[[Tensors], None]:
    """Tensors of layer 1, dots written as two underscores, multiplied."""

    def change(tensors: Tensors) -> None:
        for name, factor in factors.items():
            tensors[LAYER + name.replace("__", ".") + ".weight"] *= np.float32(factor)

    return change


def healthy(family: str = "mixtral", **options: Any) -> tuple[Any, Trace]:
    """(model, trace) of a reference checkpoint."""
    model = lab.open(REFERENCE / family)
    session = model.session(capture="all")
    session.feed(IDS)
    return model, session.trace()


def altered(trace: Trace, arrays: dict[str, np.ndarray], without: tuple[str, ...] = (), **meta: Any) -> Trace:
    """The trace with other arrays under some paths, and without those that end in one of `without`."""
    kept = {path: trace[path] for path in trace if not path.endswith(without or ("?",))}
    return Trace(kept | arrays, ids=trace.ids, texts=trace.texts, meta={**trace.meta, **meta})


def planted(trace: Trace, path: str, place: Any, value: float, bits: int | None = None) -> dict[str, np.ndarray]:
    array = np.array(trace[path], np.float32)
    array[place] = value
    if bits is not None:
        array.view(np.uint32)[place] = bits
    return {path: array}


# ---- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_a_weight_is_named_with_its_bits_and_its_byte(tmp_path: Path, dtype: str) -> None:
    """The byte that is named holds the bits that are named."""
    name = LAYER + "block_sparse_moe.experts.3.w1.weight"
    sick = Sick(tmp_path, "mixtral", put(name, (17, 4), np.nan), dtype)
    origin = sick.origin("layers.1.moe.experts.3.gate")
    place = origin.weight
    assert place is not None and (origin.kind, place.name, place.index) == (
        "weight value", "layers.1.moe.experts.3.gate", (17, 4))  # fmt: skip
    assert (origin.point, origin.index, origin.expert, origin.layer) == ("layers.1.moe.experts.3.gate", 17, 3, 1)
    width = DTYPES[dtype].itemsize
    stored = sick.tensors[name][17:18, 4:5].tobytes()
    assert place.offset is not None
    assert (sick.folder / place.file).read_bytes()[place.offset : place.offset + width] == stored
    assert place.bits == int.from_bytes(stored, "little") and not place.signalling
    assert origin.cause.startswith("weight value: layers.1.moe.experts.3.gate[17, 4] is NaN (0x")
    assert place.file_name == name
    assert origin.cause.endswith(f"in model.safetensors at byte {place.offset:,} (there {name})")


def test_a_signalling_nan_is_named_as_one(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors[LAYER + "block_sparse_moe.experts.3.w2.weight"].view(np.uint32)[3, 4] = 0x7FA00001

    origin = Sick(tmp_path, "mixtral", change).origin("layers.1.moe.experts.3.output")
    assert origin.weight is not None and origin.weight.signalling and origin.weight.bits == 0x7FA00001
    assert "(0x7FA00001, a signalling NaN)" in origin.cause and origin.index == 3


def test_elements_of_a_weight_are_apart_and_whole_rows_and_matrices_are_one(tmp_path: Path) -> None:
    name, path = LAYER + "block_sparse_moe.experts.3.w1.weight", "layers.1.moe.experts.3.gate"

    def two(tensors: Tensors) -> None:
        tensors[name][2, 5], tensors[name][9, 6] = np.nan, np.inf

    found = Sick(tmp_path / "two", "mixtral", two).origins(path)
    assert [(o.index, o.weight.index if o.weight else None) for o in found] == [(2, (2, 5)), (9, (9, 6))]
    row = Sick(tmp_path / "row", "mixtral", put(name, 7, np.nan)).origin(path)
    assert row.cause.endswith("and 43 more in this row") and row.index == 7
    matrix = Sick(tmp_path / "matrix", "mixtral", put(name, ..., np.nan))
    whole = matrix.origin(path)
    assert whole.cause.endswith(f"and {matrix.tensors[name].size - 1:,} more in this weight")
    assert whole.n_values == len(whole.tokens) * matrix.tensors[name].shape[0]


def test_an_embedding_row_has_its_own_kind(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors["model.embed_tokens.weight"][IDS[2]] = np.nan
        tensors["model.embed_tokens.weight"][IDS[4], 9] = -np.inf

    row, one = Sick(tmp_path, "mixtral", change).origins("embed")
    assert (row.kind, row.tokens, row.index, row.n_values) == ("embedding", (2,), 0, 44)
    assert row.cause.endswith("and 43 more in this row")
    assert (one.kind, one.tokens, one.index, one.value) == ("embedding", (4,), 9, -np.inf)
    assert one.cause.startswith(f"embedding: embed[{IDS[4]}, 9] is −Inf (0xFF800000), in model.safetensors at byte ")


WEIGHTS = [  # family, tensor, element, tap, point, index of the row
    ("mixtral", "input_layernorm", (4,), "attn.norm", "attn.norm", 4),
    ("mixtral", "self_attn.q_proj", (5, 3), "attn.q", "attn.q.product", 5),
    ("mixtral", "self_attn.k_proj", (5, 3), "attn.k", "attn.k.product", 5),
    ("mixtral", "self_attn.v_proj", (5, 3), "attn.v", "attn.v.product", 5),
    ("mixtral", "self_attn.o_proj", (5, 3), "attn.out", "attn.out", 5),
    ("mixtral", "post_attention_layernorm", (4,), "moe.input", "moe.input", 4),
    ("mixtral", "block_sparse_moe.gate", (2, 3), "moe.router_logits", "moe.router_logits", 2),
    ("qwen3_moe", "self_attn.q_norm", (7,), "attn.q", "attn.q", (0, 2)),
    ("olmoe", "self_attn.k_norm", (14,), "attn.k", "attn.k", (1, 4)),
    ("qwen2_moe", "mlp.shared_expert.up_proj", (5, 3), "moe.shared.output", "moe.shared.inner.up", 5),
    ("qwen2_moe", "mlp.shared_expert.gate_proj", (5, 3), "moe.shared.output", "moe.shared.inner.gate", 5),
    ("qwen2_moe", "mlp.shared_expert.down_proj", (5, 3), "moe.shared.output", "moe.shared.output", 5),
    ("qwen2_moe", "mlp.shared_expert_gate", (0, 3), "moe.shared.gate", "moe.shared.gate.product", 0),
]  # fmt: skip


@pytest.mark.parametrize(("family", "tensor", "element", "tap", "point", "index"), WEIGHTS)
def test_a_bad_weight_is_found_at_its_point(
    tmp_path: Path, family: str, tensor: str, element: tuple[int, ...], tap: str, point: str, index: Any
) -> None:
    sick = Sick(tmp_path, family, put(f"{LAYER}{tensor}.weight", element, np.nan))
    origin = sick.origin(f"layers.1.{tap}")
    assert (origin.kind, origin.point, origin.path) == ("weight value", f"layers.1.{point}", f"layers.1.{tap}")
    assert (origin.index, origin.token) == (index, 0) and len(origin.tokens) == len(IDS)
    assert origin.weight is not None and origin.weight.index == element


def test_a_bad_weight_of_a_dense_layer_is_found_at_its_point(tmp_path: Path) -> None:
    change = put("model.layers.0.mlp.gate_proj.weight", (5, 3), np.nan)
    origin = Sick(tmp_path, "qwen3_moe", change, mlp_only_layers=[0]).origin("layers.0.mlp.output")
    assert (origin.kind, origin.point, origin.index) == ("weight value", "layers.0.mlp.inner.gate", 5)


def test_an_infinite_bias_and_the_last_matrices(tmp_path: Path) -> None:
    bias = Sick(tmp_path / "a", "qwen2_moe", put(LAYER + "self_attn.k_proj.bias", 14, np.inf)).origin("layers.1.attn.k")
    assert bias.weight is not None and bias.weight.name == "layers.1.attn.k.bias"
    assert bias.point == "layers.1.attn.k.product"
    norm = Sick(tmp_path / "b", "mixtral", put("model.norm.weight", 2, np.nan)).origin("norm")
    assert norm.layer is None and norm.index == 2
    head = Sick(tmp_path / "c", "mixtral", put("lm_head.weight", (8, 4), np.nan)).origin("logits")
    assert (head.path, head.index) == ("logits", 8)


def test_an_infinite_weight_times_zero_says_so(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors[LAYER + "post_attention_layernorm.weight"][4] = 0
        tensors[LAYER + "block_sparse_moe.gate.weight"][2, 4] = np.inf

    origin = Sick(tmp_path, "mixtral", change).origin("layers.1.moe.router_logits")
    assert origin.kind == "weight value" and origin.cause.endswith("; +Inf × 0 = NaN")
    assert [operand.value for operand in origin.operands] == [np.inf, 0]


# ---- overflow --------------------------------------------------------------------------------------------------------


def test_the_product_of_gate_and_up_is_told_with_its_numbers(tmp_path: Path) -> None:
    gate, up, _ = expert_names(small_config("mixtral"))
    base = "block_sparse_moe__experts__3__"
    sick = Sick(tmp_path, "mixtral", times(**{base + gate: 1e20, base + up: 1e20}))
    origin = sick.origins("layers.1.moe.experts.3.hidden")[0]
    kept = sick.trace.expert_rows(1, 3)
    row, place = int(np.flatnonzero(kept["tokens"] == origin.token)[0]), origin.index
    a, b = kept["gate"][row, place], kept["up"][row, place]
    act = float(a) / (1 + np.exp(-float(a)))  # a or 0 at this size
    assert origin.exact == pytest.approx(act * float(b), rel=1e-6)
    assert [o.name for o in origin.operands] == ["act(gate)", "up", "gate", "largest float32"]
    assert (origin.operands[1].value, origin.operands[2].value) == (b, a)
    assert origin.operation == "hidden = act(gate) · up" and origin.kind == "overflow"
    assert origin.cause.endswith("and float32 ends at 3.4028235e38")


def test_scores_that_overflow_are_found_between_the_taps(tmp_path: Path) -> None:
    sick = Sick(tmp_path, "mixtral", times(self_attn__q_proj=1e20, self_attn__k_proj=1e20))
    found = sick.origins("layers.1.attn.out")
    assert {o.point for o in found} == {"layers.1.attn.scores"}
    assert {o.path for o in found} == {"layers.1.attn.weights"}
    kinds = {o.kind: o for o in found}
    assert set(kinds) <= {"overflow", "inf − inf"} and "inf − inf" in kinds
    split = kinds["inf − inf"]
    head, key = split.index
    q = sick.trace["layers.1.attn.q"][split.token, head].astype(np.float64)
    k = sick.trace["layers.1.attn.k"][key, head // 2].astype(np.float64)
    assert split.exact == pytest.approx(float(q @ k) / np.sqrt(10), rel=1e-6)
    lanes = q * k  # ten channels: a product for each lane
    one, other = (int(o.name.split()[-1]) for o in split.operands)
    assert lanes[one] * lanes[other] < 0 and np.isinf(split.operands[0].value)


def test_the_stream_between_attention_and_experts_is_a_point(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors["model.embed_tokens.weight"][IDS[2]] = 3.38e38
        tensors["model.layers.0.self_attn.o_proj.weight"] *= np.float32(0.2e38)

    sick = Sick(tmp_path, "mixtral", change)
    origin = sick.origin("layers.0.moe.input")
    assert (origin.point, origin.path, origin.tokens) == ("layers.0.middle", "layers.0.moe.input", (2,))
    a, b = sick.trace["embed"][2, origin.index], sick.trace["layers.0.attn.out"][2, origin.index]
    assert [o.value for o in origin.operands[:2]] == [a, b] and origin.exact == float(a) + float(b)


def test_a_zero_row_without_epsilon_has_no_variance(tmp_path: Path) -> None:
    change = put("model.embed_tokens.weight", IDS[2], 0)
    origin = Sick(tmp_path, "mixtral", change, rms_norm_eps=1e-50).origin("layers.0.attn.norm")
    assert (origin.kind, origin.token, origin.tokens) == ("variance", 2, (2,))
    assert origin.cause == "variance: mean square 0 + eps 0 = 0: its root is 0 and 0 / 0 is NaN"


@pytest.mark.parametrize(("family", "index"), [("qwen3_moe", (0, 0)), ("olmoe", (0, 0))])
def test_a_key_of_zeros_without_epsilon_has_no_variance(tmp_path: Path, family: str, index: tuple[int, int]) -> None:
    """The norms of q and k, by head and over the row."""
    change = put(LAYER + "self_attn.k_proj.weight", ..., 0)
    origin = Sick(tmp_path, family, change, rms_norm_eps=1e-50).origin("layers.1.attn.k")
    assert (origin.kind, origin.point, origin.index) == ("variance", "layers.1.attn.k", index)


@pytest.mark.parametrize(("angle", "grown", "words"), [
    (np.inf, 1.0, "the rotary angle of pair 1 is +Inf"),
    (1.5, np.inf, "cosine and sine of pair 1 are multiplied by +Inf"),
])  # fmt: skip
def test_a_rotation_by_constants_that_are_not_finite_is_a_bad_scale(angle: float, grown: float, words: str) -> None:
    """The engine refuses such a configuration; another program's recording may come from one."""
    made, angles = np.ones((1, 8), np.float32), np.asarray([[0.5, angle]], np.float32)
    heads = Heads("layers.0.attn.q", "float32", made, 4, None, None, angles, grown)
    reason = heads.why((0, 1, 3), np.nan)
    assert reason is not None and (reason.kind, reason.words) == ("scale", words)


def test_a_point_counts_under_the_first_tap_behind_it() -> None:
    taps = [tap_of(f"layers.2.{point}", [2]) for point in ("middle", "attn.scores", "attn.context", "moe.gates")]
    assert taps == ["layers.2.moe.input", "layers.2.attn.weights", "layers.2.attn.out", "layers.2.moe.gates"]
    assert tap_of("layers.1.middle", [2]) == "layers.1.mlp.input" and tap_of("norm", []) == "norm"
    assert moe_prefix(small_config("mixtral"), 1) == LAYER + "block_sparse_moe."


# ---- what the record alone tells -------------------------------------------------------------------------------------


def test_an_edit_is_named_with_its_line(tmp_path: Path) -> None:
    """Only the tokens of the edit; the same value without an edit is not what the arithmetic gives."""
    model = lab.open(REFERENCE / "mixtral")
    session = model.session(capture="all")
    stepper = session.stepper(IDS, chunk=None)
    stepper.patch("layers.1.moe.output", np.inf, tokens=[3, 5])
    stepper.finish()
    source = Source(session.trace(), model)
    (origin,) = explain(birth(source, "layers.1.moe.routed"), source)  # there is no shared expert: it is the same array
    assert (origin.kind, origin.tokens, origin.path) == ("edit", (3, 5), "layers.1.moe.routed")
    assert "patch(" in origin.cause and "layers.1.moe.output" in origin.cause and "(made " in origin.cause
    unsaid = Source(altered(session.trace(), {}, edits=[]), model)
    (unknown,) = explain(birth(unsaid, "layers.1.moe.routed"), unsaid)
    assert unknown.kind == "unknown" and "did not do what its definition says" in unknown.cause


def test_routing_edits_say_which_tap_they_change() -> None:
    model = lab.open(REFERENCE / "mixtral")
    session = model.session(capture="all")
    stepper = session.stepper(IDS, chunk=None)
    stepper.bias_router(1, {2: float("inf")}, tokens=[4])
    stepper.finish()
    source = Source(session.trace(), model)
    assert session.trace().edits[0]["path"] == "layers.1.moe.router_logits"
    (origin,) = explain(birth(source, "layers.1.moe.router_logits"), source)
    assert (origin.kind, origin.tokens, origin.index) == ("edit", (4,), 2)


def test_memory_that_nobody_wrote_is_known_by_its_bits() -> None:
    model, trace = healthy()
    rows = planted(trace, "layers.1.moe.output", (4, slice(None)), np.nan, 0x7FA5A5A5)
    source = Source(altered(trace, rows), model)
    (origin,) = explain(birth(source, "layers.1.moe.output"), source)
    assert (origin.kind, origin.token, origin.index) == ("uninitialised", 4, 0)
    assert "0x7FA5A5A5" in origin.cause and origin.n_values == trace["layers.1.moe.output"].shape[1]
    other = Source(altered(trace, planted(trace, "layers.1.moe.output", (4, 3), np.nan)), model)
    (origin,) = explain(birth(other, "layers.1.moe.output"), other)
    assert (origin.kind, origin.index) == ("unknown", 3)


def watch_of(point: str, **numbers: int) -> Any:
    row = {"n_nan": 0, "n_signalling": 0, "n_inf": 0, "n_negative_inf": 0, "token": -1, "index": -1} | numbers
    table = np.zeros(1, [("point", "U96"), *((name, "i8") for name in row)])
    table[0] = (point, *row.values())
    return SimpleNamespace(table=table)


WATCHED = [  # point, counts, index as the table has it, kind, index of the origin
    ("attn.scores", {"n_inf": 5, "n_negative_inf": 5}, 2 * 5, "masked row", (2, 0)),
    ("attn.scores", {"n_nan": 5}, 1 * 5 + 3, "scale", (1, 3)),
    ("attn.scores", {"n_inf": 5, "n_negative_inf": 2}, 0, "scale", (0, 0)),
    ("attn.scores", {"n_nan": 5, "n_signalling": 5}, 1 * 5 + 3, "uninitialised", (1, 3)),
    ("attn.context", {"n_nan": 8, "n_signalling": 8}, 8 + 1, "uninitialised", (1, 1)),
]  # fmt: skip


@pytest.mark.parametrize(("point", "counts", "index", "kind", "place"), WATCHED)
def test_the_watch_table_tells_what_broke_between_the_taps(
    point: str, counts: dict[str, int], index: int, kind: str, place: tuple[int, int]
) -> None:
    """q, k and v are finite, and so is what they give: it was not the numbers."""
    model, trace = healthy()
    heads, width = trace["layers.1.attn.q"].shape[1:]
    index = index if point == "attn.scores" else width + 1
    assert heads > 2
    rows = planted(trace, "layers.1.attn.out", (4, slice(None)), np.nan)
    source = Source(altered(trace, rows), model, watch_of(f"layers.1.{point}", **counts, token=4, index=index))
    (origin,) = explain(birth(source, "layers.1.attn.out"), source)
    assert (origin.kind, origin.point, origin.token, origin.index) == (kind, f"layers.1.{point}", 4, place)
    assert origin.n_values == counts.get("n_nan", 0) + counts.get("n_inf", 0)
    blind = Source(altered(trace, rows), model)
    assert [o.kind for o in explain(birth(blind, "layers.1.attn.out"), blind)] == ["unknown"]


def test_what_a_softmax_swallowed_is_told_when_the_run_was_watched() -> None:
    """One score of −Inf leaves a weight of 0: the tap is finite, and q · k is too."""
    model, trace = healthy()
    watch = watch_of("layers.1.attn.scores", n_inf=1, n_negative_inf=1, token=4, index=1 * 5 + 3)
    source = Source(trace, model, watch)
    clean = Birth("layers.1.attn.out", 1, "attention", None, np.array([4]), np.zeros((1, 32), bool))
    (origin,) = explain(clean, source)
    assert (origin.kind, origin.point, origin.index) == ("scale", "layers.1.attn.scores", (1, 3))
    assert explain(clean, Source(trace, model)) == []


# ---- narrower formats, and traces without a model --------------------------------------------------------------------


def test_float16_ends_where_float16_ends() -> None:
    """A recording in float16, without weights: act(gate) · up is told, with the limit of the format."""
    _, trace = healthy()
    half = {path: trace[path].astype(np.float16) for path in trace if trace[path].dtype == np.float32}
    gate, up, hidden = (np.array(half[f"layers.1.moe.dispatch.{tap}"]) for tap in ("gate", "up", "hidden"))
    gate[3, 5], up[3, 5], hidden[3, 5] = 412.25, 181.625, np.inf
    taps = {f"layers.1.moe.dispatch.{tap}": rows for tap, rows in (("gate", gate), ("up", up), ("hidden", hidden))}
    made = Trace(half | taps | {p: trace[p] for p in trace if p not in half}, ids=trace.ids, texts=[],
                 meta={**trace.meta, "arithmetic": "float16"})  # fmt: skip
    source = Source(made)
    expert = int(source.dispatch(1)[1][3])
    (origin,) = explain(birth(source, f"layers.1.moe.experts.{expert}.hidden"), source)
    assert (origin.kind, origin.dtype, origin.index) == ("overflow", "float16", 5)
    act = np.float32(gate[3, 5]) / np.float32(1)  # 1 + e^−412 is 1
    assert origin.exact == float(act) * float(up[3, 5])
    assert origin.cause == f"overflow: {act} × {float(up[3, 5])} = {number(origin.exact)}, and float16 ends at 65,504"
    assert [o.dtype for o in origin.operands[:3]] == ["float16"] * 3
    assert origin.operands[1].pattern == int(up[3, 5:6].view(np.uint16)[0])
    assert origin.operands[-1].pattern == 0x7BFF and origin.operands[-1].name == "largest float16"


def test_without_weights_a_product_is_unknown_and_says_what_it_needs() -> None:
    _, trace = healthy()
    source = Source(altered(trace, planted(trace, "layers.1.moe.router_logits", (4, 1), np.inf)))
    (origin,) = explain(birth(source, "layers.1.moe.router_logits"), source)
    assert (origin.kind, origin.token, origin.index) == ("unknown", 4, 1)
    assert origin.needs == ("the weights: find(trace, model=path)",)


def test_taps_that_were_not_recorded_are_computed_or_asked_for(tmp_path: Path) -> None:
    """Without gate and up of the experts the weights give them; without attn.out nothing does."""
    gate, up, _ = expert_names(small_config("mixtral"))
    base = "block_sparse_moe__experts__3__"
    sick = Sick(tmp_path, "mixtral", times(**{base + gate: 1e20, base + up: 1e20}))
    wanted = sick.origins("layers.1.moe.experts.3.hidden")[0]
    thin = Source(altered(sick.trace, {}, without=("dispatch.gate", "dispatch.up", "dispatch.hidden")), sick.model)
    found = explain(birth(thin, "layers.1.moe.experts.3.output"), thin)[0]
    assert (found.point, found.path, found.cause) == (wanted.point, wanted.path, wanted.cause)
    model, trace = healthy()
    rows = planted(trace, "layers.1.moe.input", (4, 1), np.nan)
    lacking = Source(altered(trace, rows, without=("layers.0.output",)), model)
    (origin,) = explain(birth(lacking, "layers.1.moe.input"), lacking)
    assert origin.kind == "unknown" and origin.needs == ("layers.0.output",)


def test_two_diseases_in_one_operation_are_two_origins(tmp_path: Path) -> None:
    """A bad element of one output's weights, and an overflow in another's, for the same tokens."""

    def change(tensors: Tensors) -> None:
        weight = tensors[LAYER + "self_attn.o_proj.weight"]
        weight[3, 7] = np.nan
        weight[9] = np.float32(3e38) * np.sign(weight[9])

    found = Sick(tmp_path, "mixtral", change).origins("layers.1.attn.out")
    kinds = {origin.kind for origin in found}
    assert "weight value" in kinds and kinds & {"overflow", "inf − inf"}
    assert {origin.index for origin in found} == {3, 9}


def test_scores_rounded_away_leave_gates_of_zero_over_zero() -> None:
    """The softmax over many experts, kept in a format that ends above it."""
    _, trace = healthy("qwen3_moe")
    scores = np.zeros_like(trace["layers.0.moe.scores"])
    gates = np.full_like(trace["layers.0.moe.gates"], np.nan)
    arrays = {"layers.0.moe.scores": scores, "layers.0.moe.gates": gates}
    source = Source(altered(trace, arrays, gate_rule="softmax_renormalised"))
    (origin,) = explain(birth(source, "layers.0.moe.gates"), source)
    assert origin.kind == "0/0" and origin.cause.startswith("0/0: the scores of the chosen experts add up to 0")


@pytest.mark.parametrize(("format", "factor"), [("float16", 5e4), ("float8_e4m3fn", 1e3)])
def test_an_emulated_run_breaks_where_its_format_ends(tmp_path: Path, format: str, factor: float) -> None:
    """The up product is too large for the format and not for float32; in float8_e4m3fn it becomes NaN."""
    names = expert_names(small_config("mixtral"))
    sick = Sick(tmp_path, "mixtral", times(**{f"block_sparse_moe__experts__3__{names[1]}": factor}))
    session = sick.model.session(capture="all", emulate=lab.Emulation({"layers.1.moe.experts.*.up": format}))
    session.feed(IDS)
    source = Source(session.trace(), sick.model)
    path = "layers.1.moe.experts.3.up"
    (origin,) = explain(birth(source, path), source)
    assert (origin.kind, origin.dtype, origin.point) == ("overflow", format, path)
    assert np.isnan(origin.value) == (format == "float8_e4m3fn")
    kept = session.trace().expert_rows(1, 3)
    x = kept["input"][int(np.flatnonzero(kept["tokens"] == origin.token)[0])].astype(np.float64)
    exact = float(x @ sick.tensors[f"{LAYER}block_sparse_moe.experts.3.{names[1]}.weight"][origin.index])
    assert origin.operands[0].value == pytest.approx(exact, rel=1e-5)
    assert origin.cause.startswith("overflow: up = ") and f"and {format} ends at " in origin.cause


def test_bfloat16_ends_a_little_below_float32() -> None:
    a, b = (np.full((1, 1), value, np.float32) for value in (3.39e38, 0.01e38))
    operation = Add("layers.0.middle", "middle = stream + attn.out", "bfloat16", a, b, ("stream", "attn.out"))
    assert np.isfinite(operation.unrounded).all() and np.isinf(operation.value).all()
    reason = operation.why((0, 0), np.inf)
    assert reason is not None and reason.kind == "overflow"
    assert reason.words == "3.39e38 + 1e36 = 3.4e38, and bfloat16 ends at 3.3895314e38"
    assert reason.operands[-1].pattern == 0x7F7F


def test_sums_in_float16_break_at_a_partial_sum(tmp_path: Path) -> None:
    """The whole sum would have fitted: large products cancel."""

    def change(tensors: Tensors) -> None:
        row = np.zeros(44, np.float32)
        row[[0, 16]] = 60000, 60000
        row[[1, 17]] = -60000, -60000
        tensors[LAYER + "block_sparse_moe.gate.weight"][2] = row
        tensors[LAYER + "post_attention_layernorm.weight"][:] = 1
        tensors["model.embed_tokens.weight"][:] = 1
        for name in ("self_attn.o_proj", "block_sparse_moe.experts"):
            for key in [key for key in tensors if name in key and ("w2" in key or "o_proj" in key)]:
                tensors[key][:] = 0

    sick = Sick(tmp_path, "mixtral", change)
    session = sick.model.session(capture="all", emulate=lab.Emulation(accumulation="float16"))
    session.feed(IDS)
    source = Source(session.trace(), sick.model)
    (origin,) = explain(birth(source, "layers.1.moe.router_logits"), source)
    assert origin.kind == "inf − inf" and np.isnan(origin.value) and origin.index == 2
    assert origin.cause == (
        "inf − inf: partial sums 0 and 1 overflowed with opposite signs; the whole sum, 0, would have fitted"
    )
    assert [operand.value for operand in origin.operands] == [np.inf, -np.inf] and origin.exact == 0


def test_weights_of_another_model_and_unknown_ids_are_asked_for() -> None:
    """A recording whose model is not the one that was given explains nothing by it, and does not fail."""
    _, trace = healthy()
    other = lab.open(REFERENCE / "olmoe")
    rows = planted(trace, "layers.1.attn.norm", (4, 1), np.inf) | planted(trace, "embed", (2, 1), np.nan)
    wide = {p: np.repeat(r, 2, axis=-1) for p, r in (rows | {"layers.0.output": trace["layers.0.output"]}).items()}
    source = Source(altered(trace, wide), other)
    (origin,) = explain(birth(source, "layers.1.attn.norm"), source)
    assert origin.kind == "unknown" and origin.needs[0].startswith("the weights of this run: layers.1.attn_norm has ")
    nameless = Trace({"embed": rows["embed"]}, ids=[-1] * len(trace.ids), texts=[], meta=trace.meta)
    (origin,) = explain(birth(Source(nameless, other), "embed"), Source(nameless, other))
    assert origin.kind == "unknown" and origin.needs == ("the token ids",)


@pytest.mark.parametrize("seed", range(8))
def test_elements_are_joined_before_they_are_explained_as_they_would_be_after(seed: int) -> None:
    """`coarse` of flat numbers makes the groups that `cut` makes of all elements: one by one, by row, or the whole."""
    draw, width = np.random.default_rng(seed), 12
    rows = draw.choice(20, [1, 3, 8, 9, 20][seed % 5], replace=False)
    flat = draw.choice(rows, 90) * width + draw.integers(0, [3, 12][seed % 2], 90)
    flat[draw.random(90) < 0.1] = -1
    joined = coarse(flat, width)
    merged = cut([("w", divmod(int(each), width)) for each in np.unique(flat) if each >= 0])
    first: dict[Any, int] = {}
    for each, told in zip(flat.tolist(), joined.tolist(), strict=True):
        assert told == (first.setdefault(merged["w", divmod(each, width)], each) if each >= 0 else -1)
