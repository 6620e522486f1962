"""Generation: which tokens, when it stops, what text it gives, and that it never draws from numbers that are none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from checkpoints import read_checkpoint, write_checkpoint

import colibri_lab as lab
from colibri_lab.testing import tiny_model

PROMPT = [1, 2, 3, 4, 5]


@pytest.fixture(scope="module")
def model() -> lab.Model:
    return lab.open()


def test_greedy_takes_the_most_likely_token(model: lab.Model) -> None:
    """Each token is the argmax of the logits before it; logprob is its log-softmax; int(token) is the id."""
    session, check = model.session(max_tokens=64), model.session(max_tokens=64)
    session.feed("In the beginning")
    check.feed("In the beginning")
    tokens = list(session.generate(12, stop_ids=()))
    assert len(tokens) == 12 and [int(t) for t in tokens] == session.ids[-12:] == [t.id for t in tokens]
    for token in tokens:
        z = check.logits.astype(np.float64)
        assert token.id == z.argmax()
        assert token.logprob == pytest.approx(z[token.id] - z.max() - np.log(np.exp(z - z.max()).sum()))
        check.feed([token.id])
    assert len(session.passes) == 13


def test_the_same_seed_gives_the_same_tokens(model: lab.Model) -> None:
    """And another seed others; top_k=1 is greedy at any temperature."""

    def run(**options) -> list[int]:
        session = model.session(max_tokens=64)
        session.feed("In the beginning")
        return [int(t) for t in session.generate(20, stop_ids=(), **options)]

    assert run(temperature=1.0, seed=3) == run(temperature=1.0, seed=3) != run(temperature=1.0, seed=4)
    assert run(temperature=1.0, top_k=1, seed=5) == run()
    assert run(temperature=1.0, top_p=1e-9, seed=6) == run()


def test_the_text_joins_to_what_the_tokens_say(model: lab.Model) -> None:
    """The joined pieces equal the decoded continuation, whatever bytes the tokens hold."""
    tokenizer = model.tokenizer
    for seed in range(3):
        session = model.session(max_tokens=200)
        session.feed("Il était")
        before = tokenizer.decode(session.ids)
        text = "".join(t.text for t in session.generate(80, temperature=2.0, seed=seed, stop_ids=()))
        assert before + text == tokenizer.decode(session.ids)


def test_D1_a_character_begun_by_one_call_is_finished_by_the_next(model: lab.Model) -> None:
    """Tokens of one byte each: nothing until the character is whole; a tail at the end is shown, not lost."""
    tokenizer = model.tokenizer
    ids = tokenizer.encode("가", special=False)
    assert len(ids) == 3  # one token per byte
    session = model.session(max_tokens=64)
    session.feed([5, ids[0], ids[1]])
    from colibri_lab.generate import _stream

    stream = _stream(session)
    assert stream.push(ids[2]) == "가" and stream.push(ids[0]) == "" and stream.flush() == "\ufffd"


def test_generation_stops_at_the_models_end_tokens(tmp_path: Path) -> None:
    """None means the model's own, () none, and a list these; the stopping token is given and part of the session."""
    folder = tiny_model(tmp_path / "m")
    session = lab.open(folder).session(max_tokens=64)
    session.feed(PROMPT)
    free = [int(t) for t in session.generate(8, stop_ids=())]
    end = free[2]
    first = free.index(end)
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": [63, {end}]}}')
    for stop_ids in (None, [end], (end,), {end}):
        session = lab.open(folder).session(max_tokens=64)
        session.feed(PROMPT)
        assert [int(t) for t in session.generate(8, stop_ids=stop_ids)] == free[: first + 1]
        assert session.ids == PROMPT + free[: first + 1]
    session = lab.open(folder).session(max_tokens=64)
    session.feed(PROMPT)
    assert [int(t) for t in session.generate(8, stop_ids=())] == free


def test_at_the_limit_generation_raises_and_keeps_what_it_made(model: lab.Model) -> None:
    """CapacityError after the last token that fits; all of them are in the session, which stays readable."""
    session = model.session(max_tokens=10)
    session.feed(PROMPT)
    made = []
    with pytest.raises(lab.CapacityError, match="10"):
        for token in session.generate(20, stop_ids=()):
            made.append(int(token))
    assert len(made) == 5 and session.ids == PROMPT + made and session.tape.gates(0).shape == (10, 2)


