#!/usr/bin/env bash
# Builds a preset and runs its tests (all but those that download something), from a fresh machine on.
#   usage: test.sh [cpu|cpu-asan|cuda] [CTEST ARGUMENT...]        e.g. test.sh cpu -R Shape -V
# KDTREE_EXCLUDE_LABELS: a pattern of the labels to leave out, by default network
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

preset=cpu
if [ $# -gt 0 ] && [[ $1 != -* ]]; then
  preset=$1
  shift
fi

step "packages"
install_packages build run test reference
KDTREE_PYTHON=$(launch/find_python.sh)
export KDTREE_PYTHON

step "build: preset $preset"
build_preset "$preset"

step "tests: preset $preset"
ctest --preset "$preset" --parallel "$(nproc)" \
  --label-exclude "${KDTREE_EXCLUDE_LABELS:-network}" "$@"
step "tests passed"
