"""Interventions: identities that hold by the bytes, and refusals that say where to edit instead."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
from walks import FAMILIES, fed, held, ids_for, model_of

import colibri_lab as lab

MODELS = ("bundled", *FAMILIES)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {name: model_of(name, folder) for name in MODELS}


@pytest.fixture(scope="module")
def bundled(models):
    return models["bundled"]


def walk(model, chunk=None, count=6, capture="all"):
    session = model.session(capture=capture, max_tokens=64)
    return session, session.stepper(ids_for(model, count), chunk=chunk)


def fma_sum(gates, outputs, width):
    """The engine's weighted sum: acc = fma(gate, value, acc), which float64 gives exactly before it is rounded."""
    acc = np.zeros(width, np.float32)
    for gate, output in zip(gates, outputs, strict=True):
        acc = (np.float64(gate) * output.astype(np.float64) + acc.astype(np.float64)).astype(np.float32)
    return acc


def expert_by_hand(model, layer, expert, x):
    """down( silu(gate x) * (up x) ) in float64."""
    w = {
        part: model.weights.float32(f"layers.{layer}.moe.experts.{expert}.{part}").astype(np.float64)
        for part in ("gate", "up", "down")
    }
    z = x.astype(np.float64) @ w["gate"].T
    return (z / (1 + np.exp(-z)) * (x.astype(np.float64) @ w["up"].T)) @ w["down"].T


# ---- identities ----


@pytest.mark.parametrize("name", MODELS)
def test_patching_any_buffer_with_itself_changes_no_byte(models, name):
    session, stepper = walk(models[name])
    plain = fed(models[name], [stepper.ids])
    patched = 0
    for path in plain.tape:
        if ".experts." in path and not path.endswith((".input", ".output")):
            continue
        try:
            stepper.patch(path, plain.tape[path])
            patched += 1
        except lab.ArgumentError as error:
            assert "edit" in str(error) or "change" in str(error)
    stepper.finish()
    assert patched > 10 and held(session) == held(plain)


@pytest.mark.parametrize("name", MODELS)
def test_ablation_equals_the_recombination_by_hand(models, name):
    model = models[name]
    plain = fed(model, [ids_for(model, 6)])
    layer = plain.trace().moe_layers[-1]
    ids, gates = np.array(plain.tape.expert_ids(layer)), np.array(plain.tape.gates(layer))
    off = int(np.bincount(ids.ravel()).argmax())
    session, stepper = walk(model)
    stepper.ablate(layer, off)
    stepper.finish()
    outputs = {
        (token, expert): plain.tape.expert_outputs(layer, expert)[row]
        for expert in range(model.config.num_experts)
        for row, token in enumerate(plain.tape[f"layers.{layer}.moe.experts.{expert}.tokens"].tolist())
    }
    for token in range(6):
        slots = [slot for slot in range(ids.shape[1]) if ids[token, slot] != off]
        by_hand = fma_sum(
            gates[token, slots], [outputs[token, ids[token, slot]] for slot in slots], model.config.hidden_size
        )
        assert session.tape[f"layers.{layer}.moe.routed"][token].tobytes() == by_hand.tobytes()
    new_ids, new_gates = session.tape.expert_ids(layer), session.tape.gates(layer)
    assert (new_ids[ids == off] == -1).all() and (new_gates[ids == off] == 0).all()
    np.testing.assert_array_equal(new_gates[ids != off], gates[ids != off])
    assert session.tape.expert_inputs(layer, off).shape == (0, model.config.hidden_size)


def test_an_ablated_expert_is_not_touched_even_when_its_output_is_nan(bundled):
    session, stepper = walk(bundled)
    stepper.run_to("stage == 'router' and layer == 1")
    expert = int(stepper.locals()["expert_ids"][0, 0])
    stepper.scale(f"layers.1.moe.experts.{expert}.output", float("nan"))
    fork = stepper.fork()
    stepper.ablate(1, expert)
    stepper.finish()
    fork.finish()
    assert np.isfinite(session.logits).all() and np.isnan(fork.session.tape["layers.1.moe.output"]).any()


