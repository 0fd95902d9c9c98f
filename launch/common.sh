# Sourced by quickstart.sh, test.sh, lint.sh and .ci/run: what they share. Leaves the caller in the
# project's root.
# shellcheck shell=bash

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/packages.sh

# step TEXT: a heading, with the seconds since the script began.
step() {
  printf '\n== [%4d s] %s\n' "$SECONDS" "$*"
}

# build_preset PRESET [TARGET...]: configures build/PRESET and builds the targets (default: all).
build_preset() {
  local preset=$1
  shift
  local -a targets=()
  if [ $# -gt 0 ]; then
    targets=(--target "$@")
  fi
  cmake --preset "$preset" &&
    cmake --build --preset "$preset" --parallel "$(nproc)" "${targets[@]}"
}

# find_nvcc: prints the path of the CUDA compiler, fails without one.
find_nvcc() {
  command -v nvcc || command -v "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc"
}

# cuda_ready: whether the cuda preset can be built and used here; says what is lacking.
cuda_ready() {
  local nvcc cuda_root directory
  if ! nvcc=$(find_nvcc); then
    echo "no CUDA build: there is no nvcc on PATH, in CUDA_HOME or in /usr/local/cuda"
    return 1
  fi
  if ! nvidia-smi -L >/dev/null 2>&1; then
    echo "no CUDA build: nvcc is here, but nvidia-smi finds no GPU"
    return 1
  fi
  cuda_root=$(dirname "$(dirname "$(readlink -f "$nvcc")")")
  for directory in "$cuda_root" /usr/local /usr; do
    if [ -e "$directory/include/nccl.h" ]; then
      return 0
    fi
  done
  echo "no CUDA build: nvcc and a GPU are here, but not NCCL (nccl.h; package libnccl-dev)"
  return 1
}

mpirun=()

# set_mpirun RANKS: makes the array `mpirun` the command that starts that many ranks on this
# machine, and shares its cores among them.
set_mpirun() {
  local ranks=$1 cores
  cores=$(nproc)
  mpirun=(mpirun -n "$ranks")
  if mpirun --version 2>/dev/null | grep -q 'Open MPI'; then
    mpirun+=(--bind-to none)
    if [ "$(id -u)" -eq 0 ]; then
      mpirun+=(--allow-run-as-root)
    fi
    # Open MPI counts cores, nproc counts hardware threads, of which a core may have two.
    if [ $((2 * ranks)) -gt "$cores" ]; then
      mpirun+=(--oversubscribe)
    fi
    # Containers often forbid reading a neighbour's memory; Open MPI falls back by itself, but
    # complains about it at length.
    export OMPI_MCA_btl_vader_single_copy_mechanism=${OMPI_MCA_btl_vader_single_copy_mechanism:-none}
  fi
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > ranks ? cores / ranks : 1))}
}

# show_and_run COMMAND...: prints a command as it can be typed, then runs it.
show_and_run() {
  printf '$'
  printf ' %q' "$@"
  printf '\n'
  "$@"
}
