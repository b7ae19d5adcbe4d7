#!/usr/bin/env bash
# Run the tests of the native kernels under AddressSanitizer, to detect accesses out of bounds. Takes ten minutes.
#
#     bench/sanitize.sh        # needs .venv (make test), CMake and the sanitizer's library
set -euo pipefail
cd "$(dirname "$0")/.."
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
.venv/bin/python -m venv "$build/venv"
"$build/venv/bin/python" -m pip install -qq --disable-pip-version-check 'nanobind>=2.9,<4'
cmake -S csrc -B "$build/cmake" -DPython_EXECUTABLE="$build/venv/bin/python" \
    -DCMAKE_CXX_FLAGS="-fsanitize=address -fno-omit-frame-pointer -g1" >"$build/log"
cmake --build "$build/cmake" -j 2 >>"$build/log" || { tail -20 "$build/log"; exit 1; }
# Copy the package next to the module, so that it is imported before the installed one.
mkdir "$build/src" && cp -r src/shardwise "$build/src/" && cp "$build"/cmake/_native*.so "$build/src/shardwise/kernels/"
site=$(.venv/bin/python -c 'import torch, pathlib; print(pathlib.Path(torch.__path__[0]).parent)')
echo "$site" >"$(echo "$build"/venv/lib/python*/site-packages)/installed.pth"
# Preload libstdc++ too: without it thrown exceptions are not recognized.
ASAN_OPTIONS=detect_leaks=0 LD_PRELOAD="$("${CXX:-g++}" -print-file-name=libasan.so) $("${CXX:-g++}" -print-file-name=libstdc++.so)" PYTHONPATH="$build/src" \
    "$build/venv/bin/python" -m pytest -q -s -p no:cacheprovider tests/test_native*.py \
    tests/test_sampler.py tests/test_logprobs.py
