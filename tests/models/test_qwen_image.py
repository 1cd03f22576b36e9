"""Chat, tokens, sizes and refused checkpoints of Qwen-Image, compared with diffusers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.models.family_cases import CASES, built, changed
from unirl.config.errors import DataError
from unirl.models.denoising.packing import packed, unpacked
from unirl.models.qwen_image.family import (
    QWEN_IMAGE,
    TEMPLATE,
    QwenImageBundle,
    QwenImagePipeline,
    toy_tokenizers,
)
from unirl.models.qwen_image_edit.family import QwenImageEditBundle
from unirl.testing.family import euler, untrained

RAGGED = ("a red circle", "two blue squares on the left of a green one", "", " ")


@pytest.fixture(scope="module")
def toy() -> QwenImagePipeline:
    return built(next(case for case in CASES if case.name == "qwen_image"))  # type: ignore[return-value]


def expect_equal(embeds: Tensor, mask: Tensor, theirs: Tensor, their_mask: Tensor | None) -> None:
    """Theirs are as long as the longest prompt; where a mask is missing, no token is padding."""
    length = theirs.shape[1]
    wanted = torch.ones(theirs.shape[:2]).bool() if their_mask is None else their_mask.bool()
    assert torch.equal(mask[:, :length], wanted) and not mask[:, length:].any()
    assert (embeds[:, :length] - theirs).abs().max() < 1e-5 and not embeds[:, length:].any()


def test_the_opening_has_as_many_toy_tokens_as_diffusers_drops() -> None:
    assert len(toy_tokenizers()["tokenizer"](TEMPLATE.opening).input_ids) == TEMPLATE.num_dropped


@pytest.mark.parametrize("length", [16, 60])
def test_embeddings_are_those_of_diffusers_however_long_the_prompts(toy: QwenImagePipeline, length: int) -> None:
    with torch.no_grad():
        ours = toy.bundle.text_encoder().encode(RAGGED, length)
        theirs = untrained(toy).encode_prompt([text or " " for text in RAGGED], max_sequence_length=length)
    assert ours.embeds.shape[1] == length and ours.mask is not None
    expect_equal(ours.embeds, ours.mask, *theirs)


def test_tokens_are_packed_as_in_diffusers_and_back() -> None:
    from diffusers import QwenImagePipeline as Theirs

    latents = torch.arange(2 * 3 * 4 * 6).float().view(2, 3, 4, 6)
    tokens = packed(latents, 2)
    assert torch.equal(tokens, Theirs._pack_latents(latents, 2, 3, 4, 6))
    assert torch.equal(unpacked(tokens, latents.shape, 2), latents)


def test_the_public_checkpoints_are_known_without_a_connection() -> None:
    sizes = {name: count / 1e9 for name, count in QwenImageBundle.estimate("Qwen/Qwen-Image").parameters.items()}
    # Model cards: a 20B MMDiT, Qwen2.5-VL-7B (8.29B with its tower), a VAE of 127M.
    assert sizes == pytest.approx({"transformer": 20.43, "text_encoder": 8.29, "vae": 0.127}, rel=0.01)
    params = replace(euler((32, 48, 1), 4.5, 60), height=1024, width=1024, max_sequence_length=512)
    facts = QwenImageBundle.facts_of("Qwen/Qwen-Image")
    assert facts.latent_shape(params) == (16, 128, 128)
    assert facts.condition_images == (0, 0) and facts.tokens_of(params) == 4096 + 512


@pytest.mark.parametrize("switch", ["guidance_embeds", "use_layer3d_rope", "use_additional_t_cond"])
def test_a_transformer_with_further_inputs_is_refused(switch: str) -> None:
    configs = changed(QWEN_IMAGE.toys["toy"], "transformer", **{switch: True})
    with pytest.raises(DataError, match=f"{switch}=True: that is another model") as caught:
        QWEN_IMAGE.facts(configs, 1)
    assert caught.value.code == 4001


def test_the_editing_bundle_refuses_a_text_to_image_checkpoint(toy: QwenImagePipeline, tmp_path: Path) -> None:
    toy.write_model({}, tmp_path)
    assert QwenImageBundle.facts_of(str(tmp_path)) == toy.facts
    with pytest.raises(
        DataError,
        match=r"names QwenImagePipeline, but this bundle \(qwen_image_edit\) reads .* of QwenImageEditPipeline\. "
        r"Use unirl\.models\.qwen_image\.family\.QwenImageBundle and .*\.QwenImagePipeline$",
    ) as caught:
        QwenImageEditBundle.facts_of(str(tmp_path))
    assert caught.value.code == 4001
