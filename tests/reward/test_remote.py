"""The client loses no item, repeats none, and never takes a failure for a score, whatever the service does."""

from __future__ import annotations

import json
import math
import socket
import time

import msgspec
import pytest
import torch

from tests.reward.stub_service import Reply, plain, scores, stub
from unirl.config.errors import ConfigError, RewardError
from unirl.reward.client.connection import Connection, ConnectionConfig
from unirl.reward.client.retries import BREAK_AFTER, score_items
from unirl.reward.client.wire import JSON, ItemError, ScoreItem, ScoreResponse, Turn, encode
from unirl.reward.combine import WeightedRewards
from unirl.reward.local.image_statistics import BrightnessRewardScorer
from unirl.reward.local.length import LengthRewardScorer
from unirl.reward.remote import RemoteRewardBackend, RemoteRewardSpec
from unirl.reward.service import RewardService
from unirl.types.primitives import Videos
from unirl.types.reward import RewardRequest


def item(text: str, **changes) -> ScoreItem:
    return ScoreItem(history=[Turn(text=text)], **{"required_rewards": ["odd"]} | changes)


def config(url: str, **changes) -> ConnectionConfig:
    return ConnectionConfig(base_url=url, **{"retry_delay": 0.001, "concurrency": 1, "batch_size": 3} | changes)


ITEMS = [item("x" * n) for n in range(1, 11)]
EXPECTED = [{"odd": {"total": 2.0 * n}} for n in range(1, 11)]


def deliver_all(url: str, items=ITEMS, **changes):
    connection = Connection(config(url, **changes))
    try:
        return [outcome.scores for outcome in score_items(connection, items)]
    finally:
        connection.close()


@pytest.mark.parametrize("concurrency", [1, 4])
@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_scores_come_back_in_the_order_of_the_items(batch_size, concurrency):
    with stub(lambda items, n: scores(items)) as service:
        assert deliver_all(service.url, batch_size=batch_size, concurrency=concurrency) == EXPECTED
        assert len(service.posts) == math.ceil(10 / batch_size)
        assert max(map(len, service.posts)) <= batch_size


def answered(items, found, errors=None) -> Reply:
    """The same of every item."""
    body = {"results": [found] * len(items), "errors": [errors or {}] * len(items)}
    return Reply(msgspec.msgpack.encode(body))


def value(score) -> dict:
    return {"odd": {"total": score}}


