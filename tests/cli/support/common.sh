# Sourced by every script of tests/cli: where things are, and how a run is judged. The cases of a
# script all run; the script fails at its end if any of them did.
# shellcheck shell=bash

set -euo pipefail

: "${KDTREE:?path of the kdtree program}"
: "${KDTREE_TEST_DATA:?folder with the generated bundles}"
: "${KDTREE_SOURCE:?root of the sources}"
support=$KDTREE_SOURCE/tests/cli/support
# What the scripts use.
# shellcheck disable=SC2034
{
  tiny=$KDTREE_TEST_DATA/model_tiny.kdtr
  int4=$KDTREE_TEST_DATA/model_int4_tiny.kdtr
  int4_two=$KDTREE_TEST_DATA/model_int4_tiny2.kdtr
  goldens=$KDTREE_SOURCE/tests/data/goldens
}
python=$("$KDTREE_SOURCE/launch/find_python.sh")
export PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=$support:$KDTREE_SOURCE/tests/reference
# These cases are about what the program is told and says: exact CPU arithmetic, any number of ranks.
# GPUs have tests of their own.
export CUDA_VISIBLE_DEVICES=
# Ranks outnumber cores here: threads would only get in each other's way, and those that spin while
# they wait would starve the others.
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
out=$work/stdout
err=$work/stderr
# A refusal and the end of a broken run must come within this; a hang is a defect like any other.
limit_s=10
# So must a result, which a busy machine may delay.
result_limit_s=60
num_cases=0
num_failures=0

mpi_flags=()
if mpirun --version 2>/dev/null | grep -q 'Open MPI'; then
  mpi_flags=(--allow-run-as-root --oversubscribe --bind-to none)
  # Containers often forbid reading a neighbour's memory; Open MPI falls back by itself, but
  # complains about it at length.
  export OMPI_MCA_btl_vader_single_copy_mechanism=none
  # As many ranks as cores spin while they wait, and on a busy machine wait for each other's turns.
  export OMPI_MCA_mpi_yield_when_idle=1
fi

# launch SECONDS RANKS WORD...: runs the program on that many ranks, without mpirun for 0, for so
# long at most. Leaves its exit code in `code`, its outputs in $out and $err.
launch() {
  local limit=$1 ranks=$2
  shift 2
  local -a start=()
  if [ "$ranks" -gt 0 ]; then
    start=(mpirun -n "$ranks" "${mpi_flags[@]}")
  fi
  code=0
  timeout --kill-after=2 "$limit" "${start[@]}" "$KDTREE" "$@" >"$out" 2>"$err" </dev/null ||
    code=$?
}

# failed TEXT: notes that the running case failed, and shows what the program said.
failed() {
  num_failures=$((num_failures + 1))
  echo "FAILED: $*"
  sed 's/^/  stdout: /' "$out" | head -n 5
  sed 's/^/  stderr: /' "$err" | head -n 20
}

# count_in FILE WORDS: how often WORDS occur, literally.
count_in() {
  { grep -oF -- "$2" "$1" || true; } | wc -l
}

# judge_error NAME WORDS: whether the run that `launch` made was refused as it must be: in time, by
# the program itself, with one error that holds WORDS once, without a result.
judge_error() {
  local name=$1 words=$2
  num_cases=$((num_cases + 1))
  case $code in
    0) failed "$name: exit code 0" ;;
    124 | 137) failed "$name: did not end within $limit_s s" ;;
    134 | 139) failed "$name: crashed with exit code $code" ;;
    *)
      if [ -s "$out" ]; then
        failed "$name: something on stdout"
      elif [ "$(count_in "$err" "$words")" -ne 1 ]; then
        failed "$name: '$words' is $(count_in "$err" "$words") times on stderr, expected once"
      elif [ "$(count_in "$err" 'kdtree: error: ')" -ne 1 ]; then
        failed "$name: $(count_in "$err" 'kdtree: error: ') errors on stderr, expected one"
      elif grep -qE 'terminate called|\.(cpp|h):[0-9]+\]|json\.exception|Signal: ' "$err"; then
        failed "$name: the error speaks of the program's inside"
      fi
      ;;
  esac
}

# refused RANKS WORDS WORD...: runs the program (as launch), which must refuse, with these words.
refused() {
  local ranks=$1 words=$2
  shift 2
  launch "$limit_s" "$ranks" "$@"
  judge_error "ranks $ranks: kdtree $*" "$words"
}

# succeeds RANKS WORD...: runs the program (as launch), which must succeed.
succeeds() {
  local ranks=$1
  shift
  launch "$result_limit_s" "$ranks" "$@"
  num_cases=$((num_cases + 1))
  if [ "$code" -ne 0 ]; then
    failed "ranks $ranks: kdtree $*: exit code $code"
    return 1
  fi
}

# decodes RANKS WORD...: kdtree generate with JSON lines, which must succeed; they go to the checker
# of check_results.py, with the words behind `--` as its arguments.
decodes() {
  local ranks=$1
  shift
  local -a flags=()
  while [ $# -gt 0 ] && [ "$1" != -- ]; do
    flags+=("$1")
    shift
  done
  [ $# -eq 0 ] || shift
  succeeds "$ranks" generate --output-format json "${flags[@]}" || return 0
  "$python" "$support/check_results.py" "$out" "$@" || failed "ranks $ranks: kdtree ${flags[*]}"
}

# holds NAME COMMAND...: a case of its own: the command must succeed.
holds() {
  local name=$1
  shift
  num_cases=$((num_cases + 1))
  "$@" || failed "$name"
}

# finish: the verdict; the last line of every script.
finish() {
  echo "$num_cases cases, $num_failures failures, $SECONDS s"
  [ "$num_failures" -eq 0 ]
}