@pytest.mark.parametrize("name", MODELS)
def test_forced_routing_equals_running_those_experts_by_hand(models, name):
    model = models[name]
    session, stepper = walk(model)
    layer = model.config.moe_layers[0]
    experts, gates = [2, 0], [0.75, -0.5]
    stepper.force(layer, experts, gates)
    stepper.finish()
    x = session.tape[f"layers.{layer}.moe.input"]
    by_hand = sum(g * expert_by_hand(model, layer, e, x) for e, g in zip(experts, gates, strict=True))
    np.testing.assert_allclose(
        session.tape[f"layers.{layer}.moe.routed"], by_hand, rtol=0, atol=2e-5 * np.abs(by_hand).max()
    )
    assert (session.tape.expert_ids(layer)[:, :2] == experts).all()


@pytest.mark.parametrize("name", MODELS)
def test_forcing_the_routers_own_choice_changes_no_byte(models, name):
    model = models[name]
    plain = fed(model, [ids_for(model, 6)])
    session, stepper = walk(model)
    for layer in model.config.moe_layers:
        for token, row in enumerate(plain.tape.expert_ids(layer).tolist()):
            stepper.force(layer, row, tokens=token)
    stepper.set_k(model.config.top_k)
    stepper.bias_router(model.config.moe_layers[0], np.zeros(model.config.num_experts))
    stepper.gate_mode(model.config.gate_rule)
    stepper.finish()
    assert held(session) == held(plain)


@pytest.mark.parametrize("mode", ["softmax", "softmax_renormalised", "softmax_of_chosen", "raw_logits"])
def test_a_gate_mode_gives_the_bytes_of_a_session_with_it(models, mode):
    for model in models.values():
        plain = model.session(capture="all", max_tokens=64, gate_mode=mode)
        plain.feed(ids_for(model, 6))
        session, stepper = walk(model)
        stepper.gate_mode(mode)
        stepper.finish()
        assert held(session) == held(plain)


def test_S6_raw_logits_as_gates_of_one_layer_leave_the_others_alone(bundled):
    session, stepper = walk(bundled)
    plain = fed(bundled, [stepper.ids])
    stepper.gate_mode("raw_logits", layer=1)
    stepper.finish()
    chosen = np.take_along_axis(session.tape.router_logits(1), session.tape.expert_ids(1).astype(np.int64), axis=1)
    np.testing.assert_array_equal(session.tape.gates(1), chosen)
    np.testing.assert_array_equal(session.tape.gates(0), plain.tape.gates(0))


def test_a_smaller_k_keeps_the_best_experts_and_leaves_empty_slots(models):
    for model in models.values():
        session, stepper = walk(model)
        plain, layer = fed(model, [stepper.ids]), model.config.moe_layers[0]
        stepper.set_k(1, layer=layer)
        stepper.finish()
        ids, gates = session.tape.expert_ids(layer), session.tape.gates(layer)
        np.testing.assert_array_equal(ids[:, 0], plain.tape.expert_ids(layer)[:, 0])
        assert (ids[:, 1:] == -1).all() and (gates[:, 1:] == 0).all()
        if model.config.gate_rule in ("softmax_renormalised", "softmax_of_chosen"):
            np.testing.assert_array_equal(gates[:, 0], 1)
        else:
            np.testing.assert_array_equal(gates[:, 0], plain.tape.gates(layer)[:, 0])


def test_a_bias_of_the_router_moves_tokens_to_an_expert(bundled):
    session, stepper = walk(bundled)
    stepper.bias_router(2, {3: 1000.0}, tokens=[1, 4])
    stepper.finish()
    first = session.tape.expert_ids(2)[:, 0]
    assert first[1] == first[4] == 3
    np.testing.assert_array_equal(session.tape.expert_ids(1), fed(bundled, [stepper.ids]).tape.expert_ids(1))


def test_scaling_and_patching_reach_only_the_named_tokens(bundled):
    session, stepper = walk(bundled)
    plain = fed(bundled, [stepper.ids])
    stepper.scale("layers.0.moe.output", 0.0, tokens=2)
    stepper.patch("layers.1.attn.out", np.ones(bundled.config.hidden_size), tokens=[3])
    stepper.finish()
    changed = session.tape["layers.0.moe.output"]
    assert not changed[2].any()
    np.testing.assert_array_equal(np.delete(changed, 2, 0), np.delete(plain.tape["layers.0.moe.output"], 2, 0))
    assert (session.tape["layers.1.attn.out"][3] == 1).all()


# ---- edit ----