def test_arguments_are_checked_at_the_call(model: lab.Model) -> None:
    """Before the first token is asked for."""
    session = model.session(max_tokens=16)
    session.feed(PROMPT)
    for wrong in ({"temperature": -1.0}, {"top_p": 0.0}, {"top_k": -2}, {"temperature": float("nan")}):
        with pytest.raises(lab.ArgumentError, match=next(iter(wrong))):
            session.generate(3, **wrong)
    for n in (-1, 1.5, True, "3"):
        with pytest.raises(lab.ArgumentError, match="number of tokens"):
            session.generate(n)
    assert list(session.generate(0)) == []


def test_a_session_fed_from_elsewhere_ends_the_generation(model: lab.Model) -> None:
    """The iterator notices that the logits are no longer those of its own last token."""
    session = model.session(max_tokens=32)
    session.feed(PROMPT)
    tokens = session.generate(5, stop_ids=())
    next(tokens)
    session.feed([9])
    with pytest.raises(lab.BusyError, match="another hand"):
        next(tokens)


# ---- B1 ----


def planted(tmp_path: Path, place: str, value: float, rows: list[int] | slice) -> lab.Model:
    """A tiny model of 32 words with `value` in some rows of one tensor."""
    config, tensors = read_checkpoint(tiny_model(tmp_path / "clean", vocab=32))
    tensors = {name: array.copy() for name, array in tensors.items()}
    tensors[place][rows] = value
    return lab.open(write_checkpoint(tmp_path / "planted", config, tensors))


