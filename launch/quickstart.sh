#!/usr/bin/env bash
# From a fresh machine (git, bash and apt; root or sudo) to tree-speculative decoding on two ranks:
# installs packages, builds, makes a small INT4 model and checks it, then lets the nano model speak.
#   usage: quickstart.sh        environment: KDTREE_SKIP_PACKAGES=1, KDTREE_CUDA=0 (no CUDA build)
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

kdtree=build/cpu/launch/kdtree
bundles=build/quickstart
demo=launch/demo

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

step "two ranks, the nano model: English from a prompt, as its tokens are accepted"
show_and_run "${mpirun[@]}" "$kdtree" generate --model "$demo/nano.kdtr" \
  --prompt "The system call returns" --max-new-tokens 80 --log-level warn

step "the same model a token at a time, with chains and with trees of drafts: the output stays the same"
head -n 4 "$demo/prompts.jsonl" >"$bundles/prompts.jsonl"
show_and_run "${mpirun[@]}" "$kdtree" bench acceptance --model "$demo/nano.kdtr" \
  --prompts "$bundles/prompts.jsonl" --budgets 4,16,64 --max-new-tokens 64 \
  --output "$bundles/acceptance.jsonl" --log-level warn

step "done. Next: $kdtree --help, ./launch/test.sh, README.md"
