"""A video model that predicts what follows an image, given actions: a world model.

The network is that of image to video, as in its family. A chunk of C actions [C, A] becomes C tokens, which take the
place of the last C tokens of the text, so that every block reads them by cross-attention:

    text     [B, L - C, D]   states of the instruction, then zeros
    actions  [B, C, D]       W a_c + p_c, one token for each action
    image    the frame before the chunk, in the family's own form

The frames after the image are denoised together. A frame is an action: the model is one of C + 1 frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unirl.config.errors import InvalidValueError, NotFoundError
from unirl.models.chunks import balanced_chunk_size, padded_chunks, select_conditions
from unirl.models.denoising.embeddings import ConditionImages
from unirl.models.denoising.pipeline import DiffusionPipeline
from unirl.sde.noise import NoiseSource
from unirl.types.batch import take_rows
from unirl.types.conditions import Conditions, TextEmbedCondition
from unirl.types.facts import LatentFacts
from unirl.types.primitives import Videos, unit
from unirl.types.sampling import DiffusionSamplingParams

ACTIONS_FILE = "actions.safetensors"
"""The file beside the components of a checkpoint that holds its `ActionTokens`."""


class ActionTokens(nn.Module):
    """Tokens [B, C, D] of chunks of actions [B, C, A], in the width D of the text states: W a_c + p_c."""

    def __init__(self, actions: int, chunk: int, width: int) -> None:
        """
        Args:
            actions: numbers of an action, A.
            chunk: actions of a chunk, C.
            width: D.
        """
        super().__init__()
        self.project = nn.Linear(actions, width, bias=False)
        self.places = nn.Parameter(torch.randn(chunk, width))

    def forward(self, actions: Tensor) -> Tensor:
        tokens: Tensor = self.project(actions) + self.places
        return tokens

    @classmethod
    def toy(cls, actions: int, chunk: int, width: int) -> ActionTokens:
        """Fixed random weights."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return cls(actions, chunk, width).requires_grad_(False)

    @classmethod
    def read(cls, folder: Path, actions: int, chunk: int, width: int) -> ActionTokens:
        """The tokens of a checkpoint.

        Raises:
            NotFoundError: 4001, the checkpoint has none: it is a video model that no action reaches.
            InvalidValueError: 2004, it was trained on other actions.
        """
        from safetensors.torch import load_file

        file = folder / ACTIONS_FILE
        if not file.is_file():
            raise NotFoundError(
                f"{folder} has no {ACTIONS_FILE}: it is a video model that was not trained on actions, and would "
                "predict the same frames after any of them. scripts/train_world_model.py shows how one is trained"
            )
        tensors = load_file(file)
        found = (tensors["project.weight"].shape[1], *tensors["places"].shape)
        if found != (actions, chunk, width):
            raise InvalidValueError(
                f"{file} reads chunks of {found[1]} actions of {found[0]} numbers (width {found[2]}), not {chunk} of "
                f"{actions} (width {width}). Set pipeline.env.chunk={found[1]} and pipeline.env.actions={found[0]}"
            )
        tokens = cls(actions, chunk, width).requires_grad_(False)
        tokens.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
        return tokens


@dataclass(frozen=True, eq=False)
class WorldModel:
    """Predicts the frames that follow images, with the components of one video model."""

    pipeline: DiffusionPipeline[Any]
    tokens: ActionTokens
    sampling: DiffusionSamplingParams
    """Pinned: all steps are deterministic, so that the initial noise decides the frames."""

    @classmethod
    def of(
        cls, pipeline: DiffusionPipeline[Any], tokens: ActionTokens, sampling: DiffusionSamplingParams
    ) -> WorldModel:
        """With the model's own schedule, and frames for the actions of a chunk."""
        chunk = len(tokens.places)
        check_chunk(pipeline.facts, chunk, sampling.max_sequence_length)
        sampling = replace(sampling, num_frames=chunk + 1, sde_indices=())
        sigmas = tuple(pipeline.sigmas(sampling).tolist())
        return cls(pipeline, tokens.to(pipeline.bundle.device), replace(sampling, sigmas=sigmas))

    def conditions(self, images: Tensor, texts: Sequence[str], actions: Tensor) -> Conditions:
        """The conditions of B predictions.

        Args:
            images: [B, 3, H, W] uint8, the frame before the chunk.
            texts: [B] the instructions.
            actions: [B, C, A] in [-1, 1].
        """
        shown = [ConditionImages.of(image[None]) for image in unit(images)]
        return self.with_actions(self.pipeline.encode(texts, self.sampling, shown), actions)

    def with_actions(self, conditions: Conditions, actions: Tensor) -> Conditions:
        """The conditions of the video model with the tokens of actions [B, C, A] at the end of the text."""
        text = conditions["text"]
        assert isinstance(text, TextEmbedCondition)
        tokens = self.tokens(actions.to(self.tokens.places)).to(text.embeds)
        kept = text.embeds[:, : -tokens.shape[1]]
        return {**conditions, "text": TextEmbedCondition(embeds=torch.cat([kept, tokens], dim=1))}

    @torch.no_grad()
    def predict(
        self, images: Tensor, texts: Sequence[str], actions: Tensor, keys: Sequence[tuple[int, str]], batch_size: int
    ) -> Tensor:
        """[B, C, 3, H, W] uint8 frames after images [B, 3, H, W] uint8, one for each action.

        Args:
            texts: [B] the instructions.
            actions: [B, C, A] in [-1, 1].
            keys: [B] a seed and a word, which decide the noise of a row.
            batch_size: rows of a forward, at most.
        """
        facts, device = self.pipeline.facts, self.pipeline.bundle.device
        shape = facts.latent_shape(self.sampling)
        x_T = torch.cat([NoiseSource(seed, "eval", 0).normal(["world"], what, shape) for seed, what in keys])  # noqa: N806
        conditions = self.conditions(images, texts, actions)
        size = balanced_chunk_size(len(images), batch_size, facts.batch_multiple)
        frames = []
        for chunk in padded_chunks(len(images), size, facts.batch_multiple):
            rows = list(chunk.rows)
            start, ids = take_rows(x_T, rows).to(device), [str(row) for row in rows]
            noise = NoiseSource(0, "eval", 0)  # no step draws from it
            segment = self.pipeline.stage.sample(select_conditions(conditions, rows), start, self.sampling, noise, ids)
            videos = self.pipeline.decode(segment.final)
            assert isinstance(videos, Videos)
            frames.append(videos.stacked()[: chunk.num_real, :, 1:].transpose(1, 2))
        return torch.cat(frames)


def check_chunk(facts: LatentFacts, chunk: int, max_sequence_length: int) -> None:
    """Raises InvalidValueError (2004) for a chunk of actions that the model cannot read."""
    scale = facts.frame_scale or 1
    if chunk % scale:
        raise InvalidValueError(
            f"pipeline.env.chunk={chunk}: a latent frame of {facts.family} covers {scale} frames, and a frame is an "
            f"action. Use a multiple of {scale}"
        )
    if chunk >= max_sequence_length:
        raise InvalidValueError(
            f"pipeline.env.max_sequence_length={max_sequence_length} leaves no token for the text beside {chunk} "
            "actions. Use a larger one"
        )
