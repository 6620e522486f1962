"""machine.py: what stands above every table: which machine, when, how busy, which versions."""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

LEAST_WEIGHTS = 128 << 20  # four times what most CPUs have as their last cache; a larger cache counts as it is


def cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        done = subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True)
        return done.stdout.strip() or platform.machine()
    found = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", text, flags=re.MULTILINE)
    family = re.search(r"^cpu family\s*:\s*(\d+)$", text, flags=re.MULTILINE)
    model = re.search(r"^model\s*:\s*(\d+)$", text, flags=re.MULTILINE)
    name = re.sub(r"\((?:R|TM)\)|\bCPU\b|@.*", "", found[1]).strip() if found else platform.machine()
    return f"{name} (family {family[1]}, model {model[1]})" if family and model else name


def cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def last_cache_bytes(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """The largest cache that serves the first CPU; 0 where the system does not tell."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    found = [re.fullmatch(r"(\d+)([KMG]?)", path.read_text().strip()) for path in folder.glob("index*/size")]
    return max((int(size[1]) * units.get(size[2], 1) for size in found if size), default=0)


def least_weights() -> int:
    """Bytes of weights below which a model may stay in a cache, so that its speed tells nothing about memory."""
    return max(LEAST_WEIGHTS, last_cache_bytes())


def describe() -> dict[str, Any]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": cpu_name(),
        "cpus": cpus(),
        "memory_bytes": memory,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        "load_at_start": round(os.getloadavg()[0], 2),
    }


def slug(machine: dict[str, Any]) -> str:
    """The name of a result file, without its ending."""
    return re.sub(r"[^a-z0-9]+", "-", f"{machine['cpu']} {machine['date']}".lower()).strip("-")
