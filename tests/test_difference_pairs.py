"""What of two traces belongs together: tokens by prefix, taps by name, rows of experts by token and expert."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from checkpoints import read_checkpoint
from goldens import REFERENCE
from oracle import Oracle
from traced import traced

import colibri_lab as lab
from colibri_lab.difference.errors_of import steps
from colibri_lab.difference.pair import Pair
from colibri_lab.testing import synthetic_trace
from colibri_lab.trace import Trace


def changed(trace: Trace, arrays: dict | None = None, ids: list[int] | None = None, **meta) -> Trace:
    """The same trace with other arrays, ids or meta."""
    whole = {path: trace[path] for path in trace} | (arrays or {})
    return Trace(whole, ids=ids or trace.ids, texts=[], meta=trace.meta | meta)


def only(trace: Trace, *endings: str, **meta) -> Trace:
    arrays = {path: trace[path] for path in trace if path.endswith(endings)}
    return Trace(arrays, ids=trace.ids, texts=[], meta=trace.meta | meta)


@pytest.fixture(scope="module")
def model() -> lab.Model:
    return lab.open(REFERENCE / "qwen2_moe")


def fed(model, ids, sizes=None) -> Trace:
    session = model.session(capture="all", max_tokens=64)
    start = 0
    for size in sizes or [len(ids)]:
        session.feed(ids[start : start + size])
        start += size
    return session.trace()


IDS = np.random.default_rng(1).integers(0, 60, 9).tolist()

# ---- rows ----


def test_rows_of_experts_belong_together_by_token_and_expert_across_passes(model):
    """Two cuts store the rows in other orders; every pair that `rows` gives is of one token and one expert."""
    a, b = fed(model, IDS, [9]), fed(model, IDS, [2, 3, 4])
    layer = a.moe_layers[0]
    path = f"layers.{layer}.moe.dispatch.output"
    assert a[path].tobytes() != b[path].tobytes()
    values = Pair(a, b).rows(f"layers.{layer}.moe.experts.*.output")
    np.testing.assert_array_equal(values.a, values.b)
    order = list(zip(values.tokens.tolist(), values.experts.tolist(), strict=True))
    assert order == sorted((t, e) for t, ids in enumerate(a[f"layers.{layer}.moe.expert_ids"].tolist()) for e in ids)
    one = Pair(a, b).rows(f"layers.{layer}.moe.experts.{order[0][1]}.output")
    assert set(one.experts.tolist()) == {order[0][1]} and one.tokens.tolist() == sorted(one.tokens.tolist())


def test_values_of_a_diff_are_those_of_the_runs(model):
    d = lab.diff(fed(model, IDS), fed(model, IDS, [4, 5]))
    values = d.values("layers.0.moe.input")
    assert values.a.tobytes() == d.a["layers.0.moe.input"].tobytes() and values.experts is None
    with pytest.raises(lab.TapError, match=r"not in both runs; did you mean 'layers\.0\.moe\.input'"):
        d.values("layers.0.moe.inputs")


def test_narrow_formats_are_widened_exactly(model):
    """A trace stored in bfloat16 is compared by what it holds; the tolerance grows by that format's spacing."""
    a = fed(model, IDS)
    narrow = {p: a[p].astype(ml_dtypes.bfloat16) for p in a if p.endswith((".input", "attn.norm")) and "disp" not in p}
    d = lab.diff(a, changed(a, narrow))
    assert d.verdict == "identical"
    row = d.table[d.table["path"] == "layers.0.attn.norm"][0]
    exact = narrow["layers.0.attn.norm"].astype(np.float64) - a["layers.0.attn.norm"]
    assert row["max_abs"] == np.abs(exact).max() and 0 < row["max_rel"] < row["tolerance"] < 0.02
    values = d.values("layers.0.attn.norm")
    assert (values.a.dtype, values.b.dtype.name) == (np.float32, "bfloat16")


def test_heads_and_channels_may_be_one_axis(model):
    a = fed(model, IDS)
    flat = {p: a[p].reshape(len(IDS), -1) for p in a if p.endswith(("attn.q", "attn.k", "attn.v"))}
    d = lab.diff(a, changed(a, flat))
    assert d.verdict == "identical" and not d.notes and "layers.0.attn.q" in d.table["path"]


