#!/usr/bin/env bash
# Text in, text out: prompts are encoded, outputs stream as whole characters, and what is wrong with
# texts and tokenizers is told.
source "$(dirname "${BASH_SOURCE[0]}")/support/common.sh"

trained=$goldens/dflash_trained_bf16
tokenizer=$work/tokenizer
"$python" "$support/make_tokenizer.py" "$tokenizer"
model=(--model "$trained/target" --draft "$trained/draft" --max-new-tokens 24)
text=("${model[@]}" --tokenizer "$tokenizer")

# --- Text equals ids ------------------------------------------------------------------------------

for ranks in 0 2; do
  for mode in plain tree; do
    succeeds "$ranks" generate "${text[@]}" --mode $mode --prompt 'héllo' --output-format json || true
    cp "$out" "$work/results"
    holds "ranks $ranks $mode: the prompt's bytes" grep -qF \
      '"prompt_ids":[104,195,169,108,108,111]' "$out"
    succeeds "$ranks" generate "${text[@]}" --mode $mode --prompt 'héllo' || true
    holds "ranks $ranks $mode: streamed text" "$python" "$support/check_text.py" "$work/results" "$out"
    holds "ranks $ranks $mode: statistics on stderr" grep -q 'acceptance length' "$err"
  done
done
# Ids in, text out; several sequences are printed whole.
succeeds 0 generate "${text[@]}" --prompt-ids 265,37,463 --ignore-eos --output-format json || true
holds 'ids in, text out' "$python" "$support/check_text.py" "$out"
succeeds 0 generate "${text[@]}" --prompt a --prompt b --batch-size 2 --output-format json || true
holds 'two texts' "$python" "$support/check_text.py" "$out"
succeeds 0 generate "${text[@]}" --prompt a --prompt b --batch-size 2 || true
holds 'two texts, prefixed' grep -qa '^prompt 1: ' "$out"

# --- Control tokens -------------------------------------------------------------------------------

succeeds 0 generate "${text[@]}" --prompt '<|im_end|>' --output-format json || true
holds 'a control token in a text is text' grep -qF '"prompt_ids":[60,124,105,' "$out"
succeeds 0 generate "${text[@]}" --prompt '<|im_end|>' --parse-special --output-format json || true
holds 'unless it is asked for' grep -qF '"prompt_ids":[258]' "$out"
cp -r "$tokenizer" "$work/begin"
sed -i 's/"add_bos_token": false/"add_bos_token": true/' "$work/begin/tokenizer_config.json"
succeeds 0 generate "${model[@]}" --tokenizer "$work/begin" --prompt a --output-format json || true
holds 'the begin token' grep -qF '"prompt_ids":[256,97]' "$out"
succeeds 0 generate "${model[@]}" --tokenizer "$tokenizer/tiktoken.model" --prompt a \
  --output-format json || true
holds 'a file' grep -qF '"prompt_ids":[97]' "$out"

# --- End tokens -----------------------------------------------------------------------------------

# A model that stops on the token it produces third.
third=$("$python" -c 'import json,sys; print(json.loads(open(sys.argv[1]).readline())["output_ids"][2])' \
  "$work/results")
cp -r "$trained/target" "$work/target"
chmod -R u+w "$work/target"
printf '{"eos_token_id": [%s]}' "$third" >"$work/target/generation_config.json"
succeeds 0 generate --model "$work/target" --tokenizer "$tokenizer" --prompt 'héllo' \
  --output-format json || true
holds 'generation_config.json ends a sequence' grep -qE "\"output_ids\":\[([0-9]+,){0,2}$third\]" "$out"

# --- Conversations --------------------------------------------------------------------------------

printf '[{"role": "user", "content": "a<|im_end|>"}]' >"$work/chat.json"
chat=("${text[@]}" --chat "$work/chat.json")
for ranks in 0 2; do
  succeeds "$ranks" generate "${chat[@]}" --chat-template kimi-k2.6 --output-format json || true
  holds "ranks $ranks: a conversation" grep -qF \
    '"prompt_ids":[259,117,115,101,114,260,97,60,124,105,109,95,101,110,100,124,62,258,261,97,' "$out"
  holds "ranks $ranks: thinks" grep -qF ',116,260,262],' "$out"
done
succeeds 0 generate "${chat[@]}" --chat-template kimi-k2.6 --thinking off --output-format json || true
holds 'does not think' grep -qF ',116,260,262,263],' "$out"

# Declared tools keep the order of their keys; DeepSeek's templates have no place for them.
tools='"tools": [{"b": 1, "a": 2}]'
printf '{"messages": [{"role": "user", "content": "a"}], %s}' "$tools" >"$work/tools.json"
tooled=("${text[@]}" --chat "$work/tools.json")
succeeds 0 generate "${tooled[@]}" --chat-template kimi-k2.6 --output-format json || true
# [{"b":1,"a":2}]<|im_end|>
holds 'declared tools' grep -qF ',260,91,123,34,98,34,58,49,44,34,97,34,58,50,125,93,258,' "$out"
refused 0 "tools.json: key 'tools' declares tools" generate "${tooled[@]}" --chat-template deepseek-v3

