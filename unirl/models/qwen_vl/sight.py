"""Pictures as the vision tower reads them, and prompts with places for them: what Qwen's own processor does.

Levels stay uint8 until they are on the device, and the frames that a still picture is repeated to are not kept: an
eighth of what the processor hands out, and the same values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unirl.config.errors import DataError, InvalidValueError
from unirl.models.images import read_image
from unirl.models.qwen_vl.policy import CHANNELS, PICTURE, Levels
from unirl.types.conditions import Grid, ImagePatches, PromptTokens
from unirl.types.primitives import MediaRef


@dataclass(frozen=True)
class Sight:
    """One picture, cut into patches."""

    patches: Tensor  # [N, 3 * p * p] uint8
    grid: Grid


class ImageCutter:
    """Pictures to patches, by the image processor of a checkpoint."""

    def __init__(self, processor: Any, min_pixels: int | None = None, max_pixels: int | None = None) -> None:
        """
        Args:
            processor: a `Qwen2VLImageProcessorPil`.
            min_pixels: smaller pictures are scaled up to about so many pixels; absent = the checkpoint's own bound.
            max_pixels: larger pictures are scaled down; absent = the checkpoint's own bound.
        """
        self.processor = processor
        self.min_pixels = processor.size["shortest_edge"] if min_pixels is None else min_pixels
        self.max_pixels = processor.size["longest_edge"] if max_pixels is None else max_pixels
        self.levels = Levels(tuple(processor.image_mean), tuple(processor.image_std))
        token = (processor.patch_size * processor.merge_size) ** 2
        if not token <= self.min_pixels <= self.max_pixels:
            raise InvalidValueError(
                f"pipeline.min_pixels={self.min_pixels} and max_pixels={self.max_pixels}: a token of this model is "
                f"{token} pixels, and {token} <= min_pixels <= max_pixels must hold"
            )

    def cut(self, path: str) -> Sight:
        """The picture in the file. Raises DataError (4003)."""
        found = self.processor(
            images=[read_image(path)],
            size={"shortest_edge": self.min_pixels, "longest_edge": self.max_pixels},
            do_rescale=False,
            do_normalize=False,
            return_tensors="pt",
        )
        frames, rows, columns = found["image_grid_thw"][0].tolist()
        values = found["pixel_values"]
        patches = values.view(len(values), CHANNELS, self.processor.temporal_patch_size, -1)[:, :, 0]
        return Sight(patches.flatten(1).to(torch.uint8), (frames, rows, columns))

    @property
    def patch_width(self) -> int:
        """Levels of a patch."""
        return CHANNELS * int(self.processor.patch_size) ** 2

    def num_tokens(self, sight: Sight) -> int:
        """How many tokens of the language model stand for a picture."""
        frames, rows, columns = sight.grid
        return int(frames * rows * columns // self.processor.merge_size**2)


def image_text_processor(image_processor: Any, tokenizer: Any) -> Any:
    """Qwen's own processor of pictures and texts, without the part for videos, which needs torchvision.

    Its class bears the name of Qwen's own, so that a model that is written with it is read by everyone's.
    """
    from transformers import Qwen2VLProcessor

    class PictureProcessor(Qwen2VLProcessor):
        @classmethod
        def get_attributes(cls) -> list[str]:
            """The parts that it has."""
            return ["image_processor", "tokenizer"]

    PictureProcessor.__name__ = Qwen2VLProcessor.__name__
    PictureProcessor.__module__ = Qwen2VLProcessor.__module__
    return PictureProcessor(image_processor, tokenizer)


@dataclass(frozen=True)
class VisionTokens:
    """The tokens of a family that have to do with pictures."""

    picture: int
    """The chat template's placeholder of one picture."""
    open: str = "<|vision_start|>"
    place: str = "<|image_pad|>"
    close: str = "<|vision_end|>"

    def written(self) -> str:
        """A picture in a text that no chat template made."""
        return f"{self.open}{self.place}{self.close}"


def with_places(tokens: Sequence[int], picture: int, counts: Sequence[int]) -> list[int]:
    """`tokens` with as many places as each picture has tokens in place of its placeholder. Raises ValueError."""
    if sum(token == picture for token in tokens) != len(counts):
        raise ValueError(
            f"the tokens hold {sum(token == picture for token in tokens)} placeholders for {len(counts)} pictures: "
            "the text itself spells the model's placeholder, or its chat template leaves pictures out"
        )
    left = iter(counts)
    return [place for token in tokens for place in ([PICTURE] * next(left) if token == picture else [token])]


def positions_of(network: Any, tokens: Sequence[int], grids: Sequence[Grid], picture: int) -> Tensor:
    """[P, 3] (time, row, column) of a prompt's tokens, by the network's own rule."""
    ids = torch.tensor([tokens])
    places = ids == PICTURE
    found, _ = network.get_submodule("model").get_rope_index(
        ids.where(~places, picture),
        mm_token_type_ids=places.int(),
        image_grid_thw=torch.tensor(grids) if grids else None,
    )
    return found[:, 0].T.contiguous()


def packed_tokens(rows: Sequence[tuple[Sequence[int], Tensor]]) -> PromptTokens:
    """Prompts as (tokens, positions)."""
    lengths = torch.tensor([len(tokens) for tokens, _ in rows])
    return PromptTokens(
        tokens=torch.tensor([token for tokens, _ in rows for token in tokens]),
        positions=torch.cat([positions for _, positions in rows]),
        next_position=torch.stack([positions.max() + 1 for _, positions in rows]),
        offsets=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
    )


def packed_sights(rows: Sequence[Sequence[Sight]], width: int) -> ImagePatches:
    """The pictures of rows; `width` is a patch's, for the case that there are none."""
    patches = [sight.patches for row in rows for sight in row]
    sizes = torch.tensor([sum(len(sight.patches) for sight in row) for row in rows], dtype=torch.int64)
    return ImagePatches(
        patches=torch.cat(patches) if patches else torch.zeros(0, width, dtype=torch.uint8),
        grids=[tuple(sight.grid for sight in row) for row in rows],
        offsets=torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)]),
    )


def cut_all(cutter: ImageCutter, refs: Sequence[MediaRef], id: str) -> list[Sight]:
    """The pictures of one prompt. Raises DataError naming it."""
    try:
        return [cutter.cut(ref.uri) for ref in refs]
    except DataError as error:
        raise type(error)(f"prompt {id}: {error}") from error
