#!/usr/bin/env bash
# timeout: 900
# Where experts are placed: policies, files, replicas, moves during a run, and what is refused.
source "$(dirname "${BASH_SOURCE[0]}")/support/common.sh"

"$python" "$support/make_inputs.py" "$KDTREE_TEST_DATA" "$work"
prompts=$work/model_tiny.jsonl
all=(--model "$tiny" --prompts "$prompts" --max-new-tokens 40 --ignore-eos)
golden=(--prompts "$prompts" --goldens "$tiny:original")
loads=$work/loads.json
placement=$work/placement.json
experts=$("$python" -c 'import sys
from pathlib import Path
from kdtr import read_kdtr
print(read_kdtr(Path(sys.argv[1])).header["target"]["config"]["n_routed_experts"])' "$tiny")
check=("$python" "$support/check_expert_files.py")

# --- Loads ----------------------------------------------------------------------------------------

# Every row once, whatever the mode, the exchange, the batch and the number of ranks.
for run in '0 plain:0 allreduce 1' '0 tree:16 allreduce 3' '3 tree:16 allreduce 3' \
  '3 chain:7 alltoall 2' '2 plain:0 alltoall 3'; do
  read -r ranks steps exchange batch <<<"$run"
  decodes "$ranks" "${all[@]}" --mode "${steps%:*}" --exchange "$exchange" --batch-size "$batch" \
    --dump-steps --record-expert-load "$loads" -- --steps "$steps" "${golden[@]}"
  holds "$run: loads" "${check[@]}" loads "$tiny" "$loads" "$out"
  holds "$run: the imbalance is told" grep -q 'the most loaded rank has [0-9.]* times' "$err"
done

# --- Policies and files ---------------------------------------------------------------------------

slots=$((experts + 2))
by_load=(--placement balanced --expert-load "$loads")
replicated=(--placement replicated --expert-slots "$slots" --expert-load "$loads")
for ranks in 2 3; do
  for exchange in allreduce allgather alltoall; do
    decodes $ranks "${all[@]}" --exchange $exchange --placement round-robin --batch-size 2 -- \
      "${golden[@]}"
    decodes $ranks "${all[@]}" --exchange $exchange "${by_load[@]}" \
      --write-placement "$placement" -- "${golden[@]}"
    holds 'a balanced placement' "${check[@]}" placement "$tiny" "$placement" $ranks "$experts"
    decodes $ranks "${all[@]}" --exchange $exchange "${replicated[@]}" \
      --write-placement "$placement" -- "${golden[@]}"
    holds 'replicas' "${check[@]}" placement "$tiny" "$placement" $ranks $slots
    decodes $ranks "${all[@]}" --exchange $exchange --placement "$placement" \
      --write-placement "$work/again.json" -- "${golden[@]}"
    holds 'a placement is read as written' cmp "$placement" "$work/again.json"
  done
done
decodes 0 "${all[@]}" "${by_load[@]}" -- "${golden[@]}"
printf '%s\n' 'placement = "replicated"' "expert_slots = $slots" "expert-load = \"$loads\"" \
  >"$work/run.toml"
decodes 2 "${all[@]}" --config "$work/run.toml" -- "${golden[@]}"

# --- Moves during a run ---------------------------------------------------------------------------

for policy in linear round-robin "$placement"; do
  decodes 3 "${all[@]}" --placement "$policy" --rebalance-every 1 --batch-size 2 \
    --write-placement "$work/moved.json" -- "${golden[@]}"
  holds 'experts were moved' grep -q 'experts moved, ' "$err"
done
holds 'the last placement is written' test "$(cmp -s "$placement" "$work/moved.json"; echo $?)" -eq 1

# --- Exchange counters ----------------------------------------------------------------------------

exchange=$work/exchange.json
for case in '1 plain allreduce' '2 tree alltoall' '3 chain allgather' '4 tree allreduce'; do
  read -r ranks mode kind <<<"$case"
  if succeeds "$ranks" generate --model "$tiny" --prompt-ids 1,2,3 --prompt-ids 4,5 --batch-size 2 \
    --max-new-tokens 9 --mode "$mode" --exchange "$kind" --record-exchange "$exchange"; then
    holds "counters of $case" "${check[@]}" exchange "$tiny" "$exchange" "$ranks" "$kind"
    holds 'a line for people' grep -q "exchange $kind, a step: .* us in exchange" "$err"
  fi
done
refused 2 "--record-exchange: cannot write $work:" generate --model "$tiny" --prompt-ids '1,2' \
  --max-new-tokens 2 --record-exchange "$work"

# --- Plan -----------------------------------------------------------------------------------------

kimi=(plan --model-config "$KDTREE_SOURCE/configs/models/kimi-k2.6.json" --ranks 8)
"$python" - "$work/kimi.json" <<'WRITE'
import json, sys
layers = [{"layer": layer, "counts": [1 + 384 * 7 // (expert + 1) for expert in range(384)]}
          for layer in range(1, 61)]
json.dump({"format": "kdtree-expert-load", "version": 1, "num_hidden_layers": 61,
           "n_routed_experts": 384, "layers": layers}, open(sys.argv[1], "w", encoding="utf-8"))
WRITE
# 60 layers of 448 / 8 experts of 3 x 7168 x 2048 x 0.5625 bytes.
if succeeds 0 "${kimi[@]}" --placement replicated --expert-slots 448 \
  --expert-load "$work/kimi.json" --write-placement "$placement" --output-format json; then
  holds 'slots are counted' "$python" "$support/check_plan.py" "$out" --ranks 8 --fits null \
    --entry routed_experts $((60 * 56 * 3 * 7168 * 2048 * 9 / 16))
fi
if succeeds 0 "${kimi[@]}" --placement "$placement" --output-format json; then
  holds 'of a file as well' "$python" "$support/check_plan.py" "$out" --ranks 8 --fits null \
    --entry routed_experts $((60 * 56 * 3 * 7168 * 2048 * 9 / 16))
fi

# --- Refusals -------------------------------------------------------------------------------------

few=(generate --model "$tiny" --prompt-ids '1,2' --max-new-tokens 2)
refused 0 '--placement evenly: expected linear, round-robin, balanced, replicated or a file' \
  "${few[@]}" --placement evenly
refused 0 '--placement balanced needs the loads of experts: give --expert-load' \
  "${few[@]}" --placement balanced
refused 0 "--expert-load $loads: --placement linear takes no loads" "${few[@]}" \
  --expert-load "$loads"
refused 0 '--expert-slots 9: --placement linear has no replicas' "${few[@]}" --expert-slots 9
refused 2 "--expert-slots 0: expected $experts to $((2 * experts))" "${few[@]}" \
  --placement replicated --expert-load "$loads"
refused 3 "--expert-slots $((experts - 1)): expected $experts to $((3 * experts))" "${few[@]}" \
  --placement replicated --expert-load "$loads" --expert-slots $((experts - 1))
refused 0 "$work/none.json" "${few[@]}" --placement balanced --expert-load "$work/none.json"
refused 0 "kimi.json: key 'num_hidden_layers' is 61, expected" "${few[@]}" --placement balanced \
  --expert-load "$work/kimi.json"
refused 3 "placement.json: key 'num_hidden_layers' is 61, expected" "${few[@]}" \
  --placement "$placement"
succeeds 2 "${few[@]}" --write-placement "$placement" || true
refused 3 "placement.json: key 'ranks' is 2, expected 3, as many as this run has" "${few[@]}" \
  --placement "$placement"
refused 0 "key 'format' is \"kdtree-expert-load\", expected kdtree-expert-placement" "${few[@]}" \
  --placement "$loads"
printf '{"format":' >"$work/broken.json"
refused 2 'broken.json' "${few[@]}" --placement "$work/broken.json"
refused 2 "--record-expert-load: cannot write $work:" "${few[@]}" --record-expert-load "$work"
refused 0 "--write-placement: cannot write $work/no/where.json:" "${few[@]}" \
  --write-placement "$work/no/where.json"
"$python" - "$work/again.json" "$work/uneven.json" <<'WRITE'
import json, sys
placement = json.load(open(sys.argv[1], encoding="utf-8"))
every = list(range(placement["n_routed_experts"]))
for layer in placement["layers"]:
    layer["slots"] = [every, [], [0]]
json.dump(placement, open(sys.argv[2], "w", encoding="utf-8"))
WRITE
decodes 3 "${all[@]}" --placement "$work/uneven.json" -- "${golden[@]}"
refused 3 'does not share the slots of each layer out evenly' "${few[@]}" \
  --placement "$work/uneven.json" --rebalance-every 2
refused 0 '--rebalance-every: Value -1 not in range 0' "${few[@]}" --rebalance-every -1

finish