def test_blocks_give_what_one_piece_gives(monkeypatch):
    """Large taps are gone through in pieces; no number depends on where they are cut."""
    a = synthetic_trace(3, 8, 2, 50, hidden=16)
    noise = np.random.default_rng(0).normal(0, 1e-3, (50, 16)).astype(np.float32)
    b = changed(a, {p: a[p] + noise for p in a if p.endswith("moe.output")})
    whole = lab.diff(a, b)
    monkeypatch.setattr("colibri_lab.difference.pair._BLOCK", 40)
    pieces = lab.diff(a, b)
    assert pieces.first_divergence == whole.first_divergence
    for name in ("max_abs", "max_rel", "ulp", "state", "token"):
        np.testing.assert_array_equal(pieces.table[name], whole.table[name])
    np.testing.assert_allclose(pieces.table["cosine"], whole.table["cosine"], rtol=1e-12)


# ---- numbers ----


def test_the_columns_of_the_table_by_hand():
    a = synthetic_trace(1, 4, 1, 2, hidden=2)
    x = np.array([[1.0, -4.0], [0.0, 2.0]], np.float32)
    y = np.array([[1.0, -4.0], [0.5, 2.0]], np.float32)
    row = lab.diff(changed(a, {"layers.0.moe.output": x}), changed(a, {"layers.0.moe.output": y})).table
    row = row[row["path"] == "layers.0.moe.output"][0]
    cosine = (x * y).sum() / np.sqrt((x * x).sum() * (y * y).sum())
    assert (row["max_abs"], row["max_rel"], row["token"], row["state"]) == (0.5, 0.125, 1, "beyond")
    assert row["cosine"] == pytest.approx(cosine, rel=1e-6) and row["ulp"] == np.float32(0.5).view(np.int32)


def test_steps_count_float32_numbers_across_zero_and_signs():
    tiny = np.float32(1e-45)
    x = np.array([1.0, -tiny, 0.0, np.nan, np.nan, np.inf], np.float32)
    y = np.array([np.nextafter(np.float32(1), np.float32(2)), tiny, -0.0, np.nan, 1.0, np.inf], np.float32)
    assert steps(x, y).tolist() == [1, 2, 0, 0, np.inf, 0]


def test_a_tap_of_zeros_on_the_left_is_an_infinite_relative_error():
    a = synthetic_trace(1, 4, 1, 2, hidden=2)
    zero, one = np.zeros((2, 2), np.float32), np.ones((2, 2), np.float32)
    d = lab.diff(changed(a, {"layers.0.moe.output": zero}), changed(a, {"layers.0.moe.output": one}))
    row = d.table[d.table["path"] == "layers.0.moe.output"][0]
    assert row["max_rel"] == np.inf and np.isnan(row["cosine"]) and row["max_abs"] == 1


# ---- tokens ----


def test_only_the_common_prefix_is_compared_and_the_cut_is_said(model):
    """The logits at a position depend on the tokens up to it, so they end with the prefix."""
    other = [*IDS[:5], (IDS[5] + 1) % 60, *IDS[6:]]
    d = lab.diff(fed(model, IDS), fed(model, other))
    assert d.verdict == "identical" and d.n_tokens == 5 and len(d.prediction.kl) == 5
    assert "differ from row 5 on" in d.prediction.cut and "Only the first 5 tokens can be compared" in d.notes[0]
    d = lab.diff(fed(model, IDS), fed(model, IDS[:7]))
    assert d.n_tokens == 7 and d.prediction.cut == "B ends after 7 tokens" and "A goes on for 2 tokens" in d.notes[0]


def test_J1_padding_on_the_left_is_recognised(model):
    """A trace excludes padding rows; one that has them is refused with what was seen."""
    with pytest.raises(lab.ArgumentError, match="B begins with 3 tokens of id 0"):
        lab.diff(fed(model, [5, 6]), fed(model, [0, 0, 0, 5, 6]))


def test_J5_a_batch_laid_end_to_end_is_recognised(model):
    d = lab.diff(fed(model, IDS), fed(model, IDS * 3))
    assert "B repeats these 9 tokens 3 times (a batch laid end to end" in d.notes[0] and d.verdict == "identical"


def test_tokens_without_ids_are_matched_by_their_row(model):
    a = fed(model, IDS)
    d = lab.diff(a, changed(a, ids=[-1] * len(IDS)))
    assert d.verdict == "identical" and d.n_tokens == 9 and d.notes[0].startswith("B holds no token ids")


@pytest.mark.parametrize("sizes", [[8, 1], [1] * 9, [4, 5]])
def test_J2_every_way_of_feeding_is_within_tolerance_of_a_full_pass_elsewhere(model, sizes):
    """Full passes of the NumPy forward pass against cached ones of ours: the rounding of float32, nothing more."""
    config, tensors = read_checkpoint(REFERENCE / "qwen2_moe")
    d = lab.diff(traced(Oracle(config, tensors).forward(IDS), config, IDS), fed(model, IDS, sizes))
    assert d.verdict == "identical" and d.table["max_rel"].max() < 1e-5


