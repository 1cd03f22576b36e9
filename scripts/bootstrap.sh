#!/usr/bin/env bash
# Creates .venv and installs the packages. run.sh and test.sh call this script first. It needs no sudo, and outside the
# checkout it changes only the caches of pip and uv. It writes .venv/.unirl-stamp at the end, so an interrupted
# installation starts again at the next call.
#   UNIRL_PYTHON        the Python to use (3.11 to 3.13); by default python3, python3.13, ... are tried
#   UNIRL_TORCH_INDEX   a package index for torch, which is used before those in pip's configuration
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
venv="$root/.venv"
stamp_file="$venv/.unirl-stamp"
needed_mib=3072

say() { printf 'unirl set-up: %s\n' "$*" >&2; }
# The exit status is the first digit of the code: 3 = a program or package is missing, 5 = not enough disk space.
fail() { printf 'error[%s]: %s\n' "$1" "$2" >&2; exit "${1%???}"; }

ticker=""
# Says every second that `what` goes on, until stop_ticking, or until this script is gone. pip and uv are quiet.
tick() {
  local what="$1"
  { while sleep 1 >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do say "$what ($SECONDS s)"; done; } 9>&- &
  ticker=$!
}
stop_ticking() {
  [ -n "$ticker" ] || return 0
  kill "$ticker" 2>/dev/null || true
  wait "$ticker" 2>/dev/null || true
  ticker=""
}

wanted_stamp() {
  cat "$root/pyproject.toml" "$root/unirl-reward-service/pyproject.toml" "$root/constraints.txt" \
    "$root/scripts/bootstrap.sh" | cksum
  printf '%s\n' "$root"
}

supported() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1; }

find_python() {
  local name tried=""
  for name in ${UNIRL_PYTHON:+"$UNIRL_PYTHON"} python3 python3.13 python3.12 python3.11 python; do
    command -v "$name" >/dev/null 2>&1 || continue
    if supported "$name"; then command -v "$name"; return; fi
    tried="$tried $name ($("$name" --version 2>&1 | head -n 1 || true))"
  done
  if command -v uv >/dev/null 2>&1; then echo uv; return; fi
  fail 3001 "no Python from 3.11 to 3.13 was found (tried:${tried:- nothing answers to python3}).
  Install one (Debian, Ubuntu: apt install python3 python3-venv; macOS: brew install python@3.13), or name it:
  UNIRL_PYTHON=/path/to/python3.12 bash run.sh"
}

check_disk() {
  local free_mib
  free_mib="$(df -Pk "$root" | awk 'NR == 2 { print int($4 / 1024) }')"
  [ "$free_mib" -ge "$needed_mib" ] || fail 5001 "the disk of $root has $free_mib MiB free; set-up needs $needed_mib MiB
  (more where torch comes with CUDA). Free some space, or move the checkout to a larger disk."
}

make_venv() {
  local python="$1"
  say "creating .venv with $python"
  if [ "$python" = uv ]; then
    uv venv --quiet --clear --seed --python 3.12 "$venv"
  elif "$python" -c 'import venv, ensurepip' >/dev/null 2>&1; then
    "$python" -m venv --clear "$venv"
  elif command -v uv >/dev/null 2>&1; then
    uv venv --quiet --clear --seed --python "$python" "$venv"
  else
    fail 3001 "$python has no venv module. Install it (Debian, Ubuntu: apt install python3-venv), then run this again."
  fi
}

pip_setting() { "$venv/bin/python" -m pip config get "global.$1" 2>/dev/null || true; }

# uv does not read pip's configuration, so this function passes the user's package indices to it.
share_pip_settings() {
  export UV_FIND_LINKS="${UV_FIND_LINKS:-${PIP_FIND_LINKS:-$(pip_setting find-links)}}"
  local index="${PIP_INDEX_URL:-$(pip_setting index-url)}" cert="${PIP_CERT:-$(pip_setting cert)}"
  [ -n "$UV_FIND_LINKS" ] || unset UV_FIND_LINKS
  [ -z "$index" ] || export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$index}"
  [ -z "$cert" ] || export SSL_CERT_FILE="${SSL_CERT_FILE:-$cert}"
}

install_with_uv() {
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check uv || return 1
  share_pip_settings
  "$venv/bin/python" -m uv pip install --quiet --python "$venv/bin/python" -c constraints.txt \
    -e '.[dev]' -e './unirl-reward-service[dev]'
}

install_with_pip() {
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt \
    -e '.[dev]' -e './unirl-reward-service[dev]'
}

install_packages() {
  say "installing packages (a minute or two; several GB where torch comes with CUDA)"
  if [ -n "${UNIRL_TORCH_INDEX:-}" ]; then
    "$venv/bin/python" -m pip install --quiet --index-url "$UNIRL_TORCH_INDEX" -c constraints.txt torch \
      || fail 3001 "no torch that constraints.txt allows was found at UNIRL_TORCH_INDEX=$UNIRL_TORCH_INDEX"
  fi
  install_with_uv && return
  say "uv could not install the packages; trying pip"
  install_with_pip || fail 3001 "the packages could not be installed; see pip's message above.
  Behind a mirror: pip config set global.index-url URL.   Without a network: PIP_FIND_LINKS=/folder/of/wheels PIP_NO_INDEX=1"
}

main() {
  local stamp python
  stamp="$(wanted_stamp)"
  if [ -x "$venv/bin/python" ] && [ "$(cat "$stamp_file" 2>/dev/null)" = "$stamp" ]; then return; fi
  trap 'exit 130' INT
  trap 'exit 143' TERM
  trap stop_ticking EXIT
  cd "$root"
  # Two set-ups at the same time would disturb each other, so the second one waits for the first.
  if command -v flock >/dev/null 2>&1; then
    exec 9<"$root/scripts/bootstrap.sh"
    flock -n 9 || { say "waiting for another set-up of this checkout"; flock 9; }
    if [ -x "$venv/bin/python" ] && [ "$(cat "$stamp_file" 2>/dev/null)" = "$stamp" ]; then return; fi
  fi
  check_disk
  # A moved checkout or a broken .venv needs a new .venv. A changed pyproject.toml only needs the missing packages.
  if ! [ -x "$venv/bin/python" ] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1 \
    || [ "$(tail -n 1 "$stamp_file" 2>/dev/null)" != "$root" ]; then
    python="$(find_python)"
    tick "creating .venv"
    make_venv "$python"
    stop_ticking
  fi
  rm -f "$stamp_file"
  tick "installing packages"
  install_packages
  stop_ticking
  printf '%s\n' "$stamp" >"$stamp_file"
  say "ready after $SECONDS s"
}

main "$@"
