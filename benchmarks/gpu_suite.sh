#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# All GPU tests and benchmarks in one run of under 8 minutes; prints one table.
#
#   benchmarks/gpu_suite.sh [OUT_DIR]
#
# On a host without a network, wheels in .whl/ and the FlashAttention 4 bundle in .fa4/
# (made by shared/tools/fa4_bundle.sh) are unpacked into a folder of their own first.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-${OUT:-/tmp/vllm-gpu-suite}}
mkdir -p "$out"

site=${VLLM_GPU_SITE:-/tmp/vllm-gpu-site}
if [[ ! -e $site/.done ]]; then
  mkdir -p "$site"
  if compgen -G ".whl/*.whl" >/dev/null; then
    for wheel in .whl/*.whl; do python3 -m zipfile -e "$wheel" "$site"; done
  fi
  if [[ -e .fa4/part00 ]]; then cat .fa4/part* | tar -C "$site" -xJf -; fi
  touch "$site/.done"
fi
export PYTHONPATH="$PWD:$site:$site/nvidia_cutlass_dsl/dsl_packages${PYTHONPATH:+:$PYTHONPATH}"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

step() {  # NAME SECONDS COMMAND...
  local name=$1 limit=$2 start=$SECONDS rc=0
  shift 2
  timeout "$limit" "$@" >"$out/$name.log" 2>&1 || rc=$?
  printf '%-22s rc=%d  %3d s\n' "$name" "$rc" "$((SECONDS - start))" | tee -a "$out/steps.txt"
}

: >"$out/steps.txt"
# Triton compiles a kernel for seconds, so the tests go faster side by side.
parallel=()
python3 -c "import xdist" 2>/dev/null && parallel=(-n 10)
# Kernel tests that can do without a GPU run on it here.
step tests 300 env OMP_NUM_THREADS=1 python3 -m pytest -m "gpu or not slow" "${parallel[@]}" \
  tests/gpu tests/kernels tests/models/inkling/test_ops.py \
  tests/models/inkling/test_triton_rel_attention.py -q --maxfail=20 -p no:cacheprovider
step kernels 120 python3 benchmarks/kernels/attention.py
step engine 100 python3 benchmarks/gpu_engine.py
step expert_kernels 60 python3 benchmarks/kernels/experts.py
step experts 100 python3 benchmarks/gpu_engine.py --shape qwen3-30b-a3b
step inkling 120 python3 benchmarks/gpu_engine.py --shape inkling-small-8

echo
tail -n 15 "$out/tests.log"
for name in kernels engine expert_kernels experts inkling; do
  echo "== $name"
  tail -n 60 "$out/$name.log"
done
grep -qv 'rc=0' "$out/steps.txt" && exit 1
exit 0
