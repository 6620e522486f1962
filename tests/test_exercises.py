"""Exercises that mark themselves: every spelling of the right answer passes, wrong ones are told where to look."""

from __future__ import annotations

import numpy as np
import pytest

import colibri_lab as lab

CHECKS = {name: getattr(lab.exercises, name) for name in lab.exercises.__all__ if name.startswith("stepper_")}


class Hostile:
    """Raises at every look."""

    def __iter__(self):
        raise ValueError("no")

    def __array__(self, dtype=None, copy=None):
        raise TypeError("no")

    def __str__(self):
        raise RuntimeError("no")


@pytest.fixture(scope="module")
def model():
    return lab.open()


def fed(model, text):
    session = model.session(capture="all")
    session.feed(text)
    return session


def log_p(logits):
    z = logits.astype(np.float64)
    return z - np.logaddexp.reduce(z)


@pytest.fixture(scope="module")
def truth(model):
    """The answers by another way than the checks take: plain runs, analyses, and the model put together by hand."""
    margins = lab.routing.margin(fed(model, "2 * 9 = 1"))
    least_sure = int(margins[:, -1].argmin())
    assert least_sure != int(margins.min(axis=1).argmin())  # else the hint about all tokens would tell the answer

    plain, effects = log_p(fed(model, "6 * 4 = 2").logits), np.zeros((6, 8))
    session = model.session(capture="all")
    for layer in range(1, 6):
        for expert in range(8):
            session.reset()
            stepper = session.stepper("6 * 4 = 2", chunk=None)
            stepper.run_to(f"layer == {layer} and stage == 'aggregator'")
            output = stepper.edit(f"layers.{layer}.moe.output")
            rows = stepper.peek(f"layers.{layer}.moe.experts.{expert}.tokens")
            gates = np.where(
                stepper.peek(f"layers.{layer}.moe.expert_ids") == expert, stepper.peek(f"layers.{layer}.moe.gates"), 0
            ).sum(axis=1)[rows]
            output[rows] -= gates[:, None] * stepper.peek(f"layers.{layer}.moe.experts.{expert}.output")
            stepper.finish()
            ablated = log_p(session.logits)
            effects[layer, expert] = (np.exp(plain) * (plain - ablated)).sum()
    layer, expert = np.unravel_index(int(effects.argmax()), effects.shape)

    original = model.session().stepper("3 * 7 = 2", chunk=None)
    fork = original.fork()
    fork.set_k(1, layer=3)
    return {
        "layer": least_sure,
        "pair": (int(layer), int(expert)),
        "unused": next(pair for pair in np.ndindex(6, 8) if pair[0] and effects[pair] == 0),
        "comparison": original.compare(fork),
        "backward": fork.compare(original).kl,
    }


def right_variants(truth):
    layer, (deep, e), comparison = truth["layer"], truth["pair"], truth["comparison"]
    router = "layers.3.moe."
    return {
        "stepper_1": [layer, np.int64(layer), float(layer), np.array([layer]), str(layer), f"layers.{layer}"],
        "stepper_2": [
            ["moe.input", "moe.expert_ids", "moe.gates"],
            ("gates", "input", "expert_ids"),
            {router + "gates", router + "expert_ids", router + "input"},
            np.array([router + "input", "moe.gates", "expert_ids"]),
            "moe.input, moe.gates, moe.expert_ids",
            {router + "gates": 1, router + "expert_ids": 2, router + "input": 3}.keys(),
        ],
        "stepper_3": [
            (deep, e), [deep, e], np.array([deep, e]), (np.int64(deep), float(e)), f"layers.{deep}.moe.experts.{e}",
            f"layers.{deep}.moe.experts.{e}.output",
        ],
        "stepper_4": [
            comparison, comparison.kl, np.float32(comparison.kl), round(comparison.kl, 4), [comparison.kl],
            str(comparison.kl),
        ],
    }  # fmt: skip


