"""install_extra.py NAME: pip installs what an extra of pyproject.toml asks for, without building this project again."""

import subprocess
import sys
import tomllib
from pathlib import Path

with (Path(__file__).resolve().parent.parent / "pyproject.toml").open("rb") as file:
    extras = tomllib.load(file)["project"]["optional-dependencies"]
subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *extras[sys.argv[1]]], check=True)
