#!/usr/bin/env bash
# What kdtree generate prints: every field, in every mode, on one to four ranks, from flags and from
# TOML files.
source "$(dirname "${BASH_SOURCE[0]}")/support/common.sh"

"$python" "$support/make_inputs.py" "$KDTREE_TEST_DATA" "$work"
prompts=$work/model_tiny.jsonl
prompt=(--model "$tiny" --prompt-ids '1,2,3')
few=("${prompt[@]}" --max-new-tokens 6)
# Goldens go past the end token, 40 tokens each.
all=(--model "$tiny" --prompts "$prompts" --max-new-tokens 40 --ignore-eos)

# keep NAME: keeps the results of the last run.
keep() {
  cp "$out" "$work/$1.results"
}

# --- Ranks, batches, modes ------------------------------------------------------------------------

for ranks in 0 1 2 3 4; do
  world=$((ranks > 0 ? ranks : 1))
  communicator=$([ "$world" -gt 1 ] && echo mpi || echo self)
  decodes "$ranks" "${all[@]}" --batch-size 3 --exchange allreduce -- --prompts "$prompts" --goldens "$tiny:original" \
    --expect stop_reason=length --expect metrics.world_size=$world \
    --expect metrics.communicator="$communicator" --expect metrics.mode=tree \
    --expect metrics.exchange=allreduce --expect metrics.backend=cpu --expect metrics.threads=1
done
decodes 2 "${all[@]}" --batch-size 3 --exchange auto -- --goldens "$tiny:original"
for exchange in allreduce allgather alltoall; do
  holds "$exchange is measured" grep -q "  $exchange .* us .* of allreduce" "$err"
done
holds 'one is chosen' test "$(grep -c '<- chosen' "$err")" -eq 1
decodes 3 "${all[@]}" --batch-size 2 --exchange alltoall -- --goldens "$tiny:original" \
  --expect metrics.exchange=alltoall
decodes 1 "${few[@]}" --communicator mpi -- --expect metrics.communicator=mpi
decodes 0 "${all[@]}" --batch-size 4096 --mode plain -- --goldens "$tiny:original" \
  --expect metrics.mode=plain

# --- Goldens --------------------------------------------------------------------------------------

for case in "$tiny:original" "$int4:original" "$int4:quantized" "$int4_two:original" \
  "$int4_two:quantized"; do
  for mode in plain chain tree; do
    decodes 0 --model "${case%:*}" --verify-golden --weights "${case##*:}" --mode "$mode" \
      --batch-size 2 -- --goldens "$case" --expect metrics.weights="${case##*:}" \
      --expect metrics.mode="$mode"
    holds "$case $mode: the verdict is told" test "$(count_in "$err" 'all 5 prompts')" -eq 1
  done
done
decodes 2 --model "$int4" --verify-golden -- --goldens "$int4:quantized"

# --- The drafter's rotary amplitude ---------------------------------------------------------------

# This bundle's drafter states 0.1 ln 64 + 1. Another amplitude drafts otherwise, and decodes alike.
amplitude=(--model "$int4" --prompt-ids '1,2,3' --max-new-tokens 24 --dump-steps --ignore-eos)
decodes 0 "${amplitude[@]}" -- --steps tree:16
keep auto_amplitude
decodes 0 "${amplitude[@]}" --draft-rope-amplitude 1.4158883083359673 -- \
  --steps tree:16 --same-as "$work/auto_amplitude.results"
decodes 2 "${amplitude[@]}" --draft-rope-amplitude 1 -- --steps tree:16
holds 'another amplitude changes drafts and no output' "$python" - "$work/auto_amplitude.results" \
  "$out" <<'CHECK'
import json, sys
auto, other = (json.loads(open(path, encoding="utf-8").read()) for path in sys.argv[1:])
assert auto["output_ids"] == other["output_ids"]
assert auto["steps"][0]["draft_top_log_probs"] != other["steps"][0]["draft_top_log_probs"]
CHECK

# --- Steps and logits -----------------------------------------------------------------------------

for budget in 1 7 16 200; do
  decodes 0 "${all[@]}" --batch-size 3 --dump-steps --tree-budget $budget -- \
    --steps "tree:$budget" --goldens "$tiny:original"
done
decodes 0 "${all[@]}" --dump-steps --mode chain -- --steps chain:7
decodes 0 "${all[@]}" --dump-steps --mode plain -- --steps plain:0 \
  --expect metrics.acceptance_length=1.0
decodes 0 --model "$int4_two" --prompts "$work/model_int4_tiny2.jsonl" --dump-steps --threads 1 \
  --tree-budget 30 -- --steps tree:30
