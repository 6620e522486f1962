"""Walking: whatever way leads to the end, the bytes are those of a plain run."""

from __future__ import annotations

import gc
import pickle
from contextlib import suppress

import numpy as np
import pytest
from walks import FAMILIES, PROMPT, fed, held, ids_for, model_of

import colibri_lab as lab
from colibri_lab.places import ENDS, Place

MODELS = ("bundled", *FAMILIES)
UNITS = tuple(ENDS)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {name: model_of(name, folder) for name in MODELS}


@pytest.fixture(scope="module")
def bundled(models):
    return models["bundled"]


def chunks_of(ids, chunk):
    size = chunk or len(ids)
    return [ids[start : start + size] for start in range(0, len(ids), size)]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("chunk", [1, 3, None])
@pytest.mark.parametrize("capture", ["none", "routing", "moe", "all"])
def test_finish_ends_in_the_bytes_of_feed(models, name, chunk, capture):
    ids = ids_for(models[name], 7)
    session = models[name].session(capture=capture, max_tokens=64, threads=1)
    session.stepper(ids, chunk=chunk).finish()
    assert session.ids == ids
    assert held(session) == held(fed(models[name], chunks_of(ids, chunk), capture))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("chunk", [1, 2, None])
def test_any_mixture_of_units_and_backs_ends_in_the_bytes_of_a_plain_run(models, name, chunk):
    """84 random walks for each of twelve settings, 1,008 in all."""
    model, random = models[name], np.random.default_rng(len(name) + (chunk or 0))
    for walk in range(84):
        ids = ids_for(model, 4, walk)
        session = model.session(capture="all", max_tokens=8, threads=1 + walk % 2)
        stepper, kept = session.stepper(ids, chunk=chunk), []
        for _ in range(int(random.integers(3, 20))):
            unit, back = str(random.choice(UNITS)), random.random() < 0.4
            with suppress(StopIteration):
                stepper.back(unit) if back else stepper.step(unit)
            if random.random() < 0.1:
                kept = [(array, np.array(array)) for array in stepper.locals().values()]
        stepper.finish()
        for array, copy in kept:  # rows that were abandoned or closed since: neither ever changes
            np.testing.assert_array_equal(array, copy)
        assert held(session) == held(fed(model, chunks_of(ids, chunk)))


def test_stages_come_in_the_order_of_the_forward_pass(models):
    model = models["qwen2_moe"]
    session = model.session(capture="all", max_tokens=8)
    stepper = session.stepper([5], chunk=1)
    seen = []
    while not stepper.at_end:
        upcoming, where = stepper.next, stepper.step()
        seen.append(Place(where.stage, *(-1 if n is None else n for n in (where.layer, where.expert))))
        assert seen[-1] == upcoming
    chosen = {layer: sorted(session.tape.expert_ids(layer)[0].tolist()) for layer in (0, 2)}
    expected = [Place("embed")]
    for layer in range(3):
        expected.append(Place("attention", layer))
        if layer == 1:
            expected.append(Place("mlp", layer))
        else:
            expected += [Place("router", layer), Place("dispatcher", layer)]
            expected += [Place("expert", layer, expert) for expert in chosen[layer]]
            expected += [Place("shared", layer), Place("aggregator", layer)]
        expected.append(Place("residual", layer))
    assert seen == [*expected, Place("norm"), Place("logits")]
    assert seen == sorted(seen, key=lambda place: place.rank)


@pytest.mark.parametrize(
    ("unit", "stages"), [("expert", {"expert"}), ("layer", {"residual", "logits"}), ("token", {"logits"})]
)
def test_a_unit_stops_where_it_is_complete_and_back_returns_there(bundled, unit, stages):
    stepper = bundled.session(max_tokens=64).stepper(PROMPT)
    places = []
    for _ in range(9):
        places.append(stepper.step(unit))
        assert places[-1].stage in stages
    for expected in places[-2::-1]:
        assert stepper.back(unit) == expected
    stepper.back(unit)
    assert stepper.at_start
    with pytest.raises(StopIteration):
        stepper.back(unit)


