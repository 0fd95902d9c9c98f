#!/usr/bin/env bash
# Wrong flags, prompts and TOML files, on one rank and (a representative of each kind) on three.
source "$(dirname "${BASH_SOURCE[0]}")/support/common.sh"

generate=(generate --model "$tiny" --max-new-tokens 2 --threads 1)

# --- Words ----------------------------------------------------------------------------------------

refused 0 'no subcommand, expected generate or convert or inspect'
refused 0 "unknown subcommand 'decode', expected generate or convert or inspect" decode
refused 0 "unknown argument '--fast'" generate --fast
refused 0 "unknown argument '--fast'" generate --model "$tiny" --prompt-ids 1 --fast 3
refused 0 "unknown argument 'surplus'" "${generate[@]}" --prompt-ids 1 surplus
refused 0 "unknown argument '-1'" "${generate[@]}" --prompt-ids 1 --ignore-eos -1
refused 0 '--model is required' generate --prompt-ids 1
refused 0 '--model is required' inspect
refused 0 '--model: 1 required' generate --model
refused 0 '--model: At Most 1 required but received 2' "${generate[@]}" --model "$int4"
refused 0 'no prompt: give --prompt, --chat, --prompt-ids, --prompts or --verify-golden' "${generate[@]}"
refused 0 'give --prompt-ids or --prompts, not both' "${generate[@]}" --prompt-ids 1 --prompts none
refused 0 'give no others' "${generate[@]}" --verify-golden --prompt-ids 1
refused 0 'not for --dtype bf16' "${generate[@]}" --verify-golden --dtype bf16

# FLAG VALUE WORDS
while read -r flag value words; do
  refused 0 "$words" "${generate[@]}" --prompt-ids 1 "$flag" "$value"
done <<'CASES'
--tree-budget 0 --tree-budget: Value 0 not in range 1 to 512
--tree-budget 513 --tree-budget: Value 513 not in range 1 to 512
--tree-budget -3 --tree-budget: Value -3 not in range 1 to 512
--tree-budget abc --tree-budget: Value abc not in range 1 to 512
--tree-budget 3.5 --tree-budget: Value 3.5 not in range 1 to 512
--batch-size 0 --batch-size: Value 0 not in range 1 to 4096
--batch-size 99999999999999999999 --batch-size: Value 99999999999999999999 not in range
--top-logits 321 --top-logits 321 is beyond the vocabulary of 320
--threads -1 --threads: Value -1 not in range 0 to 4096
--mode warp --mode: warp not in {auto,plain,chain,tree}
--weights best --weights: best not in {auto,original,quantized,int4,random}
--backend tpu --backend: tpu not in {auto,cpu,cuda}
--communicator smoke --communicator: smoke not in {auto,self,mpi,nccl}
--exchange none --exchange: none not in {auto,allreduce,allgather,alltoall}
--dtype fp8 --dtype: fp8 not in {auto,fp32,bf16}
--output-format xml --output-format: xml not in {text,json}
--log-level loud --log-level: loud not in {trace,debug,info,warn,error,off}
--max-context 4097 --max-context 4097 is beyond the model's max_position_embeddings 4096
--draft nowhere nowhere: no such file or directory
CASES
refused 0 '--max-new-tokens: Value 0 not in range 1' generate --model "$tiny" --prompt-ids 1 \
  --max-new-tokens 0
refused 0 'Could not convert: --ignore-eos = maybe' "${generate[@]}" --prompt-ids 1 \
  --ignore-eos=maybe

# --- Prompts --------------------------------------------------------------------------------------

refused 0 'prompt 0: token id -1 is outside the vocabulary, expected 0 to 319' \
  "${generate[@]}" --prompt-ids -1
refused 0 'prompt 1: token id 320 is outside the vocabulary, expected 0 to 319' \
  "${generate[@]}" --prompt-ids 1 --prompt-ids 2,320
refused 0 "--prompt-ids: 'abc' is no token id" "${generate[@]}" --prompt-ids abc
refused 0 "--prompt-ids: '1e99' is no token id" "${generate[@]}" --prompt-ids 1e99
refused 0 "--prompt-ids: '99999999999' is no token id" "${generate[@]}" --prompt-ids 99999999999
refused 0 "--prompt-ids: '' is no token id" "${generate[@]}" --prompt-ids 1,,2
refused 0 "--prompt-ids: '[]' is no token id" "${generate[@]}" --prompt-ids '[]'
refused 0 'prompt 0 is empty' "${generate[@]}" --prompt-ids ''
refused 0 'prompt 1 is empty' "${generate[@]}" --prompt-ids 1 --prompt-ids ''
refused 0 'prompt 0 has 5 tokens, but the context holds 5' \
  "${generate[@]}" --prompt-ids 1,2,3,4,5 --max-context 5

