#!/usr/bin/env bash
# Set everything up, then train.
#   bash run.sh                             the quick start: minutes on a CPU
#   bash run.sh RECIPE [key=value ...]      unirl train RECIPE [key=value ...]
# Relative paths are relative to this folder.
set -euo pipefail
# Let .venv keep its compiled bytecode: without it every start compiles torch and diffusers again, 4 s on two cores.
unset PYTHONDONTWRITEBYTECODE
cd "$(dirname "${BASH_SOURCE[0]}")"
bash scripts/bootstrap.sh
if [ "$#" -eq 0 ]; then set -- quickstart; else set -- train "$@"; fi
printf 'unirl: starting unirl %s (loading the libraries takes some seconds)\n' "$*" >&2
exec .venv/bin/python -m unirl.cli "$@"
