"""Faults of conversion: tensors of a checkpoint renamed, turned, mixed up, rescaled or rounded, run by our engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
from checkpoints import expert_count, expert_names, head_dim, moe_prefix

from colibri_lab.trace import Trace
from tests.planted.case import Case
from tests.planted.unseen_models import ALL, MOE, Config, Tensors, base, family_of, run, write

Change = Callable[[Config, Tensors], None]
GATED = ("gate_proj", "up_proj", "down_proj")


def case(
    kind: str, model: str, layer: int | None, expected: str, what: str, change: Change, capture: Sequence[str] = ALL
) -> Case:
    """`change` alters the suspect's tensors in place."""

    def make(folder: Path) -> tuple[Trace, Trace, Path | None]:
        config, tensors, ids = base(model)
        reference = write(folder / "reference", config, tensors)
        altered = dict(tensors)
        change(config, altered)
        return run(reference, ids, capture), run(write(folder / "suspect", config, altered), ids, capture), reference

    place = "all" if layer is None else f"L{layer}"
    return Case(f"unseen-{model}-{place}-{kind}-checkpoint-{what}", kind, family_of(model), layer, expected, make)


# ---- where the tensors are ----


def attn(layer: int, part: str) -> str:
    return f"model.layers.{layer}.self_attn.{part}_proj.weight"


def routers(config: Config, layers: Sequence[int] | None = None) -> list[int]:
    """The layers named, or every one that routes."""
    dense = config.get("mlp_only_layers") or []
    step = config.get("decoder_sparse_step", 1)
    every = [layer for layer in range(config["num_hidden_layers"]) if layer not in dense and (layer + 1) % step == 0]
    return list(layers) if layers is not None else every


def triples(
    config: Config, layers: Sequence[int] | None = None, experts: Sequence[int] | None = None
) -> list[tuple[str, str, str]]:
    """Names of (gate, up, down) of the experts of some layers (all of both when not said)."""
    gate, up, down = expert_names(config)
    prefixes = [
        f"{moe_prefix(config, layer)}experts.{expert}."
        for layer in routers(config, layers)
        for expert in (range(expert_count(config)) if experts is None else experts)
    ]
    return [(f"{p}{gate}.weight", f"{p}{up}.weight", f"{p}{down}.weight") for p in prefixes]