@pytest.mark.parametrize("rows", [[0], [15], [31], slice(None)], ids=["at 0", "at 15", "at 31", "all"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_B1_no_token_comes_from_a_nan(tmp_path: Path, rows, temperature: float) -> None:
    """NaN in the output matrix: generation raises before the first token and names the element of the matrix."""
    session = planted(tmp_path, "lm_head.weight", np.nan, rows).session(max_tokens=16)
    session.feed(PROMPT)
    assert np.isnan(session.logits).any()
    with pytest.raises(
        lab.NonFiniteError,
        match=r"step 0 of generate.*born in logits.*token 0.*\(logits\): weight value: lm_head\[.*is NaN"
        r".*replayed.*lab\.nan\.find\(session\) tells more",
    ):
        next(session.generate(3, temperature=temperature, seed=1))
    assert session.ids == PROMPT


@pytest.mark.parametrize("value", [np.inf, -np.inf])
def test_B1_no_token_comes_from_an_infinity(tmp_path: Path, value: float) -> None:
    """An infinite row of the output matrix gives ±Inf or NaN logits; +Inf and NaN raise, −Inf excludes one token."""
    session = planted(tmp_path, "lm_head.weight", value, [7]).session(max_tokens=64)
    session.feed(PROMPT)
    logits = session.logits
    if np.isneginf(logits[7]):
        assert 7 not in [int(t) for t in session.generate(1, stop_ids=())]
    else:
        with pytest.raises(lab.NonFiniteError):
            next(session.generate(1))


@pytest.mark.parametrize("capture", ["none", "routing", "all"])
def test_B1_the_error_names_the_first_bad_layer(tmp_path: Path, capture: str) -> None:
    """A NaN in layer 1 is named as layer 1, from the tape when it was kept, else by a replay that the sentence
    mentions.
    """
    session = planted(tmp_path, "model.layers.1.self_attn.v_proj.weight", np.nan, [3]).session(
        capture=capture, max_tokens=16
    )
    session.feed(PROMPT)
    with pytest.raises(
        lab.NonFiniteError, match=r"born in layer 1, .*attention v.*token 0.*\(layers\.1\.attn\.v\)"
    ) as caught:
        next(session.generate(1))
    assert "weight value: layers.1.attn.v[3, 0] is NaN" in str(caught.value)
    assert ("replayed in a session of its own" in str(caught.value)) == (capture != "all")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_B1_the_error_names_the_expert_in_which_it_was_born(tmp_path: Path, temperature: float) -> None:
    """Layer, stage, expert, token and element, for a session that captured nothing."""
    clean = lab.open(tiny_model(tmp_path / "look", vocab=32)).session(capture="routing", max_tokens=16)
    clean.feed(PROMPT)
    expert = int(clean.tape["layers.1.moe.expert_ids"][-1, 0])
    place = f"model.layers.1.block_sparse_moe.experts.{expert}.w2.weight"
    session = planted(tmp_path, place, np.inf, [4]).session(capture="none", max_tokens=16)
    session.feed(PROMPT)
    weight = rf"layers\.1\.moe\.experts\.{expert}\.down\[4, "
    words = rf"born in layer 1, expert {expert}, output = .*token \d.*weight value: {weight}"
    with pytest.raises(lab.NonFiniteError, match=words):
        next(session.generate(1, temperature=temperature, seed=3))
    assert session.ids == PROMPT


def test_B1_an_edited_run_is_searched_in_what_it_kept(tmp_path: Path) -> None:
    """It cannot be replayed: the error says so, and still no token comes."""
    session = lab.open(tiny_model(tmp_path, vocab=32)).session(capture="none", max_tokens=16)
    stepper = session.stepper(PROMPT, chunk=None)
    stepper.patch("norm", np.full((5, 32), np.nan, np.float32))
    stepper.finish()
    with pytest.raises(lab.NonFiniteError, match=r"step 0 of generate.*32 are NaN.*lab\.nan\.find"):
        next(session.generate(1))


def test_B1_the_error_names_the_step(tmp_path: Path) -> None:
    """A NaN in the embedding of the second generated token: one good token, then an error that names step 2 and token
    6.
    """
    for seed in range(20):  # a checkpoint whose first two tokens are new ones
        folder = tiny_model(tmp_path / str(seed), vocab=32, seed=seed)
        clean = lab.open(folder).session(max_tokens=16)
        clean.feed(PROMPT)
        a, b = (int(t) for t in clean.generate(2, stop_ids=()))
        if len({a, b, *PROMPT}) == 7:
            break
    config, tensors = read_checkpoint(folder)
    tensors = {name: array.copy() for name, array in tensors.items()}
    tensors["model.embed_tokens.weight"][b] = np.nan
    session = lab.open(write_checkpoint(tmp_path / "planted", config, tensors)).session(max_tokens=16)
    session.feed(PROMPT)
    made = []
    with pytest.raises(
        lab.NonFiniteError,
        match=r"step 2 of generate, after 7 tokens.*born in embedding.*token 6.*\(embed\): embedding",
    ):
        for token in session.generate(5, stop_ids=()):
            made.append(int(token))
    assert made == [a, b] and session.ids == [*PROMPT, a, b]


@pytest.mark.parametrize(
    "option",
    [
        {"temperature": "1"}, {"temperature": None}, {"temperature": 10**400}, {"top_k": 1.5}, {"top_k": None},
        {"top_k": True}, {"top_p": "1"}, {"seed": -1}, {"seed": 1.5}, {"seed": None}, {"stop_ids": 5},
        {"stop_ids": "12"}, {"stop_ids": [1.5]}, {"stop_ids": [None]},
    ],
)  # fmt: skip
def test_an_option_of_a_wrong_kind_is_named_at_the_call(model: lab.Model, option: dict) -> None:
    """Before any token is drawn."""
    session = model.session(max_tokens=16)
    session.feed(PROMPT)
    with pytest.raises(lab.ArgumentError, match=next(iter(option))):
        session.generate(1, **{"temperature": 1.0} | option)
    assert session.ids == PROMPT


def test_a_reset_under_generate_is_noticed_at_the_same_length(model: lab.Model) -> None:
    """The other timeline is not continued in the name of the first."""
    session = model.session(max_tokens=32)
    session.feed(PROMPT)
    tokens = session.generate(5, stop_ids=())
    next(tokens)
    session.reset()
    session.feed([9] * (len(PROMPT) + 1))
    with pytest.raises(lab.BusyError, match=r"reset\(\)"):
        next(tokens)
    assert len(session.ids) == len(PROMPT) + 1
