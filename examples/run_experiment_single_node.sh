#!/usr/bin/env bash
# Train a recipe on this machine.
#
#   bash examples/run_experiment_single_node.sh <bucket>/<recipe> [key=value ...]
#
#   ENTRY=train_diffusion   the entrypoint; unset = that of the bucket, else train_diffusion
#   DRY_RUN=1               compose, check and print the plan; start nothing
#   GPUS_PER_NODE=8         sets num_devices; unset = the GPUs that are visible, and without any what the recipe says
#   VENV_DIR=.venv          the environment to use, if the checkout's own is not wanted
#   REPORT_TO_WANDB=1       mirrors the run to W&B
#
# More than one device means runtime=ray: a Ray is started here, or joined where RAY_ADDRESS says so. What is typed wins.
# PRETRAINED_MODEL, DATA_PATH, EVAL_DATA_PATH, OUTPUT_DIR, WANDB_PROJECT, WANDB_RUN_NAME and WANDB_ENTITY are read by the
# recipe itself. The exit status is the trainer's own.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

die() { printf '%s\n' "$@" >&2; exit 2; }

# The entrypoint: what ENTRY names, else that of the recipe's bucket, else train_diffusion.
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

# The last value of `key=value` among the words, or nothing.
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
  # Toy scale is for CPUs: the GPUs of the machine do not matter to it.
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
