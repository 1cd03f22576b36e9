"""ImageReward-v1.0: a prediction of human preference for an image and its prompt, by BLIP and a linear head.

Xu et al. 2023, arXiv:2304.05977. The checkpoint holds BLIP (arXiv:2201.12086) in the layout of Salesforce, which is
converted to that of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isqrt
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from unirl.models.loading.hub import ModelSource
from unirl.reward.local.aesthetic import published_head
from unirl.reward.local.shared.clip import clip_image_processor
from unirl.reward.local.shared.images import ImageScorer, ImageScorerSpec
from unirl.reward.local.shared.pretrained import assemble, fill, fixed_seed, load, part, read_weights, renamed

if TYPE_CHECKING:
    import transformers

    BlipConfigs = tuple[transformers.BlipVisionConfig, transformers.BlipTextConfig]

MEAN, STD = 0.16717362830052426, 1.0333394966054072
"""Mean and standard deviation of the head's output over the authors' images, by which scores are standardised."""
MAX_TOKENS = 35
HEAD_WIDTH = 64
"""Width of every attention head of BLIP, in the vision and in the text model."""


@dataclass(frozen=True, kw_only=True)
class ImageRewardSpec(ImageScorerSpec):
    path: ModelSource = "THUDM/ImageReward"
    """The checkpoint file, or a hub id or local directory that holds ImageReward.pt; `toy` is a tiny random network."""
    tokenizer: ModelSource = "google-bert/bert-base-uncased"
    """Hub id or local directory of the tokenizer; `toy` does not read it."""


class ImageRewardNetwork(nn.Module):
    """Maps images [B, 3, S, S] and tokens [B, L] to scores [B].

    The text model attends to the image, and the head reads the hidden state of the first token.
    """

    def __init__(self, vision: transformers.BlipVisionModel, text: transformers.BlipTextModel) -> None:
        super().__init__()
        self.vision = vision
        self.text = text
        self.head = published_head(text.config.hidden_size)

    def forward(self, pixels: Tensor, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        image = self.vision(pixel_values=pixels).last_hidden_state
        text = self.text(
            input_ids=input_ids,
            attention_mask=attention_mask,
            encoder_hidden_states=image,
            encoder_attention_mask=torch.ones(image.shape[:2], dtype=torch.long, device=image.device),
        )
        scores: Tensor = (self.head(text.last_hidden_state[:, 0])[:, 0] - MEAN) / STD
        return scores


class ImageRewardRewardScorer(ImageScorer[ImageRewardNetwork]):
    """(head - 0.16717) / 1.03334, the published score, about -2 to 2. Prompts are truncated to 35 tokens."""

    name = "imagereward"
    config: ImageRewardSpec

    def __init__(self, *, config: ImageRewardSpec = ImageRewardSpec()) -> None:
        super().__init__(config)

    def load_model(self) -> ImageRewardNetwork:
        if self.config.path == "toy":
            return toy_network()
        return network_of(read_weights(self.config.path, "ImageReward.pt", "config.path"), "config.path")

    @cached_property
    def tokenizer(self) -> transformers.BertTokenizer:
        """BERT's tokenizer, loaded on first use."""
        from transformers import BertTokenizer

        if self.config.path == "toy":
            return toy_tokenizer()
        return load(BertTokenizer, self.config.tokenizer, "config.tokenizer")

    @property
    def image_processor(self) -> transformers.CLIPImageProcessorPil:
        return clip_image_processor(self.model.vision.config.image_size)

    def judge(self, pixels: Tensor, prompts: Sequence[str]) -> Tensor:
        tokens = self.tokenizer(
            list(prompts), padding="max_length", truncation=True, max_length=MAX_TOKENS, return_tensors="pt"
        ).to(self.device)
        scores: Tensor = self.model(pixels.to(self.device), tokens["input_ids"], tokens["attention_mask"])
        return scores


