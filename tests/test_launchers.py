"""The launchers: what they run, on which role, and with which status they end. Ray and the trainer are stand-ins here,
except in the slow tests, which start real nodes."""

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.processes import is_running, process_of, wait_until
from tests.source_tree import ROOT
from tests.trainer.child import begin
from tests.trainer.child import said as said_in
from tests.trainer.killing import outcome
from unirl.config.recipe_files import list_recipes
from unirl.tracking.tables import read_rows

SINGLE = ROOT / "examples" / "run_experiment_single_node.sh"
MULTI = ROOT / "examples" / "run_experiment_multinode_taiji.sh"
SLURM = ROOT / "scripts" / "cluster" / "slurm.sbatch"
KUBERAY = ROOT / "scripts" / "cluster" / "kuberay.yaml"
TWO_NODES = ROOT / "scripts" / "two_nodes.py"
RECIPES = list_recipes((ROOT / "examples",))
LAUNCHED = ("llm/quickstart", "embodied/quickstart")
"""One whose entrypoint has the name of its folder, and one whose entrypoint has another name."""

PYTHON = """\
#!/usr/bin/env bash
if [[ "$1" == *wait_for_nodes.py ]]; then [[ -z "${SLOW_JOIN:-}" ]] || exec sleep 30; exit 0; fi
printf 'address %s\\n' "${RAY_ADDRESS:-none}"
printf '<%s>' "$@"
printf '\\n'
if [[ -n "${TRAIN_FOREVER:-}" ]]; then
  trap 'exit 75' TERM
  [[ -z "${TRAINS:-}" ]] || : >"$TRAINS"
  echo training
  while :; do sleep 0.05; done
fi
exit "${TRAIN_STATUS:-0}"
"""
"""Stands in for the trainer's Python: says what it was asked, and ends as told."""

RAY = """\
#!/usr/bin/env bash
if [[ -n "${RAY_FAILS:-}" ]]; then echo 'the port is taken'; exit 1; fi
echo "$$" >"$RAY_PID_FILE"
echo "${UNIRL_NODE_RANK:-none}" >"$RAY_PID_FILE.rank"
exec sleep 60
"""


@pytest.fixture
def venv(tmp_path):
    """A folder with blanks in its name, with stand-ins for python and ray."""
    folder = tmp_path / "a venv"
    write_command(folder / "bin" / "python", PYTHON)
    write_command(folder / "bin" / "ray", RAY)
    return folder


def write_command(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def clean_environment(**variables: str) -> dict[str, str]:
    """This process's environment without what steers a launcher; no GPU is visible."""
    steering = ("RAY_", "SLURM", "NODE_", "NUM_NODES", "HEAD_IP", "MASTER_", "GPUS_", "HOST_", "DATA_PATH", "ENTRY")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(steering)}
    return kept | {"CUDA_VISIBLE_DEVICES": ""} | variables


def launch(script: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(script), *words]
    return subprocess.run(command, env=clean_environment(**variables), capture_output=True, text=True, timeout=600)


def cluster(venv: Path, **variables: str) -> dict[str, str]:
    """The variables of the head of two nodes with four devices each."""
    return {
        "VENV_DIR": str(venv),
        "NODE_RANK": "0",
        "NUM_NODES": "2",
        "HEAD_IP": "127.0.0.1",
        "RAY_PORT": str(free_port()),
        "GPUS_PER_NODE": "4",
        "RAY_AUTH_TOKEN": "of this test",
        "RAY_PID_FILE": str(venv / "ray.pid"),
    } | variables


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


# One node ---------------------------------------------------------------------------------------------------------


def test_a_dry_run_asks_the_trainer_for_its_plan_alone_and_prints_the_command(venv):
    done = launch(SINGLE, "diffusion/one", "num_rollouts=3", VENV_DIR=str(venv), DRY_RUN="1", REPORT_TO_WANDB="1")
    assert done.returncode == 0, done.stderr
    _, asked, printed = done.stdout.splitlines()
    words = ("-m", "unirl.train_diffusion", "--config-name=diffusion/one", "tracking.mirrors=[wandb]", "num_rollouts=3")
    assert asked == "".join(f"<{word}>" for word in (*words, "--dry-run"))
    assert shlex.split(printed)[-len(words) :] == list(words)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAUNCHED)
