#!/usr/bin/env bash
# kdtree bench perplexity against the numpy reference, on one to three ranks, and what it refuses.
source "$(dirname "${BASH_SOURCE[0]}")/support/common.sh"

target=$goldens/dflash_trained_bf16/target
windows=$work/windows.jsonl
printf '{"prompt_ids": [%s]}\n' 265,37,463,381,421 1,2 77,500,3,77,500,3,77 >"$windows"
bench=(bench perplexity --model "$target")

# check NAME WINDOWS WORD...: the line of the last run.
check() {
  local name=$1 expected=$2
  shift 2
  holds "$name" "$python" "$support/check_perplexity.py" "$out" "$target" "$expected" "$@"
}

# --- Windows of tokens ----------------------------------------------------------------------------

for ranks in 0 2 3; do
  for exchange in allreduce alltoall; do
    if succeeds "$ranks" "${bench[@]}" --text "$windows" --exchange $exchange; then
      check "ranks $ranks $exchange" "$windows" --expect exchange=$exchange --expect model=target \
        --expect text=windows.jsonl --expect world_size=$((ranks > 0 ? ranks : 1))
      holds 'a line for people' grep -q '^perplexity [0-9.]* (loss ' "$err"
    fi
  done
done
head -n 2 "$windows" >"$work/two.jsonl"
if succeeds 0 "${bench[@]}" --text "$windows" --windows 2; then
  check 'the first windows' "$work/two.jsonl"
fi
if succeeds 2 "${bench[@]}" --text "$windows" --output "$work/line.jsonl"; then
  holds 'nothing on stdout' test ! -s "$out"
  cp "$work/line.jsonl" "$out"
  check 'in a file' "$windows"
fi

# --- Texts ----------------------------------------------------------------------------------------

# Bytes are tokens in this vocabulary.
tokenizer=$work/tokenizer
"$python" "$support/make_tokenizer.py" "$tokenizer"
printf 'qzjxkv' >"$work/text"
text=(--text "$work/text" --tokenizer "$tokenizer")
printf '{"prompt_ids": [%s]}\n' 113,122,106,120 107,118 >"$work/cut.jsonl"
if succeeds 2 "${bench[@]}" "${text[@]}" --window 4; then
  check 'a text, cut' "$work/cut.jsonl"
fi
printf '{"prompt_ids": [%s]}\n' 113,122,106,120 106,120,107,118 >"$work/overlap.jsonl"
if succeeds 0 "${bench[@]}" "${text[@]}" --window 4 --stride 2; then
  check 'overlapping windows' "$work/overlap.jsonl" --first-scored 2
fi
printf '{"prompt_ids": [%s]}\n' 113,122,106,120,107,118 >"$work/whole.jsonl"
if succeeds 0 "${bench[@]}" "${text[@]}"; then
  check 'a text that fits a window' "$work/whole.jsonl"
fi

# --- Refusals -------------------------------------------------------------------------------------

refused 0 '--model is required' bench perplexity --text "$windows"
refused 0 '--text is required' "${bench[@]}"
refused 2 "--text: cannot open $work/none.jsonl" "${bench[@]}" --text "$work/none.jsonl"
refused 2 "--text: cannot open $work/none" "${bench[@]}" --text "$work/none" \
  --tokenizer "$tokenizer"
refused 0 'holds no tokenizer' bench perplexity --model "$int4" --text "$work/text"
refused 0 "--window and --stride cut a text, and $windows holds windows already" "${bench[@]}" \
  --text "$windows" --window 4
refused 0 '--window 1 leaves nothing to score' "${bench[@]}" "${text[@]}" --window 1
refused 0 '--stride 5 is beyond the window of 4 tokens' "${bench[@]}" "${text[@]}" --window 4 \
  --stride 5
refused 0 "unknown argument '--draft'" "${bench[@]}" --draft x
refused 2 "--output: cannot write $work/none/line.jsonl: No such file or directory" \
  "${bench[@]}" --text "$windows" --output "$work/none/line.jsonl"
printf 'q' >"$work/short"
refused 0 "--text: $work/short has one token, expected at least two" "${bench[@]}" \
  --text "$work/short" --tokenizer "$tokenizer"
# WORDS, behind the line of a file that is refused
while IFS='|' read -r line words; do
  printf '%s\n' "$line" >"$work/bad.jsonl"
  refused 2 "$words" "${bench[@]}" --text "$work/bad.jsonl"
done <<'CASES'
{"prompt_ids": [1]}|bad.jsonl: window 0 has 1 tokens, expected at least 2
{"prompt_ids": [1, 512]}|bad.jsonl: window 0: token id 512 is outside the vocabulary, expected 0 to 511
{"prompt": "a"}|bad.jsonl: line 1: expected a window of tokens under the key prompt_ids
{"prompt_ids": "a"}|bad.jsonl: line 1: prompt_ids must be a list of token ids
CASES

finish
