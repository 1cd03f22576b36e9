"""The aesthetic predictor is one linear map of CLIP's normalised image embedding."""

import pytest
import torch
from transformers import CLIPImageProcessorPil, CLIPModel, CLIPVisionModelWithProjection

from unirl.config.errors import DataError
from unirl.reward.local.aesthetic import AestheticRewardScorer, AestheticSpec
from unirl.reward.local.shared.clip import toy_clip_config
from unirl.reward.local.shared.images import as_pil
from unirl.reward.local.shared.pretrained import fixed_seed
from unirl.testing.reward import check_reward
from unirl.types.reward import RewardRequest

SIZES = (1024, 128, 64, 16, 1)
PLACES = (0, 2, 4, 6, 7)
"""Where the linear maps stand in the published file, whose Sequential also has dropouts."""


def request(height=40, width=28):
    images = torch.rand(5, 3, height, width, generator=torch.Generator().manual_seed(0))
    return RewardRequest(sample_ids=list("abcde"), images=(images * 255).round() / 255)


def head_file(folder):
    """A checkpoint as it is published: layers.{0, 2, 4, 6, 7}.{weight, bias}."""
    generator, weights = torch.Generator().manual_seed(1), {}
    for place, before, after in zip(PLACES, (32, *SIZES), SIZES, strict=False):
        weights[f"layers.{place}.weight"] = torch.randn(after, before, generator=generator) / before**0.5
        weights[f"layers.{place}.bias"] = torch.randn(after, generator=generator)
    torch.save(weights, folder / "aesthetic-model.pth")
    return weights


def toy_clip():
    with fixed_seed():
        return CLIPModel(toy_clip_config())


def published(folder, **changes):
    toy_clip().save_pretrained(folder / "clip")
    head_file(folder)
    fields = {"path": str(folder / "clip"), "head": str(folder), "batch_size": 4, "device": "cpu"}
    return AestheticRewardScorer(config=AestheticSpec(**(fields | changes)))


def test_scores_are_one_matrix_times_the_unit_embedding_plus_a_number(tmp_path):
    """The five layers without activations, multiplied out, on the embedding that the whole CLIP gives."""
    scorer, weights = published(tmp_path), head_file(tmp_path)
    matrix, offset = torch.eye(32), torch.zeros(32)
    for place in PLACES:
        matrix = weights[f"layers.{place}.weight"] @ matrix
        offset = weights[f"layers.{place}.weight"] @ offset + weights[f"layers.{place}.bias"]
    processor = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    pixels = processor(as_pil(request().images), return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        embedding = toy_clip().eval().get_image_features(pixel_values=pixels).pooler_output
    expected = (embedding / embedding.norm(dim=1, keepdim=True)) @ matrix[0] + offset[0]
    torch.testing.assert_close(scorer.score(request()).total, expected, atol=2e-5, rtol=1e-5)
    assert expected.std() > 0.005


def test_the_vision_half_of_a_saved_clip_is_what_is_loaded(tmp_path):
    scorer = published(tmp_path)
    assert isinstance(scorer.model.clip, CLIPVisionModelWithProjection)
    whole = CLIPModel.from_pretrained(tmp_path / "clip").state_dict()
    assert all(torch.equal(tensor, whole[name]) for name, tensor in scorer.model.clip.state_dict().items())


def test_a_head_by_its_file_is_the_same_and_one_that_does_not_fit_is_refused(tmp_path):
    first = published(tmp_path)
    by_file = published(tmp_path, head=str(tmp_path / "aesthetic-model.pth"))
    assert torch.equal(by_file.score(request()).total, first.score(request()).total)
    torch.save({"layers.0.weight": torch.zeros(1024, 32), "layers.1.weight": torch.zeros(1)}, tmp_path / "other.pth")
    with pytest.raises(DataError, match=r"config\.head: .*fit Sequential: 9 missing .*1 unexpected \(1\.weight"):
        _ = published(tmp_path, head=str(tmp_path / "other.pth")).model
    with pytest.raises(DataError, match=r"config\.head='.*': the directory holds no aesthetic-model\.pth"):
        _ = published(tmp_path, head=str(tmp_path / "clip")).model


def test_scores_do_not_depend_on_prompts_order_or_batch_size():
    toy = AestheticRewardScorer(config=AestheticSpec(path="toy", batch_size=4, device="cpu"))
    answer = check_reward(toy, request(), atol=1e-6)
    assert toy.reads == ("images",) and list(answer.components) == ["aesthetic"]
    images = request(32, 32).images
    torch.testing.assert_close(
        toy.objective(images, [""] * len(images)), toy.score(request(32, 32)).total, atol=1e-6, rtol=0
    )
