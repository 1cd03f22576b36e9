"""Qwen-VL as a policy over tokens: where a picture stands, the decoder reads what the vision tower made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unirl.models.language.policy import TokenPolicy
from unirl.types.conditions import Grid, ImagePatches

PICTURE = -1
"""Stands in prompts for each token of a picture. A placeholder that the policy itself says is a word like any other."""
CHANNELS = 3


@dataclass(frozen=True)
class Levels:
    """How levels of uint8 become what the vision tower reads: (level / 255 - mean) / std, of red, green and blue."""

    mean: Sequence[float]
    std: Sequence[float]

    def __call__(self, patches: Tensor, frames: int) -> Tensor:
        """[N, 3 * frames * p * p] fp32 from patches [N, 3 * p * p] of a picture, each of whose frames is the same."""
        levels = patches.view(len(patches), CHANNELS, -1).float() / 255
        mean, std = (torch.tensor(v, device=patches.device)[:, None] for v in (self.mean, self.std))
        values = (levels - mean) / std
        return values[:, :, None].expand(-1, -1, frames, -1).reshape(len(patches), -1)


@dataclass(frozen=True)
class Seen:
    """What the vision tower made of pictures, in their order."""

    features: Tensor  # [M, D]
    deep: tuple[Tensor, ...] = ()  # [M, D] each, added after the first layers of the decoder (DeepStack)

    @staticmethod
    def concat(parts: Sequence[Seen]) -> Seen:
        """All pictures of `parts`, in order."""
        deep = tuple(torch.cat(layer) for layer in zip(*(part.deep for part in parts), strict=True))
        return Seen(torch.cat([part.features for part in parts]), deep)


class QwenVLPolicy(TokenPolicy):
    """Qwen2.5-VL. Each picture runs through the vision tower by itself, and pictures that are the same run once."""

    levels: Levels
    """Set by the bundle, from the checkpoint's image processor."""

    def decoder(self) -> Any:
        return self.get_submodule("model.language_model")

    def tower(self) -> nn.Module:
        """The vision tower."""
        return self.get_submodule("model.visual")

    def embeds(self, tokens: Tensor, images: ImagePatches | None) -> tuple[Tensor, dict[str, Any]]:
        words = self.decoder().embed_tokens(tokens.clamp(min=0)[None])
        pictures = [] if images is None else list(pictures_of(images))
        if not pictures:
            return words + self._nothing_seen(tokens), {}
        seen = self._look(pictures)
        places = (tokens == PICTURE)[None]
        assert int(places.sum()) == len(seen.features), "as many placeholders as tokens of pictures"
        return words.masked_scatter(places[..., None], seen.features.to(words.dtype)), self.deepstack(places, seen)

    def deepstack(self, places: Tensor, seen: Seen) -> dict[str, Any]:
        """What else the decoder is told of pictures at `places` [1, N]."""
        return {}

    def look(self, patches: Tensor, grid: Grid) -> Seen:
        """One picture through the vision tower."""
        tower, config = self.tower(), self.config.vision_config
        pixels = self.levels(patches, config.temporal_patch_size)
        out = tower(
            pixels.to(next(tower.parameters()).dtype),
            grid_thw=torch.tensor([grid], device=patches.device),
            return_dict=True,
        )
        return self.seen(out)

    def seen(self, out: Any) -> Seen:
        """What the language model is given of the tower's output."""
        return Seen(out.pooler_output)

    def _look(self, pictures: Sequence[tuple[Tensor, Grid]]) -> Seen:
        distinct: list[tuple[Tensor, Grid, Seen]] = []
        parts = []
        for patches, grid in pictures:
            known = next((s for p, g, s in distinct if g == grid and torch.equal(p, patches)), None)
            parts.append(known or self.look(patches, grid))
            if known is None:
                distinct.append((patches, grid, parts[-1]))
        return Seen.concat(parts)

    def _nothing_seen(self, tokens: Tensor) -> Tensor | float:
        """0, with a gradient of 0 to the tower if it is trained: ranks without a picture reduce the same gradients."""
        if not (torch.is_grad_enabled() and next(self.tower().parameters()).requires_grad):
            return 0.0
        config = self.config.vision_config
        side = config.spatial_merge_size
        blank = torch.zeros(side * side, CHANNELS * config.patch_size**2, device=tokens.device)
        seen = self.look(blank, (1, side, side))
        return 0.0 * (seen.features.sum() + sum(layer.sum() for layer in seen.deep))


class DeepstackPolicy(QwenVLPolicy):
    """Qwen3-VL: the first layers of the decoder are given middle layers of the tower, too (arXiv:2406.04334)."""

    def deepstack(self, places: Tensor, seen: Seen) -> dict[str, Any]:
        return {"visual_pos_masks": places, "deepstack_visual_embeds": list(seen.deep)}

    def seen(self, out: Any) -> Seen:
        return Seen(out.pooler_output, tuple(out.deepstack_features))


def pictures_of(images: ImagePatches) -> list[tuple[Tensor, Grid]]:
    """Every picture's patches and grid, in the order of the rows."""
    grids = [grid for row in images.grids for grid in row]
    sizes = [frames * rows * columns for frames, rows, columns in grids]
    return list(zip(images.patches.split(sizes), grids, strict=True))
