"""Judges over HTTP: their answers become scores by stated rules, or failures; faults on the way are outlived."""

from __future__ import annotations

import json
import math
import random
import socket
import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.reward.judges import JudgeServer, Said
from unirl.config.errors import ConfigError, RewardError
from unirl.reward.judges.endpoint import Endpoint, JudgeReply
from unirl.reward.judges.judge import read_scores
from unirl.reward.local.geneval2 import GenEval2RewardScorer, GenEval2Spec, geometric_mean, probability
from unirl.reward.local.unified_reward import UnifiedRewardRewardScorer, UnifiedRewardSpec
from unirl.reward.local.wise import WiseRewardScorer, WiseSpec
from unirl.reward.scoring import checked_score
from unirl.testing.reward import check_reward
from unirl.types.reward import RewardRequest

WISE = "Consistency: 2\nRealism: 1\nAesthetic Quality: 0"
QUESTIONS = [["How many cats are in the picture?", "two"], ["Is there a dog?", "yes"]]


@pytest.fixture
def serve():
    servers = []

    def start(answer):
        servers.append(JudgeServer(answer if callable(answer) else lambda asked: answer))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def patient(kind, server, **values):
    return kind(base_url=server.url, model="judge", retry_delay=0.01, **values)


def wise(server, **values):
    return WiseRewardScorer(config=patient(WiseSpec, server, **values))


def geneval2(server, **values):
    return GenEval2RewardScorer(config=patient(GenEval2Spec, server, **values))


def pictures(count):
    levels = torch.arange(count).float() * 9 / 255
    return levels[:, None, None, None].expand(count, 3, 8, 8) + torch.tensor([0.0, 1, 2])[:, None, None] / 255


def request(count=1, metadata=None):
    return RewardRequest(
        sample_ids=[f"s{i}" for i in range(count)],
        prompts=[f"prompt {i}" for i in range(count)],
        images=pictures(count),
        metadata=[metadata or {}] * count,
    )


# What judges say becomes scores


def test_wiscore_is_the_published_weighted_mean(serve):
    server = serve(Said(WISE))
    answer = wise(server).score(request(2))
    assert answer.total.tolist() == pytest.approx([(0.7 * 2 + 0.2 * 1 + 0.1 * 0) / 2] * 2)
    assert {name: scores[0].item() for name, scores in answer.components.items()} == pytest.approx(
        {"wise": 0.8, "consistency": 2, "realism": 1, "aesthetic": 0}
    )


def test_the_judge_gets_the_exact_pixels_and_the_prompt(serve):
    server = serve(Said(WISE))
    rows = request(3)
    wise(server, concurrency=1).score(rows)
    for asked, image, prompt in zip(server.asked, rows.images, rows.prompts, strict=True):
        assert torch.equal(torch.from_numpy(asked.picture.copy()).permute(2, 0, 1).float() / 255, image)
        assert f"Prompt: {prompt}\n" in asked.question
        assert (asked.body["model"], asked.body["temperature"]) == ("judge", 0)


def test_an_explanation_reaches_the_judge_and_a_missing_one_is_found_at_the_start(serve):
    server = serve(Said(WISE))
    scorer = wise(server, explanation_key="explanation")
    scorer.score(request(metadata={"explanation": "ice that has melted"}))
    assert "What it has to show: ice that has melted\n" in server.asked[0].question
    with pytest.raises(RewardError, match="no explanation for the judge"):
        scorer.check_prompt("ice in the sun", {})


def test_unified_reward_is_the_mean_of_three_scores_on_the_unit_interval(serve):
    server = serve(Said("Alignment Score (1-5): 4\nCoherence Score (1-5): 4.5\nStyle Score (1-5): 2"))
    answer = UnifiedRewardRewardScorer(config=patient(UnifiedRewardSpec, server)).score(request())
    assert answer.total.item() == pytest.approx(((4 + 4.5 + 2) / 3 - 1) / 4)
    assert answer.components["coherence"].item() == 4.5


def test_soft_tifa_is_the_mean_of_the_probabilities_of_right_answers(serve):
    said = {
        QUESTIONS[0][0]: {" Two": math.log(0.5), "2": math.log(0.1), "three": math.log(0.4)},
        QUESTIONS[1][0]: {"yes": math.log(0.3), "YES": math.log(0.2), "no": math.log(0.5)},
    }
    server = serve(
        lambda asked: Said("x", tokens=said[asked.question.removesuffix(" Answer in one word.")], finish="length")
    )
    answer = geneval2(server).score(request(metadata={"vqa_list": QUESTIONS}))
    assert answer.total.item() == pytest.approx(math.sqrt(0.6 * 0.5))
    assert answer.components["geneval2_am"].item() == pytest.approx(0.55)
    assert len(server.asked) == 2 and all(
        asked.body["logprobs"] and asked.body["max_tokens"] == 1 for asked in server.asked
    )
    by_mean = geneval2(server, aggregation="am").score(request(metadata={"vqa_list": QUESTIONS}))
    assert by_mean.total.item() == pytest.approx(0.55)


