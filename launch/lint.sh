#!/usr/bin/env bash
# The formatter, the linter and the rules of the layout, the same here and in CI; cheap checks first.
#   usage: lint.sh [--check | --fix] [--changed] [--without-tidy | --only-tidy]
#   --check         report and fail (default)      --fix         mend what can be mended, then report
#   --changed       clang-tidy only on what differs from the last commit and on its includers, file
#                   by file; otherwise on the batches of a unity build, which is four times as fast
#   --without-tidy  leave clang-tidy out (seconds) --only-tidy   run nothing else (minutes)
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

clang_format=clang-format-16
clang_tidy=clang-tidy-16
max_lines=500

fix=0 changed=0 tidy=1 rest=1
for argument in "$@"; do
  case $argument in
    --check) fix=0 ;;
    --fix) fix=1 ;;
    --changed) changed=1 ;;
    --without-tidy) tidy=0 ;;
    --only-tidy) rest=0 ;;
    *)
      sed -n '2,/^source/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" >&2
      exit 2
      ;;
  esac
done

failures=()

# try NAME COMMAND...: notes a failure and goes on, so that one run shows everything.
try() {
  local name=$1
  shift
  if "$@"; then
    echo "ok      $name"
  else
    echo "FAILED  $name"
    failures+=("$name")
  fi
}

# list_files PATTERN...: files of the project (new ones too) that match, without those of test data.
list_files() {
  git ls-files --cached --others --exclude-standard --deduplicate -- "$@" | while read -r file; do
    if [ -f "$file" ] && [[ $file != tests/data/* ]]; then
      echo "$file"
    fi
  done
}

check_lengths() {
  local file lines status=0
  while read -r file; do
    case $file in
      kernels/cpu/* | kernels/cuda/*) continue ;; # a kernel body may be longer
    esac
    lines=$(wc -l <"$file")
    if [ "$lines" -gt "$max_lines" ]; then
      echo "$file: $lines lines, the limit is $max_lines"
      status=1
    fi
  done < <(list_files '*.h' '*.cpp' '*.cu' '*.cuh' '*.py' '*.sh' '*CMakeLists.txt')
  return $status
}

check_bash_syntax() {
  local file status=0
  for file in "${shell_files[@]}"; do
    bash -n "$file" || status=1
  done
  return $status
}

format() {
  if [ $fix = 1 ]; then
    "$clang_format" -i "${cxx_files[@]}"
  else
    "$clang_format" --dry-run --Werror --ferror-limit=3 "${cxx_files[@]}"
  fi
}

# The changed sources and those that include a changed header.
list_tidy_sources() {
  local -a files=()
  mapfile -t files < <(
    git diff --name-only --relative --diff-filter=d HEAD -- '*.h' '*.cpp'
    git ls-files --others --exclude-standard -- '*.h' '*.cpp'
  )
  local file
  for file in "${files[@]}"; do
    case $file in
      *.cpp) echo "$file" ;;
      *.h) list_files '*.cpp' | xargs -r grep -l -F "#include \"${file#src/}\"" || true ;;
    esac
  done | sort -u
}

# What to lint, one a line: sources or, for all of them, batches of sources.
list_tidy_files() {
  if [ $changed = 1 ]; then
    # Only what this configuration compiles: the sources of the CUDA build have no command here.
    list_tidy_sources | while read -r file; do
      if grep -q -F "\"file\": \"$PWD/$file\"" build/cpu/compile_commands.json; then
        echo "$file"
      fi
    done
  else
    sed -n 's/^ *"file": "\(.*\)",\?$/\1/p' build/tidy/compile_commands.json
  fi
}

run_tidy() {
  local preset=tidy
  if [ $changed = 1 ]; then
    preset=cpu
  fi
  cmake --preset "$preset" >/dev/null || return 1
  if [ $preset = tidy ]; then
    # Settings of a folder are looked for beside the file, which is a batch; a source that is generated.
    cp tests/.clang-tidy build/tidy/tests/ || return 1
    cmake --build build/tidy --target kdtree_build_info >/dev/null || return 1
  fi
  local files
  files=$(list_tidy_files)
  if [ -z "$files" ]; then
    return 0
  fi
  local -a mode=()
  if [ $preset = tidy ]; then
    mode+=(--checks=-bugprone-suspicious-include) # of the batches themselves
  fi
  # Fixes of one header must not be written by two processes at once.
  local jobs
  jobs=$(nproc)
  if [ $fix = 1 ]; then
    mode+=(--fix --format-style=file)
    jobs=1
  fi
  # The commands are GCC's: clang does not know all of its warnings.
  echo "$files" | xargs -P "$jobs" -n 1 "$clang_tidy" -p "build/$preset" --quiet "${mode[@]}" \
    --extra-arg=-Wno-unknown-warning-option --extra-arg=-Wno-error 2> >(grep -v 'warnings\? generated' >&2)
}

install_packages build test reference lint
python=$(launch/find_python.sh)

mapfile -t cxx_files < <(list_files '*.h' '*.cpp' '*.cu' '*.cuh')
mapfile -t shell_files < <(list_files '*.sh' '*.sbatch' '.ci/run')

if [ $rest = 1 ]; then
  try "layers" "$python" tests/lint/check_layers.py
  try "layers self-test" "$python" tests/lint/check_layers.py --self-test
  try "file lengths" check_lengths
  try "bash syntax" check_bash_syntax
  if command -v shellcheck >/dev/null; then
    try "shellcheck" shellcheck -x --source-path=SCRIPTDIR \
      --severity=warning "${shell_files[@]}"
  else
    echo "skipped shellcheck (not installed)"
  fi
fi
if [ $tidy = 1 ]; then
  try "clang-tidy" run_tidy
fi
if [ $rest = 1 ] && [ ${#cxx_files[@]} -gt 0 ]; then
  try "clang-format" format
fi

if [ ${#failures[@]} -gt 0 ]; then
  echo "lint: ${#failures[@]} failed: ${failures[*]}"
  exit 1
fi
echo "lint: all passed"
