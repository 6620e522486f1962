"""Recording under hostile circumstances: padding, renamed logits, modules that hide, interruptions, wrong requests."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from checkpoints import small_config
from compare import TIE, assert_agrees, errors, relative_error

import colibri_lab as lab

pytestmark = pytest.mark.torch

FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
BUNDLED = Path(lab.__file__).parent / "bundled" / "tiny-colibri"
SIZES = {"hidden_size": 64, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
IDS = np.random.default_rng(0).integers(0, 61, 40).tolist()


@pytest.fixture(scope="module")
def hf():
    import huggingface

    return huggingface


def build(hf, family="mixtral", dtype="float32", **options):
    """A small model as a user holds it: sdpa, the default experts, weights drawn."""
    config = small_config(family) | SIZES | ({"moe_intermediate_size": 32} if "qwen" in family else {}) | options
    settings = {key: value for key, value in config.items() if key not in ("model_type", "architectures")}
    model = hf.AutoModelForCausalLM.from_config(hf.AutoConfig.for_model(family, **settings), dtype=hf.torch.float32)
    hf.randomise(model, 1)
    return model.to(getattr(hf.torch, dtype)).eval()


@pytest.fixture(scope="module")
def mixtral(hf):
    return build(hf)


def state(model) -> tuple:
    """What recording must leave as it found it."""
    hooks = [
        (len(module._forward_hooks), len(module._forward_pre_hooks), module.training) for module in model.modules()
    ]
    rotary = sys.modules[type(model.model.layers[0].self_attn).__module__].apply_rotary_pos_emb
    config = model.config
    settings = (config._attn_implementation, config._experts_implementation, config.output_router_logits)
    weights = [parameter.data_ptr() for parameter in model.parameters()]
    return hooks, rotary, settings, weights


# ---- J1: padding ----


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_J1_padding_is_in_no_row_and_moves_no_position(hf, family, side):
    """ids [5, 6] and [7, 8, 9, 10, 11], padded with 0: each trace is that of the sequence alone."""
    model = build(hf, family)
    pad = [0, 0, 0]
    short = [*pad, 5, 6] if side == "left" else [5, 6, *pad]
    mask = [int(token != 0) for token in short]
    batch = {
        "input_ids": hf.torch.tensor([short, [7, 8, 9, 10, 11]]),
        "attention_mask": hf.torch.tensor([mask, [1] * 5]),
    }
    traces = lab.record.transformers(model, batch, capture="all")
    for trace, ids in zip(traces, ([5, 6], [7, 8, 9, 10, 11]), strict=True):
        alone = lab.record.transformers(model, ids, capture="all")
        assert trace.ids == ids and trace.passes == [(0, len(ids))]
        assert list(trace) == list(alone) and all(trace[path].tobytes() == alone[path].tobytes() for path in trace)
        assert (lab.routing.load(trace).sum(-1) == len(ids) * trace.top_k).all()


def test_J1_the_padded_batch_itself_gives_the_same_logits(hf, mixtral):
    """transformers' own padded run with right positions is within rounding; with positions from the pad it is not."""
    torch = hf.torch
    ids, mask = torch.tensor([[0, 0, 0, 5, 6]]), torch.tensor([[0, 0, 0, 1, 1]])
    ours = lab.record.transformers(mixtral, {"input_ids": ids, "attention_mask": mask}, capture="logits")["logits"]
    with torch.no_grad():
        right = mixtral(ids, attention_mask=mask, position_ids=torch.tensor([[0, 0, 0, 0, 1]])).logits[0, 3:].numpy()
        attended = mixtral(ids).logits[0, 3:].numpy()
    assert relative_error(ours, right) < 1e-5
    assert relative_error(ours, attended) > 1e-2


# ---- J2: cached and full ----


@pytest.mark.parametrize("family", FAMILIES)
def test_J2_a_cached_run_differs_from_the_recording_by_rounding_and_a_shifted_one_by_far_more(hf, family):
    """Noise and fault are orders of magnitude apart, so that a tolerance can stand between them."""
    torch, model, ids = hf.torch, build(hf, family), IDS[:9]
    trace = lab.record.transformers(model, ids, capture="all")
    for sizes in ([8, 1], [1] * 9, [4, 5]):
        cached, past, start = [], None, 0
        with torch.no_grad():
            for size in sizes:
                out = model(torch.tensor([ids[start : start + size]]), cache=past, use_cache=True)
                cached, past, start = [*cached, *out.logits[0].numpy()], out.cache, start + size
        assert relative_error(trace["logits"], np.array(cached)) < 1e-5
    with torch.no_grad():
        shifted = model(torch.tensor([ids]), position_ids=torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 9]])).logits[0].numpy()
    assert relative_error(trace["logits"][-1], shifted[-1]) > 1e-3


