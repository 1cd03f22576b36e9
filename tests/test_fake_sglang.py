"""The fake SGLang server does what was recorded from the real one (0.5.23), beyond what the engine asks of it."""

from __future__ import annotations

import base64
import json
import pickle
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from tests import fake_servers
from unirl.cli.main import main
from unirl.config.http import HttpClient
from unirl.rollout.engine.serving.payloads import pickled

PROMPT = [72, 101, 108]


@pytest.fixture(scope="module")
def http() -> Iterator[HttpClient]:
    with fake_servers.sglang() as url:
        yield HttpClient(url, token=None, timeout_s=60.0, connections=8)


def post(http: HttpClient, path: str, body: object) -> tuple[int, object]:
    reply = http.request("POST", path, content=json.dumps(body).encode())
    return reply.status, json.loads(reply.body) if reply.body else None


def sampled(http: HttpClient, **changes: object) -> dict:
    sampling = {"max_new_tokens": 8, "temperature": 1.0, "sampling_seed": 3}
    status, answer = post(http, "/generate", {"input_ids": PROMPT, "sampling_params": sampling, **changes})
    assert status == 200
    return answer


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({"input_ids": None}, {"message": "Either text, input_ids or input_embeds should be provided."}),
        (
            {"input_ids": [[1], [2]], "rid": ["x", "x"]},
            {"message": "Duplicate request IDs detected within the request: ['x']"},
        ),
        (
            {"input_ids": [1] * 3000},
            {"message": "The input (3000 tokens) is longer than the model's context length (2048 tokens)."},
        ),
        (
            {"input_ids": [1], "lora_path": "nope"},
            {"message": "Got LoRA adapter that has never been loaded: nope\nAll loaded adapters: dict_keys([])."},
        ),
    ],
)
def test_bad_requests_get_the_recorded_messages(http, body, error) -> None:
    assert post(http, "/generate", body) == (400, {"error": error})


def test_an_unknown_sampling_parameter_is_refused_and_an_unknown_key_ignored(http) -> None:
    status, answer = post(http, "/generate", {"input_ids": PROMPT, "sampling_params": {"foo": 1}})
    assert status == 400 and answer["error"].startswith("unknown field `foo`, expected one of `max_new_tokens`, `stop`")
    assert sampled(http, foo=1)["output_ids"] == sampled(http)["output_ids"]


def test_a_seeded_row_does_not_depend_on_its_batch(http) -> None:
    """Rows of one request with seeds 3, 4 and none, which counts as 42."""
    seeds = [{"sampling_seed": 3}, {"sampling_seed": 4}, {}]
    settings = [{"max_new_tokens": 8, "temperature": 1.0, **seed} for seed in seeds]
    _, rows = post(http, "/generate", {"input_ids": [PROMPT] * 3, "sampling_params": settings})
    assert rows[0]["output_ids"] == sampled(http)["output_ids"] != rows[1]["output_ids"]
    default = {"max_new_tokens": 8, "temperature": 1.0, "sampling_seed": 42}
    assert rows[2]["output_ids"] == sampled(http, sampling_params=default)["output_ids"]


def test_a_request_is_aborted_with_the_tokens_that_it_has(http) -> None:
    long = {"max_new_tokens": 1900, "temperature": 1.0, "sampling_seed": 3}
    answers: list[dict] = []
    thread = threading.Thread(target=lambda: answers.append(sampled(http, rid="long", sampling_params=long)))
    thread.start()
    while not answers:
        time.sleep(0.02)
        post(http, "/abort_request", {"rid": "long"})
    thread.join()
    meta = answers[0]["meta_info"]
    assert meta["finish_reason"] == {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    assert meta["completion_tokens"] == len(answers[0]["output_ids"]) < 1900


def test_weights_that_change_during_a_pause_give_spans_of_two_versions(http) -> None:
    """As recorded for mode in_place: the tokens before the update have the old name, and those after it the new one."""
    long = {"max_new_tokens": 60, "temperature": 1.0, "sampling_seed": 5, "min_new_tokens": 60}
    answers: list[dict] = []
    thread = threading.Thread(target=lambda: answers.append(sampled(http, sampling_params=long)))
    thread.start()
    time.sleep(0.05)
    assert post(http, "/pause_generation", {"mode": "in_place"})[1]["message"] == "Generation paused successfully."
    tensors = pickled([("model.norm.weight", torch.full((32,), 1.5))])
    body = {"serialized_named_tensors": [tensors], "weight_version": "new", "flush_cache": False}
    assert post(http, "/update_weights_from_tensor", body)[0] == 400  # outside of a session
    assert post(http, "/begin_weight_update", {})[0] == 200 and post(http, "/begin_weight_update", {})[0] == 400
    status, outcome = post(http, "/update_weights_from_tensor", body | {"flush_cache": True})
    assert status == 400 and "Weights were updated, but the cache was not flushed" in outcome["message"]
    assert post(http, "/update_weights_from_tensor", body)[1]["message"] == "Success Weight version updated to new."
    assert post(http, "/end_weight_update", {})[0] == 200 and post(http, "/end_weight_update", {})[0] == 400
    post(http, "/continue_generation", {})
    thread.join()
    first, second = answers[0]["meta_info"]["weight_versions"]
    assert (first["version"], first["start"], second["version"], second["end"]) == ("default", 0, "new", 60)
    assert first["end"] == second["start"]


def test_a_pickle_that_names_code_is_refused(http) -> None:
    """`eval` of a payload would run on the machine of the server."""

    class Code:
        def __reduce__(self):
            return eval, ("1 + 1",)

    payload = base64.b64encode(pickle.dumps([("model.norm.weight", Code())])).decode()
    post(http, "/begin_weight_update", {})
    status, answer = post(http, "/update_weights_from_tensor", {"serialized_named_tensors": [payload]})
    post(http, "/end_weight_update", {})
    assert status == 400 and "Blocked unsafe global: builtins.eval" in answer["message"]


def test_the_command_lists_its_faults_and_refuses_others(capsys) -> None:
    assert main(["engines", "fake", "--fault", "list"]) == 0
    assert "swap-rows" in capsys.readouterr().out
    assert main(["engines", "fake", "--fault", "swaprows"]) == 2
    assert "Did you mean 'swap-rows'?" in capsys.readouterr().err
    assert main(["engines", "fake", "--path", "/no/such"]) == 4
    assert "--path '/no/such': no such directory" in capsys.readouterr().err