def test_a_dry_run_prints_the_plan_and_the_command_and_starts_nothing(name, tmp_path):
    """Starts a Python that loads the libraries of the model."""
    done = launch(SINGLE, name, f"run.dir={tmp_path / 'run'}", DRY_RUN="1", REPORT_TO_WANDB="1")
    assert done.returncode == 0, done.stderr
    assert "geometry" in done.stdout and "parameters" in done.stdout
    bucket = name.split("/")[0]
    entry = {"llm": "train_vlm"}.get(bucket, f"train_{bucket}")  # one entrypoint for language models, sighted or not
    assert f"-m unirl.{entry} --config-name={name} tracking.mirrors=\\[wandb\\]" in done.stdout.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("script", [SINGLE, MULTI])
@pytest.mark.parametrize("arguments", [(), ("num_rollouts=3",), ("--help",)])
def test_a_launcher_wants_a_recipe_first(script, arguments):
    done = launch(script, *arguments)
    assert done.returncode == 2
    assert "usage:" in done.stderr


@pytest.mark.parametrize(("recipe", "entry"), [("llm/one", "vlm"), ("vlm/one", "vlm"), ("mine/one", "diffusion")])
def test_the_bucket_chooses_the_entrypoint(venv, recipe, entry):
    done = launch(SINGLE, recipe, VENV_DIR=str(venv))
    assert f"<unirl.train_{entry}><--config-name={recipe}>" in done.stdout, done.stderr


@pytest.mark.parametrize("entry", ["train_nothing", "../secrets", "train_diffusion.py"])
def test_an_unknown_entrypoint_is_answered_with_those_that_exist(entry):
    done = launch(SINGLE, "diffusion/sd3_trainside", ENTRY=entry)
    assert done.returncode == 2
    assert entry in done.stderr and "train_diffusion" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("words", "variables", "expected"),
    [
        ((), {}, []),
        ((), {"GPUS_PER_NODE": "1"}, ["num_devices=1"]),
        ((), {"GPUS_PER_NODE": "4"}, ["num_devices=4", "runtime=ray"]),
        ((), {"CUDA_VISIBLE_DEVICES": "0,3"}, ["num_devices=2", "runtime=ray"]),
        (("scale=toy",), {"CUDA_VISIBLE_DEVICES": "0,3"}, ["scale=toy"]),
        (("num_devices=2",), {"GPUS_PER_NODE": "8"}, ["runtime=ray", "num_devices=2"]),
        (("num_devices=2", "runtime=local"), {}, ["num_devices=2", "runtime=local"]),
    ],
)
def test_several_devices_mean_ray_and_what_is_typed_wins(venv, words, variables, expected):
    done = launch(SINGLE, "diffusion/sd3_trainside", *words, VENV_DIR=str(venv), **variables)
    assert done.stdout.splitlines()[1] == "".join(
        f"<{word}>" for word in ["-m", "unirl.train_diffusion", "--config-name=diffusion/sd3_trainside", *expected]
    )


def test_blanks_in_the_path_and_in_values_survive_and_the_status_is_the_trainers(venv, tmp_path):
    checkout = tmp_path / "a checkout"
    shutil.copytree(ROOT / "examples", checkout / "examples")
    shutil.copytree(ROOT / "scripts", checkout / "scripts")
    (checkout / "unirl").mkdir()
    (checkout / "unirl" / "train_diffusion.py").touch()
    (checkout / ".venv").symlink_to(venv)
    variables = {name: value for name, value in cluster(venv).items() if name != "VENV_DIR"}
    for script in (SINGLE, MULTI):
        moved = checkout / "examples" / script.name
        done = launch(moved, "diffusion/sd3_trainside", "run.name=a b", TRAIN_STATUS="75", **variables)
        assert done.returncode == 75, done.stderr
        assert "<run.name=a b>" in done.stdout


# Many nodes -------------------------------------------------------------------------------------------------------


def test_the_head_trains_on_the_devices_of_all_nodes_and_ends_its_ray(venv):
    variables = cluster(venv)
    done = launch(MULTI, "diffusion/sd3_trainside", "batch_size=16", **variables)
    assert done.returncode == 0, done.stderr
    address, words = done.stdout.splitlines()
    assert address == f"address 127.0.0.1:{variables['RAY_PORT']}"
    assert words.endswith("<num_devices=8><devices_per_node=4><runtime=ray><batch_size=16>")
    assert not is_running(int((venv / "ray.pid").read_text()))


