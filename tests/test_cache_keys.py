"""The cache of keys and values: bytes, reach, and which keys a query uses, against NumPy from the taps q and k."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import colibri_lab as lab
from colibri_lab.testing import tiny_model

IDS = [int(i) for i in np.random.default_rng(5).integers(3, 60, 30)]
QUERIES = ["layers.*.attn.q"]
MODELS: dict[str, dict[str, Any]] = {
    "every key seen": {"family": "olmoe", "kv_heads": 4},
    "window of 7, grouped keys": {"family": "mixtral", "window": 7, "kv_heads": 1},
    "dense layer, one window of 5": {
        "family": "qwen2_moe",
        "layers": 3,
        "dense_layers": (1,),
        "window": 5,
        "config": {"max_window_layers": 2},
    },
}


@pytest.fixture(scope="module", params=list(MODELS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> lab.Model:
    return lab.open(tiny_model(tmp_path_factory.mktemp("m") / "m", **MODELS[request.param]))


def fed(model: lab.Model, *capture: str, tokens: int = 30) -> lab.Session:
    """Two passes, so that keys come from an earlier one."""
    session = model.session(list(capture), max_tokens=64)
    session.feed(IDS[:17])
    session.feed(IDS[17:tokens])
    return session


def attention(session: lab.Session, layer: int, token: int) -> NDArray[np.float64]:
    """(heads, token + 1): softmax of q · k / √d over the keys in the window, in float64."""
    q, k = (session.tape[f"layers.{layer}.attn.{name}"].astype(np.float64) for name in "qk")
    heads, dim = q.shape[1:]
    window = session.model.config.windows[layer] or token + 1
    out = np.zeros((heads, token + 1))
    for head in range(heads):
        of_head = k[: token + 1, head * k.shape[1] // heads]
        scores = of_head @ q[token, head] / np.sqrt(dim)
        scores[: max(0, token + 1 - window)] = -np.inf
        e = np.exp(scores - scores.max())
        out[head] = e / e.sum()
    return out


def test_attention_weights_of_a_token_are_the_softmax_of_its_query_and_the_keys_in_reach(model: lab.Model) -> None:
    """From the tape when captured, from a replay when not: the same bytes, and NumPy's numbers."""
    plain, captured = fed(model, *QUERIES), fed(model, *QUERIES, "layers.*.attn.weights")
    for layer in range(model.config.num_hidden_layers):
        for token in (0, 4, 16, 17, 29):
            weights = lab.cache.keys(plain).weights(layer, token)
            assert weights.dtype == np.float32 and weights.shape == (4, token + 1)
            assert np.allclose(weights, attention(plain, layer, token), atol=2e-6)
            assert weights.tobytes() == lab.cache.keys(captured).weights(layer, token).tobytes()
    assert "replay" in lab.cache.keys(plain).source(0) and "run itself" in lab.cache.keys(captured).source(0)


