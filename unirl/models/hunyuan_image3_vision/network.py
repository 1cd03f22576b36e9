"""HunyuanImage-3's network with the layers that read images: the network of `hunyuan_image3`, and an aligner.

    image in a prompt   <boi> size ratio <timestep> latents <joint_img_sep> features <eoi>
                                     |          |                          |
                             timestep_emb(0)  patch_embed,           vision_aligner
                                              time_embed(0)

The latents of an image in a prompt go through the same layers as those of a generated image, at timestep 0. The
features come from the frozen vision tower, which is a component of its own.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from unirl.models.hunyuan_image3.network import Config, HunyuanImage3Network
from unirl.types.conditions import EncodedImages, PromptImageInputs

LATENT, FEATURE, CLEAN_TIMESTEP = -2, -3, -4
"""Stand among the tokens of a prompt for a latent, for a feature, and for the timestep 0 of an image. A token <img> or
<timestep> that the policy itself samples is an ordinary token."""


class Aligner(nn.Module):
    """Features of the vision tower as embeddings of tokens: linear layers with a GELU between them."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Linear(config["input_dim"], config["n_embed"])]
        for _ in range(1, config["depth"]):
            layers += [nn.GELU(), nn.Linear(config["n_embed"], config["n_embed"])]
        self.layers = nn.Sequential(*layers)

    def forward(self, features: Tensor) -> Tensor:
        """[M, D] from [M, D']."""
        result: Tensor = self.layers(features)
        return result


class HunyuanImage3VisionNetwork(HunyuanImage3Network):
    """The network for prompts with images."""

    _keys_to_ignore_on_load_unexpected: ClassVar[tuple[str, ...]] = (r"^vae\.", r"^vision_model\.")

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.vision_aligner = Aligner(config["vit_aligner"])

    def embeds(self, tokens: Tensor, images: PromptImageInputs | None) -> Tensor:
        """Embeddings [N, D] of tokens [N], with the embeddings of the images in place of what stands for them."""
        embeds = super().embeds(tokens.clamp(min=0), None)
        if images is None:
            return embeds
        assert isinstance(images, EncodedImages)
        dtype, zero = self.lm_head.weight.dtype, torch.zeros(1, device=tokens.device)
        latents, features = self.encoded(images, self.time_embed(zero, dtype))
        for mark, values in ((LATENT, latents), (FEATURE, features)):
            is_mark = tokens == mark
            torch._assert_async(is_mark.sum() == len(values), "as many embeddings as tokens of images")
            embeds = embeds.masked_scatter(is_mark[:, None], values.to(embeds.dtype))
        token = self.timestep_emb(zero, dtype).to(embeds.dtype)
        return torch.where((tokens == CLEAN_TIMESTEP)[:, None], token, embeds)

    def encoded(self, images: EncodedImages, time: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings [sum h w, D] of latents and [sum M, D] of features. Equal images run once, and each runs alone.

        Args:
            time: the embedding [1, D] of timestep 0.
        """
        dtype = self.lm_head.weight.dtype
        sizes = [size for row in images.sizes for size in row]
        digests = [digest for row in images.digests for digest in row]
        latents = images.latents.values.to(dtype).split([rows * columns for rows, columns in sizes])
        features = images.features.values.to(dtype).chunk(len(sizes))
        distinct: dict[str, tuple[Tensor, Tensor]] = {}
        for digest, size, z, f in zip(digests, sizes, latents, features, strict=True):
            if digest not in distinct:
                distinct[digest] = self.patch_embed(z.T.unflatten(1, size)[None], time)[0], self.vision_aligner(f)
        rows = [distinct[digest] for digest in digests]
        return torch.cat([row[0] for row in rows]), torch.cat([row[1] for row in rows])
