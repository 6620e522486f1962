"""The bundled model, run by our engine, is the model that was trained: losses and routing on held-out text."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import colibri_lab as lab

ROOT = Path(__file__).parent.parent
TOOLS = ROOT / "tools" / "bundled_model"
SAMPLE = json.loads((ROOT / "tests" / "fixtures" / "held_out.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def model() -> lab.Model:
    return lab.open()


@pytest.fixture(scope="module")
def runs(model: lab.Model) -> dict[str, tuple[np.ndarray, lab.Trace]]:
    """Logits and trace of each domain's sample."""
    out = {}
    for domain, row in SAMPLE.items():
        session = model.session(capture=["routing", "logits"])
        session.feed(row["text"])
        out[domain] = session.tape["logits"], session.trace()
    return out


@pytest.mark.parametrize("domain", SAMPLE)
def test_the_loss_on_held_out_text_is_that_of_transformers(domain: str, runs: Any) -> None:
    """Both are float32 with the same weights: the mean loss agrees to 2e-6 nats (seen: under 1e-6)."""
    logits, trace = runs[domain]
    z = logits[:-1].astype(np.float64)
    target = np.array(trace.ids[1:])
    shifted = z - z.max(axis=1, keepdims=True)
    loss = np.log(np.exp(shifted).sum(axis=1)) - shifted[np.arange(len(z)), target]
    assert len(trace.ids) == SAMPLE[domain]["tokens"]
    assert loss.mean() == pytest.approx(SAMPLE[domain]["loss"], abs=2e-6)
    assert loss.mean() < math.log(logits.shape[1]) - 3  # a really trained model: uniform guessing gives ln V


@pytest.mark.parametrize("domain", SAMPLE)
def test_the_routing_of_held_out_text_is_that_of_transformers(domain: str, runs: Any) -> None:
    """No choice of the sample is nearer than 9e-5 in the logits, so every expert gets the same number of tokens."""
    _, trace = runs[domain]
    np.testing.assert_array_equal(lab.routing.load(trace), SAMPLE[domain]["load"])


def test_experts_prefer_kinds_of_text(runs: Any) -> None:
    """The clearest cases, layer 5: French has expert 1, English expert 6, arithmetic expert 7, markup expert 3."""
    share = {domain: lab.routing.load(trace)[5] / len(trace.ids) for domain, (_, trace) in runs.items()}
    for domain, expert in (("french", 1), ("english", 6), ("arithmetic", 7), ("markup", 3)):
        others = [share[other][expert] for other in share if other != domain]
        assert share[domain][expert] > 0.5 and share[domain][expert] > 1.5 * np.mean(others), (domain, share[domain])


def test_no_expert_is_dead(runs: Any) -> None:
    assert (sum(lab.routing.load(trace) for _, trace in runs.values()) > 0).all()


def test_it_has_a_tokenizer_that_covers_its_vocabulary_and_spells_any_text(model: lab.Model) -> None:
    tokenizer = model.tokenizer
    assert tokenizer is not None and tokenizer.vocab_size == model.config["vocab_size"] == 2048
    assert tokenizer.eos_ids == (1,) and tokenizer.encode("")[:1] == [0]
    for text in (*(row["text"] for row in SAMPLE.values()), "你好 🙂\r\n\t\0 ẞ"):
        assert tokenizer.decode(tokenizer.encode(text, special=False)) == text


def test_it_is_small_and_doctor_finds_it_healthy() -> None:
    folder = ROOT / "colibri_lab" / "bundled" / "tiny-colibri"
    assert sum(file.stat().st_size for file in folder.iterdir()) < 10e6
    report = lab.doctor(folder)
    assert report.ok and report.opens, str(report)


def test_the_report_was_measured_through_the_engine_and_agrees_with_the_training_code() -> None:
    """report.json is the engine's; training_figures.json is what PyTorch measured on the same windows."""
    report = json.loads((TOOLS / "report.json").read_text(encoding="utf-8"))
    figures = json.loads((TOOLS / "training_figures.json").read_text(encoding="utf-8"))
    assert report["engine"]["isa"]
    for domain, loss in figures["loss"].items():
        assert report["loss"][domain] == pytest.approx(loss, abs=2e-6)
    for ours, theirs in zip(report["layers"], figures["layers"], strict=True):
        assert ours["domain_expert_share"] == theirs["domain_expert_share"] and ours["load"] == theirs["load"]
        for figure in ("domain_information_bits", "token_information_bits", "router_entropy_bits"):
            assert ours[figure] == theirs[figure]


def test_every_figure_of_the_card_is_in_the_report() -> None:
    """Losses and informations that MODEL_CARD.md prints are those of report.json, rounded."""
    card = (TOOLS / "MODEL_CARD.md").read_text(encoding="utf-8")
    report = json.loads((TOOLS / "report.json").read_text(encoding="utf-8"))
    losses = " | ".join(f"{report['loss'][domain]:.2f}" for domain in report["domains"])
    bits = ", ".join(f"{layer['domain_information_bits']:.2f}" for layer in report["layers"])
    assert f"| model | {losses} |" in card and bits in " ".join(card.split())
