"""Ranks that torchrun started: the same contract as workers of Ray, the same bits, and an end that names its cause."""

import contextlib
import csv
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from hashlib import sha256
from multiprocessing import AuthenticationError

import pytest
import torch

from tests.processes import is_running, process_of, run_python, wait_until
from unirl.cli.main import run_command
from unirl.cli.train import parsed
from unirl.config.device_sets import DeviceSet
from unirl.config.errors import LostWorkerError, StallError, StoppedAtStart, UniRLError, WorkerError
from unirl.config.load import load
from unirl.distributed.group import torchrun, torchrun_pool
from unirl.distributed.group.dispatch import rank0, scatter
from unirl.distributed.group.handle import Remote, submit
from unirl.distributed.group.torchrun import DriverDoor, packed, torchrun_rank
from unirl.distributed.group.torchrun_pool import TorchrunPool
from unirl.distributed.group.torchrun_worker import END
from unirl.plan.preflight import preflight

TRAINSIDE = "diffusion/sd3_trainside"
STARTED = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_a_rank_is_what_torchrun_says_and_nothing_without_it():
    own = torchrun_rank(STARTED)
    assert own is not None and (own.rank, own.world_size, own.local_rank, own.local_world_size) == (1, 4, 1, 2)
    # Other launchers set RANK and WORLD_SIZE, too, for processes that start alone.
    assert torchrun_rank({name: value for name, value in STARTED.items() if name != "TORCHELASTIC_RUN_ID"}) is None


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        ({"LOCAL_RANK": ""}, 3002, "without LOCAL_RANK"),
        ({"WORLD_SIZE": "two"}, 2004, "WORLD_SIZE=two must be a whole number"),
        ({"RANK": "4"}, 2004, "RANK=4 must be below WORLD_SIZE=4"),
    ],
)
def test_variables_that_cannot_be_are_refused(change, code, says):
    with pytest.raises(UniRLError, match=re.escape(says)) as caught:
        torchrun_rank(STARTED | change)
    assert caught.value.code == code and "torchrun --nproc_per_node=N" in str(caught.value)


