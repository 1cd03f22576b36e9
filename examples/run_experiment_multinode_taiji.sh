#!/usr/bin/env bash
# Trains a recipe on several nodes. Run the same command on every node, with checkout and data at the same paths:
#
#   bash examples/run_experiment_multinode_taiji.sh <bucket>/<recipe> [key=value ...]
#
# The head starts Ray, waits for all nodes, trains, and stops Ray. The other nodes join, and stop when the head stops.
# The TaiJi platform sets the variables in brackets:
#
#   NODE_RANK      [INDEX]         0 is the head, other nodes join it
#   NUM_NODES      [HOST_NUM]      number of nodes
#   HEAD_IP        [CHIEF_IP]      the head's address (MASTER_ADDR is read as well)
#   NODE_IP        [LOCAL_IP]      this node's address; unset = Ray finds it
#   GPUS_PER_NODE  [HOST_GPU_NUM]  devices of each node; unset = the GPUs that nvidia-smi lists
#   RAY_AUTH_TOKEN                 one secret for all nodes (or RAY_AUTH_TOKEN_PATH). It allows to run code here.
#                                  RAY_AUTH_MODE=disabled needs none, for trusted networks only
#   NODE_GROUPS=1                  the recipe has node_groups, which say the devices of every node (GPUS_PER_NODE is unused)
#   RAY_PORT=6379   JOIN_TIMEOUT_S=600   RAY_START_ARGS="--num-cpus=8"   (more options of `ray start`)
#
# ENTRY, VENV_DIR and REPORT_TO_WANDB work as in run_experiment_single_node.sh. DRY_RUN=1 prints what this node does
# and checks the recipe on the head. The exit status of the head is that of the trainer, or 8 if nodes joined too late.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="$(dirname "$here")"

say() { printf 'unirl node %s: %s\n' "${rank:-?}" "$*" >&2; }
die() { printf '%s\n' "$@" >&2; exit 2; }
dry() { [[ "${DRY_RUN:-0}" != 0 ]]; }

