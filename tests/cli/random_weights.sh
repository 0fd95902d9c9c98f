#!/usr/bin/env bash
# Models without weights: drawn for the sizes of a config, the same on any number of ranks; and
# contexts as large as the memory allows.
source "$(dirname "${BASH_SOURCE[0]}")/support/common.sh"

kimi=$goldens/kimi_nested_int4/config.json
trained=$goldens/dflash_trained_bf16
random=(--weights random --max-new-tokens 12 --ignore-eos --threads 1)
pair=("${random[@]}" --model "$trained/target" --draft "$trained/draft/config.json")

# --- Random weights -------------------------------------------------------------------------------

decodes 0 "${random[@]}" --model "$kimi" --prompt-ids 1,2,3 --top-logits 8 -- --top-logits 8 \
  --expect metrics.weights=random --expect metrics.mode=plain
cp "$out" "$work/first"
decodes 0 "${random[@]}" --model "$kimi" --prompt-ids 1,2,3 --top-logits 8 --weights-seed 1 -- \
  --top-logits 8 --same-as "$work/first"
decodes 0 "${random[@]}" --model "$kimi" --prompt-ids 1,2,3 --weights-seed 2
output_of() {
  grep -o '"output_ids":\[[^]]*' "$1"
}
holds 'another seed is another model' test "$(output_of "$out")" != "$(output_of "$work/first")"
for mode in plain chain tree; do
  for ranks in 0 2 3; do
    decodes $ranks "${pair[@]}" --prompt-ids 5,6,7 --mode $mode -- --expect metrics.mode=$mode
    output_of "$out" >"$work/$mode.$ranks"
    # A wrong slice of any matrix would change the tokens.
    holds "$mode on $ranks ranks decodes what plain mode on one rank does" \
      cmp "$work/plain.0" "$work/$mode.$ranks"
  done
done
refused 0 'random weights need a config.json' generate "${random[@]}" --model "$work" --prompt-ids 1
refused 0 'random weights need a config.json' generate "${random[@]}" --model "$work/none.json" \
  --prompt-ids 1
refused 0 'not valid JSON' generate "${random[@]}" --model "$trained/target/model.safetensors" \
  --prompt-ids 1
refused 0 'needs a drafter' generate "${random[@]}" --model "$kimi" --mode tree --prompt-ids 1
refused 2 'needs a drafter' generate "${random[@]}" --model "$kimi" --mode tree --prompt-ids 1

# --- Memory ---------------------------------------------------------------------------------------

some=(--model "$tiny" --prompt-ids '1,2,3' --max-new-tokens 6 --threads 1)
decodes 0 "${some[@]}" --top-logits 2 -- --top-logits 2
cp "$out" "$work/some"
for ranks in 0 3; do
  succeeds $ranks generate --output-format json "${some[@]}" --memory-fraction 0.5 || true
  # The model's limit: the memory of any machine holds more.
  holds "ranks $ranks: the context is told" grep -q 'context of 4096 tokens for 1 sequences' "$err"
done
decodes 0 "${some[@]}" --top-logits 2 --memory-fraction 1 -- --top-logits 2 --same-as "$work/some"
printf 'memory_fraction = 0.25\nmodel = "%s"\n' "$tiny" >"$work/run.toml"
decodes 0 --config "$work/run.toml" --prompt-ids 1,2,3 --max-new-tokens 6 --top-logits 2 -- \
  --top-logits 2 --same-as "$work/some"
refused 0 '--memory-fraction 1e-07 is too little' generate "${some[@]}" --memory-fraction 1e-7
refused 3 '--memory-fraction 1e-07 is too little' generate "${some[@]}" --memory-fraction 1e-7
refused 0 'give --max-context or --memory-fraction, not both' generate "${some[@]}" \
  --memory-fraction 0.5 --max-context 20
for value in 0 -0.5 1.5 nan much; do
  refused 0 "'$value' is no number above 0 up to 1" generate "${some[@]}" "--memory-fraction=$value"
done
refused 0 '--memory-fraction: 1 required SHARE missing' generate "${some[@]}" --memory-fraction=
printf 'memory-fraction = "0.5"\n' >"$work/run.toml"
refused 0 "run.toml: line 1: key 'memory-fraction': expected a number" generate "${some[@]}" \
  --config "$work/run.toml"
printf 'memory-fraction = 2\n' >"$work/run.toml"
refused 0 "'2' is no number above 0 up to 1" generate "${some[@]}" --config "$work/run.toml"

finish
