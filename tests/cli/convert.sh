#!/usr/bin/env bash
# kdtree convert: forms that generate alike, refusals, and conversions that were killed.
source "$(dirname "${BASH_SOURCE[0]}")/support/common.sh"

kimi=$goldens/kimi_nested_int4
trained=$goldens/dflash_trained_bf16

# What generate answers: the output ids alone.
answer() {
  succeeds "$1" generate --prompt-ids 1,2,3,4,5 --max-new-tokens 12 --output-format json \
    --log-level error "${@:3}" || return 1
  "$python" -c 'import json, sys
print([json.loads(line)["output_ids"] for line in open(sys.argv[1])])' "$out" >"$2"
}

# ---- the same answers from every form -----------------------------------------------------------
succeeds 0 convert --model "$kimi" --output "$work/kimi.kdtr"
succeeds 0 inspect --model "$work/kimi.kdtr" --output-format json
holds 'inspect says what it holds' "$python" "$support/check_inspect.py" "$work/kimi.kdtr" "$out"
succeeds 0 convert --model "$work/kimi.kdtr" --output "$work/kimi"
succeeds 0 convert --model "$work/kimi" --output "$work/kimi_shards" --shard-for 2
answer 0 "$work/want" --model "$kimi"
answer 0 "$work/got" --model "$work/kimi.kdtr"
holds 'a bundle answers like the directory' cmp "$work/want" "$work/got"
answer 0 "$work/got" --model "$work/kimi"
holds 'so does a directory made of it' cmp "$work/want" "$work/got"
answer 2 "$work/want" --model "$kimi"
for exchange in allreduce alltoall; do
  answer 2 "$work/got" --model "$work/kimi_shards" --exchange "$exchange"
  holds "so do shards, $exchange" cmp "$work/want" "$work/got"
done

succeeds 0 convert --model "$trained/target" --draft "$trained/draft" --output "$work/pair"
answer 0 "$work/want" --model "$trained/target" --draft "$trained/draft" --mode tree
answer 0 "$work/got" --model "$work/pair" --mode tree
holds 'a directory holds its drafter' cmp "$work/want" "$work/got"
succeeds 3 convert --model "$work/pair" --output "$work/pair_shards" --shard-for 3
answer 3 "$work/want" --model "$trained/target" --draft "$trained/draft" --mode tree
answer 3 "$work/got" --model "$work/pair_shards" --mode tree
holds 'shards hold their drafter' cmp "$work/want" "$work/got"

succeeds 0 convert --model "$trained/target" --output "$work/int4.kdtr" --quantize w4a16
answer 0 "$work/want" --model "$trained/target" --weights int4
answer 0 "$work/got" --model "$work/int4.kdtr"
holds 'rounded before or while loading: the same' cmp "$work/want" "$work/got"

# A bundle's goldens survive the way through a directory.
succeeds 0 convert --model "$int4" --output "$work/golden"
succeeds 0 convert --model "$work/golden" --output "$work/golden.kdtr"
succeeds 0 generate --model "$work/golden.kdtr" --verify-golden
succeeds 0 inspect --model "$work/golden.kdtr" --verify
holds 'inspect: checksums' grep -q 'checksums of .* tensors, .* bytes: right' "$out"

# ---- reports ------------------------------------------------------------------------------------
succeeds 0 convert --model "$trained/target" --output "$work/q" --quantize w4a16 --group-size 16 \
  --output-format json
holds 'a line a matrix, and a summary' "$python" -c '
import json, sys
*tensors, summary = [json.loads(line) for line in open(sys.argv[1])]
assert summary["quantized"]["tensors"] == len(tensors) > 0
assert all(0 < line["relative_error"] < 0.2 and line["max_abs_error"] > 0 for line in tensors)
assert summary["quantized"]["worst_relative_error"] == max(l["relative_error"] for l in tensors)
assert summary["quantized"]["group_size"] == 16' "$out"

# ---- refusals -----------------------------------------------------------------------------------
refused 0 '--model is required' convert --output "$work/x.kdtr"
refused 0 '--output is required' convert --model "$tiny"
refused 0 '--shard-for 2' convert --model "$tiny" --output "$work/x.kdtr" --shard-for 2
refused 0 '--keep-originals needs' convert --model "$tiny" --output "$work/x.kdtr" --keep-originals
refused 0 "$work/none: no such file" convert --model "$work/none" --output "$work/x.kdtr"
refused 3 "$work/kimi.kdtr: exists" convert --model "$kimi" --output "$work/kimi.kdtr"
refused 0 'no routed experts in floats' convert --model "$kimi" --output "$work/x" --quantize w4a16
refused 0 'multiple of 8' convert --model "$trained/target" --output "$work/x" --quantize w4a16 \
  --group-size 12
refused 0 'attention head' convert --model "$kimi" --output "$work/x" --shard-for 4096
refused 3 'shard-00000-of-00003.kdtr' generate --model "$work/kimi_shards" --prompt-ids 1,2
refused 1 'for rank 1 of 2' generate --model "$work/kimi_shards/shard-00001-of-00002.kdtr" \
  --prompt-ids 1,2
cp "$work/golden.kdtr" "$work/damaged.kdtr"
printf 'x' | dd of="$work/damaged.kdtr" bs=1 seek="$(($(stat -c %s "$work/damaged.kdtr") - 9))" \
  conv=notrunc status=none
refused 0 'checksum' convert --model "$work/damaged.kdtr" --output "$work/x"
refused 0 'checksum' inspect --model "$work/damaged.kdtr" --verify
holds 'nothing is left at the output' test ! -e "$work/x" -a ! -e "$work/x.kdtr"
rm -rf "$work/x.partial"
refused 0 'safetensors have no checksums' inspect --model "$kimi" --verify

# ---- killed -------------------------------------------------------------------------------------
# A file that grows beyond a limit ends the program there and then.
size=$(stat -c %s "$work/kimi.kdtr")
limited() {
  (ulimit -f "$1" && exec "$KDTREE" convert --model "$kimi" --output "$work/killed.kdtr" \
    --threads 1) >"$out" 2>"$err"
}
code=0
limited "$((size * 3 / 4 / 1024))" || code=$?
holds 'killed while it wrote' test "$code" -eq 153
holds 'no bundle under its name' test ! -e "$work/killed.kdtr"
holds 'but what is finished' test -s "$work/killed.kdtr.partial/bundle.kdtr"
succeeds 0 convert --model "$kimi" --output "$work/killed.kdtr" --output-format json
holds 'it goes on' "$python" -c '
import json, sys
assert json.loads(open(sys.argv[1]).read())["resumed_tensors"] > 0' "$out"
holds 'to the same bundle' cmp "$work/killed.kdtr" "$work/kimi.kdtr"
holds 'and leaves nothing behind' test ! -e "$work/killed.kdtr.partial"

# Two at once: one of them is told.
mkdir "$work/two.partial"
: >"$work/two.partial/convert.journal"
flock "$work/two.partial/convert.journal" "$KDTREE" convert --model "$kimi" --output "$work/two" \
  >"$out" 2>"$err" && code=0 || code=$?
holds 'not where another one works' test "$code" -eq 1
holds 'and says so' grep -q 'another conversion is at work' "$err"

finish