def test_the_end_raises_stop_iteration_and_finish_does_nothing_there(bundled):
    session = bundled.session(max_tokens=8)
    stepper = session.stepper([5, 6])
    assert stepper.at_start and stepper.where.stage is None and stepper.next == Place("embed")
    end = stepper.finish()
    assert (end.stage, end.tokens, end.reason, stepper.next) == ("logits", (1,), "end", None)
    for unit in UNITS:
        with pytest.raises(StopIteration):
            stepper.step(unit)
    assert stepper.finish() == end


def test_a_text_gets_its_special_tokens_as_feed_gives_them(bundled):
    session, plain = bundled.session(max_tokens=64), bundled.session(max_tokens=64)
    session.stepper(PROMPT).finish()
    plain.feed(PROMPT)
    assert session.ids == plain.ids


def test_a_walk_goes_on_from_what_the_session_holds_and_back_stops_there(bundled):
    session = bundled.session(capture="all", max_tokens=64)
    session.feed([5, 6, 7])
    before = held(session)
    stepper = session.stepper([8, 9])
    stepper.step("layer")
    assert stepper.where.tokens == (3,) and session.ids == [5, 6, 7]
    stepper.back("token")
    assert held(session) == before
    stepper.finish()
    assert held(session) == held(fed(bundled, [[5, 6, 7], [8], [9]]))


def test_locals_are_live_views_of_what_has_been_computed(bundled):
    session = bundled.session(capture="all", max_tokens=64)
    stepper = session.stepper([5, 6, 7], chunk=None)
    assert len(stepper.locals()) == 0
    stepper.run_to("stage == 'router'")
    now = stepper.locals()
    assert {"embed", "layers.0.attn.out", "layers.0.moe.gates"} <= set(now)
    assert "layers.0.moe.experts.0.input" not in now and "layers.0.moe.output" not in now
    assert now["gates"].shape == (3, bundled.config.top_k) and not now["gates"].flags.writeable
    gates = now["gates"]
    stepper.finish()
    assert np.shares_memory(gates, session.tape.gates(0))
    with pytest.raises(ValueError, match="WRITEABLE"):
        gates.setflags(write=True)


def test_buffers_that_the_capture_does_not_keep_are_copies(bundled):
    session, full = bundled.session(capture="none", max_tokens=64), bundled.session(capture="all", max_tokens=64)
    full.feed([5, 6])
    stepper = session.stepper([5, 6], chunk=None)
    kept = {}
    while stepper.step().stage != "logits":
        where = stepper.where
        if where.stage == "aggregator":
            path = f"layers.{where.layer}.moe.output"
            kept[path] = stepper.peek(path)
    for path, rows in kept.items():
        np.testing.assert_array_equal(rows, full.tape[path])


def test_short_names_of_locals_are_refused_when_two_buffers_have_them(bundled):
    stepper = bundled.session(capture="all", max_tokens=64).stepper([5])
    stepper.run_to("stage == 'aggregator' and layer == 1")
    with pytest.raises(lab.TapError, match=r"layers\.0\.output.*layers\.1\.moe\.output"):
        stepper.locals()["output"]
    with pytest.raises(lab.TapError, match=r"nothing|no buffer"):
        stepper.locals()["gatse"]


def test_run_to_stops_at_every_place_where_a_token_satisfies_the_condition(bundled):
    session = bundled.session(capture="all", max_tokens=64)
    stepper = session.stepper(PROMPT, chunk=None)
    hits = []
    while (where := stepper.run_to("stage == 'router' and margin < 0.2")) is not None:
        hits.append((where.layer, where.tokens))
        assert where.reason == "condition"
    margins = lab.routing.margin(session)
    expected = [
        (layer, tuple(np.flatnonzero(row < 0.2).tolist()))
        for layer, row in zip(session.trace().moe_layers, margins, strict=True)
        if (row < 0.2).any()
    ]
    assert expected and hits == expected and stepper.at_end


