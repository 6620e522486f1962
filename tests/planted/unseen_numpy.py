"""Faults of a port: one step of the forward pass in NumPy done as somebody in a hurry would write it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
from checkpoints import expert_count, head_dim

from colibri_lab.trace import Trace
from tests.planted.case import Case
from tests.planted.unseen_forward import F32, Forward, faulty, sigmoid, taken
from tests.planted.unseen_models import ALL, MOE, WITH_WEIGHTS, base, family_of, run, write

PLAIN = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")


def case(
    kind: str,
    model: str,
    layer: int | None,
    expected: str,
    what: str,
    wrong: type[Forward],
    capture: Sequence[str] = ALL,
    *,
    chunks: Sequence[int] = (),
    reference: str = "engine",
    **options: object,
) -> Case:
    """`wrong` is the suspect; the reference is our engine where it knows the family, else (or if asked) `Forward`."""

    def make(folder: Path) -> tuple[Trace, Trace, Path | None]:
        config, tensors, ids = base(model, **options)
        known = config["model_type"] in PLAIN
        checkpoint = write(folder / "reference", config, tensors) if known else None
        if checkpoint and reference == "engine":
            a = run(checkpoint, ids, capture, chunks)
        else:
            a = Forward(config, tensors).run(ids, capture, chunks)
        return a, wrong(config, tensors).run(ids, capture, chunks), checkpoint

    place = "all" if layer is None else f"L{layer}"
    return Case(f"unseen-{model}-{place}-{kind}-numpy-{what}", kind, family_of(model), layer, expected, make)


def hit(place: int | str, at: int | None) -> bool:
    """Whether a layer number or a tap path lies in layer `at`; None is every layer."""
    if isinstance(place, str):
        place = int(place.split(".")[1]) if place.startswith("layers.") else -1
    return at is None or place == at


# ---- norms ----


def epsilon(new: float, sites: str) -> type[Forward]:
    """Another epsilon in the norms whose path matches."""
    return faulty(epsilon=lambda self, site: new if re.fullmatch(sites, site) else Forward.epsilon(self, site))


def epsilon_outside_root(self: Forward, x: np.ndarray, name: str, site: str) -> np.ndarray:
    root = np.sqrt(np.square(x).mean(-1, keepdims=True))
    return x / (root + F32(self.epsilon(site))) * self.tensors[name + ".weight"]


def epsilon_inside_sum(self: Forward, x: np.ndarray, name: str, site: str) -> np.ndarray:
    square = (np.square(x).sum(-1, keepdims=True) + F32(self.epsilon(site))) / F32(x.shape[-1])
    return x / np.sqrt(square) * self.tensors[name + ".weight"]


def no_norm(sites: str) -> type[Forward]:
    def norm(self: Forward, x: np.ndarray, name: str, site: str) -> np.ndarray:
        return x if re.fullmatch(sites, site) else Forward.norm(self, x, name, site)

    return faulty(norm=norm)


# ---- gates ----


def renormalises(answer: bool, at: int | None = None) -> type[Forward]:
    return faulty(renormalises=lambda self, layer: answer if hit(layer, at) else Forward.renormalises(self, layer))


def raw_gates(at: int | None = None, summed: bool = False) -> type[Forward]:
    """Gates are the chosen logits; summed: divided by their sum, as after a forgotten softmax."""

    def gates(self, logits, probabilities, scores, ids, layer):
        if not hit(layer, at):
            return Forward.gates(self, logits, probabilities, scores, ids, layer)
        return Forward.gates(self, logits, logits, scores, ids, layer) if summed else taken(logits, ids)

    return faulty(gates=gates)


def biased_gates(at: int | None = None) -> type[Forward]:
    """Gates are gathered from the corrected scores that were made for choosing."""

    def gates(self, logits, probabilities, scores, ids, layer):
        return Forward.gates(self, logits, scores if hit(layer, at) else probabilities, scores, ids, layer)

    return faulty(gates=gates)


def gate_factor(change: Callable[[Forward, float], float], at: int | None = None) -> type[Forward]:
    def gate_scale(self: Forward, layer: int) -> float:
        right = Forward.gate_scale(self, layer)
        return change(self, right) if hit(layer, at) else right

    return faulty(gate_scale=gate_scale)


# ---- experts ----


def activation_on_up(sites: str) -> type[Forward]:
    def combine(self: Forward, gate: np.ndarray, up: np.ndarray, site: str) -> np.ndarray:
        one, two = (up, gate) if re.fullmatch(sites, site) else (gate, up)
        return Forward.combine(self, one, two, site)

    return faulty(combine=combine)


def projected(sites: str, split: Callable[[np.ndarray], Sequence[np.ndarray]]) -> type[Forward]:
    """One product with the fused rows [gate; up], then taken apart by `split`, in the MLPs whose path matches."""

    def projections(self, x, prefix, names, site):
        parts = Forward.projections(self, x, prefix, names, site)
        return list(split(np.concatenate(parts, -1))) if re.fullmatch(sites, site) else parts

    return faulty(projections=projections)


def up_first(fused: np.ndarray) -> Sequence[np.ndarray]:
    return np.split(fused, 2, -1)[::-1]


def every_other(fused: np.ndarray) -> Sequence[np.ndarray]:
    return fused[:, 0::2], fused[:, 1::2]


def halves_of_interleaved(fused: np.ndarray) -> Sequence[np.ndarray]:
    half = fused.shape[1] // 2
    return np.split(fused.reshape(-1, 2, half).swapaxes(1, 2).reshape(fused.shape), 2, -1)


def worked_by(order: Callable[[int, int], int], at: int | None = None) -> type[Forward]:
    """Expert e's rows are worked on by expert order(e, E)."""

    def expert_weights(self: Forward, expert: int, layer: int) -> str:
        other = order(expert, expert_count(self.config)) if hit(layer, at) else expert
        return Forward.expert_weights(self, other, layer)

    return faulty(expert_weights=expert_weights)


