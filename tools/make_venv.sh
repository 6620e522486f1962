#!/bin/sh
# make_venv.sh FOLDER: checks what this machine must bring, names each missing thing in one sentence, and creates a virtual environment.
# PYTHON, CC and CXX choose the interpreter and the compilers.
set -u
folder=$1
missing=0

lack() {
    echo "colibri-lab: $1" >&2
    missing=1
}

# first NAMES...: the first of them that can be run
first() {
    for name in "$@"; do
        if command -v "$name" >/dev/null 2>&1; then
            echo "$name"
            return
        fi
    done
}

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

python=
for name in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 python}; do
    if command -v "$name" >/dev/null 2>&1 && new_enough "$name"; then
        python=$name
        break
    fi
done

if [ -z "$python" ]; then
    lack "Python 3.11 or newer is missing: install it (Debian: python3 python3-venv python3-dev), or name one with make PYTHON=/path/to/python3."
else
    "$python" -c 'import venv, ensurepip' >/dev/null 2>&1 ||
        lack "Python's venv module is missing for $python: install it (Debian: python3-venv)."
    "$python" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
        lack "Python's C headers (Python.h) are missing for $python: install them (Debian: python3-dev, Fedora: python3-devel)."
fi

cc=${CC:-$(first cc gcc clang)}
if [ -z "$cc" ]; then
    lack "A C compiler is missing: install gcc or clang (Debian: build-essential)."
elif ! printf '#include <stdio.h>\nint main(void) { return 0; }\n' | $cc -x c -fsyntax-only - >/dev/null 2>&1; then
    lack "The C compiler ($cc) cannot compile a program with <stdio.h>: install the C library's headers (Debian: build-essential)."
fi

cxx=${CXX:-$(first c++ g++ clang++)}
if [ -z "$cxx" ]; then
    lack "A C++ compiler is missing: install g++ or clang++ (Debian: build-essential)."
elif ! printf '#include <vector>\nint main() { return 0; }\n' | $cxx -x c++ -fsyntax-only - >/dev/null 2>&1; then
    lack "The C++ compiler ($cxx) cannot compile a program with <vector>: install the C++ library's headers (Debian: build-essential)."
fi

[ "$missing" -eq 0 ] || exit 1
echo "colibri-lab: creating $folder with $("$python" -c 'import sys; print(sys.executable)')"
"$python" -m venv "$folder"
