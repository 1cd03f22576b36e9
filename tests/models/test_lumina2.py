"""Template, rows and size of Lumina-Image 2.0."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from unirl.config.errors import ConfigError
from unirl.models.denoising.diffusers_pipeline import plain_pipeline
from unirl.models.loading.hub import quiet_libraries
from unirl.models.lumina2.family import TEMPLATE, Lumina2Bundle, Lumina2Pipeline
from unirl.sde.kernels import EulerODE
from unirl.types.conditions import TextEmbedCondition
from unirl.types.sampling import DiffusionSamplingParams

PROMPTS = ("a red circle", "two blue squares on the left, and more words than are kept", "")
PARAMS = DiffusionSamplingParams(
    kernel=EulerODE(), num_inference_steps=3, height=32, width=48, guidance_scale=4.0, max_sequence_length=16
)


@pytest.fixture(scope="module")
def toy() -> Lumina2Pipeline:
    return Lumina2Pipeline(Lumina2Bundle(path="toy", dtype="fp32"))


@pytest.mark.parametrize("length", [16, 48])
@pytest.mark.parametrize("negative", ["", "grey, blurred"])
def test_prompts_and_negative_prompts_are_embedded_as_in_diffusers(
    toy: Lumina2Pipeline, length: int, negative: str
) -> None:
    """A negative prompt stands without the template."""
    plain = plain_pipeline(toy.bundle, toy.bundle.trainable())
    with torch.no_grad(), quiet_libraries():
        embeds, mask, negative_embeds, negative_mask = plain.encode_prompt(
            list(PROMPTS), negative_prompt=[negative] * len(PROMPTS), max_sequence_length=length
        )
    params = dataclasses.replace(PARAMS, negative_prompt=negative, max_sequence_length=length)
    conditions = toy.encode(PROMPTS, params)
    wanted = {"text": (embeds, mask), "negative_text": (negative_embeds, negative_mask)}
    assert conditions.keys() == wanted.keys()
    for name, (tokens, real) in wanted.items():
        ours = conditions[name]
        assert isinstance(ours, TextEmbedCondition) and ours.mask is not None
        assert torch.equal(ours.mask, real.bool())
        # diffusers encodes three rows at once, we four: what stands beside a row changes its last bits there.
        torch.testing.assert_close(ours.embeds, tokens, rtol=0.0, atol=1e-5)


def test_the_real_template_is_that_of_the_pipeline(toy: Lumina2Pipeline) -> None:
    assert plain_pipeline(toy.bundle, toy.bundle.trainable()).system_prompt + " <Prompt Start> " == TEMPLATE


def test_a_row_does_not_depend_on_the_length_of_another_prompt(toy: Lumina2Pipeline) -> None:
    """diffusers pads the tokens of a batch to its longest prompt."""
    x = torch.randn(2, 4, 4, 6, generator=torch.Generator().manual_seed(0))
    sigma = torch.tensor([0.7, 0.7])
    params = dataclasses.replace(PARAMS, guidance_scale=1.0, max_sequence_length=32)
    velocity = toy.stage.denoiser.velocity
    with torch.no_grad():
        beside_short = velocity(x, sigma, toy.encode(["a red circle", "a"], params))
        beside_long = velocity(x, sigma, toy.encode(["a red circle", "a blue square on the left"], params))
    assert torch.equal(beside_short[0], beside_long[0])
    assert not torch.equal(beside_short[1], beside_long[1])


def test_a_prompt_longer_than_the_positions_is_refused(toy: Lumina2Pipeline) -> None:
    toy.encode(PROMPTS, dataclasses.replace(PARAMS, max_sequence_length=63))
    with pytest.raises(ConfigError, match=r"max_sequence_length=64: .* positions for 63 text tokens\. Use 63 or fewer"):
        toy.encode(PROMPTS, dataclasses.replace(PARAMS, max_sequence_length=64))


def test_the_published_checkpoint_has_its_published_size() -> None:
    """The paper counts 2.6 B parameters; Gemma 2 of 2 B has 2.614 B, the VAE of FLUX.1 0.084 B."""
    sizes = Lumina2Bundle.estimate("Alpha-VLLM/Lumina-Image-2.0").parameters
    expected = {"transformer": 2.61, "text_encoder": 2.614, "vae": 0.0838}
    assert {part: size / 1e9 for part, size in sizes.items()} == pytest.approx(expected, rel=0.01)
