#!/usr/bin/env bash
# kdtree inspect: what it says of bundles and directories, as text and as JSON.
source "$(dirname "${BASH_SOURCE[0]}")/support/common.sh"

for model in "$tiny" "$int4" "$int4_two" "$goldens/kimi_nested_int4" \
  "$goldens/deepseek_v3_fp8_groups" "$goldens/dflash_trained_bf16/target" \
  "$goldens/dflash_trained_bf16/draft"; do
  succeeds 0 inspect --model "$model" --output-format json || continue
  holds "inspect $model: JSON" "$python" "$support/check_inspect.py" "$model" "$out"
  cp "$out" "$work/json"
  succeeds 0 inspect --model "$model" || continue
  holds "inspect $model: text" "$python" "$support/check_inspect.py" "$model" "$work/json" "$out"
done

succeeds 3 inspect --model "$tiny" --output-format json || true
holds 'three ranks: printed once' test "$(wc -l <"$out")" -eq 1
holds 'three ranks: the same' "$python" "$support/check_inspect.py" "$tiny" "$out"

# Bytes that are no UTF-8 are legal in a path.
odd=$work/$'odd-\xff-name.kdtr'
ln -s "$tiny" "$odd"
succeeds 0 inspect --model "$odd" --output-format json || true
holds 'an odd path' "$python" -c \
  'import json, sys; json.load(open(sys.argv[1], encoding="utf-8"))' "$out"

finish
