#!/bin/sh
# compute-sanitizer over every rung, or every kind of attention: out-of-bounds and misaligned accesses, and races in
# shared memory, each tool in several processes beside the other. Says how many steps were done and what was found;
# fails if either is not as it should be. With OUT, each tool's words are in $OUT/TOOL.txt.
# Four parts a tool at once, beside other tests, crashed compute-sanitizer (7 of 8 processes, H200): hence one.
# Usage: [OUT=DIR] [PARTS=1] [SECONDS_EACH=240] [STEPS=every_rung|every_attention] [ONLY=NAME] tests/gpu/sanitize.sh \
#   [python]
set -u
cd "$(dirname "$0")/../.."
python=${1:-python3}
parts=${PARTS:-1}
logs=$(mktemp -d)
out=${OUT:-$logs}

# Each array by a cudaMalloc of its own: inside JAX's pool, an access past an array's end would be one into another.
export XLA_PYTHON_CLIENT_ALLOCATOR=platform XLA_PYTHON_CLIENT_PREALLOCATE=false

sanitize() { # TOOL I: one part by one tool; its exit status stands beside its words
  timeout -k 5 "${SECONDS_EACH:-240}" compute-sanitizer --tool "$1" --kernel-regex kernel_substring=mosaic_gpu \
    --error-exitcode 9 --print-limit 5 \
    "$python" "tests/gpu/${STEPS:-every_rung}.py" --only="${ONLY:-}" --part="$2/$parts" \
    >"$logs/$1-$2.txt" 2>&1
  echo $? >"$logs/$1-$2.status"
}

for i in $(seq "$parts"); do
  sanitize memcheck "$i" &
  sanitize racecheck "$i" &
done
wait

failed=0
for tool in memcheck racecheck; do
  cat "$logs/$tool"-*.txt >"$out/$tool.txt"
  expected=$(awk '/^steps [0-9]+$/ {n += $2} END {print n + 0}' "$out/$tool.txt")
  finished=$(grep -c '^done$' "$out/$tool.txt")
  found=$(grep -c '^========= \(Invalid\|Misaligned\|Error:\|Warning:\)' "$out/$tool.txt")
  echo "$tool: $finished of $expected steps, $found findings"
  [ "$expected" -gt 0 ] && [ "$finished" -eq "$expected" ] && [ "$found" -eq 0 ] || failed=1
  for i in $(seq "$parts"); do
    case $(cat "$logs/$tool-$i.status") in
    0) continue ;;
    9) why='found something' ;;
    124 | 137) why='was cut: out of time' ;;
    *) why='failed' ;;
    esac
    failed=1
    echo "$tool, part $i/$parts: $why; its last words:"
    tail -n 5 "$logs/$tool-$i.txt" | sed 's/^/  /'
  done
done
exit $failed
