#!/usr/bin/env bash
# timeout: 600
# Grids of ranks: how they share experts and attention, and what is refused.
source "$(dirname "${BASH_SOURCE[0]}")/support/common.sh"

"$python" "$support/make_inputs.py" "$KDTREE_TEST_DATA" "$work"
all=(--model "$tiny" --prompts "$work/model_tiny.jsonl" --max-new-tokens 40 --ignore-eos)
golden=(--prompts "$work/model_tiny.jsonl" --goldens "$tiny:original")

# says RANKS GRID...: the run's results name the grid: moe_ep moe_tp attention_tp attention_dp.
says() {
  holds "results name the grid $*" "$python" -c 'import json, sys
for line in open(sys.argv[1], encoding="utf-8"):
    metrics = json.loads(line)["metrics"]
    found = [metrics[key] for key in ("moe_ep", "moe_tp", "attention_tp", "attention_dp")]
    assert found == [int(word) for word in sys.argv[2:]], found' "$out" "$@"
}

decodes 2 "${all[@]}" --batch-size 2 -- "${golden[@]}"
says 2 1 2 1
decodes 2 "${all[@]}" --batch-size 2 --moe-tp 2 -- "${golden[@]}"
says 1 2 2 1
printf '%s\n' 'moe_ep = 2' 'attention-dp = 2' 'exchange = "alltoall"' >"$work/run.toml"
decodes 4 "${all[@]}" --batch-size 3 --config "$work/run.toml" --dump-steps \
  --record-expert-load "$work/loads" -- --steps tree:16 "${golden[@]}"
says 2 2 2 2
holds 'rows of all groups are counted' "$python" "$support/check_expert_files.py" loads "$tiny" \
  "$work/loads" "$out"
# A placement is one of expert groups, and moves are, too.
decodes 4 "${all[@]}" --batch-size 4 --moe-tp 2 --attention-dp 4 --placement replicated \
  --expert-slots 10 --expert-load "$work/loads" --rebalance-every 1 \
  --write-placement "$work/placement.json" -- "${golden[@]}"
says 2 2 1 4
holds 'two expert groups' "$python" "$support/check_expert_files.py" placement "$tiny" \
  "$work/placement.json" 2 10
# More ranks than heads.
decodes 6 "${all[@]}" --batch-size 2 --attention-dp 2 -- "${golden[@]}"

# --- Plan -----------------------------------------------------------------------------------------

kimi=(plan --model-config "$KDTREE_SOURCE/configs/models/kimi-k2.6.json" --ranks 8
  --output-format json --batch-size 8 --max-context 8192)
if succeeds 0 "${kimi[@]}"; then cp "$out" "$work/usual"; fi
if succeeds 0 "${kimi[@]}" --attention-dp 8 --moe-ep 2; then
  holds 'a group has its sequences and all heads; experts take what they took' "$python" -c '
import json, sys
usual, grid = (json.load(open(name, encoding="utf-8")) for name in sys.argv[1:])
assert [grid[key] for key in ("moe_ep", "moe_tp", "attention_tp", "attention_dp")] == [2, 4, 1, 8]
for before, after in zip(usual["bytes_of_rank"], grid["bytes_of_rank"], strict=True):
    assert after["latent_cache"] * 8 == before["latent_cache"]
    assert after["attention"] > 2 * before["attention"]
    assert after["routed_experts"] == before["routed_experts"]' "$work/usual" "$out"
fi

# --- Refusals -------------------------------------------------------------------------------------

few=(generate --model "$tiny" --prompt-ids '1,2' --max-new-tokens 2)
refused 0 '--moe-tp 2: expected a number that divides the 1 rank of this run' "${few[@]}" --moe-tp 2
refused 4 '--moe-tp 3: expected a number that divides the 4 ranks of this run' "${few[@]}" --moe-tp 3
refused 4 '--moe-ep 2 and --moe-tp 4: they multiply to 8, expected 4, the number of ranks' \
  "${few[@]}" --moe-ep 2 --moe-tp 4
refused 4 '--attention-tp 4 and --attention-dp 4: they multiply to 16, expected 4' "${few[@]}" \
  --attention-tp 4 --attention-dp 4
refused 0 '--attention-dp 2: expected a number that divides the 1 rank' "${few[@]}" \
  --attention-dp 2
refused 0 '--moe-tp: Value -1 not in range 0' "${few[@]}" --moe-tp -1
refused 4 "--moe-tp 4: the model's moe_intermediate_size 64 is 2 groups of 32, expected at most 2" \
  generate --model "$int4" --prompt-ids '1,2' --max-new-tokens 2 --moe-tp 4
refused 5 '5 ranks, but' "${few[@]}" --moe-tp 5
refused 0 "--ranks 10 in 2 groups: the model has 4 attention heads" plan --model-config \
  "$KDTREE_SOURCE/tests/data/goldens/moonlight" --ranks 10 --attention-dp 2
refused 0 '--moe-ep 4 and --moe-tp 4: they multiply to 16, expected 8' "${kimi[@]}" --moe-ep 4 \
  --moe-tp 4
if succeeds 0 convert --model "$tiny" --output "$work/shards" --shard-for 2; then
  refused 2 'hold whole experts' generate --model "$work/shards" --prompt-ids 1,2 --moe-tp 2
  refused 2 'hold whole experts' generate --model "$work/shards" --prompt-ids 1,2 --attention-dp 2
fi

finish
