"""What pyproject.toml plans to release."""

from __future__ import annotations

import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parent.parent


def project() -> dict[str, Any]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)


def planned(identifier: str) -> bool:
    """Does the configuration select this build?"""
    plan = project()["tool"]["cibuildwheel"]
    return any(fnmatch(identifier, p) for p in plan["build"]) and not any(fnmatch(identifier, p) for p in plan["skip"])


@pytest.mark.parametrize("platform", ["manylinux_x86_64", "manylinux_aarch64", "macosx_arm64"])
def test_wheels_are_planned_for_each_platform_and_python(platform: str) -> None:
    """Every planned Python is one that the package takes, the oldest included; no musl, no free threading."""
    requires = SpecifierSet(project()["project"]["requires-python"])
    pythons = [minor for minor in range(8, 20) if planned(f"cp3{minor}-{platform}")]
    assert pythons[0] == 11 and len(pythons) >= 3
    assert all(requires.contains(f"3.{minor}") for minor in pythons)
    assert not planned(f"cp314t-{platform}") and not planned("cp311-musllinux_x86_64")


def test_the_plan_names_its_architectures_and_tests_what_it_built() -> None:
    """One wheel for each architecture, compiled for the baseline, opened before it counts."""
    plan = project()["tool"]["cibuildwheel"]
    assert plan["linux"]["archs"] == ["x86_64", "aarch64"] and plan["macos"]["archs"] == ["arm64"]
    assert plan["test-command"].startswith("colibri-lab ")
    assert "march" not in str(plan)


def test_a_wheel_has_the_recorded_claims_and_no_other_results() -> None:
    """Notebook 06 shows them; the suite's own results stay in the repository."""
    excluded = project()["tool"]["scikit-build"]["wheel"]["exclude"]
    results = "colibri_lab/benchmarks/results"
    assert [line for line in excluded if "results" in line] == [f"{results}/*", f"!{results}/claims-*.json"]