def untransposed(names: str) -> type[Forward]:
    """x W where x Wᵀ is meant; the matrix is square, so nothing complains."""

    def linear(self: Forward, x: np.ndarray, name: str) -> np.ndarray:
        if not re.fullmatch(names, name):
            return Forward.linear(self, x, name)
        y = x @ self.tensors[name + ".weight"]
        return y + self.tensors[name + ".bias"] if name + ".bias" in self.tensors else y

    return faulty(linear=linear)


def activated(by: Callable[[np.ndarray], np.ndarray], sites: str) -> type[Forward]:
    def activation(self: Forward, x: np.ndarray, site: str) -> np.ndarray:
        return by(x) if re.fullmatch(sites, site) else Forward.activation(self, x, site)

    return faulty(activation=activation)


def gelu(x: np.ndarray) -> np.ndarray:
    """The tanh form."""
    return (0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))).astype(F32)


# ---- attention ----


def rotated(by: Callable, parts: str = "qk", at: int | None = None) -> type[Forward]:
    def rotate(self: Forward, x: np.ndarray, positions: np.ndarray, layer: int, part: str) -> np.ndarray:
        right = Forward.rotate if part not in parts or not hit(layer, at) else by
        return right(self, x, positions, layer, part)

    return faulty(rotate=rotate)


def in_pairs(self: Forward, x: np.ndarray, positions: np.ndarray, layer: int, part: str) -> np.ndarray:
    """Channel 2j turns with 2j + 1 and both stay in place."""
    cos, sin = self.angles(positions, x.shape[-1], layer)
    a, b, y = x[..., 0::2], x[..., 1::2], x.copy()
    y[..., 0::2], y[..., 1::2] = a * cos - b * sin, b * cos + a * sin
    return y


def in_pairs_then_halves(self: Forward, x: np.ndarray, positions: np.ndarray, layer: int, part: str) -> np.ndarray:
    """Channel 2j turns with 2j + 1; first all of the former are returned, then all of the latter."""
    y = in_pairs(self, x, positions, layer, part)
    return np.concatenate([y[..., 0::2], y[..., 1::2]], -1)


def theta(new: Callable[[Forward], float], at: int | None = None) -> type[Forward]:
    return faulty(theta=lambda self, layer: new(self) if hit(layer, at) else Forward.theta(self, layer))


def over_hidden_size(self: Forward) -> float:
    """Exponents 2j / hidden_size in place of 2j / head_dim: the same as a smaller base."""
    return Forward.theta(self, 0) ** (head_dim(self.config) / self.config["hidden_size"])


def window(by: int, at: int | None = None) -> type[Forward]:
    """A query sees so many keys more, in the layers that have a window."""

    def wrong(self: Forward, layer: int) -> int:
        right = Forward.window(self, layer)
        return right + by if right and hit(layer, at) else right

    return faulty(window=wrong)