# ---- J5: what is called router_logits ----


class Probabilities:
    """A router as one release had it: a softmax under the name of the logits, and no product to be seen."""

    def __init__(self, torch, router, weight=True):
        class Router(torch.nn.Module):
            def __init__(self):
                super().__init__()
                if weight:
                    self.weight = router.weight
                self.held = [router]

            def forward(self, x):
                x = x.reshape(-1, x.shape[-1])
                p = torch.softmax((x @ router.weight.T).float(), -1)
                gates, ids = p.topk(router.top_k, -1)
                return p, gates / gates.sum(-1, keepdim=True), ids

        self.module = Router()


@pytest.mark.parametrize("family", FAMILIES)
def test_J5_the_logits_are_logits_and_the_scores_sum_to_one(hf, family):
    """Also where a layer is dense; the rows are those of the tokens, one router per MoE layer."""
    options = {"mlp_only_layers": [0], "num_hidden_layers": 3} if "qwen" in family else {}
    trace = lab.record.transformers(build(hf, family, **options), IDS, capture="routing")
    assert trace.moe_layers == ([1, 2] if options else [0, 1])
    for layer in trace.moe_layers:
        logits, scores = trace[f"layers.{layer}.moe.router_logits"], trace[f"layers.{layer}.moe.scores"]
        assert logits.shape == (len(IDS), trace.num_experts)
        assert (abs(logits.sum(-1) - 1) > 1e-2).any() and (logits < 0).any()
        np.testing.assert_allclose(scores.sum(-1), 1, atol=1e-5)
        exps = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
        np.testing.assert_allclose(scores, exps / exps.sum(-1, keepdims=True), atol=1e-6)


def test_J5_probabilities_under_the_name_of_logits_are_recognised_and_the_logits_computed(hf):
    model = build(hf)
    expected = lab.record.transformers(model, IDS, capture="moe")
    for layer in model.model.layers:
        layer.mlp.gate = Probabilities(hf.torch, layer.mlp.gate).module
    trace = lab.record.transformers(model, IDS, capture="moe")
    assert_agrees(trace, {path: expected[path] for path in expected if ".dispatch." not in path})


def test_J5_probabilities_without_a_weight_are_refused_by_name(hf):
    model = build(hf)
    model.model.layers[1].mlp.gate = Probabilities(hf.torch, model.model.layers[1].mlp.gate, weight=False).module
    with pytest.raises(lab.UnsupportedError, match=r"layer 1: the router Router returned probabilities .*not logits"):
        lab.record.transformers(model, IDS)


def test_J5_the_library_is_never_asked_for_router_logits(hf, mixtral):
    """What the model is called with, whatever its configuration says of them."""
    seen = []
    handle = mixtral.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True)
    lab.record.transformers(mixtral, IDS)
    handle.remove()
    assert [sorted(kwargs) for kwargs in seen] == [["input_ids", "position_ids", "use_cache"]]


# ---- modules that never run, or twice ----


@pytest.mark.parametrize(
    ("hide", "capture", "sentence"),
    [
        ("router", "routing", r"captured 0 rows of 'layers\.1\.moe\.\w+'.*model\.layers\.1\.mlp\.gate .* never ran"),
        ("attention", "*.attn.q", r"captured 0 rows of 'layers\.1\.attn\.q': apply_rotary_pos_emb of .*never ran"),
        ("norm", "all", r"captured 0 rows of 'norm': model\.norm never ran"),
        ("block", "moe", r"captured 0 rows of 'layers\.1\.moe\.\w+.*model\.layers\.1\.mlp.* never ran"),
    ],
)
def test_a_module_that_never_runs_is_an_error_that_names_it(hf, hide, capture, sentence):
    """As compiled and fused code does: the numbers come from elsewhere, and no hook fires."""
    model = build(hf)
    layer = model.model.layers[1]
    hidden = {"router": layer.mlp.gate, "norm": model.model.norm, "block": layer.mlp}
    if hide == "attention":
        layer.self_attn.forward = lambda hidden_states, **kwargs: (hidden_states, None)
    else:
        module = hidden[hide]
        module.__class__ = type("Compiled", (type(module),), {"__call__": type(module).forward})
        if hide == "router":  # and its product and choice are none that can be seen
            module.forward = None
            type(module).__call__ = lambda gate, x: (None, *_routing(hf.torch, gate, x))
    before = state(model)
    with pytest.raises(lab.UnsupportedError, match=sentence):
        lab.record.transformers(model, IDS, capture=capture)
    assert state(model) == before


