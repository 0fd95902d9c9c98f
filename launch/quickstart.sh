#!/usr/bin/env bash
# From a fresh machine (git, bash and apt; root or sudo) to tree-speculative decoding on two ranks:
# installs packages, builds, makes a small INT4 model, decodes with it and with a trained pair.
#   usage: quickstart.sh        environment: KDTREE_SKIP_PACKAGES=1, KDTREE_CUDA=0 (no CUDA build)
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

kdtree=build/cpu/launch/kdtree
bundles=build/quickstart
pair=tests/data/goldens/dflash_trained_bf16

step "packages"
install_packages build run test reference
python=$(launch/find_python.sh)

step "build: preset cpu"
build_preset cpu kdtree

if [ "${KDTREE_CUDA:-1}" = 1 ] && cuda_ready; then
  step "build: preset cuda ($(nvidia-smi -L | wc -l) GPUs found)"
  build_preset cuda kdtree
fi

step "a small INT4 model with a drafter and known outputs"
mkdir -p "$bundles"
PYTHONDONTWRITEBYTECODE=1 "$python" tests/reference/gen_model_int4.py --output "$bundles"

set_mpirun 2
step "two ranks, INT4 experts, draft trees of 16 nodes; the output is checked against the reference"
show_and_run "${mpirun[@]}" "$kdtree" generate --model "$bundles/model_int4_tiny.kdtr" \
  --weights quantized --mode tree --tree-budget 16 --verify-golden

step "two ranks, a target and a drafter that were trained together: drafts are accepted"
prompt_ids=$("$python" -c '
import json, sys
print(",".join(str(token) for token in json.load(open(sys.argv[1]))["cases"][0]["prompt_ids"]))
' "$pair/expected.json")
show_and_run "${mpirun[@]}" "$kdtree" generate --model "$pair/target" --draft "$pair/draft" \
  --mode tree --tree-budget 16 --prompt-ids "$prompt_ids" --max-new-tokens 64 --ignore-eos

step "done. Next: $kdtree --help, ./launch/test.sh, README.md"