@pytest.mark.parametrize("name", MODELS)
def test_50_random_conditions_hit_what_a_scan_of_the_finished_trace_finds(models, name):
    model, random = models[name], np.random.default_rng(len(name))
    ids = ids_for(model, 5)
    session = model.session(capture="all", max_tokens=16)
    session.stepper(ids, chunk=2).finish()
    facts = facts_of(session.trace())
    for number in range(50):
        terms = [one_term(random, facts) for _ in range(int(random.integers(1, 4)))]
        joins = random.choice(["and", "or"], len(terms) - 1).tolist()
        text = terms[0][0] + "".join(f" {join} {term[0]}" for join, term in zip(joins, terms[1:], strict=True))
        expected = {where: rows for where, about in facts.items() if (rows := scan(about, terms, joins))}
        walk, found = model.session(capture="all" if number % 2 else "none", max_tokens=16).stepper(ids, chunk=2), {}
        while (where := walk.run_to(text)) is not None:
            found[where.pass_index, where.stage, where.layer, where.expert] = set(where.tokens)
        assert found == expected, text


def facts_of(trace):
    """(pass, stage, layer, expert) -> row -> what is true of it there, read from a finished trace."""
    facts, config = {}, trace.meta
    margins, entropies = lab.routing.margin(trace), lab.routing.entropy(trace)
    for number, (start, stop) in enumerate(config["passes"]):
        every = range(start, stop)

        def note(stage, layer, expert, rows, path, number=number, start=start, stop=stop):
            about, values = {}, trace[path]
            for row in rows:
                if expert is not None:
                    tokens = trace.expert_rows(layer, expert)["tokens"].tolist()
                    value = trace.expert_rows(layer, expert)["output"][tokens.index(row)]
                else:
                    value = values[row]
                about[row] = {
                    "token": row, "stage": stage, "layer": layer, "expert": expert, "count": len(rows),
                    "absmax": float(np.abs(value).max()), "nonfinite": 0,
                }  # fmt: skip
                if layer in trace.moe_layers and stage != "attention":
                    at = trace.moe_layers.index(layer)
                    ids = trace[f"layers.{layer}.moe.expert_ids"][row].tolist()
                    gates = trace[f"layers.{layer}.moe.gates"][row].tolist()
                    gate = max(gates) if expert is None else gates[ids.index(expert)]
                    about[row] |= {
                        "margin": margins[at, row],
                        "entropy": entropies[at, row],
                        "experts": ids,
                        "gate": gate,
                    }
            if about:
                facts[number, stage, layer, expert] = about

        note("embed", None, None, every, "embed")
        for layer in range(config["num_hidden_layers"]):
            path = f"layers.{layer}."
            note("attention", layer, None, every, path + "attn.out")
            if layer in trace.moe_layers:
                note("router", layer, None, every, path + "moe.router_logits")
                note("dispatcher", layer, None, every, path + "moe.input")
                for expert in range(trace.num_experts):
                    tokens = trace.expert_rows(layer, expert)["tokens"].tolist()
                    note("expert", layer, expert, [row for row in tokens if row in every], path + "moe.output")
                if path + "moe.shared.output" in trace:
                    note("shared", layer, None, every, path + "moe.shared.output")
                note("aggregator", layer, None, every, path + "moe.output")
            else:
                note("mlp", layer, None, every, path + "mlp.output")
            note("residual", layer, None, every, path + "output")
        note("norm", None, None, every, "norm")
        note("logits", None, None, [stop - 1], "logits")
    return facts


