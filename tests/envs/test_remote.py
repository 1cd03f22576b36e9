"""Environments of a server are those of this process, bit for bit, and a server that fails is a fault of its slots."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from unirl.config.errors import (
    AddressError,
    EpisodeError,
    ExposedServerError,
    InvalidValueError,
    UnsupportedEnvironmentError,
)
from unirl.envs.gymnasium import GymnasiumEnvironment
from unirl.envs.remote import RemoteEnvironment
from unirl.envs.serve import main, open_server
from unirl.testing import check_environment
from unirl.testing.environment import play, same
from unirl.types.environments import EpisodeStart

FAULTY = "unirl.testing.toy_environments:Faulty-v0"
SECRET = "a-long-random-token"


class Served:
    """A server in a process group of its own."""

    def __init__(self, port: int, *words: str) -> None:
        command = [sys.executable, "-m", "unirl.envs.serve", "embodied/cartpole_ppo", "--port", str(port), *words]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().split()[-1]

    def kill(self) -> None:
        """End the server and the processes of its connections."""
        with self.process:
            os.killpg(self.process.pid, signal.SIGKILL)


def token_file(folder: Path, text: str) -> Path:
    file = folder / text
    file.write_text(text)
    file.chmod(0o600)
    return file


@pytest.fixture(scope="module")
def token(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return token_file(tmp_path_factory.mktemp("tokens"), SECRET)


@pytest.fixture(scope="module")
def server(token: Path) -> Iterator[Served]:
    served = Served(0, f"pipeline.env.id={FAULTY}", "--token-file", str(token))
    yield served
    served.kill()


@pytest.fixture(scope="module")
def local() -> GymnasiumEnvironment:
    return GymnasiumEnvironment(id=FAULTY)


def zeros(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int64)


def test_episodes_are_those_of_this_process_bit_for_bit(
    server: Served, token: Path, local: GymnasiumEnvironment
) -> None:
    remote = RemoteEnvironment(address=server.address, token_file=str(token))
    assert (remote.spaces, remote.is_keyed) == (local.spaces, local.is_keyed)
    episodes = [play(each, [0, 2, 1], [4, 5, 6], 9) for each in (local, remote)]
    assert len(episodes[0][0]) > 20 and same(*episodes, [(0, 0), (1, 1), (2, 2)])
    check_environment(remote)


def test_faults_of_an_environment_reach_the_run(server: Served, token: Path) -> None:
    remote = RemoteEnvironment(address=server.address, token_file=str(token))
    remote.reset([0, 1], [EpisodeStart(seed=0), EpisodeStart(seed=1, options={"fault": "raise", "at": 1})])
    step = remote.step([0, 1], zeros(2))
    assert "the arm fell off" in step.faults[1] and step.truncated.tolist() == [False, True]
    assert not remote.step([0], zeros(1)).faults
    remote.close()


@pytest.mark.parametrize(
    ("fault", "why"), [("hang", r"did not answer within 1 s"), ("die", r"the connection ended|reset by peer")]
)
def test_a_server_that_hangs_or_dies_is_a_fault_of_all_slots_and_the_next_reset_connects_again(
    server: Served, token: Path, fault: str, why: str
) -> None:
    remote = RemoteEnvironment(address=server.address, token_file=str(token), timeout_s=1.0)
    remote.reset([0, 1, 2], [EpisodeStart(seed=s, options={"fault": fault} if s == 1 else {}) for s in range(3)])
    assert not remote.step([0, 1, 2], zeros(3)).faults
    step = remote.step([0, 1], zeros(2))
    assert step.faults.keys() == {0, 1} and step.truncated.all() and not step.rewards.any()
    with pytest.raises(AssertionError, match="no episode"):
        remote.step([0], zeros(1))
    late = remote.step([2], zeros(1))  # its episode ended with the connection
    assert late.faults.keys() == {0}
    for reason in (*step.faults.values(), *late.faults.values()):
        assert re.search(why, reason), reason
    remote.reset([0, 1, 2], [EpisodeStart(seed=s) for s in range(3)])
    assert not remote.step([0, 1, 2], zeros(3)).faults
    remote.close()


@pytest.mark.slow
def test_a_killed_server_is_a_fault_and_one_with_other_spaces_in_its_place_is_named() -> None:
    first = Served(0, f"pipeline.env.id={FAULTY}")
    remote = RemoteEnvironment(address=first.address)
    remote.reset([0], [EpisodeStart(seed=0)])
    first.kill()
    assert remote.step([0], zeros(1)).faults.keys() == {0}
    second = Served(int(first.address.rpartition(":")[2]))  # CartPole-v1
    with pytest.raises(EpisodeError, match=r"came back with other spaces: .*\(4,\)"):
        remote.reset([0], [EpisodeStart(seed=0)])
    second.kill()


def test_a_token_is_wanted_beyond_this_machine_and_then_from_every_run(server: Served, tmp_path: Path) -> None:
    with pytest.raises(ExposedServerError, match="--token-file"):
        open_server("0.0.0.0", 0, None, b"")  # type: ignore[arg-type]
    with pytest.raises(AddressError, match=r"wants a token. .*pipeline\.env\.token_file"):
        RemoteEnvironment(address=server.address)
    other = token_file(tmp_path, SECRET[::-1])
    with pytest.raises(UnsupportedEnvironmentError, match="another token"):
        RemoteEnvironment(address=server.address, token_file=str(other))
    other.chmod(0o644)
    with pytest.raises(ExposedServerError, match="chmod 600"):
        RemoteEnvironment(address=server.address, token_file=str(other))


def test_wrong_addresses_and_versions_are_named(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidValueError, match="host:port, such as"):
        RemoteEnvironment(address="somewhere")
    with pytest.raises(AddressError, match=r"nothing answers there .*python -m unirl\.envs\.serve"):
        RemoteEnvironment(address="127.0.0.1:1")
    monkeypatch.setattr("unirl.envs.remote.PROTOCOL", 7)
    with pytest.raises(UnsupportedEnvironmentError, match="version 3 of the protocol, this run version 7"):
        RemoteEnvironment(address=server.address)


def test_a_recipe_without_an_environment_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["llm/quickstart", "scale=toy"]) == 2
    assert "no pipeline.env" in capsys.readouterr().err


def test_messages_are_no_pickles() -> None:
    """Decoding is by msgspec alone, which refuses anything else."""
    from unirl.envs.serve import REQUESTS

    with pytest.raises(msgspec.DecodeError):
        REQUESTS.decode(b"\x80\x04\x95")
