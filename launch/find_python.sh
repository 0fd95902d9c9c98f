#!/usr/bin/env bash
# Prints the first python3 that can import numpy. A machine's first python3 is often one that
# cannot.
set -euo pipefail

for python in "${KDTREE_PYTHON:-}" /usr/bin/python3 python3; do
  if [ -n "$python" ] && "$python" -c 'import numpy' >/dev/null 2>&1; then
    command -v "$python"
    exit 0
  fi
done
echo "find_python.sh: no python3 with numpy (install python3-numpy, or set KDTREE_PYTHON)" >&2
exit 1