def test_hard_answers_are_right_or_wrong(serve):
    said = {"How": "2.", "Is ": "No, there is none"}
    server = serve(lambda asked: Said(said[asked.question[:3]]))
    answer = geneval2(server, soft=False).score(request(metadata={"vqa_list": QUESTIONS}))
    assert answer.total.item() == 0 and answer.components["geneval2_am"].item() == 0.5


@pytest.mark.parametrize(
    ("answer", "tokens", "expected"),
    [
        ("yes", {"Yes": 0.6, " yes": 0.2, "yesterday": 0.1}, 0.8),
        ("no", {"no": 0.4, "not": 0.3, "n": 0.2}, 0.4),
        ("purple", {" pur": 0.7, "p": 0.1, "pu": 0.1}, 0.7),
        ("3", {"three": 0.25, "3": 0.5, "thr": 0.125}, 0.875),
        ("red", {"blue": 1.0}, 0.0),
        ("red", {"red": 0.75, "Red": 0.75}, 1.0),
    ],
)
def test_the_first_token_decides(answer, tokens, expected):
    assert probability(JudgeReply("", tokens), answer) == pytest.approx(expected)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=9))
def test_the_geometric_mean_is_the_root_of_the_product(values):
    assert geometric_mean(values) == pytest.approx(math.prod(values) ** (1 / len(values)), rel=1e-9, abs=1e-30)


def test_a_score_depends_on_its_own_image_whatever_the_order_of_answers(serve):
    def slow_for_dark_ones(asked):
        time.sleep(0.05 * (asked.picture[0, 0, 0] == 0))
        grade = int(asked.picture[0, 0, 0]) // 9 % 3
        return Said(f"Consistency: {grade}\nRealism: {grade}\nAesthetic Quality: {grade}")

    answer = check_reward(wise(serve(slow_for_dark_ones)), request(6))
    assert answer.total.tolist() == [0, 0.5, 1] * 2


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        (WiseRewardScorer, WiseSpec),
        (UnifiedRewardRewardScorer, UnifiedRewardSpec),
        (GenEval2RewardScorer, GenEval2Spec),
    ],
)
def test_the_toy_uses_the_same_code_path(kind, spec):
    toy = kind(config=spec(**{"model": "toy"} | spec.toy))
    answer = check_reward(toy, request(8, {"vqa_list": QUESTIONS}))
    assert len(set(answer.total.tolist())) > 2
    assert isinstance(toy.judge, Endpoint)


# What they should not say


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "empty reply"),
        ("I cannot grade this.", "Consistency: number"),
        ("Consistency: 2\nRealism: 1", "Aesthetic Quality: number"),
        (WISE.replace("Realism: 1", "Realism: 3"), "Realism 3, which lies outside 0 to 2"),
        (WISE.replace("Realism: 1", "Realism: -1"), "Realism -1, which lies outside"),
        (WISE.replace("Realism: 1", "Realism: 1.5"), "realism 1.5, which is not 0, 1 or 2"),
        (WISE.replace("Realism: 1", "Realism: two"), "Realism: number"),
        (WISE.replace("Realism: 1", "Realism: 1/2"), "Realism: number"),
        (WISE + "\nRealism: 2", r"says \[1.0, 2.0\]"),
    ],
)
def test_an_answer_of_another_form_is_a_failure_of_that_sample(serve, text, why):
    scorer = wise(serve(lambda asked: Said(text if asked.picture[0, 0, 0] else WISE)))
    answer = scorer.score(request(2))
    assert answer.total[0].item() == pytest.approx(0.8) and answer.failed_rows() == [1]
    with pytest.raises(RewardError, match=f"sample 's1': .*{why}"):
        checked_score(scorer, request(2), "wise")


def test_labels_are_found_in_usual_formatting():
    labels = {"a": "Realism", "b": "Style Score"}
    plain, marked = "Realism: 2\nStyle Score (1-5): 4", "- **Realism:** 2\n* Style Score = 4.0."
    for text in (plain, marked, "realism : 2 \r\nSTYLE SCORE: 4"):
        assert read_scores(text, labels, 0, 5) == {"a": 2, "b": 4}, text


@pytest.mark.parametrize("metadata", [{}, {"vqa_list": []}, {"vqa_list": "x"}, {"vqa_list": [["q"]]},
                                      {"vqa_list": [["q", ""]]}, {"vqa_list": [["q", 2]]}])  # fmt: skip
def test_a_prompt_without_questions_is_found_at_the_start_and_named_when_scored(serve, metadata):
    scorer = geneval2(serve(Said("yes")))
    why = "no questions in metadata 'vqa_list'|holds .* which is not a pair"
    with pytest.raises(RewardError, match=why):
        scorer.check_prompt("prompt", metadata)
    with pytest.raises(RewardError, match=f"sample 's0': .*({why})"):
        checked_score(scorer, request(metadata=metadata), "geneval2")


def test_missing_log_probs_name_the_way_out(serve):
    with pytest.raises(RewardError, match="soft: false"):
        checked_score(geneval2(serve(Said("yes"))), request(metadata={"vqa_list": QUESTIONS}), "geneval2")


# Faults on the way