def wrong_answers(truth):
    layer, (deep, e), kl = truth["layer"], truth["pair"], truth["comparison"].kl
    return {
        "stepper_1": [(layer + 1) % 6, np.int64((layer + 3) % 6), -1, 6, layer + 0.5, 10**400, True],
        "stepper_2": [
            ["moe.gates"], ["moe.input", "moe.scores", "moe.gates"], ["layers.3.moe.output"], "moe.router_logits",
            ["layers.2.moe.input", "layers.2.moe.expert_ids", "layers.2.moe.gates"], [3, 4, 5],
            ["moe.input", "moe.router_logits", "moe.scores", "moe.expert_ids", "moe.gates"],
        ],
        "stepper_3": [
            (e, deep), (deep, (e + 1) % 8), (0, 1), (6, 0), truth["unused"], (deep,), (deep, e, 0), f"layers.{deep}",
        ],
        "stepper_4": [
            kl * 1.05, -kl, truth["backward"], kl / np.log(2), 0, float("nan"), float("inf"), [kl, kl],
        ],
    }  # fmt: skip


NOT_ANSWERS = (
    ..., None, object(), Hostile(), b"3", {}, [], [[]], "", "zero", 1j, {"layer": 1}, [None, None], lambda: 3,
    np.zeros((2, 2)), np.array(["a"], object), [[1, 2], [3]], np.datetime64("2020-01-01"), range(10**12),
)  # fmt: skip


@pytest.mark.parametrize("name", CHECKS)
def test_every_spelling_of_the_right_answer_is_accepted(name, truth):
    variants = right_variants(truth)[name]
    assert len(variants) >= 3
    for answer in variants:
        verdict = CHECKS[name](answer)
        assert verdict and verdict.right, (answer, verdict)


@pytest.mark.parametrize("name", CHECKS)
def test_wrong_answers_are_rejected_with_a_sentence_that_does_not_tell_the_right_one(name, truth):
    answers = wrong_answers(truth)[name]
    assert len(answers) >= 5
    for answer in answers:
        verdict = CHECKS[name](answer)
        assert not verdict, (answer, verdict)
        assert len(verdict.message) > 20
        told = {"stepper_1": f"layer {truth['layer']}", "stepper_3": str(truth["pair"])}.get(name)
        assert told is None or told not in verdict.message, verdict


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("number", range(len(NOT_ANSWERS)))
def test_what_cannot_be_an_answer_never_raises_and_is_told_what_one_looks_like(name, number):
    verdict = CHECKS[name](NOT_ANSWERS[number])
    assert not verdict and ("answer is" in verdict.message or "its buffers:" in verdict.message), verdict


def test_a_mistake_that_is_known_is_named(truth):
    """The other direction of KL, bits, an expert that no token uses, a path missing, a path of another stage."""
    checks = lab.exercises
    assert "KL(fork || original)" in checks.stepper_4(truth["backward"]).message
    assert "bits" in checks.stepper_4(truth["comparison"].kl / np.log(2)).message
    assert "No token" in checks.stepper_3(truth["unused"]).message
    assert "three digits" in checks.stepper_4(1.1 * truth["comparison"].kl).message
    layer, expert = truth["pair"]
    assert all(
        checks.stepper_3(text)
        for text in (f"({layer}, {expert})", f"{layer},{expert}", f"layer {layer}, expert {expert}")
    )
    assert "at least one more" in checks.stepper_2(["moe.gates"]).message
    assert "not written by the router" in checks.stepper_2(["moe.output", "moe.gates"]).message


def test_no_answer_is_stored(monkeypatch):
    """The verdict follows what is worked out: other numbers, other answers."""
    checks = lab.exercises
    from colibri_lab.exercises import _stepper

    monkeypatch.setattr(_stepper, "_margins", lambda text: np.array([[3, 3], [2, 2], [1, 1], [2, 2], [3, 0.5], [1, 4]]))
    assert [layer for layer in range(6) if checks.stepper_1(layer)] == [4]
    pairs = list(np.ndindex(6, 8))[8:]
    monkeypatch.setattr(_stepper, "_ablations", lambda text: {pair: float(pair == (2, 1)) for pair in pairs})
    assert [pair for pair in pairs if checks.stepper_3(pair)] == [(2, 1)]
    monkeypatch.setattr(_stepper, "_fewer_experts", lambda text, layer: (0.5, 0.25))
    assert checks.stepper_4(0.5) and not checks.stepper_4(0.25)
    monkeypatch.setattr(_stepper, "_router_writes", lambda: (["moe.input", "moe.gates"], {"moe.input"}))
    assert checks.stepper_2(["input"]) and not checks.stepper_2(["input", "gates"])


def test_a_verdict_reads_as_a_sentence():
    assert repr(lab.exercises.stepper_1(None)).startswith("Not yet. The answer is")
    assert repr(lab.exercises.Verdict(True, "So it is.")) == "Right. So it is."
