#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Run the tests and the benchmark that need an NVIDIA GPU; see docs/gpu.md.
#
#   benchmarks/gpu_all.sh [RESULTS]     PYTHON and QUICK=1 are read from the environment
#
# Leaves RESULTS/gpu-tests.log and RESULTS/gpu.json, and RESULTS/gpu_engine.json where
# vLLM for CUDA is installed. Wheels in .whl/, or archives that benchmarks.gpu_carry made
# there, complete the python at hand, for machines without a package index.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
results="${1:-benchmarks/results}"
python="${PYTHON:-python3}"
mkdir -p "$results"
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

if compgen -G '.whl/*' >/dev/null; then
    site="$(mktemp -d)"
    trap 'rm -rf "$site"' EXIT
    if compgen -G '.whl/*.whl' >/dev/null; then
        "$python" -m pip install --quiet --no-index --no-deps --no-compile \
            --no-cache-dir --target "$site" .whl/*.whl || exit
    fi
    for archive in .whl/*.tar.xz; do
        [[ ! -e "$archive" ]] || xz -T0 -dc "$archive" | tar -C "$site" -xf - || exit
    done
    PYTHONPATH="$site:$PYTHONPATH"
fi

# Warnings are no errors here: versions may be others than the pinned ones.
tests=(tests/gpu tests/devices/test_libcuda.py)
if "$python" -c 'import transformers' 2>/dev/null; then
    tests+=(tests/integration/transformers/test_contract.py)
    tests+=(tests/integration/transformers/test_continuous_contract.py)
fi
"$python" -m pytest "${tests[@]}" -W default \
    --durations=10 2>&1 | tee "$results/gpu-tests.log"
status=$?
"$python" -m benchmarks.gpu --json "$results/gpu.json" ${QUICK:+--quick} || status=$?
if "$python" -c 'import vllm' 2>/dev/null; then
    "$python" -m benchmarks.gpu_engine --json "$results/gpu_engine.json" \
        ${QUICK:+--quick} || status=$?
fi
exit "$status"
