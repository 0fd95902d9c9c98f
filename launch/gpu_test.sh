#!/usr/bin/env bash
# Builds the cuda preset and runs every GPU test of this machine: op tests on both backends, collectives over NCCL and
# staged through the host, published and generated golden outputs on 1 and 2 GPUs, what the host does beside a step,
# then bf16 runs of a trained pair and of a random model with the layers of Kimi K2.6.
#   usage: gpu_test.sh [--sanitizer] [--bench] [--only PATTERN]
#     --sanitizer     op tests and a short generation under compute-sanitizer as well (minutes)
#     --bench         kdtree bench kernels as well (minutes)
#     --only PATTERN  only steps whose name matches this extended regular expression
# KDTREE_RESULTS=FOLDER (build/cuda/gpu_test) gets the JSON lines. KDTREE_SKIP_PACKAGES=1 takes the machine as it is. A
# step that fails is reported at the end; the others still run.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

sanitizer=0 bench=0 only=
while [ $# -gt 0 ]; do
  case $1 in
    --sanitizer) sanitizer=1 ;;
    --bench) bench=1 ;;
    --only)
      only=${2:?--only needs a pattern}
      shift
      ;;
    *)
      sed -n '2,/^source/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" >&2
      exit 2
      ;;
  esac
  shift
done

failures=()
num_steps=0
# attempt NAME COMMAND...: runs a step; notes its failure.
attempt() {
  local name=$1 start=$SECONDS
  shift
  if [ -n "$only" ] && ! [[ $name =~ $only ]]; then
    return 0
  fi
  num_steps=$((num_steps + 1))
  step "$name"
  if "$@"; then
    echo "ok: $name ($((SECONDS - start)) s)"
  else
    echo "FAILED: $name ($((SECONDS - start)) s)"
    failures+=("$name")
  fi
}

step "packages"
install_packages build run test reference
python=$(launch/find_python.sh)
export KDTREE_PYTHON=$python
if ! cuda_ready; then
  exit 1
fi
gpus=$(nvidia-smi -L | wc -l)
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader

step "build: preset cuda"
build_preset cuda
build=build/cuda
data=$build/tests/data
tests/generate_data.sh "$python" "$PWD/$data"
export KDTREE_SOURCE=$PWD KDTREE_TEST_DATA=$PWD/$data
export OMPI_MCA_btl_vader_single_copy_mechanism=none

results=${KDTREE_RESULTS:-$build/gpu_test}
mkdir -p "$results"
results=$(cd "$results" && pwd)

# on_ranks RANKS COMMAND...
on_ranks() {
  set_mpirun "$1"
  shift
  "${mpirun[@]}" --oversubscribe "$@"
}

# sharded NAME COMMAND...: the googletest program of COMMAND as several processes side by side, whose output goes to
# files $results/NAME.*.log: the double precision of the host takes most of the time.
sharded() {
  local name=$1 shard shards failed=0
  local -a running=()
  shift
  shards=$(($(nproc) < 16 ? $(nproc) : 16))
  for ((shard = 0; shard < shards; ++shard)); do
    OMP_NUM_THREADS=1 GTEST_TOTAL_SHARDS=$shards GTEST_SHARD_INDEX=$shard "$@" >"$results/$name.$shard.log" 2>&1 &
    running+=($!)
  done
  for shard in "${!running[@]}"; do
    if ! wait "${running[$shard]}"; then
      failed=1
      cat "$results/$name.$shard.log"
    fi
  done
  grep -h -E 'PASSED|SKIPPED|SUMMARY' "$results/$name".*.log | sort | uniq -c
  return $failed
}

op_tests() {
  sharded op_tests "$build/tests/kdtree_unit_tests" --gtest_filter='*/cuda*' --gtest_brief=1
}

# goldens RANKS [COMMUNICATOR]: engine tests in float32, tokens, trees and acceptance lengths.
goldens() {
  KDTREE_TEST_BACKEND=cuda KDTREE_TEST_COMMUNICATOR=${2:-auto} OMP_NUM_THREADS=1 on_ranks "$1" \
    "$build/tests/kdtree_mpi_tests" --gtest_filter='*Golden*:*Published*:*EngineReuse*' --gtest_brief=1
}

# pair NAME RANKS ARGUMENT...: a bf16 run of the trained pair, JSON lines in $results/NAME.jsonl.
trained=tests/data/goldens/dflash_trained_bf16
pair() {
  local name=$1 ranks=$2
  shift 2
  on_ranks "$ranks" "$build/launch/kdtree" generate --backend cuda --model $trained/target --draft $trained/draft \
    --prompt-ids 265,37,463,381,421 --prompt-ids 1,2,3 --max-new-tokens 64 --ignore-eos --output-format json "$@" \
    >"$results/$name.jsonl"
}

# kimi NAME RANKS ARGUMENT...: the same of a random model with the layer sizes of Kimi K2.6, 1 dense and 3 MoE layers.
kimi() {
  local name=$1 ranks=$2
  shift 2
  on_ranks "$ranks" "$build/launch/kdtree" generate --backend cuda --weights random \
    --model configs/models/kimi-k2.6-4-layers.json --draft configs/models/kimi-k2.6-4-layers-dflash.json \
    --prompts "$results/prompts.jsonl" --max-new-tokens 48 --ignore-eos --output-format json "$@" \
    >"$results/$name.jsonl"
}

# explained PREFIX: all runs of that name gave the same tokens but for near-ties.
explained() {
  "$python" tests/gpu/explain_differences.py "$results/$1".*.jsonl
}

