#!/bin/sh
# compute-sanitizer over every row kernel, or every kind of attention: out-of-bounds and misaligned accesses, races in
# shared memory, each tool in PARTS processes one after another, JOBS of both at once. Says how many steps were done and
# what was found; fails if either is not as it should be. With OUT, each tool's words are in $OUT/TOOL.txt.
# The tool itself crashes, once in some 50 steps of the ladder, 6 to 14 of attention (H200, 15 processes): the part goes
# on with the step it crashed in. Three crashes in one step fail.
# Usage: [OUT=DIR] [PARTS=1] [JOBS=2] [SECONDS_ALL=240] [STEPS=every_kernel|every_attention] [ONLY=NAME] \
#   tests/gpu/sanitize.sh [python]
set -u

if [ "${1:-}" = --part ]; then # TOOL I: one part by one tool; its exit status stands beside its words
  tool=$2 i=$3 finished=0 crashes=0 status=124
  words=$LOGS/$tool-$i.txt
  while left=$((UNTIL - $(date +%s))) && [ "$left" -gt 0 ]; do
    timeout -k 5 "$left" compute-sanitizer --tool "$tool" --kernel-regex kernel_substring=mosaic_gpu \
      --error-exitcode 9 --print-limit 5 \
      "$PYTHON" tests/gpu/steps.py "$STEPS" --only="$ONLY" --after="$finished" --part="$i/$PARTS" \
      >>"$words" 2>&1
    status=$?
    [ "$status" -eq 139 ] || break
    before=$finished finished=$(grep -c '^done$' "$words")
    [ "$finished" -eq "$before" ] || crashes=0
    crashes=$((crashes + 1))
    echo "$tool, part $i/$PARTS: the tool crashed after $finished steps"
    [ "$crashes" -lt 3 ] || break
    status=124
  done
  echo "$status" >"$LOGS/$tool-$i.status"
  exit 0
fi

cd "$(dirname "$0")/../.."
export PYTHON="${1:-python3}" PARTS="${PARTS:-1}" STEPS="${STEPS:-every_kernel}" ONLY="${ONLY:-}"
LOGS=$(mktemp -d) UNTIL=$(($(date +%s) + ${SECONDS_ALL:-240}))
export LOGS UNTIL
# Each array by a cudaMalloc of its own: inside JAX's pool, an access past an array's end would be one into another.
export XLA_PYTHON_CLIENT_ALLOCATOR=platform XLA_PYTHON_CLIENT_PREALLOCATE=false
# Processes beside each other: one thread each, and no tuning of XLA's own kernels.
export OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 XLA_FLAGS="--xla_gpu_autotune_level=0 ${XLA_FLAGS:-}"

for i in $(seq "$PARTS"); do echo racecheck "$i" memcheck "$i"; done |
  xargs -n 2 -P "${JOBS:-2}" tests/gpu/sanitize.sh --part

failed=0
for tool in memcheck racecheck; do
  all=${OUT:-$LOGS}/$tool.txt
  cat "$LOGS/$tool"-*.txt >"$all"
  expected=$(awk '/^steps [0-9]+$/ && !seen[FILENAME]++ {n += $2} END {print n + 0}' "$LOGS/$tool"-*.txt)
  finished=$(grep -c '^done$' "$all")
  found=$(grep -c '^========= \(Invalid\|Misaligned\|Error:\|Warning:\)' "$all")
  echo "$tool: $finished of $expected steps, $found findings"
  [ "$expected" -gt 0 ] && [ "$finished" -eq "$expected" ] && [ "$found" -eq 0 ] || failed=1
  for i in $(seq "$PARTS"); do
    case $(cat "$LOGS/$tool-$i.status") in
    0) continue ;;
    9) why='found something' ;;
    124 | 137) why='was cut: out of time' ;;
    *) why='failed' ;;
    esac
    failed=1
    echo "$tool, part $i/$PARTS: $why; its last words:"
    [ ! -f "$LOGS/$tool-$i.txt" ] || tail -n 5 "$LOGS/$tool-$i.txt" | sed 's/^/  /'
  done
done
exit $failed
