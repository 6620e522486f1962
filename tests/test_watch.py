"""session.watch: counts at every point against a NumPy census of the tape, the same however work is split; "stop"."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from checkpoints import random_tensors, read_checkpoint, small_config, write_checkpoint
from digest import canonical
from goldens import REFERENCE

import colibri_lab as lab
from colibri_lab._engine import core

EVERYTHING = ["all", "layers.*.attn.weights"]
BUNDLED = Path(lab.__file__).parent / "bundled" / "tiny-colibri"
MODELS = {"bundled": BUNDLED} | {
    name: REFERENCE / name for name in ("mixtral", "mixtral_swa", "qwen2_moe_step", "qwen3_moe", "olmoe")
}
IDS = [5, 17, 3, 50, 31, 9, 57, 2, 41]
COUNTS = ["n", "n_nan", "n_signalling", "n_inf", "n_negative_inf", "n_subnormal", "absmax", "token", "expert", "index"]


@pytest.fixture(scope="module", params=MODELS)
def folder(request):
    return MODELS[request.param]


@pytest.fixture(scope="module")
def sick_folder(tmp_path_factory):
    """A model with a shared expert and a dense layer, whose numbers overflow: an Inf and NaN of several births."""
    config = small_config("qwen2_moe", num_hidden_layers=3, decoder_sparse_step=2, mlp_only_layers=[])
    tensors = random_tensors(config, seed=3)
    embed = tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].copy()
    embed[IDS[4], 5] = np.inf
    name = next(name for name in tensors if name.endswith("layers.1.mlp.experts.2.down_proj.weight"))
    tensors[name] = tensors[name].copy()
    tensors[name][3, 1] = -np.inf
    return write_checkpoint(tmp_path_factory.mktemp("sick") / "m", config, tensors)


def run(model, ids=IDS, chunk=None, capture=EVERYTHING, watch="watch", **options):
    session = model.session(capture=capture, max_tokens=32, watch=watch, **options)
    for start in range(0, len(ids), chunk or len(ids)):
        session.feed(ids[start : start + (chunk or len(ids))])
    return session


def census(values: np.ndarray, tokens: np.ndarray, experts: np.ndarray, index: np.ndarray) -> tuple:
    """The counts of a table's row, by other means than the engine's: float classes of NumPy."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    nan, inf = np.isnan(values), np.isinf(values)
    finite = np.abs(values[~(nan | inf)])
    broken = nan | inf
    places = sorted(zip(tokens[broken], experts[broken], index[broken], strict=True))
    return (
        values.size, nan.sum(), (nan & (bits & 0x400000 == 0)).sum(), inf.sum(), (inf & (values < 0)).sum(),
        ((values != 0) & (np.abs(values) < np.float32(2**-126))).sum(), finite.max(initial=0),
        *(places[0] if places else (-1, -1, -1)),
    )  # fmt: skip


def rows_of(values: np.ndarray) -> tuple:
    """Values (T, ...) with the token, the expert (none) and the index of each."""
    flat = values.reshape(len(values), -1)
    tokens, index = np.indices(flat.shape)
    return flat, tokens, np.full(flat.shape, -1), index


def tap_census(session, point: str, layer: int) -> tuple:
    if ".experts.*." in point:
        parts = []
        for expert in range(session.model.config.num_experts):
            of = f"layers.{layer}.moe.experts.{expert}."
            for one in session.passes:
                tokens = one.tape[of + "tokens"]
                flat = one.tape[of + point.rpartition(".")[2]]
                index = np.broadcast_to(np.arange(flat.shape[1]), flat.shape)
                token = np.broadcast_to(tokens[:, None], flat.shape)
                parts.append((flat.ravel(), token.ravel(), np.full(flat.size, expert), index.ravel()))
        return census(*(np.concatenate(column) for column in zip(*parts, strict=True)))
    values = session.tape[point]
    if point.endswith("attn.weights"):
        heads, n, _ = values.shape
        parts = []
        for token in range(n):
            first = first_key(session, layer, token)
            seen = values[:, token, first : token + 1]
            index = np.arange(heads)[:, None] * (token + 1) + np.arange(first, token + 1)
            parts.append((seen.ravel(), np.full(seen.size, token), np.full(seen.size, -1), index.ravel()))
        return census(*(np.concatenate(column) for column in zip(*parts, strict=True)))
    return census(*rows_of(values))


