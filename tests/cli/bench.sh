#!/usr/bin/env bash
# kdtree bench kernels: JSON lines of every kernel on the CPU, and what it refuses. No time counts.
source "$(dirname "${BASH_SOURCE[0]}")/support/common.sh"

config=$KDTREE_SOURCE/configs/models/tiny.json
bench=(bench kernels --model-config "$config" --backend cpu --threads 1)
small=(--repeats 2 --working-set-mb 1)
lines=$work/lines.jsonl

# --- Results --------------------------------------------------------------------------------------

if succeeds 0 "${bench[@]}" "${small[@]}" --rows 1,3 --prefix 0,20; then
  holds 'every kernel' "$python" "$support/check_bench.py" "$out" --all --rows 1,3 --prefix 0,20
  holds 'a table for people' grep -q '^kernel  *rows' "$err"
fi
if succeeds 0 "${bench[@]}" "${small[@]}" --rows 4 --kernels experts,top_k --histogram zipf \
  --ranks 3 --output "$lines"; then
  holds 'chosen kernels in a file' "$python" "$support/check_bench.py" "$lines" \
    --kernels experts,top_k --rows 4 --ranks 3
  holds 'nothing on stdout' test ! -s "$out"
fi
# In an MPI job of one rank it is one process as well.
if succeeds 1 "${bench[@]}" "${small[@]}" --rows 1 --kernels router; then
  holds 'one rank' "$python" "$support/check_bench.py" "$out" --kernels router --rows 1
fi

# --- Refusals -------------------------------------------------------------------------------------

refused 0 'no subcommand, expected kernels' bench
refused 0 "unknown subcommand 'kernel', expected kernels" bench kernel
refused 0 '--model-config is required' bench kernels
refused 0 "unknown argument '--fast' (see kdtree bench kernels --help)" "${bench[@]}" --fast
refused 0 "unknown argument 'surplus'" "${bench[@]}" surplus

# FLAG VALUE WORDS
while read -r flag value words; do
  refused 0 "$words" "${bench[@]}" "$flag" "$value"
done <<'CASES'
--rows 0 --rows: '0' in '0', expected whole numbers from 1 to 4096
--rows 1,,2 --rows: '' in '1,,2', expected whole numbers from 1 to 4096
--rows 1,4097 --rows: '4097' in '1,4097', expected whole numbers from 1 to 4096
--rows 1.5 --rows: '1.5' in '1.5', expected whole numbers
--rows 99999999999999999999 --rows: '99999999999999999999' in
--prefix -1 --prefix: '-1' in '-1', expected whole numbers from 0 to 1048576
--prefix abc --prefix: 'abc' in 'abc', expected whole numbers
--kernels gemm --kernels: unknown name 'gemm', expected a list of: linear, experts
--kernels linear, --kernels: unknown name '', expected a list of: linear, experts
--histogram flat --histogram: flat not in {uniform,zipf,one}
--repeats 0 --repeats: Value 0 not in range 1 to 10000
--seed -1 --seed: Value -1 not in range 0 to
--ranks 0 --ranks: Value 0 not in range 1 to 4096
--ranks 5 --ranks 5: the model has 4 attention heads
--working-set-mb x --working-set-mb: Value x not in range 0 to 1000000
--dtype fp8 --dtype: fp8 not in {auto,fp32,bf16}
--dtype bf16 --dtype bf16: the CPU backend computes in fp32
--threads -1 --threads: Value -1 not in range 0 to 4096
CASES
refused 0 '--backend: tpu not in {auto,cpu,cuda}' bench kernels --model-config "$config" \
  --backend tpu
refused 0 "$work/none.json: " bench kernels --model-config "$work/none.json"
refused 0 "--output: cannot write $work/none/lines.jsonl: No such file or directory" \
  "${bench[@]}" --output "$work/none/lines.jsonl"
printf '{"architectures": ["LlamaForCausalLM"]}\n' >"$work/llama.json"
refused 0 "llama.json: key 'architectures' is" bench kernels --model-config "$work/llama.json"
refused 3 'bench kernels measures one process' "${bench[@]}"

finish
