"""What is named as a fault and what is not, rule by rule, on small checkpoints run by our engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import random_tensors, small_config, write_checkpoint

import colibri_lab as lab
from colibri_lab.difference.changes import Is, Rounded, Times
from colibri_lab.difference.formulas import relative
from colibri_lab.difference.maths import Given, Replay
from colibri_lab.difference.scene import fitted
from colibri_lab.difference.variants import erf, interleaved, rotate_halves, rounded
from colibri_lab.trace import Trace
from tests.planted.seen_checkpoints import each, experts, ordered, scaled, setting
from tests.planted.seen_numpy import IDS, run, small

FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
Alter = Callable[[dict[str, Any], dict[str, np.ndarray]], None]


def compared(folder: Path, alter: Alter, family: str = "mixtral", capture: str = "all", **options: Any) -> Any:
    """The diff of a checkpoint and the altered one, with the model of the first."""
    config, tensors = small(family, **options)
    a = run(folder / "right", config, tensors, capture)
    other, changed = dict(config), dict(tensors)
    alter(other, changed)
    b = run(folder / "wrong", other, changed, capture)
    return lab.diff(a, b, model=folder / "right", progress=False)


def noise(size: float, *ends: str) -> Alter:
    random = np.random.default_rng(3)
    return each(lambda w: w + (size * w.std() * random.standard_normal(w.shape)).astype(np.float32), *ends)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_replay_of_every_tap_is_the_engines_to_a_millionth(family: str, tmp_path: Path) -> None:
    """All taps, each from those before it, and the logits from the ids alone."""
    config = small_config(family, **({"sliding_window": 9} if family == "mixtral" else {}))
    trace = run(tmp_path, config, random_tensors(config, 1))
    model = lab.open(tmp_path)
    rows = np.arange(len(IDS))
    for path in trace:
        if "dispatch" not in path and not path.endswith("expert_ids"):
            assert relative(Replay(Given(trace, trace, path, model), rows).get(path), trace[path]) < 1e-6, path
    empty = Trace({}, ids=trace.ids, texts=[], meta=trace.meta)
    assert relative(Replay(Given(empty, empty, "logits", model), rows).get("logits"), trace["logits"]) < 2e-6


def test_a_replay_lists_the_points_it_passed(tmp_path: Path) -> None:
    """From the nearest recorded values to the tap, no further."""
    config, tensors = small("mixtral")
    trace = run(tmp_path, config, tensors)
    replay = Replay(Given(trace, trace, "layers.1.moe.input", lab.open(tmp_path)), np.arange(4))
    replay.get("layers.1.moe.input")
    assert "layers.1.moe_norm.eps" in replay.passed
    assert not any(".attn." in point for point in replay.passed)


def test_what_lies_before_a_change_is_not_computed_again(tmp_path: Path) -> None:
    """The base's taps are the very arrays."""
    config, tensors = small("mixtral")
    trace = run(tmp_path, config, tensors, "moe")
    given = Given(trace, trace, "layers.0.moe.input", lab.open(tmp_path))
    base = Replay(given, np.arange(9))
    base.get("layers.0.moe.input")
    other = Replay(given, np.arange(9), {"layers.0.attn.scale": Times(2.0)}, base=base)
    assert other.get("layers.0.attn.norm") is base.get("layers.0.attn.norm")
    assert relative(other.get("layers.0.attn.out"), base.get("layers.0.attn.out")) > 1e-3


def test_interleaved_rotation_turns_pairs_of_neighbours() -> None:
    """Against complex numbers."""
    random = np.random.default_rng(0)
    x, angles = random.standard_normal((5, 2, 6)), random.standard_normal((5, 3))
    turned = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)[:, None]
    found = interleaved(x, angles)
    np.testing.assert_allclose(found[..., 0::2] + 1j * found[..., 1::2], turned, rtol=1e-12)
    halves = (x[..., :3] + 1j * x[..., 3:]) * np.exp(1j * angles)[:, None]
    found = rotate_halves(x, angles)
    np.testing.assert_allclose(found[..., :3] + 1j * found[..., 3:], halves, rtol=1e-12)


