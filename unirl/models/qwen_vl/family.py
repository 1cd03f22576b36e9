"""Qwen2.5-VL and Qwen3-VL: text and images to text, from transformers classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from unirl.config.errors import DataError, NotFoundError
from unirl.models.images import png_image, png_of, split_at_images
from unirl.models.language.bundle import CPU, LanguageBundle, LanguageFamily
from unirl.models.language.packing import images_of, prompt_tokens, prompts_of
from unirl.models.language.pipeline import PlainPrompt, TextPipeline, check_prompt_length
from unirl.models.language.tools import ToolBox
from unirl.models.loading.checkpoint import read_entries
from unirl.models.loading.toy_tokenizers import qwen_vl_tokenizer
from unirl.models.qwen_vl.vision import (
    IMAGE_TEXT,
    IMAGE_TOKEN,
    DeepstackPolicy,
    ImagePatcher,
    PatchedImage,
    QwenVLPolicy,
    collapse_images,
    expand_images,
    pack_images,
    rope_positions,
    split_images,
    toy_image_processor,
)
from unirl.types.conditions import Conditions, ImagePatches, PatchGrid
from unirl.types.primitives import MediaRef, PromptImages
from unirl.types.protocols import DtypeName
from unirl.types.rollout_req import RolloutReq
from unirl.types.sampling import ARSamplingParams

if TYPE_CHECKING:
    from transformers import Qwen2VLImageProcessorPil

FOLDER = Path(__file__).parent
PROCESSOR = "preprocessor_config.json"
IMAGES = "images"


def _nested_name(name: str) -> str:
    """Qwen2.5-VL was published before its language model and its vision tower moved below one module."""
    if name.startswith(("model.language_model.", "model.visual.", "lm_head.")):
        return name
    return f"model.{name}" if name.startswith("visual.") else name.replace("model.", "model.language_model.", 1)


QWEN2_5_VL = LanguageFamily(
    name="qwen2_5_vl",
    model_class="Qwen2_5_VLForConditionalGeneration",
    config_class="Qwen2_5_VLConfig",
    block="Qwen2_5_VLDecoderLayer",
    policy=QwenVLPolicy,
    parameter_name=_nested_name,
    reads_images=True,
)
QWEN3_VL = LanguageFamily(
    name="qwen3_vl",
    model_class="Qwen3VLForConditionalGeneration",
    config_class="Qwen3VLConfig",
    block="Qwen3VLTextDecoderLayer",
    policy=DeepstackPolicy,
    reads_images=True,
)


class QwenVLBundle(LanguageBundle):
    """The dense models of both generations. The vision tower is a part of the network."""

    families = {family.name: family for family in (QWEN2_5_VL, QWEN3_VL)}  # noqa: RUF012
    toys = read_entries(FOLDER / "toy.json")
    published = read_entries(FOLDER / "published.json")
    seed = 20252
    shipped: ClassVar = {"quickstart": FOLDER / "quickstart"}
    toy_tokenizer = staticmethod(qwen_vl_tokenizer)

    def __init__(
        self,
        device: torch.device = CPU,
        components: Sequence[str] | None = None,
        *,
        path: str,
        revision: str | None = None,
        dtype: DtypeName = "bf16",
        freeze_vision_tower: bool = True,
        meta_init: bool = False,
    ) -> None:
        """See `LanguageBundle`. There are two tiny models, `toy` and `toy-qwen2.5`.

        Args:
            freeze_vision_tower: train only the language model. Adapters are never put into the tower.
        """
        super().__init__(device, components, path=path, revision=revision, dtype=dtype, meta_init=meta_init)
        self.image_processor = self._load_image_processor()
        network = self.trainable()
        assert isinstance(network, QwenVLPolicy)
        network.normalizer = ImagePatcher(self.image_processor).normalizer
        network.tower().requires_grad_(not freeze_vision_tower)

    @property
    def image_token(self) -> int:
        """The token that the chat template puts in place of one image."""
        return int(self.config["image_token_id"])

    def _load_image_processor(self) -> Qwen2VLImageProcessorPil:
        if self.path in self.toys:
            return toy_image_processor()
        from transformers import Qwen2VLImageProcessorPil

        root = self.directory_of(self.path, self.revision)
        if not (root / PROCESSOR).is_file():
            raise NotFoundError(f"{root} has no {PROCESSOR}, which says how images are cut. Download the model again")
        return Qwen2VLImageProcessorPil.from_pretrained(root, local_files_only=True)


class QwenVLPipeline(TextPipeline[QwenVLBundle]):
    """Text and images to text. Images are scaled into bounds and cut into patches, whose tokens go into the prompt."""

    toy: ClassVar[Mapping[str, object]] = {"min_pixels": None, "max_pixels": None}

    def __init__(
        self,
        bundle: QwenVLBundle,
        *,
        chat: bool = True,
        system_instruction: str | None = None,
        enable_thinking: bool = False,
        tools: ToolBox | None = None,
        use_cuda_graphs: bool = False,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
    ) -> None:
        """See `TextPipeline`.

        Args:
            min_pixels: smaller images are scaled up to about this many pixels; absent = the checkpoint's own bound.
            max_pixels: larger images are scaled down to about this many; absent = the checkpoint's own bound.
        """
        super().__init__(
            bundle,
            chat=chat,
            system_instruction=system_instruction,
            enable_thinking=enable_thinking,
            tools=tools,
            use_cuda_graphs=use_cuda_graphs,
        )
        self.patcher = ImagePatcher(bundle.image_processor, min_pixels, max_pixels)

    def encode(self, req: RolloutReq, params: ARSamplingParams) -> Conditions:
        """`prompt`, and `images` if the request has any. Each distinct prompt is encoded once."""
        images = req.primitives.get(IMAGES)
        assert images is None or isinstance(images, PromptImages)
        refs: list[tuple[MediaRef, ...]] = [()] * len(req) if images is None else images.per_prompt
        keys = list(zip(req.prompts(), refs, strict=True))
        encoded: dict[tuple[str, tuple[MediaRef, ...]], Conditions] = {}
        for key, id in zip(keys, req.group_ids, strict=True):
            if key not in encoded:
                encoded[key] = self._encoded(*key, id, params)
        rows = [encoded[key] for key in keys]
        names = ("prompt",) if images is None else ("prompt", IMAGES)
        return {name: type(rows[0][name]).concat([row[name] for row in rows]).to(self.bundle.device) for name in names}

    def write_model(self, tensors: Mapping[str, Tensor], folder: Path) -> Path:
        """Writes a directory that transformers loads, with the image processor."""
        written = super().write_model(tensors, folder)
        self.bundle.image_processor.save_pretrained(written)
        return written

    def _encoded(self, text: str, refs: tuple[MediaRef, ...], id: str, params: ARSamplingParams) -> Conditions:
        """The conditions of one prompt. Raises DataError, which names the prompt `id`."""
        try:
            images = [self.patcher.read(ref.uri) for ref in refs]
            conditions = self._conditions(self.bundle.codec.encode(self._formatted(text, len(refs))), images)
        except DataError as error:
            raise type(error)(f"prompt {id}: {error}") from error
        except ValueError as error:
            raise DataError(f"prompt {id}: {error}") from error
        check_prompt_length(len(prompts_of(conditions).tokens), id, params)
        return conditions

    def _conditions(self, tokens: Sequence[int], images: Sequence[PatchedImage]) -> Conditions:
        """The conditions of one prompt. Raises ValueError unless `tokens` have one placeholder for each image."""
        grids, image_token = [grid for _, grid in images], self.bundle.image_token
        expanded = expand_images(tokens, image_token, [self.patcher.num_tokens(grid) for grid in grids])
        positions = rope_positions(self.bundle.trainable(), expanded, grids, image_token)
        return {
            "prompt": prompt_tokens([expanded], [positions]),
            IMAGES: pack_images(images, self.patcher.patch_width),
        }

    def plain_prompts(self, conditions: Conditions) -> list[PlainPrompt]:
        images, prompts = images_of(conditions), super().plain_prompts(conditions)
        if images is None:
            return prompts
        assert isinstance(images, ImagePatches)
        patched = iter(split_images(images.to(torch.device("cpu"))))
        files: dict[tuple[PatchGrid, str], bytes] = {}
        plain = []
        for prompt, grids, digests in zip(prompts, images.grids, images.digests, strict=True):
            keys = list(zip(grids, digests, strict=True))
            for key in keys:
                patches, grid = next(patched)
                if key not in files:
                    files[key] = png_of(self.patcher.join(patches, grid))
            plain.append(self._plain_prompt(prompt.tokens, grids, tuple(files[key] for key in keys)))
        return plain

    def _plain_prompt(
        self, tokens: Sequence[int], grids: Sequence[PatchGrid], images: tuple[bytes, ...]
    ) -> PlainPrompt:
        image_token = self.bundle.image_token
        collapsed = collapse_images(tokens, image_token, [self.patcher.num_tokens(grid) for grid in grids])
        return PlainPrompt(collapsed, [image_token if token == IMAGE_TOKEN else token for token in tokens], images)

    def from_plain(self, tokens: Sequence[int], images: Sequence[bytes]) -> Conditions:
        conditions = self._conditions(tokens, [self.patcher.cut(png_image(image)) for image in images])
        return {name: condition.to(self.bundle.device) for name, condition in conditions.items()}

    def _formatted(self, text: str, num_images: int) -> str:
        """The text that the model reads, with one placeholder per image."""
        parts = split_at_images(text, num_images)
        if not self.format.chat:
            return "".join(IMAGE_TEXT if part is None else part for part in parts)
        if not num_images:
            return self.format.text(text)
        return self.format.text(
            [{"type": "image"} if part is None else {"type": "text", "text": part} for part in parts]
        )