def first_key(session, layer: int, token: int) -> int:
    window = session.model._engine.layer(layer)[2]
    return max(0, token + 1 - window) if window else 0


def told(row) -> tuple:
    return tuple(row[name] for name in COUNTS)


def assert_census(session) -> set[str]:
    """Every row of the table that is a tap; returns the names of the others."""
    inner = set()
    stored = set(session.tape)
    for row in session.watch.table:
        point, layer = str(row["point"]), int(row["layer"])
        if "*" in point or point in stored or point.endswith("attn.weights"):
            assert told(row) == tap_census(session, point, layer), point
        else:
            inner.add(point.removeprefix(f"layers.{layer}."))
    return inner


def test_every_tap_is_counted_as_numpy_counts_the_tape(folder):
    """All taps of the bundled model and the references, in two passes; what is left are the points between taps."""
    with lab.open(folder) as model:
        session = run(model, chunk=7)
        assert session.watch.clean and session.watch.first is None
        inner = assert_census(session)
        assert inner >= {"attn.q.product", "attn.k.product", "attn.v.product", "attn.scores", "attn.context", "middle"}
        assert all(row["n"] > 0 for row in session.watch.table)
        del session


def test_nan_and_infinities_are_counted_and_the_first_is_by_token_expert_and_index(sick_folder):
    """An Inf in an embedding and one in an expert: every count and first place is that of the tape."""
    with lab.open(sick_folder) as model:
        session = run(model, chunk=4)
        inner = assert_census(session)
        assert inner >= {"moe.shared.inner.gate", "moe.shared.gate.product", "mlp.inner.hidden"}
        watch = session.watch
        assert not watch.clean and watch.first["point"] == "embed" and watch.first["n_inf"] == 1
        assert (watch.first["token"], watch.first["index"], watch.first["bits"]) == (4, 5, 0x7F800000)
        assert watch.table["n_nan"].sum() > 0 and watch.table["n_signalling"].sum() == 0
        assert "not finite first at embed: +Inf, token 4, index 5" in repr(watch)
        assert "<th" in watch._repr_html_() and "+Inf, token 4" in watch._repr_html_()
        del session, watch


def test_points_between_taps_hold_what_numpy_computes_from_the_taps(folder):
    """Number of values and largest magnitude of the inner points, recomputed from taps and weights."""
    with lab.open(folder) as model:
        session = run(model)
        table = {str(row["point"]): row for row in session.watch.table}
        tape, weights = session.tape, model.weights
        config = model.config

        for layer in range(config.num_hidden_layers):
            of = f"layers.{layer}."
            normed = tape[of + "attn.norm"].astype(np.float64)
            expected = {}
            for w in "qkv":
                product = expected[f"attn.{w}.product"] = normed @ weights.float32(f"{of}attn.{w}").T
                if f"{of}attn.{w}.bias" in weights:
                    product += weights.float32(f"{of}attn.{w}.bias")
            q, k, v = (tape[of + f"attn.{w}"].astype(np.float64) for w in "qkv")
            group = q.shape[1] // k.shape[1]
            scores = np.einsum("thd,shd->hts", q, k.repeat(group, 1)) / np.sqrt(q.shape[2])
            seen = [(t, s) for t in range(len(q)) for s in range(first_key(session, layer, t), t + 1)]
            expected["attn.scores"] = np.stack([scores[:, t, s] for t, s in seen])
            expected["attn.context"] = np.einsum("hts,shd->thd", tape[of + "attn.weights"], v.repeat(group, 1))
            before = tape["embed"] if layer == 0 else tape[f"layers.{layer - 1}.output"]
            expected["middle"] = before + tape[of + "attn.out"]
            for name, path in (("shared.", "moe.shared"), ("", "mlp")):
                if f"{of}{path}.gate" in weights:
                    x = tape[of + ("moe.input" if name else "mlp.input")].astype(np.float64)
                    gate, up = (x @ weights.float32(f"{of}{path}.{w}").T for w in ("gate", "up"))
                    hidden = gate / (1 + np.exp(-gate)) * up
                    expected |= {f"{path}.inner.gate": gate, f"{path}.inner.up": up, f"{path}.inner.hidden": hidden}
                    if name:
                        expected["moe.shared.gate.product"] = x @ weights.float32(f"{of}moe.shared_gate").T
            for name, values in expected.items():
                row = table.pop(of + name)
                assert row["n"] == values.size, name
                assert row["absmax"] == pytest.approx(np.abs(values).max(), rel=2e-4, abs=1e-6), name
        assert all(path in tape or "*" in path or path.endswith("attn.weights") for path in table)  # no point is left
        del session, tape, weights