def test_a_fifth_of_all_attempts_failing_loses_and_changes_nothing(serve):
    lock, rng = threading.Lock(), random.Random(0)
    faults = [Said(status=500), Said(status=503, headers={"Retry-After": "0"}), Said(drop=True), Said(body=b'{"choi'),
              Said(body=b"<html>"), Said(WISE, headers={"Content-Length": "9999"}), Said(status=408)]  # fmt: skip

    def answer(asked):
        with lock:
            failing = rng.random() < 0.2
            fault = rng.choice(faults)
        grade = int(asked.picture[0, 0, 0]) // 9 % 3
        return fault if failing else Said(WISE.replace("Consistency: 2", f"Consistency: {grade}"))

    rows = request(28)
    answer = wise(serve(answer), retries=8, timeout=0.5).score(rows)
    assert not answer.failures
    assert answer.components["consistency"].tolist() == [i % 3 for i in range(28)]


@pytest.mark.parametrize(
    ("said", "attempts", "why", "code"),
    [
        (Said(status=500, body=b"out of memory"), 3, "3 attempts, the last one: status 500: out of memory", 6002),
        (Said(drop=True), 3, "3 attempts", 6002),
        (Said(body=b"{}"), 3, "not a completion", 6002),
        (Said(status=413, body=b"too large"), 1, "refuses: status 413: too large", 6002),
        (Said(status=401), 1, "refuses: status 401", 6001),
        (Said(status=404), 1, "Correct base_url, model, api_key_env", 6001),
        (Said("Consistency: 2\nReal", finish="length"), 1, r"cut off \(length\)", 6002),
    ],
)
def test_a_permanent_fault_is_an_error_with_its_reason(serve, said, attempts, why, code):
    server = serve(said)
    with pytest.raises(RewardError, match=why) as caught:
        checked_score(wise(server, retries=2), request(), "wise")
    assert (caught.value.code, len(server.asked)) == (code, attempts)


def test_a_response_body_beyond_the_limit_is_not_read(serve, monkeypatch):
    monkeypatch.setattr("unirl.config.http.MAX_BODY_BYTES", 10_000)
    with pytest.raises(RewardError, match="more than 10000 bytes"):
        checked_score(wise(serve(Said("x" * 20_000)), retries=0), request(), "wise")


def test_a_judge_that_does_not_answer_in_time_is_given_up(serve):
    server = serve(lambda asked: time.sleep(1.0) or Said(WISE))
    with pytest.raises(RewardError, match="Timeout"):
        checked_score(wise(server, timeout=0.1, retries=1), request(), "wise")


def test_an_unreachable_judge_stops_the_run_instead_of_dropping_samples():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        scorer = WiseRewardScorer(config=WiseSpec(base_url=url, model="judge", retries=1, retry_delay=0.01))
        with pytest.raises(RewardError, match="2 attempts") as caught:
            scorer.score(request(3))
    assert caught.value.code == 6001


def test_an_unusable_judge_is_found_at_the_start(serve):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    absent = WiseRewardScorer(config=WiseSpec(base_url=f"http://127.0.0.1:{port}/v1", model="judge"))
    with pytest.raises(RewardError, match=r"no server answers at .* Start the judge, or correct base_url"):
        absent.check_start()
    server = serve(Said(WISE))
    server.listed = Said(status=401, body=b"no key")
    with pytest.raises(RewardError, match=r"refuses: status 401: no key.* api_key_env"):
        wise(server).check_start()
    server.listed = Said(body=json.dumps({"object": "list", "data": [{"id": "judge-2"}]}).encode())
    with pytest.raises(RewardError, match=r"does not serve 'judge'\. Did you mean 'judge-2'"):
        wise(server).check_start()
    assert server.asked == []


@pytest.mark.parametrize(
    "listed",
    [
        Said(status=404, body=b""),
        Said(status=500, body=b"oops"),
        Said(body=b"<html>"),
        Said(body=b'{"data": [{"id": "judge"}, {"id": "other"}]}'),
    ],
)
def test_a_judge_that_lists_its_model_or_no_models_passes_the_check(serve, listed):
    server = serve(Said(WISE))
    server.listed = listed
    wise(server).check_start()


# Keys and settings


def test_the_key_comes_from_the_named_variable_and_is_never_shown(serve, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "sk-canary")
    server = serve(Said(status=401, body=b"bad key"))
    with pytest.raises(RewardError) as caught:
        wise(server, api_key_env="JUDGE_KEY").score(request())
    assert server.asked[0].headers["Authorization"] == "Bearer sk-canary"
    assert "sk-canary" not in str(caught.value)
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(ConfigError, match="JUDGE_KEY, which is not set"):
        wise(server, api_key_env="JUDGE_KEY")


@pytest.mark.parametrize("values", [{"base_url": "ftp://x"}, {"timeout": 0.0}, {"retries": -1}, {"concurrency": 0}])
def test_settings_out_of_range_are_refused(values):
    with pytest.raises(ValueError, match=r"WiseSpec\."):
        WiseSpec(**{"base_url": "http://127.0.0.1/v1", "model": "judge"} | values)
