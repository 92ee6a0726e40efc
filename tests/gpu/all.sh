#!/bin/sh
# Everything that needs a GPU, in parts of under ten minutes; results go to $OUT.
# Usage: OUT=DIR COMMIT=SHA tests/gpu/all.sh PART: softmax, cross-entropy, attention, library, benchmark, loss-benchmark,
#   attention-benchmark, attention-rest, attention-peers, models or sanitize
set -u
cd "$(dirname "$0")/../.."
export XLA_PYTHON_CLIENT_PREALLOCATE=false PYTHONUNBUFFERED=1
out=${OUT:?a folder for the results}
test="python3 -m pytest -m gpu -q -rf --tb=short -p no:cacheprovider"

part() { # NAME ARGUMENTS...: one process of the tests, beside others
  name=$1
  shift
  $test "$@" >"$out/$name.txt" 2>&1 || echo "$name: failed" >>"$out/failed.txt" &
}

case ${1:?which part} in
softmax) # about 2500 cases of two seconds, over 16 processes
  for rung in naive warp block online cluster grid; do
    for dtype in -float16 bfloat16 float32; do
      part "$rung$dtype" tests/pallas_kernels/test_conformance.py -k "on_gpu and $rung- and $dtype and not cross_entropy"
    done
  done
  ;;
cross-entropy) # about 240 cases of two seconds, over 18 processes
  for rung in naive warp block online cluster grid; do
    for dtype in -float16 bfloat16 float32; do
      part "loss-$rung$dtype" tests/pallas_kernels/test_conformance.py -k "on_gpu and $rung- and $dtype and cross_entropy"
    done
  done
  ;;
attention)
  part forward tests/pallas_kernels/test_attention_forward.py
  part backward tests/pallas_kernels/test_attention_backward.py
  ;;
library)
  part softmax tests/jaxsoftmax/test_gpu.py tests/pallas_kernels/test_gpu_harness.py
  part attention tests/jaxsoftmax/test_attention_gpu.py
  ;;
benchmark)
  python3 -m benchmarks --tag=standard --impl=ours,xla --rounds=3 --json="$out/standard.json" --commit="${COMMIT:?}"
  python3 -m benchmarks --tag=ladder --impl=ladder --rounds=2 --json="$out/ladder.json" --commit="$COMMIT"
  ;;
loss-benchmark)
  python3 -m benchmarks --tag=cross_entropy --impl=ours,xla,xla_f32 --json="$out/cross_entropy.json" \
    --commit="${COMMIT:?}"
  python3 -m benchmarks --tag=top_k --impl=ours,xla --rounds=3 --json="$out/top_k.json" --commit="$COMMIT"
  ;;
attention-benchmark)
  python3 -m benchmarks.attention --tag=core --impl=ours,cudnn,mgpu,tokamax --rounds=3 --budget_s=420 \
    --json="$out/attention.json" --commit="${COMMIT:?}"
  ;;
attention-rest) # what the grid has beside the core: 12 forward cases, then 12 backward, a minute and two
  for pass in fwd bwd; do
    python3 -m benchmarks.attention --tag=rest --pass=$pass --impl=ours,cudnn,mgpu,tokamax --rounds=2 --budget_s=130 \
      --json="$out/attention_rest_$pass.json" --commit="${COMMIT:?}"
  done
  ;;
attention-peers) # PEERS=FOLDER, where flash-attn-4 and the CuTe DSL are installed; two to three minutes
  python3 -m benchmarks.attention --tag=standard --pass=fwd,bwd --impl=fa4 --rounds=2 --budget_s=200 \
    --peers_path="${PEERS:?}:$PEERS/nvidia_cutlass_dsl/dsl_packages" \
    --json="$out/attention_fa4.json" --commit="${COMMIT:?}"
  ;;
models)
  python3 -m benchmarks.training --json="$out/models.json" --commit="${COMMIT:?}" || echo "models: failed" >>"$out/failed.txt"
  ;;
sanitize) # two tools beside each other, at most four minutes
  tests/gpu/sanitize.sh || echo "sanitize: failed" >>"$out/failed.txt"
  ;;
*)
  echo "no part $1" >&2
  exit 2
  ;;
esac
wait
if [ -s "$out/failed.txt" ]; then
  cat "$out/failed.txt"
  exit 1
fi
