"""HunyuanImage-3 for prompts with images: text about images, and images made of others (arXiv:2509.23951).

The network, its tracks and its files are those of `hunyuan_image3`. Here, the bundle also has the frozen vision tower
of the checkpoint, every prompt has at least one image, and the network reads it in each track.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from unirl.config.errors import DataError, NotFoundError
from unirl.models.cache import BoundedCache
from unirl.models.denoising.embeddings import ConditionImages
from unirl.models.hunyuan_image3 import family as hunyuan_image3
from unirl.models.hunyuan_image3.checkpoint import EXAMPLE, VISION, HunyuanImage3Family
from unirl.models.hunyuan_image3_vision.images import (
    SECTION_MARKS,
    EncodedImage,
    ImageReader,
    digest_of,
    packed_images,
    placed,
)
from unirl.models.images import read_image, to_pil, with_marks
from unirl.models.language.packing import prompt_tokens
from unirl.models.loading.checkpoint import VAE, Config, ModelConfigs, family_files
from unirl.models.loading.hub import CONFIG
from unirl.models.unified.bundle import UnifiedFacts
from unirl.models.unified.checkpoint import NETWORK
from unirl.sde.guidance import NEGATIVE
from unirl.types.conditions import Conditions
from unirl.types.progress import progress
from unirl.types.rollout_req import RolloutReq
from unirl.types.sampling import DiffusionSamplingParams

if TYPE_CHECKING:
    from PIL.Image import Image

TOWER_KEYS = ("vit", "vit_aligner", "vit_processor")
TOWER_SETTINGS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_channels", "num_patches"),
    *("patch_size", "hidden_act", "layer_norm_eps", "attention_dropout"),
)
"""Keys of the published configuration of the tower that its class in transformers has as well."""
PUBLISHED_READING: Config = {
    "vit_type": "siglip2-so400m-patch16-naflex",
    "cond_image_type": "vae_vit",
    "cond_token_attn_type": "joint_full",
}
"""How the published checkpoints read images: by a SigLIP 2 and the VAE, and with attention among all tokens of both."""
CACHE_BYTES = 2**30
"""Main memory for encoded images: about 350 of the published model."""


class HunyuanImage3VisionFamily(HunyuanImage3Family):
    """The family of HunyuanImage-3 checkpoints that have a vision tower."""

    def read(self, root: Path) -> ModelConfigs:
        """The configurations in a folder. Raises NotFoundError (4001) for a model that cannot read images."""
        configs = super().read(root)
        network = configs.components[NETWORK]
        lacking = [key for key in TOWER_KEYS if not network.get(key)]
        if lacking:
            raise NotFoundError(
                f"{root}: its {CONFIG} has no {', '.join(lacking)}, so the model has no vision tower and reads no "
                f"images. Give {EXAMPLE}, or use {hunyuan_image3.__name__}.HunyuanImage3Bundle, whose prompts have none"
            )
        published = {**PUBLISHED_READING, "vit_aligner.projector_type": "mlp_gelu"}
        own = {**network, "vit_aligner.projector_type": network["vit_aligner"].get("projector_type")}
        wrong = [f"{key}={own.get(key)!r}" for key, value in published.items() if own.get(key, value) != value]
        if wrong:
            raise NotFoundError(f"{root}: its {CONFIG} has {', '.join(wrong)}, which is not available. Give {EXAMPLE}")
        tower = {key: network["vit"][key] for key in TOWER_SETTINGS}
        # Only the states of the last layer are read, and not the pooled output of the tower's head.
        return replace(configs, components={**configs.components, VISION: {**tower, "vision_use_head": False}})


def facts(configs: ModelConfigs, batch_multiple: int) -> UnifiedFacts:
    """The facts of a checkpoint: those of HunyuanImage-3, with one image or more in each prompt."""
    own, network = hunyuan_image3.facts(configs, batch_multiple), configs.components[NETWORK]
    assert own.text is not None
    num_latents = (network["image_base_size"] // own.vae_scale) ** 2
    tokens = num_latents + network["vit_processor"]["max_num_patches"] + SECTION_MARKS
    named: dict[str, Any] = {"family": "hunyuan_image3_vision", "condition_images": (1, None)}
    # A plan counts the tokens of one image.
    extra = own.extra_text_tokens + tokens
    return replace(own, **named, extra_text_tokens=extra, text=replace(own.text, **named))


HUNYUAN_IMAGE3_VISION = HunyuanImage3VisionFamily(
    name="hunyuan_image3_vision",
    pipeline="",  # diffusers has none
    classes={
        NETWORK: "unirl.models.hunyuan_image3_vision.network.HunyuanImage3VisionNetwork",
        VAE: hunyuan_image3.HUNYUAN_IMAGE3.classes[VAE],
        VISION: "transformers.Siglip2VisionModel",
    },
    tokenizers=(),
    facts=facts,
    toy_tokenizers=hunyuan_image3.HUNYUAN_IMAGE3.toy_tokenizers,
    seed=hunyuan_image3.HUNYUAN_IMAGE3.seed,
    **family_files(__file__, base=hunyuan_image3.__file__),
)


class HunyuanImage3VisionBundle(hunyuan_image3.HunyuanImage3Bundle):
    """The network with its aligner, and the frozen VAE and vision tower, both of which read the images of prompts."""

    family: ClassVar[HunyuanImage3Family] = HUNYUAN_IMAGE3_VISION
    reads_images: ClassVar[bool] = True

    def image_reader(self, size: int | None) -> ImageReader:
        """The encoder of images in prompts.

        Args:
            size: pixels along each side of a square image for the VAE. None takes those of the model.
        """
        from transformers import Siglip2ImageProcessorPil

        [_, tower] = self.require(ImageReader.components, "read the images of prompts")
        self.token("<joint_img_sep>")
        processor = Siglip2ImageProcessorPil(**self.configs.components[NETWORK]["vit_processor"])
        side = self.format.base_size if size is None else size
        return ImageReader(self.encoder(), tower, processor, self.format, side)


class HunyuanImage3VisionPipeline(hunyuan_image3.HunyuanImage3Pipeline):
    """Images and text to text (a track `text`), or to images, with or without texts before them."""

    bundle: HunyuanImage3VisionBundle
    toy: ClassVar[Mapping[str, object]] = {"condition_size": 64}

    def __init__(
        self,
        bundle: HunyuanImage3VisionBundle,
        *,
        system_instruction: str | None = None,
        condition_size: int | None = None,
        decode_batch_size: int = 1,
        keep_resident: bool = True,
        decode_ahead: bool = False,
    ) -> None:
        """See `HunyuanImage3Pipeline`.

        Args:
            condition_size: pixels along each side of a square image in a prompt, for the VAE; other images have about
                the same area. A smaller one has fewer tokens. Absent = that of the model, on which it was trained.
        """
        super().__init__(
            bundle,
            system_instruction=system_instruction,
            decode_batch_size=decode_batch_size,
            keep_resident=keep_resident,
            decode_ahead=decode_ahead,
        )
        self.reader = bundle.image_reader(condition_size)
        self.cache: BoundedCache[str, EncodedImage] = BoundedCache(lambda image: image.num_bytes)

    # Prompts

    def prompts_of(self, req: RolloutReq) -> list[str]:
        """The prompt of each row, with a placeholder for each image. Raises DataError, which names the prompt."""
        texts = []
        for text, uris, id in zip(req.prompts(), req.prompt_image_uris(), req.group_ids, strict=True):
            try:
                texts.append(with_marks(text, len(uris)))
            except ValueError as error:
                raise DataError(f"prompt {id}: {error}") from error
        return texts

    def prompt_conditions(self, prompts: Mapping[str, Sequence[list[int]]], req: RolloutReq) -> Conditions:
        return self._with_images(prompts, self.images_of(req))

    def conditions_of(self, req: RolloutReq, params: DiffusionSamplingParams) -> Conditions:
        return self._drawing(self.prompts_of(req), self.images_of(req), params)

    def encode(
        self,
        texts: Sequence[str],
        params: DiffusionSamplingParams,
        images: Sequence[ConditionImages] | None = None,
    ) -> Conditions:
        """The tokens `text`, `negative_text` if guidance is active, and `images`, which come before each text."""
        if images is None:
            raise DataError(f"{self.facts.family} reads 1 or more images per prompt, and these prompts have none")
        pixels = [to_pil(image) for each in images for image in each.pixels]
        rows = iter(self._encoded(pixels))
        encoded = [tuple(next(rows) for _ in each.pixels) for each in images]
        marked = [with_marks(text, len(each)) for text, each in zip(texts, encoded, strict=True)]
        return self._drawing(marked, encoded, params)

    def _drawing(
        self, texts: Sequence[str], images: Sequence[tuple[EncodedImage, ...]], params: DiffusionSamplingParams
    ) -> Conditions:
        """The conditions of prompts before an image, which have a placeholder for each of their images."""
        format = self.bundle.format
        tokens = [format.user(text, params.max_sequence_length) for text in texts]
        prompts = {"text": [format.drawing(each, {}) for each in tokens]}
        if self.facts.guidance_of(params).active:
            prompts[NEGATIVE + "text"] = [format.drawing(each, {}, conditional=False) for each in tokens]
        conditions = self._with_images(prompts, images)
        return {name: condition.to(self.bundle.device) for name, condition in conditions.items()}

    def _with_images(
        self, prompts: Mapping[str, Sequence[list[int]]], images: Sequence[tuple[EncodedImage, ...]]
    ) -> Conditions:
        """The conditions of tokens, by name, with the images of each row in their places; and `images`."""
        conditions: Conditions = {"images": packed_images(images)}
        for name, rows in prompts.items():
            prompt = [placed(row, own, self.reader) for row, own in zip(rows, images, strict=True)]
            spans = [each.spans for each in prompt]
            conditions[name] = prompt_tokens(
                [each.tokens for each in prompt], [each.positions for each in prompt], spans
            )
        return conditions

    # Images

    def images_of(self, req: RolloutReq) -> list[tuple[EncodedImage, ...]]:
        """The images in the prompt of each row, each distinct one encoded once. Raises DataError for a bad file."""
        rows = req.prompt_image_uris()
        uris = list(dict.fromkeys(uri for row in rows for uri in row))
        encoded = dict(zip(uris, self._encoded([read_image(uri) for uri in uris]), strict=True))
        return [tuple(encoded[uri] for uri in row) for row in rows]

    def _encoded(self, images: Sequence[Image]) -> list[EncodedImage]:
        """The images as the network reads them. Encoding changes no bit, whatever is in the cache."""
        keys = [digest_of(image) for image in images]
        held = {key: self.cache.get(key) for key in keys}
        encoded = {key: image for key, image in held.items() if image is not None}
        missing = {key: image for key, image in zip(keys, images, strict=True) if key not in encoded}
        if missing:
            with self.bundle.resident(self.reader.components):
                for key, image in missing.items():
                    encoded[key] = self.reader.encode(image)
                    self.cache.put(key, encoded[key], CACHE_BYTES)
                    progress("encoded image", len(missing))
        return [encoded[key] for key in keys]