def test_nodes_that_differ_say_their_devices_in_the_recipe_and_get_their_rank(venv):
    done = launch(MULTI, "embodied/quickstart_groups", **cluster(venv, GPUS_PER_NODE="", NODE_GROUPS="1"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1].endswith("<--config-name=embodied/quickstart_groups><runtime=ray>")
    assert (venv / "ray.pid.rank").read_text() == "0\n"


def test_a_dry_run_of_a_role_says_what_it_would_do_and_starts_nothing(venv):
    # What the TaiJi platform calls the variables.
    names = {"NODE_RANK": "INDEX", "NUM_NODES": "HOST_NUM", "HEAD_IP": "CHIEF_IP", "GPUS_PER_NODE": "HOST_GPU_NUM"}
    variables = {names.get(name, name): value for name, value in cluster(venv, RAY_PORT="6379", DRY_RUN="1").items()}
    head = launch(MULTI, "diffusion/sd3_trainside", **variables).stdout
    worker = launch(MULTI, "diffusion/sd3_trainside", **variables | {"INDEX": "1"}).stdout
    assert "start --block" in head and "--head" in head and "--include-dashboard=false" in head
    assert "--dry-run" in head and "num_devices=8" in head
    assert "--address=127.0.0.1:6379" in worker and "--head" not in worker
    assert "unirl.train" not in worker
    assert not (venv / "ray.pid").exists()


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({"NODE_RANK": ""}, "NODE_RANK"),
        ({"NODE_RANK": "2"}, "NODE_RANK=2"),
        ({"NUM_NODES": "two"}, "NUM_NODES=two"),
        ({"HEAD_IP": ""}, "HEAD_IP"),
        ({"GPUS_PER_NODE": "0"}, "GPUS_PER_NODE"),
        ({"RAY_AUTH_TOKEN": ""}, "RAY_AUTH_TOKEN"),
    ],
)
def test_a_wrong_cluster_is_refused_before_ray_starts(venv, variables, wanted):
    done = launch(MULTI, "diffusion/sd3_trainside", **cluster(venv) | variables)
    assert done.returncode == 2
    assert "error[2004]" in done.stderr and wanted in done.stderr
    assert not (venv / "ray.pid").exists()


def test_a_ray_that_does_not_start_is_said_with_its_own_words(venv):
    done = launch(MULTI, "diffusion/sd3_trainside", **cluster(venv), RAY_FAILS="1", SLOW_JOIN="1")
    assert done.returncode == 10
    assert "the port is taken" in done.stderr


def test_a_worker_without_a_head_gives_up_with_the_status_of_a_stall(venv):
    variables = cluster(venv, NODE_RANK="1", JOIN_TIMEOUT_S="0")
    done = launch(MULTI, "diffusion/sd3_trainside", **variables)
    assert done.returncode == 8
    assert f"127.0.0.1:{variables['RAY_PORT']}" in done.stderr


def test_sigterm_reaches_the_trainer_which_decides_and_ray_ends_after_it(venv):
    environment = clean_environment(**cluster(venv), TRAIN_FOREVER="1")
    command = ["bash", str(MULTI), "diffusion/sd3_trainside"]
    with process_of(command, env=environment, stdout=subprocess.PIPE) as head:
        assert head.stdout is not None
        while head.stdout.readline() != "training\n":
            assert head.poll() is None
        assert wait_until((venv / "ray.pid.rank").exists, 60)
        head.send_signal(signal.SIGTERM)
        assert head.wait(timeout=300) == 75
    assert not is_running(int((venv / "ray.pid").read_text()))


AT_THE_START = """\
set -o functrace
at_the_start() {
  [[ "$1" == 'train_pid=$!' ]] || return 0
  until [[ -e "$TRAINS" ]]; do sleep 0.02; done
  kill -TERM $$
}
trap 'at_the_start "$BASH_COMMAND"' DEBUG
"""
"""Bash reads this first (BASH_ENV). The head gets SIGTERM just before it notes the process of its trainer."""


def test_sigterm_while_the_trainer_starts_reaches_it(venv, tmp_path):
    (tmp_path / "first.sh").write_text(AT_THE_START)
    hooked = {"BASH_ENV": str(tmp_path / "first.sh"), "TRAINS": str(tmp_path / "trains")}
    done = launch(MULTI, "diffusion/sd3_trainside", **cluster(venv), TRAIN_FOREVER="1", **hooked)
    assert done.returncode == 75, done.stderr
    assert not is_running(int((venv / "ray.pid").read_text()))


