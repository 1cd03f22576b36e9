"""The engine of recorded images: its latents are diffusers' own, and nothing but the file decides them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers.image_processor import VaeImageProcessor
from PIL import Image, ImageOps

from tests.models.rollouts import request_for, sampling
from tests.sync_ends import ends, toy_pipeline
from tests.toy import ToyBundle, ToyPipeline
from unirl.config.errors import ConfigError, DataError
from unirl.models.denoising.bundle import DiffusionBundle
from unirl.models.denoising.pipeline import DiffusionPipeline
from unirl.models.sd3.family import SD3Bundle, SD3Pipeline
from unirl.rollout.engine.recorded.engine import RecordedRolloutEngine, read_image, read_images
from unirl.rollout.engine.trainside.engine import TrainsideRolloutEngine
from unirl.testing.engine import check_engine
from unirl.testing.toy import toy_request
from unirl.types.primitives import MediaRef
from unirl.types.rollout_req import RolloutReq
from unirl.types.rollout_resp import RolloutTrack
from unirl.types.sampling import DiffusionSamplingParams

SIDE = 32


def picture(seed: int, height: int = SIDE, width: int = SIDE) -> Image.Image:
    levels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(levels)


@pytest.fixture(scope="module")
def refs(tmp_path_factory: pytest.TempPathFactory) -> list[MediaRef]:
    """Three pairs of noisy images."""
    folder = tmp_path_factory.mktemp("pictures")
    made = []
    for i in range(6):
        picture(i).save(folder / f"{i}.png")
        made.append(MediaRef("image", ("chosen", "rejected")[i % 2], str(folder / f"{i}.png")))
    return made


@pytest.fixture(scope="module")
def pipeline() -> SD3Pipeline:
    return SD3Pipeline(SD3Bundle(path="toy", dtype="fp32"))


class Weights:
    """A backend that nobody asks for weights."""

    updates = 3


def engine_of(pipeline: DiffusionPipeline) -> RecordedRolloutEngine:
    return RecordedRolloutEngine(pipeline, Weights())


def recorded(pipeline: SD3Pipeline, refs: list[MediaRef], **changes: object) -> RolloutReq:
    params: DiffusionSamplingParams = sampling(pipeline, sde_indices=(), **changes)
    return request_for(params).replace(step=5).with_recorded(refs)


def track_of(pipeline: SD3Pipeline, req: RolloutReq) -> RolloutTrack:
    return engine_of(pipeline).generate(req).tracks["image"]


# Latents


def test_latents_are_those_of_diffusers_preprocessing_and_vae(pipeline, refs) -> None:
    result = track_of(pipeline, recorded(pipeline, refs)).segment.final
    vae = pipeline.bundle.modules["vae"]
    pixels = VaeImageProcessor(vae_scale_factor=8).preprocess([Image.open(ref.uri) for ref in refs])
    with torch.no_grad():
        mean = vae.encode(pixels).latent_dist.mean
    expected = (mean - vae.config.shift_factor) * vae.config.scaling_factor
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)


def test_a_model_on_pixels_gives_the_very_image_back(refs) -> None:
    images = read_images(refs, SIDE, SIDE)
    toy = ToyPipeline(ToyBundle())
    assert torch.equal(toy.decode(toy.latents_of(images)).pixels, images.pixels)
    levels = torch.from_numpy(np.stack([np.array(Image.open(ref.uri)) for ref in refs])).permute(0, 3, 1, 2)
    assert torch.equal(images.pixels, levels)


@pytest.mark.parametrize("rows", [[5, 4, 3, 2, 1, 0], [4], [0, 1, 0], [2, 5]])
def test_a_row_depends_neither_on_order_nor_on_neighbours(rows, pipeline, refs) -> None:
    req = recorded(pipeline, refs)
    whole, part = track_of(pipeline, req), track_of(pipeline, req.select(rows))
    assert torch.equal(part.segment.latents, whole.segment.latents[rows])
    assert torch.equal(part.decoded.pixels, whole.decoded.pixels[rows])
    assert part.sample_ids == [whole.sample_ids[row] for row in rows]


def test_a_response_holds_the_sample_alone_and_echoes_the_request(pipeline, refs) -> None:
    req = recorded(pipeline, refs)
    track = track_of(pipeline, req)
    params = req.tracks["image"].sampling
    assert track.segment.indices == (params.num_inference_steps,) and track.segment.sde_indices == ()
    assert track.segment.latents.shape == (6, 1, 4, 4, 4) and track.segment.logp.shape == (6, 0)
    assert track.segment.sigmas.tolist() == list(params.sigmas or ())
    assert (track.segment.seed, track.segment.step) == (params.seed, req.step)
    assert track.sample_ids == req.sample_ids and track.group_ids == req.group_ids
    assert track.prompts == req.primitives["text"].texts
    assert track.weight_version.tolist() == [req.weight_version] * 6 and track.weight.tolist() == [1.0] * 6
    assert [about["recorded"] for about in req.metadata] == ["chosen", "rejected"] * 3


def test_latents_are_stored_in_the_trajectory_dtype(pipeline, refs) -> None:
    exact, rounded = (track_of(pipeline, recorded(pipeline, refs, trajectory_dtype=d)) for d in ("fp32", "bf16"))
    assert torch.equal(rounded.segment.latents, exact.segment.latents.bfloat16())


def test_what_nobody_recorded_is_drawn_as_trainside_draws_it() -> None:
    joined = ends()
    joined.train()
    req = toy_request(3).from_weights("live", 1)
    ours, theirs = (
        engine(joined.trained, joined.backend).generate(req).tracks["image"]
        for engine in (RecordedRolloutEngine, TrainsideRolloutEngine)
    )
    assert torch.equal(ours.segment.latents, theirs.segment.latents)
    assert torch.equal(ours.decoded.pixels, theirs.decoded.pixels)
    assert ours.weight_version.tolist() == theirs.weight_version.tolist() == [1] * len(req)


# What is refused


class Blind(ToyBundle):
    """A family that cannot encode images."""

    encoder = DiffusionBundle.encoder


def test_a_family_without_an_encoder_is_refused_before_the_first_step() -> None:
    with pytest.raises(ConfigError, match=r"Blind has no encoder of images.*implement `encoder\(\)`") as caught:
        engine_of(ToyPipeline(Blind()))
    assert caught.value.code == 2020


def test_an_sd3_without_its_vae_is_refused_before_the_first_step() -> None:
    bundle = SD3Bundle(path="toy", dtype="fp32", components=("transformer",))
    with pytest.raises(ValueError, match="built without vae, so it cannot encode images"):
        bundle.encoder()


def test_the_check_of_engines_says_that_there_is_nothing_to_prove() -> None:
    joined = ends()
    engine = RecordedRolloutEngine(toy_pipeline(), joined.backend)
    with pytest.raises(AssertionError, match="RecordedRolloutEngine has no weights of its own"):
        check_engine(engine, joined.trained, joined.backend, toy_request(3))  # type: ignore[arg-type]


# Files to pixels


def pixels_of(folder: Path, image: Image.Image, **how) -> np.ndarray:
    """[8, 8, 3] uint8 what is read of an image that was saved."""
    image.save(folder / "a.png", **how)
    return (read_image(str(folder / "a.png"), 8, 8).permute(1, 2, 0) * 255).round().numpy().astype(np.uint8)


def test_the_middle_of_a_wide_and_of_a_tall_image_is_taken(tmp_path) -> None:
    wide, tall = picture(0, 8, 20), picture(1, 14, 8)
    assert np.array_equal(pixels_of(tmp_path, wide), np.array(wide)[:, 6:14])
    assert np.array_equal(pixels_of(tmp_path, tall), np.array(tall)[3:11])


def test_a_larger_image_is_scaled_down_until_it_just_covers_the_size(tmp_path) -> None:
    large = picture(2, 24, 48)
    scaled = large.resize((16, 8), Image.Resampling.LANCZOS)
    assert np.array_equal(pixels_of(tmp_path, large), np.array(scaled)[:, 4:12])


def test_a_photo_is_turned_the_way_that_its_camera_was_held(tmp_path) -> None:
    shown = picture(3, 8, 8)
    exif = Image.Exif()
    exif[0x0112] = 6  # stored turned by a quarter
    stored = shown.transpose(Image.Transpose.ROTATE_90)
    stored.save(tmp_path / "a.png", exif=exif)
    assert np.array_equal(np.array(ImageOps.exif_transpose(Image.open(tmp_path / "a.png"))), np.array(shown))
    assert np.array_equal(pixels_of(tmp_path, stored, exif=exif), np.array(shown))


@pytest.mark.parametrize("mode", ["L", "P", "1", "RGBA", "LA"])
def test_images_of_eight_bits_are_read_as_rgb(mode, tmp_path) -> None:
    image = picture(4, 8, 8).convert("L" if mode == "LA" else "RGB").convert(mode)
    assert np.array_equal(pixels_of(tmp_path, image), np.array(image.convert("RGB")))


def test_an_image_that_would_have_to_be_enlarged_is_refused(tmp_path) -> None:
    with pytest.raises(DataError, match=r"a\.png has 12 x 7 pixels, .* = 8 x 8 would enlarge it. Lower") as caught:
        pixels_of(tmp_path, picture(5, 7, 12))
    assert caught.value.code == 4003


def test_what_is_no_opaque_image_of_eight_bits_is_refused_by_name(tmp_path) -> None:
    clear = picture(6, 8, 8).convert("RGBA")
    clear.putpixel((1, 1), (0, 0, 0, 254))
    deep = Image.fromarray(np.full((8, 8), 300, dtype=np.uint16))
    for image, why in ((clear, "transparent parts"), (deep, "mode I;16")):
        with pytest.raises(DataError, match=rf"a\.png .*{why}") as caught:
            pixels_of(tmp_path, image)
        assert caught.value.code == 4003


def test_a_damaged_file_is_refused_by_name(tmp_path) -> None:
    picture(7, 64, 64).save(tmp_path / "whole.png")
    whole = (tmp_path / "whole.png").read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 255
    for content in (b"", b"no image", whole[: len(whole) // 2], bytes(flipped)):
        (tmp_path / "bad.png").write_bytes(content)
        with pytest.raises(DataError, match=r"bad\.png cannot be read: ") as caught:
            read_image(str(tmp_path / "bad.png"), 8, 8)
        assert caught.value.code == 4003
    with pytest.raises(DataError, match=r"absent\.png is not a file on this machine"):
        read_image(str(tmp_path / "absent.png"), 8, 8)
