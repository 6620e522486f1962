"""Opening checkpoints: the bundled one and paths, configuration, weights, closing, and what a wrong path is told."""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from checkpoints import read_safetensors, write_safetensors

import colibri_lab as lab
from colibri_lab.testing import synthetic_trace, tiny_model

ROOT = Path(__file__).parents[1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_model(tmp_path / "tiny")


def test_without_a_path_the_bundled_model_opens() -> None:
    """It has a tokenizer, end tokens, and the sizes of its config.json."""
    model = lab.open()
    assert model.config.model_type == "mixtral" and model.config.num_experts == 8 and model.config.top_k == 2
    assert model.tokenizer is not None and model.end_ids == (1,)
    assert "mixtral" in repr(model) and "8 experts" in repr(model)


@pytest.mark.parametrize("of", ["folder", "text", "file", "index"])
def test_a_path_may_be_a_folder_a_file_or_an_index(tmp_path: Path, of: str) -> None:
    """str and PathLike; a .safetensors or index file stands beside its config.json. All give the same model."""
    folder = tiny_model(tmp_path / "m", sharded=of == "index")
    path = {
        "folder": folder, "text": str(folder), "file": folder / "model.safetensors",
        "index": folder / "model.safetensors.index.json",
    }[of]  # fmt: skip
    model, whole = lab.open(path), lab.open(tiny_model(tmp_path / "single"))
    assert list(model.weights) == list(whole.weights)
    assert all(np.array_equal(model.weights[name], whole.weights[name]) for name in model.weights)
    assert model.folder == folder and model.tokenizer is None


def test_a_wrong_path_is_told_what_lies_nearby(tmp_path: Path, folder: Path) -> None:
    """The error names the path and similar names beside it."""
    with pytest.raises(lab.FileError, match=r"nothing at '.*tinny'; near it there is '.*tiny'"):
        lab.open(tmp_path / "tinny")
    with pytest.raises(OSError, match="nothing at"):
        lab.open(tmp_path / "deep" / "down" / "here")


def test_a_name_on_a_hub_is_told_that_nothing_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`owner/name` is no folder here, and what happens to lie in the current folder is no help."""
    monkeypatch.chdir(tmp_path)
    tiny_model(tmp_path / "tiny")
    with pytest.raises(lab.FileError, match=r"nothing at 'owner/some-moe'; .*download it to a folder first"):
        lab.open("owner/some-moe")


@pytest.mark.parametrize("beside", [True, False])
def test_a_trace_opened_as_a_model_is_told_to_be_a_trace(tmp_path: Path, folder: Path, beside: bool) -> None:
    """Alone, and where a config.json lies beside it; doctor says the same."""
    run = (folder if beside else tmp_path) / "run.safetensors"
    synthetic_trace(2, 4, 2, 5).save(run)
    with pytest.raises(lab.FormatError, match=r"run\.safetensors' is a trace of a run.*lab\.load_trace\("):
        lab.open(run)
    assert any("load_trace" in problem for problem in lab.doctor(run).problems)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "pytorch_model.bin", "model.safetensors"])
def test_a_single_file_of_a_checkpoint_is_told_the_folder(tmp_path: Path, name: str) -> None:
    """Whether the file is there and holds no weights, or is missing where the weights are in shards."""
    folder = tiny_model(tmp_path / "m", sharded=True)
    if name in ("tokenizer.json", "pytorch_model.bin"):
        (folder / name).write_text("{}")
    with pytest.raises(lab.ColibriError, match=re.escape(f"lab.open('{folder}')")):
        lab.open(folder / name)


def test_weights_without_a_config_are_told_what_a_model_needs(tmp_path: Path, folder: Path) -> None:
    """The file is named, and what should lie beside it."""
    shutil.copy(folder / "model.safetensors", tmp_path / "weights.safetensors")
    with pytest.raises(lab.FileError, match=r"weights\.safetensors' alone is no model.*no config\.json"):
        lab.open(tmp_path / "weights.safetensors")


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    """There is nothing to open in it, and the sentence says so."""
    (tmp_path / "empty").mkdir()
    with pytest.raises(lab.FileError, match="empty"):
        lab.open(tmp_path / "empty")


def test_the_configuration_is_read_only_and_names_the_nearest(folder: Path) -> None:
    """Entries are attributes; an unknown one is told what it may have meant; nothing can be set."""
    config = lab.open(folder).config
    assert config["hidden_size"] == config.hidden_size == 32 and config.num_hidden_layers == 2
    assert (
        config.moe_layers == (0, 1) and config.layer_types == ("full_attention",) * 2 and config.windows == (None, None)
    )
    assert config.gate_rule == "softmax_renormalised"
    assert dict(config)["vocab_size"] == 64 and "vocab_size" in config and config.get("nope") is None
    with pytest.raises(AttributeError, match="'hidden_sise'; did you mean 'hidden_size'"):
        config.hidden_sise  # noqa: B018
    with pytest.raises(KeyError):
        config["nope"]
    with pytest.raises(AttributeError, match="read-only"):
        config.hidden_size = 3
    assert "hidden_size" in dir(config) and "rms_norm_eps" in repr(config)
    assert copy.deepcopy(config) == config


def test_the_configuration_is_shown_short_and_whole(tmp_path: Path) -> None:
    """Every field once, in few lines of a hundred columns; what is off stands at the end; long lists are cut."""
    config = lab.open(tiny_model(tmp_path / "q", family="qwen2_moe", layers=40, dense_layers=(1,), window=33)).config
    lines = repr(config).splitlines()
    words = re.findall(r"\w+", repr(config))
    assert len(lines) < 16 and max(map(len, lines)) <= 100
    assert all(words.count(name) == 1 for name in config)
    assert "windows 33, None, 33" in repr(config) and "moe_layers 0, 2, 3, 4" in repr(config)
    assert "clip_qkv" in repr(config).partition("not used: ")[2]
    assert "moe_layers 0 to 5" in repr(lab.open().config) and "layer_types full_attention in all 6" in repr(
        lab.open().config
    )


def test_windows_and_dense_layers_are_told_per_layer(tmp_path: Path) -> None:
    """Which layers route, which slide, which share: by layer number."""
    config = lab.open(tiny_model(tmp_path / "w", window=33)).config
    assert config.windows == (33, 33) and set(config.layer_types) == {"sliding_attention"}
    config = lab.open(tiny_model(tmp_path / "q", family="qwen2_moe", layers=3, dense_layers=(1,))).config
    assert config.moe_layers == (0, 2) and config.shared_layers == (0, 2)


def test_weights_iterate_in_a_stated_order(folder: Path) -> None:
    """embed, norm, lm_head, then layer by layer; shapes are [out, in]; an unknown name is told the nearest."""
    weights = lab.open(folder).weights
    names = list(weights)
    assert names[:3] == ["embed", "norm", "lm_head"]
    assert names.index("layers.0.attn.q") < names.index("layers.0.moe.router") < names.index("layers.1.attn.q")
    assert names.index("layers.0.moe.experts.1.down") < names.index("layers.0.moe.experts.2.gate")
    assert weights["layers.0.moe.router"].shape == (4, 32) and weights["layers.0.moe.experts.3.down"].shape == (32, 24)
    assert len(weights) == len(names) and "embed" in weights and "x" not in weights
    with pytest.raises(lab.TapError, match=r"no weight 'layers\.0\.attn\.w'.*layers\.0\.attn\."):
        weights["layers.0.attn.w"]
    with pytest.raises(KeyError):
        weights[0]


def test_weights_lie_in_the_mapped_file(folder: Path) -> None:
    """The address of a view is the file's mapping plus the tensor's offset: no copy."""
    model = lab.open(folder)
    file = str(folder / "model.safetensors")
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(file)]
    for name in model.weights:
        view, place = model.weights[name], model.weights.describe(name)
        assert place.file == file
        lies = [int(span.split("-")[0], 16) - int(offset, 16) + place.file_offset for span, _, offset, *_ in maps]
        assert view.ctypes.data in lies, name
        assert type(view.base).__name__ == "Lease" and view.base.bytes == 0


def test_tied_embeddings_are_one_tensor_under_two_names(tmp_path: Path) -> None:
    """lm_head shows the embedding's bytes, and info counts them once."""
    model, untied = lab.open(tiny_model(tmp_path / "t", tied=True)), lab.open(tiny_model(tmp_path / "u"))
    assert model.weights["lm_head"].ctypes.data == model.weights["embed"].ctypes.data
    assert model.info["parameters"] == untied.info["parameters"] - 64 * 32


def test_info_says_what_was_opened_and_how_it_runs(folder: Path) -> None:
    """Files, bytes, parameters, dtypes, code path and threads; memory() tells mapped and resident bytes."""
    model = lab.open(folder)
    info = model.info
    stored = read_safetensors(folder / "model.safetensors")
    assert info["parameters"] == sum(t.size for t in stored.values()) and info["dtypes"] == {"float32": len(stored)}
    assert info["files"] == [str(folder / "model.safetensors")] and info["bytes"] == sum(
        t.nbytes for t in stored.values()
    )
    assert info["threads_limit"] in ("this machine", "affinity", "cgroup quota", "COLIBRI_CPUS")
    assert info["isa"] in info["isa_available"] and "scalar" in info["isa_available"] and info["threads"] >= 1
    assert info["copied_weights"] == {} and info["model_type"] == "mixtral"
    model.session(max_tokens=8).feed([1, 2, 3])
    memory, size = model.memory(), (folder / "model.safetensors").stat().st_size
    assert memory["mapped"] == size and 0 < memory["resident"] <= size + 2 * 4096


def test_layers_beyond_the_configured_ones_are_told_to_be_unused(tmp_path: Path) -> None:
    """A cut num_hidden_layers, heads for several tokens and rotary tables: in info and the doctor's notes."""
    folder = tiny_model(tmp_path / "m", layers=6)
    assert lab.open(folder).info["not_used"] == []
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    extra = {"mtp.head.weight": np.ones(2, np.float32), "model.layers.0.rotary_emb.inv_freq": np.ones(4, "f4")}
    write_safetensors(folder / "model.safetensors", {**read_safetensors(folder / "model.safetensors"), **extra})
    model, report = lab.open(folder), lab.doctor(folder)
    assert model.info["not_used"] == [
        "2 layers in the file beyond num_hidden_layers = 4 are not used",
        "1 tensor of heads that predict several tokens at once (mtp.) is not used",
        "1 stored rotary table (inv_freq; it is computed instead) is not used",
    ]
    assert report.ok and set(model.info["not_used"]) <= set(report.notes)
    assert model.session(max_tokens=4).feed([1]).logits.shape == (64,)


def misaligned(folder: Path) -> None:
    """The same tensors with a header that is no multiple of 8 long, so that data begin at an odd byte."""
    file = folder / "model.safetensors"
    raw = file.read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    header = raw[8 : 8 + length].rstrip(b" ")
    header += b" " * ((1 - (8 + len(header))) % 8)
    file.write_bytes(struct.pack("<Q", len(header)) + header + raw[8 + length :])


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
def test_C6_misaligned_tensors_have_right_values(tmp_path: Path, dtype: str) -> None:
    """Values, tokens and logits equal the aligned file's; views are aligned copies, listed with the reason."""
    right = lab.open(tiny_model(tmp_path / "right", dtype=dtype))
    odd = tiny_model(tmp_path / "odd", dtype=dtype)
    misaligned(odd)
    model = lab.open(odd)
    copied = model.info["copied_weights"]
    assert set(copied) == set(model.weights) and "not at a multiple of" in copied["embed"]
    for name in model.weights:
        view = model.weights[name]
        assert view.flags.aligned and view.tobytes() == right.weights[name].tobytes()
        with pytest.raises(ValueError, match="WRITEABLE"):
            view.setflags(write=True)
        assert np.array_equal(model.weights.float32(name), right.weights.float32(name))
    a, b = (m.session(capture="all", max_tokens=8).feed([1, 2, 3, 4]) for m in (model, right))
    assert a.logits.tobytes() == b.logits.tobytes()


def test_close_waits_for_nobody_and_is_final(folder: Path) -> None:
    """close raises while a session or a view lives, works afterwards, and then every use raises; twice is fine."""
    model = lab.open(folder)
    session = model.session(max_tokens=8)
    view = session.feed([1, 2]).tape.gates(0)
    with pytest.raises(lab.BusyError, match="sessions and views"):
        model.close()
    assert view.shape == (2, 2)
    del session
    with pytest.raises(lab.BusyError):
        model.close()
    del view
    model.close()
    model.close()
    for use in (lambda: model.session(), lambda: model.weights["embed"], lambda: model.memory(), model.weights.float32):
        with pytest.raises((lab.ColibriError, TypeError)):
            use()
    with pytest.raises(lab.ColibriError, match="closed"):
        model.session()
    assert "closed" in repr(model)
    assert model.config.hidden_size == 32  # what was read stays readable


def test_a_with_block_closes(folder: Path) -> None:
    """And does not hide an exception from inside behind one of its own."""
    with lab.open(folder) as model:
        assert model.config.vocab_size == 64
    with pytest.raises(lab.ColibriError, match="closed"):
        model.session()
    with pytest.raises(RuntimeError, match="mine"), lab.open(folder) as model:
        session = model.session(max_tokens=8)
        raise RuntimeError("mine")
    assert session.max_tokens == 8


def test_a_session_outlives_the_with_block_of_its_model(folder: Path) -> None:
    """Leaving the block is no error; the session goes on, and the files go with the last of those that use them."""
    with lab.open(folder) as model:
        session = model.session(max_tokens=8)
        session.feed([1, 2])
    assert session.feed([3]).stop == 3
    del session
    model.close()
    with pytest.raises(lab.ColibriError, match="closed"):
        model.session()


def test_models_cannot_be_pickled_or_copied(folder: Path) -> None:
    """The error says why and what to do."""
    model = lab.open(folder)
    for thing in (model, model.weights):
        for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="mapped file"):
                attempt(thing)


