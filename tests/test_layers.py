"""Who may use whom: reads every import and every include of the tree and keeps the data's way one-directional."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "colibri_lab"

# ---- C and C++ ---------------------------------------------------------------------------------------------------

C_MAY_USE = {  # folder of csrc -> folders whose headers it may include
    "include": {"include"},
    "utils": {"include", "utils"},
    "kernels": {"include", "utils", "kernels"},
    "model": {"include", "utils", "model"},
    "core": {"include", "utils", "kernels", "model", "core"},
    "api": {"include", "utils", "kernels", "model", "core", "api"},
    "cachelab": {"include", "utils", "cachelab"},  # of utils what a header alone gives
    "tools": {"include", "tools"},
}
PUBLIC_HEADERS = {"colibri.h", "colibri_config.h", "colibri_cachelab.h"}


def own_includes(source: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s+"([^"]+)"', source.read_text(encoding="utf-8"), flags=re.MULTILINE)


def c_files(folder: Path, *suffixes: str) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix in suffixes)


def folder_of(name: str, source: Path) -> str:
    """The folder of csrc in which the header of an include lies."""
    if name in PUBLIC_HEADERS:
        return "include"
    for base in (source.parent, ROOT / "csrc"):
        if (base / name).exists():
            return (base / name).resolve().relative_to(ROOT / "csrc").parts[0]
    raise AssertionError(f"{source.relative_to(ROOT)} includes {name}, which is not there")


def test_each_c_folder_includes_only_what_lies_below_it() -> None:
    """utils <- kernels, model <- core <- api; kernels and model do not see each other; tools see colibri.h alone."""
    files = c_files(ROOT / "csrc", ".c", ".h")
    assert len(files) > 20
    for source in files:
        layer = source.relative_to(ROOT / "csrc").parts[0]
        for name in own_includes(source):
            used = folder_of(name, source)
            assert used in C_MAY_USE[layer], f"{source.relative_to(ROOT)} includes {name}: {layer} may not use {used}"


def test_the_bindings_see_only_the_public_header() -> None:
    """A binding reaches the engine through colibri.h and nothing else."""
    files = c_files(ROOT / "cpp_bindings", ".cpp", ".hpp")
    assert files
    own = {path.name for path in files}
    for source in files:
        for name in own_includes(source):
            assert name in PUBLIC_HEADERS | own, f"{source.relative_to(ROOT)} includes {name}"


def test_numpy_arrays_over_engine_memory_are_born_in_one_file() -> None:
    """Only view.hpp constructs arrays over memory that it does not own, so that every view has a lease."""
    files = c_files(ROOT / "cpp_bindings", ".cpp", ".hpp")
    makers = [path.name for path in files if "colibri_lease_release" in path.read_text(encoding="utf-8")]
    assert len(makers) == 1, makers


# ---- Python ------------------------------------------------------------------------------------------------------

ANALYSES = {"routing", "numerics", "difference", "cache", "nan"}  # functions of a Trace: no engine, no display
ANALYSES_MAY_USE = {"errors", "trace", "progress", "_cachelab", "_mappings"}  # and each other
ANALYSES_FOREIGN = {"numpy"}
ABOVE_THE_ENGINE = {"memory", "model", "weights", "session", "stepper", "tape", "generate"}
ABOVE_THE_ENGINE |= {"recording", "recording_file"}  # a session whose tape is a file
WIDGETS_MAY_USE = {"_files", "errors", "trace", "trace_file", "progress", "widgets"} | ANALYSES
WIDGET_USERS = {"__init__", "_cli", "_cli_cache", "_cli_diff", "_cli_nan"}
HEAVY = {"torch", "transformers", "matplotlib", "ipywidgets", "anywidget", "IPython", "traitlets"}


def module_name(source: Path) -> str:
    parts = source.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def deferred(tree: ast.Module) -> set[ast.AST]:
    """Nodes that do not run when the module is imported: inside functions and `if TYPE_CHECKING`."""
    scopes = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
    ]
    return {inner for scope in scopes for inner in ast.walk(scope)}


def imports(source: Path, when_imported: bool = False) -> set[str]:
    """Dotted names that a file imports; those of this package begin with a dot: ".trace", ".widgets.explorer"."""
    tree = ast.parse(source.read_text(encoding="utf-8"))
    package = ".".join(("colibri_lab", *source.relative_to(PACKAGE).parts[:-1]))
    later = deferred(tree) if when_imported else set()
    found: set[str] = set()
    for node in ast.walk(tree):
        if node in later:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            found |= {f"{base}.{alias.name}" for alias in node.names} if is_package(base) else {base}
    return {name.removeprefix("colibri_lab") if name.startswith("colibri_lab.") else name for name in found}


def is_package(name: str) -> bool:
    return name.split(".")[0] == "colibri_lab" and (ROOT / name.replace(".", "/")).is_dir()


def ours(source: Path, when_imported: bool = False) -> set[str]:
    """Modules of this package that a file imports: "trace", "widgets"."""
    return {name[1:].split(".")[0] for name in imports(source, when_imported) if name.startswith(".")}


def reach(name: str) -> set[str]:
    """Modules of this package that a module imports, itself or through others, now or later."""
    files, found, waiting = python_files(), {name}, [name]
    while waiting:
        for used in ours(files[waiting.pop()]) & set(files) - found:
            found.add(used)
            waiting.append(used)
    return found


def foreign(source: Path, when_imported: bool = False) -> set[str]:
    roots = {name.split(".")[0] for name in imports(source, when_imported) if not name.startswith(".")}
    return {root for root in roots if root not in sys.stdlib_module_names and root not in ("colibri_lab", "__future__")}


def python_files() -> dict[str, Path]:
    return {module_name(path): path for path in sorted(PACKAGE.rglob("*.py")) if "__pycache__" not in path.parts}


def test_errors_use_nothing_of_ours() -> None:
    """Exceptions stand at the bottom, so that nobody imports in circles."""
    assert not ours(PACKAGE / "errors.py")


def test_analyses_see_only_traces_errors_and_numpy() -> None:
    """An analysis runs without the compiled engine and without a display, on a trace of any producer."""
    present = {name: path for name, path in python_files().items() if name.split(".")[0] in ANALYSES}
    assert present
    for name, path in present.items():
        assert ours(path) <= ANALYSES_MAY_USE | ANALYSES, (name, ours(path))
        assert foreign(path) <= ANALYSES_FOREIGN, (name, foreign(path))


def test_traces_need_no_engine() -> None:
    """A trace can be made, loaded and analysed where the engine was never built."""
    for name in {"trace", "trace_file", "testing", *ANALYSES} & set(python_files()):
        assert not reach(name) & {"_core", "_engine", "widgets", *ABOVE_THE_ENGINE}, (name, reach(name))


IMPORTERS_MAY_USE = {"_files", "errors", "formats", "progress", "sniff", "trace"}
IMPORTERS_FOREIGN = {"numpy", "safetensors", "ml_dtypes"}


def test_importers_end_in_a_trace_and_need_no_library_of_their_producer() -> None:
    """A recording of another program opens without the engine, torch, or any library but those every trace needs."""
    importers = {name: path for name, path in python_files().items() if name.split(".")[0] == "formats"}
    assert len(importers) > 10
    for name, path in importers.items():
        assert ours(path) <= IMPORTERS_MAY_USE, (name, ours(path))
        assert foreign(path) <= IMPORTERS_FOREIGN, (name, foreign(path))


def test_the_recorder_needs_neither_engine_nor_display() -> None:
    """It runs where PyTorch runs, and the libraries it records load when it is called."""
    present = {name: path for name, path in python_files().items() if name.split(".")[0] == "record"}
    assert len(present) > 5
    for name, path in present.items():
        assert not reach(name) & {"_core", "_engine", "widgets", *ABOVE_THE_ENGINE}, (name, reach(name))
        assert foreign(path, when_imported=True) <= {"numpy"}, (name, foreign(path, when_imported=True))


def test_the_compiled_module_has_one_door() -> None:
    """Only _engine imports it, so that a missing build is explained in one place; few modules go through that door."""
    files = python_files()
    assert {name for name, path in files.items() if "_core" in ours(path, when_imported=True)} == {"_engine"}
    users = {name for name, path in files.items() if "_engine" in ours(path)}
    assert users and users <= ABOVE_THE_ENGINE, users


def test_nothing_but_the_public_face_and_the_command_line_sees_widgets() -> None:
    """Widgets stand at the end of the data's way."""
    for name, path in python_files().items():
        if name.split(".")[0] == "widgets":
            assert ours(path) <= WIDGETS_MAY_USE, (name, ours(path))
        else:
            assert "widgets" not in ours(path) or name in WIDGET_USERS, name


def test_heavy_libraries_are_imported_where_they_are_used() -> None:
    """No module outside the widgets imports a plotting, widget or torch library when it is itself imported."""
    for name, path in python_files().items():
        if name.split(".")[0] != "widgets":
            assert not foreign(path, when_imported=True) & HEAVY, (name, foreign(path, when_imported=True))
