"""What a DiffView sends and how it understands a selection."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from diffs import SWAPPED, TIE, copied, full_trace, of, planted, swap

import colibri_lab as lab
from colibri_lab.errors import ArgumentError, TapError
from colibri_lab.testing import synthetic_trace
from colibri_lab.trace import Trace
from colibri_lab.widgets._wire import pack
from colibri_lab.widgets.diff_data import DiffData

A = full_trace()
DATA = DiffData(replace(lab.diff(A, planted(A)), diagnosis=SWAPPED))
EXPERTS = "layers.2.moe.experts.*.output"


def test_it_starts_at_the_first_divergence() -> None:
    """With its token and its expert."""
    first = DATA.diff.first_divergence
    assert DATA.start() == {"path": EXPERTS, "layer": 2, "token": first.token, "expert": first.expert}


def test_of_ties_alone_it_starts_at_the_weightiest() -> None:
    """The router's choice in the layer of the flip."""
    arrays = copied(A)
    swap(arrays, *TIE)
    data = DiffData(lab.diff(A, of(A, arrays)))
    assert data.diff.verdict == "tie"
    assert (data.start()["path"], data.start()["token"]) == ("layers.1.moe.expert_ids", 12)


def test_of_equal_runs_it_starts_where_they_come_nearest_to_the_tolerance() -> None:
    arrays = copied(A)
    arrays["layers.4.attn.v"][9, 3] *= np.float32(1 + 1e-6)
    data = DiffData(lab.diff(A, of(A, arrays)))
    assert data.diff.verdict == "identical" and data.start()["path"] == "layers.4.attn.v"


@pytest.mark.parametrize(
    ("wish", "expected"),
    [
        ({"token": 3}, ("layers.2.attn.q", 2, 3, None)),
        ({"layer": 4}, ("layers.4.attn.q", 4, 10, None)),
        ({"path": "logits"}, ("logits", None, 10, None)),
        ({"path": "layers.3.moe.experts.6.output"}, ("layers.3.moe.experts.*.output", 3, 10, 6)),
        ({"path": "layers.3.moe.experts.*.output", "expert": 2}, ("layers.3.moe.experts.*.output", 3, 10, 2)),
        ({"layer": 1, "token": 5, "expert": 7}, ("layers.1.attn.q", 1, 5, None)),  # of an explorer: no expert tap here
        ({"path": "layers.2.attn.q", "layer": 5, "token": 10, "expert": None}, ("layers.5.attn.q", 5, 10, None)),
    ],
)
def test_keys_left_out_keep_their_value(wish: dict[str, Any], expected: tuple[Any, ...]) -> None:
    old = {"path": "layers.2.attn.q", "layer": 2, "token": 10, "expert": None}
    assert tuple(DATA.check(wish, old).values()) == expected


