#!/usr/bin/env bash
# Generates the model bundles of the tests, once: a second run with unchanged generators does nothing.
#   usage: generate_data.sh PYTHON DIRECTORY
set -euo pipefail

python=$1
directory=$2
reference=$(cd "$(dirname "${BASH_SOURCE[0]}")/reference" && pwd)
stamp=$directory/.generated

if [ -e "$stamp" ] && [ -z "$(find "$reference" -name '*.py' -newer "$stamp" -print -quit)" ]; then
  echo "unchanged: $directory"
  exit 0
fi
rm -f "$stamp"
mkdir -p "$directory"
# Taken before the work, so that a generator edited meanwhile counts as newer.
started=$(mktemp "$directory/.started.XXXXXX")
trap 'rm -f "$started"' EXIT
export PYTHONDONTWRITEBYTECODE=1
"$python" "$reference/gen_model.py" --output "$directory"
"$python" "$reference/gen_model_int4.py" --output "$directory"
mv "$started" "$stamp"
