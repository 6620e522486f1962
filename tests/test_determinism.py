"""The same bytes in every tap, whatever the instruction set, thread count, chunking or capture.

A NaN counts as one value, since CPUs differ in its sign and payload. Each setting runs support/digest.py in a process
of its own, two processes at a time, which prints hashes; a test waits for the two results it compares.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from checkpoints import read_checkpoint, write_checkpoint
from goldens import REFERENCE, golden_of

import colibri_lab as lab

DIGEST = Path(__file__).parent / "support" / "digest.py"
BUNDLED = Path(lab.__file__).parent / "bundled" / "tiny-colibri"
ISAS = ("scalar", "sse2", "avx2", "avx512", "neon")
EVERYTHING = ["all", "layers.*.attn.weights"]
CAPTURES = {
    "none": ["none"],
    "routing": ["routing"],
    "moe": ["moe"],
    "all": ["all"],
    "a list": ["layers.*.output", "layers.*.moe.dispatch.*", "logits"],
}
N_PROMPT, N_MORE = 64, 440  # of the bundled model, whose max_position_embeddings is 512
LONG = "mixtral_swa"  # a reference checkpoint for 24 + 2,000 tokens
LAST = 2040  # the id that ends every prompt of the bundled model, and stands nowhere else in the planted runs


def prompts(n_tokens: int) -> list[list[int]]:
    """Eight rows of random ids whose 64th is LAST."""
    rows = np.random.default_rng(2024).integers(3, LAST, (8, n_tokens))
    rows[:, N_PROMPT - 1] = LAST
    return rows.tolist()


def at_once(ids: list[int]) -> list[list[int]]:
    return [ids]


def one_by_one(ids: list[int]) -> list[list[int]]:
    return [[token] for token in ids]


def random_chunks(ids: list[int]) -> list[list[int]]:
    random, chunks, start = np.random.default_rng(len(ids)), [], 0
    while start < len(ids):
        size = int(random.choice([1, 2, 3, 7, 16, 17, 33, 100]))
        chunks.append(ids[start : start + size])
        start += size
    return chunks


class Runs:
    """Results by setting; a setting that was asked for before is not run again."""

    def __init__(self, folder: Path):
        self.folder, self.pool, self.futures = folder, ThreadPoolExecutor(2), {}

    def start(
        self, path: Path, rows, split=at_once, generate=0, isa=None, threads=1, capture=EVERYTHING, stepped=False
    ) -> Future:
        """`rows`: one list of ids per session. Returns at once; `.result()` waits."""
        sessions = [{"ids": split(ids), "generate": generate, "seed": seed} for seed, ids in enumerate(rows)]
        plan = {"path": str(path), "capture": capture, "threads": threads, "stepped": stepped, "sessions": sessions}
        text = json.dumps(plan)
        if (text, isa) not in self.futures:
            self.futures[text, isa] = self.pool.submit(self.run, text, isa)
        return self.futures[text, isa]

    def run(self, plan: str, isa: str | None) -> dict:
        environment = {key: value for key, value in os.environ.items() if key != "COLIBRI_ISA"}
        environment["COLIBRI_CPUS"] = "4"  # as many threads as a setting asks for, whatever machine it runs on
        if isa is not None:
            environment["COLIBRI_ISA"] = isa
        done = subprocess.run([sys.executable, DIGEST], input=plan, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout)
        assert isa is None or result["isa"] == isa
        return result


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    runs = Runs(tmp_path_factory.mktemp("determinism"))
    yield runs
    runs.pool.shutdown(cancel_futures=True)


def assert_same(one: dict, other: dict) -> None:
    """Equal ids, and equal hashes of every tap that both kept."""
    assert len(one["sessions"]) == len(other["sessions"])
    for number, (a, b) in enumerate(zip(one["sessions"], other["sessions"], strict=True)):
        assert a["ids"] == b["ids"], f"session {number}"
        common = [path for path in a["taps"] if path in b["taps"]]
        assert len(common) == min(len(a["taps"]), len(b["taps"]))
        different = [path for path in common if a["taps"][path] != b["taps"][path]]
        assert not different, f"session {number}: {len(different)} of {len(common)} taps differ, first {different[:5]}"


# Each setting: how it differs from one thread, best code path, prompt at once, everything captured.
SETTINGS: dict[str, dict] = {
    "2 threads": {"threads": 2},
    "3 threads": {"threads": 3},
    "prompt token by token": {"split": one_by_one},
    "prompt in random chunks": {"split": random_chunks},
    "random chunks stage by stage": {"stepped": True, "split": random_chunks, "threads": 2},
    **{f"captures {name}": {"capture": capture} for name, capture in CAPTURES.items()},
}


def other_paths(runs: Runs, isa: str, capsys, start: Callable[..., Future]) -> None:
    """The code path `isa` against the best one; what this CPU cannot run is said aloud."""
    available = lab.open().info["isa_available"]
    if isa not in available:
        with capsys.disabled():
            print(f"\n{isa} was not run: this CPU and build have {', '.join(available)}")
        return
    assert_same(start().result(), start(isa=isa).result())


def bundled(runs: Runs, **options) -> Future:
    """Eight sessions of 64 prompt and 440 generated tokens."""
    return runs.start(BUNDLED, prompts(N_PROMPT), generate=N_MORE, **options)


@pytest.mark.parametrize("isa", ISAS)
def test_every_code_path_gives_the_same_bytes_over_eight_generated_sessions(runs, isa, capsys):
    other_paths(runs, isa, capsys, lambda **options: bundled(runs, **options))


@pytest.mark.parametrize("isa", ISAS)
def test_every_code_path_gives_the_same_bytes_stage_by_stage(runs, isa, capsys):
    other_paths(runs, isa, capsys, lambda **options: runs.start(BUNDLED, prompts(N_PROMPT), stepped=True, **options))


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_setting_gives_the_same_bytes_over_eight_generated_sessions(runs, setting):
    assert_same(bundled(runs).result(), bundled(runs, **SETTINGS[setting]).result())


@pytest.mark.parametrize("split", [at_once, random_chunks])
def test_what_was_generated_gives_the_same_bytes_when_fed_as_a_prompt(runs, split):
    generated = bundled(runs).result()
    ids = [session["ids"] for session in generated["sessions"]]
    assert_same(generated, runs.start(BUNDLED, ids, split=split).result())


def test_the_eight_sessions_are_of_the_stated_length_and_all_different(runs):
    sessions = [tuple(session["ids"]) for session in bundled(runs).result()["sessions"]]
    assert [len(ids) for ids in sessions] == [N_PROMPT + N_MORE] * 8
    assert len(set(sessions)) == 8


def long_session(runs: Runs, **options) -> Future:
    """24 + 2,000 tokens of a reference checkpoint. attn.weights would be 2,024 by 2,024, so "all" is what is kept."""
    prompt = golden_of(LONG)["input_ids"].tolist()
    return runs.start(REFERENCE / LONG, [prompt], generate=2000, **{"capture": ["all"], **options})


@pytest.mark.parametrize("isa", ISAS)
def test_every_code_path_gives_the_same_bytes_over_2000_generated_tokens(runs, isa, capsys):
    other_paths(runs, isa, capsys, lambda **options: long_session(runs, **options))


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_setting_gives_the_same_bytes_over_2000_generated_tokens(runs, setting):
    assert_same(long_session(runs).result(), long_session(runs, **SETTINGS[setting]).result())


@pytest.mark.parametrize("split", [at_once, random_chunks])
def test_2000_generated_tokens_give_the_same_bytes_when_fed_as_a_prompt(runs, split):
    generated = long_session(runs).result()
    ids = [generated["sessions"][0]["ids"]]
    assert len(ids[0]) == 2024
    assert_same(generated, runs.start(REFERENCE / LONG, ids, split=split, capture=["all"]).result())


# place -> (tensor, index of the element that is replaced), in the bundled model
PLANTED = {
    "a value projection": ("model.layers.2.self_attn.v_proj.weight", (17, 5)),
    "an expert": ("model.layers.3.block_sparse_moe.experts.4.w2.weight", (100, 11)),
    "the embedding of the last prompt token": ("model.embed_tokens.weight", (LAST, 3)),
}


def copy_with(folder: Path, source: Path, name: str, index: tuple[int, int], values: list[float]) -> Path:
    """A copy of a checkpoint; `values` replace the elements of tensor `name` from `index` on along its row."""
    if not folder.exists():
        config, tensors = read_checkpoint(source)
        tensors[name] = tensors[name].copy()
        tensors[name][index[0], index[1] : index[1] + len(values)] = values
        write_checkpoint(folder, config, tensors)
    return folder


def planted(runs: Runs, place: str, value: float) -> Path:
    """A copy of the bundled model with one element replaced."""
    return copy_with(runs.folder / f"{place} {value}", BUNDLED, *PLANTED[place], [value])


def planted_sessions(runs: Runs, place: str, value: float, **options) -> Future:
    """Eight sessions of 504 fixed ids, since nothing can be generated from NaN: four for the Inf, four for the NaN."""
    rows = prompts(N_PROMPT + N_MORE)[:4] if np.isinf(value) else prompts(N_PROMPT + N_MORE)[4:]
    return runs.start(planted(runs, place, value), rows, **options)


VALUES = [np.inf, np.nan]
BESIDE = [name for name in SETTINGS if name not in ("3 threads", "captures all")]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("place", PLANTED)
def test_every_code_path_spreads_a_planted_value_the_same_way(runs, place, value, isa, capsys):
    other_paths(runs, isa, capsys, lambda **options: planted_sessions(runs, place, value, **options))


@pytest.mark.parametrize("setting", BESIDE)
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("place", PLANTED)
def test_every_setting_spreads_a_planted_value_the_same_way(runs, place, value, setting):
    one = planted_sessions(runs, place, value)
    assert_same(one.result(), planted_sessions(runs, place, value, **SETTINGS[setting]).result())


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("place", PLANTED)
def test_a_planted_value_reaches_the_tape(runs, place, value):
    """The planted runs above compare something: the tape of a planted model differs from that of the clean one."""
    rows = prompts(N_PROMPT + N_MORE)[:4] if np.isinf(value) else prompts(N_PROMPT + N_MORE)[4:]
    clean = runs.start(BUNDLED, rows).result()
    dirty = planted_sessions(runs, place, value).result()
    for a, b in zip(clean["sessions"], dirty["sessions"], strict=True):
        assert a["taps"]["logits"] != b["taps"]["logits"]
        assert a["taps"]["layers.0.attn.norm"] == b["taps"]["layers.0.attn.norm"] or place.startswith("the embedding")


LONG_LAST = 3  # the id that ends the 24-token prompt of the long planted runs, and stands nowhere else in them
PLANTED_LONG = {
    "a value projection": ("model.layers.1.self_attn.v_proj.weight", (5, 7)),
    "an expert": ("model.layers.1.block_sparse_moe.experts.2.w1.weight", (9, 4)),
    "the embedding of the last prompt token": ("model.embed_tokens.weight", (LONG_LAST, 6)),
}
LONG_SETTINGS = {
    "scalar": {"isa": "scalar"},
    "2 threads": {"threads": 2},
    "token by token": {"split": one_by_one},
    "random chunks": {"split": random_chunks},
    "captures routing": {"capture": ["routing"]},
}


@pytest.mark.parametrize("setting", LONG_SETTINGS)
@pytest.mark.parametrize("place", PLANTED_LONG)
def test_an_inf_and_a_nan_spread_the_same_way_over_2024_fixed_tokens(runs, place, setting):
    """An Inf and a NaN side by side in a reference checkpoint whose window is 7 keys: the damage spreads slowly."""
    ids = np.random.default_rng(24).integers(LONG_LAST + 1, 256, 2024)
    ids[23] = LONG_LAST
    path = copy_with(runs.folder / f"long {place}", REFERENCE / LONG, *PLANTED_LONG[place], [np.inf, np.nan])

    def start(**options) -> Future:
        return runs.start(path, [ids.tolist()], **{"capture": ["all"], **options})

    assert_same(start().result(), start(**LONG_SETTINGS[setting]).result())


CROSS = [
    pytest.param(isa, threads, split, name, id=f"{isa}, {threads} threads, {split.__name__}, captures {name}")
    for isa in ISAS
    for threads in (1, 2, 4)
    for split in (at_once, one_by_one, random_chunks)
    for name in ("all", "routing")
]


@pytest.mark.soak
@pytest.mark.parametrize(("isa", "threads", "split", "name"), CROSS)
def test_every_combination_gives_the_same_bytes(runs, isa, threads, split, name, capsys):
    """Code path times threads times chunking times capture, over eight generated sessions."""
    options = {"threads": threads, "split": split, "capture": CAPTURES[name]}
    other_paths(runs, isa, capsys, lambda **path: bundled(runs, **path, **(options if path else {})))


@pytest.mark.soak
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("configuration", ["olmoe", "qwen2_moe", "qwen2_moe_step", "qwen3_moe_yarn", "mixtral/bf16"])
def test_2000_tokens_of_other_families_give_the_same_bytes(runs, configuration, setting):
    prompt = [golden_of(configuration)["input_ids"].tolist()]

    def start(**options) -> Future:
        return runs.start(REFERENCE / configuration, prompt, generate=2000, **{"capture": ["all"], **options})

    assert_same(start().result(), start(**SETTINGS[setting]).result())
