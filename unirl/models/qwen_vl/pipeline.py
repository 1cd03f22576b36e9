"""Text and pictures to text with Qwen-VL: the general pipeline, which also opens what prompts are about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from unirl.config.errors import DataError
from unirl.models.images import split_at_images
from unirl.models.language.pipeline import TextPipeline, check_prompt_length
from unirl.models.language.tools import ToolBox
from unirl.models.qwen_vl.bundle import QwenVLBundle
from unirl.models.qwen_vl.sight import (
    ImageCutter,
    Sight,
    VisionTokens,
    cut_all,
    packed_sights,
    packed_tokens,
    positions_of,
    with_places,
)
from unirl.types.conditions import Conditions
from unirl.types.primitives import MediaRef, PromptImages
from unirl.types.rollout_req import RolloutReq
from unirl.types.sampling import ARSamplingParams

IMAGES = "images"


@dataclass(frozen=True)
class _Encoded:
    """One distinct prompt."""

    tokens: list[int]
    positions: Tensor  # [P, 3]
    sights: list[Sight]


class QwenVLPipeline(TextPipeline[QwenVLBundle]):
    """Sampling is the general one; a prompt's pictures are scaled into bounds, cut and put in their places."""

    toy: ClassVar[Mapping[str, object]] = {"min_pixels": None, "max_pixels": None}

    def __init__(
        self,
        bundle: QwenVLBundle,
        *,
        chat: bool = True,
        system_instruction: str | None = None,
        enable_thinking: bool = False,
        tools: ToolBox | None = None,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
    ) -> None:
        """A pipeline over `bundle`.

        Args:
            chat: prompts are put into the model's chat template; False feeds them as they are.
            system_instruction: what stands before every chat.
            enable_thinking: lets models think aloud whose chat template has such a switch.
            tools: what answers in the middle of a response; absent = nothing does.
            min_pixels: smaller pictures are scaled up to about so many pixels; absent = the checkpoint's own bound.
            max_pixels: larger pictures are scaled down; absent = the checkpoint's own bound.
        """
        super().__init__(
            bundle,
            chat=chat,
            system_instruction=system_instruction,
            enable_thinking=enable_thinking,
            tools=tools,
        )
        self.cutter = ImageCutter(bundle.image_processor, min_pixels, max_pixels)
        self.vision = VisionTokens(bundle.picture_token)

    def encode(self, req: RolloutReq, params: ARSamplingParams) -> Conditions:
        """`prompt`, and `images` where the request brings any. Each distinct prompt is encoded once."""
        images = req.primitives.get(IMAGES)
        assert images is None or isinstance(images, PromptImages)
        refs: list[tuple[MediaRef, ...]] = [()] * len(req) if images is None else images.per_prompt
        keys = list(zip(req.prompts(), refs, strict=True))
        encoded: dict[tuple[str, tuple[MediaRef, ...]], _Encoded] = {}
        for key, id in zip(keys, req.group_ids, strict=True):
            if key not in encoded:
                encoded[key] = self._encoded(*key, id, params)
        rows = [encoded[key] for key in keys]
        device = self.bundle.device
        conditions: Conditions = {"prompt": packed_tokens([(row.tokens, row.positions) for row in rows]).to(device)}
        if images is not None:
            conditions[IMAGES] = packed_sights([row.sights for row in rows], self.cutter.patch_width).to(device)
        return conditions

    def write_model(self, tensors: Mapping[str, Tensor], folder: Path) -> Path:
        """A directory that transformers loads, which also says how pictures are cut."""
        written = super().write_model(tensors, folder)
        self.bundle.image_processor.save_pretrained(written)
        return written

    def _encoded(self, text: str, refs: tuple[MediaRef, ...], id: str, params: ARSamplingParams) -> _Encoded:
        """Raises DataError, naming the prompt `id`."""
        sights = cut_all(self.cutter, refs, id)
        counts = [self.cutter.num_tokens(sight) for sight in sights]
        try:
            tokens = self.bundle.codec.encode(self._written(text, len(refs)))
            tokens = with_places(tokens, self.vision.picture, counts)
        except ValueError as error:
            raise DataError(f"prompt {id}: {error}") from error
        check_prompt_length(len(tokens), id, params)
        grids = [sight.grid for sight in sights]
        return _Encoded(tokens, positions_of(self.bundle.trainable(), tokens, grids, self.vision.picture), sights)

    def _written(self, text: str, num_images: int) -> str:
        """What the model reads, with one placeholder for each picture."""
        parts = split_at_images(text, num_images)
        if not self.format.chat:
            return "".join(self.vision.written() if part is None else part for part in parts)
        if not num_images:
            return self.format.text(text)
        return self.format.text(
            [{"type": "image"} if part is None else {"type": "text", "text": part} for part in parts]
        )
