#!/usr/bin/env bash
# The one list of the packages that the project needs, under names that Debian 12 and Ubuntu 24.04
# share. Sourced by the other scripts for install_packages; run by hand it installs the groups named.
#   usage: packages.sh [build] [run] [test] [reference] [text] [lint]
# default: build run test reference
# KDTREE_SKIP_PACKAGES=1 takes the machine as it is (no apt, no root, modules of a cluster).

packages_of() {
  case $1 in
    build)
      echo git g++ cmake ninja-build libopenmpi-dev libspdlog-dev nlohmann-json3-dev libcli11-dev \
        libxxhash-dev libtomlplusplus-dev libonig-dev
      ;;
    run) echo openmpi-bin ;;
    test) echo libgtest-dev ;;
    reference) echo python3 python3-numpy ;;
    # For a virtual environment with the packages that texts are compared with.
    text) echo python3 python3-venv ;;
    # The formatter and the linter are pinned: every version judges differently. 16 is the first
    # that knows std::source_location and that both distributions have.
    lint) echo python3 clang-format-16 clang-tidy-16 libomp-16-dev shellcheck ;;
    *)
      echo "packages.sh: no group '$1'; there are build, run, test, reference, text and lint" >&2
      return 1
      ;;
  esac
}

# install_packages GROUP...: installs what is missing; does nothing, and needs no root, if nothing
# is.
install_packages() {
  if [ "${KDTREE_SKIP_PACKAGES:-0}" = 1 ]; then
    echo "packages: left as they are (KDTREE_SKIP_PACKAGES=1)"
    return 0
  fi
  local group package list
  local -a wanted=() missing=()
  for group in "$@"; do
    list=$(packages_of "$group") || return 1
    read -r -a wanted <<<"${wanted[*]} $list"
  done
  if ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
    echo "packages: there is no apt here. Install what these Debian packages hold in another way," >&2
    echo "then set KDTREE_SKIP_PACKAGES=1: ${wanted[*]}" >&2
    return 1
  fi
  for package in "${wanted[@]}"; do
    case $(dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null) in
      installed) ;;
      *) missing+=("$package") ;;
    esac
  done
  if [ ${#missing[@]} -eq 0 ]; then
    echo "packages: all ${#wanted[@]} are there"
    return 0
  fi

  local -a as_root=(env DEBIAN_FRONTEND=noninteractive)
  if [ "$(id -u)" -ne 0 ]; then
    if ! command -v sudo >/dev/null; then
      echo "packages: missing, and neither root nor sudo to install them: ${missing[*]}" >&2
      return 1
    fi
    as_root=(sudo "${as_root[@]}")
  fi
  echo "packages: installing ${missing[*]}"
  local log
  log=$(mktemp)
  if ! {
    "${as_root[@]}" apt-get update -q &&
      "${as_root[@]}" apt-get install -q -y --no-install-recommends \
        -o DPkg::Lock::Timeout=300 "${missing[@]}"
  } >"$log" 2>&1 </dev/null; then
    tail -n 25 "$log" >&2
    echo "packages: apt failed; its whole output is in $log" >&2
    return 1
  fi
  rm -f "$log"
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
  set -euo pipefail
  if [ $# -eq 0 ]; then
    set -- build run test reference
  fi
  install_packages "$@"
fi