def test_an_edited_gate_is_the_one_that_the_aggregator_applies(bundled):
    session, stepper = walk(bundled)
    stepper.run_to("stage == 'router' and layer == 1")
    gates = stepper.edit("layers.1.moe.gates")
    gates[2] = [0.25, 2.0][: gates.shape[1]]
    stepper.finish()
    ids = session.tape.expert_ids(1)[2].tolist()
    rows = [session.tape[f"layers.1.moe.experts.{e}.tokens"].tolist().index(2) for e in ids]
    outputs = [session.tape.expert_outputs(1, e)[row] for e, row in zip(ids, rows, strict=True)]
    assert (
        session.tape["layers.1.moe.routed"][2].tobytes()
        == fma_sum(np.float32([0.25, 2.0]), outputs, bundled.config.hidden_size).tobytes()
    )
    assert session.trace().edits[0]["kind"] == "edit" and "layers.1.moe.gates" in stepper.edits[0].code


def test_an_edit_is_made_again_at_its_place_when_the_walk_comes_back(bundled):
    session, stepper = walk(bundled, chunk=2)
    stepper.step("token")
    stepper.run_to("stage == 'dispatcher' and layer == 1")
    stepper.edit("layers.1.moe.gates")[1, 0] = 0.125
    stepper.ablate(3, 0)
    stepper.finish()
    edited = held(session)
    random = np.random.default_rng(0)
    for _ in range(30):
        unit, back = str(random.choice(["stage", "expert", "layer", "token"])), random.random() < 0.6
        with suppress(StopIteration):
            stepper.back(unit) if back else stepper.step(unit)
    stepper.finish()
    assert held(session) == edited
    stepper.undo()
    stepper.undo()
    assert held(session) == held(fed(bundled, [stepper.ids[i : i + 2] for i in (0, 2, 4)]))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("seed", range(6))
def test_undo_restores_the_bytes(models, name, seed):
    random, model = np.random.default_rng(seed), models[name]
    session, stepper = walk(model, chunk=[1, None][seed % 2], count=4)
    layers, experts = model.config.moe_layers, model.config.num_experts
    changes = [
        lambda layer: stepper.ablate(layer, int(random.integers(experts))),
        lambda layer: stepper.force(layer, [int(random.integers(experts))]),
        lambda layer: stepper.set_k(1),
        lambda layer: stepper.bias_router(layer, {0: 3.0}),
        lambda layer: stepper.gate_mode("raw_logits"),
        lambda layer: stepper.scale(f"layers.{layer}.moe.output", 2.0),
        lambda layer: stepper.scale(f"layers.{layer}.moe.router_logits", 0.5),
        lambda layer: stepper.patch(f"layers.{layer}.attn.out", np.zeros(model.config.hidden_size)),
    ]
    made = 0
    for _ in range(25):
        try:
            if random.random() < 0.3:
                changes[int(random.integers(len(changes)))](int(random.choice(layers)))
                made += 1
            elif random.random() < 0.3:
                stepper.back(str(random.choice(["stage", "layer", "token"])))
            else:
                stepper.step(str(random.choice(["stage", "layer", "token"])))
        except (StopIteration, lab.ArgumentError):
            pass
    assert made == len(stepper.edits)
    while stepper.edits:
        stepper.undo()
    stepper.finish()
    size = 1 if seed % 2 == 0 else 4
    assert held(session) == held(fed(model, [stepper.ids[i : i + size] for i in range(0, 4, size)]))
    with pytest.raises(lab.ArgumentError, match="nothing to undo"):
        stepper.undo()


def test_a_view_from_edit_cannot_change_what_was_read(bundled):
    session, stepper = walk(bundled, chunk=2)
    plain = fed(bundled, [stepper.ids[i : i + 2] for i in (0, 2, 4)])
    stepper.run_to("stage == 'router' and layer == 0")
    gates = stepper.edit("layers.0.moe.gates")
    part = gates[:1]
    stepper.run_to("stage == 'aggregator'")
    with pytest.raises(ValueError, match="read-only"):
        gates[:] = 0
    part[:] = 77  # a slice made before: the memory is still the pass', but nobody reads it any more
    stepper.step("token")
    part[:] = 78
    assert held(session)["layers.0.moe.gates"] == plain.tape.gates(0)[:2].tobytes()
    stepper.finish()
    assert held(session) == held(plain)


