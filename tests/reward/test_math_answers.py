"""Mathematics is compared in a process with a deadline: no response can hang, crash or silently zero the others."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection

import pytest

from unirl.config.errors import DependencyError, RewardError
from unirl.reward.local.math_boxed import MathBoxedRewardScorer
from unirl.reward.local.math_verify import MathVerifyRewardScorer
from unirl.reward.mathematics import checker as math_checker
from unirl.reward.mathematics import worker as math_worker
from unirl.reward.mathematics.answers import MathSpec
from unirl.reward.mathematics.checker import MathChecker
from unirl.reward.scoring import checked_score
from unirl.testing.reward import check_reward
from unirl.types.reward import RewardRequest

ENDLESS = r"\boxed{9^{9^{9^{9}}}}"


def request(pairs):
    texts, answers = zip(*pairs, strict=True)
    metadata = [{"answer": answer} for answer in answers]
    return RewardRequest(sample_ids=[f"s{i}" for i in range(len(pairs))], texts=list(texts), metadata=metadata)


@pytest.fixture(scope="module")
def boxed():
    return MathBoxedRewardScorer(config=MathSpec(num_workers=2))


@pytest.fixture(scope="module")
def checker():
    checker = MathChecker(1.0)
    yield checker
    checker.close()


def test_equal_mathematics_scores_one_in_a_box(boxed):
    right = [
        (r"thus \boxed{\frac{2}{4}}", "1/2"),
        (r"\boxed{0.5}", r"\frac{1}{2}"),
        (r"\boxed{x^2+2x+1}", "(x+1)^2"),
        (r"\boxed{72}", 72),
        (r"\boxed{50\%}", r"50\%"),
        (r"\boxed{1{,}000}", "1000"),
        (r"\boxed{\{2, 1\}}", r"\{1, 2\}"),
    ]
    wrong = [
        (r"\boxed{\frac{1}{3}}", "1/2"),
        ("the answer is 72", 72),
        ("", "1"),
        (r"\boxed{]]}", "1"),
        (r"\boxed{72} then \boxed{73}", 72),
    ]
    answer = check_reward(boxed, request(right + wrong))
    assert answer.total.tolist() == [1.0] * len(right) + [0.0] * len(wrong)


def test_math_verify_finds_the_answer_without_a_box():
    pairs = [("so x = 5, and the final answer is $\\frac{10}{2}$", "5"), ("It is 7", "7"), ("It is 8", "7"), ("?", "7")]
    assert check_reward(MathVerifyRewardScorer(), request(pairs)).total.tolist() == [1, 1, 0, 0]


def test_an_answer_that_is_not_compared_in_time_has_no_score():
    scorer = MathBoxedRewardScorer(config=MathSpec(timeout_s=1.0))
    begin = time.monotonic()
    answer = scorer.score(request([(r"\boxed{2}", "2"), (ENDLESS, "2"), (r"\boxed{2.0}", "2")]))
    assert time.monotonic() - begin < 60
    assert answer.total.isnan().tolist() == [False, True, False] and answer.total[::2].tolist() == [1, 1]
    assert answer.answers[1] is None and answer.failed_rows() == [1]
    assert "within 1 s" in answer.failures[1][0].why and "max_dropped_fraction" in answer.failures[1][0].why


def test_a_process_that_dies_is_a_failure_and_the_next_question_has_another(checker):
    checker.judge("1", r"\boxed{1}")
    first = checker._process.pid
    os.kill(first, signal.SIGKILL)
    with pytest.raises(RewardError, match=r"ended \(status -9\)"):
        checker.judge("1", r"\boxed{1}")
    assert checker.judge("1", r"\boxed{1}").verdict == "right" and checker._process.pid != first


def test_a_machine_too_slow_for_an_easy_question_is_a_failure(checker, monkeypatch):
    checker.judge("1", r"\boxed{1}")
    monkeypatch.setattr(Connection, "poll", lambda pipe, seconds: seconds == math_checker.START_S)
    with pytest.raises(RewardError, match="too busy"):
        checker.judge("1", r"\boxed{1}")


def test_the_process_has_bounded_memory_and_outlives_its_end(checker, monkeypatch):
    checker.judge("1", r"\boxed{1}")
    assert resource.prlimit(checker._process.pid, resource.RLIMIT_AS) == (math_worker.MEMORY, math_worker.MEMORY)

    def greedy(reference, response):
        raise MemoryError

    monkeypatch.setattr(math_worker, "judge", greedy)
    assert math_worker.reply_to({"reference": "1", "response": "2"})["verdict"] == "undecided"


def test_the_last_error_line_of_a_dying_process_is_shown(monkeypatch, tmp_path):
    script = tmp_path / "worker.py"
    script.write_text("raise SystemExit('no such thing')")
    monkeypatch.setattr(math_checker, "__file__", str(tmp_path / "checker.py"))
    with pytest.raises(RewardError, match="no such thing"):
        MathChecker(1.0).judge("1", r"\boxed{1}")


def test_the_process_ends_with_its_owner_even_in_an_endless_comparison():
    """The owner is killed while the process computes: nobody is left to end it but its own alarm."""
    script = f"""
import threading
from unirl.reward.mathematics.checker import MathChecker
checker = MathChecker(0.25)
checker.judge("1", "1")
checker.deadline_s = 1000.0
threading.Timer(0.5, lambda: print(checker._process.pid, flush=True)).start()
checker.judge("1", {ENDLESS!r})
"""
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    with owner:
        pid = int(owner.stdout.readline())
        owner.kill()
    until = time.monotonic() + 20
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < until:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{pid}")


@pytest.mark.parametrize("metadata", [{}, {"answer": ""}, {"answer": "}{"}])
def test_a_right_answer_that_is_missing_or_not_mathematics_is_found_at_the_start(boxed, metadata):
    why = "no right answer in metadata|the right answer .* is not mathematics"
    with pytest.raises(RewardError, match=why):
        boxed.check_prompt("a question", metadata)
    rows = RewardRequest(sample_ids=["bad"], texts=["no box"], metadata=[metadata])
    with pytest.raises(RewardError, match=f"sample 'bad': ({why})"):
        checked_score(boxed, rows, "math")


def test_a_right_answer_that_is_read_passes(boxed):
    for answer in ("72", 72, "$5$", r"\boxed{3}", r"x \in [1, 2)"):
        boxed.check_prompt("a question", {"answer": answer})


def test_a_missing_library_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(DependencyError, match=r"unirl\[math\]"):
        MathBoxedRewardScorer()


@pytest.mark.parametrize("values", [{"timeout_s": 0.0}, {"num_workers": 0}])
def test_settings_out_of_range_are_refused(values):
    with pytest.raises(ValueError, match=r"MathSpec\."):
        MathSpec(**values)
