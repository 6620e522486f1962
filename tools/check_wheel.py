"""check_wheel.py WHEEL: does the wheel hold everything that a user needs beside the Python code?"""

import sys
import zipfile

PARTS = {
    "the compiled module": ("colibri_lab/_core", ".so"),
    "its type stub": ("colibri_lab/_core.pyi", ""),
    "the compiled simulators": ("colibri_lab/_cachelab", ".so"),
    "the typing marker": ("colibri_lab/py.typed", ""),
    "the notebooks": ("colibri_lab/notebooks/", ".ipynb"),
    "the benchmark suite": ("colibri_lab/benchmarks/", "bench.py"),
    "the recorded claims": ("colibri_lab/benchmarks/results/claims-", ".json"),
    "browser code": ("colibri_lab/widgets/", ".js"),
    "style sheets": ("colibri_lab/widgets/", ".css"),
    "the bundled weights": ("colibri_lab/bundled/tiny-colibri/model", ".safetensors"),
    "the bundled tokenizer": ("colibri_lab/bundled/tiny-colibri/tokenizer.json", ""),
    "the licence": ("colibri_lab-", "/licenses/LICENSE"),
}
FOREIGN = ("tests/", "csrc/", "cpp_bindings/", "docs/", "tools/", "benchmarks/", "lib/", "include/")

with zipfile.ZipFile(sys.argv[1]) as wheel:
    names = wheel.namelist()


def there(start: str, end: str) -> bool:
    return any(name.startswith(start) and name.endswith(end) for name in names)


lacking = [what for what, part in PARTS.items() if not there(*part)]
foreign = [name for name in names if name.startswith(FOREIGN) or "__pycache__" in name]
print(f"{sys.argv[1]}: {len(names)} files")
if lacking or foreign:
    sys.exit(f"lacking: {', '.join(lacking) or 'nothing'}; out of place: {', '.join(foreign[:5]) or 'nothing'}")