def _routing(torch, gate, x):
    p = torch.softmax((x.reshape(-1, x.shape[-1]) @ gate.weight.T).float(), -1)
    order = p.argsort(-1, descending=True)[:, : gate.top_k]
    gates = p.gather(-1, order)
    return gates / gates.sum(-1, keepdim=True), order


def test_a_layer_that_runs_twice_is_an_error_that_names_it(hf):
    model = build(hf)
    model.model.layers[1] = model.model.layers[0]
    with pytest.raises(lab.UnsupportedError, match=r"recorded twice in one pass: model\.layers\.0"):
        lab.record.transformers(model, IDS)


def test_an_implementation_that_hides_its_products_has_its_rows_computed_again(hf):
    """Experts through one einsum: the trace holds the same rows and says so."""
    torch, model = hf.torch, build(hf)
    expected = lab.record.transformers(model, IDS, capture="all")

    def hidden(experts):
        def forward(x, ids, gates):
            gate, up = torch.einsum("th,eih->tei", x, experts.gate_up_proj).chunk(2, -1)
            out = torch.einsum("tei,ehi->teh", experts.act_fn(gate) * up, experts.down_proj)
            return (out.gather(1, ids[..., None].expand(-1, -1, x.shape[-1])) * gates[..., None]).sum(1).to(x.dtype)

        return forward

    for layer in model.model.layers:
        layer.mlp.experts.forward = hidden(layer.mlp.experts)
    trace = lab.record.transformers(model, IDS, capture="all")
    assert trace.meta["library"]["expert_rows"] == "recomputed"
    assert expected.meta["library"]["expert_rows"] == "observed"
    rows = [
        f"layers.{layer}.moe.experts.{expert}.{tap}"
        for layer in trace.moe_layers
        for expert in range(trace.num_experts)
        for tap in ("tokens", "input", "gate", "up", "hidden", "output")
    ]
    assert_agrees(trace, {path: expected[path] for path in [*rows, "logits"]})


@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
def test_a_changed_computation_is_seen_as_it_was(hf, experts):
    """Rows are those the model used: an activation swapped for another shows in `hidden`, not in gate and up."""
    model = build(hf)
    model.set_experts_implementation(experts)
    expected = lab.record.transformers(model, IDS, capture="all")
    model.model.layers[0].mlp.experts.act_fn = hf.torch.nn.GELU()
    trace = lab.record.transformers(model, IDS, capture="all")
    found = errors(trace, {path: expected[path] for path in expected if path.startswith("layers.0.moe")})
    assert {path.rpartition(".")[2] for path, error in found.items() if error > 1e-3} == {"hidden", "output", "routed"}


# ---- the model afterwards ----


@pytest.mark.parametrize("training", [False, True])
def test_hooks_modes_and_implementations_are_as_before_and_dropout_plays_no_part(hf, training):
    model = build(hf, attention_dropout=0.5).train(training)
    model.model.layers[0].eval()  # not all of it trains
    before, gradients = state(model), [parameter.requires_grad for parameter in model.parameters()]
    first, second = (lab.record.transformers(model, IDS, capture="all") for _ in range(2))
    assert state(model) == before and [parameter.requires_grad for parameter in model.parameters()] == gradients
    assert all(first[path].tobytes() == second[path].tobytes() for path in first)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of the library, about how it is turned on
def test_gradient_checkpointing_changes_nothing(hf):
    model = build(hf)
    plain = lab.record.transformers(model, IDS)
    model.gradient_checkpointing_enable()
    model.train()
    checkpointed = lab.record.transformers(model, IDS)
    assert model.is_gradient_checkpointing and model.training
    assert all(plain[path].tobytes() == checkpointed[path].tobytes() for path in plain)