decodes 0 "${few[@]}" --top-logits 5 -- --top-logits 5
decodes 0 "${few[@]}" --top-logits 320 -- --top-logits 320
decodes 4 "${few[@]}" --top-logits 320 --dump-steps -- --top-logits 320 --steps tree:16

# Threads share rows, never a sum: not a bit may differ.
decodes 0 "${all[@]}" --top-logits 9 --dump-steps --threads 1 -- --top-logits 9 --steps tree:16
keep one_thread
decodes 0 "${all[@]}" --top-logits 9 --dump-steps --threads 2 -- --top-logits 9 --steps tree:16 \
  --same-as "$work/one_thread.results" --expect metrics.threads=2
OMP_NUM_THREADS=2 decodes 0 "${few[@]}" --threads 0 -- --expect metrics.threads=2

# --- Why a sequence stops -------------------------------------------------------------------------

eos=(--model "$work/eos.kdtr" --prompts "$prompts" --max-new-tokens 40)
for mode in plain chain tree; do
  decodes 0 "${eos[@]}" --mode $mode --batch-size 2 -- --goldens "$work/eos.kdtr:original"
  holds "$mode: one sequence at least ends with eos" grep -q '"stop_reason":"eos"' "$out"
done
decodes 2 "${eos[@]}" -- --goldens "$work/eos.kdtr:original"
decodes 0 "${eos[@]}" --ignore-eos -- --goldens "$tiny:original" --expect stop_reason=length
decodes 0 "${few[@]}" --max-context 7 -- --expect stop_reason=context
holds 'prompt and output fill the context' \
  grep -q '"output_ids":\[[0-9]*,[0-9]*,[0-9]*,[0-9]*\]' "$out"
decodes 0 "${few[@]}" --max-context 9 -- --expect stop_reason=length
decodes 0 "${prompt[@]}" --max-context 4 --max-new-tokens 1 -- --expect stop_reason=length \
  --expect metrics.num_steps=0
# Without the key the model sets no limit.
"$python" - "$tiny" "$work/unlimited.kdtr" <<'PYTHON'
import sys
from pathlib import Path
from kdtr import read_kdtr, write_kdtr
bundle = read_kdtr(Path(sys.argv[1]))
del bundle.header["target"]["config"]["max_position_embeddings"]
write_kdtr(Path(sys.argv[2]), bundle.header, bundle.tensors)
PYTHON
decodes 0 --model "$work/unlimited.kdtr" --prompt-ids 1 --max-new-tokens 3 -- \
  --expect stop_reason=length
decodes 0 --model "$work/unlimited.kdtr" --prompt-ids 1 --max-context 5000 --max-new-tokens 3 \
  -- --expect stop_reason=length

# --- Other sources --------------------------------------------------------------------------------

trained=$goldens/dflash_trained_bf16
decodes 0 --model "$trained/target" --draft "$trained/draft" --prompt-ids '1,2' -- \
  --expect metrics.mode=tree --expect metrics.weights=original
keep trained
decodes 2 --model "$trained/target" --draft "$trained/draft" --prompt-ids '1,2' \
  --mode chain -- --expect metrics.mode=chain
decodes 0 --model "$trained/target" --prompt-ids '1,2' -- --expect metrics.mode=plain
# The copy that is asked for is the target's: a drafter without quantised weights is none the worse.
decodes 0 --model "$int4" --draft "$int4" --weights quantized --prompt-ids 1 \
  --max-new-tokens 4 -- --expect metrics.weights=quantized
decodes 0 --model "$goldens/kimi_nested_int4" --weights quantized --prompt-ids 1 \
  --max-new-tokens 4 -- --expect metrics.weights=quantized
# Rounded to INT4 while loading: the same on any number of ranks.
for ranks in 0 2; do
  decodes "$ranks" --model "$goldens/deepseek_v3_fp8_groups" --weights int4 --prompt-ids '1,2,3' \
    --max-new-tokens 8 --ignore-eos -- --expect metrics.weights=int4
  keep "int4_$ranks"
done
holds 'rounded to INT4: the same tokens on two ranks' "$python" -c 'import json, sys
one, two = (json.load(open(path, encoding="utf-8"))["output_ids"] for path in sys.argv[1:])
sys.exit(one != two)' "$work/int4_0.results" "$work/int4_2.results"
decodes 0 "${few[@]}" --dtype bf16
decodes 3 "${few[@]}" --dtype bf16 --mode chain
decodes 0 "${few[@]}" --dtype fp32

# --- Flags and TOML files -------------------------------------------------------------------------

