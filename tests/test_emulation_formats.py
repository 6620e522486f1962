"""lab.Emulation as a value: formats, patterns, what is refused and with which sentence, and its form in a file."""

from __future__ import annotations

import json

import numpy as np
import pytest

import colibri_lab as lab
from colibri_lab.emulation import FORMATS, POINTS, SUMS, emulation_of


@pytest.fixture(scope="module")
def config():
    return lab.open().config


def test_a_format_alone_is_the_storage_of_every_point():
    """A text given to `emulate=` says how everything is kept, and nothing about sums."""
    emulation = emulation_of("float16")
    assert emulation == lab.Emulation("float16")
    assert {emulation.storage_of(point) for point in POINTS} == {"float16"}
    assert {emulation.accumulation_of(point) for point in POINTS} == {"float32"}
    assert emulation_of(None) is None and emulation_of(emulation) is emulation


@pytest.mark.parametrize("short, full", [("fp16", "float16"), ("bf16", "bfloat16"), (np.float16, "float16")])
def test_formats_have_the_names_that_the_package_knows_elsewhere(short, full):
    """Short names and dtypes mean the format that numerics.format_of finds."""
    assert lab.Emulation(short).storage == full
    assert lab.Emulation({"norm": short}).storage == {"norm": full}


def test_the_last_pattern_that_matches_counts():
    """A rule can be refined by what stands behind it; what none names stays float32."""
    emulation = lab.Emulation({"layers.*": "float16", "layers.1.*": "bfloat16", "layers.*.attn.scores": "float32"})
    assert emulation.storage_of("layers.0.attn.out") == "float16"
    assert emulation.storage_of("layers.1.attn.out") == "bfloat16"
    assert emulation.storage_of("layers.1.attn.scores") == "float32"
    assert emulation.storage_of("logits") == "float32"
    assert lab.Emulation({"layers.1*": "float16"}).storage_of("layers.12.middle") == "float16"


def test_experts_of_a_layer_have_one_format():
    """The number of an expert counts as *, and a pattern with a number is refused."""
    emulation = lab.Emulation({"layers.*.moe.experts.*.gate": "float16"}, saturate="layers.*.moe.experts.*.up")
    assert emulation.storage_of("layers.0.moe.experts.7.gate") == "float16"
    assert emulation.saturates("layers.0.moe.experts.7.up") and not emulation.saturates("layers.0.moe.experts.7.gate")
    with pytest.raises(lab.ArgumentError, match=r"did you mean 'layers\.\*\.moe\.experts\.\*\.gate'"):
        lab.Emulation({"layers.0.moe.experts.3.gate": "float16"})


def test_sums_have_a_format_only_where_something_is_summed():
    """A pattern over everything reaches products and weighted sums alone."""
    emulation = lab.Emulation(accumulation="float16")
    assert {point for point in POINTS if emulation.accumulation_of(point) == "float16"} == SUMS
    assert emulation.accumulation_of("layers.0.moe.experts.3.up") == "float16"
    with pytest.raises(lab.ArgumentError, match="something is summed"):
        lab.Emulation(accumulation={"layers.*.attn.norm": "float16"})


@pytest.mark.parametrize(
    "make, sentence",
    [
        (lambda: lab.Emulation("float61"), "float61.*did you mean 'float16'"),
        (lambda: lab.Emulation("int8"), "int8.*there are float32, float16, bfloat16, float8_e4m3fn, float8_e5m2"),
        (lambda: lab.Emulation("float64"), "float64.*that can be emulated; did you mean"),
        (lambda: lab.Emulation(None), "storage: 'None' is no number format"),
        (lambda: lab.Emulation({"norm": "float61"}), "storage: 'float61'.*float16"),
        (lambda: lab.Emulation(accumulation="half precision"), "accumulation: 'half precision'"),
        (lambda: lab.Emulation({"layers.*.atn.out": "float16"}), r"did you mean 'layers\.\*\.attn\.out'"),
        (lambda: lab.Emulation({"layers.2.atn.out": "float16"}), r"did you mean 'layers\.\*\.attn\.out'"),
        (lambda: lab.Emulation({3: "float16"}), "storage takes patterns of points"),
        (lambda: lab.Emulation(saturate=3), "saturate takes patterns"),
        (lambda: lab.Emulation(saturate=("nrom",)), "saturate: 'nrom' names no point; did you mean 'norm'"),
        (lambda: lab.Emulation(flush_subnormals=1), "flush_subnormals is True or False"),
        (lambda: emulation_of(16), 'emulate takes a format such as "float16"'),
    ],
)
def test_what_is_wrong_is_named_with_the_nearest_choice(make, sentence):
    """ArgumentError says which parameter, what was given, and what was probably meant."""
    with pytest.raises(lab.ArgumentError, match=sentence):
        make()


def test_a_pattern_must_name_a_point_of_the_model(config):
    """Layers and kinds that the model lacks are refused when a session is made."""
    lab.Emulation({f"layers.{config.num_hidden_layers - 1}.*": "float16"}).check(config)
    with pytest.raises(lab.ArgumentError, match=r"'layers\.99\.attn\.out' names no point; did you mean 'layers\."):
        lab.Emulation({"layers.99.attn.out": "float16"}).check(config)


def test_the_table_of_the_engine_says_the_same(config):
    """Layer by layer: storage, flush, saturate and accumulation of every point."""
    emulation = lab.Emulation({"layers.1.*": "float8_e5m2"}, {"*": "bfloat16"}, True, ("layers.*.middle", "norm"))
    table = emulation.table(config)
    assert table.shape == (config.num_hidden_layers, len(POINTS), 4)
    for layer, rows in enumerate(table):
        for kind, (kept, flush, saturate, summed) in zip(POINTS, rows, strict=True):
            assert FORMATS[kept] == ("float8_e5m2" if layer == 1 and kind.startswith("layers.") else "float32")
            assert flush == 1 and saturate == (kind in ("layers.*.middle", "norm"))
            assert FORMATS[summed] == ("bfloat16" if kind in SUMS else "float32")


def test_one_arithmetic_is_named_only_when_it_holds_everywhere():
    """Else the trace says float32, which is what sums and everything that no pattern names are."""
    assert lab.Emulation("bfloat16").arithmetic == lab.Emulation({"*": "bfloat16"}).arithmetic == "bfloat16"
    assert lab.Emulation({"layers.*": "bfloat16"}).arithmetic == "float32"
    assert lab.Emulation({"*": "bfloat16", "norm": "float32"}).arithmetic == "float32"


def test_it_comes_back_from_json():
    """What a trace's meta holds gives an equal emulation; other things are refused."""
    for emulation in (lab.Emulation("float16"), lab.Emulation({"*": "bf16"}, {"logits": "fp16"}, True, "norm")):
        assert lab.Emulation.from_record(json.loads(json.dumps(emulation.record()))) == emulation
    with pytest.raises(lab.ArgumentError, match="no record of an emulation"):
        lab.Emulation.from_record({"storage": "float16", "rounding": "up"})
