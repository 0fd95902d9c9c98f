#!/usr/bin/env bash
# Ranks, launchers, backends and outputs that do not go together.
source "$(dirname "${BASH_SOURCE[0]}")/support/common.sh"

generate=(generate --model "$tiny" --prompt-ids '1,2,3' --max-new-tokens 2 --threads 1)

refused 2 '--communicator self is for one rank, but this run has 2' \
  "${generate[@]}" --communicator self
# Two programs in one job, and a TOML file that differs between hosts, would decode apart.
refused 1 'rank 1: started with other options than rank 0' "${generate[@]}" --tree-budget 4 \
  : -n 1 "$KDTREE" "${generate[@]}" --tree-budget 5
refused 0 '--communicator mpi: this process was not started by mpirun or srun' \
  "${generate[@]}" --communicator mpi
refused 0 '--communicator nccl needs tensors on GPUs, and the backend is cpu' \
  "${generate[@]}" --backend cpu --communicator nccl
refused 3 '--communicator nccl needs tensors on GPUs, and the backend is cpu' \
  "${generate[@]}" --backend cpu --communicator nccl
if "$KDTREE" --version | grep -q '^CUDA none'; then
  refused 0 'backend "cuda": this build has no CUDA' "${generate[@]}" --backend cuda
  refused 3 'backend "cuda": this build has no CUDA' "${generate[@]}" --backend cuda
fi
refused 5 '5 ranks, but' "${generate[@]}"
holds 'the error for 5 ranks says how many can be' \
  grep -q 'has 4 attention heads.*start at most 4 ranks' "$err"

export KDTREE_COLLECTIVE_TIMEOUT_S=soon
refused 3 'KDTREE_COLLECTIVE_TIMEOUT_S=soon: expected a whole number of seconds' "${generate[@]}"
unset KDTREE_COLLECTIVE_TIMEOUT_S

# --- Ranks that do not find each other ------------------------------------------------------------

# What srun without --mpi=pmix, or the mpirun of another MPI, leaves in the environment.
for variable in SLURM_NTASKS=4 SLURM_STEP_NUM_TASKS=4 OMPI_COMM_WORLD_SIZE=2 PMI_SIZE=2; do
  export "${variable?}"
  refused 0 "$variable says that ${variable##*=} tasks were started" "${generate[@]}"
  holds "$variable: the way out is named" grep -q 'srun --mpi=pmix' "$err"
  # The way out that the error names for who means it.
  succeeds 0 "${generate[@]}" --communicator self || true
  refused 0 "unknown argument '--fast'" "${generate[@]}" --fast
  unset "${variable%%=*}"
done

# --- An output that takes nothing -----------------------------------------------------------------

# refused_output NAME REDIRECTION WORD...: the program with its stdout closed or full.
refused_output() {
  local name=$1 target=$2
  shift 2
  code=0
  if [ "$target" = closed ]; then
    timeout "$limit_s" "$KDTREE" "$@" >&- 2>"$err" || code=$?
  else
    timeout "$limit_s" "$KDTREE" "$@" >"$target" 2>"$err" || code=$?
  fi
  : >"$out"
  judge_error "$name" 'cannot write to stdout: '
}
for target in closed /dev/full; do
  refused_output "generate, stdout $target" "$target" "${generate[@]}"
  refused_output "json, stdout $target" "$target" "${generate[@]}" --output-format json
  refused_output "inspect, stdout $target" "$target" inspect --model "$tiny"
  refused_output "--help, stdout $target" "$target" --help
  refused_output "--version, stdout $target" "$target" --version
done

# --- One rank is worse off than the others --------------------------------------------------------

# A host that lacks a file, the last of three ranks here.
# one_refuses WORDS WORD...: what the last rank runs and says; the other two have nothing to mend.
one_refuses() {
  local words=$1
  shift
  code=0
  timeout --kill-after=2 "$limit_s" mpirun "${mpi_flags[@]}" -n 2 "$KDTREE" "${generate[@]}" : \
    -n 1 "$KDTREE" "$@" >"$out" 2>"$err" || code=$?
  judge_error "the last rank: kdtree $*" "$words"
}
one_refuses 'rank 2: none.kdtr: no such file or directory' \
  generate --model none.kdtr --prompt-ids 1 --max-new-tokens 2
one_refuses 'rank 2: --config: cannot read none.toml' "${generate[@]}" --config none.toml

# Only rank 0 writes: the others must not wait for it.
code=0
# shellcheck disable=SC2016 # expanded by the ranks' shells
timeout --kill-after=2 "$limit_s" mpirun -n 2 "${mpi_flags[@]}" \
  bash -c 'exec "$@" >/dev/full' kdtree "$KDTREE" "${generate[@]}" >"$out" 2>"$err" || code=$?
judge_error 'two ranks, stdout full' 'cannot write to stdout: '

# --- Every rank says no ---------------------------------------------------------------------------

# mpirun ends the other ranks when one fails. Here each rank's own exit code is kept, and none may
# need to be ended.
# shellcheck disable=SC2016 # expanded by the ranks' shells
keep_code='code=0; "$@" || code=$?; echo "$code" >"$0.$$"; exit 0'
# each_refuses WORDS EXIT_CODE WORD...
each_refuses() {
  local words=$1 expected=$2
  shift 2
  rm -f "$work"/code.*
  holds "kdtree $*: all ranks end" timeout "$limit_s" mpirun -n 3 "${mpi_flags[@]}" \
    bash -c "$keep_code" "$work/code" "$KDTREE" "$@" >"$out" 2>"$err"
  holds "kdtree $*: three exit codes $expected" \
    test "$(sort "$work"/code.* | uniq -c | xargs)" = "3 $expected"
  code=$expected
  judge_error "each rank: kdtree $*" "$words"
}
each_refuses "unknown argument '--fast'" 2 "${generate[@]}" --fast
each_refuses 'none.kdtr: no such file or directory' 1 generate --model none.kdtr --prompt-ids 1
each_refuses 'prompt 0: token id 999 is outside the vocabulary' 1 \
  generate --model "$tiny" --prompt-ids 999

finish