toml=$work/run.toml
# from_toml LINE...: a run from these lines (and words behind --).
from_toml() {
  local -a lines=()
  while [ $# -gt 0 ] && [ "$1" != -- ]; do
    lines+=("$1")
    shift
  done
  printf '%s\n' "${lines[@]}" >"$toml"
  decodes 0 --config "$toml" --model "$tiny" "${@:2}"
}
decodes 0 --model "$tiny" --prompt-ids '1,2,3' --prompt-ids=4 --prompt-ids ' 5 , 6' --mode chain \
  --max-new-tokens 5 --ignore-eos --top-logits 2 --batch-size 2 -- --top-logits 2 \
  --expect metrics.mode=chain
keep flags
settings=('mode = "chain"' 'max-new-tokens = 5' 'ignore-eos = true' 'top-logits = 2'
  'batch-size = 2' 'threads = 1')
from_toml "${settings[@]}" 'prompt-ids = [[1, 2, 3], [4], [5, 6]]' -- -- --top-logits 2 \
  --same-as "$work/flags.results"
from_toml "${settings[@]//-/_}" 'prompt_ids = ["1,2,3", "4", [5, 6]]' -- -- --top-logits 2 \
  --same-as "$work/flags.results"
# The command line wins, flag by flag.
from_toml 'mode = "plain"' 'max-new-tokens = 2' 'prompt-ids = [7]' 'threads = 1' 'batch-size = 2' \
  'ignore-eos = true' -- --mode chain --max-new-tokens 5 --prompt-ids '1,2,3' --prompt-ids 4 \
  --prompt-ids '5,6' --top-logits 2 -- --top-logits 2 --same-as "$work/flags.results"
# A list of numbers is one prompt, as in a file of prompts; so is a string.
decodes 0 "${few[@]}"
keep few
from_toml 'prompt-ids = [1, 2, 3]' 'max-new-tokens = 6' 'threads = 1' -- -- \
  --same-as "$work/few.results"
from_toml "prompt-ids = '1,2,3'" 'max-new-tokens = 6' 'threads = 1' 'ignore-eos = false' -- -- \
  --same-as "$work/few.results"
# Empty lines and other keys are no prompts; the last line may end without a newline.
printf '{"name": "a", "prompt_ids": [1, 2, 3]}\r\n\n{"prompt_ids": [4]}\n\n{"prompt_ids": [5, 6]}' \
  >"$work/odd.jsonl"
decodes 0 --model "$tiny" --prompts "$work/odd.jsonl" --mode chain --max-new-tokens 5 --ignore-eos \
  --top-logits 2 -- --top-logits 2 --same-as "$work/flags.results"

# --- Text, help, version, logs --------------------------------------------------------------------

# lines_of FILE PATTERN: how many lines match.
lines_of() {
  grep -cE -- "$2" "$1" || true
}
succeeds 3 generate "${few[@]}" --prompt-ids 4 --top-logits 3 --log-level warn || true
holds 'text: prompts' test "$(lines_of "$out" '^prompt [01] \([0-9]+ tokens?\): ')" -eq 2
holds 'text: outputs' test \
  "$(lines_of "$out" '^  -> 6 tokens \(length\): [0-9]+( [0-9]+){5}$')" -eq 2
holds 'text: logits' test "$(lines_of "$out" '^  top logits:( [0-9]+:-?[0-9.]+){3}$')" -eq 2
holds 'text: nothing else' test "$(wc -l <"$out")" -eq 8
holds 'no news is no log' test ! -s "$err"

succeeds 3 generate "${few[@]}" --output-format json --log-level trace || true
holds 'logs do not go to stdout' test "$(wc -l <"$out")" -eq 1
holds 'rank 0 alone informs' test "$(lines_of "$err" '\[rank [12]\]')" -eq 0
holds 'rank 0 informs' test "$(lines_of "$err" '\[rank 0\].*memory plan of rank 0')" -eq 1

for ranks in 0 3; do
  succeeds "$ranks" --version || true
  holds "ranks $ranks: version once" test \
    "$(lines_of "$out" '^kdtree [0-9]+\.[0-9]+\.[0-9]+')" -eq 1
  succeeds "$ranks" --help || true
  holds "ranks $ranks: help once" test \
    "$(count_in "$out" 'Usage: kdtree [OPTIONS] SUBCOMMAND')" -eq 1
  succeeds "$ranks" generate --help || true
  holds "ranks $ranks: help of generate once" test \
    "$(count_in "$out" 'Usage: kdtree generate')" -eq 1
done
for flag in model draft prompt-ids prompt prompts chat chat-template thinking tokenizer parse-special batch-size max-new-tokens max-context memory-fraction mode tree-budget draft-length \
  weights weights-seed backend communicator exchange dtype ignore-eos top-logits dump-steps output-format \
  verify-golden threads log-level config; do
  holds "help names --$flag" grep -q -- "^  --$flag " "$out"
done

finish