def test_rounding_is_that_of_ml_dtypes() -> None:
    """bfloat16 and float16, ties to even."""
    import ml_dtypes

    x = np.random.default_rng(1).standard_normal(4096).astype(np.float32)
    x[:2] = 1.00390625, 1.01171875  # halfway between two values of bfloat16
    assert (rounded(x, "bfloat16") == x.astype(ml_dtypes.bfloat16).astype(np.float64)).all()
    assert (rounded(x, "float16") == x.astype(np.float16).astype(np.float64)).all()


def test_the_error_function_is_that_of_the_standard_library() -> None:
    """To 1e-12, far out as well."""
    import math

    x = np.linspace(-8, 8, 401)
    np.testing.assert_allclose(erf(x), [math.erf(value) for value in x], atol=1e-12)


def test_a_fitted_constant_is_said_in_few_digits() -> None:
    """The minimum at 0.37 is found between grid points and written as 0.37."""
    value, error = fitted(lambda c: abs(np.log(c / 0.37)), [0.01, 0.1, 1.0, 10.0], 1e-6)
    assert value == 0.37 and error < 1e-6


def test_A6_the_gate_and_up_weights_of_one_expert_are_named_with_their_place(tmp_path: Path) -> None:
    """Expert and layer are in the sentence, the attempt explains down to noise, and the rest was tried or excluded."""
    found = compared(tmp_path, experts(1, lambda w: [w[1], w[0], w[2]], 5)).diagnosis
    assert found.fault == "swapped_gate_up"
    assert found.words == "The gate and up weights (w1, w3) of expert 5 of layer 1 are swapped."
    first, *others = found.attempts
    assert first.state == "explains" and first.left_over < 1e-5
    assert any(attempt.state == "tried" for attempt in others)
    assert any(attempt.state == "excluded" and attempt.left_over is None for attempt in others)


def test_A5_experts_in_text_order_are_named_so(tmp_path: Path) -> None:
    """0, 1, 10, 11, 2 …"""
    found = compared(tmp_path, ordered(0, sorted(range(12), key=str)), num_local_experts=12).diagnosis
    assert found.fault == "expert_order" and "as text" in found.words


def test_an_epsilon_is_named_with_both_values(tmp_path: Path) -> None:
    """The one found and the one of the configuration."""
    found = compared(tmp_path, setting("rms_norm_eps", 3e-4)).diagnosis
    assert found.fault == "norm_epsilon" and "0.0003 instead of 1e-05" in found.words


def test_a_factor_is_named_by_what_it_may_come_from(tmp_path: Path) -> None:
    """√head_dim."""
    found = compared(tmp_path, scaled(10**0.5, "v_proj.weight", layer=1)).diagnosis
    assert found.fault == "scale_factor" and "√head_dim" in found.words


def test_A1_raw_logits_as_gates_need_no_weights(tmp_path: Path) -> None:
    """From the traces alone, without a model."""
    config, tensors = small("mixtral")
    model = lab.open(write_checkpoint(tmp_path, config, tensors))
    runs = []
    for mode in (None, "raw_logits"):
        session = model.session(capture="moe", max_tokens=30, gate_mode=mode)
        session.feed(IDS, progress=False)
        runs.append(Trace(dict(session.trace()), ids=IDS, texts=[], meta=dict(session.trace().meta)))
    found = lab.diff(*runs, progress=False).diagnosis
    assert found is not None and found.fault == "raw_logit_gates"