def network_of(weights: Mapping[str, Tensor], key: str) -> ImageRewardNetwork:
    """Returns the network of a published checkpoint, with the sizes of its tensors, without its two projections."""
    from transformers import BlipTextModel, BlipVisionModel

    image = part(weights, "blip.visual_encoder.")
    text = part(weights, "blip.text_encoder.")
    text.pop("embeddings.position_ids", None)  # 0, 1, 2, ...
    vision_config, text_config = configs_of(image, text)
    vision = {renamed(name, VISION_NAMES): tensor for name, tensor in image.items()}
    network = ImageRewardNetwork(
        assemble(BlipVisionModel, vision_config, vision, key, torch.float32),
        assemble(BlipTextModel, text_config, text, key, torch.float32, add_pooling_layer=False),
    )
    fill(network.head, part(weights, "mlp.layers."), key)
    return network


VISION_NAMES = {
    r"^cls_token$": "embeddings.class_embedding",
    r"^pos_embed$": "embeddings.position_embedding",
    r"^patch_embed\.proj\.": "embeddings.patch_embedding.",
    r"^norm\.": "post_layernorm.",
    r"^blocks\.": "encoder.layers.",
    r"\.attn\.qkv\.": ".self_attn.qkv.",
    r"\.attn\.proj\.": ".self_attn.projection.",
    r"\.norm(\d)\.": r".layer_norm\1.",
}
"""Names in Salesforce's vision model and in BlipVisionModel. The text model has the same names in both."""


def configs_of(image: Mapping[str, Tensor], text: Mapping[str, Tensor]) -> BlipConfigs:
    """Returns the configurations of BLIP's vision and text model, derived from the shapes of their weights."""
    positions, width = image["pos_embed"].shape[1:]
    patch = image["patch_embed.proj.weight"].shape[-1]
    vision = {
        "hidden_size": width,
        "intermediate_size": len(image["blocks.0.mlp.fc1.weight"]),
        "num_hidden_layers": sum(name.endswith(".norm1.weight") for name in image),
        "image_size": isqrt(positions - 1) * patch,
        "patch_size": patch,
    }
    words, text_width = text["embeddings.word_embeddings.weight"].shape
    reading = {
        "vocab_size": words,
        "hidden_size": text_width,
        "intermediate_size": len(text["encoder.layer.0.intermediate.dense.weight"]),
        "num_hidden_layers": sum(name.endswith(".intermediate.dense.weight") for name in text),
        "max_position_embeddings": len(text["embeddings.position_embeddings.weight"]),
        "encoder_hidden_size": width,
    }
    return configs(vision, reading)


def configs(vision: Mapping[str, int], text: Mapping[str, int]) -> BlipConfigs:
    """Returns BLIP's configurations with these sizes and Salesforce's constants for heads, norms and GELU."""
    from transformers import BlipTextConfig, BlipVisionConfig

    image_heads, text_heads = (sizes["hidden_size"] // HEAD_WIDTH for sizes in (vision, text))
    return (
        BlipVisionConfig(**vision, num_attention_heads=image_heads, layer_norm_eps=1e-6, hidden_act="gelu"),
        BlipTextConfig(**text, num_attention_heads=text_heads, layer_norm_eps=1e-12, hidden_act="gelu"),
    )


def toy_network() -> ImageRewardNetwork:
    """Returns a network of about a million parameters with fixed random weights."""
    from transformers import BlipTextModel, BlipVisionModel

    width = 2 * HEAD_WIDTH
    small = {"hidden_size": width, "intermediate_size": 128, "num_hidden_layers": 2}
    words = {"vocab_size": len(toy_words()), "max_position_embeddings": 64, "bos_token_id": 2}
    vision, text = configs(small | {"image_size": 32, "patch_size": 8}, small | words | {"encoder_hidden_size": width})
    vision.initializer_range = text.initializer_range = 0.05  # at the default, 1e-10, the image would have no effect
    with fixed_seed():
        return ImageRewardNetwork(BlipVisionModel(vision), BlipTextModel(text, add_pooling_layer=False))


def toy_words() -> list[str]:
    """Returns the toy's vocabulary: BERT's special tokens and every visible ASCII character, with and without ##."""
    letters = [chr(code) for code in range(33, 127)]
    return ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]


def toy_tokenizer() -> transformers.BertTokenizer:
    """Returns BERT's tokenizer over the toy's vocabulary."""
    from transformers import BertTokenizer

    return BertTokenizer(vocab={word: i for i, word in enumerate(toy_words())})
