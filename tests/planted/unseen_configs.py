"""Faults of reading config.json: the weights are right, a key is wrong, lost or ignored; run by our engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from colibri_lab.trace import Trace
from tests.planted.case import Case
from tests.planted.unseen_models import ALL, MOE, WITH_WEIGHTS, base, family_of, rope, run, write

ABSENT = object()
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64}


def case(
    kind: str,
    model: str,
    layer: int | None,
    expected: str,
    what: str,
    wrong: Mapping[str, object],
    capture: Sequence[str] = ALL,
    right: Mapping[str, object] | None = None,
    gate_mode: str | None = None,
) -> Case:
    """`wrong` replaces keys of the suspect's config, `right` keys of both; `gate_mode` is how the suspect is run."""

    def make(folder: Path) -> tuple[Trace, Trace, Path | None]:
        config, tensors, ids = base(model, **(right or {}))
        reference = write(folder / "reference", config, tensors)
        changed = {key: value for key, value in (config | wrong).items() if value is not ABSENT}
        suspect = write(folder / "suspect", changed, tensors)
        return run(reference, ids, capture), run(suspect, ids, capture, gate_mode=gate_mode), reference

    place = "all" if layer is None else f"L{layer}"
    return Case(f"unseen-{model}-{place}-{kind}-config-{what}", kind, family_of(model), layer, expected, make)


def cases() -> list[Case]:
    return [
        case("norm_epsilon", "mixtral", None, "layers.0.attn.norm", "1e-6", {"rms_norm_eps": 1e-6}),
        case("norm_epsilon", "qwen3", None, "layers.0.attn.norm", "1e-5", {"rms_norm_eps": 1e-5}),
        case("norm_epsilon", "qwen2", None, "layers.0.attn.norm", "1e-3", {"rms_norm_eps": 1e-3}),
        case("norm_epsilon", "olmoe", None, "layers.0.attn.norm", "1e-12", {"rms_norm_eps": 1e-12}),
        case("norm_epsilon", "mixtral-many", None, "layers.0.attn.k", "1e-6-moe-capture", {"rms_norm_eps": 1e-6}, MOE),
        case("norm_epsilon", "olmoe-clip", None, "layers.0.attn.norm", "key-lost", {"rms_norm_eps": ABSENT},
             right={"rms_norm_eps": 1e-6}),
        case("missing_renormalisation", "qwen3", None, "layers.0.moe.gates", "false", {"norm_topk_prob": False}),
        case("missing_renormalisation", "qwen2-sparse", None, "layers.1.moe.gates", "key-lost",
             {"norm_topk_prob": ABSENT}),
        case("missing_renormalisation", "olmoe", None, "layers.0.moe.gates", "needless-moe-capture",
             {"norm_topk_prob": True}, MOE),
        case("missing_renormalisation", "qwen2", None, "layers.0.moe.gates", "needless", {"norm_topk_prob": True}),
        case("missing_renormalisation", "mixtral", None, "layers.0.moe.gates", "run-as-softmax", {},
             gate_mode="softmax"),
        case("raw_logit_gates", "qwen3-dense", None, "layers.1.moe.gates", "run-raw", {}, gate_mode="raw_logits"),
        case("raw_logit_gates", "olmoe-clip", None, "layers.0.moe.gates", "run-raw", {}, gate_mode="raw_logits"),
        case("window_off_by_one", "mixtral-square", None, "layers.0.attn.out", "wider", {"sliding_window": 8}),
        case("window_off_by_one", "mixtral-square", None, "layers.0.attn.weights", "narrower", {"sliding_window": 6},
             WITH_WEIGHTS),
        case("window_off_by_one", "qwen3-dense", None, "layers.0.attn.out", "narrower", {"sliding_window": 5}),
        case("window_off_by_one", "qwen2-sparse", None, "layers.0.attn.weights", "wider", {"sliding_window": 10},
             WITH_WEIGHTS),
        case("window_off_by_one", "mixtral", None, "layers.0.moe.input", "wider-moe-capture", {"sliding_window": 13},
             MOE, right={"sliding_window": 12}),
        case("rope_theta", "mixtral", None, "layers.0.attn.q", "1e4", {"rope_parameters": rope(1e4)}),
        case("rope_theta", "qwen3", None, "layers.0.attn.q", "key-lost", {"rope_parameters": ABSENT}),
        case("rope_theta", "olmoe", None, "layers.0.attn.k", "1e6-moe-capture", {"rope_parameters": rope(1e6)}, MOE),
        case("scale_factor", "qwen3", None, "layers.0.attn.q", "yarn-attention-factor",
             {"rope_parameters": YARN | {"attention_factor": 1.0}}, right={"rope_parameters": YARN}),
        case("norm_epsilon", "qwen2-sparse", None, "layers.0.attn.norm", "1e-5", {"rms_norm_eps": 1e-5}),
        case("norm_epsilon", "mixtral-square", None, "layers.0.attn.norm", "1e-8", {"rms_norm_eps": 1e-8}),
        case("missing_renormalisation", "qwen3-dense", None, "layers.1.moe.gates", "needless",
             {"norm_topk_prob": True}),
        case("missing_renormalisation", "mixtral-many", None, "layers.0.moe.gates", "run-as-softmax-moe-capture", {},
             MOE, gate_mode="softmax"),
        case("raw_logit_gates", "mixtral", None, "layers.0.moe.gates", "run-raw", {}, gate_mode="raw_logits"),
        case("raw_logit_gates", "qwen2", None, "layers.0.moe.gates", "run-raw-moe-capture", {}, MOE,
             gate_mode="raw_logits"),
        case("window_off_by_one", "qwen2-sparse", None, "layers.0.attn.out", "narrower", {"sliding_window": 8}),
        case("window_off_by_one", "qwen3-dense", None, "layers.0.attn.weights", "wider", {"sliding_window": 7},
             WITH_WEIGHTS),
        case("rope_theta", "olmoe-clip", None, "layers.0.attn.q", "5e5", {"rope_parameters": rope(5e5)}),
        case("rope_theta", "qwen2-sparse", None, "layers.0.attn.q", "1e6", {"rope_parameters": rope(1e6)}),
        case("rope_theta", "mixtral-many", None, "layers.0.attn.q", "ten-times", {"rope_parameters": rope(1e7)}),
        case("scale_factor", "mixtral", None, "layers.0.attn.q", "yarn-attention-factor-twice",
             {"rope_parameters": YARN | {"attention_factor": 1.3}}, right={"rope_parameters": YARN}),
    ]  # fmt: skip