@pytest.mark.parametrize(
    ("wish", "error", "words"),
    [
        ({"path": "layers.2.attn.qq"}, TapError, "did you mean|nearest|layers.2.attn.q"),
        ({"token": 40}, ArgumentError, "tokens are 0 to 39"),
        ({"token": True}, ArgumentError, "no token True"),
        ({"layer": 6}, ArgumentError, "nearest that has is 5"),
        ({"place": 1}, ArgumentError, "not place"),
        ({"path": EXPERTS, "expert": 8}, ArgumentError, "experts are 0 to 7"),
        ({"path": "layers.3.attn.q", "layer": 4}, ArgumentError, "give the path or the layer"),
    ],
)
def test_a_wrong_selection_is_refused_with_the_nearest_choice(wish: dict[str, Any], error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        DATA.check(wish, {"path": "layers.2.attn.q", "layer": 2, "token": 10, "expert": None})


def test_facts_are_json_and_arrays_pack() -> None:
    """Also with NaN in margins, errors and KL, and with infinities left over."""
    facts = json.loads(json.dumps(DATA.facts(), allow_nan=False))
    assert facts["verdict"] == "defect" and facts["first"]["path"] == EXPERTS
    assert sum(facts["flips"]["counts"].values()) == 7 and facts["flips"]["counts"]["tie"] == 1
    specs, buffers = pack(DATA.overview())
    assert len(specs) == len(buffers)
    table = DATA.overview()
    assert table["max_rel"].tolist() == DATA.diff.table["max_rel"].astype(np.float32).tolist()


def test_the_tokens_that_used_the_faulty_expert_are_marked() -> None:
    first = DATA.diff.first_divergence
    used = (A["layers.2.moe.expert_ids"] == first.expert).any(axis=1)
    assert DATA.overview()["used"].astype(bool).tolist() == used.tolist()


def test_next_tokens_are_those_of_a_softmax() -> None:
    """Both runs' five likeliest, at most six, each with both chances; texts from the traces."""
    facts, arrays = DATA.next_tokens(35)
    p, q = (np.exp(x - x.max()) / np.exp(x - x.max()).sum() for x in (A["logits"][35], DATA.diff.b["logits"][35]))
    ids = [i for i, _ in facts["next"]]
    assert ids[0] == int(np.argmax(np.maximum(p, q))) and len(ids) <= 6
    assert np.allclose(arrays["chances"], np.stack([p[ids], q[ids]], axis=1), atol=1e-6)
    assert facts["top"] == [int(p.argmax()), int(q.argmax())]
    known = dict(zip(A.ids, A.texts, strict=True))
    assert [text for _, text in facts["next"]] == [known.get(i, "") for i in ids]


def test_traces_of_ids_alone_compare_their_choices() -> None:
    """No values, no logits: the map has one row of ids, and nothing fails."""
    whole = synthetic_trace(6, 8, 2, 40, seed=0)
    ids = {path: np.array(whole[path]) for path in whole if path.endswith("expert_ids")}
    a = Trace(ids, ids=whole.ids, texts=[], meta=whole.meta)
    other = {path: array.copy() for path, array in ids.items()}
    other["layers.2.moe.expert_ids"][4] = [e for e in range(8) if e not in ids["layers.2.moe.expert_ids"][4]][:2]
    data = DiffData(lab.diff(a, Trace(other, ids=whole.ids, texts=[], meta=whole.meta)))
    start = data.start()
    assert start["path"] == "layers.2.moe.expert_ids" and start["token"] == 4
    assert data.values(start["path"], None, 4)[0]["moved"] == 1
    assert data.facts()["cut"] is None and data.next_tokens(4)[0]["next"] == []
    assert data.page_tokens(start) == []


def test_a_huge_comparison_sends_little() -> None:
    """48 layers, 128 experts, 2,000 tokens, 24,000 flips: the head stays under 2 MB, a whole page under 12 MB."""
    whole = synthetic_trace(48, 128, 8, 2000, seed=0)
    ids = {path: np.array(whole[path]) for path in whole if path.endswith(("expert_ids", "gates"))}
    a = Trace(ids, ids=whole.ids, texts=whole.texts, meta=whole.meta)
    other = {path: array.copy() for path, array in ids.items()}
    for path in other:
        if path.endswith("expert_ids"):
            other[path][::4, -1] = [next(e for e in range(128) if e not in row) for row in other[path][::4]]
    data = DiffData(lab.diff(a, Trace(other, ids=whole.ids, texts=whole.texts, meta=whole.meta)))
    _, buffers = pack(data.overview())
    head = len(json.dumps(data.facts())) + sum(map(len, buffers))
    assert len(data.diff.flips) == 48 * 500 and head < 2_000_000
    page = data.page_values(data.start())
    size = sum(len(json.dumps(facts)) + sum(array.nbytes for array in arrays.values()) for facts, arrays in page)
    assert len(page) == 97 and size < 12_000_000


def test_a_model_gives_the_texts_of_tokens_that_stand_in_neither_run() -> None:
    """By its tokenizer; without one such a token has no text."""
    model = lab.open()
    data = DiffData(lab.diff(A, planted(A)), model)
    assert all(text == model.tokenizer.piece(i).decode("utf-8", "ignore") for i, text in data.next_tokens(3)[0]["next"])