# refused_lines WORDS LINE...: a prompts file with these lines.
refused_lines() {
  local words=$1
  shift
  printf '%s\n' "$@" >"$work/prompts.jsonl"
  refused 0 "$words" "${generate[@]}" --prompts "$work/prompts.jsonl"
}
good='{"prompt_ids": [1, 2]}'
refused_lines 'prompts.jsonl: line 2: not valid JSON' "$good" hello
refused_lines 'prompts.jsonl: line 2: JSON object holds the key "prompt_ids" twice' "$good" \
  '{"prompt_ids": [1], "prompt_ids": [2]}'
refused_lines 'prompts.jsonl: line 1: expected a JSON object with prompt_ids' '[1, 2]'
refused_lines 'prompts.jsonl: line 2: prompt is [1], expected a string' "$good" '{"prompt": [1]}'
refused_lines 'prompts.jsonl: line 2: expected one of the keys prompt_ids, prompt and messages' \
  "$good" '{"text": "a"}'
refused_lines 'prompts.jsonl: line 1: prompt_ids must be a list' '{"prompt_ids": "1, 2"}'
refused_lines 'prompts.jsonl: line 1: prompt_ids holds 1e+99' '{"prompt_ids": [1, 1e99]}'
refused_lines 'prompts.jsonl: line 1: prompt_ids holds 2.5' '{"prompt_ids": [1, 2.5]}'
refused_lines 'prompt 1 is empty' "$good" '{"prompt_ids": []}'
refused_lines 'prompt 0: token id -7 is outside the vocabulary' '{"prompt_ids": [-7]}'
refused_lines 'prompts.jsonl holds no prompt' ''
: >"$work/prompts.jsonl"
refused 0 'prompts.jsonl holds no prompt' "${generate[@]}" --prompts "$work/prompts.jsonl"
refused 0 '--prompts: cannot open' "${generate[@]}" --prompts "$work/none.jsonl"
refused 0 '--prompts: cannot read' "${generate[@]}" --prompts "$work"

# --- TOML files -----------------------------------------------------------------------------------

# refused_toml WORDS LINE...: a TOML file with these lines.
refused_toml() {
  local words=$1
  shift
  printf '%s\n' "$@" >"$work/run.toml"
  refused 0 "$words" "${generate[@]}" --config "$work/run.toml"
}
refused 0 '--config: cannot read' "${generate[@]}" --config "$work/none.toml"
refused 0 '--config: cannot read' "${generate[@]}" --config "$work"
refused_toml "run.toml: line 2: key 'tree-budgets' is unknown, expected one of: model, draft" \
  'prompt-ids = [1]' 'tree-budgets = 3'
refused_toml "run.toml: line 1: key 'generate' is unknown" '[generate]' 'mode = "tree"'
refused_toml "run.toml: line 1: key 'config' is unknown" 'config = "other.toml"'
refused_toml "run.toml: line 2: key 'tree-budget': --tree-budget: Value 513 not in range 1 to 512" \
  'prompt-ids = [1]' 'tree-budget = 513'
refused_toml "run.toml: line 1: key 'tree-budget': expected a whole number" 'tree-budget = "4"'
refused_toml "run.toml: line 1: key 'tree-budget': expected a whole number" 'tree-budget = 4.0'
refused_toml "run.toml: line 1: key 'tree-budget': expected a whole number" 'tree-budget = [4]'
refused_toml "run.toml: line 1: key 'draft': expected a string" 'draft = 5'
refused_toml "run.toml: line 1: key 'mode': --mode: warp not in" 'mode = "warp"'
refused_toml "run.toml: line 1: key 'ignore-eos': expected true or false" 'ignore-eos = "yes"'
refused_toml "run.toml: line 1: key 'prompt-ids': expected a list" 'prompt-ids = [[[1]]]'
refused_toml "run.toml: line 1: key 'prompt-ids': expected a list" 'prompt-ids = [1, "2"]'
refused_toml "key 'top_logits' is there twice" 'top-logits = 1' 'top_logits = 2'
refused_toml 'run.toml: line 1: ' 'tree-budget ='
refused_toml 'run.toml: line 2: ' 'mode = "tree"' 'mode = "chain"'

# --- Three ranks ----------------------------------------------------------------------------------

refused 3 "unknown argument '--fast'" "${generate[@]}" --fast
refused 3 "unknown subcommand 'decode'" decode
refused 3 'prompt 0: token id 320 is outside the vocabulary' "${generate[@]}" --prompt-ids 320
refused 3 '--prompts: cannot open' "${generate[@]}" --prompts "$work/none.jsonl"

printf 'batch-size = 0\n' >"$work/run.toml"
refused 3 "run.toml: line 1: key 'batch-size'" "${generate[@]}" --config "$work/run.toml"

finish
