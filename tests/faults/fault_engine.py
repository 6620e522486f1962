"""An engine whose arithmetic fails at one place, built for these tests alone.

Objects of the build that is in use are linked again with one other: boundary.c with COLIBRI_FAULTS.
"""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def build(folder: Path) -> Path:
    """Builds the extension module in `folder` and returns its path."""
    objects = _objects() or _compile(folder / "build")
    boundary = folder / "boundary.o"
    strict = ["-std=c99", "-O2", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-D_POSIX_C_SOURCE=200809L"]
    source = ROOT / "csrc" / "core" / "boundary.c"
    _run(["cc", *strict, "-DCOLIBRI_FAULTS", f"-I{source.parents[1] / 'include'}", "-c", source, "-o", boundary])
    module = folder / f"_core{sysconfig.get_config_var('EXT_SUFFIX')}"
    bindings = sorted((objects / "CMakeFiles" / "_core.dir").glob("*.o"))
    # the archive's own boundary.c.o is not taken: all that it defines is there already
    _run(
        [
            "c++",
            "-shared",
            "-flto=auto",
            *bindings,
            boundary,
            objects / "csrc" / "libcolibri.a",
            "-pthread",
            "-o",
            module,
        ]
    )
    return module


def _objects() -> Path | None:
    """The build folder with the newest objects, when none of the sources is newer."""
    sources = [file for folder in ("csrc", "cpp_bindings") for file in (ROOT / folder).rglob("*.[ch]*")]
    newest = max(file.stat().st_mtime for file in sources)
    archives = sorted(ROOT.glob("build*/csrc/libcolibri.a")) + sorted(ROOT.glob("build/*/csrc/libcolibri.a"))
    fresh = [
        archive.parents[1]
        for archive in archives
        if archive.stat().st_mtime >= newest and any((archive.parents[1] / "CMakeFiles" / "_core.dir").glob("*.o"))
    ]
    return fresh[0] if fresh else None


def _compile(folder: Path) -> Path:
    import pybind11

    options = [f"-Dpybind11_DIR={pybind11.get_cmake_dir()}", f"-DPython_EXECUTABLE={sys.executable}"]
    _run(["cmake", "-S", ROOT / "cpp_bindings", "-B", folder, "-DCMAKE_BUILD_TYPE=Release", *options])
    _run(["cmake", "--build", folder, "--parallel", "2"])
    return folder


def _run(command: list[Any]) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert done.returncode == 0, f"{command[0]}: {done.stderr[-2000:]}"


def use(module: Path) -> Any:
    """Puts the faulty engine in the place of the other, before anything of colibri_lab is imported; returns
    `set_fault(point, layer, expert, token, first, last, bits)`.
    """
    assert "colibri_lab" not in sys.modules
    name = "colibri_lab._core"
    spec = importlib.util.spec_from_file_location(name, module)
    assert spec is not None and spec.loader is not None
    core = importlib.util.module_from_spec(spec)
    sys.modules[name] = core
    spec.loader.exec_module(core)
    library = ctypes.CDLL(str(module))

    def set_fault(point: int, layer: int, expert: int, token: int, first: int, last: int, bits: int) -> None:
        place = (ctypes.c_int64 * 6)(point, layer, expert, token, first, last)
        library.colibri_fault_set(place, ctypes.c_uint32(bits))

    return set_fault