def test_bytes_are_those_of_the_arrays_that_hold_keys_and_values(model: lab.Model) -> None:
    """By layer and token; the whole is what the session reserves, but for rounding to whole pages of a tap."""
    session = fed(model, "none")
    cache = lab.cache.keys(session)
    layers = range(model.config.num_hidden_layers)
    held = [sum(session.tape[f"layers.{layer}.attn.{name}"].nbytes for name in "kv") for layer in layers]
    assert cache.bytes.tolist() == held and cache.bytes_per_token.tolist() == [n // 30 for n in held]
    all_tokens = int(cache.bytes_per_token.sum()) * session.max_tokens
    assert all_tokens <= cache.reserved == session.memory()["kv_cache"] < all_tokens + 2 * len(layers) * 4096
    session.feed(IDS[:3])
    assert cache.bytes.tolist() == [n // 30 * 33 for n in held] and cache.tokens == 33


def test_reach_is_the_window_of_the_layer_ended_by_the_token_itself(model: lab.Model) -> None:
    """First and last key with a weight above zero, for every token."""
    session = fed(model, "layers.*.attn.weights")
    cache = lab.cache.keys(session)
    for layer, window in enumerate(model.config.windows):
        assert cache.window[layer] == (window or -1)
        for token in range(30):
            seen = np.flatnonzero(session.tape[f"layers.{layer}.attn.weights"][:, token].max(axis=0))
            assert cache.reach(layer, token) == (seen[0], seen[-1]) == (max(0, token + 1 - (window or 99)), token)


def test_used_keys_are_the_fewest_whose_weights_hold_the_share(model: lab.Model) -> None:
    """Against adding up one key after another, head by head; one key at least, those in reach at most."""
    cache = lab.cache.keys(fed(model, *QUERIES, "layers.*.attn.weights"))
    for token in (0, 9, 29):
        weights = cache.weights(1, token).astype(float)
        for share in (0.01, 0.5, 0.9, 0.999, 1.0):
            counts = []
            for row in weights:
                left = sorted(row.tolist(), reverse=True)
                total, n = sum(left), 1
                while sum(left[:n]) < share * total:
                    n += 1
                counts.append(n)
            assert cache.used(1, token, share) == pytest.approx(np.mean(counts), abs=1e-9)
            first, last = cache.reach(1, token)
            assert 1 <= cache.used(1, token, share) <= last - first + 1
    assert cache.used(0, 0) == 1.0


def test_a_head_that_looks_evenly_uses_a_share_of_all_keys_and_one_that_stares_uses_one(tmp_path: Path) -> None:
    """Queries of zero give every key the same weight: nine of ten for 90%."""
    model = lab.open(tiny_model(tmp_path / "m"))
    even = model.with_weights({"layers.0.attn.q": np.zeros_like(model.weights["layers.0.attn.q"])})
    cache = lab.cache.keys(fed(even, "none"))
    assert np.ptp(cache.weights(0, 19)) == 0.0 and cache.used(0, 19, 0.9) == 18.0 and cache.used(0, 29, 0.5) == 15.0
    sharp = model.with_weights({"layers.0.attn.q": model.weights["layers.0.attn.q"] * np.float32(1e4)})
    assert lab.cache.keys(fed(sharp, "none")).used(0, 29) == 1.0


def test_a_query_that_is_not_finite_uses_no_number_of_keys(tmp_path: Path) -> None:
    """NaN weights give NaN, never a count."""
    model = lab.open(tiny_model(tmp_path / "m"))
    broken = np.array(model.weights["layers.0.attn.q"])
    broken[0, 0] = np.nan
    cache = lab.cache.keys(fed(model.with_weights({"layers.0.attn.q": broken}), "none"))
    assert np.isnan(cache.used(0, 5)) and "nan" in cache.report()


def test_a_replay_keeps_gate_mode_and_number_format_and_is_done_once_a_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights are those that the run would have captured; the next token of the layer needs none."""
    model = lab.open(tiny_model(tmp_path / "m"))
    how: dict[str, Any] = {"gate_mode": "raw_logits", "emulate": "float16", "max_tokens": 64}
    captured, plain = model.session(["layers.*.attn.weights"], **how), model.session("none", **how)
    for session in (captured, plain):
        session.feed(IDS)
    cache, seen, make = lab.cache.keys(plain), [], model.session
    monkeypatch.setattr(model, "session", lambda *a, **k: seen.append(k["max_tokens"]) or make(*a, **k))
    for token in (29, 3, 17):
        assert np.array_equal(cache.weights(1, token), captured.tape["layers.1.attn.weights"][:, token, : token + 1])
    assert seen == [30]
    plain.feed(IDS[:2])
    assert cache.weights(1, 31).shape == (4, 32) and cache.weights(1, 12).shape == (4, 13) and seen == [30, 32]
    plain.reset()
    plain.feed(IDS[::-1])
    assert not np.array_equal(cache.weights(1, 20), captured.tape["layers.1.attn.weights"][:, 20, :21])
    assert seen == [30, 32, 30]


def test_a_long_run_is_replayed_only_up_to_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of all tokens take heads · tokens² · 4 bytes; beyond a limit, no more than needed."""
    model = lab.open(tiny_model(tmp_path / "m"))
    session, seen, make = fed(model, "none"), [], model.session
    monkeypatch.setattr("colibri_lab.cache.key_values._WEIGHTS", 1000)
    monkeypatch.setattr(model, "session", lambda *a, **k: seen.append(k["max_tokens"]) or make(*a, **k))
    cache = lab.cache.keys(session)
    assert cache.weights(0, 9).shape == (4, 10) and cache.weights(0, 4).shape == (4, 5) and seen == [10]


def test_a_run_with_edits_is_not_repeated(tmp_path: Path) -> None:
    """A replay would show what did not happen; captured weights are told all the same."""
    model = lab.open(tiny_model(tmp_path / "m"))
    for capture in (["layers.*.attn.weights"], ["none"]):
        session = model.session(capture, max_tokens=64)
        stepper = session.stepper(IDS[:5], chunk=None)
        stepper.run_to("stage == 'router'")
        stepper.force(0, [0, 1])
        stepper.finish()
        cache = lab.cache.keys(session)
        if capture == ["none"]:
            with pytest.raises(lab.NotCapturedError, match=r"run with edits is not repeated.*layers\.1\.attn\.weights"):
                cache.weights(1, 4)
        else:
            assert cache.weights(1, 4).shape == (4, 5)


def test_progress_of_a_replay_is_told(tmp_path: Path) -> None:
    """A function of one's own gets the fraction done, up to one."""
    told: list[float] = []
    lab.cache.keys(fed(lab.open(tiny_model(tmp_path / "m")), "none")).weights(0, 3, progress=told.append)
    assert told and told[-1] == 1.0 and told == sorted(told)


def test_layers_tokens_and_shares_that_there_are_not_are_refused(tmp_path: Path) -> None:
    """Each sentence names the valid range."""
    model = lab.open(tiny_model(tmp_path / "m"))
    cache = lab.cache.keys(fed(model, "none"))
    for layer in (2, -1, "0", True, 0.0):
        with pytest.raises(lab.ArgumentError, match=r"no layer .*; layers are 0 to 1"):
            cache.reach(layer, 0)
    for token in (30, -1, None):
        with pytest.raises(lab.ArgumentError, match=r"no token .*; tokens are 0 to 29"):
            cache.weights(0, token)
    for share in (0, 1.01, float("nan"), "all"):
        with pytest.raises(lab.ArgumentError, match="share is above 0 and at most 1"):
            cache.used(0, 0, share)
    with pytest.raises(lab.ArgumentError, match="session is empty; feed it first"):
        lab.cache.keys(model.session()).reach(0, 0)
    with pytest.raises(lab.ArgumentError, match="keys takes a live session"):
        lab.cache.keys(model)
    with pytest.raises(lab.ArgumentError, match="keys takes a live session"):
        lab.cache.keys(fed(model, "routing").trace())


def test_the_report_is_a_table_of_the_same_numbers(model: lab.Model) -> None:
    """Bytes, windows and reach; used keys where they are known without running anything."""
    session = fed(model, "layers.0.attn.weights")
    cache = lab.cache.keys(session)
    head, _, *rows = cache.report().splitlines()
    assert f"{cache.bytes.sum():,} bytes" in head and "reserved for 64" in head and len(rows) == len(cache.window)
    for layer, row in enumerate(rows):
        first, last = cache.reach(layer, 29)
        assert f"{first} to {last}, {last - first + 1} keys" in row and f"{cache.bytes[layer]:,}" in row
    assert rows[0].endswith(f" {cache.used(0, 29):.1f}") and rows[1].endswith("not captured")
    assert "used(layer, token) finds them by a replay" in head
    cache.weights(1, 29)
    assert cache.report().splitlines()[3].endswith(f" {cache.used(1, 29):.1f}")
    empty = lab.cache.keys(model.session())
    assert "keys and values of 0 tokens: 0 bytes" in empty.report() and "no token" in empty.report()
    assert "30 tokens" in repr(cache)
