"""The OCR reward reads real letters, follows its stated rule, and never turns a failure into a zero."""

from __future__ import annotations

import random
import sys
import types
from importlib.machinery import ModuleSpec

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scripts.lettering import FONTS, lettered
from unirl.config.errors import DependencyError, RewardError
from unirl.reward.local.ocr import Line, OCRRewardScorer, OCRSpec, comparable, in_reading_order, similarity
from unirl.reward.scoring import checked_score
from unirl.testing.reward import check_reward
from unirl.types.reward import RewardRequest

WORDS = ("Open Daily", "SALE 50%", "New York", "Fresh Bread", "Zebra")


@pytest.fixture(scope="module")
def scorer():
    return OCRRewardScorer()


def asked(words):
    return [f'a sign that says "{word}", photo' for word in words]


def request(words, images):
    return RewardRequest(
        sample_ids=[f"s{i}" for i in range(len(words))], prompts=asked(words), images=torch.stack(images)
    )


def colors(rng):
    dark, light = (tuple(rng.randrange(low, low + 90) for _ in range(3)) for low in (0, 165))
    return (dark, light) if rng.random() < 0.5 else (light, dark)


def levenshtein(a, b):
    """By the textbook's table: the oracle of rapidfuzz's."""
    row = list(range(len(b) + 1))
    for i, left in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, right in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (left != right))
    return row[-1]


def test_words_in_five_fonts_and_many_colors_are_read(scorer):
    rng = random.Random(0)
    drawn = [(word, lettered([word], font=font, colors=colors(rng))) for font in FONTS for word in WORDS]
    scores = scorer.score(request(*zip(*drawn, strict=True))).total
    assert (scores == 1).float().mean() >= 0.95, scores.reshape(len(FONTS), -1)
    assert scores.mean() >= 0.98


def test_words_on_two_lines_small_turned_or_noisy_are_read(scorer):
    noise = 0.1 * torch.randn(3, 256, 256, generator=torch.Generator().manual_seed(0))
    words = ["Hello brave new world", "tiny letters", "on a slope", "in the noise"]
    images = [
        lettered(["Hello brave", "new world"]),
        lettered(["tiny letters"], height=12),
        lettered(["on a slope"], turn=12.0),
        (lettered(["in the noise"]) + noise).clamp(0, 1),
    ]
    assert scorer.score(request(words, images)).total.tolist() == [1.0] * 4


def test_an_image_of_any_size_is_read(scorer):
    images = [lettered([word], size=512, height=height) for word, height in (("Coffee", 60), ("No Parking", 12))]
    assert scorer.score(request(("Coffee", "No Parking"), images)).total.tolist() == [1.0, 1.0]
    assert scorer.score(request(("Cafe",), [lettered(["Cafe"], size=64, height=12)])).total.tolist() == [1.0]


def test_a_wrong_letter_costs_its_share_and_a_blank_image_scores_0(scorer):
    images = [lettered(["Zebra"]), lettered(["Zebrk"]), torch.ones(3, 256, 256)]
    assert scorer.score(request(["Zebra"] * 3, images)).total.tolist() == pytest.approx([1.0, 0.8, 0.0])


def test_images_of_one_character_are_read_as_a_line():
    scorer = OCRRewardScorer(config=OCRSpec(detect=False, text_score=0.0))
    digits = list("0123456789")
    images = [lettered([digit], size=32, height=28) for digit in digits]
    assert scorer.score(request(digits, images)).total.mean() >= 0.9


def test_a_score_depends_on_its_image_alone():
    words = ("Open", "SALE", "York", "Bread")
    rows = request(words, [lettered([word], size=96, height=16) for word in (*words[:3], "something")])
    answers = [check_reward(OCRRewardScorer(config=OCRSpec(side=96, num_threads=n)), rows, atol=0.0) for n in (1, 2)]
    assert torch.equal(answers[0].total, answers[1].total)
    assert answers[0].total.tolist()[:3] == [1.0] * 3 and answers[0].total[3] <= 0.4


@given(st.text("abcD 1", max_size=12), st.text("abCd 1", min_size=1, max_size=8).filter(str.strip))
def test_the_score_is_the_capped_edit_distance_without_white_space_and_case(read, wanted):
    result, target = comparable(read), comparable(wanted)
    distance = 0 if target in result else min(levenshtein(result, target), len(target))
    assert similarity(read, target) == pytest.approx(1 - distance / len(target))


