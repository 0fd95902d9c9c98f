#!/usr/bin/env bash
# A rank that dies, stops or is told to end in the middle of a long generation: the others must not
# stay behind.
source "$(dirname "${BASH_SOURCE[0]}")/support/common.sh"

job=0
ranks=()
trap 'end_all; rm -rf "$work"' EXIT

# Ends what a failed case may have left; only processes that this script started.
end_all() {
  local pid
  for pid in "${ranks[@]}" "$job"; do
    [ "$pid" -eq 0 ] || ! kill -KILL "$pid" 2>/dev/null || true
  done
}

# children_of PID: the process ids of the kdtree programs that it started.
children_of() {
  local status name_and_parent
  for status in /proc/[0-9]*/status; do
    # A process may end while it is looked at.
    name_and_parent=$(awk '/^(Name|PPid):/ { printf "%s ", $2 }' "$status" 2>/dev/null) || continue
    if [ "$name_and_parent" = "kdtree $1 " ]; then
      basename "$(dirname "$status")"
    fi
  done
}

# is_alive PID: whether the process is there and no zombie.
is_alive() {
  grep -qE '^State:[[:space:]]+[^ZX]' "/proc/$1/status" 2>/dev/null
}

# wait_until SECONDS COMMAND...: whether the command succeeds before the time is over.
wait_until() {
  local end=$((SECONDS + $1))
  shift
  until "$@"; do
    [ "$SECONDS" -lt "$end" ] || return 1
    sleep 0.1
  done
}

is_decoding() {
  # The last line before the first step.
  grep -q '3 ranks, 1 threads each' "$err"
}

all_gone() {
  local pid
  for pid in "${ranks[@]}" "$job"; do
    ! is_alive "$pid" || return 1
  done
}

# start_long WORD...: three ranks with more to decode than there is time for; `job` is mpirun,
# `ranks` are the processes of the program.
start_long() {
  : >"$out"
  : >"$err"
  mpirun -n 3 "${mpi_flags[@]}" "$KDTREE" generate --model "$int4" --prompt-ids 1 --ignore-eos \
    --max-new-tokens 100000 --threads 1 "$@" >"$out" 2>"$err" </dev/null &
  job=$!
  ranks=()
  wait_until 30 is_decoding || failed 'the generation did not begin'
  mapfile -t ranks < <(children_of "$job")
  holds 'three ranks are running' test "${#ranks[@]}" -eq 3
  # Some way into the steps.
  sleep 0.3
}

# ends NAME SECONDS: the job must end in that time, with an error code, with no rank left.
ends() {
  local name=$1
  holds "$name: all ranks end within $2 s" wait_until "$2" all_gone
  end_all
  code=0
  wait "$job" || code=$?
  holds "$name: exit code $code" test "$code" -ne 0
  holds "$name: nothing on stdout" test ! -s "$out"
  job=0
  ranks=()
}

start_long
kill -KILL "${ranks[1]}"
ends 'a rank is killed' "$limit_s"

export KDTREE_COLLECTIVE_TIMEOUT_S=2
start_long --log-level info
kill -STOP "${ranks[2]}"
ends 'a rank is stopped' "$limit_s"
calls='broadcast|all_reduce_sum|all_gather|all_gather_rows'
holds 'who waits is told, and in which collective' grep -qE \
  "rank [0-9] of 3 waits since 2 s in ($calls) number [0-9]+ \([a-z -]+, layer -?[0-9]+\): another" \
  "$err"
unset KDTREE_COLLECTIVE_TIMEOUT_S

for signal in TERM INT; do
  start_long --mode plain
  kill -"$signal" "$job"
  ends "SIG$signal to mpirun" "$limit_s"
done

finish
