#!/usr/bin/env bash
# timeout: 900
# Six and eight ranks: goldens of nano and of the generated bundles
# under every exchange and several grids.
source "$(dirname "${BASH_SOURCE[0]}")/support/common.sh"

nano=$KDTREE_SOURCE/launch/demo/nano.kdtr
result_limit_s=300

# same RANKS MODEL OPTION...: the model's goldens come out.
same() {
  local ranks=$1 model=$2
  shift 2
  succeeds "$ranks" generate --model "$model" --verify-golden --batch-size 4 --backend cpu \
    --log-level warn "$@" || true
}

same 6 "$nano" --exchange allreduce
same 6 "$nano" --exchange alltoall --moe-tp 3 --attention-dp 2
same 8 "$nano" --exchange allgather --mode chain
same 8 "$nano" --exchange alltoall --attention-dp 4
same 8 "$nano" --exchange allreduce --moe-tp 2 --attention-dp 2 --placement round-robin
# Four heads: more ranks than that need attention groups.
same 6 "$tiny" --exchange alltoall --attention-dp 2
same 8 "$tiny" --exchange allgather --moe-tp 2 --attention-dp 2
same 8 "$int4" --exchange alltoall --moe-ep 4 --attention-dp 8

finish