def table_of(session) -> bytes:
    return session.watch.table.tobytes()


def test_the_table_is_the_same_for_any_threads_chunks_and_capture(sick_folder):
    """All bytes of the table; logits of all tokens count only where they are kept."""
    with lab.open(sick_folder) as model:
        whole = run(model, threads=1)
        for options in ({"threads": 2}, {"chunk": 1}, {"chunk": 4, "threads": 2}, {"capture": ["logits"]}):
            assert table_of(run(model, **options)) == table_of(whole), options
        last = run(model, capture="none")
        assert table_of(last)[: -last.watch.table.itemsize] == table_of(whole)[: -whole.watch.table.itemsize]
        assert last.watch.table[-1]["n"] == model.config.vocab_size
        del whole, last


def test_the_table_is_the_same_on_every_code_path(sick_folder):
    """A digest of the table of a process of its own for each path."""
    script = (
        "import sys, hashlib, colibri_lab as lab\n"
        "s = lab.open(sys.argv[1]).session(capture='all', max_tokens=32, watch='watch')\n"
        f"s.feed({IDS})\n"
        "print(hashlib.sha256(s.watch.table.tobytes()).hexdigest())"
    )
    digests = set()
    for isa in core.isa_names():
        environment = {**os.environ, "COLIBRI_ISA": isa}
        done = subprocess.run(
            [sys.executable, "-c", script, str(sick_folder)],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        digests.add(done.stdout)
    assert len(core.isa_names()) > 1 and len(digests) == 1


def test_watching_changes_no_value(sick_folder):
    """All taps of a run that is watched, stepped or fed, are those of one that is not."""
    with lab.open(sick_folder) as model:
        plain, watched = run(model, watch="off"), run(model, watch="watch", threads=2)
        assert plain.watch.table.size == 0 and "nothing is watched" in repr(plain.watch)
        stepped = model.session(capture=EVERYTHING, max_tokens=32, watch="watch")
        stepped.stepper(IDS, chunk=4).finish()
        for path in plain.tape:
            if ".experts." in path or ".dispatch." in path:  # of one pass
                assert canonical(watched.tape[path]) == canonical(plain.tape[path])
                continue
            assert canonical(watched.tape[path]) == canonical(plain.tape[path]) == canonical(stepped.tape[path]), path
        assert table_of(stepped) == table_of(watched)
        del plain, watched, stepped


def test_stop_names_the_first_value_and_leaves_the_session_as_it_was(sick_folder):
    """The pass with the sick token is refused, at its first stage; others run."""
    with lab.open(sick_folder) as model:
        session = model.session(capture=EVERYTHING, max_tokens=32, watch="stop")
        session.feed(IDS[:1])
        before = session.ids, table_of(session), session.logits.tobytes()
        with pytest.raises(
            lab.NonFiniteError, match=r'"embed" is not finite: \+Inf at token 4, index 5; .* its 1 tokens'
        ):
            session.feed(IDS[1:])
        assert (session.ids, table_of(session), session.logits.tobytes()) == before
        session.feed(IDS[1:3])
        assert session.watch.clean and len(session.ids) == 3
        del session


def test_stop_names_the_expert(tmp_path):
    """An Inf in a weight of one expert stops the pass of the first token that is sent there."""
    config, tensors = read_checkpoint(REFERENCE / "mixtral")
    name = next(name for name in tensors if name.endswith("layers.1.block_sparse_moe.experts.2.w1.weight"))
    tensors[name] = tensors[name].copy()
    tensors[name][3, 1] = np.inf
    with lab.open(write_checkpoint(tmp_path / "m", config, tensors)) as model:
        plain = run(model, watch="off")
        tokens = np.flatnonzero((plain.tape["layers.1.moe.expert_ids"] == 2).any(axis=1))
        session = model.session(capture="none", max_tokens=32, watch="stop")
        with pytest.raises(lab.NonFiniteError) as caught:
            session.feed(IDS)
        x = plain.tape["layers.1.moe.input"][tokens[0], 1]
        value = "+Inf" if x > 0 else "-Inf"
        where = f'"layers.1.moe.experts.2.gate" is not finite: {value} at token {tokens[0]}, index 3'
        assert str(caught.value).startswith(where) and not session.ids
        del plain, session


def test_stop_leaves_a_walk_before_the_stage_that_found_something(sick_folder):
    """The step fails again and again; the walk can go back, and the pass be abandoned."""
    with lab.open(sick_folder) as model:
        session = model.session(capture=EVERYTHING, max_tokens=32, watch="stop")
        stepper = session.stepper(IDS[:6], chunk=2)
        stepper.step("token")
        stepper.step("token")
        for _ in range(2):
            with pytest.raises(lab.NonFiniteError, match=r"embed.*the open pass is still before embed"):
                stepper.step("stage")
        assert session.watch.clean and len(session.ids) == 4
        stepper.back("token")
        assert len(session.ids) == 2
        session.reset()
        session.feed(IDS[:2])
        assert session.watch.clean
        del session, stepper


def test_counts_follow_the_tokens_that_are_kept(sick_folder):
    """Passes that are stepped back over, reset or not forked are not in the table; nor is one that was interrupted."""
    with lab.open(sick_folder) as model:
        short, whole = run(model, IDS[:4], chunk=2), run(model, chunk=2)
        engine = whole._engine
        engine.truncate(8)
        assert table_of(whole) == table_of(run(model, IDS[:8], chunk=2))
        engine.truncate(4)
        assert table_of(whole) == table_of(short)
        engine.feed(np.array(IDS[4:], np.int32), None)
        assert table_of(whole) == table_of(run(model))

        def stop(done):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            short.feed(IDS[4:6], progress=stop)
        assert table_of(short) == table_of(run(model, IDS[:4]))
        fork = short._fork(2)
        assert table_of(fork) == table_of(run(model, IDS[:2])) and fork.watch.mode == "watch"
        short.reset()
        assert not short.watch.table["n"].any() and "nothing was computed" in repr(short.watch)
        del short, whole, engine, fork


def test_gates_that_a_walk_chose_anew_replace_those_of_the_router():
    """Scores and gates count once, as they stand when the dispatcher reads them."""
    with lab.open() as model:
        session = model.session(capture=EVERYTHING, max_tokens=32, watch="watch")
        stepper = session.stepper(IDS, chunk=None)
        stepper.run_to("layer == 2 and stage == 'router'")
        stepper.force(2, [1, 3])
        stepper.finish()
        assert_census(session)
        del session, stepper


def test_a_recording_keeps_the_option(sick_folder, tmp_path):
    """The session behind a file stops and counts like one in memory."""
    with lab.open(sick_folder) as model:
        session = model.session(capture="all", max_tokens=32, watch="stop", to=tmp_path / "run.safetensors")
        session.feed(IDS[:4])
        with pytest.raises(lab.NonFiniteError):
            session.feed(IDS[4:])
        assert session.watch.clean and len(session.ids) == 4
        assert lab.load_trace(tmp_path / "run.safetensors").ids == IDS[:4]
        del session


def test_the_table_is_read_only_and_says_clean():
    """A look at a finite run in one line, as text and HTML; a wrong option names the right ones."""
    with lab.open() as model:
        session = run(model)
        assert repr(session.watch).startswith("<Watch: clean: ") and "clean" in session.watch._repr_html_()
        with pytest.raises(ValueError, match="read-only"):
            session.watch.table["n"][0] = 1
        with pytest.raises(lab.ArgumentError, match='"off", "watch" or "stop"'):
            model.session(watch="on")
        del session


def test_points_are_the_engine_s_and_each_has_a_tap_behind_it():
    """Names are unique; the tap is a row of the table of taps, of floating dtype; stages are those of a walk."""
    taps = {kind.path: kind for kind in core.tap_kinds}
    from colibri_lab.places import STAGES

    assert len({kind.path for kind in core.point_kinds}) == len(core.point_kinds)
    for kind in core.point_kinds:
        assert taps[kind.tap].dtype == np.float32 and kind.stage in STAGES
        assert kind.path == kind.tap or kind.path not in taps
    assert json.dumps([kind.path for kind in core.point_kinds])