class Adder:
    """A role that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    @scatter(torch.cat)
    def add(self, values: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return values + self.calls

    @rank0
    def wait(self, seconds: float) -> None:
        time.sleep(seconds)

    @scatter(torch.cat)
    def fail(self, values: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("seven")


@pytest.fixture
def pool(monkeypatch):
    """The pool of a torchrun with one rank, which is this process."""
    here = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": free_port()}
    for name, value in (STARTED | here).items():
        monkeypatch.setenv(name, value)
    found = TorchrunPool(1, deadline_s=60.0)
    yield found
    found.close()


def test_calls_reach_the_worker_in_order_and_its_error_names_it(pool):
    adder = pool.group(DeviceSet("device", (0,))).place(Remote("adder", lambda siblings: Adder()))
    assert [adder.add(torch.zeros(2)).tolist() for _ in range(3)] == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]
    with pytest.raises(WorkerError, match=r"adder.fail failed on the worker on device 0 \(host .*\): Arith.*seven"):
        adder.fail(torch.zeros(1))
    assert pool.memory() and pool.status()


def test_a_call_without_progress_and_a_rank_that_is_gone_are_named(pool, monkeypatch):
    lost: list[str] = []
    monkeypatch.setattr(torchrun_pool, "LOST", lost)
    adder = pool.group(DeviceSet("device", (0,))).place(Remote("adder", lambda siblings: Adder()))
    with pytest.raises(StallError, match=r"adder.wait made no progress for 0.3 s on rank 0, the worker on device 0"):
        submit(adder.wait, 1.2).result(0.3)
    (link,) = pool.links
    link.calls.send_bytes(END)  # its worker ends, and the driver does not expect it
    assert wait_until(lambda: link.is_gone, 30)
    assert lost == [f"rank 0, {link}"]
    with pytest.raises(LostWorkerError, match=r"rank 0, the worker on device 0 .* died while adder.add ran"):
        adder.add(torch.zeros(1))


def test_a_stranger_without_the_secret_is_not_let_in():
    own = torchrun_rank(STARTED | {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": free_port()})
    assert own is not None
    door = DriverDoor(own)
    with pytest.raises(AuthenticationError):
        replace(door.address, key=bytes(32)).connect()
    with closing(door.address.connect()) as known:
        known.send_bytes(packed((0, "calls", ("127.0.0.1", 7))))
        assert door.wait_for(0, "calls", time.monotonic() + 30)[1] == ("127.0.0.1", 7)
    with pytest.raises(UniRLError, match=r"1 of 1 ranks of torchrun have not reached the driver at .* in time: 0"):
        door.wait_for(0, "questions", time.monotonic() + 0.1)
    door.close()


@pytest.mark.parametrize(
    ("recipe", "words", "code", "says"),
    [
        (TRAINSIDE, ["num_devices=5"], 2010, "num_devices"),
        ("diffusion/sd3_replica_lora_separate", ["num_devices=8"], 2020, "which need workers of Ray"),
        (TRAINSIDE, ["num_devices=2", "+placement.reward=cpu"], 2020, "beside those of torchrun"),
        (TRAINSIDE, ["num_devices=2", "node_groups={a: {nodes: 0-1}}"], 2020, "nodes of a Ray cluster"),
        (TRAINSIDE, ["num_devices=2", "+transfer_queue=simple"], 2020, "runtime=torchrun has none"),
    ],
)
def test_a_recipe_that_needs_more_than_the_ranks_is_refused(recipe, words, code, says):
    with pytest.raises(UniRLError, match=re.escape(says)) as caught:
        preflight(load(recipe, ["runtime=torchrun", "scale=full", *words]))
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("word", "says"), [("num_devices=3", "WORLD_SIZE=1 processes"), ("runtime=ray", "Leave runtime out")]
)
def test_settings_against_torchrun_are_refused(monkeypatch, capsys, word, says):
    here = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_PORT": free_port()}
    for name, value in (STARTED | here).items():
        monkeypatch.setenv(name, value)
    assert run_command(parsed(lambda *_: None), [TRAINSIDE, word]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("lost", ["", "rank 1, the worker on device 1 (host h, pid 7)"])
def test_a_stop_by_torchrun_after_the_end_of_a_rank_names_this_rank(monkeypatch, capsys, lost):
    here = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_PORT": free_port()}
    for name, value in (STARTED | here).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torchrun, "LOST", [lost] if lost else [])

    def stopped(*_: object) -> None:
        raise StoppedAtStart("SIGTERM")

    assert run_command(parsed(stopped), [TRAINSIDE]) == (10 if lost else 75)
    assert (f"error[10001]: {lost} died" if lost else "stopped while no step") in capsys.readouterr().err


def under_torchrun(*words: str) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master-port={free_port()}"]
    return [*launcher, "-m", "unirl.train_diffusion", f"--config-name={TRAINSIDE}", "scale=toy", *words]


@pytest.mark.slow
def test_two_ranks_give_the_bits_of_two_workers_of_ray(warm_ray_workers, tmp_path):
    words = ["num_rollouts=2", "evaluation.eval_steps=0"]
    one_thread = {"OMP_NUM_THREADS": "1"}
    ranks = under_torchrun(*words, f"run.dir={tmp_path / 'torchrun'}")
    done = subprocess.run(ranks, env=os.environ | one_thread, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    workers = ["-m", "unirl.train_diffusion", f"--config-name={TRAINSIDE}", "scale=toy", "num_devices=2"]
    status, output = run_python([*workers, *words, f"run.dir={tmp_path / 'ray'}"], tmp_path, one_thread)
    assert status == 0, output
    weights = [
        {
            path.name: sha256(path.read_bytes()).hexdigest()
            for path in (tmp_path / name / "checkpoints" / "checkpoint-000002" / "policy").iterdir()
        }
        for name in ("torchrun", "ray")
    ]
    assert weights[0] == weights[1] and len(weights[0]) == 5
    rewards = [
        [
            row["rollout/reward_mean"]
            for row in csv.DictReader((tmp_path / name / "metrics.csv").read_text().splitlines())
        ]
        for name in ("torchrun", "ray")
    ]
    assert rewards[0] == rewards[1]


def rank_of(pid: int) -> str:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as environment:
        return dict(word.partition("=")[::2] for word in environment.read().decode().split("\0")).get("RANK", "")
    return ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "says"),
    [
        (1, "error[10001]: rank 1, the worker on device 1"),
        (0, "error[10001]: the worker on device 1 (host 127.0.0.1"),
    ],
)
def test_a_rank_that_is_killed_ends_the_others_within_seconds(tmp_path, victim, says):
    words = ["num_rollouts=100000", "save_interval=1", "evaluation.eval_steps=0", f"run.dir={tmp_path / 'run'}"]
    with process_of(under_torchrun(*words), stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as run:
        saved = tmp_path / "run" / "checkpoints" / "LATEST"
        assert wait_until(lambda: run.poll() is not None or saved.exists(), 600) and run.poll() is None
        children = subprocess.run(["pgrep", "-P", str(run.pid)], capture_output=True, text=True).stdout.split()
        ranks = {rank_of(int(pid)): int(pid) for pid in children}
        os.kill(ranks[str(victim)], signal.SIGKILL)
        killed = time.monotonic()
        output, _ = run.communicate(timeout=60)
    assert time.monotonic() - killed < 20
    assert run.returncode and says in output
    assert not any(is_running(pid) for pid in ranks.values())
