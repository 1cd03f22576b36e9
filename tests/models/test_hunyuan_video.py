"""Text, guidance and absent images of HunyuanVideo and HunyuanVideo 1.5, compared with diffusers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.family_cases import changed
from unirl.config.errors import DataError
from unirl.models.denoising.diffusers_pipeline import sample_with_euler
from unirl.models.hunyuan_video.family import CROP_START as CROP_START_1
from unirl.models.hunyuan_video.family import HUNYUAN_VIDEO, TEMPLATE, HunyuanVideoBundle, HunyuanVideoPipeline
from unirl.models.hunyuan_video15.family import (
    CROP_START,
    GLYPH_TOKENS,
    HUNYUAN_VIDEO_15,
    SYSTEM_MESSAGE,
    HunyuanVideo15Bundle,
    HunyuanVideo15Pipeline,
    causal_mask,
    glyph_text,
    glyph_tokens,
)
from unirl.models.loading.toy_tokenizers import byt5_tokenizer
from unirl.testing import family
from unirl.types.conditions import TextEmbedCondition
from unirl.types.sampling import DiffusionSamplingParams

RAGGED = ("x", "a red circle", "", "more letters than there are tokens for it")
QUOTING = ('a sign "open" and "shut", "open"', "no sign", "curly \u201chi\u201d", 'a sign that says ""')
LENGTH = 24


@pytest.fixture(scope="module")
def first() -> HunyuanVideoPipeline:
    return HunyuanVideoPipeline(HunyuanVideoBundle(path="toy", dtype="fp32"))


@pytest.fixture(scope="module")
def second() -> HunyuanVideo15Pipeline:
    return HunyuanVideo15Pipeline(HunyuanVideo15Bundle(path="toy", dtype="fp32"))


def params_of(scale: float, **changes: Any) -> DiffusionSamplingParams:
    return replace(family.euler((32, 32, 5), scale, LENGTH), **changes)


def apart(ours: Tensor | None, theirs: Tensor) -> float:
    assert ours is not None and ours.shape == theirs.shape
    return float((ours.float() - theirs.float()).abs().max())


# Text


@torch.no_grad()
def test_ragged_prompts_are_embedded_as_diffusers_embeds_each_alone(first: HunyuanVideoPipeline) -> None:
    plain, ours = family.untrained(first), first.embed(RAGGED, LENGTH)
    alone = [plain.encode_prompt(text, max_sequence_length=LENGTH) for text in RAGGED]
    tokens, pooled, mask = (torch.cat(parts) for parts in zip(*alone, strict=True))
    assert apart(ours.embeds, tokens) < 1e-5
    assert apart(ours.pooled, pooled) < 1e-5
    assert apart(ours.mask, mask) == 0
    assert ours.mask is not None and len(set(ours.mask.sum(1).tolist())) == len(RAGGED)


@torch.no_grad()
@pytest.mark.parametrize("texts", [RAGGED, QUOTING], ids=["ragged", "quoting"])
def test_prompts_of_1_5_are_embedded_as_diffusers_embeds_each_alone(
    second: HunyuanVideo15Pipeline, texts: Sequence[str]
) -> None:
    plain, ours = family.untrained(second), second.embed(texts, LENGTH)
    plain.tokenizer_max_length, plain.tokenizer_2_max_length = (
        LENGTH,
        second.bundle.tokenizers["tokenizer_2"].model_max_length,
    )
    alone = [plain.encode_prompt(text) for text in texts]
    tokens, mask, glyphs, glyph_mask = (torch.cat(parts) for parts in zip(*alone, strict=True))
    assert apart(ours.embeds, tokens) < 1e-5
    assert apart(ours.mask, mask) == 0
    assert apart(ours.embeds_2, glyphs) < 1e-5
    assert apart(ours.mask_2, glyph_mask) == 0


def test_quoted_text_is_extracted_as_in_diffusers() -> None:
    from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import extract_glyph_texts

    for text in (*RAGGED, *QUOTING, '"a', '"a" "b" \u201ca\u201d', '"two\nlines"', "it's", '"a""b"'):
        assert glyph_text(text) == extract_glyph_texts(text)


def test_the_templates_are_those_of_diffusers_with_the_cropped_number_of_tokens(
    first: HunyuanVideoPipeline, second: HunyuanVideo15Pipeline
) -> None:
    """The toys' tokenizers make as many tokens of them as the real ones do."""
    from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE

    assert {"template": TEMPLATE, "crop_start": CROP_START_1} == DEFAULT_PROMPT_TEMPLATE
    ids = first.bundle.tokenizers["tokenizer"](TEMPLATE.format("zebra")).input_ids
    assert first.bundle.tokenizers["tokenizer"].decode(ids[CROP_START_1:]).startswith("zebra")
    plain = family.untrained(second)
    assert (plain.system_message, plain.prompt_template_encode_start_idx) == (SYSTEM_MESSAGE, CROP_START)
    chat = [{"role": "system", "content": SYSTEM_MESSAGE}, {"role": "user", "content": "zebra"}]
    fed = second.bundle.tokenizers["tokenizer"].apply_chat_template(chat, tokenize=True, return_dict=True)
    assert second.bundle.tokenizers["tokenizer"].decode(fed["input_ids"][CROP_START:]).startswith("zebra")
    assert glyph_tokens(byt5_tokenizer()) == GLYPH_TOKENS == plain.tokenizer_2_max_length


