"""Every importer reads a sound file right, is found by content, and asks for what the file does not say."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import format_goldens as goldens
import numpy as np
import pytest
from format_goldens import GOLDENS, MOE, Golden

import colibri_lab as lab
from colibri_lab import formats
from colibri_lab.formats import Source

every = pytest.mark.parametrize("golden", GOLDENS, ids=lambda golden: golden.name)


def named(name: str) -> Golden:
    return next(golden for golden in GOLDENS if golden.name == name)


@every
def test_a_golden_gives_its_routes_counts_and_ids(golden: Golden, tmp_path: Path) -> None:
    """What comes out is what the file was made of, and analyses take it."""
    trace = lab.load_trace(golden.write(tmp_path), **golden.say)
    layers = trace.moe_layers
    if golden.routes is not None:
        got = np.stack([trace[f"layers.{layer}.moe.expert_ids"] for layer in layers], axis=1)
        assert got.dtype == np.int32 and np.array_equal(got, golden.routes)
        counts = [np.bincount(golden.routes[:, i][golden.routes[:, i] >= 0], minlength=trace.num_experts)
                  for i in range(len(layers))]  # fmt: skip
        assert np.array_equal(lab.routing.load(trace), counts)
        assert np.isfinite(lab.routing.coactivation(trace)).any()
    if golden.counts is not None:
        assert trace.ids == [] and np.array_equal(lab.routing.load(trace), golden.counts)
    if golden.ids is not None:
        assert trace.ids == golden.ids
    assert trace.meta["source"] == golden.write(tmp_path).name
    trace.save(tmp_path / "again.safetensors")  # an imported trace is a trace like any other
    again = lab.load_trace(tmp_path / "again.safetensors")
    assert again.ids == trace.ids and all(np.array_equal(again[p], trace[p], equal_nan=True) for p in trace
                                          if trace[p].dtype != object)  # fmt: skip


@every
def test_a_file_is_claimed_by_its_own_format_alone(golden: Golden, tmp_path: Path) -> None:
    """Content tells the formats apart; forcing another one by name is refused and says what it looks like."""
    path = golden.write(tmp_path)
    assert formats.recognise(Source(path)) == [golden.format]
    assert lab.load_trace(path, golden.format, **golden.say).meta == lab.load_trace(path, **golden.say).meta
    for other in set(formats.FORMATS) - {golden.format}:
        with pytest.raises(lab.FormatError, match=f"no file of the format '{other}'.*looks like {golden.format}"):
            lab.load_trace(path, other, **golden.say)


@pytest.mark.parametrize("content", [b"", b"\0", b"plain words of a letter\n", b"[1, 2]", b"{}", b"PK\x03\x04 nothing",
                                     b"layer;expert\n1;2\n"])  # fmt: skip
def test_what_is_no_recording_is_refused_with_the_list_of_what_can_be_read(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(lab.FormatError, match=r"What can be read: colibri.*vllm.*sglang.*imatrix.*kl_base.*usage"):
        lab.load_trace(path)


def test_random_bytes_are_no_format(tmp_path: Path) -> None:
    """No format claims noise."""
    path = tmp_path / "noise"
    for seed in range(200):
        path.write_bytes(random.Random(seed).randbytes(300))
        assert formats.recognise(Source(path)) == []


def test_an_unknown_format_lists_the_valid_ones(tmp_path: Path) -> None:
    with pytest.raises(lab.ArgumentError, match=r"no format 'vlm'; did you mean 'vllm'.*route_trace"):
        lab.load_trace(named("vllm-npy").write(tmp_path), "vlm")


def test_a_trace_of_ours_takes_no_keyword_and_opens_by_name(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    lab.testing.synthetic_trace(2, 4, 2, 5).save(path)
    assert lab.load_trace(path, "colibri").num_experts == 4
    with pytest.raises(lab.ArgumentError, match="'colibri' has no use for experts="):
        lab.load_trace(path, experts=4)


ASKED = [
    ("vllm-npy", {"experts": 5}, "layers="), ("vllm-npy", {"layers": [1, 2, 3]}, "experts="),
    ("sglang-bare", {"layers": [1, 2, 3], "experts": 5}, "top_k="),
    ("sglang-bare", {"experts": 5, "top_k": 2}, "layers="), ("sglang-stat", {"top_k": 2}, "layers="),
    ("sglang-stat", {"layers": [1, 2]}, "top_k="), ("sglang-csv", {"top_k": 2}, "experts="),
    ("imatrix", {}, "top_k="), ("imatrix-dat", {"top_k": 2}, "experts="), ("moe-trace", {"experts": 5}, "top_k="),
    ("olmoe", {"experts": 5}, "layers="), ("route-trace", {}, "experts="), ("usage", {}, "top_k="),
    ("usage-older", {"top_k": 2}, "experts="), ("usage-iku1", {}, "top_k="),
]  # fmt: skip


@pytest.mark.parametrize(("name", "say", "keyword"), ASKED)
def test_what_a_file_does_not_say_is_asked_for_by_keyword(
    name: str, say: dict[str, Any], keyword: str, tmp_path: Path
) -> None:
    """Nothing is guessed."""
    with pytest.raises(lab.ArgumentError, match=rf"does not say .*{keyword} or config="):
        lab.load_trace(named(name).write(tmp_path), **say)


def test_a_keyword_without_a_use_is_refused(tmp_path: Path) -> None:
    with pytest.raises(lab.ArgumentError, match="'vllm' has no use for windows="):
        lab.load_trace(named("vllm-npy").write(tmp_path), config=goldens.CONFIG, windows=1)


def test_config_is_a_dict_a_file_a_folder_or_a_model(tmp_path: Path) -> None:
    """All say the same."""
    import json

    path = named("vllm-npy").write(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(goldens.CONFIG))
    for config in (goldens.CONFIG, tmp_path / "config.json", str(tmp_path)):
        trace = lab.load_trace(path, config=config)
        assert (trace.moe_layers, len(trace.layers), trace.num_experts) == (list(MOE), 4, 5)
        assert trace.meta["config"] == goldens.CONFIG and trace.ids == [-1] * 6
    with lab.open() as model:
        routes = np.zeros((3, len(model.config.moe_layers), model.config.top_k), np.int16)
        routes[...] = np.arange(model.config.top_k)
        np.save(tmp_path / "own.npy", routes)
        trace = lab.load_trace(tmp_path / "own.npy", config=model)
        assert trace.moe_layers == list(model.config.moe_layers) and trace.top_k == model.config.top_k


CONFIGS = [
    ({"model_type": "mixtral", "num_hidden_layers": 3, "num_local_experts": 4, "num_experts_per_tok": 2}, [0, 1, 2]),
    ({"num_hidden_layers": 5, "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 2,
      "mlp_only_layers": [3]}, [1]),
    ({"num_hidden_layers": 6, "moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1, "moe_layer_end_index": 4,
      "moe_layer_interval": 2}, [1, 3]),
    ({"num_hidden_layers": 3, "num_experts": 4, "num_experts_per_tok": 2,
      "mlp_layer_types": ["dense", "sparse", "sparse"]}, [1, 2]),
    ({"text_config": {"num_hidden_layers": 4, "num_local_experts": 4, "num_experts_per_tok": 1,
                      "moe_layers": [1, 3]}}, [1, 3]),
    ({"n_layers": 2, "model_type": "dbrx", "ffn_config": {"moe_num_experts": 4, "moe_top_k": 2}}, [0, 1]),
    ({"model_type": "something_new", "num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2}, None),
]  # fmt: skip


@pytest.mark.parametrize(("config", "expected"), CONFIGS)
def test_the_layers_with_experts_follow_from_the_config(config: dict[str, Any], expected: Any) -> None:
    """By the field that says so; a model type that is not known gives none, and layers= is asked for."""
    said = formats.said(config=config)
    assert said.moe_layers == (None if expected is None else tuple(expected)) and said.num_experts == 4


def test_ranks_with_tokens_of_their_own_are_joined_and_copies_count_once() -> None:
    """Several ranks of one recording: tensor-parallel copies once, data-parallel ranks one after the other."""
    files = [goldens.FIXTURES / f"sglang_per_token_{n}.pt" for n in ("0", "1_same", "1_other")]
    say = {"layers": [1, 2], "top_k": 2}
    one = lab.load_trace(files[0], **say)
    assert one.ids == [11, 12, 13, 14] and one.passes == [(0, 3), (3, 4)]
    assert one["positions"].tolist() == [0, 1, 2, 3]
    assert np.array_equal(one["layers.1.moe.expert_ids"], goldens.RECORDED[:, 0])
    assert lab.load_trace(files[:2], **say).ids == one.ids
    both = lab.load_trace([files[0], files[2]], **say)
    assert both.ids == [11, 12, 13, 31, 32, 33, 14, 34]
    assert np.array_equal(lab.routing.load(both), 2 * lab.routing.load(one))
    counts = lab.load_trace(goldens.FIXTURES / "sglang_per_pass_0.pt", **say)
    assert np.array_equal(lab.routing.load(counts), lab.routing.load(one))


def test_a_kl_base_has_log_probabilities_where_recorded_and_nothing_else(tmp_path: Path) -> None:
    """Rows of the second half of each window; the others are NaN and marked."""
    path = named("kl-base").write(tmp_path)
    trace = lab.load_trace(path)
    recorded = trace["logits.recorded"]
    assert recorded.tolist() == [False, False, False, True, True, False] * 2
    assert np.isnan(trace["logits"][~recorded]).all()
    expected = goldens.kl_logits().reshape(-1, goldens.KL_WORDS)
    assert np.abs(trace["logits"][recorded] - expected).max() < 1e-4
    second = lab.load_trace(path, windows=[1])
    assert second.ids == goldens.KL_IDS[6:] and np.array_equal(second["logits"][3], trace["logits"][9])
    with pytest.raises(lab.ArgumentError, match="no window 2; windows are 0 to 1"):
        lab.load_trace(path, windows=2)


def test_both_forms_of_the_debugger_give_the_same_taps(tmp_path: Path) -> None:
    """Printed numbers have 4 decimals, files all bits; names, shapes, ids and choices are the same."""
    printed = lab.load_trace(named("debugger-printed").write(tmp_path))
    files = lab.load_trace(named("debugger-files").write(tmp_path))
    assert set(printed) == set(files) and printed.moe_layers == [0, 1] and printed.meta["printed"]
    some = {"embed", "norm", "logits", "layers.1.output", "layers.0.moe.router_logits", "layers.0.moe.gates"}
    assert some <= set(files)
    for path in files:
        assert np.allclose(printed[path], files[path], rtol=1e-3, atol=1e-4), path
    logits, ids = files["layers.0.moe.router_logits"], files["layers.0.moe.expert_ids"]
    assert np.array_equal(ids, np.argsort(-logits, axis=1)[:, :2])


def test_an_imatrix_keeps_mean_squares_and_the_older_form_only_these(tmp_path: Path) -> None:
    """NaN for an expert without a token; the older form has lost its counts and says so."""
    trace = lab.load_trace(named("imatrix").write(tmp_path), top_k=2)
    used = goldens.COUNTS[1] > 0
    squares = trace["layers.2.moe.input_mean_square"]
    assert np.array_equal(squares[used], np.arange(20.0).reshape(5, 4)[used]) and np.isnan(squares[~used]).all()
    assert trace.meta["tokens_counted"] == 6 and trace.meta["counts_exact"]
    older = lab.load_trace(named("imatrix-dat").write(tmp_path), config=goldens.CONFIG)
    assert np.isnan(older["layers.2.moe.input_mean_square"][3]).all()
    assert older["layers.1.moe.input_mean_square"][1].tolist() == [2.0, 2.5, 3.0, 3.5]
    with pytest.raises(lab.NotCapturedError):
        lab.routing.load(older)


def test_a_route_trace_keeps_passes_and_gates(tmp_path: Path) -> None:
    trace = lab.load_trace(named("route-trace").write(tmp_path), config=goldens.CONFIG)
    assert trace.passes == [(0, 4), (4, 5), (5, 6)] and trace.ids == [-1] * 6
    assert np.array_equal(np.stack([trace[f"layers.{n}.moe.gates"] for n in MOE], axis=1), goldens.GATES)


def test_a_payload_that_begins_later_leaves_the_first_rows_missing(tmp_path: Path) -> None:
    """`start=` of SGLang: rows before it are −1, not invented."""
    path = tmp_path / "payload"
    path.write_bytes(goldens.sglang_payload(goldens.ROUTES[2:]))
    trace = lab.load_trace(path, config=goldens.CONFIG, start=2, ids=[*goldens.IDS, 8])
    got = trace["layers.2.moe.expert_ids"]
    assert (got[:2] == -1).all() and (got[6] == -1).all() and np.array_equal(got[2:6], goldens.ROUTES[2:, 1])


def test_a_minus_one_that_wrapped_in_unsigned_ids_is_missing(tmp_path: Path) -> None:
    """vLLM narrows its buffer: in uint8, −1 is 255, which names no expert here; other types are widened as they are."""
    path = tmp_path / "routes.npy"
    for dtype in (np.uint8, np.int16, np.int64, np.uint16, ">i4"):
        path.write_bytes(goldens.npy_bytes(goldens.all_layers(goldens.CACHED).astype(dtype)))
        trace = lab.load_trace(path, config=goldens.CONFIG)
        got = np.stack([trace[f"layers.{layer}.moe.expert_ids"] for layer in MOE], axis=1)
        assert got.dtype == np.int32 and np.array_equal(got, goldens.CACHED)


def test_a_long_text_is_read_in_a_stream_and_tells_its_progress(tmp_path: Path) -> None:
    """Memory is that of the result and one line, not that of the text; the caller hears how far it is."""
    import tracemalloc

    path, passes = tmp_path / "long.txt", 14_000
    slots = " ".join(f"{expert}:0.1250" for expert in range(1, 9))
    with path.open("w") as file:
        for call in range(passes):
            file.write(f"{call} 0 0 {slots}\n")
    told: list[float] = []
    tracemalloc.start()
    try:
        trace = lab.load_trace(path, experts=9, progress=lambda done: told.append(done))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(trace.passes) == passes and trace["layers.0.moe.expert_ids"][-1].tolist() == list(range(1, 9))
    assert path.stat().st_size > 1 << 20 and told == sorted(told) and 0 < told[0] < 1
    assert peak < 600 * passes  # ids and gates twice for a moment, and what the trace keeps of a pass
