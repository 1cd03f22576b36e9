"""HunyuanImage-3 reads images in prompts by the published equations: for text about them, and for edited images."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import gelu, interpolate, layer_norm, linear, silu

from tests.models.test_hunyuan_image3 import BASE, INSTRUCT, Published, positions_of, with_gradient
from unirl.config.errors import DataError, InvalidValueError
from unirl.models.hunyuan_image3.prompts import sizes_of
from unirl.models.hunyuan_image3_vision.family import HunyuanImage3VisionBundle, HunyuanImage3VisionPipeline
from unirl.models.hunyuan_image3_vision.images import covering, pixels_of
from unirl.models.loading.lora import inject_lora
from unirl.sde.kernels import EulerODE, FlowSDEStrategy
from unirl.sde.noise import NoiseSource
from unirl.testing.bundle import check_bundle
from unirl.types.facts import LoraSpec
from unirl.types.primitives import MediaRef, PromptImages, Texts
from unirl.types.rollout_req import RolloutReq, TrackSpec
from unirl.types.rollout_resp import RolloutTrack
from unirl.types.sampling import ARSamplingParams, DiffusionSamplingParams, Sampling
from unirl.types.segments import LatentSegment, TextSegment

WRITING = ARSamplingParams(max_new_tokens=6, temperature=0.8)
GUIDED = DiffusionSamplingParams(
    kernel=FlowSDEStrategy(), num_inference_steps=3, height=32, width=48, guidance_scale=3.0, max_sequence_length=64
)
PICTURES = {"wide": (90, 30), "square": (64, 64), "high": (40, 70), "tiny": (9, 12)}
"""Width and height of the test images, all of which have another number of tokens."""
ROWS = (
    ("two", ("wide",)),
    ("a red one", ("square",)),
    ("from <image> to <image>, please", ("high", "wide")),
    ("", ("tiny",)),
)
"""Texts, and the names of their images."""


def pictures(place: Path) -> Path:
    """A folder with the test images."""
    generator = np.random.default_rng(0)
    for name, (width, height) in PICTURES.items():
        levels = generator.integers(256, size=(height, width, 3), dtype=np.uint8)
        Image.fromarray(levels).save(place / f"{name}.png")
    return place


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pictures(tmp_path_factory.mktemp("pictures"))


def with_noise() -> HunyuanImage3VisionPipeline:
    """A toy with noise on every parameter, since its norms are 1 and its blocks nearly pass their input."""
    pipeline = HunyuanImage3VisionPipeline(HunyuanImage3VisionBundle(path="toy", dtype="fp32"), condition_size=64)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name in ("transformer", "vision_model"):
            for parameter in pipeline.bundle.modules[name].parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return pipeline


@pytest.fixture(scope="module")
def pipeline() -> HunyuanImage3VisionPipeline:
    return with_noise()


def request(
    folder: Path, tracks: Mapping[str, Sampling], rows: Sequence[tuple[str, Sequence[str]]] = ROWS
) -> RolloutReq:
    names = [None, *tracks]
    groups = [f"p{i}" for i in range(len(rows))]
    refs = [tuple(MediaRef("image", "condition", str(folder / f"{name}.png")) for name in own) for _, own in rows]
    return RolloutReq(
        sample_ids=groups,
        group_ids=groups,
        primitives={"text": Texts(texts=[text for text, _ in rows]), "images": PromptImages(per_prompt=refs)},
        metadata=[{} for _ in rows],
        tracks={
            name: TrackSpec(parent=parent, branch=1 if parent is None else 2, sampling=sampling)
            for parent, (name, sampling) in zip(names, tracks.items(), strict=False)
        },
        purpose="r",
        step=0,
    )


def answers(pipeline: HunyuanImage3VisionPipeline, req: RolloutReq, slots: int = 8) -> RolloutTrack[TextSegment]:
    with torch.no_grad():
        return pipeline.generate(req, slots).tracks["text"].sampled_as(TextSegment)


def edits(pipeline: HunyuanImage3VisionPipeline, req: RolloutReq, rows: int = 8) -> RolloutTrack[LatentSegment]:
    with torch.no_grad():
        return pipeline.generate(req, rows).tracks["image"].sampled_as(LatentSegment)


def drawing(pipeline: HunyuanImage3VisionPipeline) -> dict[str, Sampling]:
    return {"image": pipeline.facts.pinned(GUIDED, 0)}


# --- the published equations, row by row, in float64 ------------------------------------------------------------------


class Sequenced:
    """The items of one row: tokens, timesteps, grids of latents, and features of the tower."""

    def __init__(self) -> None:
        self.embeds: list[Tensor] = []
        self.grids: list[tuple[int, tuple[int, int]]] = []
        self.spans: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return sum(map(len, self.embeds))

    def grid(self, embeds: Tensor, size: tuple[int, int]) -> None:
        self.grids.append((len(self), size))
        self.embeds.append(embeds)

    def positions(self) -> list[tuple[int, int]]:
        """(row, column) of each token: the published loop over images."""
        y: list[int] = []
        x: list[int] = []
        last = 0
        for start, (rows, columns) in self.grids:
            y += range(last, start)
            x += range(last, start)
            first_y, first_x = start + (columns * rows - rows) / 2, start + (columns * rows - columns) / 2
            for i in range(rows):
                for j in range(columns):
                    y.append(int(first_y + i))
                    x.append(int(first_x + j))
            last = start + columns * rows
        return list(zip(y + list(range(last, len(self))), x + list(range(last, len(self))), strict=True))

    def mask(self) -> Tensor:
        mask = torch.ones(len(self), len(self), dtype=torch.bool).tril()
        for start, stop in self.spans:
            mask[start:stop, start:stop] = True
        return mask


class PublishedReader(Published):
    """The published forward of one row whose prompt has images."""

    def __init__(self, pipeline: HunyuanImage3VisionPipeline) -> None:
        self.pipeline = pipeline
        self.codec = pipeline.bundle.codec
        modules, configs = pipeline.bundle.modules, pipeline.bundle.configs.components
        super().__init__(modules["transformer"].state_dict(), configs["transformer"])
        self.tower = {name: tensor.double() for name, tensor in modules["vision_model"].state_dict().items()}
        self.tower_config = configs["vision_model"]

    def of_tower(self, name: str, x: Tensor) -> Tensor:
        return linear(x, self.tower[f"{name}.weight"], self.tower[f"{name}.bias"])

    def tower_norm(self, name: str, x: Tensor) -> Tensor:
        return layer_norm(x, x.shape[-1:], self.tower[f"{name}.weight"], self.tower[f"{name}.bias"], eps=1e-6)

    def tower_states(self, patches: Tensor, size: tuple[int, int]) -> Tensor:
        """[M, D'] states of SigLIP 2 (arXiv:2502.14786) for patches [M, 3 p p], of which rows x columns are real."""
        real, table = size[0] * size[1], self.tower["embeddings.position_embedding.weight"]
        side = math.isqrt(len(table))
        grid = table.reshape(side, side, -1).permute(2, 0, 1)[None]
        places = interpolate(grid, size=size, mode="bilinear", align_corners=False, antialias=True)[0].flatten(1).T
        places = torch.cat([places, places[:1].expand(len(patches) - real, -1)])
        x = self.of_tower("embeddings.patch_embedding", patches.double()) + places
        num_heads = self.tower_config["num_attention_heads"]
        for i in range(self.tower_config["num_hidden_layers"]):
            name = f"encoder.layers.{i}"
            h = self.tower_norm(f"{name}.layer_norm1", x)
            queries, keys, values = (
                self.of_tower(f"{name}.self_attn.{letter}_proj", h).unflatten(1, (num_heads, -1)) for letter in "qkv"
            )
            scores = torch.einsum("qhd,khd->hqk", queries, keys) / math.sqrt(queries.shape[-1])
            scores[:, :, real:] = -math.inf
            attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).flatten(1)
            x = x + self.of_tower(f"{name}.self_attn.out_proj", attended)
            h = self.of_tower(f"{name}.mlp.fc1", self.tower_norm(f"{name}.layer_norm2", x))
            x = x + self.of_tower(f"{name}.mlp.fc2", gelu(h, approximate="tanh"))
        return self.tower_norm("post_layernorm", x)

    def patches(self, x: Tensor, timestep: float) -> Tensor:
        """[h w, D] embeddings of latents [C, h, w]."""
        h = self.conv("patch_embed.model.0", x.double()[None])
        h = self.block("patch_embed.model.1", h, self.time("time_embed", timestep))[0]
        return torch.stack([h[:, i, j] for i in range(x.shape[1]) for j in range(x.shape[2])])

    def add(self, row: Sequenced, text: str) -> None:
        row.embeds.append(self.tensors["model.wte.weight"][self.codec.encode(text)])

    def add_image(self, row: Sequenced, image: Image.Image) -> None:
        """An image of a prompt: <boi>, size, ratio, timestep 0, latents, separator, features, <eoi>."""
        sizes = sizes_of(1024, True)
        ratio = min(range(len(sizes)), key=lambda i: abs(sizes[i][0] / sizes[i][1] - image.height / image.width))
        self.add(row, f"<boi><img_size_1024><img_ratio_{ratio}>")
        row.embeds.append(self.time("timestep_emb", 0.0)[None])
        height, width = (max(16, round(side / 16 / 16) * 16) for side in sizes[ratio])  # 64 for 1024
        pixels = pixels_of(covering(image, (height, width)))[None]
        latents = self.pipeline.bundle.encoder().encode(pixels)[0]
        start = len(row)
        row.grid(self.patches(latents, 0.0), (height // 16, width // 16))
        self.add(row, "<joint_img_sep>")
        batch = self.pipeline.reader.processor(images=[image], return_tensors="pt")
        rows, columns = batch["spatial_shapes"][0].tolist()
        states = self.tower_states(batch["pixel_values"][0], (rows, columns))
        features = self.of("vision_aligner.layers.2", gelu(self.of("vision_aligner.layers.0", states)))
        row.grid(features, (rows, columns))
        row.spans.append((start, len(row)))
        self.add(row, "<eoi>")

    def prompt(self, parts: Sequence[str | Image.Image], is_conditional: bool = True) -> Sequenced:
        """The prompt with its images, up to the answer."""
        row = Sequenced()
        self.add(row, "<|startoftext|>")
        self.add(row, "User: ")
        for part in parts:
            if not isinstance(part, str):
                self.add_image(row, part)
            elif part:
                self.add(row, part if is_conditional else "<cfg>" * len(self.codec.encode(part)))
        self.add(row, "\n\n")
        self.add(row, "Assistant: ")
        return row

    def states(self, row: Sequenced) -> Tensor:
        return self.layers(torch.cat(row.embeds), row.positions(), row.mask())

    def next_logits(self, row: Sequenced) -> Tensor:
        return self.of("lm_head", self.norm("model.ln_f", self.states(row)))

    def edited(self, row: Sequenced, x: Tensor, sigma: float) -> Tensor:
        """The velocity [C, H, W] of the image after the prompt of `row`, and the tokens after it."""
        self.add(row, "<answer>")
        self.add(row, "<boi><img_size_1024><img_ratio_13>")  # of 832 x 1216
        row.embeds.append(self.time("timestep_emb", 1000 * sigma)[None])
        start, size = len(row), (x.shape[1], x.shape[2])
        row.grid(self.patches(x, 1000 * sigma), size)
        row.spans.append((start, len(row)))
        self.add(row, "<eoi></answer>\n\n")
        grid = self.states(row)[start : start + size[0] * size[1]].T.reshape(1, -1, *size)
        h = self.block("final_layer.model.0", grid, self.time("time_embed_2", 1000 * sigma))
        return self.conv("final_layer.model.1.2", silu(self.group_norm("final_layer.model.1.0", h)))[0]


def parts_of(folder: Path, text: str, names: Sequence[str]) -> list[str | Image.Image]:
    """A prompt as texts and images in their order. Without placeholders, the images come first."""
    images = [Image.open(folder / f"{name}.png").convert("RGB") for name in names]
    texts = text.split("<image>") if "<image>" in text else ["", *[""] * (len(images) - 1), text]
    return [part for pair in zip(texts, [*images, ""], strict=True) for part in pair]


def test_the_loop_over_images_is_that_of_a_single_one(pipeline: HunyuanImage3VisionPipeline) -> None:
    """The oracle of positions against the one that tests without images use."""
    row = Sequenced()
    row.embeds.append(torch.zeros(5, 1))
    row.grid(torch.zeros(6, 1), (2, 3))
    row.embeds.append(torch.zeros(2, 1))
    assert row.positions() == positions_of(13, 5, 2, 3)


def test_log_probs_of_answers_about_images_are_those_of_the_published_equations(
    pipeline: HunyuanImage3VisionPipeline, folder: Path
) -> None:
    track = answers(pipeline, request(folder, {"text": WRITING}))
    segment, equations, expected = track.segment, PublishedReader(pipeline), []
    for (text, names), response in zip(ROWS, segment.tokens.split(segment.lengths.tolist()), strict=True):
        row = equations.prompt(parts_of(folder, text, names))
        start = len(row)
        row.embeds.append(equations.tensors["model.wte.weight"][response])
        logits = equations.next_logits(row)[start - 1 : -1] / WRITING.temperature
        expected.append(logits.log_softmax(1).gather(1, response[:, None])[:, 0])
    assert float((segment.logp - torch.cat(expected)).abs().max()) < 1e-5
    assert segment.lengths.max() > 1 and float(segment.logp.std()) > 0.1


@pytest.mark.parametrize("condition", ["text", "negative_text"])
def test_the_velocity_given_images_is_that_of_the_published_equations(
    pipeline: HunyuanImage3VisionPipeline, folder: Path, condition: str
) -> None:
    """Without guidance, the unconditional pass reads the images too."""
    sampling = drawing(pipeline)["image"]
    assert isinstance(sampling, DiffusionSamplingParams)
    conditions = pipeline.conditions_of(request(folder, drawing(pipeline)), sampling)
    x = NoiseSource(0, "r", 0).normal([f"r{i}" for i in range(4)], "x", pipeline.facts.latent_shape(sampling))
    sigma = torch.tensor([1.0, 0.7, 0.31, 0.05])
    read = {"text": conditions[condition], "images": conditions["images"]}
    v = pipeline.stage.velocity(x, sigma, read, pipeline.facts.guidance).detach()
    equations = PublishedReader(pipeline)
    for i, (text, names) in enumerate(ROWS):
        row = equations.prompt(parts_of(folder, text, names), is_conditional=condition == "text")
        expected = equations.edited(row, x[i], float(sigma[i]))
        assert float((v[i] - expected).abs().max()) < 1e-5 * float(expected.abs().max()), text


def test_features_of_padding_are_read_and_follow_the_grid(pipeline: HunyuanImage3VisionPipeline, folder: Path) -> None:
    """A wide image has fewer patches than the tower pads it to. The network reads the features of all."""
    [(image,)] = pipeline.images_of(request(folder, {"text": WRITING}, ROWS[:1]))
    assert image.grid[0] * image.grid[1] < len(image.features) == 16
    sizes = {name: pipeline.images_of(request(folder, {}, [("", (name,))]))[0][0] for name in PICTURES}
    assert len({tuple(each.latents.shape) for each in sizes.values()}) > 2 and len({e.grid for e in sizes.values()}) > 2


# --- images -----------------------------------------------------------------------------------------------------------


def test_an_image_is_scaled_to_cover_its_size_and_cropped_at_its_centre() -> None:
    levels = np.arange(96 * 64 * 3, dtype=np.uint32).astype(np.uint8).reshape(64, 96, 3)
    image = Image.fromarray(levels)
    assert np.array_equal(np.array(covering(image, (64, 96))), levels)
    assert np.array_equal(np.array(covering(image, (64, 32))), levels[:, 32:64])  # 64 of 96 columns are cut off
    assert np.array_equal(np.array(covering(image, (16, 96))), levels[24:40])
    halved = image.resize((48, 32), Image.Resampling.LANCZOS)
    assert np.array_equal(np.array(covering(image, (32, 16))), np.array(halved)[:, 16:32])
    assert torch.equal(pixels_of(image)[1, 2, 3], torch.tensor(levels[2, 3, 1] / 255, dtype=torch.float32))


def test_the_vae_reads_an_image_at_the_nearest_size_of_the_model(pipeline: HunyuanImage3VisionPipeline) -> None:
    whole = HunyuanImage3VisionPipeline(pipeline.bundle)
    numbers = {ratio: whole.reader.format.sizes.index(ratio) for ratio in ((1024, 1024), (832, 1216), (768, 1024))}
    for size, number in numbers.items():
        assert whole.reader.size_of(number) == size
    assert [pipeline.reader.size_of(number) for number in numbers.values()] == [(64, 64), (48, 80), (48, 64)]


def test_patches_have_the_published_order(pipeline: HunyuanImage3VisionPipeline) -> None:
    levels = np.random.default_rng(1).integers(256, size=(32, 32, 3), dtype=np.uint8)
    batch = pipeline.reader.processor(images=[Image.fromarray(levels)], return_tensors="pt")
    assert batch["spatial_shapes"].tolist() == [[4, 4]]
    expected = [
        [levels[8 * i + y, 8 * j + x, c] / 127.5 - 1 for y in range(8) for x in range(8) for c in range(3)]
        for i in range(4)
        for j in range(4)
    ]
    assert torch.allclose(batch["pixel_values"][0].double(), torch.tensor(expected, dtype=torch.float64), atol=1e-6)


def test_an_image_is_encoded_once_and_a_lost_entry_changes_no_bit(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = with_noise()
    encode, read = pipeline.reader.encode, []
    monkeypatch.setattr(pipeline.reader, "encode", lambda image: read.append(image.size) or encode(image))
    first = answers(pipeline, request(folder, {"text": WRITING}))
    assert sorted(read) == sorted(PICTURES.values())
    again = answers(pipeline, request(folder, {"text": WRITING}))
    assert len(read) == len(PICTURES) and torch.equal(first.segment.logp, again.segment.logp)
    pipeline.cache.clear()
    assert torch.equal(answers(pipeline, request(folder, {"text": WRITING})).segment.logp, first.segment.logp)


# --- sampling and replay ----------------------------------------------------------------------------------------------


def test_answers_replay_to_the_bit_and_depend_on_no_other_row(
    pipeline: HunyuanImage3VisionPipeline, folder: Path
) -> None:
    req = request(folder, {"text": WRITING}).expand(2)
    track = answers(pipeline, req)
    stage = pipeline.stage_of("text")
    with torch.no_grad():
        assert torch.equal(stage.replay(track.conditions, track.segment).logp, track.segment.logp)  # type: ignore[attr-defined]
    for slots in (1, 3):
        again = answers(pipeline, req, slots)
        assert torch.equal(again.segment.tokens, track.segment.tokens)
        assert torch.equal(again.segment.logp, track.segment.logp)
    alone = answers(pipeline, req.select([5, 4]))
    assert torch.equal(alone.segment.logp, track.segment.select([5, 4]).logp)
    with torch.no_grad():
        some = {name: condition.select([6, 1]) for name, condition in track.conditions.items()}
        replayed = stage.replay(some, track.segment.select([6, 1])).logp  # type: ignore[attr-defined]
    assert torch.equal(replayed, track.segment.select([6, 1]).logp)


def test_edited_images_replay_to_the_bit_and_depend_on_no_other_row(
    pipeline: HunyuanImage3VisionPipeline, folder: Path
) -> None:
    req = request(folder, drawing(pipeline)).expand(2)
    track = edits(pipeline, req)
    steps = track.segment.sde_indices
    with torch.no_grad():
        assert torch.equal(pipeline.stage.replay(track.conditions, track.segment, steps).logp, track.segment.logp)
        mine = [6, 1, 3]
        some = {name: condition.select(mine) for name, condition in track.conditions.items()}
        replayed = pipeline.stage.replay(some, track.segment.select(mine), steps).logp
    assert torch.equal(replayed, track.segment.logp[mine])
    for rows in (1, 4):
        assert torch.equal(edits(pipeline, req, rows).segment.latents, track.segment.latents)
    assert torch.equal(edits(pipeline, req.select([5])).segment.latents, track.segment.latents[[5]])


def test_texts_before_an_edited_image_read_its_images_too(pipeline: HunyuanImage3VisionPipeline, folder: Path) -> None:
    req = request(folder, {"think": WRITING, "recaption": WRITING, **drawing(pipeline)}, ROWS[1:3])
    with torch.no_grad():
        resp = pipeline.generate(req, 3)
        for name in ("think", "recaption"):
            track = resp.tracks[name].sampled_as(TextSegment)
            replayed = pipeline.stage_of(name).replay(track.conditions, track.segment)  # type: ignore[attr-defined]
            assert torch.equal(replayed.logp, track.segment.logp)
    image = resp.tracks["image"].sampled_as(LatentSegment)
    assert len(image) == 2 * 2 * 2 and image.parent_track == "recaption"
    assert [len(row) for row in image.conditions["images"].digests] == [1] * 4 + [2] * 4  # type: ignore[attr-defined]
    with torch.no_grad():
        replayed = pipeline.stage.replay(image.conditions, image.segment, image.segment.sde_indices)
    assert torch.equal(replayed.logp, image.segment.logp)


def test_another_image_gives_other_answers_and_other_edits(pipeline: HunyuanImage3VisionPipeline, folder: Path) -> None:
    rows = [("the same", ("wide",)), ("the same", ("square",))]
    req = request(folder, {"text": WRITING}, rows).replace(sample_ids=["a", "a"])
    first, second = answers(pipeline, req).segment.logp.split(answers(pipeline, req).segment.lengths.tolist())
    assert not torch.equal(first[:1], second[:1])
    drawn = edits(pipeline, request(folder, drawing(pipeline), rows).replace(sample_ids=["a", "a"]))
    assert not torch.equal(*drawn.segment.latents[:, -1])


def test_a_sampled_placeholder_is_an_ordinary_token(pipeline: HunyuanImage3VisionPipeline, folder: Path) -> None:
    """The embedding of <img>, and not a latent, follows where the policy writes <img> itself."""
    track = answers(pipeline, request(folder, {"text": WRITING}, ROWS[:1]))
    said = pipeline.bundle.codec.encode("a<img><timestep>b")
    segment = replace(
        track.segment,
        tokens=torch.tensor(said),
        logp=torch.zeros(4),
        loss_mask=torch.ones(4, dtype=torch.bool),
        offsets=torch.tensor([0, 4]),
    )
    with torch.no_grad():
        logp = pipeline.stage_of("text").replay(track.conditions, segment).logp  # type: ignore[attr-defined]
    equations = PublishedReader(pipeline)
    row = equations.prompt(parts_of(folder, *ROWS[0]))
    start = len(row)
    equations.add(row, "a<img><timestep>b")
    logits = equations.next_logits(row)[start - 1 : -1] / WRITING.temperature
    expected = logits.log_softmax(1).gather(1, torch.tensor(said)[:, None])[:, 0]
    assert float((logp - expected).abs().max()) < 1e-5


def test_the_toy_passes_check_bundle(pipeline: HunyuanImage3VisionPipeline) -> None:
    check_bundle(pipeline, 32, 48, 4.0)


def test_long_prompts_are_cut_and_their_images_are_not(pipeline: HunyuanImage3VisionPipeline) -> None:
    format = pipeline.bundle.format
    user = format.user("abc<image>def<image>ghi", 5)
    assert user == [*format.codec.encode("abc"), -1, *format.codec.encode("de"), -1]
    assert format.cuts(["ab<image>c", "ab<image>cd"], 3) == [False, True]


# --- gradients --------------------------------------------------------------------------------------------------------


def test_the_loss_of_answers_reaches_the_layers_that_read_images_and_not_the_tower(folder: Path) -> None:
    pipeline = with_noise()
    track = answers(pipeline, request(folder, {"text": WRITING}))
    pipeline.stage_of("text").replay(track.conditions, track.segment).logp.sum().backward()  # type: ignore[attr-defined]
    names = {name for name, _ in pipeline.bundle.trainable().named_parameters()}
    assert with_gradient(pipeline) == {name for name in names if not name.startswith(("final_layer.", "time_embed_2."))}
    assert {"vision_aligner.layers.0.weight", "vision_aligner.layers.2.bias"} <= with_gradient(pipeline)
    assert_frozen(pipeline)


def test_the_loss_of_edits_reaches_all_but_the_head_of_text_and_the_tower(folder: Path) -> None:
    pipeline = with_noise()
    track = edits(pipeline, request(folder, drawing(pipeline)))
    pipeline.stage.replay(track.conditions, track.segment, track.segment.sde_indices).logp.sum().backward()
    names = {name for name, _ in pipeline.bundle.trainable().named_parameters()}
    assert with_gradient(pipeline) == names - {"lm_head.weight", "model.ln_f.weight"}
    assert_frozen(pipeline)


def assert_frozen(pipeline: HunyuanImage3VisionPipeline) -> None:
    """Neither the tower nor the VAE is a part of the trained network, or requires a gradient."""
    trained = {id(parameter) for parameter in pipeline.bundle.trainable().parameters()}
    for name in ("vision_model", "vae"):
        for parameter in pipeline.bundle.modules[name].parameters():
            assert not parameter.requires_grad and parameter.grad is None and id(parameter) not in trained


def test_adapters_go_on_attention_of_the_language_model_and_get_all_of_the_gradient(folder: Path) -> None:
    pipeline = with_noise()
    network = pipeline.bundle.trainable()
    inject_lora(network, LoraSpec(4, 8.0, pipeline.facts.lora_targets), seed=1)
    trained = {name for name, p in network.named_parameters() if p.requires_grad}
    layers = [f"model.layers.{i}.self_attn.{part}" for i in range(3) for part in ("qkv_proj", "o_proj")]
    assert trained == {f"{layer}.lora_{side}.default.weight" for layer in layers for side in "AB"}
    track = answers(pipeline, request(folder, {"text": WRITING}))
    pipeline.stage_of("text").replay(track.conditions, track.segment).logp.sum().backward()  # type: ignore[attr-defined]
    assert with_gradient(pipeline) == {name for name in trained if ".lora_B." in name}  # B starts as zero


# --- facts and refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [BASE, INSTRUCT])
def test_the_published_tower_and_aligner_have_their_parameters(path: str) -> None:
    estimate = HunyuanImage3VisionBundle.estimate(path)
    plain = HunyuanImage3VisionBundle.__bases__[0].estimate(path)  # type: ignore[attr-defined]
    width, hidden = 1152, 4304
    layer = 4 * (width * width + width) + 2 * width * hidden + hidden + width + 4 * width
    tower = 27 * layer + (3 * 16 * 16 * width + width) + 256 * width + 2 * width
    aligner = width * 4096 + 4096 + 4096 * 4096 + 4096
    assert estimate.parameters["vision_model"] == tower
    assert estimate.parameters["transformer"] == plain.parameters["transformer"] + aligner
    assert estimate.linears == plain.linears and len(estimate.adapted_layers()) == 64
    facts = HunyuanImage3VisionBundle.facts_of(path)
    assert facts.text is not None and facts.condition_images == facts.text.condition_images == (1, None)
    square = DiffusionSamplingParams(kernel=EulerODE(), height=1024, width=1024, max_sequence_length=100)
    # 4096 latents of the sample; of the image in the prompt, as many, a separator, 1024 features and 5 marks.
    assert facts.tokens_of(square) == 4096 + 100 + 20 + 4096 + 1 + 1024 + 5


def test_prompts_without_their_images_are_refused(pipeline: HunyuanImage3VisionPipeline, folder: Path) -> None:
    with pytest.raises(DataError, match="reads 1 or more images per prompt, and these prompts have none"):
        pipeline.encode(["a"], GUIDED)
    req = request(folder, {"text": WRITING}, [("two of <image> and <image>", ("wide",))])
    with pytest.raises(DataError, match="prompt p0: the text has 2 placeholders <image>, but the prompt has 1 images"):
        pipeline.generate(req, 4)
    missing = request(folder, {"text": WRITING}, [("a", ("absent",))])
    with pytest.raises(DataError, match=r"absent.png is not a file"):
        pipeline.generate(missing, 4)
    long = request(folder, {"text": replace(WRITING, max_prompt_tokens=40)}, ROWS[:1])
    with pytest.raises(DataError, match=r"prompt p0 is \d+ tokens long"):
        pipeline.generate(long, 4)


@pytest.mark.parametrize(("size", "advice"), [(40, "Use 32"), (0, "Use 16"), (2048, "Use 1024")])
def test_sizes_that_the_vae_cannot_read_are_refused(
    pipeline: HunyuanImage3VisionPipeline, size: int, advice: str
) -> None:
    with pytest.raises(InvalidValueError, match=f"pipeline.condition_size={size} must be a multiple of 16.*{advice}"):
        pipeline.bundle.image_reader(size)
