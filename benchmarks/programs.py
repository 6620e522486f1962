"""programs.py: C programs on the engine's own objects; they need the source tree and a C compiler."""

from __future__ import annotations

import subprocess
from pathlib import Path

from limits import SOURCES, compile_c

ROOT = Path(__file__).resolve().parent.parent
FOLDER = "build-engine"
DEFINES = ("-D_POSIX_C_SOURCE=200809L", "-D_DEFAULT_SOURCE")


def engine_file(name: str, folder: str = FOLDER, *variables: str) -> Path:
    """FOLDER/NAME as csrc/Makefile makes it from the engine as it is now. Raises OSError with the compiler's words."""
    if not (ROOT / "csrc" / "Makefile").is_file():
        raise FileNotFoundError("the engine's sources are not here; run the suite in the source tree")
    command = ["make", "-C", str(ROOT / "csrc"), f"OUT=../{folder}", *variables, f"../{folder}/{name}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"the engine does not compile: {done.stderr.strip()[-500:]}")
    return ROOT / folder / name


def on_engine(name: str, cache: Path, *objects: Path, flags: tuple[str, ...] = ()) -> Path:
    """c/NAME.c with the engine; `objects` go before its library: instead of those of the same name, or beside them."""
    parts = (*objects, engine_file("libcolibri.a"))
    flags = (*DEFINES, f"-I{ROOT / 'csrc' / 'include'}", *flags)
    depends = b"".join(part.read_bytes() for part in parts)
    return compile_c(SOURCES / f"{name}.c", cache, *flags, *map(str, parts), "-lm", depends=depends)