# every_mode RUN PREFIX RANKS ARGUMENT...: plain, chain and tree, one sequence at a time and all at once.
every_mode() {
  local run=$1 prefix=$2 ranks=$3 mode batch
  shift 3
  for mode in plain chain tree; do
    for batch in 1 16; do
      "$run" "$prefix.$mode.$batch" "$ranks" --mode $mode --batch-size $batch "$@" || return 1
    done
  done
}

# calls RANKS ARGUMENT...: which calls of the CUDA runtime a run of the trained pair makes; 64 tokens a step each.
calls() {
  local ranks=$1
  shift
  rm -f "$results"/calls.trace.*
  KDTREE_API_TRACE=$results/calls.trace LD_PRELOAD=$PWD/$build/tests/libkdtree_api_trace.so \
    pair calls "$ranks" --mode plain "$@" || return 1
  "$python" tests/gpu/check_api_trace.py 100 "$results"/calls.trace.*
}

attempt "machine code" bash -c "cuobjdump --list-elf $build/launch/kdtree | grep -oE 'sm_[0-9a]+' | sort | uniq -c"
attempt "op tests" op_tests
attempt "goldens, 1 GPU" goldens 1
attempt "calls of a step, 1 GPU" calls 1
attempt "calls of a step with alltoall, 1 GPU" calls 1 --exchange alltoall
attempt "bf16, 1 GPU" every_mode pair pair.1gpu 1
attempt "collectives, 1 rank" on_ranks 1 "$build/tests/kdtree_gpu_mpi_tests" --gtest_brief=1
if [ "$gpus" -ge 2 ]; then
  attempt "collectives, NCCL, 2 GPUs" on_ranks 2 "$build/tests/kdtree_gpu_mpi_tests" --gtest_brief=1
  attempt "goldens, NCCL, 2 GPUs" goldens 2
  attempt "calls of a step, NCCL, 2 GPUs" calls 2
  attempt "calls of a step with alltoall, NCCL, 2 GPUs" calls 2 --exchange alltoall
  attempt "bf16, NCCL, 2 GPUs, allreduce" every_mode pair pair.2gpu.allreduce 2
  set_mpirun 2
  attempt "a lost and a late rank, NCCL" bash tests/gpu_mpi/lost_rank.sh "$PWD/$build/tests/kdtree_gpu_mpi_tests" \
    mpirun "${mpirun[@]:3}"
  attempt "bf16, NCCL, 2 GPUs, alltoall" every_mode pair pair.2gpu.alltoall 2 --exchange alltoall
fi
attempt "collectives, staged, 4 ranks" on_ranks 4 "$build/tests/kdtree_gpu_mpi_tests" --gtest_brief=1
attempt "goldens, staged, 4 ranks" goldens 4 mpi
attempt "bf16, staged, 4 ranks" pair pair.staged.tree 4 --mode tree --communicator mpi
attempt "bf16: differences are near-ties" explained pair

memory_mib=$(nvidia-smi --query-gpu=memory.free --format=csv,noheader,nounits | sort -n | head -n 1)
if [ "$memory_mib" -ge 60000 ]; then
  "$python" - >"$results/prompts.jsonl" <<'PYTHON'
import json, random
random.seed(1)
for _ in range(16):
    print(json.dumps({"prompt_ids": [random.randrange(160000) for _ in range(random.randrange(20, 120))]}))
PYTHON
  attempt "layers of Kimi K2.6, 1 GPU" every_mode kimi kimi.1gpu 1
  if [ "$gpus" -ge 2 ]; then
    attempt "layers of Kimi K2.6, NCCL, 2 GPUs, allreduce" every_mode kimi kimi.2gpu.allreduce 2
    attempt "layers of Kimi K2.6, NCCL, 2 GPUs, alltoall" every_mode kimi kimi.2gpu.alltoall 2 --exchange alltoall
  fi
  attempt "layers of Kimi K2.6: differences are near-ties" explained kimi
else
  echo "SKIPPED: the layers of Kimi K2.6 need 60000 MiB of free GPU memory, there are $memory_mib"
fi
if [ $bench = 1 ]; then
  for ranks in 1 8; do
    attempt "bench kernels, a rank of $ranks" "$build/launch/kdtree" bench kernels --backend cuda --ranks $ranks \
      --model-config configs/models/kimi-k2.6.json --output "$results/kernels.$ranks.jsonl"
  done
fi
if [ $sanitizer = 1 ]; then
  # Every kernel and shape; without the products of all row counts and prefixes, which take hours there.
  sanitized_ops='*/cuda*-*AnyCall*:*AnyNumber*:*EveryNumber*:*EveryPrefix*:*EveryBlock*:*OffsetsTest*'
  for tool in memcheck racecheck synccheck initcheck; do
    attempt "compute-sanitizer $tool" sharded "$tool" compute-sanitizer --tool $tool --error-exitcode 9 \
      "$build/tests/kdtree_unit_tests" --gtest_filter="$sanitized_ops"
    attempt "compute-sanitizer $tool, generation" compute-sanitizer --tool $tool --error-exitcode 9 \
      "$build/launch/kdtree" generate --backend cuda --model $trained/target --draft $trained/draft --mode tree \
      --prompt-ids 265,37,463,381,421 --max-new-tokens 16 --ignore-eos
  done
fi

if [ ${#failures[@]} -gt 0 ]; then
  printf 'FAILED: %s\n' "${failures[@]}"
  exit 1
fi
if [ $num_steps = 0 ]; then
  echo "no step's name matches '$only'"
  exit 1
fi
echo "all $num_steps steps passed on $gpus GPUs"
