"""A whole service: scores equal the scorer's own, and what one item does to a worker costs no other item its score."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import numpy as np
import pytest
import torch
from reward_service.__main__ import main
from reward_service.client import RewardClient
from reward_service.config import read_config
from reward_service.faults import image_file, noise, video_file

from tests.processes import is_running, wait_until
from unirl.config.errors import RewardError
from unirl.reward.client.wire import (
    JSON,
    MSGPACK,
    ItemError,
    MediaPayload,
    ScoreItem,
    ScoreRequest,
    ScoreResponse,
    Turn,
    decode,
    encode,
)
from unirl.reward.local.gsm8k_exact_match import GSM8KExactMatchRewardScorer, GSM8KExactMatchSpec
from unirl.reward.local.image_statistics import BrightnessRewardScorer
from unirl.reward.remote import RemoteRewardBackend, RemoteRewardSpec
from unirl.types.evaluation import accuracy
from unirl.types.reward import RewardRequest

from .conftest import a_picture, children, workers

BOTH = pytest.mark.parametrize("content_type", [MSGPACK, JSON])


def score(http: httpx2.Client, requests: list[ScoreItem], content_type: str = MSGPACK) -> ScoreResponse:
    body = encode(ScoreRequest(requests=requests), content_type)
    answer = http.post("/score", content=body, headers={"content-type": content_type})
    assert answer.status_code == 200, answer.text
    return decode(ScoreResponse, answer.content, answer.headers["content-type"])


def odd(prompt: str, **changes) -> ScoreItem:
    return ScoreItem(history=[Turn(text=prompt), Turn(text="")], required_rewards=["odd"], **changes)


def outcome(response: ScoreResponse, place: int = 0, reward: str = "odd"):
    """The total, or the kind of the error."""
    if reward in response.errors[place]:
        assert reward not in response.results[place]
        return ItemError.read(response.errors[place][reward]).kind
    return response.results[place][reward]["total"]


def figure(http: httpx2.Client, name: str) -> float:
    """One line of the metrics."""
    lines = http.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def local(picture: np.ndarray) -> float:
    images = torch.from_numpy(picture).permute(2, 0, 1)[None].float() / 255
    return float(BrightnessRewardScorer().score(RewardRequest(sample_ids=["a"], images=images)).total)


def turns(picture: np.ndarray) -> list[Turn]:
    """The same picture in every lossless form."""
    png, webp = image_file(picture, "png"), image_file(picture, "webp", lossless=True)
    return [
        Turn(image=MediaPayload(format="raw", data=picture.tobytes(), shape=picture.shape)),
        Turn(image=MediaPayload(format="png", data=png)),
        Turn(image=MediaPayload(format="webp", data=webp)),
        Turn(image_b64=base64.b64encode(png).decode()),
    ]


@BOTH
def test_scores_equal_the_local_scorer_bit_for_bit_in_every_lossless_form(http, content_type):
    pictures = [a_picture(seed, height=20 + 4 * (seed % 2)) for seed in range(6)]
    items = [
        ScoreItem(history=[Turn(text="source", image_b64="ignored"), turn], required_rewards=["bright"])
        for picture in pictures
        for turn in turns(picture)
    ]
    response = score(http, items, content_type)
    expected = [local(picture) for picture in pictures for _ in range(4)]
    assert [outcome(response, place, "bright") for place in range(len(items))] == expected
    assert all(list(result["bright"]) == ["total", "brightness"] for result in response.results)


def test_items_beside_failed_ones_keep_their_scores(http):
    prompts = ["one", "nan", "three", "raise", "seven77"]
    response = score(http, [odd(prompt) for prompt in prompts])
    assert [outcome(response, place) for place in range(5)] == [3.0, "not_finite", 5.0, "failed", 7.0]
    assert "ValueError: no such thing" in response.errors[3]["odd"]


def test_a_reward_gets_the_columns_it_reads_or_says_which_is_missing(http):
    response = score(http, [ScoreItem(history=[Turn(text="an answer")], required_rewards=["odd", "bright"])])
    assert [outcome(response), outcome(response, reward="bright")] == ["invalid", "invalid"]
    assert "reads prompts; this item has no prompts" in response.errors[0]["odd"]
    assert "reads images; this item has no images" in response.errors[0]["bright"]


def test_an_item_that_kills_its_worker_is_named_and_the_others_are_scored(http):
    before = figure(http, 'unirl_reward_restarts_total{cause="died",reward="odd"}')
    response = score(http, [odd("fine"), odd("crash"), odd("too")])
    assert [outcome(response, place) for place in range(3)] == [4.0, "crashed", 3.0]
    assert figure(http, 'unirl_reward_restarts_total{cause="died",reward="odd"}') == before + 2
    assert outcome(score(http, [odd("again")])) == 5.0


def test_an_item_that_hangs_costs_its_batch_and_frees_the_worker(http):
    begun = time.monotonic()
    response = score(http, [odd("hang")])
    assert outcome(response) == "timeout"
    assert time.monotonic() - begun < 60
    assert outcome(score(http, [odd("next")])) == 4.0


def test_a_worker_that_dies_while_it_waits_is_replaced(http, service):
    (pid,) = workers(service.pid, "odd")
    os.kill(pid, signal.SIGKILL)
    assert outcome(score(http, [odd("back")])) == 4.0
    assert wait_until(lambda: workers(service.pid, "odd") not in ([], [pid]), 60)


def test_a_repeated_item_is_not_scored_again_and_its_id_is_its_own(http):
    item = odd("idem", request_id="x1")
    scored = 'unirl_reward_items_total{outcome="scored",reward="odd"}'
    first = score(http, [item])
    before = figure(http, scored)
    assert score(http, [item]) == first
    assert figure(http, scored) == before
    other = encode(ScoreRequest(requests=[odd("other", request_id="x1")]))
    answer = http.post("/score", content=other, headers={"content-type": MSGPACK})
    assert (answer.status_code, answer.json()["kind"]) == (409, "conflict")


def test_a_repetition_of_an_item_that_is_being_scored_waits_for_it(http):
    item = odd("slow", request_id="x2")
    scored = 'unirl_reward_items_total{outcome="scored",reward="odd"}'
    before = figure(http, scored)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: score(http, [item]), range(4)))
    assert [outcome(answer) for answer in answers] == [4.0] * 4
    assert figure(http, scored) == before + 1


def test_items_of_many_clients_are_scored_together(http):
    """While the worker is busy with one, the others gather."""
    count, total = ('unirl_reward_batch_size_count{reward="odd"}', 'unirl_reward_batch_size_sum{reward="odd"}')
    before = figure(http, count), figure(http, total)
    with ThreadPoolExecutor(17) as pool:
        first = pool.submit(score, http, [odd("slow")])
        time.sleep(0.3)
        others = [pool.submit(score, http, [odd("x" * (n + 5))]) for n in range(16)]
        assert outcome(first.result()) == 4.0
        assert [outcome(other.result()) for other in others] == [n + 5.0 for n in range(16)]
    batches, items = figure(http, count) - before[0], figure(http, total) - before[1]
    assert items == 17
    assert batches < 10


def test_a_video_below_a_root_is_read_and_sent_pictures_are_not_mixed_up(http, media_root):
    (media_root / "clip.mp4").write_bytes(video_file(noise((3, 24, 34, 3))))
    item = ScoreItem(history=[Turn(text="a", video_path="clip.mp4")], required_rewards=["odd"])
    assert outcome(score(http, [item])) == 1.0
    absent = ScoreItem(history=[Turn(text="a", video_path="no.mp4")], required_rewards=["odd"])
    response = score(http, [absent, item])
    assert [outcome(response, place) for place in range(2)] == ["invalid", 1.0]
    assert "history[0]: video_path names no file" in response.errors[0]["odd"]


def test_the_client_scores_and_names_the_item_that_cannot_be_scored(service):
    plain = {"history": [{"text": "a question"}, {"text": "an answer"}], "required_rewards": ["odd"]}
    with RewardClient(service.url) as client:
        assert client.score([plain] * 3) == [{"odd": {"total": 10.0, "length": 10.0}}] * 3
        assert client.health().status == "ok"
        bad = {**plain, "history": [{"text": "raise"}, {"text": ""}]}
        with pytest.raises(RewardError, match="'odd' has no score for item 1: failed"):
            client.score([plain, bad])


@pytest.mark.parametrize("encoding", ["msgpack", "json"])
def test_answers_and_so_pass_at_k_are_those_of_the_scorer_itself(service, encoding):
    texts = ["1+1 makes 2\n#### 2", "#### 3", "nothing", "#### 2.0", "#### 7", "#### 7"]
    asked = RewardRequest(
        sample_ids=[str(i) for i in range(6)],
        prompts=["sum"] * 6,
        texts=texts,
        metadata=[{"answer": answer} for answer in "222288"],
    )
    spec = RemoteRewardSpec(
        base_url=service.url,
        required_rewards=("odd", "sums"),
        reward_weights={"odd": 0.0, "sums": 1.0},
        input_kind="text",
        encoding=encoding,
        batch_size=4,
    )
    result = RemoteRewardBackend(config=spec).score(asked)
    expected = GSM8KExactMatchRewardScorer(config=GSM8KExactMatchSpec()).score(asked)
    assert torch.equal(result.total, expected.total) and result.total.tolist() == [1, 0, 0, 1, 0, 0]
    assert result.answers == expected.answers and {answer.text for answer in result.answers} == {"2", "3", "", "7"}
    metrics = accuracy([result.answers[:4], result.answers[4:]])
    assert (metrics["eval/avg@4"], metrics["eval/pass@2"]) == (0.25, 5 / 12) and "eval/maj@4" in metrics


def test_a_reward_without_answers_leaves_them_out(http):
    body = encode(ScoreRequest(requests=[odd("a")]), JSON)
    answer = http.post("/score", content=body, headers={"content-type": JSON}).json()
    assert answer.keys() == {"results", "errors"}


def test_a_connection_that_sends_no_headers_is_closed(service):
    address = urlsplit(service.url)
    for sent in (b"", b"POST /score HT"):
        with socket.create_connection((address.hostname, address.port), timeout=300) as dawdling:
            dawdling.sendall(sent)
            assert dawdling.recv(100) == b""


def test_a_request_that_is_not_http_is_answered_400(service):
    address = urlsplit(service.url)
    with socket.create_connection((address.hostname, address.port), timeout=300) as connection:
        connection.sendall(b"\x16\x03\x01 nonsense\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 400")


def test_a_scorer_that_cannot_be_built_ends_the_start_with_its_error(tmp_path, capsys, python):
    file = tmp_path / "service.yaml"
    reward = {"name": "a", "scorer": "pickscor", "python": python}
    file.write_text(json.dumps({"server": {"port": 0}, "rewards": [reward]}))
    assert main([str(file)]) == 2
    assert "Did you mean 'pickscore'?" in capsys.readouterr().err


def test_an_environment_that_is_absent_or_lacks_packages_ends_the_start_with_the_way_to_make_it(tmp_path, capsys):
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -IS "$@"\n')
    bare.chmod(0o700)
    file = tmp_path / "service.yaml"
    for python, says in (
        (tmp_path / "none", "No such file or directory. Make"),
        (bare, "install what the scorer needs"),
    ):
        reward = {"name": "a", "scorer": "brightness", "python": str(python)}
        file.write_text(json.dumps({"server": {"port": 0}, "rewards": [reward]}))
        assert main([str(file)]) == 6
        error = capsys.readouterr().err
        assert says in error and "unirl-reward-service/envs/README.md" in error


def test_the_first_example_of_the_readme_needs_no_environment_and_the_others_name_one_that_has_a_file(tmp_path):
    folder = Path(__file__).parents[1]
    examples = re.findall(r"```yaml\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    configs = []
    for number, text in enumerate(examples):
        (tmp_path / f"{number}.yaml").write_text(text)
        configs.append(read_config(tmp_path / f"{number}.yaml"))
    assert [(reward.python, reward.device) for reward in configs[0].rewards] == [(None, "cpu")]
    named = [reward.python for config in configs[1:] for reward in config.rewards if reward.python is not None]
    files = {f".envs/{file.stem}/bin/python" for file in (folder / "envs").glob("*.txt")}
    assert named and set(named) <= files


STARTS_ONE = """
import time
from reward_service.running import RunningService
service = RunningService({"rewards": [{"name": "bright", "scorer": "brightness"}]}).start()
print(service.pid, flush=True)
time.sleep(1000)
"""


@pytest.mark.slow
def test_nothing_outlives_the_process_that_started_a_service():
    with subprocess.Popen([sys.executable, "-c", STARTS_ONE], stdout=subprocess.PIPE) as parent:
        service = int(parent.stdout.readline())
        pids = [service, *children(service)]
        assert len(pids) == 4  # the service, a worker and two decoders
        parent.kill()
    assert wait_until(lambda: not any(map(is_running, pids)), 60)
