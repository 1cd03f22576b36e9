"""The CLIP score is transformers' logit of a picture and its own prompt, over 30."""

import pytest
import torch

from unirl.reward.local.clip import ClipRewardScorer, ClipSpec
from unirl.reward.local.shared.images import as_pil
from unirl.testing.reward import check_reward
from unirl.types.reward import RewardRequest

PROMPTS = ["a red circle", "two dogs, at night", "", "a blue cross on the left of a very long prompt " * 6, "x"]


@pytest.fixture(scope="module")
def scorer():
    return ClipRewardScorer(config=ClipSpec(path="toy", batch_size=4, device="cpu"))


def request():
    images = torch.rand(len(PROMPTS), 3, 40, 28, generator=torch.Generator().manual_seed(0))
    return RewardRequest(sample_ids=list("abcde"), prompts=PROMPTS, images=(images * 255).round() / 255)


def test_scores_are_the_diagonal_of_the_logits_of_all_pairs_over_30(scorer):
    inputs = scorer.processor(
        text=PROMPTS,
        images=as_pil(request().images),
        padding=True,
        truncation=True,
        max_length=77,
        return_tensors="pt",
    )
    with torch.no_grad():
        expected = scorer.model(**inputs).logits_per_image.diagonal() / 30
    torch.testing.assert_close(scorer.score(request()).total, expected, atol=1e-6, rtol=1e-5)


def test_scores_do_not_depend_on_order_or_batch_size(scorer):
    assert list(check_reward(scorer, request(), atol=1e-6).components) == ["clip"]


def test_a_saved_model_is_loaded_from_its_directory(scorer, tmp_path):
    scorer.model.save_pretrained(tmp_path)
    scorer.processor.save_pretrained(tmp_path)
    spec = ClipSpec(path=str(tmp_path), processor=str(tmp_path), batch_size=4, device="cpu")
    assert torch.equal(ClipRewardScorer(config=spec).score(request()).total, scorer.score(request()).total)