# Slurm and Kubernetes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [0, 10, 75])
def test_a_slurm_job_is_queued_again_exactly_when_the_run_was_preempted(venv, tmp_path, status):
    write_command(tmp_path / "bin" / "srun", f'#!/usr/bin/env bash\nprintf "%s\\n" "$@" >"{tmp_path}/srun"\n')
    write_command(tmp_path / "bin" / "scontrol", f'#!/usr/bin/env bash\necho "$@" >"{tmp_path}/scontrol"\n')
    variables = {name: cluster(venv)[name] for name in ("VENV_DIR", "GPUS_PER_NODE", "RAY_PID_FILE")}
    slurm = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURMD_NODENAME": "n1"}
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    done = launch(SLURM, "diffusion/sd3_trainside", TRAIN_STATUS=str(status), PATH=path, **variables, **slurm)
    assert done.returncode == status, done.stderr
    assert "<num_devices=8>" in done.stdout and "<run.name=slurm-7>" in done.stdout
    assert {"--nodes=1", "--exclude=n1", str(MULTI), "diffusion/sd3_trainside"} <= set(
        (tmp_path / "srun").read_text().splitlines()
    )
    assert (tmp_path / "scontrol").exists() == (status == 75)


def test_a_slurm_job_warns_its_own_script_and_may_be_queued_again():
    directives = [line for line in SLURM.read_text().splitlines() if line.startswith("#SBATCH")]
    assert "#SBATCH --requeue" in directives
    assert any(line.startswith("#SBATCH --signal=B:TERM@") for line in directives)


