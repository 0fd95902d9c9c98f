#!/usr/bin/env bash
# kdtree plan: figures of published models, agreement of both formats, and what it refuses.
source "$(dirname "${BASH_SOURCE[0]}")/support/common.sh"

models=$KDTREE_SOURCE/configs/models
kimi=(plan --model-config "$models/kimi-k2.6.json" --ranks 8 --gpu rtx-pro-6000)
tiny=(plan --model-config "$models/tiny.json")

# --- Figures --------------------------------------------------------------------------------------

# 60 layers x 384 experts x 3 x 7168 x 2048 x 0.5625 bytes / 8; 61 layers x 576 x 2 bytes a token.
if succeeds 0 "${kimi[@]}"; then
  holds 'experts of a rank' grep -qE '^routed experts +71\.345$' "$out"
  holds 'parameters' grep -qF 'kimi-k2.6: 1026.408 billion parameters on 8 ranks, cuda bf16' "$out"
  holds 'all ranks alike' grep -qE '^GB \(10\^9 bytes\) +ranks 0-7$' "$out"
  holds 'it fits' grep -qE '^fits 102\.642 GB of rtx-pro-6000: [0-9.]+ GB are left$' "$out"
fi
if succeeds 0 "${kimi[@]}" --output-format json; then
  holds 'the same in bytes' "$python" "$support/check_plan.py" "$out" --ranks 8 --fits true \
    --entry routed_experts 71345111040 --entry latent_cache $((61 * 576 * 2 * 8194))
fi
if succeeds 0 "${kimi[@]:0:3}" --ranks 4 --gpu rtx-pro-6000 --output-format json; then
  holds 'four are too few' "$python" "$support/check_plan.py" "$out" --ranks 4 --fits false
fi
if succeeds 0 "${kimi[@]:0:3}" --ranks 7 --memory-gb 120; then
  holds 'uneven ranks' grep -qE '^GB \(10\^9 bytes\)( +ranks? [0-9-]+){2,}$' "$out"
  holds 'no name for the memory' grep -qE '^fits 120\.000 GB of memory: ' "$out"
fi
if succeeds 0 "${kimi[@]}" --memory-fraction 0.95 --batch-size 4 --output-format json; then
  holds 'the largest context' "$python" "$support/check_plan.py" "$out" --ranks 8 --fits true \
    --filled 0.95
fi
if succeeds 0 plan --model-config "$models/deepseek-v3.json" --ranks 16 --gpu h200; then
  holds 'fp8' grep -qF 'fp8 matrices are held as bf16: they are dequantised at load' "$out"
fi
if succeeds 0 plan --model-config "$models/kimi-k2.6-4-layers.json" \
  --draft-config "$models/kimi-k2.6-4-layers-dflash.json" --ranks 3 --exchange alltoall \
  --batch-size 2 --tree-budget 32 --output-format json; then
  holds 'a drafter' "$python" "$support/check_plan.py" "$out" --ranks 3 --fits null --drafts
fi
if succeeds 0 "${tiny[@]}" --backend cpu --output-format json; then
  holds 'the CPU' "$python" "$support/check_plan.py" "$out" --ranks 1 --fits null \
    --entry device_reserve 0
fi

# --- Plan and run ---------------------------------------------------------------------------------

# The plan of a run with the same sizes: what rank 0 says that it will allocate.
total_of_run() {
  sed -n 's/.*memory plan of rank 0 .*total \([0-9.]*\) of .*/\1/p' "$err"
}
if succeeds 0 "${tiny[@]}" --backend cpu --dtype fp32 --max-context 4 --output-format json; then
  planned=$("$python" -c 'import json, sys
print("%.4f" % (json.load(open(sys.argv[1]))["peak_bytes"] / 1e9))' "$out")
  if succeeds 0 generate --model "$models/tiny.json" --weights random --backend cpu --dtype fp32 \
    --prompt-ids 1,2,3 --max-context 4 --max-new-tokens 1; then
    holds 'plan and run agree' test "$(total_of_run)" = "$planned"
  fi
fi

# --- Refusals -------------------------------------------------------------------------------------

refused 0 '--model-config is required' plan
refused 0 "unknown argument '--fast' (see kdtree plan --help)" "${tiny[@]}" --fast
refused 0 "--model-config $work/none.json: no such file" plan --model-config "$work/none.json"
refused 0 "--draft-config $work/none.json: no such file" "${tiny[@]}" --draft-config "$work/none.json"
refused 0 "--model-config $work: holds no config.json" plan --model-config "$work"
printf '{"architectures": ["LlamaForCausalLM"]}\n' >"$work/llama.json"
refused 0 "llama.json: key 'architectures' is" plan --model-config "$work/llama.json"
refused 0 "llama.json: key 'architectures' is" "${tiny[@]}" --draft-config "$work/llama.json"

# FLAG VALUE WORDS
while read -r flag value words; do
  refused 0 "$words" "${tiny[@]}" "$flag" "$value"
done <<'CASES'
--ranks 0 --ranks: Value 0 not in range 1 to 4096
--ranks -1 --ranks: Value -1 not in range 1 to 4096
--ranks 5 --ranks 5: the model has 4 attention heads, expected no more ranks than that
--ranks two --ranks: Value two not in range 1 to 4096
--gpu rtx-9000 --gpu: rtx-9000 not in {rtx-pro-6000,h100,h200,b200}
--memory-gb 0 --memory-gb: '0' is no number above 0 up to 1000000
--memory-gb lots --memory-gb: 'lots' is no number above 0 up to 1000000
--memory-fraction 0.9 --memory-fraction 0.9: a share of which memory? Give --gpu or --memory-gb
--memory-fraction 1.5 --memory-fraction: '1.5' is no number above 0 up to 1
--max-context 4097 --max-context 4097 is beyond the model's max_position_embeddings 4096
--max-context 1 --max-context 1: expected 0 or at least 2
--max-context -5 --max-context: Value -5 not in range 0 to
--batch-size 0 --batch-size: Value 0 not in range 1 to 4096
--tree-budget 513 --tree-budget: Value 513 not in range 1 to 512
--mode tree --mode tree needs a drafter: give --draft-config, or --mode plain
--mode beam --mode: beam not in {auto,plain,chain,tree}
--exchange ring --exchange: ring not in {auto,allreduce,allgather,alltoall}
--backend tpu --backend: tpu not in {cuda,cpu}
--dtype fp8 --dtype: fp8 not in {auto,fp32,bf16}
--output-format xml --output-format: xml not in {text,json}
CASES
refused 0 '--gpu h200 and --memory-gb 80: give one of the two' "${tiny[@]}" --gpu h200 \
  --memory-gb 80
refused 0 '--max-context 9 and --memory-fraction 0.5: give one of the two' "${tiny[@]}" \
  --gpu h200 --max-context 9 --memory-fraction 0.5
refused 0 '--backend cpu with --gpu h200: expected --backend cuda' "${tiny[@]}" --backend cpu \
  --gpu h200
refused 0 '--memory-fraction 0.5 is too little: that is' "${kimi[@]}" --memory-fraction 0.5
refused 0 'dflash.json: ' "${tiny[@]}" --draft-config "$models/kimi-k2.6-4-layers-dflash.json"
refused 3 'plan is one process' "${tiny[@]}"

finish
