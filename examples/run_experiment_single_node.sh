#!/usr/bin/env bash
# Trains a recipe on this machine.
#
#   bash examples/run_experiment_single_node.sh <bucket>/<recipe> [key=value ...]
#
#   ENTRY=train_diffusion   the entrypoint (default: that of the bucket, otherwise train_diffusion)
#   DRY_RUN=1               composes and checks the recipe and prints the plan, but starts nothing
#   GPUS_PER_NODE=8         sets num_devices (default: the number of visible GPUs; without GPUs, that of the recipe)
#   VENV_DIR=.venv          the virtual environment to use (default: that of the checkout)
#   REPORT_TO_WANDB=1       mirrors the run to W&B
#
# More than one device sets runtime=ray: Ray is started here, or joined at RAY_ADDRESS. Your settings have priority.
# PRETRAINED_MODEL, DATA_PATH, EVAL_DATA_PATH, OUTPUT_DIR, WANDB_PROJECT, WANDB_RUN_NAME and WANDB_ENTITY are read by the
# recipe. The exit status is that of the trainer.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

die() { printf '%s\n' "$@" >&2; exit 2; }

# Prints the entrypoint: ENTRY, otherwise that of the recipe's bucket, otherwise train_diffusion.
entrypoint() {
  local bucket="${1%%/*}"
  if [[ "$bucket" == llm ]]; then bucket=vlm; fi  # one entrypoint trains both
  local entry="${ENTRY:-train_$bucket}"
  if [[ -z "${ENTRY:-}" && ! -f "$root/unirl/$entry.py" ]]; then entry=train_diffusion; fi
  if [[ ! "$entry" =~ ^train_[a-z_]+$ || ! -f "$root/unirl/$entry.py" ]]; then
    local there
    there="$(cd "$root/unirl" && printf '%s ' train_*.py)"
    die "error[2001]: ENTRY=$entry: no such entrypoint. There is: ${there//.py/}"
  fi
  printf '%s' "$entry"
}

# Prints the last value of a key in arguments `key=value`, or nothing.
typed() {
  local key="$1" word value=""
  shift
  for word in "$@"; do
    if [[ "$word" == "$key="* ]]; then value="${word#*=}"; fi
  done
  printf '%s' "$value"
}

visible_gpus() {
  if [[ -n "${CUDA_VISIBLE_DEVICES+set}" ]]; then
    tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c '[^[:space:]]' || true
  else
    { nvidia-smi -L 2>/dev/null || true; } | grep -c '^GPU' || true
  fi
}

if [[ $# -lt 1 || "$1" == -* || "$1" == *=* ]]; then
  die "usage: bash examples/run_experiment_single_node.sh <bucket>/<recipe> [key=value ...]" "recipes: unirl recipes"
fi
recipe="$1"
shift
entry="$(entrypoint "$recipe")"

python="${VENV_DIR:-$root/.venv}/bin/python"
[[ -x "$python" ]] || python="python3"

overrides=()
devices="$(typed num_devices "$@")"
if [[ -z "$devices" ]]; then
  devices="${GPUS_PER_NODE:-}"
  # The toy scale runs on CPUs and does not use the GPUs of the machine.
  if [[ -z "$devices" && "$(typed scale "$@")" != toy ]]; then devices="$(visible_gpus)"; fi
  if [[ "${devices:-0}" != 0 ]]; then overrides+=("num_devices=$devices"); fi
fi
if [[ "$devices" =~ ^[0-9]+$ ]] && ((devices > 1)) && [[ -z "$(typed runtime "$@")" ]]; then
  overrides+=("runtime=ray")
fi
case "${REPORT_TO_WANDB:-0}" in
  1 | true | True | yes) overrides+=("tracking.mirrors=[wandb]") ;;
esac

command=("$python" -m "unirl.$entry" "--config-name=$recipe" ${overrides[@]+"${overrides[@]}"} "$@")
if [[ "${DRY_RUN:-0}" != 0 ]]; then
  "${command[@]}" --dry-run
  printf 'would run:'
  printf ' %q' "${command[@]}"
  printf '\n'
  exit 0
fi
exec "${command[@]}"
