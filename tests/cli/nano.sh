#!/usr/bin/env bash
# timeout: 900
# The nano model of launch/demo: its goldens on several ranks, what its drafter is worth, its
# perplexity against the training code's.
source "$(dirname "${BASH_SOURCE[0]}")/support/common.sh"

demo=$KDTREE_SOURCE/launch/demo
nano=$demo/nano.kdtr
result_limit_s=300

for ranks in 0 2 3 4; do
  succeeds "$ranks" generate --model "$nano" --verify-golden --backend cpu --log-level warn || true
done
for mode in plain chain; do
  succeeds 2 generate --model "$nano" --verify-golden --mode "$mode" --exchange alltoall \
    --backend cpu --log-level warn || true
done

# ---- acceptance on held-out prompts: counts, the same on every machine --------------------------
head -n 20 "$demo/prompts.jsonl" >"$work/prompts"
succeeds 0 bench acceptance --model "$nano" --prompts "$work/prompts" --budgets 16 \
  --max-new-tokens 128 --backend cpu --output "$work/acceptance" --log-level warn || true
holds 'trees accept 3 tokens a step, a tenth more than chains' "$python" -c '
import json, sys
cells = {line["mode"]: line for line in map(json.loads, open(sys.argv[1]))}
assert set(cells) == {"plain", "chain", "tree"}, set(cells)
assert all(cell["identical_output"] for cell in cells.values())
tree, chain = (cells[mode]["acceptance_length"] for mode in ("tree", "chain"))
assert tree >= 3.0 and tree >= 1.1 * chain, (tree, chain)' "$work/acceptance"

# ---- perplexity ---------------------------------------------------------------------------------
succeeds 0 bench perplexity --model "$nano" --text "$demo/perplexity_windows.jsonl" \
  --backend cpu --output "$work/perplexity" --log-level warn || true
holds 'the perplexity that training measured' "$python" -c '
import json, sys
lines = [json.loads(line) for line in open(sys.argv[1])]
trained = json.load(open(sys.argv[2]))["perplexity"]
found = lines[-1]["perplexity"]
assert abs(found / trained["int4"] - 1) < 1e-3, (found, trained)
assert found < 1.03 * trained["bf16"]' "$work/perplexity" "$demo/metrics.json"

# ---- text ---------------------------------------------------------------------------------------
succeeds 2 generate --model "$nano" --prompt 'The system call returns' --max-new-tokens 40 \
  --backend cpu --log-level warn || true
holds 'it answers in words' grep -qE '[a-z]{3,} [a-z]{2,} [a-z]{2,}' "$out"

succeeds 0 convert --model "$nano" --output "$work/nano" || true
succeeds 0 generate --model "$work/nano" --prompt 'The system call returns' --max-new-tokens 40 \
  --backend cpu --log-level warn || true
cp "$out" "$work/text"
succeeds 0 generate --model "$nano" --prompt 'The system call returns' --max-new-tokens 40 \
  --backend cpu --log-level warn || true
holds 'a directory made of it says the same' cmp "$out" "$work/text"

finish