def test_the_kubernetes_job_asks_for_as_many_devices_as_its_nodes_have():
    job = yaml.safe_load(KUBERAY.read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    spec, ray = job["spec"], job["spec"]["rayClusterSpec"]
    assert spec["shutdownAfterJobFinishes"] is True
    assert ray["headGroupSpec"]["serviceType"] == "ClusterIP"
    assert ray["authOptions"] == {"mode": "token"}
    groups = [(1, ray["headGroupSpec"]), *((group["replicas"], group) for group in ray["workerGroupSpecs"])]
    devices = [devices_of(group) for _, group in groups]
    words = spec["entrypoint"].split()
    assert words[2] in {recipe.name for recipe in RECIPES}
    assert f"num_devices={sum(count * each for (count, _), each in zip(groups, devices, strict=True))}" in words
    assert [f"devices_per_node={each}" in words for each in devices] == [True] * len(devices)


def devices_of(group: dict) -> int:
    (container,) = group["template"]["spec"]["containers"]
    volumes = {volume["name"] for volume in group["template"]["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    return int(container["resources"]["limits"]["nvidia.com/gpu"])


@pytest.mark.parametrize("script", [SINGLE, MULTI, SLURM], ids=lambda path: path.name)
def test_a_script_parses(script):
    assert subprocess.run(["bash", "-n", str(script)], capture_output=True).stderr == b""


# Real nodes -------------------------------------------------------------------------------------------------------

LIST_NODES = """\
import sys
import ray

ray.init(log_to_driver=False, logging_level="ERROR")
alive = lambda: sorted(node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"])
print(*alive(), flush=True)
sys.exit(7)
"""
"""Says which nodes are alive."""


def processes_of(address: str) -> str:
    """The raylets and the control service of the Ray at `address`, a line each; empty within five seconds, or not."""
    pattern = f"gcs-address={address}|gcs_server_port={address.split(':')[1]}"
    end = time.monotonic() + 5.0
    while True:
        result = subprocess.run(["pgrep", "-af", pattern], capture_output=True, text=True).stdout
        if not result or time.monotonic() > end:
            return result
        time.sleep(0.1)


@pytest.mark.slow
def test_head_and_worker_meet_train_once_and_leave_together(tmp_path):
    venv = tmp_path / "venv"
    (tmp_path / "nodes.py").write_text(LIST_NODES)
    real = f'exec "{sys.executable}"'
    write_command(
        venv / "bin" / "python",
        f'#!/usr/bin/env bash\n[[ "$1" != -m ]] || {real} "{tmp_path}/nodes.py"\n{real} "$@"\n',
    )
    (venv / "bin" / "ray").symlink_to(Path(sys.executable).with_name("ray"))
    sizes = "--num-cpus=1 --num-gpus=0 --object-store-memory=100000000"
    variables = cluster(venv, HEAD_IP="127.0.0.2", RAY_START_ARGS=sizes)
    command = ["bash", str(MULTI), "diffusion/sd3_trainside"]
    joining = clean_environment(**variables | {"NODE_RANK": "1", "NODE_IP": "127.0.0.3"})
    with process_of(command, env=joining, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as worker:
        head = launch(MULTI, *command[2:], **variables)
        printed, said = worker.communicate(timeout=600)
    assert head.returncode == 7, head.stderr
    assert head.stdout == "127.0.0.2 127.0.0.3\n"
    assert (worker.returncode, printed) == (0, "")
    assert "the head has left" in said
    assert processes_of(f"127.0.0.2:{variables['RAY_PORT']}") == ""


@pytest.mark.slow
def test_a_run_that_loses_one_of_two_nodes_goes_on_with_the_other_as_if_it_were_resumed_there(
    warm_ray_workers, tmp_path
):
    run, words = tmp_path / "run", ("scale=toy", "save_interval=1", "keep_checkpoints=0")
    train = [sys.executable, "-m", "unirl.train_diffusion", "--config-name=diffusion/sd3_trainside", *words]
    on_two = ["runtime=ray", "num_devices=2", "devices_per_node=1", "num_rollouts=8"]
    restarts = ["restarts={min_devices: 1, wait_s: 0}", f"run.dir={run}"]
    kill = ["--kill-second-when", str(run / "checkpoints" / "LATEST")]
    lost = subprocess.run(
        [sys.executable, str(TWO_NODES), *kill, "--", *train, *on_two, *restarts],
        env=clean_environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert lost.returncode == 0, lost.stderr
    *_, restart = [row for row in read_rows(run / "events.jsonl") if row["ev"] == "run.restart"]
    assert restart["num_devices"] == 1 and "host 127.0.0.3" in restart["error"]
    (step,) = {int(n) for n in re.findall(r"resumed from checkpoint-0*(\d+)", lost.stdout + lost.stderr)}
    by_hand = tmp_path / "by-hand"
    shutil.copytree(run, by_hand)
    for path in by_hand.glob("checkpoints/*"):
        if path.is_symlink() or not path.is_dir():
            path.unlink()
        elif path.name == "checkpoint-final" or int(path.name.split("-")[1]) > step:
            shutil.rmtree(path)
    more = begin("diffusion/sd3_trainside", by_hand, *words, "num_rollouts=8", "runtime=ray")
    more.join(600)
    assert more.exitcode == 0, said_in(by_hand)
    assert outcome(run, 8) == outcome(by_hand, 8)


@pytest.mark.slow
def test_a_run_on_two_nodes_names_the_node_that_left_and_continues_on_one(tmp_path):
    run = tmp_path / "run"
    recipe, words = "diffusion/sd3_trainside", ("scale=toy", "save_interval=1")
    train = [sys.executable, "-m", "unirl.train_diffusion", f"--config-name={recipe}", *words, f"run.dir={run}"]
    on_two = ["runtime=ray", "num_devices=2", "devices_per_node=1", "num_rollouts=400", "restarts.max=0"]
    kill = ["--kill-second-when", str(run / "checkpoints" / "LATEST")]
    lost = subprocess.run(
        [sys.executable, str(TWO_NODES), *kill, "--", *train, *on_two],
        env=clean_environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert lost.returncode == 10, lost.stderr
    (said,) = [line for line in lost.stderr.splitlines() if line.startswith("error[")]
    assert said.startswith("error[10001]") and "host 127.0.0.3" in said
    (address,) = re.findall(r"RAY_ADDRESS=(\S+?),", lost.stderr)
    assert processes_of(address) == ""
    steps = [int(path.name.split("-")[1]) for path in (run / "checkpoints").glob("checkpoint-0*")]
    more = begin(recipe, run, *words, f"num_rollouts={max(steps) + 1}")
    more.join(100)
    assert more.exitcode == 0, said_in(run)
    rows = (run / "metrics.csv").read_text().splitlines()[1:]
    assert [int(row.split(",")[0]) for row in rows] == list(range(1, max(steps) + 2))


@pytest.mark.slow
def test_each_group_of_a_run_is_on_its_node_with_its_environment_and_interpreter(tmp_path):
    interpreter, run = tmp_path / "python", tmp_path / "run"
    interpreter.write_text(f'#!/bin/sh\necho "$GROUP" >>{tmp_path}/started\nexec {sys.executable} "$@"\n')
    interpreter.chmod(0o755)
    words = ["embodied/quickstart_groups", "scale=toy", "runtime=ray", "num_rollouts=2", f"run.dir={run}"]
    env = [f"node_groups.env.python_interpreter_path={interpreter}", "node_groups.env.env_vars={GROUP: env}"]
    placed = subprocess.run(
        [sys.executable, str(TWO_NODES), "--", sys.executable, "-m", "unirl.cli", "train", *words, *env],
        env=clean_environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert placed.returncode == 0, placed.stderr
    assert "env" in (tmp_path / "started").read_text().split()
    assert len((run / "metrics.csv").read_text().splitlines()) == 3
