"""ImageReward-v1.0: how well people would like a picture for its prompt, by BLIP and a linear head.

Xu et al. 2023, arXiv:2304.05977. The checkpoint holds Salesforce's BLIP (arXiv:2201.12086) in its own layout, which is
read into transformers' classes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Any

import torch
from torch import Tensor, nn

from unirl.reward.local.aesthetic import published_head
from unirl.reward.local.shared.clip import clip_image_processor
from unirl.reward.local.shared.images import ImageScorer, ImageScorerSpec
from unirl.reward.local.shared.pretrained import assemble, fill, fixed_seed, load, part, read_weights

MEAN, STD = 0.16717362830052426, 1.0333394966054072
"""Of the head's output over the authors' pictures: published scores are standardised by these."""
MAX_TOKENS = 35
HEAD_WIDTH = 64
"""Of every attention head of BLIP, in the picture's half and in the text's."""


@dataclass(frozen=True, kw_only=True)
class ImageRewardSpec(ImageScorerSpec):
    """Which checkpoint, and how many pictures at a time."""

    path: str = "THUDM/ImageReward"
    """The checkpoint, or the hub id or local directory that holds ImageReward.pt; `toy` is tiny, of random weights."""
    tokenizer: str = "google-bert/bert-base-uncased"
    """Hub id or local directory; not read by `toy`."""


class ImageRewardNetwork(nn.Module):
    """Pictures [B, 3, S, S] and tokens [B, L] to scores [B]: the text reads the picture, its first token is judged."""

    def __init__(self, vision: Any, text: Any) -> None:
        super().__init__()
        self.vision = vision
        self.text = text
        self.head = published_head(text.config.hidden_size)

    def forward(self, pixels: Tensor, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        seen = self.vision(pixel_values=pixels).last_hidden_state
        read = self.text(
            input_ids=input_ids,
            attention_mask=attention_mask,
            encoder_hidden_states=seen,
            encoder_attention_mask=torch.ones(seen.shape[:2], dtype=torch.long, device=seen.device),
        )
        scores: Tensor = (self.head(read.last_hidden_state[:, 0])[:, 0] - MEAN) / STD
        return scores


class ImageRewardRewardScorer(ImageScorer):
    """(head - 0.16717) / 1.03334, the score as published: about -2 to 2. Prompts are cut after 35 tokens."""

    name = "imagereward"
    config: ImageRewardSpec

    def __init__(self, *, config: ImageRewardSpec = ImageRewardSpec()) -> None:
        super().__init__(config)
        self._tokenizer: Any = None

    def load_model(self) -> nn.Module:
        if self.config.path == "toy":
            return toy_network()
        return network_of(read_weights(self.config.path, "ImageReward.pt", "config.path"), "config.path")

    @property
    def tokenizer(self) -> Any:
        """BERT's, loaded on first use."""
        from transformers import BertTokenizer

        if self._tokenizer is None:
            toy = self.config.path == "toy"
            self._tokenizer = toy_tokenizer() if toy else load(BertTokenizer, self.config.tokenizer, "config.tokenizer")
        return self._tokenizer

    @property
    def image_processor(self) -> Any:
        network: Any = self.model
        return clip_image_processor(network.vision.config.image_size)

    def judge(self, pixels: Tensor, prompts: Sequence[str]) -> Tensor:
        tokens = self.tokenizer(
            list(prompts), padding="max_length", truncation=True, max_length=MAX_TOKENS, return_tensors="pt"
        ).to(self.device)
        scores: Tensor = self.model(pixels.to(self.device), tokens["input_ids"], tokens["attention_mask"])
        return scores


def network_of(weights: Mapping[str, Tensor], key: str) -> ImageRewardNetwork:
    """The network of a published checkpoint, whose sizes are those of its tensors. Its two projections are not used."""
    from transformers import BlipTextModel, BlipVisionModel

    picture = part(weights, "blip.visual_encoder.")
    text = part(weights, "blip.text_encoder.")
    text.pop("embeddings.position_ids", None)  # 0, 1, 2, ...
    vision_config, text_config = configs_of(picture, text)
    vision = {renamed(name): tensor for name, tensor in picture.items()}
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
"""Names in Salesforce's vision transformer and in that of transformers; its text half has the same names in both."""


def renamed(name: str) -> str:
    """The name that transformers' BlipVisionModel gives a weight of Salesforce's."""
    for pattern, new in VISION_NAMES.items():
        name = re.sub(pattern, new, name)
    return name


def configs_of(picture: Mapping[str, Tensor], text: Mapping[str, Tensor]) -> tuple[Any, Any]:
    """The configurations of BLIP's two halves, by the shapes of their weights."""
    positions, width = picture["pos_embed"].shape[1:]
    patch = picture["patch_embed.proj.weight"].shape[-1]
    vision = {
        "hidden_size": width,
        "intermediate_size": len(picture["blocks.0.mlp.fc1.weight"]),
        "num_hidden_layers": sum(name.endswith(".norm1.weight") for name in picture),
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


def configs(vision: Mapping[str, int], text: Mapping[str, int]) -> tuple[Any, Any]:
    """BLIP's configurations of these sizes, with the constants of Salesforce's: heads, norms, GELU."""
    from transformers import BlipTextConfig, BlipVisionConfig

    def heads(sizes: Mapping[str, int]) -> dict[str, int]:
        return {"num_attention_heads": sizes["hidden_size"] // HEAD_WIDTH}

    return (
        BlipVisionConfig(**vision, **heads(vision), layer_norm_eps=1e-6, hidden_act="gelu"),
        BlipTextConfig(**text, **heads(text), layer_norm_eps=1e-12, hidden_act="gelu"),
    )


def toy_network() -> ImageRewardNetwork:
    """A network of about a million parameters with fixed random weights."""
    from transformers import BlipTextModel, BlipVisionModel

    width = 2 * HEAD_WIDTH
    small = {"hidden_size": width, "intermediate_size": 128, "num_hidden_layers": 2}
    words = {"vocab_size": len(toy_words()), "max_position_embeddings": 64, "bos_token_id": 2}
    vision, text = configs(small | {"image_size": 32, "patch_size": 8}, small | words | {"encoder_hidden_size": width})
    vision.initializer_range = text.initializer_range = 0.05  # at the default, 1e-10, the toy would see no picture
    with fixed_seed():
        return ImageRewardNetwork(BlipVisionModel(vision), BlipTextModel(text, add_pooling_layer=False))


def toy_words() -> list[str]:
    """The toy's vocabulary: BERT's marks and every visible ASCII character, at the start of a word and within."""
    letters = [chr(code) for code in range(33, 127)]
    return ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]


def toy_tokenizer() -> Any:
    """BERT's tokenizer over the toy's vocabulary."""
    from transformers import BertTokenizer

    return BertTokenizer(vocab={word: i for i, word in enumerate(toy_words())})