def test_end_ids_come_from_the_generation_config_first(tmp_path: Path) -> None:
    """generation_config.json before config.json; a number or a list; none at all is fine."""
    folder = tiny_model(tmp_path / "m", config={"eos_token_id": 7})
    assert lab.open(folder).end_ids == (7,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    assert lab.open(folder).end_ids == (3, 4)
    bare = tiny_model(tmp_path / "bare")
    config = json.loads((bare / "config.json").read_text())
    config.pop("eos_token_id", None)
    (bare / "config.json").write_text(json.dumps(config))
    assert lab.open(bare).end_ids == ()


def test_identity_tells_checkpoints_apart(tmp_path: Path) -> None:
    """Equal bytes have equal fingerprints wherever they lie; one changed byte in a sampled block does not."""
    one, other = tiny_model(tmp_path / "a"), tiny_model(tmp_path / "b")
    assert lab.open(one).identity == lab.open(other).identity
    raw = bytearray((other / "model.safetensors").read_bytes())
    raw[-1] ^= 1
    (other / "model.safetensors").write_bytes(raw)
    assert lab.open(one).identity != lab.open(other).identity


BAD_FILES = {
    "empty": b"",
    "seven bytes": b"1234567",
    "length 0": struct.pack("<Q", 0),
    "length 2^64-1": b"\xff" * 8 + b"{}",
    "length over the file": struct.pack("<Q", 50) + b"{}",
    "LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 123\n",
    "web page": b"<!DOCTYPE html><html><body>Not found</body></html>",
    "no JSON": struct.pack("<Q", 8) + b"{{{{{{{{",
    "deep JSON": struct.pack("<Q", 4000) + b'{"a":' * 800,
    "a NUL and broken UTF-8": struct.pack("<Q", 16) + b'{"\xff\x00": 1}     ',
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_G3_a_bad_weight_file_is_an_exception(folder: Path, name: str) -> None:
    """Every bad file ends in an error with a sentence that names the file; the process lives and opens the next one."""
    good = shutil.copytree(folder, folder.parent / "good")
    (folder / "model.safetensors").write_bytes(BAD_FILES[name])
    with pytest.raises((lab.FormatError, lab.FileError), match=r"model\.safetensors"):
        lab.open(folder)
    assert lab.open(good).session(max_tokens=4).feed([1]).logits.shape == (64,)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model_type": 3}', '{"model_type": "bert"}', "null"])
def test_G3_a_bad_config_is_an_exception(folder: Path, text: str) -> None:
    """A broken or foreign config.json is refused with a sentence."""
    (folder / "config.json").write_text(text)
    with pytest.raises(lab.ColibriError, match=r"config\.json|bert"):
        lab.open(folder)


def test_G3_too_little_memory_is_an_exception() -> None:
    """Under an address-space limit a session that cannot fit raises with the bytes; a smaller one still works."""
    code = """
import resource, colibri_lab as lab
model = lab.open()
model.session(max_tokens=8).feed([1])
limit = 2 << 30
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
import warnings; warnings.simplefilter("ignore")
try:
    model.session(capture="all", max_tokens=1 << 20)
except (lab.OutOfMemoryError, MemoryError) as error:
    print("refused:", error)
print(model.session(max_tokens=8).feed([1]).logits.shape)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "refused:" in done.stdout and "bytes" in done.stdout and "(2048,)" in done.stdout


def test_G3_an_address_space_limit_shrinks_what_a_session_reserves(folder: Path) -> None:
    """`ulimit -v`: the default takes half of what is left; what is refused names the most that fits, and that does."""
    code = """
import json, pathlib, re, resource, sys, warnings, colibri_lab as lab
warnings.simplefilter("ignore")
folder = pathlib.Path(sys.argv[1])
config = json.loads((folder / "config.json").read_text())
(folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1000000}))
model = lab.open(folder)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (200 << 20),) * 2)
session = model.session(capture="all", threads=2)
session.feed([1, 2, 3])
assert 1000 < session.max_tokens < 1000000, session.max_tokens
assert session.memory()["reserved"] <= 100 << 20
del session
try:
    model.session(capture="all", threads=2, max_tokens=1000000)