# --- A file of prompts of all kinds ----------------------------------------------------------------

cat >"$work/mixed.jsonl" <<'LINES'
{"prompt_ids": [265, 37]}
{"prompt": "héllo"}

{"messages": [{"role": "user", "content": "a"}]}
LINES
mixed=("${text[@]}" --prompts "$work/mixed.jsonl" --chat-template kimi-k2.6 --output-format json)
for ranks in 0 2; do
  succeeds "$ranks" generate "${mixed[@]}" --prompt b --batch-size 2 || true
  holds "ranks $ranks: outputs of all kinds" "$python" "$support/check_text.py" "$out"
  for ids in 265,37 104,195,169,108,108,111 \
    259,117,115,101,114,260,97,258,261,97,115,115,105,115,116,97,110,116,260,262 98; do
    holds "ranks $ranks: prompt $ids" grep -qF "\"prompt_ids\":[$ids]" "$out"
  done
done
# LINE|WORDS
while IFS='|' read -r line words; do
  printf '{"prompt_ids": [1]}\n%s\n' "$line" >"$work/mixed.jsonl"
  refused 0 "mixed.jsonl: line 2: $words" generate "${mixed[@]}"
  refused 2 "mixed.jsonl: line 2: $words" generate "${mixed[@]}"
done <<'CASES'
{"prompt": ""}|the text has no tokens
{"prompt": 3}|prompt is 3, expected a string
{"prompt": "a", "prompt_ids": [1]}|expected one of the keys
{"messages": []}|key 'messages': no messages
{"messages": [{"role": "judge", "content": "a"}]}|key 'messages[0].role' is "judge"
CASES
printf '{"prompt": "a"}\n' >"$work/mixed.jsonl"
refused 0 'holds no tokenizer: give --tokenizer' generate "${model[@]}" --prompts "$work/mixed.jsonl"

# --- What is refused ------------------------------------------------------------------------------

run=(generate "${model[@]}")
for ranks in 0 2; do
  refused "$ranks" 'is not valid UTF-8 at byte 1' "${run[@]}" --tokenizer "$tokenizer" --prompt $'a\xff'
  refused "$ranks" '--prompt (number 1): the text has no tokens' "${run[@]}" --tokenizer "$tokenizer" \
    --prompt a --prompt ''
  refused "$ranks" 'holds no tokenizer: give --tokenizer' "${run[@]}" --prompt a
done
refused 0 'its model_type does not tell the chat template' generate "${chat[@]}"
refused 0 "no added token is '<｜begin▁of▁sentence｜>'" generate "${chat[@]}" --chat-template deepseek-v3
# JSON WORDS
while IFS='|' read -r content words; do
  printf '%s' "$content" >"$work/chat.json"
  refused 0 "$words" generate "${chat[@]}" --chat-template kimi-k2.6
done <<'CASES'
hello|chat.json: not valid JSON
[]|chat.json: no messages
{"messages": []}|key 'messages': no messages
[{"role": "judge", "content": "a"}]|key '[0].role' is "judge", expected system or user
[{"role": "user"}]|key '[0].content' is missing
{"messages": [{"role": "user", "content": "a"}], "tools": [1]}|key 'tools[0]' is 1, expected an object
CASES
printf '[{"role": "judge", "content": "a"}]' >"$work/chat.json"
refused 3 "key '[0].role' is \"judge\", expected system or user" generate "${chat[@]}" \
  --chat-template kimi-k2.6
refused 0 'holds no tokenizer: give --tokenizer' generate --model "$tiny" --prompt a
refused 0 'nowhere: no such file or directory' "${run[@]}" --tokenizer nowhere --prompt a
for ranks in 0 3; do
  refused $ranks 'its ids go up to 1855' "${run[@]}" --prompt a \
    --tokenizer "$KDTREE_SOURCE/tests/data/tokenizer/kimi_like"
done
cp -r "$tokenizer" "$work/broken"
sed -i '5s/ 4$/ four/' "$work/broken/tiktoken.model"
for ranks in 0 3; do
  refused $ranks "line 5: the rank is 'four'" "${run[@]}" --tokenizer "$work/broken" --prompt a
done
sed -i 's/true/maybe/' "$work/begin/tokenizer_config.json"
refused 0 'tokenizer_config.json: not valid JSON' "${run[@]}" --tokenizer "$work/begin" --prompt a
printf '{"eos_token_id": "1"}' >"$work/target/generation_config.json"
refused 0 "generation_config.json: key 'eos_token_id' is" generate --model "$work/target" \
  --prompt-ids 1

finish