def test_J2_a_shifted_position_is_beyond_tolerance_by_orders_of_magnitude(model, monkeypatch):
    """The ninth token at position 9 instead of 8: an off-by-one in the cache, found at its queries."""
    config, tensors = read_checkpoint(REFERENCE / "qwen2_moe")

    def shifted(x, frequencies, factor):
        positions = np.array([0, 1, 2, 3, 4, 5, 6, 7, 9], np.float32)
        angles = (positions[:, None] * frequencies).astype(np.float64)[:, None, :]
        first, second = np.split(x, 2, axis=-1)
        cos, sin = np.cos(angles) * factor, np.sin(angles) * factor
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    monkeypatch.setattr("oracle.rotate", shifted)
    d = lab.diff(fed(model, IDS), traced(Oracle(config, tensors).forward(IDS), config, IDS))
    assert (d.verdict, d.first_divergence.path, d.first_divergence.token) == ("defect", "layers.0.attn.q", 8)
    assert d.first_divergence.error > 1000 * d.tolerance.of("layers.0.attn.q")


# ---- taps ----


def test_J5_probabilities_under_the_name_of_logits_are_recognised(model):
    """Releases that returned the softmax as router_logits: said, and compared as what they are."""
    a = fed(model, IDS)
    soft = {p.replace("scores", "router_logits"): a[p] for p in a if p.endswith("moe.scores")}
    for pair in ((a, changed(a, soft)), (changed(a, soft), a)):
        d = lab.diff(*pair)
        side = "B" if pair[0] is a else "A"
        assert d.verdict == "identical"
        assert any(note.startswith(f"What {side} names router_logits are probabilities") for note in d.notes)


def test_J5_taps_and_layers_that_one_side_lacks_are_named(model):
    a = fed(model, IDS)
    last = a.moe_layers[-1]
    fewer = {p: a[p] for p in a if p.endswith(("router_logits", "expert_ids")) and f"layers.{last}." not in p}
    d = lab.diff(a, Trace(fewer, ids=a.ids, texts=[], meta=a.meta))
    assert d.verdict == "identical" and len(d.table) == len(fewer) and d.prediction is None
    assert d.notes[0].startswith("B does not hold embed, attn.norm (layers 0–")
    shifted = changed(only(a, "moe.gates"), model_type="other")
    assert "The two differ in model_type: A has qwen2_moe, B has other." in lab.diff(a, shifted).notes


def test_taps_of_another_width_are_left_out_by_name():
    a, b = synthetic_trace(2, 8, 2, 20, hidden=16), synthetic_trace(2, 8, 2, 20, hidden=8)
    d = lab.diff(a, b)
    assert any("layers.0.moe.input (16 and 8 per row)" in note for note in d.notes)
    assert set(d.table["stage"]) == {"router"}
    with pytest.raises(lab.ArgumentError, match="no tap in common"):
        lab.diff(only(a, "moe.input"), only(b, "moe.input"))


def test_models_of_another_number_of_experts_are_not_compared_by_expert():
    a, b = synthetic_trace(2, 8, 2, 20, hidden=16), synthetic_trace(2, 6, 2, 20, hidden=16)
    d = lab.diff(a, b)
    assert "The two differ in num_experts: A has 8, B has 6." in d.notes
    assert set(d.table["path"]) == {f"layers.{x}.moe.{tap}" for x in (0, 1) for tap in ("input", "routed", "output")}


# ---- tolerance and prediction ----


def test_a_measured_tolerance_is_ten_times_the_noise_and_has_a_floor():
    a = synthetic_trace(2, 8, 2, 40, hidden=16)
    path = "layers.1.moe.output"
    noisy = a[path] + (np.abs(a[path]) == np.abs(a[path]).max()) * np.float32(1e-4) * np.abs(a[path]).max()
    t = lab.tolerance(a, changed(a, {path: noisy}))
    assert t.of(path) == pytest.approx(1e-3, rel=0.01) and t.of("layers.0.moe.output") == 8 * 2.0**-23
    assert t.relative == t.of(path) and t.words.startswith("Measured: 10 times")
    assert lab.diff(a, changed(a, {path: noisy}), tolerance=t).verdict == "identical"
    assert lab.diff(a, changed(a, {path: noisy})).first_divergence.path == path
    with pytest.raises(lab.ArgumentError, match="same bits everywhere"):
        lab.tolerance(a, a)


