"""EditReward is Qwen2.5-VL with two heads on one token; it sees what was edited, here and through a service."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen2_5_VLConfig

from unirl.config.errors import DataError, RewardError
from unirl.reward.local.editreward import (
    ASPECTS,
    EditRewardRewardScorer,
    EditRewardSpec,
    read_questions,
)
from unirl.reward.local.shared.vision_language import toy_vl_config
from unirl.reward.remote import RemoteRewardBackend, RemoteRewardSpec, RequestItems
from unirl.reward.service import RewardService
from unirl.testing.reward import check_reward
from unirl.types.primitives import Images, MediaRef, PromptImages, Texts
from unirl.types.reward import RewardRequest
from unirl.types.rollout_req import RolloutReq
from unirl.types.rollout_resp import RolloutResp, RolloutTrack

QUESTIONS = (
    'import nothing\nINSTRUCTION_EDIT_FOLLOWING = "F {text_prompt}"\nINSTRUCTION_EDIT_QUALITY = "Q {text_prompt}"\n'
)
PROMPTS = ["make it red", "turn both dogs away from the moon, and let it be night", "x"]


@pytest.fixture(scope="module")
def scorer() -> EditRewardRewardScorer:
    made = EditRewardRewardScorer(config=EditRewardSpec(path="toy", dtype="fp32", device="cpu"))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in made.model.parameters():  # away from 0 and 1, so that nothing can be mixed up unseen
            weight.add_(0.05 * torch.randn(weight.shape, generator=generator))
    return made


def drawn(seed: int, height: int, width: int) -> Tensor:
    """[3, height, width] on the 256 levels."""
    return torch.randint(256, (3, height, width), generator=torch.Generator().manual_seed(seed)) / 255


def request(encoded: int = 3) -> RewardRequest:
    images = torch.stack([drawn(i, 56, 84) for i in range(encoded)])
    sources = [[drawn(10 + i, 56, 84 if i else 56)] for i in range(encoded)]
    return RewardRequest(
        sample_ids=list("abc"[:encoded]), prompts=PROMPTS[:encoded], images=images, sources=sources, metadata=[{}] * 3
    )


@torch.no_grad()
def published_mean(scorer: EditRewardRewardScorer, head: int, prompt: str, pictures: list[Tensor]) -> Tensor:
    """The published class, step by step: the pictures' states in place of their tokens, then a text model like any."""
    processor = scorer.processors[head]
    network: Any = scorer.model
    tokens, patches, grids = processor.inputs([processor.tokenize(prompt, num_images=2)], [pictures])
    tokens = tokens[:, : int((tokens != processor.tokenizer.pad_token_id).sum())]
    states = network.backbone.language_model.embed_tokens(tokens)
    seen = torch.cat(list(network.backbone.get_image_features(patches, grids).pooler_output))
    states = states.masked_scatter((tokens == processor.image_id)[..., None].expand_as(states), seen)
    states = network.backbone.language_model(inputs_embeds=states).last_hidden_state
    answer: Tensor = network.heads[head](states)[tokens == processor.reward_id][0, 0]
    return answer