def test_an_error_inside_the_model_leaves_it_as_it_was(hf):
    model = build(hf)
    original = model.model.layers[1].mlp.experts.forward
    model.model.layers[1].mlp.experts.forward = lambda *args: (_ for _ in ()).throw(RuntimeError("no memory"))
    before = state(model)
    with pytest.raises(RuntimeError, match="no memory"):
        lab.record.transformers(model, IDS)
    assert state(model) == before
    model.model.layers[1].mlp.experts.forward = original
    assert len(lab.record.transformers(model, IDS).ids) == len(IDS)


def test_ctrl_c_ends_a_recording_and_leaves_the_model_usable(hf):
    model = build(hf, num_hidden_layers=4)
    expected = lab.record.transformers(model, IDS)
    calls = []

    def press(module, args):
        calls.append(1)
        if len(calls) == 1:
            signal.raise_signal(signal.SIGINT)

    handle = model.model.layers[2].mlp.register_forward_pre_hook(press)
    before = state(model)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            lab.record.transformers(model, IDS)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert state(model) == before and calls
    again = lab.record.transformers(model, IDS)
    handle.remove()
    assert all(expected[path].tobytes() == again[path].tobytes() for path in expected)


def test_another_thread_may_run_the_model_meanwhile(hf, mixtral):
    """Its values are in no trace, and its output is its own."""
    other = build(hf)
    expected = lab.record.transformers(mixtral, IDS, capture="all")
    row, stop, wrong = hf.torch.tensor([IDS[:7]]), threading.Event(), []
    with hf.torch.no_grad():
        answer = other(row).logits.numpy().tobytes()

    def run():
        with hf.torch.no_grad():
            while not stop.is_set():
                wrong.extend([1] * (other(row).logits.numpy().tobytes() != answer))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        for _ in range(5):
            trace = lab.record.transformers(mixtral, IDS, capture="all")
            assert all(trace[path].tobytes() == expected[path].tobytes() for path in expected)
    finally:
        stop.set()
        thread.join()
    assert not wrong


# ---- what it is of ----


@pytest.mark.parametrize("capture", ["routing", "moe", "all"])
def test_the_bundled_models_trace_has_the_paths_and_numbers_of_the_engines(hf, capture):
    text = "Once upon a time there was a little bird"
    session = lab.open().session(capture=capture)
    session.feed(text)
    trace, own = lab.record.transformers(lab.open(), text, capture=capture), session.trace()
    cache = {path for path in own if path.endswith((".attn.k", ".attn.v"))} if capture != "all" else set()
    assert set(trace) == set(own) - cache
    assert trace.ids == own.ids and trace.texts == own.texts and trace.passes == own.passes
    for path in trace:
        assert trace[path].shape == own[path].shape and trace[path].dtype == own[path].dtype, path
    assert lab.routing.margin(own).min() > TIE
    assert_agrees(trace, {path: own[path] for path in trace if ".dispatch." not in path})
    same = ("model_type", "model_identity", "num_experts", "top_k", "gate_rule", "moe_layers", "num_hidden_layers")
    for name in same:
        assert trace.meta[name] == own.meta[name], name


def test_meta_says_who_made_it_and_how(hf, tmp_path):
    build(hf, "qwen3_moe", "bfloat16", norm_topk_prob=True).save_pretrained(tmp_path / "checkpoint")
    trace = lab.record.transformers(tmp_path / "checkpoint", [1, 2, 3])
    meta = trace.meta
    assert (meta["producer"], meta["producer_version"]) == ("transformers", hf.transformers.__version__)
    assert (meta["arithmetic"], meta["weights_dtype"]) == ("float32", "bfloat16")
    assert meta["gate_rule"] == "softmax_renormalised" and meta["config"]["norm_topk_prob"] is True
    assert meta["capture"] == ["moe"] and meta["edits"] == []
    library = {"transformers": hf.transformers.__version__, "torch": hf.torch.__version__, "device": "cpu"}
    assert library.items() <= meta["library"].items() and meta["library"]["attention"] == "sdpa"
    assert str(tmp_path) not in json.dumps(meta)
    trace.save(tmp_path / "run.safetensors")
    back = lab.load_trace(tmp_path / "run.safetensors")
    assert back.meta["library"] == meta["library"] and back.meta["config"] == meta["config"]
    assert all(back[path].tobytes() == trace[path].tobytes() for path in trace)


