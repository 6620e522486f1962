"""Exercises of notebook 02: walking through a pass and changing it."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import numpy as np

from colibri_lab.compare import Comparison
from colibri_lab.exercises._answers import Verdict, near, number, pair, paths, whole
from colibri_lab.model import Model, open
from colibri_lab.stepper import Stepper

__all__ = ["stepper_1", "stepper_2", "stepper_3", "stepper_4"]


def stepper_1(answer: object) -> Verdict:
    """In which layer is the router least sure, by `margin`, about the last token of "2 * 9 = 1"? A layer number."""
    layer = whole(answer)
    layers = _model().config.num_hidden_layers
    if layer is None:
        return Verdict(False, "The answer is the number of a layer: a whole number such as 0.")
    if not 0 <= layer < layers:
        return Verdict(False, f"The layers of this model are 0 to {layers - 1}.")
    margins = _margins("2 * 9 = 1")
    if layer == int(margins[:, -1].argmin()):
        return Verdict(True, "There the second expert was chosen by the smallest lead over the third.")
    if layer == int(margins.min(axis=1).argmin()):
        return Verdict(False, "That layer has the least sure decision of all tokens. Look at the last token alone.")
    return Verdict(
        False,
        'Another layer is less sure. Watch "margin", take chunk=None, and go from router to router with '
        "run_to(\"stage == 'router'\"): the last row is the last token.",
    )


def stepper_2(answer: object) -> Verdict:
    """Which buffers that the router of layer 3 writes will a later stage still read? Their paths, in any order."""
    given = paths(answer)
    if given is None:
        return Verdict(False, 'The answer is a list of paths, such as ["layers.3.moe.scores"], long or short.')
    written, read = _router_writes()
    names = [re.sub(r"^layers\.3\.", "", path.strip()) for path in given]
    names = [name if name.startswith("moe.") else f"moe.{name}" for name in names]
    strangers = [path for path, name in zip(given, names, strict=True) if name not in written]
    if strangers:
        return Verdict(
            False, f"{strangers[0]!r:.80} is not written by the router of layer 3; its buffers: {', '.join(written)}."
        )
    if set(names) == read:
        return Verdict(True, "An edit of the others would change nothing, and edit() refuses it.")
    if not set(names) <= read:
        return Verdict(
            False,
            "At least one of these has no reader left. Step to the router of layer 3 and ask stepper.readers(path) of "
            "each: an empty list means nobody.",
        )
    return Verdict(
        False, "All of these are read, and there is at least one more. stepper.locals() lists what there is."
    )


def stepper_3(answer: object) -> Verdict:
    """Which expert of layers 1 to 5, switched off for all tokens of "6 * 4 = 2", changes the next token's distribution
    most, as KL(original || ablated)? A pair (layer, expert), or its path.
    """
    place = pair(answer)
    config = _model().config
    if place is None:
        return Verdict(False, 'The answer is a pair (layer, expert), such as (1, 0), or "layers.1.moe.experts.0".')
    layer, expert = place
    if not (1 <= layer < config.num_hidden_layers and 0 <= expert < config.num_experts):
        return Verdict(
            False, f"Layers 1 to {config.num_hidden_layers - 1} and experts 0 to {config.num_experts - 1} take part."
        )
    effects = _ablations("6 * 4 = 2")
    if place == max(effects, key=effects.__getitem__):
        return Verdict(True, "No other ablation of these layers moves the prediction as far. For this one prompt.")
    if not effects[place]:
        return Verdict(False, "No token of the prompt goes to that expert, so switching it off changes nothing at all.")
    ahead = sum(effect > effects[place] for effect in effects.values())
    return Verdict(
        False,
        f"Larger effects among the {len(effects)} ablations: {ahead}. Ablate each pair once in a walk of its own, and "
        "compare the log-probabilities with those of the plain run.",
    )


def stepper_4(answer: object) -> Verdict:
    """Layer 3 may send tokens to one expert only (set_k) in a walk through "3 * 7 = 2": KL(original || fork) of the
    last distribution in nats? A number, within 2 percent, or the Comparison.
    """
    kl = answer.kl if isinstance(answer, Comparison) else number(answer)
    if kl is None:
        return Verdict(False, "The answer is a number in nats, such as 1.5, or what compare() returned.")
    forward, backward = _fewer_experts("3 * 7 = 2", 3)
    if near(kl, forward):
        return Verdict(True, "That is what the second choices of this layer bring to this prediction.")
    if near(kl, backward):
        return Verdict(False, "That is KL(fork || original). The original comes first: original.compare(fork).")
    if near(kl, forward / np.log(2)):
        return Verdict(False, "That is in bits. A nat is 1.44 bits.")
    if abs(kl - forward) <= 0.2 * forward:
        return Verdict(False, "That is close. Give three digits.")
    return Verdict(
        False,
        "Fork a stepper at its start, fork.set_k(1, layer=3) in that layer alone; original.compare(fork) has .kl.",
    )


# ---- the truth, worked out when it is asked for ------------------------------------------------------------------


@cache
def _model() -> Model:
    return open()


def _walk(text: str) -> Stepper:
    return _model().session(capture="none").stepper(text, chunk=None)


@cache
def _margins(text: str) -> np.ndarray[Any, Any]:
    """(layers, tokens): how far the last expert chosen is ahead of the first one left out."""
    rows = []
    session = _model().session(capture="moe")
    session.feed(text)
    for layer in _model().config.moe_layers:
        scores = np.sort(session.tape[f"layers.{layer}.moe.scores"], axis=1)
        k = _model().config.top_k
        rows.append(scores[:, -k] - scores[:, -k - 1])
    return np.array(rows)


@cache
def _router_writes() -> tuple[list[str], set[str]]:
    """The names that the router of layer 3 writes, and those of them that a later stage reads."""
    stepper = _walk("3 * 7 = 2")
    stepper.run_to("layer == 3 and stage == 'attention'")
    before = set(stepper.locals())
    stepper.step()
    written = [path for path in stepper.locals() if path not in before]
    short = {path: path.removeprefix("layers.3.") for path in written}
    return list(short.values()), {short[path] for path in written if stepper.readers(path)}


@cache
def _ablations(text: str) -> dict[tuple[int, int], float]:
    """KL(original || ablated) of the last distribution for each expert of the layers after the first."""
    plain = _log_p(_walk(text))
    effects = {}
    for layer in _model().config.moe_layers[1:]:
        for expert in range(_model().config.num_experts):
            walk = _walk(text)
            walk.ablate(layer, expert)
            effects[layer, expert] = _kl(plain, _log_p(walk))
    return effects


@cache
def _fewer_experts(text: str, layer: int) -> tuple[float, float]:
    """KL of the plain run and one with a single expert in `layer`, in either direction."""
    plain, walk = _log_p(_walk(text)), _walk(text)
    walk.set_k(1, layer=layer)
    fewer = _log_p(walk)
    return _kl(plain, fewer), _kl(fewer, plain)


def _log_p(walk: Stepper) -> np.ndarray[Any, Any]:
    walk.finish()
    z = walk.session.logits.astype(np.float64)
    z -= z.max()
    return np.asarray(z - np.log(np.exp(z).sum()))


def _kl(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    return float((np.exp(a) * (a - b)).sum())