def test_the_target_is_the_first_quoted_span_or_a_metadata_key():
    by_prompt, by_key = OCRRewardScorer(), OCRRewardScorer(config=OCRSpec(target_key="text"))
    assert by_prompt.target('"One Way" and "Two"', {}) == "oneway"
    assert by_prompt.target("a wall with \u201cHi You\u201d on it", {}) == "hiyou"
    assert by_key.target('a sign that says "no"', {"text": "YES"}) == "yes"
    assert (by_prompt.reads, by_key.reads) == (("images", "prompts"), ("images", "metadata"))


@pytest.mark.parametrize("prompt", ["a sign that says Open", 'half a "quote', 'nothing: ""', 'blank: "  "'])
def test_a_prompt_without_a_target_is_found_at_the_start_and_named_when_scored(scorer, prompt):
    with pytest.raises(RewardError, match=r"no text in double quotes .* Write it as in"):
        scorer.check_prompt(prompt, {})
    rows = RewardRequest(sample_ids=["good", "bad"], prompts=['"A"', prompt], images=torch.ones(2, 3, 64, 64))
    with pytest.raises(RewardError, match="sample 'bad': no text in double quotes"):
        checked_score(scorer, rows, "ocr")
    answer = scorer.score(rows)
    assert answer.total[0] == 0 and answer.failed_rows() == [1]


@pytest.mark.parametrize("metadata", [{}, {"text": 7}, {"text": " "}])
def test_a_missing_metadata_key_is_found_at_the_start(metadata):
    with pytest.raises(RewardError, match="metadata 'text'"):
        OCRRewardScorer(config=OCRSpec(target_key="text")).check_prompt('"Open"', metadata)


def test_an_exception_of_the_engine_is_a_failure_of_that_sample():
    def read(picture):
        if picture.mean() < 100:
            raise RuntimeError("cannot read this")
        return [Line("Open", 0, 0, 10)]

    scorer = OCRRewardScorer()
    scorer.read = read
    answer = scorer.score(request(["Open", "Open"], [torch.ones(3, 8, 8), torch.zeros(3, 8, 8)]))
    assert answer.total[0] == 1 and answer.failed_rows() == [1]
    assert answer.failures[1][0].why == "reward 'ocr', sample 's1': RuntimeError: cannot read this"


def test_pieces_at_one_height_are_read_from_the_left_whatever_their_order():
    lines = [Line("York", 500, 100, 190), Line("New", 20, 112, 200), Line("!", 10, 300, 350), Line("Hi", 10, 0, 60)]
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]):
        assert in_reading_order([lines[i] for i in order]) == "HiNewYork!"


def test_paddleocr_is_called_as_documented(monkeypatch):
    """PaddleOCR 3.7's parameters and result keys; its models are on a hub."""
    asked_for = {}

    class PaddleOCR:
        def __init__(self, **parameters):
            asked_for.update(parameters)

        def predict(self, picture):
            assert picture.dtype == np.uint8 and picture[0, 0].tolist() == [0, 0, 255], "blue, green, red"
            corners = np.array([[[50, 0], [90, 0], [90, 20], [50, 20]], [[0, 2], [40, 2], [40, 22], [0, 22]]])
            return [{"rec_texts": ["Way", "One"], "rec_scores": [0.9, 0.9], "rec_polys": corners}]

    module = types.ModuleType("paddleocr")
    module.PaddleOCR = PaddleOCR
    module.__spec__ = ModuleSpec("paddleocr", None, origin="a stand-in")
    monkeypatch.setitem(sys.modules, "paddleocr", module)
    red = torch.tensor([1.0, 0.0, 0.0])[:, None, None].expand(3, 8, 8)
    scorer = OCRRewardScorer(config=OCRSpec(engine="paddleocr", lang="fr"))
    assert scorer.score(request(["One Way"], [red])).total.tolist() == [1.0]
    assert asked_for["lang"] == "fr" and asked_for["device"] == "cpu"


@pytest.mark.parametrize("values", [{"lang": "fr"}, {"side": 8}, {"text_score": 2.0}, {"num_threads": 0},
                                    {"engine": "paddleocr", "detect": False}])  # fmt: skip
def test_settings_without_effect_or_out_of_range_are_refused(values):
    with pytest.raises(ValueError, match=r"OCRSpec\."):
        OCRSpec(**values)


def test_a_missing_library_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "rapidocr", None)
    with pytest.raises(DependencyError, match=r"unirl\[ocr\]"):
        OCRRewardScorer()