def test_narrow_values_are_widened_exactly(hf):
    """Every float32 of a bfloat16 recording is a bfloat16 value, except what the model itself computes in float32."""
    trace = lab.record.transformers(build(hf, dtype="bfloat16"), IDS, capture="all")
    assert trace.meta["arithmetic"] == trace.meta["weights_dtype"] == "bfloat16"
    wide = ("scores", "gates", "expert_ids", "dispatch.tokens", "dispatch.offsets")
    for path in trace:
        if not path.endswith(wide):
            assert not (np.ascontiguousarray(trace[path]).view(np.uint32) & 0xFFFF).any(), path


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_folder_in_another_arithmetic_is_that_of_the_model_loaded_so(hf, tmp_path, dtype):
    build(hf).save_pretrained(tmp_path)
    model = hf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=getattr(hf.torch, dtype))
    asked, loaded = lab.record.transformers(tmp_path, IDS, dtype=dtype), lab.record.transformers(model, IDS)
    assert asked.meta["arithmetic"] == loaded.meta["arithmetic"] == dtype
    assert all(asked[path].tobytes() == loaded[path].tobytes() for path in asked)


def test_a_loaded_model_finds_the_tokenizer_of_its_folder(hf):
    model = hf.AutoModelForCausalLM.from_pretrained(BUNDLED)
    trace = lab.record.transformers(model, "Once upon")
    assert trace.ids == lab.open().tokenizer.encode("Once upon") and "".join(trace.texts).endswith("Once upon")


def test_several_texts_give_one_trace_each_and_one_row_gives_one(hf):
    model = hf.AutoModelForCausalLM.from_pretrained(BUNDLED)
    first, second = lab.record.transformers(model, ["Once upon a time", "Once"], capture="routing")
    assert len(first.ids) > len(second.ids) and second.ids == lab.open().tokenizer.encode("Once")
    assert isinstance(lab.record.transformers(model, [first.ids], capture="routing"), lab.Trace)


def test_progress_rises_to_one(hf, mixtral):
    seen = []
    lab.record.transformers(mixtral, [IDS, IDS[:3]], progress=seen.append)
    assert seen == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_attention_weights_are_those_of_eager_attention(hf, family, attention):
    window = {"mixtral": {"sliding_window": 7}, "olmoe": {}}.get(
        family, {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
    )
    model = build(hf, family, **window)
    model.set_attn_implementation("eager")
    with hf.torch.no_grad():
        expected = model(hf.torch.tensor([IDS]), output_attentions=True).attentions
    model.set_attn_implementation(attention)
    trace = lab.record.transformers(model, IDS, capture="layers.*.attn.weights")
    assert list(trace) == [f"layers.{layer}.attn.weights" for layer in range(2)]
    for layer, weights in enumerate(expected):
        np.testing.assert_allclose(trace[f"layers.{layer}.attn.weights"], weights[0].numpy(), atol=1e-6)


# ---- refusals ----


def test_a_family_that_is_unknown_is_refused_with_those_that_are(hf, tmp_path):
    config = hf.AutoConfig.for_model(
        "llama", hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        intermediate_size=16, vocab_size=20,
    )  # fmt: skip
    model = hf.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    sentence = "'llama'; the recorder knows mixtral, olmoe, qwen2_moe, qwen3_moe"
    for what in (model, tmp_path):
        with pytest.raises(lab.UnsupportedError, match=sentence):
            lab.record.transformers(what, [1])


@pytest.mark.parametrize(
    ("model", "inputs", "options", "error", "sentence"),
    [
        ("loaded", [1], {"dtype": "bfloat16"}, lab.ArgumentError, "a model that is loaded is never cast"),
        ("loaded", [1], {"dtype": "int8"}, lab.ArgumentError, "one of float32, bfloat16, float16, not 'int8'"),
        ("loaded", [1], {"device": "cpu"}, lab.ArgumentError, "device= is for a checkpoint's folder"),
        ("loaded", "a text", {}, lab.ArgumentError, "a text needs the checkpoint's tokenizer"),
        ("loaded", [61], {}, lab.ArgumentError, "token id 61 is outside the vocabulary of 61"),
        ("loaded", [1], {"capture": "none"}, lab.ArgumentError, "would record nothing"),
        ("loaded", [1], {"capture": "layers.2.*"}, lab.ArgumentError, "names no tap of this model"),
        (BUNDLED, [1], {"device": "nowhere"}, lab.ArgumentError, "cannot go to the device 'nowhere'"),
        ("no/such/folder", [1], {}, lab.FileError, "there is nothing at 'no/such/folder'"),
        (BUNDLED / "tokenizer.json", [1], {"capture": "all", "dtype": 3}, lab.ArgumentError, "not 3"),
        (7, [1], {}, lab.ArgumentError, "a path is a text"),
    ],
)
def test_a_request_that_cannot_be_met_is_refused_in_one_sentence(hf, mixtral, model, inputs, options, error, sentence):
    before = state(mixtral)
    with pytest.raises(error) as caught:
        lab.record.transformers(mixtral if model == "loaded" else model, inputs, **options)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)
    assert state(mixtral) == before