except lab.OutOfMemoryError as error:
    most = int(re.search("max_tokens=(\\d+) would fit", str(error))[1])
assert most > 1000
print(model.session(capture="all", threads=2, max_tokens=most).feed([1]).logits.shape)
"""
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "(64,)" in done.stdout, done.stderr


ANONYMOUS = """
import gc, sys, colibri_lab as lab

def anonymous():
    for line in open("/proc/self/smaps_rollup"):
        if line.startswith("Anonymous:"):
            return int(line.split()[1])

def cycle():
    model = lab.open()
    session = model.session(capture="all", max_tokens=64)
    session.feed([1, 2, 3, 4, 5])
    view = session.tape["layers.0.output"][1:]
    session.reset()
    session.feed([5, 6])
    del session, view
    model.close()

for _ in range(20):
    cycle()
gc.collect()
before = anonymous()
for _ in range(int(sys.argv[1])):
    cycle()
gc.collect()
print(anonymous() - before)
"""


@pytest.mark.parametrize("cycles", [200, pytest.param(5000, marks=pytest.mark.soak)])
def test_open_run_close_cycles_leave_memory_flat(cycles: int) -> None:
    """Anonymous memory of a process grows by less than 4 MB, however many the cycles."""
    done = subprocess.run(
        [sys.executable, "-c", ANONYMOUS, str(cycles)], capture_output=True, text=True, check=True, cwd=ROOT
    )
    print(f"{cycles} cycles: {done.stdout.strip()} kB")
    assert int(done.stdout) < 4096


def test_a_folder_whose_name_is_not_utf8_opens_runs_and_saves(folder: Path, tmp_path: Path) -> None:
    """A name on disk is bytes; Python's text for them is taken and given back."""
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/odd-\xff\xfe"))
    shutil.copytree(folder, odd)
    model = lab.open(odd)
    assert model.info["files"] == [str(odd / "model.safetensors")] and model.identity == lab.open(folder).identity
    session = model.session(max_tokens=4)
    session.feed([1, 2])
    session.trace().save(tmp_path / "run.safetensors")
    assert lab.load_trace(tmp_path / "run.safetensors").ids == [1, 2]
    assert lab.doctor(odd).ok


