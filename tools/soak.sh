#!/bin/sh
# soak.sh PYTHON [SECONDS]: long runs, before an issue is closed. Fuzzes each tests/c/fuzz_*.c (libFuzzer of clang, address and
# undefined-behaviour sanitizers) and runs the Python tests marked `soak`, SECONDS each (default 120); beside them, test_rounding with
# all 2^32 floats (half an hour). The log is benchmarks/soak/<date>.log.
set -eu
cd "$(dirname "$0")/.."
python=$1
seconds=${2:-120}
build=build-soak
log=benchmarks/soak/$(date +%Y-%m-%d).log
mkdir -p benchmarks/soak $build/corpus

run() {
    echo "commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown), $seconds s each"
    cmake -S csrc -B $build/release -DCMAKE_BUILD_TYPE=Release >/dev/null
    cmake --build $build/release --target test_rounding --parallel 2 >/dev/null
    $build/release/test_rounding all >$build/rounding.log 2>&1 &
    rounding=$!
    trap 'kill $rounding 2>/dev/null || true' EXIT
    cmake -S csrc -B $build -DCMAKE_C_COMPILER=clang -DCMAKE_BUILD_TYPE=None -DCMAKE_C_FLAGS="-O1 -g" -DCOLIBRI_BUILD_TESTS=OFF \
        -DCOLIBRI_SANITIZE=address,undefined,fuzzer-no-link >/dev/null
    cmake --build $build --target colibri --parallel 2 >/dev/null
    for source in tests/c/fuzz_*.c; do
        name=$(basename "$source" .c)
        clang -g -O1 -std=c99 -D_POSIX_C_SOURCE=200809L -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all \
            -Icsrc -Icsrc/include "$source" $build/libcolibri.a -lm -pthread -o "$build/$name"
        mkdir -p "$build/corpus/$name"
        echo "== $name"
        "$build/$name" -max_total_time="$seconds" -max_len=4096 -print_final_stats=1 -verbosity=0 \
            -artifact_prefix="$build/" "$build/corpus/$name"
    done
    echo "== pytest -m soak"
    COLIBRI_SOAK_SECONDS=$seconds "$python" -m pytest --ignore=tests/browser --ignore=tests/torch -m soak -s -q
    echo "== test_rounding all"
    wait $rounding || { cat $build/rounding.log; return 1; }
    cat $build/rounding.log
}

set +e # no `run && …`: inside a function whose status is tested, the shell goes on after a failure
(set -e; run; echo "all passed") >"$log.raw" 2>&1
status=$?
set -e
sed -e "s|$PWD/||g" -e '/^###### Rec/,/^###### End/d' "$log.raw" >"$log" # no path of this machine, no fuzzer's dictionary
rm "$log.raw"
[ $status -eq 0 ] || { tail -n 30 "$log"; echo "failed: see $log"; exit 1; }
cat "$log"