def test_a_recording_inside_a_recording_is_refused_and_the_outer_one_can_go_on(hf, mixtral):
    """It would wait for itself."""
    inner: list[str] = []

    def nested(fraction):
        with pytest.raises(lab.BusyError, match="runs on this thread already") as caught:
            lab.record.transformers(build(hf), [1])
        inner.append(str(caught.value))

    trace = lab.record.transformers(mixtral, [1, 2], progress=nested)
    assert inner and trace.ids == [1, 2]
    assert lab.record.transformers(mixtral, [3]).ids == [3]


@pytest.mark.parametrize("place", ["mlp", "mlp.experts"])
def test_a_wrapper_around_a_block_or_its_experts_is_refused_by_name(hf, place):
    """Its layer is not taken for a dense one."""
    model = build(hf)
    layer = model.model.layers[0]

    class Wrapper(hf.torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, *args, **kwargs):
            return self.inner(*args, **kwargs)

    layer.set_submodule(place, Wrapper(layer.get_submodule(place)))
    with pytest.raises(lab.UnsupportedError, match=rf"model\.layers\.0\.{place} \(Wrapper\).*wrapper around"):
        lab.record.transformers(model, [1])


@pytest.mark.parametrize("kind", ["meta", "sparse"])
def test_a_tensor_without_readable_rows_is_refused(hf, mixtral, kind):
    ids = hf.torch.tensor([[1, 2]])
    with pytest.raises(lab.ArgumentError, match="cannot be read as rows of numbers"):
        lab.record.transformers(mixtral, ids.to("meta") if kind == "meta" else ids.to_sparse())


def test_something_that_is_no_language_model_is_refused(hf):
    with pytest.raises(lab.ArgumentError, match="takes a model of transformers or the folder of a checkpoint"):
        lab.record.transformers(hf.torch.nn.Linear(2, 2), [1])


def test_weights_that_the_library_would_draw_at_random_are_an_error(hf, tmp_path):
    import safetensors.numpy

    model = build(hf)
    model.save_pretrained(tmp_path)
    tensors = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    del tensors["lm_head.weight"]
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(lab.FormatError, match=r"lacks weights.*lm_head\.weight"):
        lab.record.transformers(tmp_path, [1])


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_broken_folder_is_an_error_that_names_it(hf, tmp_path, name):
    build(hf).save_pretrained(tmp_path)
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:40])
    with pytest.raises(lab.ColibriError) as caught:
        lab.record.transformers(tmp_path, [1])
    assert tmp_path.name in str(caught.value) and "\n" not in str(caught.value)


# ---- the command line ----


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "colibri_lab.record", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_the_command_line_writes_the_trace_of_the_function(hf, tmp_path):
    out = tmp_path / "run.safetensors"
    done = run(str(BUNDLED), "--text", "Once upon", "--out", str(out), "--capture", "routing", "--capture", "norm")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{out}: <Trace of ") and len(done.stdout.splitlines()) == 1
    trace = lab.load_trace(out)
    expected = lab.record.transformers(BUNDLED, "Once upon", capture=["routing", "norm"])
    assert trace.ids == expected.ids and set(trace) == set(expected)
    assert_agrees(trace, dict(expected))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere", "--ids", "1", "--out", "x.safetensors"], "colibri-lab: there is nothing at 'nowhere'"),
        ([str(BUNDLED), "--ids", "1", "--out", "no/such/x.safetensors"], "'no/such' is no folder to write into"),
        ([str(BUNDLED), "--ids", "99999", "--out", "x.safetensors"], "token id 99999 is outside the vocabulary"),
        ([str(BUNDLED), "--ids", "1", "--out", "x.safetensors", "--device", "cuda:99"], "cannot go to the device"),
    ],
)
def test_the_command_line_fails_with_1_and_one_sentence(tmp_path, monkeypatch, arguments, sentence):
    done = run(*arguments)
    assert done.returncode == 1 and not done.stdout and not Path("x.safetensors").exists()
    assert sentence in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr
