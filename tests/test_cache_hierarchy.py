"""Caches and TLBs in software against known access patterns and a brute-force model; address streams against loops."""

from __future__ import annotations

import ctypes
import re
from collections import OrderedDict
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

import colibri_lab as lab
from colibri_lab import testing
from colibri_lab.cache import addresses
from colibri_lab.cache.addresses import ROWS, STAGES, stage_addresses
from colibri_lab.cache.hierarchy import Level, Tlb, simulate_addresses
from colibri_lab.errors import ArgumentError

KIB, MIB = 1 << 10, 1 << 20
L1 = Level("L1", 32 * KIB, 8)


def misses(walk: np.ndarray, level: Level = L1) -> int:
    return simulate_addresses(walk, [level])[level.name].misses


def brute(walk: list[int], tables: list[Level] | list[Tlb]) -> list[tuple[int, int]]:
    """(accesses, misses) by table, each a dictionary of ordered dictionaries."""
    sets: list[dict[int, OrderedDict[int, None]]] = [{} for _ in tables]
    counts = [[0, 0] for _ in tables]
    for address in walk:
        for number, table in enumerate(tables):
            block = address // table.block_bytes
            found = sets[number].setdefault(block % table.sets, OrderedDict())
            counts[number][0] += 1
            hit = block in found
            found[block] = None
            found.move_to_end(block)
            if len(found) > table.ways:
                found.popitem(last=False)
            if hit:
                break
            counts[number][1] += 1
    return [(accesses, missed) for accesses, missed in counts]


@pytest.mark.parametrize("seed", range(12))
def test_counts_are_those_of_a_brute_force_model(seed: int) -> None:
    """Random shapes, one set and one way among them, and streams with and without reuse, in one piece or several."""
    rng = np.random.default_rng(seed)
    levels, tlbs = [], []
    for number in range(int(rng.integers(1, 4))):
        ways, sets, line = int(rng.integers(1, 9)), int(rng.integers(1, 13)), 1 << int(rng.integers(4, 8))
        levels.append(Level(f"L{number}", ways * sets * line, ways, line))
        tlbs.append(Tlb(f"T{number}", ways * sets, ways, 1 << 12))
    span = int(rng.integers(1, 20)) * 4096
    stream = np.concatenate([rng.integers(0, span, 3000), np.arange(0, span, 24), rng.integers(0, 40 * span, 1000)])
    found = simulate_addresses(np.array_split(stream, 1 + seed % 5), levels, tlbs)
    for counts, tables in ((found.levels, levels), (found.tlbs, tlbs)):
        assert [(c.accesses, c.misses) for c in counts] == brute(stream.tolist(), tables)
        assert all(c.hits + c.misses == c.accesses and c.bytes == c.misses * c.block_bytes for c in counts)


# ---- known patterns ------------------------------------------------------------------------------------------------