# Samples


def test_a_prompt_in_a_batch_gives_the_sample_that_diffusers_draws_for_it_alone(second: HunyuanVideo15Pipeline) -> None:
    plain, params = family.untrained(second), params_of(6.0)
    pinned = params.pinned(0, tuple(second.sigmas(params).tolist()))
    drawn = sample_with_euler(second, QUOTING, params)
    for i, text in enumerate(QUOTING):
        frames = second.sample_with_diffusers(plain, [text], drawn.x_T[i : i + 1].clone(), pinned)
        assert apart(second.decoder.decode(drawn.latents[i : i + 1]), frames) < family.TOLERANCE


def test_quoted_text_and_its_encoder_change_the_sample(second: HunyuanVideo15Pipeline) -> None:
    condition = second.embed(QUOTING, LENGTH)
    assert condition.mask_2 is not None and condition.mask_2.any(1).tolist() == [True, False, True, True]
    v = velocity(second, condition)
    silent = velocity(second, condition.replace(mask_2=torch.zeros_like(condition.mask_2)))
    changed = (v - silent).abs().flatten(1).amax(1)
    assert (changed[[0, 2, 3]] > family.SEEN).all() and changed[1] == 0


@torch.no_grad()
def velocity(pipeline: HunyuanVideo15Pipeline, text: TextEmbedCondition) -> Tensor:
    x = torch.randn(len(text), *pipeline.facts.latent_shape(params_of(1.0)), generator=torch.Generator().manual_seed(0))
    return pipeline.stage.denoiser.velocity(x, torch.full((len(text),), 0.7), {"text": text})


@torch.no_grad()
def test_one_token_for_an_absent_image_has_the_effect_of_729(second: HunyuanVideo15Pipeline) -> None:
    text, x, sigma = second.embed(RAGGED, LENGTH), torch.randn(4, 4, 2, 2, 2), torch.full((4,), 0.7)
    zeros = torch.zeros_like(x)
    theirs = second.bundle.trainable()(
        hidden_states=torch.cat([x, zeros, zeros[:, :1]], dim=1),
        timestep=1000 * sigma,
        encoder_hidden_states=text.embeds,
        encoder_attention_mask=text.mask,
        encoder_hidden_states_2=text.embeds_2,
        encoder_attention_mask_2=text.mask_2,
        image_embeds=torch.zeros(4, 729, 12),
        return_dict=False,
    )[0]
    assert apart(second.stage.denoiser.velocity(x, sigma, {"text": text}), theirs) < 1e-5


def test_a_video_of_many_latent_frames_is_decoded_in_pieces_as_diffusers_does(first: HunyuanVideoPipeline) -> None:
    params = replace(params_of(6.0), num_frames=25, num_inference_steps=1)
    assert family.difference(first, family.untrained(first), ["x"], params, own_schedule=True) < family.TOLERANCE


# Guidance


@pytest.mark.parametrize("batch_size", [None, 2])
@pytest.mark.parametrize(("frames", "pixels"), [(1, 4), (3, 2), (4, 1)])
def test_the_mask_of_the_vae_of_1_5_is_that_of_diffusers(frames: int, pixels: int, batch_size: int | None) -> None:
    from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import HunyuanVideo15AttnBlock

    settings = (frames, pixels, torch.float32, torch.device("cpu"), batch_size)
    assert torch.equal(causal_mask(*settings), HunyuanVideo15AttnBlock.prepare_causal_attention_mask(*settings))


