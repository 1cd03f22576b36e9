#!/usr/bin/env bash
# Train a recipe on this machine.
#
#   bash examples/run_experiment_single_node.sh diffusion/sd3_trainside [key=value ...]
#
#   ENTRY=train_diffusion   which entrypoint: train_diffusion, or train_<the recipe's own domain> by default
#   DRY_RUN=1               print the composed recipe and the command, train nothing
#   GPUS_PER_NODE=8         sets num_devices; unset = what the recipe says
#   VENV_DIR=.venv          the environment to use, if the checkout's own is not wanted
#
# PRETRAINED_MODEL, DATA_PATH, EVAL_DATA_PATH, OUTPUT_DIR, WANDB_PROJECT, WANDB_RUN_NAME and WANDB_ENTITY are read by the
# recipe itself. REPORT_TO_WANDB=1 mirrors the run to W&B.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

if [[ $# -lt 1 || "$1" == -* || "$1" == *=* ]]; then
  echo "usage: bash examples/run_experiment_single_node.sh <domain>/<recipe> [key=value ...]" >&2
  echo "recipes: unirl recipes" >&2
  exit 2
fi
recipe="$1"
shift

python="${VENV_DIR:-$root/.venv}/bin/python"
[[ -x "$python" ]] || python="python3"

domain="${recipe%%/*}"
entry="${ENTRY:-train_$domain}"

overrides=()
[[ -n "${GPUS_PER_NODE:-}" ]] && overrides+=("num_devices=$GPUS_PER_NODE")
case "${REPORT_TO_WANDB:-0}" in
  1 | true | True | yes) overrides+=("tracking.mirrors=[wandb]") ;;
esac
# What is typed comes last, so that it wins.
overrides+=("$@")

command=("$python" -m "unirl.$entry" "--config-name=$recipe" ${overrides[@]+"${overrides[@]}"})

if [[ "${DRY_RUN:-0}" != 0 ]]; then
  "${command[@]}" --cfg job --resolve
  printf '# would run:'
  printf ' %q' "${command[@]}"
  printf '\n'
  exit 0
fi
exec "${command[@]}"
