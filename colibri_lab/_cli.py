"""The command line `colibri-lab`: one subcommand per capability.

Exit codes: 0 when the work was done, 1 when it failed (one sentence on standard error), 2 for a wrong command line;
those of `cache`, `diff` and `nan` are in `_cli_cache`, `_cli_diff` and `_cli_nan`.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import os
import platform
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from colibri_lab import __version__, _cli_cache, _cli_diff, _cli_nan

FIRST_NOTEBOOK = "01_routing_explorer.ipynb"
DEFAULT_FOLDER = Path("colibri-notebooks")


def shipped_notebooks() -> list[Path]:
    """The notebooks of this package, in their order: beside the code when installed, else those of the checkout."""
    package = Path(__file__).resolve().parent
    for folder in (package / "notebooks", package.parent / "notebooks"):
        found = sorted(folder.glob("*.ipynb"))
        if found:
            return found
    raise FileNotFoundError(f"no notebooks in {package / 'notebooks'}: install colibri-lab again")


def copy_notebooks(folder: Path, force: bool = False) -> list[Path]:
    """Copies the shipped notebooks to `folder` and returns the copies made; an existing file is kept unless `force`."""
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"'{folder}' is a file; name a folder for the notebooks")
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for source in shipped_notebooks():
        target = folder / source.name
        if force or not target.exists():
            target.write_text(_of_this_python(source.read_text(encoding="utf-8")), encoding="utf-8")
            made.append(target)
    return made


def _of_this_python(notebook: str) -> str:
    """The notebook with what JupyterLab would note of the kernel on opening it, so that a look is not yet a change."""
    book = json.loads(notebook)
    book["metadata"]["language_info"] = {
        "codemirror_mode": {"name": "ipython", "version": 3},
        "file_extension": ".py",
        "mimetype": "text/x-python",
        "name": "python",
        "nbconvert_exporter": "python",
        "pygments_lexer": "ipython3",
        "version": platform.python_version(),
    }
    return json.dumps(book, indent=1, ensure_ascii=False) + "\n"


def lab_command(arguments: Sequence[str], root: bool) -> list[str]:
    """The command that starts JupyterLab on the explorer notebook; `arguments` go to `jupyter lab` unchanged."""
    allow = ["--allow-root"] if root else []  # else JupyterLab refuses, and in containers one is root
    start = f"--LabApp.default_url=/lab/tree/{FIRST_NOTEBOOK}"  # also in the address that --no-browser prints
    return [sys.executable, "-m", "jupyterlab", *allow, start, *arguments]


def _lab(options: argparse.Namespace) -> int:
    if importlib.util.find_spec("jupyterlab") is None:
        raise ModuleNotFoundError("JupyterLab is not installed here: pip install 'colibri-lab[lab]'")
    copy_notebooks(options.folder)
    print(f"colibri-lab: the notebooks are in {options.folder.resolve()}", flush=True)
    command = lab_command(options.arguments, root=os.geteuid() == 0)
    os.chdir(options.folder)
    os.execv(command[0], command)  # becomes JupyterLab, so that signals and the terminal are its own


def _notebooks(options: argparse.Namespace) -> int:
    made = copy_notebooks(options.folder, options.force)
    for path in made:
        print(path)
    kept = len(shipped_notebooks()) - len(made)
    if kept:
        print(f"{kept} already there and left alone (--force replaces them)")
    print(f"open them with: jupyter lab {options.folder}")
    return 0


def _info(options: argparse.Namespace) -> int:
    import colibri_lab as lab

    print(f"colibri-lab {lab.__version__}, Python {platform.python_version()}, {platform.platform()}")
    model = lab.open(options.model if options.path is None else options.path)
    for name, value in model.info.items():
        print(f"{name:<39}{value}")
    print(model.config)
    model.session(capture="none", max_tokens=1)  # refuses a COLIBRI_CPUS or COLIBRI_HUGE_PAGES that means nothing
    return 0


def _explore(options: argparse.Namespace) -> int:
    import colibri_lab as lab

    session = lab.open(options.model).session(capture="moe")
    try:
        session.feed(options.text)
    except lab.CapacityError:
        limit = session.max_tokens
        raise lab.CapacityError(f"the text is longer than the {limit} tokens that this model takes") from None
    lab.RoutingExplorer(session).to_html(options.html)
    print(options.html)
    return 0


def _doctor(options: argparse.Namespace) -> int:
    import colibri_lab as lab

    report = lab.doctor(options.path, values=options.values)
    print(report)
    return 0 if report.ok else 1


def _bench(options: argparse.Namespace) -> int:
    package = Path(__file__).resolve().parent
    for folder in (package / "benchmarks", package.parent / "benchmarks"):
        if (folder / "bench.py").is_file():
            command = [sys.executable, str(folder / "bench.py"), *options.arguments]
            os.execv(command[0], command)  # becomes the suite, so that signals and the exit code are its own
    raise FileNotFoundError(f"no benchmarks in {package / 'benchmarks'}: install colibri-lab again")


def parser() -> argparse.ArgumentParser:
    """The whole command line as argparse sees it."""
    top = argparse.ArgumentParser(prog="colibri-lab", description="Look inside Mixture-of-Experts language models.")
    top.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    top.set_defaults(run=_lab, folder=DEFAULT_FOLDER, arguments=[])
    commands = top.add_subparsers(title="commands", metavar="COMMAND", description="(without a command: lab)")

    command = commands.add_parser("lab", help="open JupyterLab on a copy of the notebooks")
    command.add_argument("folder", nargs="?", type=Path, default=DEFAULT_FOLDER, help=f"default: {DEFAULT_FOLDER}")
    command.add_argument("arguments", nargs="*", metavar="-- ARGUMENT", help="given to jupyter lab unchanged")
    command.set_defaults(run=_lab)

    command = commands.add_parser("notebooks", help="copy the notebooks to a folder")
    command.add_argument("folder", type=Path)
    command.add_argument("--force", action="store_true", help="replace files that are there already")
    command.set_defaults(run=_notebooks)

    command = commands.add_parser(
        "info", help="versions, code path, threads and a model's description (1: no model, or bad COLIBRI_ variable)"
    )
    which = command.add_mutually_exclusive_group()
    which.add_argument("path", nargs="?", metavar="PATH", help="a checkpoint (default: the bundled model)")
    which.add_argument("--model", metavar="PATH", help="the same")
    command.set_defaults(run=_info)

    command = commands.add_parser("explore", help="run a text and write its routing as one offline HTML file")
    command.add_argument("text")
    command.add_argument("--html", required=True, metavar="OUT", help="the file to write")
    command.add_argument("--model", help="a checkpoint (default: the bundled model)")
    command.set_defaults(run=_explore)

    command = commands.add_parser("doctor", help="check a checkpoint folder before it is loaded (1: not healthy)")
    command.add_argument("path")
    command.add_argument("--values", action="store_true", help="read all weights and name those that hold NaN or Inf")
    command.set_defaults(run=_doctor)

    _cli_diff.add_to(commands)
    _cli_nan.add_to(commands)
    _cli_cache.add_to(commands)

    command = commands.add_parser(
        "bench", help="measure the engine beside its peers and the machine's limits", add_help=False
    )
    command.usage = "colibri-lab bench [ARGUMENT ...] (given to the suite unchanged; --help is the suite's)"
    command.set_defaults(run=_bench)
    return top


def _warn(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """A warning as one line: where in the code it was raised helps nobody at a terminal."""
    print(f"colibri-lab: warning: {' '.join(str(message).split())}", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    from colibri_lab.errors import ColibriError

    options, others = parser().parse_known_args(arguments)
    if options.run is _bench:
        options.arguments = others
    elif others:
        parser().error(f"unrecognized arguments: {' '.join(others)}")
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal that cannot show a sign gets its number, not an error
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warn
            return int(options.run(options))
    except (ColibriError, OSError, ImportError) as error:
        print(f"colibri-lab: {error}", file=sys.stderr)
        return int(getattr(options, "trouble", 1))
    except KeyboardInterrupt:
        print("colibri-lab: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