def test_a_tolerance_is_a_number_of_the_taps_largest_value():
    a = synthetic_trace(1, 4, 1, 8, hidden=4)
    path = "layers.0.moe.output"
    b = changed(a, {path: a[path] * np.float32(1.01)})
    assert lab.diff(a, b, tolerance=0.02).verdict == "identical"
    assert "B is A times 1.01" in lab.diff(a, b, tolerance=0.001).first_divergence.cause
    for bad in (-1, np.nan, "tight", True):
        with pytest.raises(lab.ArgumentError, match="a tolerance is a number"):
            lab.diff(a, b, tolerance=bad)


def test_KL_and_the_likeliest_tokens_by_brute_force():
    a = synthetic_trace(1, 4, 1, 6)
    random = np.random.default_rng(0)
    x, y = random.normal(0, 40, (2, 6, 9)).astype(np.float32)
    d = lab.diff(changed(a, {"logits": x}), changed(a, {"logits": y}))
    for row in range(6):
        p, q = (np.exp(z - z.max()) / np.exp(z - z.max()).sum() for z in (x[row].astype(float), y[row].astype(float)))
        assert d.prediction.kl[row] == pytest.approx(sum(p * np.log(p / q)), rel=1e-9)
        assert d.prediction.same_top[row] == (p.argmax() == q.argmax())
        shared = set(np.argsort(-p)[:5].tolist()) & set(np.argsort(-q)[:5].tolist())
        assert d.prediction.agreement[row] == len(shared) / 5
    y[3, 0] = np.nan
    kl = lab.diff(changed(a, {"logits": x}), changed(a, {"logits": y})).prediction.kl
    assert np.isnan(kl[3]) and np.isfinite(np.delete(kl, 3)).all()


def test_files_are_opened_and_named_by_what_they_say(model, tmp_path):
    fed(model, IDS).save(tmp_path / "a.safetensors")
    d = lab.diff(tmp_path / "a.safetensors", str(tmp_path / "a.safetensors"))
    assert d.verdict == "identical" and d.names[0].startswith("colibri-lab, qwen2_moe")
    with pytest.raises(lab.ArgumentError, match="a trace or a session"):
        lab.diff(3, d.a)


# ---- recordings of other programs ----


def test_gates_of_a_few_decimals_are_within_their_last_one():
    a = synthetic_trace(2, 8, 2, 20)
    printed = {p: np.round(a[p], 4) for p in a if p.endswith("gates")}
    d = lab.diff(a, changed(a, printed, gates_decimals=4))
    assert d.verdict == "identical"
    assert lab.diff(a, changed(a, printed)).first_divergence.path == "layers.0.moe.gates"


def test_log_probabilities_are_compared_as_such_where_they_were_recorded():
    """A KL base of llama.cpp keeps 16 bits of log probabilities, and only of the second half of a window."""
    a = synthetic_trace(1, 4, 1, 6)
    z = np.random.default_rng(0).normal(0, 2, (6, 9)).astype(np.float32)
    logp = z - np.log(np.exp(z.astype(np.float64)).sum(axis=1, keepdims=True))
    recorded = np.arange(6) >= 3
    base = {"logits": np.where(recorded[:, None], np.round(logp, 4), 0).astype(np.float32), "logits.recorded": recorded}
    d = lab.diff(changed(a, {"logits": z}), changed(a, base, logits_floor=16))
    assert d.verdict == "identical" and d.prediction.positions.tolist() == [3, 4, 5]
    assert (d.prediction.kl < 1e-7).all() and "The logits of B are log probabilities" in " ".join(d.notes)


def test_routes_that_do_not_say_their_arithmetic_say_what_is_assumed():
    a = synthetic_trace(1, 4, 1, 6)
    assert any("float32 is assumed" in note for note in lab.diff(a, a).notes)
    said = changed(a, arithmetic="bfloat16")
    d = lab.diff(said, said)
    assert not d.notes and "bfloat16" in d.tolerance.words and d.tolerance.relative > 0.01


@pytest.mark.parametrize("with_model", [False, True])
def test_logits_of_a_recording_that_does_not_say_its_layers_are_compared(model, with_model):
    """A KL base opened without config= has num_hidden_layers 0: there is no layer before its norm."""
    ids = [3, 1, 4, 1]
    logits = np.random.default_rng(0).normal(size=(4, model.config.vocab_size)).astype(np.float32)
    meta = {"producer": "x", "producer_version": "1", "model_type": "unknown", "gate_rule": "unknown"}
    meta |= {"num_hidden_layers": 0, "moe_layers": [], "num_experts": 0, "top_k": 0, "passes": [[0, 4]], "edits": []}
    a, b = (Trace({"logits": logits * scale}, ids=ids, texts=[], meta=meta) for scale in (1.0, 1.5))
    diff = lab.diff(a, b, model=model if with_model else None)
    assert diff.first_divergence is not None and diff.first_divergence.path == "logits"