def one_term(random, facts):
    """A comparison as text, and the same as a function of one row's facts; an unknown is no hit."""
    name = str(
        random.choice(["token", "layer", "expert", "count", "absmax", "margin", "entropy", "gate", "stage", "experts"])
    )
    values = [row[name] for about in facts.values() for row in about.values() if row.get(name) is not None]
    value = values[int(random.integers(len(values)))]
    if name == "experts":
        number = int(value[0])
        return f"{number} in experts", lambda row: "experts" in row and number in row["experts"]
    if name == "stage":
        return f"stage == '{value}'", lambda row: row["stage"] == value
    sign = str(random.choice(["<", ">=", "==", "!="]))
    compare = {"<": float.__lt__, ">=": float.__ge__, "==": float.__eq__, "!=": float.__ne__}[sign]
    return (
        f"{name} {sign} {float(value)!r}",
        lambda row: row.get(name) is not None and compare(float(row[name]), float(value)),
    )


def scan(about, terms, joins):
    """The rows for which the terms hold: `and` binds more tightly than `or`."""
    rows = set()
    for row, known in about.items():
        truths = [[terms[0][1](known)]]
        for join, term in zip(joins, terms[1:], strict=True):
            truths.append([term[1](known)]) if join == "or" else truths[-1].append(term[1](known))
        if any(all(group) for group in truths):
            rows.add(row)
    return rows


def test_breakpoints_stop_run_to_count_their_hits_and_can_be_off(bundled):
    stepper = bundled.session(max_tokens=64).stepper([5, 6])
    name = stepper.breakpoints.add("stage == 'router' and layer == 1")
    off = stepper.breakpoints.add("stage == 'embed'", name="early")
    stepper.breakpoints.disable(off)
    assert name == "1"
    assert stepper.run_to().reason == "breakpoint 1"
    assert stepper.run_to("layer == 2 and stage == 'attention'").reason == "condition"
    assert stepper.run_to().tokens == (1,)
    assert (stepper.breakpoints["1"].hits, stepper.breakpoints["early"].hits) == (2, 0)
    stepper.finish()
    assert stepper.breakpoints["1"].hits == 2
    with pytest.raises(lab.ArgumentError, match="early"):
        stepper.breakpoints.remove("earl")
    with pytest.raises(lab.ArgumentError, match="taken"):
        stepper.breakpoints.add("count > 0", name="early")


def test_watches_give_their_values_at_each_place(bundled):
    session = bundled.session(capture="all", max_tokens=64)
    stepper = session.stepper([5, 6, 7], chunk=None)
    assert stepper.watch("margin") is None
    stepper.run_to("stage == 'aggregator' and layer == 0")
    np.testing.assert_allclose(stepper.values()["margin"], lab.routing.margin(fed(bundled, [[5, 6, 7]]))[0])
    absmax = stepper.watch("absmax('layers.0.moe.output')")
    np.testing.assert_allclose(absmax, np.abs(stepper.peek("layers.0.moe.output")).max(axis=1))
    stepper.unwatch("margin")
    assert stepper.watches == ["absmax('layers.0.moe.output')"]
    with pytest.raises(lab.ArgumentError, match="nothing watches"):
        stepper.unwatch("margin")


def test_a_fork_without_edits_equals_its_parent_and_is_independent(bundled):
    session = bundled.session(capture="all", max_tokens=64)
    session.feed([3, 4])
    stepper = session.stepper([5, 6, 7])
    stepper.step("token")
    stepper.run_to("stage == 'dispatcher' and layer == 2")
    fork = stepper.fork()
    assert fork.where == stepper.where and fork.session is not session
    fork.finish()
    assert stepper.where.stage == "dispatcher"
    stepper.finish()
    assert held(fork.session) == held(session) == held(fed(bundled, [[3, 4], [5], [6], [7]]))
    same = stepper.compare(fork)
    assert same.identical and same.kl == 0 and not same.routing and not same.residual.any()


