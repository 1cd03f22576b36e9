"""What an outage of the hub costs: one request of a process, one deadline, one line. The hub is a server here."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
from huggingface_hub import constants

from unirl.config.errors import NotFoundError
from unirl.config.failures import Session
from unirl.config.load import load
from unirl.models.loading import hub
from unirl.plan.sizes import sizes_of_policies
from unirl.reward.local.shared import pretrained
from unirl.trainer.assemble import build_trainer, look_up_models, models_named_by

SD3 = "diffusion/sd3_trainside"
MODELS = (
    "scale=toy",
    "bundle.path=someone/model",
    "reward.backend.config.path=someone/scorer",
    "reward.backend.config.processor=someone/reader",
)


class StandInHub:
    """Listens on a port of this machine, counts connections, and answers each with a status, or not at all."""

    def __init__(self, status: int | None) -> None:
        self.status = status
        self.requests: list[str] = []
        self.server = socket.create_server(("127.0.0.1", 0))
        self.open: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server.getsockname()[1]}"

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self.server.accept()
            except OSError:
                return
            self.open.append(client)
            self.requests.append(client.recv(4096).decode().partition("\r\n")[0])
            if self.status is not None:
                client.sendall(f"HTTP/1.1 {self.status} x\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".encode())
                client.close()

    def close(self) -> None:
        for each in (self.server, *self.open):
            each.close()


@pytest.fixture
def stand_in(request: pytest.FixtureRequest, monkeypatch, tmp_path) -> Iterator[StandInHub]:
    server = StandInHub(request.param)
    monkeypatch.setattr(constants, "ENDPOINT", server.address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "DEADLINE_S", 0.3)
    yield server
    server.close()


@pytest.mark.parametrize("stand_in", [None, 503], indirect=True)
def test_an_outage_is_found_by_one_request_for_the_model_and_for_every_reward(stand_in):
    for ask in (
        lambda: hub.model_directory("someone/model", None),
        lambda: hub.language_directory("someone/other", None),
        lambda: hub.files_to_fetch("someone/model", None),
        lambda: pretrained.load(_configuration(), "someone/scorer", "config.path"),
        lambda: pretrained.read_weights("someone/scorer", "scorer.pt", "config.path"),
        lambda: hub.look_up({"reward.backend.config.path": "someone/scorer"}),
    ):
        with pytest.raises(NotFoundError, match=f"the hub cannot be reached.*{stand_in.address}"):
            ask()
    # The library asks for its list of agents on its own, once a day.
    assert [line for line in stand_in.requests if "agent-harnesses" not in line] == ["HEAD / HTTP/1.1"]


@pytest.mark.parametrize("stand_in", [None], indirect=True)
def test_the_model_and_those_of_rewards_are_refused_together_before_a_run_has_a_folder(stand_in, tmp_path):
    recipe = load(SD3, [*MODELS, f"run.dir={tmp_path / 'run'}"])
    with pytest.raises(NotFoundError) as refused, build_trainer(recipe, Session()):
        raise AssertionError("the run began")
    message = str(refused.value)
    assert message.startswith(
        "bundle.path='someone/model', reward.backend.config.path='someone/scorer', "
        "reward.backend.config.processor='someone/reader': not in the local cache, and the hub cannot be reached"
    )
    assert "\n" not in message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("stand_in", [None], indirect=True)
def test_the_models_of_a_recipe_of_two_are_refused_by_their_keys_and_variables(stand_in, tmp_path, monkeypatch):
    for name in ("PE_MODEL", "PRETRAINED_MODEL"):
        monkeypatch.delenv(name, raising=False)
    recipe = load("pe/pe_trainside_pickscore", [f"run.dir={tmp_path / 'run'}"])
    with pytest.raises(NotFoundError, match=r"Connect, or set ar\.bundle\.path or PE_MODEL to a local directory"):
        sizes_of_policies(recipe)["ar"].run  # noqa: B018
    with pytest.raises(NotFoundError, match=r"^ar.bundle.path \(PE_MODEL\)='Qwen/\S+', diffusion.bundle.path \(PRETR"):
        look_up_models(recipe)


def test_the_variable_of_a_model_is_that_of_its_recipe_unless_the_command_line_sets_it(monkeypatch):
    monkeypatch.delenv("PRETRAINED_MODEL", raising=False)
    assert load(SD3).model_variable("") == "PRETRAINED_MODEL"
    assert load(SD3, ["bundle.path=someone/model"]).model_variable("") is None
    assert load("unified_model/bagel_trainside_lora").model_variable("") == "BAGEL_PATH"
    assert load("pe/quickstart").model_variable("ar") is None


@pytest.mark.parametrize("stand_in", [404], indirect=True)
def test_a_reward_model_that_the_hub_lacks_is_named_with_its_key(stand_in):
    with pytest.raises(NotFoundError, match="someone/scorer"):
        hub.look_up({"reward.backend.config.path": "someone/scorer"})


@pytest.mark.parametrize("stand_in", [404], indirect=True)
def test_a_path_that_is_not_there_is_no_hub_id(stand_in):
    with pytest.raises(NotFoundError, match=r"'\.\./scorer' is neither a directory here nor a hub id"):
        hub.look_up({"reward.backend.config.path": "../scorer"})


@pytest.mark.parametrize("stand_in", [None], indirect=True)
def test_models_that_are_on_this_machine_are_not_asked_for(stand_in, tmp_path):
    (tmp_path / "models--someone--scorer" / "snapshots" / "abc").mkdir(parents=True)
    hub.look_up({"a": "someone/scorer", "b": str(tmp_path), "c": "toy"})
    assert stand_in.requests == []


def test_every_model_that_a_shipped_reward_names_is_looked_up():
    named = models_named_by(load(SD3).config.reward)
    assert named == {
        "reward.backend.config.path": "yuvalkirstain/PickScore_v1",
        "reward.backend.config.processor": "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
    }
    assert models_named_by(load(SD3, ["scale=toy"]).config.reward) == {}


def _configuration() -> type:
    from transformers import CLIPConfig

    return CLIPConfig
