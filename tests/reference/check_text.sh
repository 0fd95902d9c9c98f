#!/usr/bin/env bash
# Holds the engine's tokenizers and chat templates against the public packages of
# text_requirements.txt, which it installs into build/text-venv.
#   usage: tests/reference/check_text.sh
# Needs kdtree_unit_tests of preset cpu. Exit status 77: skipped, the packages cannot be had.
# KDTREE_REQUIRE_TEXT=1   makes that a failure
# KDTREE_TOKENIZERS       further tokenizers to check, separated by blanks
# KDTREE_DEEPSEEK_CONFIG  DeepSeek-V3's published tokenizer_config.json, for its chat template
source "$(dirname "${BASH_SOURCE[0]}")/../../launch/common.sh"

reference=tests/reference
requirements=$reference/text_requirements.txt
venv=build/text-venv
log=build/text-venv.log

# make_venv: does nothing while the requirements are those that it was made with.
make_venv() {
  if cmp -s "$requirements" "$venv/requirements.txt"; then
    return 0
  fi
  mkdir -p build
  rm -rf "$venv"
  {
    install_packages text && python3 -m venv "$venv" &&
      "$venv/bin/pip" --disable-pip-version-check install --quiet --retries 1 --timeout 20 \
        --only-binary :all: --requirement "$requirements" &&
      cp "$requirements" "$venv/requirements.txt"
  } >"$log" 2>&1
}

if ! make_venv; then
  rm -rf "$venv"
  if [ "${KDTREE_REQUIRE_TEXT:-0}" = 1 ]; then
    echo "text: $requirements cannot be installed, and KDTREE_REQUIRE_TEXT=1 (see $log)"
    exit 1
  fi
  echo "SKIPPED: texts are not compared, $requirements cannot be installed (see $log)"
  exit 77
fi

read -r -a further <<<"${KDTREE_TOKENIZERS:-}"
failed=0
for tokenizer in tests/data/tokenizer/deepseek_like/tokenizer.json tests/data/tokenizer/kimi_like \
  "${further[@]}"; do
  "$venv/bin/python" $reference/check_tokenizer.py "$tokenizer" --count 60000 \
    --corpus-bytes 4000000 || failed=1
done
for model in kimi-k2 kimi-k2.6; do
  "$venv/bin/python" $reference/check_chat_template.py $model || failed=1
done
if [ -n "${KDTREE_DEEPSEEK_CONFIG:-}" ]; then
  "$venv/bin/python" $reference/check_chat_template.py deepseek-v3 "$KDTREE_DEEPSEEK_CONFIG" ||
    failed=1
fi
exit $failed