REFUSED_SLOWLY = Reply(plain({"kind": "too_slow", "detail": ""}), 408, JSON)
FAULTS = {
    "drop": lambda items: Reply(None),
    "500": lambda items: Reply(b"oops", 500, "text/html"),
    "502": lambda items: Reply(b"", 502, "text/html"),
    "408": lambda items: REFUSED_SLOWLY,
    "cut on the way": lambda items: Reply(scores(items).body[:-5], length=len(scores(items).body)),
    "cut before": lambda items: Reply(scores(items).body[:-5]),
    "empty": lambda items: Reply(b""),
    "no msgpack": lambda items: Reply(b"\xc1\xc1"),
    "html": lambda items: Reply(b"<html>", 200, "text/html"),
    "another form": lambda items: Reply(msgspec.msgpack.encode({"scores": []})),
    "too few": lambda items: answered([], {}),
    "uneven": lambda items: Reply(msgspec.msgpack.encode({"results": [{}], "errors": []})),
    "nan": lambda items: answered(items, value(math.nan)),
    "inf": lambda items: answered(items, value(math.inf)),
    "bool": lambda items: answered(items, value(True)),
    "null": lambda items: answered(items, value(None)),
    "text": lambda items: answered(items, value("1")),
    "neither": lambda items: answered(items, {}),
    "no parts": lambda items: answered(items, {"odd": {}}),
    "crashed": lambda items: answered(items, {}, {"odd": "crashed: x"}),
    "timeout": lambda items: answered(items, {}, {"odd": "timeout: x"}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_items_of_a_failed_response_are_sent_again_with_their_id(fault):
    """Every second answer is spoiled."""
    with stub(lambda items, n: FAULTS[fault](items) if n % 2 == 0 else scores(items)) as service:
        assert deliver_all(service.url) == EXPECTED
        texts = {}
        for sent in (sent for post in service.posts for sent in post):
            texts.setdefault(sent.request_id, set()).add(sent.history[0].text)
        assert sorted(len(text) for result in texts.values() for text in result) == list(range(1, 11))


@pytest.mark.parametrize("encoding", ["msgpack", "json"])
def test_a_whole_number_is_a_score(encoding):
    def answer(items, n):
        body = {"results": [{"odd": {"total": 1}} for _ in items], "errors": [{} for _ in items]}
        return Reply(msgspec.msgpack.encode(body)) if encoding == "msgpack" else Reply(plain(body), 200, JSON)

    with stub(answer) as service:
        assert deliver_all(service.url, encoding=encoding) == [{"odd": {"total": 1.0}}] * 10
        assert len(service.posts) == 4


def test_the_ids_of_two_calls_differ_even_for_the_same_items():
    with stub(lambda items, n: scores(items)) as service:
        deliver_all(service.url)
        deliver_all(service.url)
        ids = [sent.request_id for post in service.posts for sent in post]
        assert len(set(ids)) == 20


def test_only_the_reward_without_a_score_is_requested_again():
    def answer(items, n):
        results = [{name: {"total": 1.0} for name in each.required_rewards if n or name == "a"} for each in items]
        errors = [
            {name: "unavailable: later" for name in each.required_rewards if not n and name == "b"} for each in items
        ]
        return Reply(encode(ScoreResponse(results=results, errors=errors)))

    with stub(answer) as service:
        assert deliver_all(service.url, [item("x", required_rewards=["a", "b"])]) == [
            {"a": {"total": 1.0}, "b": {"total": 1.0}}
        ]
        assert [each.required_rewards for post in service.posts for each in post] == [["a", "b"], ["b"]]


@pytest.mark.parametrize("said", ["failed: no quote", "invalid: no image", "not_finite: nan", "CUDA error: x"])
def test_an_invalid_item_is_not_sent_again(said):
    with stub(lambda items, n: answered(items, {}, {"odd": said})) as service:
        assert deliver_all(service.url, [item("x")]) == [{"odd": ItemError.read(said)}]
        assert len(service.posts) == 1


def test_an_item_that_never_succeeds_fails_after_its_retries_and_the_others_do_not():
    """One text spoils every POST that it is part of."""

    def answer(items, n):
        return Reply(b"oops", 500) if any(each.history[0].text == "xxxx" for each in items) else scores(items)

    with stub(answer) as service:
        answers = deliver_all(service.url, batch_size=1, max_retries=4)
        poison = answers.pop(3)["odd"]
        assert (poison.kind, poison.message) == ("unavailable", "500: oops (5 attempts)")
        assert answers == EXPECTED[:3] + EXPECTED[4:]


def test_a_busy_service_is_asked_again_after_retry_after():
    busy = Reply(plain({"kind": "busy", "detail": "full"}), 429, JSON, {"Retry-After": "1"})
    with stub(lambda items, n: busy if n == 0 else scores(items)) as service:
        assert deliver_all(service.url, max_retries=0) == EXPECTED
        assert len(service.posts) == 5


@pytest.mark.parametrize("status", [301, 400, 401, 404, 409, 415, 422])
def test_a_refusal_is_raised_at_once_with_the_message_of_the_service(status):
    reply = Reply(plain({"kind": "schema", "detail": "Expected `int` - at `$.requests[0]`"}), status, JSON)
    with stub(lambda items, n: reply) as service:
        with pytest.raises(RewardError, match=r"Expected `int` - at `\$\.requests\[0\]`") as raised:
            deliver_all(service.url)
        assert (raised.value.code, len(service.posts)) == (6002, 1)


def test_a_batch_that_is_too_large_is_split_in_halves():
    too_large = Reply(plain({"kind": "too_large", "detail": "64 MiB"}), 413, JSON)
    with stub(lambda items, n: too_large if len(items) > 3 else scores(items)) as service:
        assert deliver_all(service.url, batch_size=10) == EXPECTED
        assert [len(post) for post in service.posts] == [10, 5, 2, 2, 2, 2, 2]
    with stub(lambda items, n: too_large) as service, pytest.raises(RewardError, match="413 too_large: 64 MiB"):
        deliver_all(service.url)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_an_unreachable_service_is_named_with_url_attempts_and_last_error():
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(RewardError) as raised:
        deliver_all(url, outage_s=0.05)
    assert raised.value.code == 6001
    for word in (url, "attempts in", "ConnectError", f"unirl reward ping {url}"):
        assert word in str(raised.value)


def test_after_failures_in_a_row_only_health_is_requested_until_it_answers():
    down = {"left": BREAK_AFTER, "checks": 3}

    def answer(items, n):
        down["left"] -= 1
        return Reply(b"", 500) if down["left"] >= 0 else scores(items)

    def health():
        down["checks"] -= 1
        return Reply(b"", 503) if down["checks"] >= 0 else Reply(plain({"status": "ok", "rewards": {}}), 200, JSON)

    with stub(answer, health=health) as service:
        assert deliver_all(service.url, batch_size=10, concurrency=1) == EXPECTED
        assert len(service.posts) == BREAK_AFTER + 1
        assert len(service.paths) == 4


def test_a_response_body_beyond_the_limit_is_not_read(monkeypatch):
    monkeypatch.setattr("unirl.config.http.MAX_BODY_BYTES", 1000)

    def answer(items, n):
        body = msgspec.msgpack.decode(scores(items).body) | ({"more": "x" * 2000} if n == 0 else {})
        return Reply(msgspec.msgpack.encode(body))

    with stub(answer) as service:
        assert deliver_all(service.url) == EXPECTED
        assert len(service.posts) == 5


def test_proxies_of_the_environment_are_ignored(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with stub(lambda items, n: scores(items)) as service:
        assert deliver_all(service.url, outage_s=1.0) == EXPECTED


def test_the_token_is_sent(tmp_path):
    (tmp_path / "token").write_text("a-secret-token-0123\n")
    with stub(lambda items, n: scores(items)) as service:
        deliver_all(service.url, token_file=str(tmp_path / "token"))
        assert {headers["Authorization"] for headers in service.headers} == {"Bearer a-secret-token-0123"}
        with pytest.raises(ConfigError, match="cannot be read"):
            deliver_all(service.url, token_file=str(tmp_path / "no"))


def rows(count: int = 4, **changes) -> RewardRequest:
    images = (torch.rand(count, 3, 4, 6, generator=torch.Generator().manual_seed(1)) * 255).round() / 255
    fields = {
        "sample_ids": [f"s{i}" for i in range(count)],
        "prompts": ["p" * (i + 1) for i in range(count)],
        "images": images,
        "metadata": [{"n": i} for i in range(count)],
    }
    return RewardRequest(**fields | changes)


def backend(url: str, **changes) -> RemoteRewardBackend:
    fields = {"required_rewards": ("odd",), "retry_delay": 0.001, "startup_s": 0.0}
    return RemoteRewardBackend(config=RemoteRewardSpec(base_url=url, **fields | changes))


def test_rows_are_sent_with_their_prompt_pixels_and_metadata():
    with stub(lambda items, n: scores(items)) as service:
        request = rows()
        answer = backend(service.url, batch_size=2).score(request)
        assert answer.total.tolist() == [2.0, 4.0, 6.0, 8.0]
        assert answer.components.keys() == {"odd"} and not answer.failures
        for sent in (sent for post in service.posts for sent in post):
            row = sent.metadata["n"]
            assert sent.answer.text == request.prompts[row]
            levels = torch.frombuffer(bytearray(sent.answer.image.data), dtype=torch.uint8)
            pixels = levels.view(sent.answer.image.shape).permute(2, 0, 1).float() / 255
            assert torch.equal(pixels, request.images[row])


@pytest.mark.parametrize("image_format", ["png", "webp", "jpeg"])
def test_the_plain_contract_is_json_with_files_in_base64(image_format):
    with stub(lambda items, n: scores(items, JSON)) as service:
        answer = backend(service.url, encoding="json", image_format=image_format).score(rows())
        assert answer.total.tolist() == [2.0, 4.0, 6.0, 8.0]
        assert all(sent.answer.image_b64 for post in service.posts for sent in post)
        assert service.headers[0]["Content-Type"] == JSON


def test_nan_in_json_names_the_sample():
    def answer(items, n):
        results = [{"odd": {"a": math.nan if each.metadata["n"] == 2 else 1.0}} for each in items]
        return Reply(json.dumps({"results": results, "errors": [{} for _ in items]}).encode(), 200, JSON)

    with stub(answer) as service:
        answer = backend(service.url, encoding="json", image_format="png", max_retries=1).score(rows())
        assert answer.failed_rows() == [2]
        assert answer.failures[2][0].code == 6003
        assert "odd.a is nan" in answer.failures[2][0].why


def test_videos_and_texts_are_sent():
    frames = (torch.rand(5, 3, 4, 6, generator=torch.Generator().manual_seed(2)) * 255).round() / 255
    videos = Videos(frames=frames, offsets=torch.tensor([0, 2, 5]))
    with stub(lambda items, n: scores(items)) as service:
        assert backend(service.url, input_kind="video").score(rows(2, images=None, videos=videos)).total.tolist() == [
            2,
            4,
        ]
        assert sorted(sent.answer.video.shape for sent in service.posts[0]) == [(2, 4, 6, 3), (3, 4, 6, 3)]
        texts = rows(2, images=None, texts=["yes", "no"])
        assert backend(service.url, input_kind="text").score(texts).total.tolist() == [2, 4]
        assert [(sent.prompt, sent.text) for sent in service.posts[1]] == [("p", "yes"), ("pp", "no")]


PARTS = {
    "a": [{"total": 1.0, "x": 2.0, "y": 6.0}, {"total": 3.0, "x": 1.0, "y": 1.0}],
    "b": [{"total": 5.0}, {"total": -1.0}],
}


def parts_service():
    def answer(items, n):
        results = [{name: PARTS[name][each.metadata["n"]] for name in each.required_rewards} for each in items]
        return Reply(encode(ScoreResponse(results=results, errors=[{} for _ in items])))

    return stub(answer, rewards=("a", "b"))


@pytest.mark.parametrize(
    ("settings", "total"),
    [
        ({}, [(1 + 5) / 2, (3 - 1) / 2]),
        ({"reward_weights": {"a": 3.0, "b": 1.0}}, [(3 * 1 + 5) / 4, (3 * 3 - 1) / 4]),
        ({"reward_weights": {"a": 0.0, "b": 2.0}}, [5.0, -1.0]),
        ({"aggregation_method": "mean"}, [3.0, 1.0]),
        ({"aggregation_method": "min"}, [1.0, -1.0]),
        ({"aggregation_method": "max"}, [5.0, 3.0]),
        ({"aggregation_method": "max", "sub_metric_reduce": "mean"}, [5.0, 1.0]),
        ({"aggregation_method": "max", "sub_metric_reduce": "max"}, [6.0, 1.0]),
    ],
)
def test_rewards_are_combined_as_the_recipe_says(settings, total):
    with parts_service() as service:
        answer = backend(service.url, required_rewards=("a", "b"), **settings).score(rows(2))
        assert answer.total.tolist() == total


def test_parts_are_components_and_a_reward_of_weight_zero_is_logged_only():
    with parts_service() as service:
        answer = backend(service.url, required_rewards=("a", "b")).score(rows(2))
        assert {name: result.tolist() for name, result in answer.components.items()} == {
            "a": [1.0, 3.0],
            "a_x": [2.0, 1.0],
            "a_y": [6.0, 1.0],
            "b": [5.0, -1.0],
        }
        weights = {"a": 0.0, "b": 1.0}
        answer = backend(service.url, required_rewards=("a", "b"), reward_weights=weights).score(rows(2))
        assert (set(answer.components), set(answer.logged_rewards)) == ({"b"}, {"a", "a_x", "a_y"})


def test_a_row_that_cannot_be_scored_is_nan_and_says_why_and_a_logged_only_one_costs_nothing():
    def answer(items, n):
        results = [{"a": {"total": 1.0}} if each.metadata["n"] else {"b": {"total": 1.0}} for each in items]
        errors = [{"b": "failed: no b"} if each.metadata["n"] else {"a": "failed: no a"} for each in items]
        return Reply(encode(ScoreResponse(results=results, errors=errors)))

    with stub(answer, rewards=("a", "b")) as service:
        weights = {"a": 1.0, "b": 0.0}
        answer = backend(service.url, required_rewards=("a", "b"), reward_weights=weights).score(rows(2))
        assert answer.failed_rows() == [0] and answer.total[1] == 1.0
        assert [(row, [f.reward for f in result]) for row, result in sorted(answer.failures.items())] == [
            (0, ["a"]),
            (1, ["b"]),
        ]


def test_required_rewards_are_checked_at_the_start_and_a_missing_one_is_named():
    with stub(lambda items, n: scores(items), rewards=("odd", "even")) as service:
        remote = backend(service.url)
        remote.check_start()
        assert service.paths == ["/health"]
        remote.score(rows())
        remote.score(rows())
        assert service.paths == ["/health"]
        with pytest.raises(ConfigError, match=r"'evn', which the service .* Did you mean 'even'"):
            backend(service.url, required_rewards=("evn",)).check_start()


def test_the_start_waits_at_most_startup_s():
    begun = {"asked": 0}

    def health():
        begun["asked"] += 1
        return (
            Reply(None) if begun["asked"] < 3 else Reply(plain({"status": "ok", "rewards": {"odd": [True]}}), 200, JSON)
        )

    with stub(lambda items, n: scores(items), health=health) as service:
        backend(service.url, startup_s=30.0).check_start()
        assert begun["asked"] == 3
    with pytest.raises(RewardError, match=r"cannot be reached.* write a larger startup_s") as raised:
        backend(f"http://127.0.0.1:{free_port()}").check_start()
    assert raised.value.code == 6001


def test_a_refused_token_is_found_at_the_start():
    refusal = Reply(plain({"kind": "unauthorized", "detail": "no token"}), 401, JSON)
    with stub(lambda items, n: scores(items), health=lambda: refusal) as service:
        with pytest.raises(RewardError, match=r"401 unauthorized: no token.* Correct the request, the token") as raised:
            backend(service.url, startup_s=30.0).check_start()
        assert raised.value.code == 6002


def test_a_service_that_never_answers_stops_the_start_within_seconds():
    """Nobody reads what this socket is sent."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as deaf:
        port = deaf.getsockname()[1]
        begun = time.monotonic()
        with pytest.raises(RewardError, match="cannot be reached"):
            RemoteRewardBackend(
                config=RemoteRewardSpec(base_url=f"http://127.0.0.1:{port}", required_rewards=("odd",))
            ).check_start()
        assert time.monotonic() - begun < 60.0


def test_the_scoring_process_checks_the_service_before_anything_is_generated():
    service = RewardService(backend=backend(f"http://127.0.0.1:{free_port()}"))
    with pytest.raises(RewardError, match="cannot be reached"):
        service.check_prompts(["a cat"], [{}], ["p:1"])


def test_a_logged_only_scorer_may_be_absent_at_the_start():
    absent = backend(f"http://127.0.0.1:{free_port()}")
    scorers = {"a": BrightnessRewardScorer(), "b": absent}
    WeightedRewards(scorers=scorers, weights={"a": 1.0, "b": 0.0}).check_start()
    with pytest.raises(RewardError, match="cannot be reached"):
        WeightedRewards(scorers=scorers, weights={"a": 1.0, "b": 0.1}).check_start()
    with pytest.raises(RewardError, match="cannot be reached"):
        LengthRewardScorer(scorer=absent).check_start()


def test_metadata_that_cannot_be_sent_names_its_sample():
    said = r"sample 's1' cannot be sent .*metadata\['n'\]"
    with stub(lambda items, n: scores(items)) as service, pytest.raises(RewardError, match=said):
        backend(service.url).score(rows(metadata=[{}, {"n": object()}, {}, {}]))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"base_url": "localhost:8000"}, "must start with http"),
        ({"required_rewards": ()}, "name at least one"),
        ({"reward_weights": {"b": 1.0}}, "must name each of"),
        ({"reward_weights": {"odd": 0.0}}, "positive sum"),
        ({"reward_weights": {"odd": 1.0}, "aggregation_method": "min"}, "has no effect with min"),
        ({"encoding": "json"}, "choose png"),
        ({"encoding": "json", "input_kind": "video"}, "choose mp4"),
        ({"image_quality": 0}, "1..95"),
        ({"batch_size": 0}, ">= 1"),
        ({"timeout": 0.0}, "> 0 seconds"),
        ({"max_retries": -1}, ">= 0"),
    ],
)
def test_contradictory_settings_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        RemoteRewardSpec(**{"base_url": "http://localhost:1", "required_rewards": ("odd",)} | settings)


def test_the_toy_starts_a_service_with_the_toys_of_the_rewards(monkeypatch):
    asked = []

    class Started:
        def __init__(self, config):
            asked.append(config)

        def start(self):
            return service

    with stub(lambda items, n: scores(items)) as service:
        monkeypatch.setattr("reward_service.running.RunningService", Started)
        assert backend("toy").score(rows()).total.tolist() == [2.0, 4.0, 6.0, 8.0]
    assert asked == [
        {"rewards": [{"name": "odd", "scorer": "odd", "device": "cpu"}], "toy": True, "server": {"port": 0}}
    ]
