#!/usr/bin/env bash
# Builds the cuda preset and runs every GPU test of this machine: op tests on both backends, collectives over NCCL and
# staged through the host, published and generated golden outputs on 1 and 2 GPUs, then short generations.
#   usage: gpu_test.sh [--sanitizer]      --sanitizer: op tests under compute-sanitizer as well (minutes)
# KDTREE_SKIP_PACKAGES=1 takes the machine as it is. A step that fails is reported at the end; the others still run.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

sanitizer=0
if [ "${1:-}" = --sanitizer ]; then
  sanitizer=1
fi

failures=()
# attempt NAME COMMAND...: runs a step; notes its failure.
attempt() {
  local name=$1 start=$SECONDS
  shift
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

# on_ranks RANKS COMMAND...
on_ranks() {
  set_mpirun "$1"
  shift
  "${mpirun[@]}" --oversubscribe "$@"
}

# goldens RANKS [COMMUNICATOR]: engine tests in float32, tokens, trees and acceptance lengths.
goldens() {
  KDTREE_TEST_BACKEND=cuda KDTREE_TEST_COMMUNICATOR=${2:-auto} OMP_NUM_THREADS=1 on_ranks "$1" \
    "$build/tests/kdtree_mpi_tests" --gtest_filter='*Golden*:*Published*:*EngineReuse*' --gtest_brief=1
}

# generate RANKS ARGUMENT...: a bf16 run of the trained pair.
generate() {
  local ranks=$1 pair=tests/data/goldens/dflash_trained_bf16
  shift
  on_ranks "$ranks" "$build/launch/kdtree" generate --backend cuda --model $pair/target --draft $pair/draft \
    --prompt-ids 265,37,463,381,421 --max-new-tokens 64 --ignore-eos "$@"
}

attempt "machine code" bash -c "cuobjdump --list-elf $build/launch/kdtree | grep -oE 'sm_[0-9a]+' | sort | uniq -c"
attempt "op tests" "$build/tests/kdtree_unit_tests" --gtest_filter='*/cuda*' --gtest_brief=1
attempt "goldens, 1 GPU" goldens 1
attempt "bf16, 1 GPU" generate 1 --mode tree --tree-budget 16
attempt "collectives, 1 rank" on_ranks 1 "$build/tests/kdtree_gpu_mpi_tests" --gtest_brief=1
if [ "$gpus" -ge 2 ]; then
  attempt "collectives, NCCL, 2 GPUs" on_ranks 2 "$build/tests/kdtree_gpu_mpi_tests" --gtest_brief=1
  attempt "goldens, NCCL, 2 GPUs" goldens 2
  attempt "bf16, NCCL, 2 GPUs, allreduce" generate 2 --mode tree --tree-budget 16
  set_mpirun 2
  attempt "a lost and a late rank, NCCL" bash tests/gpu_mpi/lost_rank.sh "$PWD/$build/tests/kdtree_gpu_mpi_tests" \
    mpirun "${mpirun[@]:3}"
  attempt "bf16, NCCL, 2 GPUs, alltoall" generate 2 --mode tree --tree-budget 16 --exchange alltoall
fi
attempt "collectives, staged, 4 ranks" on_ranks 4 "$build/tests/kdtree_gpu_mpi_tests" --gtest_brief=1
attempt "goldens, staged, 4 ranks" goldens 4 mpi
if [ $sanitizer = 1 ]; then
  for tool in memcheck racecheck synccheck initcheck; do
    attempt "compute-sanitizer $tool" compute-sanitizer --tool $tool --error-exitcode 9 \
      "$build/tests/kdtree_unit_tests" --gtest_filter='*/cuda*' --gtest_brief=1
  done
fi

if [ ${#failures[@]} -gt 0 ]; then
  printf 'FAILED: %s\n' "${failures[@]}"
  exit 1
fi
echo "all GPU tests passed on $gpus GPUs"
