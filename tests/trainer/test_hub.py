"""Exports are pushed to a hub: here to one on this machine that keeps what huggingface_hub sends it."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from unirl.cli.main import main
from unirl.config.errors import AddressError
from unirl.trainer.hub import push

REPO = "me/my-lora"


@dataclass
class Hub:
    """What the server was asked for."""

    address: str = ""
    created: list[dict] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    refuses: bool = False

    def answer(self, path: str, body: bytes) -> tuple[int, dict]:
        if self.refuses:
            return 403, {"error": "no write access"}
        if path == "/api/repos/create":
            self.created.append(json.loads(body))
            return 200, {"url": f"{self.address}/{REPO}", "name": REPO, "id": "1"}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path.startswith(f"/api/models/{REPO}/preupload/"):
            names = [file["path"] for file in json.loads(body)["files"]]
            return 200, {"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]}
        if path.startswith(f"/api/models/{REPO}/commit/"):
            for entry in map(json.loads, body.splitlines()):
                if entry["key"] == "file":
                    self.files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            return 200, {"commitUrl": f"{self.address}/{REPO}/commit/{'a' * 40}", "commitOid": "a" * 40}
        if path.startswith(f"/api/models/{REPO}"):
            return 200, {"id": REPO, "sha": "b" * 40, "siblings": []}
        return 404, {"error": f"the test's hub does not know {path}"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    result = Hub()

    class Handler(BaseHTTPRequestHandler):
        def reply(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            status, answer = result.answer(self.path, self.rfile.read(length))
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = reply  # noqa: N815

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    result.address = f"http://127.0.0.1:{server.server_port}"
    at(monkeypatch, result.address)
    yield result
    server.shutdown()
    server.server_close()


def at(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """Makes huggingface_hub speak with an address."""
    for name in ("huggingface_hub.constants.ENDPOINT", "huggingface_hub.hf_api.constants.ENDPOINT"):
        monkeypatch.setattr(name, address)
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_test")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "diffusers-lora"
    folder.mkdir()
    (folder / "pytorch_lora_weights.safetensors").write_bytes(bytes(range(200)))
    (folder / "README.md").write_text("---\nlibrary_name: diffusers\n---\n# card\n")
    return folder


def test_every_file_of_the_folder_arrives_in_a_private_repository(hub: Hub, folder: Path) -> None:
    assert push(folder, REPO).endswith(REPO)
    [made] = hub.created
    assert made["name"] == "my-lora" and (made.get("private") or made["visibility"] == "private")
    assert hub.files == {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_hub_that_refuses_or_is_away_leaves_the_folder_and_the_command(
    hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.refuses = True
    with pytest.raises(AddressError, match=r"refused \(403: no write access\)") as refused:
        push(folder, REPO)
    at(monkeypatch, "http://127.0.0.1:1")
    with pytest.raises(AddressError, match="cannot be reached") as away:
        push(folder, REPO, private=False)
    assert f"hf upload {REPO} {folder} . --private" in str(refused.value)
    assert str(away.value).endswith(f"hf upload {REPO} {folder} .")
    assert len(list(folder.iterdir())) == 2


def test_an_export_has_a_model_card_and_is_pushed_with_it(hub: Hub, tmp_path: Path, capsys) -> None:
    run = tmp_path / "run"
    small = ["scale=toy", "num_rollouts=1", "tracking.sample_steps=0"]
    assert main(["train", "diffusion/sd3_trainside", *small, f"run.dir={run}"]) == 0
    assert main(["export", str(run), "--public"]) == 2
    assert main(["export", str(run), "--push-to-hub", "me"]) == 2
    assert "OWNER/NAME" in capsys.readouterr().err
    assert main(["export", str(run), "--push-to-hub", REPO]) == 0
    assert f"to {hub.address}/{REPO}" in capsys.readouterr().out
    card = hub.files["README.md"].decode()
    front, text = card.split("---\n")[1:3]
    assert yaml.safe_load(front) == {"library_name": "diffusers", "tags": ["unirl", "reinforcement-learning", "lora"]}
    facts = ("sd3_trainside", "DiffusionGRPO", "PickScoreRewardScorer", "1 of", "held-out reward after step 0")
    for fact in (*facts, "toy scale: random weights, rewards mean nothing"):
        assert fact in text
    assert "largest difference" in text and "pytorch_lora_weights.safetensors" in hub.files
    peft = next(run.glob("export/*/peft/README.md")).read_text()
    assert "library_name: peft" in peft and "not loaded again" in peft
    assert all("`toy` has random weights" in page and "from_pretrained" not in page for page in (card, peft))
