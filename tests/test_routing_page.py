"""docs/metrics.md: its code runs, and it knows every metric there is."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import colibri_lab as lab

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "metrics.md").read_text(encoding="utf-8")


def test_the_code_of_the_page_on_metrics_runs() -> None:
    """All blocks from top to bottom, in a process of their own, without a warning."""
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL))
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "chance 0.46" in done.stdout and "C(E−k,k)" in done.stdout and "(6, 8)" in done.stdout


def test_every_metric_has_its_row() -> None:
    """Functions of lab.routing and lab.cache stand in the table; helpers on rows and for feeding are no metrics,
    and what runs a model or asks the machine has pages of its own.
    """
    table = "\n".join(line for line in PAGE.splitlines() if line.startswith("|"))
    helpers = {"feed", "row_entropy", "row_margin"}
    elsewhere = {"keys", "live", "measure_machine", "predict", "residency"}
    helpers |= {"expert_bytes", "lateness", "stage_addresses"} | elsewhere
    for module, prefix in ((lab.routing, ""), (lab.cache, "lab.cache.")):
        for name in module.__all__:
            if inspect.isfunction(getattr(module, name)) and name not in helpers:
                assert re.search(rf"`{re.escape(prefix + name)}[`(]", table), name


def test_every_public_name_of_the_package_is_documented() -> None:
    for module in (lab.routing, lab.cache, lab.numerics):
        for name in module.__all__:
            assert hasattr(module, name)
            if callable(getattr(module, name)):
                assert inspect.getdoc(getattr(module, name)), name
