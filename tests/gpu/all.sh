#!/bin/sh
# Everything that needs a GPU, in parts; results go to $OUT, one file a part. CONTRIBUTING.md has the order and the times.
# Usage: OUT=DIR [COMMIT=SHA] [PROCESSES=16] [TESTS_SECONDS=500] tests/gpu/all.sh PART...
#   tests, of which those that are named share their processes: softmax, cross-entropy, attention, library
#   others, one after the other: benchmark, loss-benchmark, loss-peers, attention-benchmark, attention-peers, models,
#   invariance, sanitize, sanitize-attention
# Benchmarks need COMMIT, and the peers PEERS, a folder where they and the CuTe DSL are installed.
set -u
cd "$(dirname "$0")/../.."
export XLA_PYTHON_CLIENT_PREALLOCATE=false PYTHONUNBUFFERED=1
out=${OUT:?a folder for the results}
here=tests/pallas_kernels
failed=0
names=
tests=
peers_path=${PEERS:-}:${PEERS:-}/nvidia_cutlass_dsl/dsl_packages

share() { # NAME TESTS...: to be run with the other tests
  names=${names:+${names}_}$1
  shift
  tests="$tests $*"
}

attention() { # NAME FLAGS...: a benchmark of attention
  json=$out/$1.json
  shift
  python3 -m benchmarks --op=attention "$@" --json="$json" --commit="${COMMIT:?}"
}

rows() { # NAME FLAGS...: a benchmark of softmax or a loss
  json=$out/$1.json
  shift
  timeout -k 10 500 python3 -m benchmarks "$@" --processes="${PROCESSES:-16}" --json="$json" --commit="${COMMIT:?}"
}

do_part() {
  case $1 in
  softmax)
    suite=$here/test_conformance.py
    share "$1" $suite::test_on_gpu $suite::test_equal_logits_are_equally_likely_on_gpu
    ;;
  cross-entropy) share "$1" $here/test_conformance.py::test_losses_on_gpu $here/test_linear_cross_entropy.py ;;
  attention)
    share "$1" $here/test_attention_forward.py $here/test_attention_backward.py $here/test_attention_masks.py \
      $here/test_attention_fallbacks.py \
      tests/jaxsoftmax/test_paged_attention.py
    ;;
  library) share "$1" tests/jaxsoftmax/test_*gpu.py $here/test_gpu_harness.py ;;
  benchmark)
    rows standard --tag=standard --impl=ours,xla --rounds=3 &&
      rows ladder --tag=ladder --impl=ladder --rounds=2
    ;;
  loss-benchmark)
    rows cross_entropy --tag=cross_entropy --impl=ours,xla,xla_f32 &&
      rows top_k --tag=top_k --impl=ours,xla --rounds=3
    ;;
  loss-peers)
    : "${PEERS:?}"
    rows loss_peers --tag=cross_entropy --impl=quack,liger --rounds=3 --peers_path="$peers_path"
    ;;
  attention-benchmark)
    attention attention --tag=standard --pass=fwd,bwd --impl=ours,cudnn,mgpu,tokamax --rounds=3 --processes=8 --budget_s=420
    ;;
  attention-peers)
    : "${PEERS:?}"
    attention attention_fa4 --tag=standard --pass=fwd,bwd --impl=ours,cudnn,fa4 --rounds=2 --processes=8 --budget_s=420 \
      --peers_path="$peers_path"
    ;;
  models) PYTHONPATH=. python3 examples/packed_gpt.py --size=small --length=4096 --steps=25 --cudnn >"$out/models.txt" ;;
  invariance)
    rows invariance --tag=invariance --rounds=3 &&
      attention invariance_attention --tag=invariance
    ;;
  sanitize) tests/gpu/sanitize.sh ;; # two tools beside each other
  sanitize-attention)
    mkdir -p "$out/attention" && OUT=$out/attention STEPS=every_attention tests/gpu/sanitize.sh
    ;;
  *)
    echo "no part $1" >&2
    exit 2
    ;;
  esac
}

for part in ${*:?which part}; do
  do_part "$part" || { echo "$part: failed" && failed=1; }
done
if [ -n "$tests" ]; then
  # shellcheck disable=SC2086 # a word a file
  python3 tests/gpu/beside.py --processes="${PROCESSES:-16}" --seconds="${TESTS_SECONDS:-500}" "$names" $tests || failed=1
fi
exit $failed
