"""ImageReward is Salesforce's BLIP and a linear head, standardised; transformers' classes read its checkpoint."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv2d, embedding, gelu, layer_norm, linear
from transformers import BlipTextModel, BlipVisionModel, CLIPImageProcessorPil

from unirl.config.errors import DataError
from unirl.reward.local.imagereward import (
    HEAD_WIDTH,
    ImageRewardRewardScorer,
    ImageRewardSpec,
    network_of,
    toy_tokenizer,
    toy_words,
)
from unirl.reward.local.shared.images import as_pil
from unirl.testing.reward import check_reward
from unirl.types.reward import RewardRequest

PROMPTS = ["a red Circle", "two dogs, at night", "", "a blue cross on the left of a very long prompt " * 3, "x"]
VISION, TEXT, LAYERS, PATCH, SIDE = 128, 64, 2, 8, 32
SIZES, PLACES = (1024, 128, 64, 16, 1), (0, 2, 4, 6, 7)

Weights = dict[str, Tensor]


def linear_pair(name: str, after: int, before: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (after, before), f"{name}.bias": (after,)}


def norm_pair(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def published_shapes() -> dict[str, tuple[int, ...]]:
    """Names and shapes of ImageReward.pt, at a small scale."""
    shapes: dict[str, tuple[int, ...]] = {}
    seen = "blip.visual_encoder"
    shapes[f"{seen}.cls_token"] = (1, 1, VISION)
    shapes[f"{seen}.pos_embed"] = (1, 1 + (SIDE // PATCH) ** 2, VISION)
    shapes |= {f"{seen}.patch_embed.proj.weight": (VISION, 3, PATCH, PATCH), f"{seen}.patch_embed.proj.bias": (VISION,)}
    for i in range(LAYERS):
        block = f"{seen}.blocks.{i}"
        shapes |= norm_pair(f"{block}.norm1", VISION) | norm_pair(f"{block}.norm2", VISION)
        shapes |= linear_pair(f"{block}.attn.qkv", 3 * VISION, VISION) | linear_pair(
            f"{block}.attn.proj", VISION, VISION
        )
        shapes |= linear_pair(f"{block}.mlp.fc1", 96, VISION) | linear_pair(f"{block}.mlp.fc2", VISION, 96)
    shapes |= norm_pair(f"{seen}.norm", VISION)
    read = "blip.text_encoder"
    shapes[f"{read}.embeddings.word_embeddings.weight"] = (len(toy_words()), TEXT)
    shapes[f"{read}.embeddings.position_embeddings.weight"] = (48, TEXT)
    shapes |= norm_pair(f"{read}.embeddings.LayerNorm", TEXT)
    for i in range(LAYERS):
        layer = f"{read}.encoder.layer.{i}"
        for attention, width in (("attention", TEXT), ("crossattention", VISION)):
            shapes |= linear_pair(f"{layer}.{attention}.self.query", TEXT, TEXT)
            shapes |= linear_pair(f"{layer}.{attention}.self.key", TEXT, width)
            shapes |= linear_pair(f"{layer}.{attention}.self.value", TEXT, width)
            shapes |= linear_pair(f"{layer}.{attention}.output.dense", TEXT, TEXT)
            shapes |= norm_pair(f"{layer}.{attention}.output.LayerNorm", TEXT)
        shapes |= linear_pair(f"{layer}.intermediate.dense", 80, TEXT) | linear_pair(f"{layer}.output.dense", TEXT, 80)
        shapes |= norm_pair(f"{layer}.output.LayerNorm", TEXT)
    shapes |= linear_pair("blip.vision_proj", 16, VISION) | linear_pair("blip.text_proj", 16, TEXT)
    for place, before, after in zip(PLACES, (TEXT, *SIZES), SIZES, strict=False):
        shapes |= linear_pair(f"mlp.layers.{place}", after, before)
    return shapes


@pytest.fixture(scope="module")
def published() -> Weights:
    generator = torch.Generator().manual_seed(0)
    weights = {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in published_shapes().items()}
    return weights | {"blip.text_encoder.embeddings.position_ids": torch.arange(48)[None]}


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> Tensor:
    """[B, L, D] softmax(q k / sqrt(64)) v by heads of 64."""
    q, k, v = (x.unflatten(2, (-1, HEAD_WIDTH)).transpose(1, 2) for x in (queries, keys, values))
    scores = q @ k.transpose(2, 3) / HEAD_WIDTH**0.5
    if mask is not None:
        scores = scores.masked_fill(mask[:, None, None] == 0, float("-inf"))
    return (scores.softmax(dim=3) @ v).transpose(1, 2).flatten(2)


class Plain:
    """ImageReward's forward pass in plain operations on the published weights."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights

    def map(self, name: str, x: Tensor) -> Tensor:
        return linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def norm(self, name: str, x: Tensor, eps: float) -> Tensor:
        return layer_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], eps)

    def see(self, pixels: Tensor) -> Tensor:
        name = "blip.visual_encoder"
        patches = conv2d(
            pixels,
            self.weights[f"{name}.patch_embed.proj.weight"],
            self.weights[f"{name}.patch_embed.proj.bias"],
            stride=PATCH,
        )
        first = self.weights[f"{name}.cls_token"].expand(len(pixels), -1, -1)
        x = torch.cat([first, patches.flatten(2).transpose(1, 2)], dim=1) + self.weights[f"{name}.pos_embed"]
        for i in range(LAYERS):
            block = f"{name}.blocks.{i}"
            q, k, v = self.map(f"{block}.attn.qkv", self.norm(f"{block}.norm1", x, 1e-6)).chunk(3, dim=2)
            x = x + self.map(f"{block}.attn.proj", attend(q, k, v))
            y = gelu(self.map(f"{block}.mlp.fc1", self.norm(f"{block}.norm2", x, 1e-6)))
            x = x + self.map(f"{block}.mlp.fc2", y)
        return self.norm(f"{name}.norm", x, 1e-6)

    def attention(self, name: str, x: Tensor, other: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (self.map(f"{name}.self.{w}", y) for w, y in (("query", x), ("key", other), ("value", other)))
        return self.norm(f"{name}.output.LayerNorm", x + self.map(f"{name}.output.dense", attend(q, k, v, mask)), 1e-12)

    def score(self, pixels: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
        seen, name = self.see(pixels), "blip.text_encoder"
        x = embedding(tokens, self.weights[f"{name}.embeddings.word_embeddings.weight"])
        x = x + self.weights[f"{name}.embeddings.position_embeddings.weight"][: tokens.shape[1]]
        x = self.norm(f"{name}.embeddings.LayerNorm", x, 1e-12)
        for i in range(LAYERS):
            layer = f"{name}.encoder.layer.{i}"
            x = self.attention(f"{layer}.attention", x, x, mask)
            x = self.attention(f"{layer}.crossattention", x, seen, None)
            y = gelu(self.map(f"{layer}.intermediate.dense", x))
            x = self.norm(f"{layer}.output.LayerNorm", x + self.map(f"{layer}.output.dense", y), 1e-12)
        x = x[:, 0]
        for place in PLACES:
            x = self.map(f"mlp.layers.{place}", x)
        return (x[:, 0] - 0.16717362830052426) / 1.0333394966054072


def request(height: int = 40, width: int = 28) -> RewardRequest:
    images = torch.rand(len(PROMPTS), 3, height, width, generator=torch.Generator().manual_seed(0))
    return RewardRequest(sample_ids=list("abcde"), prompts=PROMPTS, images=(images * 255).round() / 255)


def saved(folder, weights: Weights, **changes) -> ImageRewardRewardScorer:
    torch.save(weights, folder / "ImageReward.pt")
    toy_tokenizer().save_pretrained(folder / "bert")
    fields = {"path": str(folder), "tokenizer": str(folder / "bert"), "batch_size": 4, "device": "cpu"} | changes
    return ImageRewardRewardScorer(config=ImageRewardSpec(**fields))


def test_scores_of_a_published_checkpoint_are_those_of_the_plain_operations(published, tmp_path):
    scorer = saved(tmp_path, published)
    assert isinstance(scorer.model.vision, BlipVisionModel) and isinstance(scorer.model.text, BlipTextModel)
    processor = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    pixels = processor(as_pil(request().images), return_tensors="pt")["pixel_values"]
    tokens = toy_tokenizer()(PROMPTS, padding="max_length", truncation=True, max_length=35, return_tensors="pt")
    expected = Plain(published).score(pixels, tokens["input_ids"], tokens["attention_mask"])
    result = scorer.score(request()).total
    assert expected.std() > 0.1
    torch.testing.assert_close(result, expected, atol=1e-4, rtol=1e-4)


def test_the_prompt_is_lower_cased_framed_and_truncated_to_35_tokens():
    tokenizer = toy_tokenizer()
    rows = tokenizer(PROMPTS, padding="max_length", truncation=True, max_length=35)["input_ids"]
    assert [len(row) for row in rows] == [35] * len(PROMPTS)
    words = tokenizer.convert_ids_to_tokens(rows[0])
    expected = ["[CLS]", "a", "r", "##e", "##d", "c", "##i", "##r", "##c", "##l", "##e", "[SEP]"]
    assert words[: len(expected)] == expected and set(words[len(expected) :]) == {"[PAD]"}
    assert tokenizer.convert_ids_to_tokens(rows[3])[-1] == "[SEP]"


def test_the_sizes_of_the_published_checkpoint_are_read_from_its_tensors(published):
    network = network_of(published, "config.path")
    vision, text = network.vision.config, network.text.config
    assert (vision.hidden_size, vision.num_attention_heads, vision.image_size, vision.patch_size) == (128, 2, 32, 8)
    assert (vision.intermediate_size, vision.num_hidden_layers, vision.layer_norm_eps) == (96, 2, 1e-6)
    assert (text.hidden_size, text.num_attention_heads, text.encoder_hidden_size) == (64, 1, 128)
    assert (text.intermediate_size, text.num_hidden_layers, text.max_position_embeddings) == (80, 2, 48)


@pytest.mark.parametrize("name", ["blip.visual_encoder.norm.bias", "mlp.layers.6.weight", "blip.text_encoder.x"])
def test_a_checkpoint_with_other_weights_is_refused(published, tmp_path, name):
    weights = dict(published)
    if weights.pop(name, None) is None:
        weights[name] = torch.zeros(2)
    with pytest.raises(DataError, match=r"config\.path: the checkpoint does not fit .*: 1 (missing|unexpected)"):
        _ = saved(tmp_path, weights).model


def test_scores_do_not_depend_on_order_or_batch_size_and_the_toy_is_fixed():
    def toy():
        return ImageRewardRewardScorer(config=ImageRewardSpec(path="toy", batch_size=4, device="cpu"))

    answer = check_reward(toy(), request(), atol=1e-5)
    assert torch.equal(toy().score(request()).total, answer.total) and answer.total.std() > 1e-4
    assert list(answer.components) == ["imagereward"]
