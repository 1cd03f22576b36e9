"""Qwen2.5-VL and Qwen3-VL from transformers classes: a hub id, a directory, a toy, or the shipped quick start."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from unirl.config.errors import NotFoundError
from unirl.models.language.bundle import CPU, LanguageBundle
from unirl.models.qwen_vl.families import FAMILIES
from unirl.models.qwen_vl.policy import QwenVLPolicy
from unirl.models.qwen_vl.published import PUBLISHED
from unirl.models.qwen_vl.sight import ImageCutter
from unirl.models.qwen_vl.toy import TOYS, toy_image_processor, toy_tokenizer
from unirl.types.protocols import DtypeName

PROCESSOR = "preprocessor_config.json"


class QwenVLBundle(LanguageBundle):
    """The dense models of both generations. The vision tower is a part of the network, and frozen unless told."""

    families = FAMILIES
    toys = TOYS
    published = PUBLISHED
    seed = 20252
    shipped = Path(__file__).parent / "quickstart"

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
        """
        Args:
            components: of a model that has only one.
            path: a hub id, a directory of transformers, `toy` or `toy-qwen2.5` (tiny, random), or `quickstart`
                (shipped).
            revision: branch, tag or commit of a hub id.
            dtype: what the network computes in.
            freeze_vision_tower: only the language model is trained. Adapters never touch the tower.
            meta_init: leave the network without storage: the backend that trains it reads its shards only.
        """
        super().__init__(device, components, path=path, revision=revision, dtype=dtype, meta_init=meta_init)
        self.image_processor = self._load_image_processor()
        network = self.trainable()
        assert isinstance(network, QwenVLPolicy)
        network.levels = ImageCutter(self.image_processor).levels
        network.tower().requires_grad_(not freeze_vision_tower)

    @staticmethod
    def toy_tokenizer() -> Any:
        return toy_tokenizer()

    @property
    def picture_token(self) -> int:
        """The token that stands for a picture before it is given its places."""
        return int(self.config["image_token_id"])

    def _load_image_processor(self) -> Any:
        if self.path in self.toys:
            return toy_image_processor()
        from transformers import Qwen2VLImageProcessorPil

        root = self.directory_of(self.path, self.revision)
        if not (root / PROCESSOR).is_file():
            raise NotFoundError(f"{root} has no {PROCESSOR}, which says how pictures are cut. Download the model again")
        return Qwen2VLImageProcessorPil.from_pretrained(root, local_files_only=True)