def test_scores_are_the_means_of_both_heads_of_the_published_class(scorer: EditRewardRewardScorer) -> None:
    asked = request()
    result = scorer.score(asked)
    assert asked.images is not None and asked.sources is not None
    for row, prompt in enumerate(PROMPTS):
        pictures = [asked.sources[row][0], asked.images[row]]
        expected = [published_mean(scorer, head, prompt, pictures) for head in range(2)]
        for name, mean in zip(ASPECTS, expected, strict=True):
            torch.testing.assert_close(result.components[name][row], mean, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(result.total[row], sum(expected) / 2, atol=1e-6, rtol=1e-5)


@pytest.mark.slow
def test_a_score_depends_on_prompt_and_both_images_of_its_row_alone(scorer: EditRewardRewardScorer) -> None:
    asked = request()
    before = check_reward(scorer, asked).total
    assert asked.images is not None and asked.sources is not None
    turned = RewardRequest(
        sample_ids=asked.sample_ids,
        prompts=PROMPTS,
        images=torch.stack([drawn(10 + i, 56, 84) for i in range(3)]),
        sources=[[image] for image in asked.images],
    )
    for other in (turned, RewardRequest(**{**vars(asked), "prompts": PROMPTS[1:] + PROMPTS[:1]})):
        assert (scorer.score(other).total - before).abs().min() > 1e-6


def test_the_names_of_a_published_checkpoint_are_read(scorer: EditRewardRewardScorer, tmp_path: Path) -> None:
    own = scorer.model.state_dict()
    weights = {name.replace("backbone.", "model."): tensor for name, tensor in own.items()}
    weights = {name.replace("heads.", "rm_heads.head_"): tensor for name, tensor in weights.items()}
    weights["lm_head.weight"] = torch.zeros(2)
    processor = scorer.processors[0]
    save_file({name: tensor.clone() for name, tensor in weights.items()}, tmp_path / "model.safetensors")
    config = toy_vl_config(Qwen2_5_VLConfig, processor, EditRewardRewardScorer.toy_vision)
    for part in (config, processor.tokenizer, processor.image_processor):
        part.save_pretrained(tmp_path / "qwen")
    (tmp_path / "prompts.py").write_text(QUESTIONS)
    (tmp_path / "data_collator_qwen_edit.py").write_text('prompt_with_special_token = " <|Reward|>"\n')
    spec = EditRewardSpec(
        path=str(tmp_path), processor=str(tmp_path / "qwen"), questions=str(tmp_path), dtype="fp32", device="cpu"
    )
    again = EditRewardRewardScorer(config=spec).model.state_dict()
    assert own.keys() == again.keys() and all(torch.equal(own[name], again[name]) for name in own)
    del weights["rm_heads.head_1.0.weight"]
    save_file({name: tensor.clone() for name, tensor in weights.items()}, tmp_path / "model.safetensors")
    with pytest.raises(DataError, match=r"0\.weight"):
        _ = EditRewardRewardScorer(config=spec).model


def test_questions_are_parsed_from_the_authors_files_without_running_them(tmp_path: Path) -> None:
    (tmp_path / "prompts.py").write_text(QUESTIONS)
    ending = tmp_path / "data_collator_qwen_edit.py"
    with pytest.raises(DataError, match=r"data_collator_qwen_edit\.py cannot be read"):
        read_questions(str(tmp_path))
    ending.write_text('prompt_with_special_token = " <|Reward|>"\n')
    assert read_questions(str(tmp_path)) == ["F {text_prompt} <|Reward|>", "Q {text_prompt} <|Reward|>"]
    ending.write_text('prompt_with_special_token = ""\n')
    with pytest.raises(DataError, match=r"must contain \{text_prompt\} and <\|Reward\|> once each"):
        read_questions(str(tmp_path))
    with pytest.raises(DataError, match=r"config\.questions is needed"):
        read_questions(None)


def test_several_source_images_are_refused(scorer: EditRewardRewardScorer) -> None:
    asked = request()
    two = RewardRequest(**{**vars(asked), "sources": [[drawn(0, 56, 56)] * 2] * 3})
    with pytest.raises(RewardError, match=r"compares with one source image, and the prompt of sample .a. has 2"):
        scorer.score(two)


def edited(folder: Path, refs: list[tuple[MediaRef, ...]]) -> tuple[RolloutReq, RolloutResp]:
    """A request whose prompts bring pictures, and what was drawn for it: 56 x 84 pixels."""
    ids = [f"g{i}" for i in range(len(refs))]
    req = RolloutReq(
        sample_ids=ids,
        group_ids=ids,
        primitives={"text": Texts(texts=PROMPTS[: len(refs)]), "images": PromptImages(per_prompt=refs)},
        metadata=[{} for _ in refs],
        tracks={},
        purpose="r",
        step=0,
    )
    track = RolloutTrack(
        sample_ids=ids,
        group_ids=ids,
        conditions={},
        segment=torch.zeros(len(refs)),
        decoded=Images(pixels=torch.stack([drawn(i, 56, 84) for i in range(len(refs))])),
        weight=torch.ones(len(refs)),
        weight_version=torch.zeros(len(refs), dtype=torch.int64),
    )
    return req, RolloutResp({"image": track})


def saved(path: Path, pixels: Tensor) -> tuple[MediaRef, ...]:
    levels = pixels.mul(255).round().to(torch.uint8).permute(1, 2, 0).contiguous()
    Image.fromarray(levels.numpy()).save(path)
    return (MediaRef("image", "condition", str(path)),)


def test_a_scorer_gets_the_source_images_as_the_model_saw_them(scorer: EditRewardRewardScorer, tmp_path: Path) -> None:
    """Cut to the sample's size: of a picture that has it already, the very pixels."""
    sources = [drawn(20, 56, 84), drawn(21, 56, 84)]
    refs = [saved(tmp_path / f"{i}.png", source) for i, source in enumerate(sources)]
    req, resp = edited(tmp_path, refs)
    result = RewardService(backend=scorer).score_and_attach(req, resp).tracks["image"].rewards
    images = torch.stack([drawn(i, 56, 84) for i in range(2)])
    asked = RewardRequest(sample_ids=["a", "b"], prompts=PROMPTS[:2], images=images, sources=[[s] for s in sources])
    assert result is not None
    torch.testing.assert_close(result, scorer.score(asked).total, atol=1e-6, rtol=0)


def test_a_prompt_without_a_source_image_is_refused(scorer: EditRewardRewardScorer, tmp_path: Path) -> None:
    req, resp = edited(tmp_path, [(), ()])
    with pytest.raises(RewardError, match=r"prompt of sample 'g0' has no image: give it media_refs"):
        RewardService(backend=scorer).score_and_attach(req, resp)


@pytest.mark.parametrize("encoding", ["msgpack", "json"])
def test_the_source_image_is_sent_in_an_earlier_turn(encoding: str) -> None:
    config = RemoteRewardSpec(
        base_url="http://127.0.0.1:1",
        required_rewards=("editreward",),
        sends_sources=True,
        encoding=encoding,  # type: ignore[arg-type]
        image_format="png",
    )
    assert RemoteRewardBackend(config=config).reads == ("prompts", "images", "metadata", "sources")
    source, answer = RequestItems(request(), config)[1].history
    assert source.text == answer.text == PROMPTS[1]
    assert source.has_image and answer.has_image and source != answer
    with pytest.raises(ValueError, match="sends_sources needs input_kind=image"):
        RemoteRewardSpec(base_url="toy", required_rewards=("x",), sends_sources=True, input_kind="video")


@pytest.mark.slow
def test_a_service_returns_the_scores_of_the_local_scorer() -> None:
    pytest.importorskip("reward_service")
    config = RemoteRewardSpec(base_url="toy", required_rewards=("editreward",), sends_sources=True, timeout=120.0)
    toy = EditRewardRewardScorer(config=EditRewardSpec(path="toy", dtype="fp32", device="cpu"))
    there, here = RemoteRewardBackend(config=config).score(request()), toy.score(request())
    torch.testing.assert_close(there.total, here.total, atol=1e-5, rtol=0)
    torch.testing.assert_close(there.components["editreward_edit_quality"], here.components["edit_quality"])