def test_a_sequential_walk_misses_once_a_line() -> None:
    found = simulate_addresses(np.arange(0, MIB, 4), [L1, Level("L2", 256 * KIB, 8)])
    assert (found["L1"].accesses, found["L1"].misses) == (MIB // 4, MIB // 64)
    assert (found["L2"].accesses, found["L2"].misses) == (MIB // 64, MIB // 64)


def test_a_stride_of_a_line_or_more_misses_every_time() -> None:
    for stride, expected in ((16, 1000 * 16 // 64), (32, 500), (64, 1000), (100, 1000), (4096, 1000)):
        assert misses(np.arange(1000) * stride) == expected


def test_a_working_set_that_fits_misses_once_and_one_that_does_not_always() -> None:
    """Cycled five times: LRU throws out each line just before it comes again."""
    cycle = np.arange(0, 32 * KIB, 64)
    assert misses(np.tile(cycle, 5)) == len(cycle)
    whole = Level("whole", 32 * KIB, 512)  # fully associative
    over = np.arange(0, 32 * KIB + 64, 64)
    assert misses(np.tile(over, 5), whole) == 5 * len(over)
    assert misses(np.tile(over, 5)) == len(over) + 4 * 9  # by sets: only the nine lines of one set chase one another


def test_a_power_of_two_stride_has_as_many_places_as_ways() -> None:
    """Lines a multiple of sets · line apart share a set: eight live there, nine throw one another out."""
    apart = L1.sets * 64
    assert misses(np.tile(np.arange(8) * apart, 10)) == 8
    assert misses(np.tile(np.arange(9) * apart, 10)) == 90
    assert misses(np.tile(np.arange(9) * (apart + 64), 10)) == 9


def test_a_matrix_by_columns_misses_at_every_element_and_by_rows_once_a_line() -> None:
    """1,024 × 1,024 float32: a column touches more lines than the cache has, all of them in few sets."""
    rows, columns = np.meshgrid(np.arange(1024), np.arange(1024), indexing="ij")
    places = (rows * 1024 + columns) * 4
    assert misses(places) == MIB // 16
    assert misses(places.T) == MIB
    narrow = places[:, :16].T  # a strip of one line: 1,024 lines do not fit either, a block of 8 rows does
    assert misses(narrow) == 16 * 1024
    assert misses(np.concatenate([block.T.ravel() for block in np.split(places[:, :16], 128)])) == 1024


def test_a_tlb_reaches_as_far_as_its_pages() -> None:
    """64 entries: 256 KiB with pages of 4 KiB, 128 MiB with pages of 2 MiB."""
    small, huge = Tlb("small", 64, 64, 4096), Tlb("huge", 64, 64, 2 * MIB)
    assert (small.reach, huge.reach) == (256 * KIB, 128 * MIB)
    for size, few, many in ((256 * KIB, 64, 1), (MIB, 3 * 256, 1), (128 * MIB, 3 * 32768, 64)):
        walk = np.tile(np.arange(0, size, 4096), 3)
        assert simulate_addresses(walk, tlbs=[small])["small"].misses == few
        assert simulate_addresses(walk, tlbs=[huge])["huge"].misses == many


def test_a_second_level_serves_what_the_first_one_lost() -> None:
    found = simulate_addresses(np.tile(np.arange(0, 64 * KIB, 64), 4), [L1, Level("L2", 256 * KIB, 4)])
    assert found["L1"].misses == 4 * 1024 and (found["L2"].hits, found["L2"].misses) == (3 * 1024, 1024)
    assert found.report().splitlines()[2].split() == ["L2", "4096", "3072", "1024", "25.00%", "65536"]


def test_sizes_that_no_cache_has_are_refused_with_the_nearest() -> None:
    with pytest.raises(ArgumentError, match="a line of L1 is a power of two in bytes, not 48; the nearest is 32"):
        Level("L1", 32 * KIB, 8, 48)
    with pytest.raises(ArgumentError, match=r"no whole number of sets of 7 lines of 64 bytes; .* size is 32704"):
        Level("L1", 32 * KIB, 7)
    with pytest.raises(ArgumentError, match="ways must be a whole number, 1 or more; this is 0"):
        Level("L1", 32 * KIB, 0)
    with pytest.raises(ArgumentError, match="64 entries are no whole number of sets of 6; the nearest number is 66"):
        Tlb("dTLB", 64, 6)
    with pytest.raises(ArgumentError, match="pages of one size: a 4096, b 2097152"):
        simulate_addresses(np.zeros(1, int), tlbs=[Tlb("a", 4, 4), Tlb("b", 4, 4, 2 * MIB)])
    with pytest.raises(ArgumentError, match="addresses are 0 to"):
        simulate_addresses(np.array([-1]), [L1])
    with pytest.raises(ArgumentError, match="addresses are whole numbers; these are float64"):
        simulate_addresses(np.zeros(1), [L1])
    with pytest.raises(ArgumentError, match="same name"):
        simulate_addresses(np.zeros(1, int), [L1, L1])
    with pytest.raises(ArgumentError, match="no level or TLB is called 'L3'; there are L1"):
        simulate_addresses(np.zeros(1, int), [L1])["L3"]


def test_the_code_of_its_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """docs/cache-hierarchy.md from top to bottom."""
    page = Path(__file__).resolve().parent.parent / "docs" / "cache-hierarchy.md"
    exec("\n".join(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)), {})
    assert "L1 dTLB" in capsys.readouterr().out


# ---- stages --------------------------------------------------------------------------------------------------------


def stream(*arguments, **options) -> list[int]:
    return [int(a) for piece in stage_addresses(*arguments, **options) for a in piece]


def lines_of(model: lab.Model, names: list[str]) -> set[int]:
    out: set[int] = set()
    for name in names:
        start, size = model.weights[name].ctypes.data, model.weights[name].nbytes
        out |= set(range(start // 64, (start + size - 1) // 64 + 1))
    return out


@pytest.fixture(scope="module")
def shared_model(tmp_path_factory):
    path: Path = tmp_path_factory.mktemp("model") / "qwen2_moe"
    return lab.open(testing.tiny_model(path, family="qwen2_moe", layers=3, experts=5, dense_layers=(1,)))


@pytest.mark.parametrize("isa", ROWS)
def test_a_stage_reads_every_line_of_its_weights_and_no_other(shared_model, isa: str) -> None:
    """All stages, all kernels; rows that are no multiple of a line and matrices that begin within one."""
    model = shared_model
    mine = {
        "attention": [n for n in model.weights if n.startswith(("layers.0.attn.", "layers.0.attn_norm"))],
        "router": ["layers.0.moe_norm", "layers.0.moe.router"],
        "expert": [f"layers.0.moe.experts.{e}.{kind}" for e in (1, 4) for kind in ("gate", "up", "down")],
        "shared": [n for n in model.weights if n.startswith("layers.0.moe.shared")],
        "norm": ["norm"], "logits": ["lm_head"],
    }  # fmt: skip
    for stage, names in mine.items():
        layer, experts = None if stage in ("norm", "logits") else 0, [4, 1] if stage == "expert" else None
        found = stream(model, stage, layer, experts=experts, isa=isa)
        assert {address // 64 for address in found} == lines_of(model, names), stage
    dense = {address // 64 for address in stream(model, "mlp", 1, isa=isa)}
    assert dense == lines_of(model, ["layers.1.moe_norm", *(f"layers.1.mlp.{k}" for k in ("gate", "up", "down"))])
    assert set(mine) | {"mlp"} == set(STAGES)


def test_rows_are_read_side_by_side_as_the_kernels_read_them() -> None:
    """Four of avx2: rows i, run + i, 2 run + i, 3 run + i, sixteen columns of each in turn; the rest row by row."""
    model = lab.open()
    names = [f"layers.1.moe.experts.{e}.{kind}" for e in (2, 6) for kind in ("gate", "up")]
    names += [f"layers.1.moe.experts.{e}.down" for e in (2, 6)]
    for isa, tile in ROWS.items():
        expected = []
        for number, name in enumerate(names):
            rows, cols = model.weights[name].shape
            base, run = number * 2**30, rows // tile
            for i in range(run):
                expected += [base + ((i + r * run) * cols + c) * 2 for c in range(0, cols, 16) for r in range(tile)]
            expected += [base + (i * cols + c) * 2 for i in range(tile * run, rows) for c in range(0, cols, 16)]
        places = {name: number * 2**30 for number, name in enumerate(names)}
        assert stream(model, "expert", 1, experts=[6, 2], layout=places, isa=isa) == expected


def test_addresses_are_where_the_engine_reads_whatever_view_one_is_given(tmp_path: Path) -> None:
    """Data that begin at an odd byte, of which NumPy gets a copy; and a weight that was replaced in memory."""
    folder = testing.tiny_model(tmp_path / "odd", family="mixtral", layers=1, dtype="BF16")
    raw = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + length].rstrip() + b" "
    header += b" " * ((1 - len(header)) % 8)
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + length :])
    odd = lab.open(folder)
    assert "layers.0.moe.router" in odd.info["copied_weights"]
    other = lab.open().with_weights({"layers.0.moe.router": 2 * lab.open().weights["layers.0.moe.router"]})
    for model in (odd, other):
        places = [int(a) for piece in stage_addresses(model, "router", 0, isa="scalar") for a in piece]
        for name in ("layers.0.moe_norm", "layers.0.moe.router"):
            weight = model.weights[name]
            held, early = weight.tobytes(), places[: len(places) // 2]
            assert any(ctypes.string_at(place, len(held)) == held for place in early)


def test_layouts_have_the_same_lines_and_other_places() -> None:
    """Experts together or matrices apart: as many lines; on pages larger than an expert, one page or three."""
    model = lab.open()
    size = sum(model.weights[f"layers.0.moe.experts.0.{kind}"].nbytes for kind in ("gate", "up", "down"))
    pages = {}
    for layout in ("together", "apart"):
        found = simulate_addresses(
            stage_addresses(model, "expert", 0, experts=[0], layout=layout),
            [Level("all", 64 * MIB, 16)], [Tlb("pages", 4096, 4096, 256 * KIB)],
        )  # fmt: skip
        assert found["all"].bytes == size
        pages[layout] = found["pages"].misses
    assert (pages["together"], pages["apart"]) == (1, 3)


def test_a_stream_comes_in_pieces_that_do_not_grow_with_the_matrix() -> None:
    """A matrix of 128 MiB in pieces of half a megabyte; and the experts of two tokens as one stream."""
    sizes = [len(piece) for piece in addresses._product(addresses._Matrix(0, 8192, 4096, 4), 8)]
    assert max(sizes) <= 1 << 16 and sum(sizes) == 8192 * 4096 // 16
    model = lab.open()
    decode = chain.from_iterable(stage_addresses(model, "expert", 0, experts=e) for e in ([0, 1], [1, 2]))
    assert simulate_addresses(decode, [Level("all", 64 * MIB, 16)])["all"].hits > 0


def test_stages_that_are_not_there_are_refused_by_name(shared_model) -> None:
    model = lab.open()
    with pytest.raises(ArgumentError, match=r"no stage 'experts' reads weight matrices.*'expert'"):
        stage_addresses(model, "experts", 0)
    with pytest.raises(ArgumentError, match="layer 9 has no stage 'router'"):
        stage_addresses(model, "router", 9)
    with pytest.raises(ArgumentError, match="layer 0 has no stage 'mlp'; no layer of this model has it"):
        stage_addresses(model, "mlp", 0)
    with pytest.raises(ArgumentError, match=r"layer 1 has no stage 'expert'; it is in \[0, 2\]"):
        stage_addresses(shared_model, "expert", 1, experts=[0])
    with pytest.raises(ArgumentError, match="distinct experts that the token chose, 0 to 7; this is None"):
        stage_addresses(model, "expert", 0)
    with pytest.raises(ArgumentError, match="comes after all layers"):
        stage_addresses(model, "logits", 3)
    with pytest.raises(ArgumentError, match="a layout is 'file', 'together' or 'apart'"):
        stage_addresses(model, "router", 0, layout="random")
    with pytest.raises(ArgumentError, match="no instruction set 'mmx'"):
        stage_addresses(model, "router", 0, isa="mmx")