def test_when_b_follows_the_model_a_is_said_to_be_the_one(tmp_path: Path) -> None:
    """The reference may be the wrong side."""
    config, tensors = small("olmoe")
    right = run(tmp_path / "right", config, tensors)
    wrong = dict(tensors)
    scaled(2.0, "v_proj.weight", layer=0)(config, wrong)
    left = run(tmp_path / "wrong", config, wrong)
    found = lab.diff(left, right, model=tmp_path / "right", progress=False).diagnosis
    assert found.fault == "scale_factor" and "in A, while the other run follows the model" in found.words


@pytest.mark.parametrize(
    "alter",
    [
        noise(0.1, "q_proj.weight"), noise(0.01, "w2.weight"), noise(0.3, "gate.weight"), noise(0.02, "o_proj.weight"),
        noise(0.05, "input_layernorm.weight"), noise(0.1, "embed_tokens.weight"), noise(0.003, "w1.weight"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("capture", ["all", "moe"])
def test_random_noise_on_a_weight_has_no_name(alter: Alter, capture: str, tmp_path: Path) -> None:
    """A near miss is not named: nothing explains, and the sentence says what came nearest."""
    found = compared(tmp_path, alter, capture=capture).diagnosis
    assert found.fault is None and "None of the faults tried explains" in found.words
    assert found.confirm == "" and all(attempt.state != "explains" for attempt in found.attempts)


def test_two_faults_at_one_place_are_not_named_as_either(tmp_path: Path) -> None:
    """Swapped and scaled: each alone leaves too much."""
    found = compared(tmp_path, experts(1, lambda w: [w[1] * np.float32(1.3), w[0], w[2].copy() * np.float32(0.9)]),
                     capture="moe").diagnosis  # fmt: skip
    assert found.fault is None


def test_a_transposed_matrix_that_is_not_square_is_excluded_or_read_as_other_bytes(tmp_path: Path) -> None:
    """The attempt exists, and it does not explain what is something else."""
    found = compared(tmp_path, experts(1, lambda w: [w[1], w[0], w[2]]), capture="moe").diagnosis
    tried = [attempt for attempt in found.attempts if attempt.fault == "transposed_weight"]
    assert tried and all(attempt.state != "explains" for attempt in tried)


def test_changes_print_as_the_python_that_makes_them() -> None:
    """So that the confirming code shows them."""
    for change in (Is(1e-5), Times(2.0), Rounded("bfloat16")):
        assert eval(repr(change)) == change


def test_an_order_is_written_as_the_ranges_it_is_made_of() -> None:
    """What is printed is the order again, and short."""
    from colibri_lab.difference.changes import Order

    half = [*range(192, 384), *range(192)]
    for order in (half, [0, 1, 10, 11, 2, 3], [*range(0, 8, 2), *range(1, 8, 2)], [3, 2, 1, 0], [5], [], [7, 7, 7, 1]):
        assert eval(repr(Order(order))) == tuple(order)
    assert repr(Order(half)) == "(*range(192, 384), *range(0, 192))"


def test_nan_and_expert_numbers_get_no_factor_and_no_error_of_a_library() -> None:
    """What makes no sense to compute is said in a sentence of ours."""
    import colibri_lab as lab
    from colibri_lab.testing import synthetic_trace
    from colibri_lab.trace import Trace

    a = synthetic_trace(layers=3, experts=8, top_k=2, tokens=20, seed=1)
    for path, change in (("layers.1.moe.router_logits", np.nan), ("layers.1.moe.expert_ids", None)):
        arrays = {name: a[name].copy() for name in a}
        if change is None:
            arrays[path][3] = [6, 7] if set(a[path][3]) != {6, 7} else [0, 1]
        else:
            arrays[path][3, 2] = change
        found = lab.diff(a, Trace(arrays, ids=a.ids, texts=a.texts, meta=a.meta), progress=False).diagnosis
        assert found is not None and found.fault is None, path
        told = [found.words, *(attempt.words + attempt.note for attempt in found.attempts)]
        assert not any("subscript" in text or "times as large" in text for text in told), told
