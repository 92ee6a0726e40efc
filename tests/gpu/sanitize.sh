#!/bin/sh
# compute-sanitizer over every rung: out-of-bounds and misaligned accesses, then races in shared memory.
# Usage: tests/gpu/sanitize.sh [python]
set -eu
cd "$(dirname "$0")/../.."
python=${1:-python3}

# Each array by a cudaMalloc of its own: inside JAX's pool, an access past an array's end would be one into another.
export XLA_PYTHON_CLIENT_ALLOCATOR=platform XLA_PYTHON_CLIENT_PREALLOCATE=false

for tool in memcheck racecheck; do
  echo "== $tool"
  compute-sanitizer --tool "$tool" --kernel-regex kernel_substring=mosaic_gpu --error-exitcode 9 --print-limit 5 \
    "$python" tests/gpu/every_rung.py
done
