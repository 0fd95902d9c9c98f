#!/usr/bin/env bash
# kdtree bench acceptance: a JSON line a cell on one and two ranks, and what it refuses. No time
# counts.
source "$(dirname "${BASH_SOURCE[0]}")/support/common.sh"

trained=$goldens/dflash_trained_bf16
prompts=$work/prompts.jsonl
printf '{"prompt_ids": [%s]}\n' 265,37,463,381,421 1,2,3 77 >"$prompts"
pair=(--model "$trained/target" --draft "$trained/draft" --prompts "$prompts" --ignore-eos)
bench=(bench acceptance "${pair[@]}" --max-new-tokens 20)

# check NAME WORD...: the lines of the last run.
check() {
  local name=$1
  shift
  holds "$name" "$python" "$support/check_acceptance.py" "$@"
}

# --- Results --------------------------------------------------------------------------------------

for mode in plain chain tree; do
  if succeeds 0 generate "${pair[@]}" --max-new-tokens 20 --mode $mode --tree-budget 6 \
    --dump-steps --output-format json; then
    cp "$out" "$work/$mode.steps"
  fi
done
if succeeds 0 "${bench[@]}" --budgets 2,6 --modes tree,plain,chain; then
  cp "$out" "$work/one_rank.jsonl"
  check 'one rank' "$out" --cells plain,chain,tree:2,tree:6 --generate "plain=$work/plain.steps" \
    --generate "chain=$work/chain.steps" --generate "tree:6=$work/tree.steps" \
    --expect model=target --expect world_size=1 --expect batch_size=1 --expect num_prompts=3
  holds 'a table for people' grep -q '^mode  *budget  *accept' "$err"
  holds 'a row a cell' test "$(grep -cE '^(plain|chain|tree) ' "$err")" -eq 4
fi
# What is counted does not depend on ranks, batches and exchanges.
if succeeds 2 "${bench[@]}" --budgets 2,6 --batch-size 2 --exchange alltoall \
  --output "$work/two_ranks.jsonl"; then
  check 'two ranks' "$work/two_ranks.jsonl" --cells plain,chain,tree:2,tree:6 \
    --same-counts "$work/one_rank.jsonl" --expect world_size=2 --expect exchange=alltoall \
    --expect batch_size=2
  holds 'nothing on stdout' test ! -s "$out"
fi
# Without plain there is nothing to compare with.
if succeeds 0 "${bench[@]}" --budgets 2,6 --modes tree; then
  check 'trees alone' "$out" --cells tree:2,tree:6
fi
# Shorter drafts: no path is longer than they are.
if succeeds 2 "${bench[@]}" --budgets 6 --draft-length 2; then
  check 'two tokens a draft' "$out" --cells plain,chain,tree:6
  holds 'chains of two' grep -Eq '"mode":"chain".*"nodes_per_step":3.0[,}]' "$out"
fi
# A bundle with its own drafter, which nobody trained; without it plain alone.
printf '{"prompt_ids": [%s]}\n' 1,2,3 77,300 >"$work/small.jsonl"
if succeeds 2 bench acceptance --model "$int4" --prompts "$work/small.jsonl" --max-new-tokens 6 \
  --ignore-eos --budgets 16; then
  check 'INT4 bundle' "$out" --cells plain,chain,tree:16 --expect weights=quantized
fi
if succeeds 0 bench acceptance --model "$trained/target" --prompts "$prompts" --max-new-tokens 4 \
  --ignore-eos --modes plain; then
  check 'no drafter' "$out" --cells plain
fi

# --- Refusals -------------------------------------------------------------------------------------

refused 0 '--model is required' bench acceptance --prompts "$prompts"
refused 0 '--prompts is required' bench acceptance --model "$trained/target"
refused 0 '--mode tree needs a drafter' bench acceptance --model "$trained/target" \
  --prompts "$prompts"
refused 2 "--output: cannot write $work/none/lines.jsonl: No such file or directory" \
  "${bench[@]}" --output "$work/none/lines.jsonl"
refused 2 "--prompts: cannot open $work/none" bench acceptance --model "$int4" \
  --prompts "$work/none"
# FLAG VALUE WORDS
while read -r flag value words; do
  refused 0 "$words" "${bench[@]}" "$flag" "$value"
done <<'CASES'
--budgets 0 --budgets: '0' in '0', expected whole numbers from 1 to 512
--budgets 4,513 --budgets: '513' in '4,513', expected whole numbers from 1 to 512
--budgets 4, --budgets: '' in '4,', expected whole numbers
--modes tree,greedy --modes: unknown name 'greedy', expected a list of: plain, chain, tree
--max-new-tokens 0 --max-new-tokens: Value 0 not in range 1 to
--batch-size 0 --batch-size: Value 0 not in range 1 to 4096
--draft-length -1 --draft-length: Value -1 not in range 0 to 4096
--draft-length 99 --draft-length 99: the drafter
--surplus 1 unknown argument '--surplus' (see kdtree bench acceptance --help)
CASES
refused 0 '--draft-length 2: --mode plain has no drafter' "${bench[@]}" --modes plain --draft-length 2
refused 0 "--draft-length 2 needs a drafter, and $trained/target holds none" generate \
  --model "$trained/target" --prompt-ids 1,2 --draft-length 2
refused 0 '--modes is empty, expected a list of: plain, chain, tree' "${bench[@]}" --modes ''

finish