if [[ $# -lt 1 || "$1" == -* || "$1" == *=* ]]; then
  die "usage: bash examples/run_experiment_multinode_taiji.sh <bucket>/<recipe> [key=value ...]   (on every node)"
fi

rank="${NODE_RANK:-${INDEX:-}}"
num_nodes="${NUM_NODES:-${HOST_NUM:-}}"
head_ip="${HEAD_IP:-${CHIEF_IP:-${MASTER_ADDR:-}}}"
node_ip="${NODE_IP:-${LOCAL_IP:-}}"
port="${RAY_PORT:-6379}"
join_timeout_s="${JOIN_TIMEOUT_S:-600}"
devices="${GPUS_PER_NODE:-${HOST_GPU_NUM:-$({ nvidia-smi -L 2>/dev/null || true; } | grep -c '^GPU' || true)}}"

whole() { [[ "$1" =~ ^[0-9]+$ ]]; }
whole "$rank" || die "error[2004]: NODE_RANK=$rank is not the number of this node: set NODE_RANK (or INDEX) to 0, 1, ..."
whole "$num_nodes" || die "error[2004]: NUM_NODES=$num_nodes is not a number of nodes: set NUM_NODES (or HOST_NUM)"
((rank < num_nodes)) || die "error[2004]: NODE_RANK=$rank: with NUM_NODES=$num_nodes the last one is $((num_nodes - 1))"
[[ -n "$head_ip" ]] || die "error[2004]: set HEAD_IP (or CHIEF_IP, MASTER_ADDR) to the address of the node with NODE_RANK=0"
groups() { [[ "${NODE_GROUPS:-0}" != 0 ]]; }
groups || { whole "$devices" && ((devices > 0)); } \
  || die "error[2004]: this node shows no GPU: set GPUS_PER_NODE (or HOST_GPU_NUM) to its number of devices"
if [[ -z "${RAY_AUTH_MODE:-}" ]]; then
  [[ -n "${RAY_AUTH_TOKEN:-}${RAY_AUTH_TOKEN_PATH:-}" ]] || die \
    "error[2004]: who reaches Ray's port can run code on every node, and no secret is set." \
    "  Set RAY_AUTH_TOKEN to one secret on all nodes (openssl rand -hex 32), or RAY_AUTH_MODE=disabled on a trusted network"
  export RAY_AUTH_MODE=token
fi

bin="${VENV_DIR:-$root/.venv}/bin"
address="$head_ip:$port"
# Ray starts workers with a niceness of 15, which starves them wherever other processes use the cores.
export RAY_worker_niceness="${RAY_worker_niceness:-0}"
read -ra more <<<"${RAY_START_ARGS:-}"
start=("$bin/ray" start --block --disable-usage-stats ${more[@]+"${more[@]}"})
if ((rank == 0)); then
  start+=(--head "--port=$port" "--node-ip-address=${node_ip:-$head_ip}" --include-dashboard=false)
else
  start+=("--address=$address")
  [[ -z "$node_ip" ]] || start+=("--node-ip-address=$node_ip")
fi
# This script stops only the Ray that it started. `ray stop` would stop every Ray on this machine.
wait_for_nodes=("$bin/python" "$root/scripts/wait_for_nodes.py" "$num_nodes" "$join_timeout_s")
recipe="$1"
shift
sizes=()
groups || sizes=("num_devices=$((num_nodes * devices))" "devices_per_node=$devices")
train=(bash "$here/run_experiment_single_node.sh" "$recipe" ${sizes[@]+"${sizes[@]}"} runtime=ray "$@")
# Groups of nodes name nodes by this rank, which Ray's processes inherit.
export UNIRL_NODE_RANK="$rank"

show() { printf 'would run:'; printf ' %q' "$@"; printf '\n'; }

if dry; then
  printf 'node %s of %s, %s\n' "$rank" "$num_nodes" "$( ((rank == 0)) && echo 'the head' || echo "joins $address")"
  show "${start[@]}"
  ((rank == 0)) || exit 0
  show env "RAY_ADDRESS=$address" "${wait_for_nodes[@]}"
  exec env "RAY_ADDRESS=$address" "${train[@]}"
fi

ray_pid="" train_pid="" early="" log=""

# Starts a job in its own process group, so that signals to the group of this script (Ctrl-C) do not reach it.
in_own_group() {
  set -m
  "$@" </dev/null &
  set +m
}

# Stops the Ray that was started here by SIGTERM, then by SIGKILL, with all processes of the trainer on this node.
stop_ray() {
  local tick
  [[ -n "$ray_pid" ]] || return 0
  kill -TERM "$ray_pid" 2>/dev/null || true
  for ((tick = 0; tick < 100; tick++)); do
    kill -0 "$ray_pid" 2>/dev/null || break
    sleep 0.1
  done
  kill -KILL -- "-$ray_pid" 2>/dev/null || true
  wait "$ray_pid" 2>/dev/null || true
  ray_pid=""
}

leave() {
  stop_ray
  [[ -z "$log" ]] || rm -f "$log"
}

start_ray() {
  log="$(mktemp)"
  trap leave EXIT
  # A node is stopped after the trainer, so it does not have to wait for tasks.
  export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0
  # Ray declares a node dead that has not answered for about 12 s (Ray's default: a minute).
  export RAY_health_check_period_ms=1000 RAY_health_check_timeout_ms=2000 RAY_health_check_failure_threshold=4
  in_own_group "${start[@]}" >"$log" 2>&1
  ray_pid=$!
}

# Waits for a job, also if signals interrupt the wait, and returns its exit status.
outlast() {
  local status
  while :; do
    status=0
    wait "$1" || status=$?
    kill -0 "$1" 2>/dev/null || return "$status"
  done
}

# Passes a signal on to the trainer, or keeps it until the trainer has started.
forward() {
  if [[ -n "$train_pid" ]]; then kill "-$1" "$train_pid" 2>/dev/null || true; else early="$1"; fi
}

run_head() {
  local status=0 joined_pid
  start_ray
  export RAY_ADDRESS="$address"
  "${wait_for_nodes[@]}" &
  joined_pid=$!
  trap 'kill -TERM "$joined_pid" 2>/dev/null; exit 143' TERM INT USR1
  wait -n "$ray_pid" "$joined_pid" || status=$?
  if ! kill -0 "$ray_pid" 2>/dev/null; then
    kill -TERM "$joined_pid" 2>/dev/null || true
    say "Ray did not start:"
    tail -n 20 "$log" >&2
    return 10
  fi
  ((status == 0)) || return "$status"
  trap 'forward TERM' TERM
  trap 'forward INT' INT
  trap 'forward USR1' USR1
  in_own_group "${train[@]}"
  train_pid=$!
  [[ -z "$early" ]] || forward "$early"
  outlast "$train_pid"
}

head_answers() { timeout 5 bash -c ': <"/dev/tcp/$1/$2"' _ "$head_ip" "$port" 2>/dev/null; }

run_worker() {
  local deadline=$((SECONDS + join_timeout_s))
  until head_answers; do
    ((SECONDS < deadline)) || { say "error[8001]: no head at $address within $join_timeout_s s"; return 8; }
    sleep 1
  done
  trap 'exit 143' TERM INT
  start_ray
  say "joining $address"
  # Ray itself would wait for a lost head for a minute.
  local misses=0
  while ((misses < 3)); do
    sleep 3
    if head_answers; then misses=0; else misses=$((misses + 1)); fi
    if ((misses == 0)) && ! kill -0 "$ray_pid" 2>/dev/null; then
      say "this node's Ray ended before the head's:"
      tail -n 20 "$log" >&2
      return 10
    fi
  done
  say "the head has left"
}

status=0
if ((rank == 0)); then run_head || status=$?; else run_worker || status=$?; fi
exit "$status"
