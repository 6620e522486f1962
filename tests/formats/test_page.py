"""docs/formats.md: its examples run as they stand, and its table is that of the code."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import format_goldens as goldens
from format_goldens import FIXTURES, GOLDENS

from colibri_lab import formats

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")


def golden(name: str, to: Path) -> None:
    written = next(golden for golden in GOLDENS if golden.name == name).write(to.parent)
    written.rename(to)


def test_the_code_of_the_page_runs(tmp_path: Path) -> None:
    """All blocks from top to bottom, in a folder that holds one sound file of each format."""
    names = {
        "vllm-npy": "routes.npy", "sglang-json": "response.json", "sglang-csv": "rank0.csv", "imatrix": "imatrix.gguf",
        "imatrix-dat": "imatrix.dat", "moe-trace": "moe_trace.csv", "kl-base": "base.kld", "olmoe": "analysis.jsonl",
        "route-trace": "route_trace.txt", "usage": "model.coli_usage",
    }  # fmt: skip
    for name, file in names.items():
        golden(name, tmp_path / file)
    shutil.copy(FIXTURES / "sglang_per_token_0.pt", tmp_path / "recorder_0.pt")
    shutil.copy(FIXTURES / "sglang_per_token_1_other.pt", tmp_path / "recorder_1.pt")
    dump = "MixtralForCausalLM_debug_tree_FULL_TENSORS.json"
    shutil.copy(FIXTURES / "debugger_printed" / dump, tmp_path / dump)
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL))
    assert all(file in code for file in names.values())
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {"again.txt", "again.npz", "again.parquet"} <= {file.name for file in tmp_path.iterdir()}
    assert (tmp_path / "again.txt").read_text() == "".join(goldens.route_trace_lines())


def test_the_table_names_every_format() -> None:
    """One row per format, ours included, in the order of the code."""
    rows = re.findall(r"^\| `(\w+)` \|", PAGE.split("## Formats")[1].split("##")[0], flags=re.MULTILINE)
    assert rows == ["colibri", *formats.FORMATS]