def one_mlp(prefix: str) -> list[tuple[str, str, str]]:
    return [(f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight", f"{prefix}down_proj.weight")]


Place = Callable[[Config], list[tuple[str, str, str]]]


def shared(layer: int) -> Place:
    return lambda config: one_mlp(f"model.layers.{layer}.mlp.shared_expert.")


def dense(layer: int) -> Place:
    return lambda config: one_mlp(f"model.layers.{layer}.mlp.")


def experts(*layers: int, only: Sequence[int] | None = None) -> Place:
    return lambda config: triples(config, layers or None, only)


# ---- what goes wrong ----


def swapped(place: Place) -> Change:
    def change(config: Config, tensors: Tensors) -> None:
        for gate, up, _ in place(config):
            tensors[gate], tensors[up] = tensors[up], tensors[gate]

    return change


def split_again(place: Place, split: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]) -> Change:
    """gate and up as they come out when the fused rows are taken apart in a wrong way."""

    def change(config: Config, tensors: Tensors) -> None:
        for gate, up, _ in place(config):
            one, two = split(tensors[gate], tensors[up])
            tensors[gate], tensors[up] = np.ascontiguousarray(one), np.ascontiguousarray(two)

    return change


def halves_read_as_interleaved(gate: np.ndarray, up: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    fused = np.concatenate([gate, up])
    return fused[0::2], fused[1::2]


def interleaved_read_as_halves(gate: np.ndarray, up: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    fused = np.stack([gate, up], axis=1).reshape(-1, gate.shape[1])
    return fused[: len(gate)], fused[len(gate) :]


def shards_read_as_halves(gate: np.ndarray, up: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Two tensor-parallel ranks wrote [gate half, up half] each."""
    half = len(gate) // 2
    fused = np.concatenate([gate[:half], up[:half], gate[half:], up[half:]])
    return fused[: len(gate)], fused[len(gate) :]


def up_taken_four_rows_early(gate: np.ndarray, up: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    fused = np.concatenate([gate, up])
    return gate, fused[len(gate) - 4 : -4]


def gate_taken_after_a_header_row(gate: np.ndarray, up: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    fused = np.concatenate([gate, up])
    return fused[1 : len(gate) + 1], np.roll(fused, -1, axis=0)[len(gate) :]


def permuted_for_pairs(rows: np.ndarray, width: int) -> np.ndarray:
    """Rows of each head moved from half-style to interleaved order, as conversions between the two styles do."""
    heads = rows.reshape(-1, 2, width // 2, *rows.shape[1:])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(rows.shape)


def permuted_heads(layers: Sequence[int] | None, parts: str = "qk", norms: bool = True) -> Change:
    def change(config: Config, tensors: Tensors) -> None:
        width = head_dim(config)
        for layer in range(config["num_hidden_layers"]) if layers is None else layers:
            for part in parts:
                stem = f"model.layers.{layer}.self_attn.{part}"
                names = [f"{stem}_proj.weight", f"{stem}_proj.bias"] + [f"{stem}_norm.weight"] * norms
                for name in filter(tensors.__contains__, names):
                    tensors[name] = permuted_for_pairs(tensors[name], width)

    return change


def put_back_heads(layers: Sequence[int] | None) -> Change:
    """The inverse of `permuted_heads`, as a conversion does to rows that were in half-style order all along."""

    def change(config: Config, tensors: Tensors) -> None:
        width = head_dim(config)
        for layer in range(config["num_hidden_layers"]) if layers is None else layers:
            for stem in (f"model.layers.{layer}.self_attn.{part}" for part in "qk"):
                for name in filter(tensors.__contains__, (f"{stem}_proj.weight", f"{stem}_norm.weight")):
                    rows = tensors[name]
                    pairs = rows.reshape(-1, width // 2, 2, *rows.shape[1:])
                    tensors[name] = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)

    return change


def as_text(count: int) -> list[int]:
    return [int(name) for name in sorted(map(str, range(count)))]


def reversed_order(count: int) -> list[int]:
    return list(range(count))[::-1]


def counted_from_one(count: int) -> list[int]:
    return [(expert - 1) % count for expert in range(count)]


def round_robin(count: int, ranks: int = 4) -> list[int]:
    """Experts gathered rank by rank from four ranks that took them in turns."""
    return [expert for rank in range(ranks) for expert in range(rank, count, ranks)]


def neighbours(count: int) -> list[int]:
    return [0, 1, 3, 2, *range(4, count)]


def reordered(
    order: Callable[[int], list[int]],
    layers: Sequence[int] | None = None,
    parts: Sequence[int] = (0, 1, 2),
    router: bool = False,
) -> Change:
    """Expert e gets the tensors (0 gate, 1 up, 2 down) of expert order[e]; router: its rows likewise."""

    def change(config: Config, tensors: Tensors) -> None:
        old, count = dict(tensors), expert_count(config)
        for layer in routers(config, layers):
            names = triples(config, [layer])
            for expert, source in enumerate(order(count)):
                for part in parts:
                    tensors[names[expert][part]] = old[names[source][part]]
            if router:
                name = f"{moe_prefix(config, layer)}gate.weight"
                tensors[name] = np.ascontiguousarray(old[name][order(count)])

    return change


def every(*names: str, by: Callable[[np.ndarray], np.ndarray]) -> Change:
    """`by` on every tensor whose name holds one of the names."""

    def change(config: Config, tensors: Tensors) -> None:
        hits = [name for name in tensors if any(part in name for part in names)]
        assert hits, names
        for name in hits:
            tensors[name] = np.ascontiguousarray(by(tensors[name]))

    return change


def turned(x: np.ndarray) -> np.ndarray:
    return x.T


def read_in_other_order(x: np.ndarray) -> np.ndarray:
    """A file of [in, out] rows read as [out, in]: the transpose's memory under the right shape."""
    return np.ascontiguousarray(x.T).reshape(x.shape)


def bf16(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def stored_bf16(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16)


def f16(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).astype(np.float32)


def times(factor: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: x * np.float32(factor)


def cases() -> list[Case]:
    return [
        # gate and up exchanged
        case("swapped_gate_up", "mixtral", None, "layers.0.moe.experts.*.gate", "w1-w3", swapped(experts())),
        case("swapped_gate_up", "mixtral-square", 1, "layers.1.moe.experts.*.gate", "expert5",
             swapped(experts(1, only=[5]))),
        case("swapped_gate_up", "qwen2", 1, "layers.1.moe.shared.output", "shared", swapped(shared(1))),
        case("swapped_gate_up", "qwen2-sparse", 2, "layers.2.mlp.output", "dense", swapped(dense(2))),
        case("swapped_gate_up", "olmoe-clip", 3, "layers.3.moe.experts.*.output", "moe-capture",
             swapped(experts(3)), MOE),
        case("swapped_gate_up", "qwen3", 0, "layers.0.moe.experts.*.gate", "second-shard",
             swapped(experts(0, only=range(6, 12)))),
        case("swapped_gate_up", "qwen2-sparse", None, "layers.1.moe.experts.*.gate", "all", swapped(experts())),
        case("swapped_gate_up", "olmoe", 0, "layers.0.moe.experts.*.gate", "expert4", swapped(experts(0, only=[4]))),
        # rows of q and k in the order of the other rope style
        case("rope_style", "mixtral", None, "layers.0.attn.q", "permuted", permuted_heads(None)),
        case("rope_style", "qwen3-dense", 1, "layers.1.attn.q", "permuted", permuted_heads([1])),
        case("rope_style", "qwen3", None, "layers.0.attn.q", "permuted-norms-left", permuted_heads(None, norms=False)),
        case("rope_style", "qwen2", None, "layers.0.attn.q", "permuted-with-bias", permuted_heads(None)),
        case("rope_style", "olmoe", 0, "layers.0.attn.k", "permuted-k", permuted_heads([0], "k")),
        case("rope_style", "mixtral-many", 1, "layers.1.attn.k", "permuted-moe-capture", permuted_heads([1]), MOE),
        case("rope_style", "qwen3-dense", None, "layers.0.attn.q", "put-back-needlessly", put_back_heads(None)),
        case("rope_style", "mixtral", 2, "layers.2.attn.q", "permuted-one-layer", permuted_heads([2])),
        case("rope_style", "olmoe", None, "layers.0.attn.q", "put-back-needlessly", put_back_heads(None)),
        case("rope_style", "qwen2-sparse", 3, "layers.3.attn.q", "permuted-q", permuted_heads([3], "q")),
        # experts under wrong numbers
        case("expert_order", "mixtral-many", None, "layers.0.moe.experts.*.gate", "text-order", reordered(as_text)),
        case("expert_order", "olmoe", None, "layers.0.moe.experts.*.output", "text-order-moe-capture",
             reordered(as_text), MOE),
        case("expert_order", "qwen3-dense", 2, "layers.2.moe.experts.*.gate", "reversed",
             reordered(reversed_order, [2])),
        case("expert_order", "qwen2", None, "layers.0.moe.experts.*.gate", "from-one", reordered(counted_from_one)),
        case("expert_order", "qwen3", 1, "layers.1.moe.experts.*.output", "down-only",
             reordered(as_text, [1], parts=[2])),
        case("expert_order", "qwen2-sparse", 3, "layers.3.moe.router_logits", "router-rows",
             reordered(as_text, [3], parts=[], router=True)),
        case("expert_order", "olmoe-clip", 2, "layers.2.moe.router_logits", "router-and-experts",
             reordered(reversed_order, [2], router=True)),
        case("expert_order", "mixtral", 1, "layers.1.moe.experts.*.gate", "two-exchanged", reordered(neighbours, [1])),
        case("expert_order", "qwen3-dense", None, "layers.1.moe.experts.*.gate", "round-robin",
             reordered(round_robin)),
        case("expert_order", "qwen3", None, "layers.0.moe.experts.*.gate", "halves-exchanged",
             reordered(lambda count: [*range(count // 2, count), *range(count // 2)])),
        case("expert_order", "mixtral-many", 1, "layers.1.moe.experts.*.gate", "gate-and-up-only",
             reordered(as_text, [1], parts=[0, 1])),
        case("expert_order", "qwen2", 2, "layers.2.moe.router_logits", "router-from-one-moe-capture",
             reordered(counted_from_one, [2], parts=[], router=True), MOE),
        # matrices turned
        case("transposed_weight", "mixtral-square", 1, "layers.1.attn.q", "q", every(attn(1, "q"), by=turned)),
        case("transposed_weight", "mixtral-square", None, "layers.0.attn.out", "o", every("o_proj", by=turned)),
        case("transposed_weight", "mixtral-square", 0, "layers.0.moe.experts.*.output", "w2",
             every(*(f"layers.0.block_sparse_moe.experts.{e}.w2" for e in range(8)), by=turned)),
        case("transposed_weight", "qwen3-dense", 2, "layers.2.moe.experts.*.up", "up",
             every(*(f"layers.2.mlp.experts.{e}.up_proj" for e in range(16)), by=turned)),
        case("transposed_weight", "qwen3-dense", None, "layers.1.moe.experts.*.gate", "all-three-moe-layers",
             every("mlp.experts.", by=turned)),
        case("transposed_weight", "olmoe", None, "logits", "lm_head", every("lm_head", by=turned)),
        case("transposed_weight", "olmoe", 0, "layers.0.attn.v", "v", every(attn(0, "v"), by=turned)),
        case("transposed_weight", "olmoe", 1, "layers.1.moe.input", "o-moe-capture",
             every(attn(1, "o"), by=turned), MOE),
        case("transposed_weight", "qwen2", 2, "layers.2.attn.k", "k", every(attn(2, "k"), by=turned)),
        case("transposed_weight", "mixtral-square", 1, "layers.1.moe.router_logits", "router-memory-order",
             every("layers.1.block_sparse_moe.gate.weight", by=read_in_other_order)),
        case("transposed_weight", "qwen2", None, "layers.0.attn.out", "o-of-all", every("o_proj", by=turned)),
        case("transposed_weight", "mixtral-square", 0, "layers.0.attn.k", "k", every(attn(0, "k"), by=turned)),
        case("transposed_weight", "olmoe", None, "embed", "embedding", every("embed_tokens", by=turned)),
        case("transposed_weight", "qwen3", 1, "layers.1.moe.experts.*.output", "down-memory-order",
             every(*(f"layers.1.mlp.experts.{e}.down_proj" for e in range(12)), by=read_in_other_order)),
        # fused rows taken apart wrongly
        case("interleaved_halves", "mixtral", None, "layers.0.moe.experts.*.gate", "interleaved-as-halves",
             split_again(experts(), interleaved_read_as_halves)),
        case("interleaved_halves", "qwen3", 1, "layers.1.moe.experts.*.gate", "halves-as-interleaved",
             split_again(experts(1), halves_read_as_interleaved)),
        case("interleaved_halves", "olmoe", None, "layers.0.moe.experts.*.gate", "shards",
             split_again(experts(), shards_read_as_halves)),
        case("interleaved_halves", "qwen2", 0, "layers.0.moe.shared.output", "shared",
             split_again(shared(0), halves_read_as_interleaved)),
        case("interleaved_halves", "qwen2-sparse", 0, "layers.0.mlp.output", "dense",
             split_again(dense(0), interleaved_read_as_halves)),
        case("interleaved_halves", "mixtral-many", 1, "layers.1.moe.experts.*.up", "split-early",
             split_again(experts(1), up_taken_four_rows_early)),
        case("interleaved_halves", "qwen3-dense", 2, "layers.2.moe.experts.*.output", "moe-capture",
             split_again(experts(2), interleaved_read_as_halves), MOE),
        case("interleaved_halves", "olmoe-clip", 1, "layers.1.moe.experts.*.gate", "one-row-late",
             split_again(experts(1), gate_taken_after_a_header_row)),
        case("interleaved_halves", "qwen2-sparse", 3, "layers.3.moe.shared.output", "shared-shards",
             split_again(shared(3), shards_read_as_halves)),
        case("interleaved_halves", "qwen3-dense", 0, "layers.0.mlp.output", "dense-halves-as-interleaved",
             split_again(dense(0), halves_read_as_interleaved)),
        # rounded
        case("bf16_rounding", "mixtral", None, "embed", "all-stored-bf16", every("", by=stored_bf16)),
        case("bf16_rounding", "qwen3", None, "embed", "all-f16", every("", by=f16)),
        case("bf16_rounding", "olmoe", None, "layers.0.moe.experts.*.gate", "experts", every(".experts.", by=bf16)),
        case("bf16_rounding", "qwen2", 2, "layers.2.moe.router_logits", "router",
             every("layers.2.mlp.gate.weight", by=bf16)),
        case("bf16_rounding", "olmoe-clip", None, "logits", "lm_head", every("lm_head", by=bf16)),
        case("bf16_rounding", "qwen2-sparse", None, "layers.0.attn.q", "attention", every("self_attn.", by=bf16)),
        case("bf16_rounding", "qwen3-dense", None, "layers.0.attn.norm", "norms", every("norm.weight", by=bf16)),
        case("bf16_rounding", "mixtral-many", None, "layers.0.attn.k", "all-moe-capture", every("", by=bf16), MOE),
        case("bf16_rounding", "olmoe-clip", 1, "layers.1.moe.experts.*.gate", "experts-f16",
             every("layers.1.mlp.experts.", by=f16)),
        case("bf16_rounding", "qwen2", None, "embed", "embedding", every("embed_tokens", by=bf16)),
        case("bf16_rounding", "qwen3-dense", 2, "layers.2.attn.v", "v", every(attn(2, "v"), by=bf16)),
        # off by a factor
        case("scale_factor", "mixtral", 1, "layers.1.moe.experts.*.output", "down-doubled",
             every(*(f"layers.1.block_sparse_moe.experts.{e}.w2" for e in range(8)), by=times(2))),
        case("scale_factor", "qwen3", None, "layers.0.attn.q", "q-norm-holds-the-scale",
             every("q_norm", by=times(16**-0.5))),
        case("scale_factor", "qwen2", 2, "layers.2.moe.shared.gate", "shared-gate",
             every("layers.2.mlp.shared_expert_gate", by=times(0.5))),
        case("scale_factor", "olmoe", None, "embed", "embedding-times-sqrt-hidden", every("embed_tokens", by=times(8))),
        case("scale_factor", "mixtral-square", 0, "layers.0.moe.router_logits", "router-temperature",
             every("layers.0.block_sparse_moe.gate", by=times(0.7))),
        case("scale_factor", "qwen2", 1, "layers.1.attn.v", "v-and-bias",
             every("layers.1.self_attn.v_proj", by=times(0.5))),
        case("scale_factor", "olmoe-clip", None, "logits", "lm_head", every("lm_head", by=times(32**-0.5))),
        case("scale_factor", "qwen2-sparse", None, "norm", "final-norm", every("model.norm", by=times(2))),
        case("scale_factor", "mixtral-many", 1, "layers.1.attn.out", "o", every(attn(1, "o"), by=times(0.25))),
        case("scale_factor", "qwen3-dense", 1, "layers.1.moe.experts.*.up", "one-expert-without-its-block-scale",
             every("layers.1.mlp.experts.3.up_proj", by=times(1 / 448))),
        case("scale_factor", "qwen2", None, "layers.0.attn.q", "q-and-bias-hold-the-scale",
             every("self_attn.q_proj", by=times(10**-0.5))),
        case("scale_factor", "mixtral", 0, "layers.0.moe.experts.*.gate", "w1-block-scale",
             every(*(f"layers.0.block_sparse_moe.experts.{e}.w1" for e in range(8)), by=times(1.5))),
        case("scale_factor", "qwen3", 2, "layers.2.moe.router_logits", "router-over-sqrt-hidden-moe-capture",
             every("layers.2.mlp.gate", by=times(48**-0.5)), MOE),
    ]  # fmt: skip
