"""PickScore is transformers' CLIP, and nothing of its score depends on how rows are batched."""

import pytest
import torch

from unirl.config.errors import DataError
from unirl.reward.local.pickscore import PickScoreRewardScorer, PickScoreSpec
from unirl.reward.local.shared.images import as_pil
from unirl.testing.reward import check_reward
from unirl.types.reward import RewardRequest

PROMPTS = ["a red circle", "two dogs, at night", "", "a blue cross on the left of a very long prompt " * 6, "x"]


@pytest.fixture(scope="module")
def scorer():
    return PickScoreRewardScorer(config=PickScoreSpec(path="toy", batch_size=4, device="cpu"))


def request():
    images = torch.rand(len(PROMPTS), 3, 40, 28, generator=torch.Generator().manual_seed(0))
    return RewardRequest(
        sample_ids=[f"s{i}" for i in range(len(PROMPTS))], prompts=PROMPTS, images=(images * 255).round() / 255
    )


def test_scores_equal_the_logits_of_clip_over_26(scorer):
    for row, (prompt, image) in enumerate(zip(PROMPTS, as_pil(request().images), strict=True)):
        inputs = scorer.processor(text=[prompt], images=[image], truncation=True, max_length=77, return_tensors="pt")
        with torch.no_grad():
            expected = scorer.model(**inputs).logits_per_image[0, 0] / 26
        torch.testing.assert_close(scorer.score(request()).total[row], expected, atol=1e-6, rtol=1e-5)


def test_scores_do_not_depend_on_order_or_batch_size(scorer):
    answer = check_reward(scorer, request(), atol=1e-6)
    single = PickScoreRewardScorer(config=PickScoreSpec(path="toy", batch_size=1, device="cpu")).score(request())
    torch.testing.assert_close(single.total, answer.total, atol=1e-6, rtol=0)


def test_bfloat16_moves_scores_by_less_than_it_resolves(scorer):
    half = PickScoreRewardScorer(config=PickScoreSpec(path="toy", batch_size=4, device="cpu", dtype="bf16"))
    exact, scores = scorer.score(request()).total, half.score(request()).total
    assert scores.dtype == torch.float32 and not torch.equal(scores, exact)
    logit = half.model.logit_scale.exp().item() / half.divisor  # a cosine of 1
    torch.testing.assert_close(scores, exact, atol=2**-8 * logit, rtol=0)


def test_the_toy_is_the_same_every_time_and_leaves_the_global_generator_alone(scorer):
    state = torch.random.get_rng_state()
    again = PickScoreRewardScorer(config=PickScoreSpec(path="toy", batch_size=4, device="cpu"))
    assert torch.equal(again.score(request()).total, scorer.score(request()).total)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_saved_model_is_loaded_from_its_directory(scorer, tmp_path):
    scorer.model.save_pretrained(tmp_path)
    scorer.processor.save_pretrained(tmp_path)
    spec = PickScoreSpec(path=str(tmp_path), processor=str(tmp_path), batch_size=4, device="cpu")
    assert torch.equal(PickScoreRewardScorer(config=spec).score(request()).total, scorer.score(request()).total)


def test_a_missing_model_is_named_with_a_way_out(tmp_path):
    scorer = PickScoreRewardScorer(config=PickScoreSpec(path=str(tmp_path), device="cpu"))
    with pytest.raises(DataError, match=r"config\.path.*lacks its files.*toy"):
        _ = scorer.model


def test_offloaded_weights_come_back(scorer):
    before = scorer.score(request()).total
    scorer.offload()
    scorer.onload()
    assert torch.equal(scorer.score(request()).total, before)