def test_what_is_written_after_going_back_reaches_nothing(bundled):
    session, stepper = walk(bundled, chunk=2)
    stepper.run_to("stage == 'router' and layer == 0")
    gates = stepper.edit("layers.0.moe.gates")
    part = gates[:1]
    stepper.back()
    part[:] = 5
    stepper.finish()
    assert held(session) == held(fed(bundled, [stepper.ids[i : i + 2] for i in (0, 2, 4)]))


# ---- refusals ----


@pytest.mark.parametrize(
    ("at", "path", "instead"),
    [
        ("stage == 'router' and layer == 1", "layers.1.moe.router_logits", "layers.1.moe.expert_ids"),
        ("stage == 'router' and layer == 1", "layers.1.moe.scores", "force"),
        ("stage == 'attention' and layer == 1", "layers.1.attn.q", "layers.1.attn.out"),
        ("stage == 'dispatcher' and layer == 1", "layers.1.moe.expert_ids", "back"),
        ("stage == 'dispatcher' and layer == 1", "layers.1.moe.dispatch.tokens", "expert_ids"),
        ("stage == 'aggregator' and layer == 1", "layers.1.moe.gates", "layers.1.moe.output"),
        ("stage == 'residual' and layer == 1", "layers.1.moe.output", "layers.1.output"),
        ("stage == 'embed'", "layers.1.moe.gates", "router of layer 1 writes it"),
        ("stage == 'logits'", "norm", "closed"),
        ("stage == 'norm'", "layers.0.output", "norm"),
    ],
)
def test_an_edit_of_what_nobody_will_read_is_refused_and_says_where_to_edit(bundled, at, path, instead):
    session, stepper = walk(bundled)
    stepper.run_to(at)
    with pytest.raises(lab.ArgumentError) as caught:
        stepper.edit(path)
    assert instead in str(caught.value) and path in str(caught.value)
    stepper.finish()
    assert held(session) == held(fed(bundled, [stepper.ids]))


def test_an_edit_before_the_first_stage_says_which_stage_writes_the_buffer(bundled):
    _, stepper = walk(bundled)
    with pytest.raises(lab.ArgumentError, match=r"the router of layer 3 writes it.*patch\(\)"):
        stepper.edit("layers.3.moe.gates")


def test_changes_behind_the_walk_are_refused(bundled):
    _, stepper = walk(bundled)
    stepper.run_to("stage == 'dispatcher' and layer == 1")
    for call in (
        lambda: stepper.ablate(1, 0), lambda: stepper.force(0, [1]), lambda: stepper.set_k(1, layer=0),
        lambda: stepper.patch("layers.0.moe.output", 0.0), lambda: stepper.scale("layers.1.moe.router_logits", 2),
        lambda: stepper.scale("embed", 2),
    ):  # fmt: skip
        with pytest.raises(lab.ArgumentError, match=r"back\(\)"):
            call()
    assert stepper.edits == []


