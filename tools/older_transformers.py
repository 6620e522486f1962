"""Install the older releases of transformers that the torch suite records with, each into a folder of its own.

    python tools/older_transformers.py            into transformers-VERSION/ of this interpreter's environment

One process can load one release only, so they lie beside the installed one and a test's process puts a folder on its
path. With each comes what it pins and the newest release does not want; PyTorch and the rest are shared.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

RELEASES = {
    "4.57.6": "huggingface_hub>=0.34,<1",
    "5.0.0": "huggingface_hub>=1.3,<2",
    "5.8.0": "huggingface_hub>=1.5,<2",
}
COMPANIONS = ["tokenizers>=0.22,<=0.23.0", "requests", "urllib3", "idna", "certifi", "charset-normalizer"]


def main() -> None:
    for version, hub in RELEASES.items():
        folder = Path(sys.prefix) / f"transformers-{version}"
        if (folder / "complete").exists():
            continue
        print(f"colibri-lab: installing transformers {version} into {folder}", flush=True)
        wanted = [f"transformers=={version}", hub, *COMPANIONS]
        options = ["--quiet", "--no-deps", "--upgrade", "--target", str(folder)]
        done = subprocess.run([sys.executable, "-m", "pip", "install", *options, *wanted], check=False)
        if done.returncode:
            sys.exit(f"transformers {version} could not be installed; the torch suite needs it")
        (folder / "complete").touch()


if __name__ == "__main__":
    main()