def test_a_session_that_goes_on_alone_leaves_its_stepper_behind(bundled):
    session = bundled.session(max_tokens=64)
    stepper = session.stepper([5, 6])
    stepper.step("token")
    session.feed([7])
    with pytest.raises(lab.BusyError, match="went on without this stepper"):
        stepper.step()
    stepper = session.stepper([8])
    stepper.step()
    with pytest.raises(lab.BusyError):
        session.feed([9])
    with pytest.raises(lab.BusyError, match="middle of a pass"):
        session.stepper([9])
    session.reset()
    with pytest.raises(lab.BusyError):
        stepper.step()
    session.feed([1])


def test_a_condition_on_what_the_session_never_has_is_refused_with_the_capture_to_ask_for(bundled):
    stepper = bundled.session(capture="moe", max_tokens=64).stepper([5])
    for path in ("layers.1.attn.weights", "moe.experts.3.hidden"):
        with pytest.raises(lab.NotCapturedError, match="capture"):
            stepper.run_to(f"absmax('{path}') > 3")
    assert stepper.at_start


def test_feeding_and_generating_in_the_middle_of_a_pass_say_how_to_go_on(bundled):
    session = bundled.session(max_tokens=64)
    session.stepper([5]).step("layer")
    for call in (lambda: session.feed([6]), lambda: next(session.generate(1))):
        with pytest.raises(lab.BusyError, match=r"before the attention of layer 1; let it finish\(\)"):
            call()


@pytest.mark.parametrize(
    ("ids", "chunk", "error"),
    [
        ([], 1, lab.ArgumentError), ([5], 0, lab.ArgumentError), ([5], 1.5, lab.ArgumentError),
        ([5], "x", lab.ArgumentError),
        ([5], True, lab.ArgumentError), ([-1], 1, lab.ArgumentError), ([[5]], 1, lab.ArgumentError),
    ],
)  # fmt: skip
def test_wrong_prompts_and_chunks_are_refused(bundled, ids, chunk, error):
    with pytest.raises(error):
        bundled.session(max_tokens=64).stepper(ids, chunk=chunk)


def test_ids_outside_the_vocabulary_and_too_many_tokens_are_refused_before_anything_runs(bundled):
    session = bundled.session(max_tokens=4)
    with pytest.raises(lab.ArgumentError, match="vocab"):
        session.stepper([5, 10**6])
    with pytest.raises(lab.CapacityError, match="4"):
        session.stepper([5] * 5)
    assert session.ids == []


def test_unknown_units_are_refused_with_the_known_ones(bundled):
    stepper = bundled.session(max_tokens=4).stepper([5])
    for call in (stepper.step, stepper.back):
        with pytest.raises(lab.ArgumentError, match="'stage', 'expert', 'layer', 'token'"):
            call("stages")


def test_a_bad_condition_is_refused_before_anything_runs(bundled):
    stepper = bundled.session(max_tokens=4).stepper([5])
    with pytest.raises(lab.ArgumentError) as caught:
        stepper.run_to("layer == 1 and margn < 3")
    assert caught.value.column == 15 and stepper.at_start
    for wrong in ("absmax('layers.99.moe.output') > 3", "layer == 99 and absmax('moe.outptu') > 3"):
        with pytest.raises(lab.ColibriError, match=r"no layer 99|moe\.output"):
            stepper.run_to(wrong)
        with pytest.raises(lab.ColibriError):
            stepper.breakpoints.add(wrong)
    assert stepper.at_start and not stepper.breakpoints


def test_steppers_are_not_pickled_and_free_their_session(bundled):
    stepper = bundled.session(max_tokens=4).stepper([5])
    with pytest.raises(TypeError, match="fork"):
        pickle.dumps(stepper)
    stepper.step()
    gc.collect()
    users = bundled._engine.users()
    del stepper
    gc.collect()
    assert bundled._engine.users() == users - 1


def test_where_says_in_a_sentence_where_it_stands(bundled):
    stepper = bundled.session(max_tokens=64).stepper(PROMPT, chunk=None)
    assert str(stepper.where) == "before the first stage"
    stepper.run_to("stage == 'expert'")
    where = stepper.where
    assert f"expert {where.expert} of layer 0" in str(where)
