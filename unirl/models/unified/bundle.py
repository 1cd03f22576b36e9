"""The bundle of one network that writes and draws: a policy over latents and a policy over tokens."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor, nn

from unirl.config.errors import NotFoundError
from unirl.models.base import Stage
from unirl.models.denoising.bundle import DiffusersBundle
from unirl.models.language.bundle import load_tokenizer
from unirl.models.language.chat import TextCodec
from unirl.models.language.stage import ARStage
from unirl.models.loading.adapter_sources import AdapterLayers, read_peft
from unirl.models.loading.saved_weights import SavedWeights
from unirl.models.unified.checkpoint import NETWORK, UnifiedFamily
from unirl.types.conditions import Conditions
from unirl.types.facts import LatentFacts
from unirl.types.sampling import DiffusionSamplingParams, Sampling, sampling_as

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IMAGE = "image"
"""The name of the track of images, which is the last one."""


@dataclass(frozen=True, kw_only=True)
class UnifiedFacts(LatentFacts):
    """Facts about a model whose unconditional pass of guidance has a fixed text."""

    unconditional: str
    """The inputs of the unconditional pass, as errors name them."""

    def check(self, sampling: Sampling) -> None:
        super().check(sampling)
        params = sampling_as(DiffusionSamplingParams, sampling, f"{self.family} samples with")
        if params.negative_prompt:
            raise ValueError(
                f"sampling.negative_prompt={params.negative_prompt!r}: the unconditional pass of {self.family} has "
                f"{self.unconditional}. Remove the key"
            )


class UnifiedBundle(DiffusersBundle):
    """The network and the VAE. An encoder that reads images is not loaded."""

    family: ClassVar[UnifiedFamily]
    facts: UnifiedFacts
    codec: TextCodec

    # Policies

    def stage_of(self, track: str) -> Stage:
        """The policy of a track: of images for `image`, of text for any other name."""
        return self.stage() if track == IMAGE else self.text_stage(track)

    def text_stage(self, track: str) -> ARStage:
        """The network as a policy over tokens, which writes the text of a track."""
        assert self.facts.text is not None
        return ARStage(self.trainable(), self.facts.text, self.codec_of(track), self.dtype)

    def codec_of(self, track: str) -> TextCodec:
        """The tokenizer of a text, with the tokens that end it."""
        return self.codec

    def spell(self, tokens: Sequence[int]) -> tuple[str, ...]:
        return self.codec.pieces(tokens)

    def denoiser(self) -> UnifiedDenoiser:
        return UnifiedDenoiser(self)

    @abstractmethod
    def image_inputs(self, x: Tensor, times: Tensor, conditions: Conditions) -> object:
        """The input of a forward for latents x [B, C, H, W] at timesteps `times` [B], given the tokens `text`."""

    # Tokenizer

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of prompts and texts."""
        return self.family.toy_tokenizers()["tokenizer"] if self.root is None else load_tokenizer(self.root)

    def token(self, text: str) -> int:
        """The token that is spelt `text`. Raises NotFoundError (4001) if the vocabulary lacks it."""
        token, rows = self.tokenizer.get_vocab().get(text), self.configs.components[NETWORK]["vocab_size"]
        if token is None or token >= rows:
            raise NotFoundError(
                f"{self.path}: its tokenizer has {text!r} as token {token}, and the network embeds {rows} tokens, so "
                "they belong to different checkpoints. Download both again"
            )
        return token

    # Weights

    def saved_part(self, component: str) -> SavedWeights:
        assert self.root is not None, "a toy has no files"
        return self.family.weights(self.root, component, self.dtype)

    def read_adapter_of(self, component: str, file: Path) -> AdapterLayers:
        return read_peft(file, lambda: self.family.build(self.configs, component))


class UnifiedDenoiser:
    """The network of a bundle as a velocity field. Each call computes the whole sequence."""

    def __init__(self, bundle: UnifiedBundle) -> None:
        self.network: nn.Module = bundle.trainable()
        self.bundle = bundle

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        """v [B, C, H, W] fp32 at x [B, C, H, W] fp32 and sigma [B], given the tokens `text`."""
        inputs = self.bundle.image_inputs(x, self.bundle.facts.timestep_scale * sigma, conditions)
        v: Tensor = self.network(inputs)["velocity"]
        return v.float()
