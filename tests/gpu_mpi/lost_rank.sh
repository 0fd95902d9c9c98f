#!/usr/bin/env bash
# Two NCCL ranks, one of which is killed or does not come: the other ends within 30 seconds with a
# message that names the lost rank, or the collective that it waits in.
#   usage: lost_rank.sh PROGRAM MPIRUN [flag...]     exit code 77: no two GPUs here
set -euo pipefail

program=$1
shift
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

fail() {
  echo "FAILED: $1"
  tail -n +1 "$logs"/*
  exit 1
}

# run MODE [VARIABLE=VALUE...]: both ranks, each with a log file that the launcher cannot lose, and
# with its exit code and its seconds at the end of that.
run() {
  local mode=$1
  shift
  rm -f "$logs"/*
  status=0
  # shellcheck disable=SC2016  # the ranks' shells expand these
  env "$@" KDTREE_TEST_LOST_RANK="$mode" LOGS="$logs" timeout -k 5 120 "${launcher[@]}" bash -c '
    trap "" TERM # the launcher sends it to the survivor, which is to end by itself
    log=$LOGS/rank${OMPI_COMM_WORLD_RANK:-$PMI_RANK}
    exit_code=0
    "$0" 2>"$log" || exit_code=$?
    echo "exit code $exit_code after $SECONDS s" >>"$log"
    exit "$exit_code"' "$program" >/dev/null 2>&1 || status=$?
  if grep -qs "^skipped" "$logs"/*; then
    echo "skipped: needs two ranks with a GPU each"
    exit 77
  fi
  [ "$status" -ne 0 ] || fail "exit code 0 although a rank was lost"
}

# require RANK PATTERN WHAT: its log holds the pattern.
require() {
  grep -q "$2" "$logs/rank$1" || fail "rank $1 $3"
}

# require_end RANK LIMIT: it came to its end by itself, within LIMIT seconds of its start.
require_end() {
  local seconds
  require "$1" "^exit code [1-9]" "did not end by itself with an exit code"
  seconds=$(sed -n 's/^exit code .* after \([0-9]*\) s$/\1/p' "$logs/rank$1")
  [ "$seconds" -le "$2" ] || fail "rank $1 took $seconds s"
  echo "$mode_name: rank $1 ended $seconds s after its start"
}

launcher=("$@" -n 2)
# Open MPI would kill the survivor a second after its SIGTERM.
if "$1" --version 2>&1 | grep -q "Open MPI"; then
  launcher+=(--mca odls_base_sigkill_timeout 30)
fi

# 30 s to notice, 15 to start.
mode_name=killed
run killed
require 0 "rank 1 on .* is lost" "does not name the killed rank"
require 0 "alone, layer 3" "does not say what it waits in"
require_end 0 45

mode_name=late
run late KDTREE_COLLECTIVE_TIMEOUT_S=10
require 0 "rank 0 on .* waits .* since 10 s in all_reduce_sum number .*alone, layer 3" \
  "does not say what it waits in"
require 1 "rank 0 on .* failed: waits" "was not told"
require_end 0 45
require_end 1 45