@pytest.mark.parametrize(
    "call",
    [
        lambda s: s.ablate(0, 99), lambda s: s.ablate(99, 0), lambda s: s.ablate(0, "x"), lambda s: s.force(0, []),
        lambda s: s.force(0, [1, 1]), lambda s: s.force(0, [0, 1, 2, 3, 4, 5, 6, 7]),
        lambda s: s.force(0, [1], gates=[1, 2]),
        lambda s: s.set_k(0), lambda s: s.set_k(3), lambda s: s.set_k(1.5), lambda s: s.gate_mode("softmx"),
        lambda s: s.bias_router(0, [1.0]), lambda s: s.bias_router(0, {99: 1.0}), lambda s: s.scale("embed", "x"),
        lambda s: s.patch("embed", np.zeros((3, 3))), lambda s: s.patch("embed", "x"), lambda s: s.patch("embd", 0.0),
        lambda s: s.ablate(0, 1, tokens=99), lambda s: s.ablate(0, 1, tokens=[]), lambda s: s.scale("logits", 2.0),
        lambda s: s.patch("layers.0.moe.experts.0.hidden", 0.0), lambda s: s.edit("nowhere"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused_and_leave_no_edit(bundled, call):
    session, stepper = walk(bundled)
    with pytest.raises(lab.ColibriError):
        call(stepper)
    assert stepper.edits == []
    stepper.finish()
    assert held(session) == held(fed(bundled, [stepper.ids]))


def test_a_patch_that_does_not_fit_the_rows_it_meets_is_taken_back(bundled):
    session, stepper = walk(bundled)
    stepper.run_to("stage == 'dispatcher' and layer == 0")
    expert = int(session.model.config.num_experts - 1)
    stepper.patch(f"layers.1.moe.experts.{expert}.input", np.zeros((50, 3)))
    with pytest.raises(lab.ArgumentError, match="taken back"):
        stepper.finish()
    assert stepper.edits == []
    stepper.finish()
    assert held(session) == held(fed(bundled, [stepper.ids]))


def test_hostile_expert_ids_are_refused_by_the_dispatcher_and_can_be_mended(bundled):
    session, stepper = walk(bundled)
    stepper.run_to("stage == 'router' and layer == 1")
    ids = stepper.edit("layers.1.moe.expert_ids")
    before = np.array(ids)
    for wrong in (10**6, -7, int(ids[0, 1])):
        ids[0, 0] = wrong
        with pytest.raises(lab.ArgumentError, match="token 0"):
            stepper.step()
        assert stepper.where.stage == "router"
        stepper.undo()
        ids = stepper.edit("layers.1.moe.expert_ids")
        np.testing.assert_array_equal(ids, before)
    stepper.finish()
    assert held(session) == held(fed(bundled, [stepper.ids]))


def test_an_interrupt_leaves_a_stepper_that_goes_on(bundled):
    session, stepper = walk(bundled)
    stepper.step("layer")

    def stop(done):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stepper.finish(progress=stop)
    stepper.finish()
    assert held(session) == held(fed(bundled, [stepper.ids]))


# ---- compare ----


def test_compare_shows_what_an_ablation_changed(bundled):
    session, stepper = walk(bundled)
    stepper.run_to("stage == 'attention' and layer == 2")
    fork = stepper.fork()
    fork.ablate(2, int(fed(bundled, [stepper.ids]).tape.expert_ids(2)[-1, 0]))
    here, there = stepper.where, fork.where
    found = stepper.compare(fork)
    assert (stepper.where, fork.where) == (here, there)
    assert not found.identical and found.kl > 0 and found.routing
    assert not found.residual[:2].any() and found.residual[2].any()
    stepper.finish()
    fork.finish()
    p, q = (np.float64(s.logits) for s in (session, fork.session))
    p, q = p - p.max() - np.log(np.exp(p - p.max()).sum()), q - q.max() - np.log(np.exp(q - q.max()).sum())
    assert found.kl == pytest.approx((np.exp(p) * (p - q)).sum(), rel=1e-9)
    a, b = (np.float64(s.tape["layers.3.output"]) for s in (session, fork.session))
    np.testing.assert_allclose(found.residual[3], np.linalg.norm(b - a, axis=1) / np.linalg.norm(a, axis=1))
    best = max(found.top, key=lambda change: change.p)
    assert best.id == int(session.logits.argmax()) and best.p == pytest.approx(np.exp(p).max())
    moved = {(r.layer, r.token) for r in found.routing}
    for layer in bundled.config.moe_layers:
        before, after = np.sort(session.tape.expert_ids(layer)), np.sort(fork.session.tape.expert_ids(layer))
        for token in range(6):
            assert ((layer, token) in moved) == (before[token] != after[token]).any()
    assert "KL" in str(found)


def test_compare_refuses_walks_through_other_tokens(bundled, models):
    _, a = walk(bundled, count=3)
    _, b = walk(bundled, count=4)
    _, c = walk(models["mixtral"], count=3)
    for other in (b, c):
        with pytest.raises(lab.ArgumentError, match="different"):
            a.compare(other)


def test_an_edit_shows_itself_as_the_line_that_makes_it():
    """The last line of a cell is often a change: what is shown is its code and its place, not its insides."""
    stepper = lab.open().session().stepper("3 * 7 = 2")
    edit = stepper.ablate(layer=3, expert=5)
    assert repr(edit) == f"<Edit {edit}>"
    assert "stepper.ablate(layer=3, expert=5)" in repr(stepper.edits) and "before the first stage" in repr(edit)
    with pytest.raises(lab.ArgumentError, match=r"'sofmax'; there are softmax, softmax_renormalised, "):
        stepper.gate_mode("sofmax")