def positions(change: Callable[[int, int, str], int], at: int | None = None) -> type[Forward]:
    """change(start, stop, part) is added to the positions of a pass."""

    def wrong(self: Forward, start: int, stop: int, layer: int, part: str) -> np.ndarray:
        right = Forward.positions(self, start, stop, layer, part)
        return right + change(start, stop, part) if hit(layer, at) else right

    return faulty(positions=wrong)


def attention_scale(change: Callable[[Forward], float], at: int | None = None) -> type[Forward]:
    def wrong(self: Forward, layer: int) -> float:
        return change(self) if hit(layer, at) else Forward.attention_scale(self, layer)

    return faulty(attention_scale=wrong)


# ---- values on their way ----


def at_sites(sites: str, by: Callable[[np.ndarray], np.ndarray]) -> type[Forward]:
    return faulty(value=lambda self, site, x: by(x) if x.dtype == F32 and re.fullmatch(sites, site) else x)


def bf16(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16).astype(F32)


def f16(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).astype(F32)


def times(factor: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: x * F32(factor)


def cases() -> list[Case]:
    return [*of_norms_and_gates(), *of_experts(), *of_attention(), *of_numbers()]


def of_norms_and_gates() -> list[Case]:
    return [
        case("norm_epsilon", "qwen3", None, "layers.0.attn.q", "hard-wired-in-q-and-k-norm",
             epsilon(1e-6, r".*\.attn\.[qk]"), rms_norm_eps=1e-3),
        case("norm_epsilon", "mixtral", None, "norm", "final-norm", epsilon(1e-3, "norm")),
        case("norm_epsilon", "qwen3", 2, "layers.2.moe.input", "one-norm", epsilon(1e-4, r"layers\.2\.moe\.input"),
             reference="numpy"),
        case("norm_epsilon", "mixtral-many", None, "layers.0.attn.norm", "outside-the-root",
             faulty(norm=epsilon_outside_root)),
        case("norm_epsilon", "olmoe", None, "layers.0.attn.norm", "inside-the-sum", faulty(norm=epsilon_inside_sum)),
        case("norm_epsilon", "deepseek", 0, "layers.0.mlp.input", "dense-layer-norm",
             epsilon(1e-3, r"layers\.0\.mlp\.input")),
        case("norm_epsilon", "qwen2-sparse", 3, "layers.3.moe.input", "moe-capture",
             epsilon(1e-3, r"layers\.3\.moe\.input"), MOE),
        case("missing_renormalisation", "qwen3", 1, "layers.1.moe.gates", "one-layer", renormalises(False, 1)),
        case("missing_renormalisation", "mixtral", 2, "layers.2.moe.gates", "one-layer", renormalises(False, 2)),
        case("missing_renormalisation", "olmoe-clip", 2, "layers.2.moe.gates", "needless", renormalises(True, 2)),
        case("missing_renormalisation", "deepseek", None, "layers.1.moe.gates", "sigmoid", renormalises(False)),
        case("missing_renormalisation", "dots", None, "layers.0.moe.gates", "sigmoid-needless", renormalises(True)),
        case("missing_renormalisation", "ernie", 2, "layers.2.moe.gates", "one-layer", renormalises(False, 2)),
        case("missing_renormalisation", "minimax", 1, "layers.1.moe.gates", "moe-capture", renormalises(False, 1), MOE),
        case("raw_logit_gates", "mixtral", 1, "layers.1.moe.gates", "one-layer", raw_gates(1)),
        case("raw_logit_gates", "qwen2", None, "layers.0.moe.gates", "all", raw_gates()),
        case("raw_logit_gates", "qwen3", 0, "layers.0.moe.gates", "moe-capture", raw_gates(0), MOE),
        case("raw_logit_gates", "olmoe", 1, "layers.1.moe.gates", "one-layer", raw_gates(1), reference="numpy"),
        case("raw_logit_gates", "glm4", None, "layers.1.moe.gates", "no-sigmoid", raw_gates()),
        case("raw_logit_gates", "qwen2-sparse", 1, "layers.1.moe.gates", "summed-to-one", raw_gates(1, summed=True)),
        case("raw_logit_gates", "mixtral-many", None, "layers.0.moe.gates", "summed-to-one", raw_gates(summed=True)),
        case("raw_logit_gates", "dots", 1, "layers.1.moe.gates", "scaled", raw_gates(1, summed=True)),
        case("biased_gates", "deepseek", None, "layers.1.moe.gates", "groups", biased_gates()),
        case("biased_gates", "deepseek", 2, "layers.2.moe.gates", "groups-one-layer", biased_gates(2)),
        case("biased_gates", "deepseek", 1, "layers.1.moe.gates", "no-groups", biased_gates(1), topk_group=4),
        case("biased_gates", "glm4", 1, "layers.1.moe.gates", "one-layer", biased_gates(1)),
        case("biased_gates", "glm4", None, "layers.1.moe.gates", "moe-capture", biased_gates(), MOE),
        case("biased_gates", "dots", None, "layers.0.moe.gates", "not-renormalised", biased_gates()),
        case("biased_gates", "dots", 2, "layers.2.moe.gates", "decoding", biased_gates(2), chunks=[20, 1, 1, 1, 3]),
        case("biased_gates", "minimax", None, "layers.0.moe.gates", "all", biased_gates()),
        case("biased_gates", "ernie", None, "layers.1.moe.gates", "softmax", biased_gates()),
        case("biased_gates", "ernie", 2, "layers.2.moe.gates", "softmax-moe-capture", biased_gates(2), MOE),
        case("biased_gates", "ernie", 1, "layers.1.moe.gates", "softmax-one-layer", biased_gates(1)),
        case("biased_gates", "minimax", 1, "layers.1.moe.gates", "chunks", biased_gates(1), chunks=[13, 13]),
        case("biased_gates", "deepseek", None, "layers.1.moe.gates", "only-scaled", biased_gates(),
             norm_topk_prob=False),
        case("biased_gates", "glm4", 2, "layers.2.moe.gates", "with-softmax-capture", biased_gates(2), WITH_WEIGHTS),
    ]  # fmt: skip


def of_experts() -> list[Case]:
    return [
        case("swapped_gate_up", "mixtral-many", 1, "layers.1.moe.experts.*.hidden", "activation-on-up",
             activation_on_up(r"layers\.1\.moe\.experts\.hidden")),
        case("swapped_gate_up", "qwen3", None, "layers.0.moe.experts.*.gate", "up-first",
             projected(r".*\.experts\.", up_first)),
        case("swapped_gate_up", "qwen2", 2, "layers.2.moe.shared.output", "shared-up-first",
             projected(r"layers\.2\.moe\.shared\.", up_first)),
        case("swapped_gate_up", "olmoe", None, "layers.0.moe.experts.*.hidden", "activation-on-up-numpy",
             activation_on_up(r".*\.experts\.hidden"), reference="numpy"),
        case("swapped_gate_up", "qwen3-dense", 0, "layers.0.mlp.output", "dense-up-first",
             projected(r"layers\.0\.mlp\.", up_first)),
        case("interleaved_halves", "qwen3", 1, "layers.1.moe.experts.*.gate", "every-other",
             projected(r"layers\.1\.moe\.experts\.", every_other)),
        case("interleaved_halves", "deepseek", None, "layers.1.moe.experts.*.gate", "halves",
             projected(r".*\.experts\.", halves_of_interleaved)),
        case("interleaved_halves", "mixtral-square", None, "layers.0.moe.experts.*.gate", "every-other",
             projected(r".*\.experts\.", every_other)),
        case("interleaved_halves", "qwen2", 2, "layers.2.moe.experts.*.output", "moe-capture",
             projected(r"layers\.2\.moe\.experts\.", halves_of_interleaved), MOE),
        case("interleaved_halves", "qwen2-sparse", 1, "layers.1.moe.shared.output", "shared",
             projected(r"layers\.1\.moe\.shared\.", every_other)),
        case("expert_order", "qwen3", 1, "layers.1.moe.experts.*.gate", "reversed",
             worked_by(lambda expert, count: count - 1 - expert, 1)),
        case("expert_order", "qwen3-dense", None, "layers.1.moe.experts.*.gate", "group-and-member-exchanged",
             worked_by(lambda expert, count: expert % 4 * (count // 4) + expert // 4)),
        case("expert_order", "olmoe-clip", None, "layers.0.moe.experts.*.gate", "from-one",
             worked_by(lambda expert, count: (expert + 1) % count)),
        case("transposed_weight", "mixtral-square", 1, "layers.1.attn.out", "o",
             untransposed(r"model\.layers\.1\.self_attn\.o_proj")),
        case("transposed_weight", "qwen3-dense", None, "layers.1.moe.experts.*.gate", "gate",
             untransposed(r".*\.experts\.\d+\.gate_proj")),
        case("transposed_weight", "qwen2", 0, "layers.0.attn.v", "v",
             untransposed(r"model\.layers\.0\.self_attn\.v_proj")),
        case("transposed_weight", "olmoe", None, "layers.0.attn.q", "q-of-all", untransposed(r".*\.q_proj")),
        case("activation", "mixtral", None, "layers.0.moe.experts.*.hidden", "gelu", activated(gelu, r".*\.hidden")),
        case("activation", "qwen2", 1, "layers.1.moe.experts.*.hidden", "relu",
             activated(lambda x: np.maximum(x, F32(0)), r"layers\.1\.moe\.experts\.hidden")),
        case("activation", "olmoe", None, "layers.0.moe.experts.*.hidden", "sigmoid-1.702",
             activated(lambda x: x * sigmoid(F32(1.702) * x), r".*\.hidden")),
        case("norm_missing", "qwen3", None, "layers.0.attn.q", "q-and-k", no_norm(r".*\.attn\.[qk]")),
        case("norm_missing", "olmoe", 1, "layers.1.attn.k", "k", no_norm(r"layers\.1\.attn\.k")),
        case("norm_missing", "mixtral", None, "norm", "final", no_norm("norm")),
        case("norm_missing", "qwen2", 1, "layers.1.moe.input", "before-experts", no_norm(r"layers\.1\.moe\.input")),
    ]  # fmt: skip


def of_attention() -> list[Case]:
    return [
        case("rope_style", "mixtral", None, "layers.0.attn.q", "pairs", rotated(in_pairs)),
        case("rope_style", "qwen3", 1, "layers.1.attn.q", "pairs-one-layer", rotated(in_pairs, at=1)),
        case("rope_style", "qwen2", None, "layers.0.attn.q", "pairs-q-only", rotated(in_pairs, "q")),
        case("rope_style", "olmoe-clip", None, "layers.0.attn.k", "pairs-moe-capture", rotated(in_pairs), MOE),
        case("rope_style", "glm4", None, "layers.0.attn.q", "pairs-then-halves", rotated(in_pairs_then_halves)),
        case("rope_style", "qwen2-sparse", 2, "layers.2.attn.k", "pairs-k-only", rotated(in_pairs, "k", 2)),
        case("rope_style", "mixtral-many", None, "layers.0.attn.q", "pairs-then-halves",
             rotated(in_pairs_then_halves)),
        case("rope_theta", "qwen2", 1, "layers.1.attn.q", "one-layer", theta(lambda self: 1e6, 1)),
        case("rope_theta", "mixtral", None, "layers.0.attn.q", "exponent-over-hidden-size", theta(over_hidden_size)),
        case("rope_theta", "glm4", None, "layers.0.attn.q", "5e5", theta(lambda self: 5e5)),
        case("rope_theta", "qwen3-dense", 2, "layers.2.attn.k", "moe-capture", theta(lambda self: 1e6, 2), MOE),
        case("window_off_by_one", "mixtral-square", 1, "layers.1.attn.out", "wider-one-layer", window(1, 1)),
        case("window_off_by_one", "qwen2-sparse", 2, "layers.2.attn.weights", "narrower", window(-1, 2), WITH_WEIGHTS),
        case("window_off_by_one", "qwen3-dense", 1, "layers.1.attn.out", "wider-decoding", window(1, 1),
             chunks=[18, 1, 1, 1, 1, 1, 1, 1, 1]),
        case("window_off_by_one", "mixtral-square", 0, "layers.0.moe.input", "narrower-moe-capture",
             window(-1, 0), MOE),
        case("window_off_by_one", "qwen3-dense", None, "layers.0.attn.weights", "wider", window(1), WITH_WEIGHTS,
             reference="numpy"),
        case("position_off_by_one", "mixtral", None, "layers.0.attn.q", "from-one", positions(lambda *_: 1)),
        case("position_off_by_one", "qwen3", None, "layers.0.attn.q", "q-only",
             positions(lambda start, stop, part: int(part == "q"))),
        case("position_off_by_one", "qwen2", 1, "layers.1.attn.k", "k-only-one-layer",
             positions(lambda start, stop, part: int(part == "k"), 1)),
        case("position_off_by_one", "olmoe", None, "layers.0.attn.q", "second-chunk",
             positions(lambda start, stop, part: int(start > 0)), chunks=[20, 12]),
        case("position_off_by_one", "mixtral-square", None, "layers.0.attn.q", "decoding-at-length-plus-one",
             positions(lambda start, stop, part: int(stop - start == 1)), chunks=[24, 1, 1, 1, 1, 1, 1]),
        case("position_off_by_one", "qwen3-dense", None, "layers.0.attn.q", "decoding-at-last-position",
             positions(lambda start, stop, part: -int(start > 0)), chunks=[20, 1, 1, 1, 1, 1, 1]),
        case("position_off_by_one", "olmoe-clip", None, "layers.0.attn.k", "second-chunk-moe-capture",
             positions(lambda start, stop, part: int(start > 0)), MOE, chunks=[12, 12]),
        case("position_off_by_one", "deepseek", 1, "layers.1.attn.q", "one-layer", positions(lambda *_: 1, 1)),
        case("position_off_by_one", "qwen2-sparse", None, "layers.0.attn.q", "q-one-behind",
             positions(lambda start, stop, part: -int(part == "q")), WITH_WEIGHTS),
        case("position_off_by_one", "mixtral-many", None, "layers.0.attn.k", "moe-capture",
             positions(lambda *_: 1), MOE),
        case("scale_factor", "qwen3", None, "layers.0.attn.out", "softmax-scale-of-hidden-over-heads",
             attention_scale(lambda self: (self.config["hidden_size"] / self.config["num_attention_heads"]) ** -0.5)),
        case("scale_factor", "mixtral-many", 1, "layers.1.attn.weights", "softmax-scale-missing",
             attention_scale(lambda self: 1.0, 1), WITH_WEIGHTS),
        case("scale_factor", "olmoe", None, "layers.0.attn.weights", "softmax-scale-of-hidden-size",
             attention_scale(lambda self: self.config["hidden_size"] ** -0.5), WITH_WEIGHTS),
    ]  # fmt: skip


def of_numbers() -> list[Case]:
    return [
        case("bf16_rounding", "mixtral", None, "layers.0.moe.router_logits", "router-logits",
             at_sites(r".*\.router_logits", bf16)),
        case("bf16_rounding", "qwen3", None, "layers.0.moe.gates", "gates", at_sites(r".*\.gates", bf16)),
        case("bf16_rounding", "qwen2", 1, "layers.1.attn.out", "attention", at_sites(r"layers\.1\.attn\.out", bf16)),
        case("bf16_rounding", "olmoe", None, "embed", "every-value", at_sites(".*", bf16)),
        case("bf16_rounding", "mixtral-square", 1, "layers.1.moe.experts.*.hidden", "hidden",
             at_sites(r"layers\.1\.moe\.experts\.hidden", bf16)),
        case("bf16_rounding", "qwen3-dense", None, "layers.0.output", "residual-f16",
             at_sites(r"layers\.\d\.output", f16)),
        case("bf16_rounding", "deepseek", None, "layers.0.attn.k", "cache", at_sites(r".*\.attn\.[kv]", bf16)),
        case("bf16_rounding", "qwen2-sparse", 3, "layers.3.moe.input", "norm",
             at_sites(r"layers\.3\.moe\.input", bf16)),
        case("bf16_rounding", "olmoe-clip", None, "layers.0.moe.routed", "sum-moe-capture",
             at_sites(r".*\.moe\.routed", bf16), MOE),
        case("scale_factor", "deepseek", None, "layers.1.moe.gates", "routed-scaling-missing",
             gate_factor(lambda self, right: 1.0)),
        case("scale_factor", "dots", 1, "layers.1.moe.gates", "routed-scaling-twice",
             gate_factor(lambda self, right: right * right, 1)),
        case("scale_factor", "mixtral", None, "layers.0.moe.gates", "gates-times-k",
             gate_factor(lambda self, right: 2.0)),
        case("scale_factor", "olmoe-clip", 1, "layers.1.moe.routed", "mean-for-sum",
             at_sites(r"layers\.1\.moe\.routed", times(1 / 3))),
        case("scale_factor", "qwen2", None, "layers.0.moe.shared.output", "shared-halved-moe-capture",
             at_sites(r".*\.shared\.output", times(0.5)), MOE),
        case("scale_factor", "qwen3-dense", None, "logits", "logits", at_sites("logits", times(0.25))),
        case("scale_factor", "glm4", 1, "layers.1.attn.out", "residual-multiplier",
             at_sites(r"layers\.1\.attn\.out", times(0.22))),
    ]  # fmt: skip