def test_a_path_too_long_for_the_system_is_refused_with_a_sentence() -> None:
    """As a missing file is."""
    with pytest.raises(lab.FileError, match="too long"):
        lab.open("x" * 5000)


@pytest.mark.parametrize("tokenizer", [False, True], ids=["without a tokenizer", "with one"])
@pytest.mark.parametrize(
    "content",
    [
        None, b"[" * 100_000, b"{", b'\xef\xbb\xbf{"eos_token_id": 7}', b'{"eos_token_id": "7"}',
        b'{"eos_token_id": [true]}',
    ],
    ids=["pipe", "nested", "cut", "byte order mark", "text", "bool"],
)  # fmt: skip
def test_a_broken_generation_config_is_refused_by_its_name_when_generating(
    tmp_path: Path, content: bytes | None, tokenizer: bool
) -> None:
    """It says where the model stops, so it is never passed over for config.json; the model opens without it."""
    folder = tiny_model(tmp_path / "m", config={"eos_token_id": 2})
    if tokenizer:
        folder = Path(shutil.copytree(Path(lab.__file__).parent / "bundled" / "tiny-colibri", tmp_path / "bundled"))
        (folder / "generation_config.json").unlink()
    if content is None:
        os.mkfifo(folder / "generation_config.json")
    else:
        (folder / "generation_config.json").write_bytes(content)
    model = lab.open(folder)
    session = model.session(max_tokens=8)
    session.feed([1])
    with pytest.raises((lab.FormatError, lab.FileError), match=r"generation_config\.json"):
        session.generate(3)
    with pytest.raises((lab.FormatError, lab.FileError), match=r"generation_config\.json"):
        _ = model.end_ids
    if not tokenizer:
        assert len(list(session.generate(3, stop_ids=()))) == 3