def test_the_vae_of_1_5_makes_its_masks_in_a_few_operations(second: HunyuanVideo15Pipeline, tmp_path: Path) -> None:
    name, configs, vae = "prepare_causal_attention_mask", HUNYUAN_VIDEO_15.configs("toy"), second.bundle.modules["vae"]
    vae.save_pretrained(tmp_path / "vae")  # type: ignore[operator]
    for module in (vae, HUNYUAN_VIDEO_15.build(configs, "vae"), HUNYUAN_VIDEO_15.load(tmp_path, "vae", torch.float32)):
        made = [vars(part)[name] for part in module.modules() if hasattr(part, name)]
        assert made and all(function is causal_mask for function in made)


def test_an_undistilled_model_is_guided_by_two_branches() -> None:
    pipeline = HunyuanVideoPipeline(HunyuanVideoBundle(path="toy-undistilled", dtype="fp32"))
    params = params_of(6.0, negative_prompt="blurred")
    family.check_samples(pipeline, params)
    assert set(pipeline.encode(RAGGED, params)) == {"text", "negative_text"}


def test_an_embedded_scale_is_multiplied_by_1000_and_rounded_as_in_diffusers(
    first: HunyuanVideoPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed: list[Tensor] = []

    class Recorder(torch.nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.x_embedder = torch.nn.Module()
            self.x_embedder.proj = torch.nn.Linear(1, 1, dtype=dtype)

        def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor]:
            fed.append(kwargs["guidance"])
            return (hidden_states,)

    denoiser, text = first.stage.denoiser, first.embed(["x"], LENGTH)
    [conditions] = first.facts.guidance_of(params_of(6.0)).feeds({"text": text})
    for dtype in (torch.float32, torch.bfloat16):
        monkeypatch.setattr(denoiser, "network", Recorder(dtype))
        denoiser.velocity(torch.zeros(1, 4, 2, 4, 4), torch.ones(1), conditions)
        assert torch.equal(fed[-1], torch.tensor([6.0], dtype=dtype) * 1000.0)


def test_a_distilled_model_refuses_a_guidance_scale() -> None:
    facts = HunyuanVideo15Bundle.facts_of("toy-distilled")
    facts.check(params_of(1.0))
    with pytest.raises(ValueError, match=r"guidance_scale=6: this model was distilled .* Use guidance_scale=1"):
        facts.check(params_of(6.0))


# Checkpoints


def test_the_guider_of_a_checkpoint_is_read_from_its_own_file(second: HunyuanVideo15Pipeline, tmp_path: Path) -> None:
    folder = second.write_model(dict(second.bundle.trainable().named_parameters()), tmp_path)
    assert HUNYUAN_VIDEO_15.read(folder).guiders["guider"]["guidance_scale"] == 6.0


@pytest.mark.parametrize(
    ("path", "transformer", "text_encoder"),
    [
        ("hunyuanvideo-community/HunyuanVideo", 12.8e9, 7.5e9),
        ("hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v", 8.33e9, 7.07e9),
    ],
)
def test_published_sizes(path: str, transformer: float, text_encoder: float) -> None:
    bundle = HunyuanVideo15Bundle if "1.5" in path else HunyuanVideoBundle
    parameters = bundle.estimate(path).parameters
    assert parameters["transformer"] == pytest.approx(transformer, rel=0.01)
    assert parameters["text_encoder"] == pytest.approx(text_encoder, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"image_condition_type": "token_replace"}, "image_condition_type='token_replace'"),
        ({"in_channels": 33}, "in_channels=33 and out_channels=16 is one of image to video"),
    ],
)
def test_a_model_of_image_to_video_is_refused(changes: dict[str, Any], said: str) -> None:
    configs = changed(HUNYUAN_VIDEO.published["hunyuanvideo-community/HunyuanVideo"], "transformer", **changes)
    with pytest.raises(DataError, match=said):
        HUNYUAN_VIDEO.facts(configs, 1)


@pytest.mark.parametrize(
    ("changes", "said"), [({"task_type": "i2v"}, "task_type='i2v'"), ({"use_meanflow": True}, "use_meanflow=True")]
)
def test_another_task_of_1_5_is_refused(changes: dict[str, Any], said: str) -> None:
    configs = changed(HUNYUAN_VIDEO_15.toys["toy"], "transformer", **changes)
    with pytest.raises(DataError, match=said):
        HUNYUAN_VIDEO_15.facts(configs, 1)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"height": 40}, r"height=40 .* Use 32"),
        ({"num_frames": 7}, r"num_frames=7: .* Use 9"),
        ({"width": 8}, "Use 16"),
    ],
)
def test_sizes_off_the_grid_are_refused_with_the_nearest_one(changes: dict[str, int], said: str) -> None:
    for bundle in (HunyuanVideoBundle, HunyuanVideo15Bundle):
        with pytest.raises(ValueError, match=said):
            bundle.facts_of("toy").check(params_of(1.0, **changes))
