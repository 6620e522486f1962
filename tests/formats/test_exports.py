"""What is exported comes back: expert ids by equality, from every format that is opened again, and from Parquet."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest

import colibri_lab as lab
from colibri_lab.testing import synthetic_trace
from colibri_lab.trace import Trace


def a_trace() -> Trace:
    return synthetic_trace(5, 8, 2, 23, passes=[20, 1, 2], dense_layers=[0, 3])


def same_ids(one: Trace, other: Trace) -> None:
    assert one.moe_layers == other.moe_layers and (one.num_experts, one.top_k) == (other.num_experts, other.top_k)
    for layer in one.moe_layers:
        path = f"layers.{layer}.moe.expert_ids"
        assert np.array_equal(one[path], other[path]), path


def with_missing_rows(trace: Trace) -> Trace:
    """The same trace with a token that was not recorded."""
    arrays = dict(trace)
    for layer in trace.moe_layers:
        ids = arrays[f"layers.{layer}.moe.expert_ids"].copy()
        ids[2] = -1
        arrays[f"layers.{layer}.moe.expert_ids"] = ids
    return Trace(arrays, ids=trace.ids, texts=trace.texts, meta=trace.meta)


def test_ids_passes_and_gates_survive_a_route_trace(tmp_path: Path) -> None:
    trace = a_trace()
    trace.export(tmp_path / "trace.txt", "route_trace")
    back = lab.load_trace(tmp_path / "trace.txt", experts=8, layers=trace.moe_layers, ids=trace.ids)
    same_ids(trace, back)
    assert back.passes == trace.passes and back.ids == trace.ids
    for layer in trace.moe_layers:
        path = f"layers.{layer}.moe.gates"
        assert np.abs(back[path] - trace[path]).max() <= 0.5e-4 + 1e-7


@pytest.mark.parametrize("name", ["routes.npy", "routes.npz"])
def test_ids_survive_arrays_of_vllm(name: str, tmp_path: Path) -> None:
    """Missing rows are −1 there and back; a .npz has the token ids too."""
    trace = with_missing_rows(a_trace())
    trace.export(tmp_path / name, "vllm")
    ids = {} if name.endswith("z") else {"ids": trace.ids}
    back = lab.load_trace(tmp_path / name, experts=8, layers=trace.moe_layers, **ids)
    same_ids(trace, back)
    assert back.ids == trace.ids
    back.export(tmp_path / f"again-{name}", "vllm")
    assert (tmp_path / f"again-{name}").read_bytes() == (tmp_path / name).read_bytes()


def test_parquet_has_one_row_per_token_layer_and_slot(tmp_path: Path) -> None:
    """All columns, null where nothing was recorded, and the meta."""
    trace = with_missing_rows(a_trace())
    trace.export(tmp_path / "t.parquet", "parquet")
    table = pyarrow.parquet.read_table(tmp_path / "t.parquet")
    assert table.num_rows == 23 * 3 * 2 and json.loads(table.schema.metadata[b"colibri"]) == trace.meta
    rows = table.to_pylist()
    for place, row in enumerate(rows):
        layer, token, slot = trace.moe_layers[place // 46], place % 46 // 2, place % 2
        assert (row["layer"], row["token"], row["slot"]) == (layer, token, slot)
        assert row["token_id"] == trace.ids[token] and row["text"] == trace.texts[token]
        assert row["pass"] == [start <= token < stop for start, stop in trace.passes].index(True)
        expert = int(trace[f"layers.{layer}.moe.expert_ids"][token, slot])
        if expert < 0:
            assert row["expert"] is row["gate"] is row["score"] is row["logit"] is None
        else:
            assert row["expert"] == expert and row["gate"] == trace[f"layers.{layer}.moe.gates"][token, slot]
            assert row["score"] == trace[f"layers.{layer}.moe.scores"][token, expert]
            assert row["logit"] == trace[f"layers.{layer}.moe.router_logits"][token, expert]


def test_parquet_of_bare_routes_has_nulls(tmp_path: Path) -> None:
    """An import without gates, logits and token ids."""
    trace = a_trace()
    trace.export(tmp_path / "routes.npy", "vllm")
    bare = lab.load_trace(tmp_path / "routes.npy", experts=8, layers=trace.moe_layers)
    bare.export(tmp_path / "t.parquet", "parquet")
    table = pyarrow.parquet.read_table(tmp_path / "t.parquet")
    nulls = {name: table[name].null_count for name in table.column_names}
    assert {name for name, count in nulls.items() if count} == {"token_id", "gate", "score", "logit"}
    assert all(nulls[name] == table.num_rows for name in ("token_id", "gate", "score", "logit"))


def test_without_pyarrow_the_export_says_what_to_install(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(lab.UnsupportedError, match=r"pip install 'colibri-lab\[parquet\]'"):
        a_trace().export(tmp_path / "t.parquet", "parquet")
    assert not list(tmp_path.iterdir())


def test_what_a_format_cannot_hold_is_refused(tmp_path: Path) -> None:
    """By name, and no file is left behind."""
    trace = a_trace()
    with pytest.raises(lab.ArgumentError, match=r"no export 'parket'; did you mean 'parquet'.*route_trace, vllm"):
        trace.export(tmp_path / "t", "parket")
    with pytest.raises(lab.ArgumentError, match=r"a \.npy .* or a \.npz"):
        trace.export(tmp_path / "t.bin", "vllm")
    with pytest.raises(lab.ArgumentError, match=r"token 2 has no route in layer 1, and ROUTE_TRACE has no way"):
        with_missing_rows(trace).export(tmp_path / "t", "route_trace")
    trace.export(tmp_path / "routes.npy", "vllm")
    bare = lab.load_trace(tmp_path / "routes.npy", experts=8, layers=trace.moe_layers)
    (tmp_path / "routes.npy").unlink()
    with pytest.raises(lab.NotCapturedError, match=r"gates"):
        bare.export(tmp_path / "t", "route_trace")
    with pytest.raises(lab.FileError, match="cannot write the array"):
        trace.export(tmp_path / "nowhere" / "t.npy", "vllm")
    assert not list(tmp_path.iterdir())


def test_odd_texts_meta_and_formats_are_written_or_refused(tmp_path: Path) -> None:
    plain = synthetic_trace(1, 3, 2, 3)
    odd = lab.Trace(dict(plain), ids=plain.ids, texts=["\ud800", "\0", ""], meta={**plain.meta, "from": "/m\udcff"})
    odd.export(tmp_path / "x.parquet", "parquet")
    assert (tmp_path / "x.parquet").is_file()
    closed = lab.Trace(dict(plain), ids=plain.ids, texts=[], meta={**plain.meta, "x": {1, 2}})
    with pytest.raises(lab.ArgumentError, match="cannot be written as JSON"):
        closed.export(tmp_path / "y.parquet", "parquet")
    with pytest.raises(lab.ArgumentError, match="there is no export"):
        plain.export(tmp_path / "y.parquet", ["parquet"])
