"""Build the training text of the bundled model: eight domains, every source public domain, PSF, MIT, or generated here.

    python build_corpus.py CORPUS_DIR [--cache CACHE_DIR] [--sources SOURCES.md]

Each domain becomes DOMAIN.train.txt and DOMAIN.val.txt: documents separated by the record separator, U+001E.
One document in twenty is held out. Needs Debian with apt-get, pip, and Python 3.11; nothing is installed.
"""

from __future__ import annotations

import argparse
import hashlib
import os

import collected_text
import generated_text
from corpus import DOMAINS, SEPARATOR

VALIDATION_EVERY = 20  # one document in twenty is held out
BUILDERS = {
    "english": collected_text.english,
    "french": collected_text.french,
    "spanish": collected_text.spanish,
    "python": collected_text.python,
    "c": collected_text.c_source,
    "arithmetic": generated_text.arithmetic,
    "json": generated_text.json_text,
    "markup": generated_text.markup,
}
PREFACE = """# Sources of the training text

Written by build_corpus.py. Project Gutenberg headers and licence texts that wrap some of the books inside the packages
are not used: only the public-domain text itself is.
"""


def write_domain(folder: str, domain: str, documents: list[str]) -> str:
    """Writes the two files of a domain; returns its row of the second table of SOURCES.md."""
    split: dict[str, list[str]] = {"train": [], "val": []}
    for number, document in enumerate(documents):
        split["val" if number % VALIDATION_EVERY == VALIDATION_EVERY // 2 else "train"].append(document)
    for part, chosen in split.items():
        with open(os.path.join(folder, f"{domain}.{part}.txt"), "w", encoding="utf-8") as handle:
            handle.write(SEPARATOR.join(chosen))
    train, held_out = (sum(len(document.encode()) for document in split[part]) for part in ("train", "val"))
    digest = hashlib.sha256(SEPARATOR.join(documents).encode()).hexdigest()[:16]
    print(f"{domain:10} {len(documents):6} documents {train:10,} bytes train {held_out:9,} bytes held out", flush=True)
    return f"| {domain} | {len(documents):,} | {train:,} | {held_out:,} | {digest} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("corpus")
    parser.add_argument("--cache", default="package-cache")
    parser.add_argument("--sources", default="SOURCES.md")
    options = parser.parse_args()
    os.makedirs(options.corpus, exist_ok=True)
    os.makedirs(options.cache, exist_ok=True)
    origins, sizes = [], []
    for domain in DOMAINS:
        documents, sources = BUILDERS[domain](options.cache)
        origins += ["| " + " | ".join(source) + " |" for source in sources]
        documents = [document.strip("\n") for document in documents if document.strip()]
        sizes.append(write_domain(options.corpus, domain, documents))
    with open(options.sources, "w", encoding="utf-8") as handle:
        handle.write(PREFACE)
        handle.write("\n| domain | package | version | licence | what |\n|---|---|---|---|---|\n" + "\n".join(origins))
        handle.write("\n\n| domain | documents | bytes train | bytes validation | SHA-256 (first 16) |\n")
        handle.write("|---|---|---|---|---|\n" + "\n".join(sizes) + "\n")


if __name__ == "__main__":
    main()
