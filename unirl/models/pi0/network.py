"""pi0 as a flow policy over chunks of actions. Black et al. 2024 (arXiv:2410.24164), in the classes of transformers.

    images, instruction --PaliGemma--> keys and values of every layer, the prefix
    state of the robot  --expert-----> its keys and values beside those of the prefix
    x, sigma            --expert-----> the velocity, which attends to all of these

Neither the prefix nor the state attends to x, so both are computed once for each decision. An instruction has a fixed
number of places and stands at their start; empty places are masked and have no position, so that a row does not depend
on how long the instructions of other rows are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unirl.models.policies.flow import Features
from unirl.models.policies.networks import HIDDEN, Outputs, resized
from unirl.models.policies.stored_layers import ReadLayers, WrittenLayers
from unirl.models.policies.vla import ChunkChain, TrainedPart
from unirl.types.environments import INSTRUCTION, Observations

if TYPE_CHECKING:
    from transformers import PI0ForConditionalGeneration

NUM_BINS, NUMBER_TOKENS = 256, 4
"""Bins of a number of the state of pi0.5 in [-1, 1], and the most tokens that the name of one has."""


class Pi0Policy(ChunkChain):
    """pi0: the expert reads the state of the robot as one more token, before the points of a chain."""

    def __init__(self, network: PI0ForConditionalGeneration, **settings: Any) -> None:
        """
        Args:
            settings: further ones of `ChunkChain`.
        """
        config = network.config
        sizes = {"horizon": config.chunk_size, "width": config.max_action_dim, "state_width": config.max_state_dim}
        super().__init__(**sizes, **settings)
        self.image_size = config.vlm_config.vision_config.image_size
        self.pi0 = network

    def freeze(self, train: TrainedPart) -> None:
        """Leave what is trained with a gradient: the expert with its projections, or PaliGemma, too.

        The embeddings of the expert's vocabulary never run, as in the published checkpoint.
        """
        model = self.pi0.model
        model.vlm.requires_grad_(train == "all")
        model.dit.embed_tokens.requires_grad_(False)

    @property
    def hidden_size(self) -> int:
        """W of the states."""
        size: int = self.pi0.config.dit_config.hidden_size
        return size

    # The parts of the network

    def parameters_of(self, observations: Observations) -> Features:
        """Keys and values [N, 2 L, heads, P, d], bool [N, P] of real tokens, state [N, S], its output [N, W]."""
        prefix, seen, _ = self._prefix(observations, observations[INSTRUCTION])
        state = self.padded_state(observations)
        seen = torch.cat([seen, seen.new_ones(len(seen), 1)], dim=1)
        layers = ReadLayers(prefix)
        projected = self.pi0.embed_action_time.state_proj(state)[:, None]
        output = self._run(self.pi0.model.dit, projected, seen, layers)
        return torch.cat([prefix, layers.stacked(output)], dim=3), seen, state, output[:, 0].float()

    def states(self, parameters: Features) -> Outputs:
        """`HIDDEN` [N, W]: the output of the expert at the state of the robot, which depends on no action."""
        return {HIDDEN: parameters[3]}

    def velocity(self, features: Features, x: Tensor, sigma: Tensor) -> Tensor:
        stored, seen, state, _ = features
        points = x.unflatten(1, (self.horizon, self.width))
        inputs = self.pi0.embed_action_time(state, points, sigma)[:, 1:]
        seen = torch.cat([seen, seen.new_ones(len(seen), self.horizon)], dim=1)
        output = self._run(self.pi0.model.dit, inputs, seen, ReadLayers(stored))
        return self.pi0.action_out_proj(output).float().flatten(1)

    def prepared(self, images: Tensor) -> Tensor:
        """[N, 3, side, side] in [-1, 1] from levels [N, 3, H, H] from 0 to 255."""
        return resized(images, self.image_size) / 127.5 - 1

    def _prefix(self, observations: Observations, words: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values [N, 2 L, heads, P, d] of images and text, bool [N, P] of real tokens, outputs [N, P, W].

        Args:
            words: tokens [N, T], below 0 where there is none.
        """
        vlm = self.pi0.model.vlm
        text = vlm.get_input_embeddings()(words.clamp(min=0))
        shown = [vlm.get_image_features(self.prepared(observations[key])).pooler_output for key in self.cameras]
        inputs = torch.cat([*(part.to(text.dtype) for part in shown), text], dim=1)
        seen = torch.ones(inputs.shape[:2], dtype=torch.bool, device=inputs.device)
        seen[:, inputs.shape[1] - words.shape[1] :] = words >= 0
        layers = WrittenLayers()
        output = self._run(vlm.language_model, inputs, seen, layers)
        return layers.stacked(output), seen, output

    def _run(self, decoder: Any, inputs: Tensor, seen: Tensor, layers: WrittenLayers, **condition: Tensor) -> Tensor:
        """Outputs [N, Q, W] of a decoder for the last Q tokens, which attend to all real ones of `seen` [N, T]."""
        count = inputs.shape[1]
        output: Tensor = decoder(
            inputs_embeds=inputs,
            attention_mask=seen[:, None, None, :].expand(-1, 1, count, -1),
            position_ids=(seen.cumsum(1) - 1).clamp(min=0)[:, -count:],
            cache=layers,
            use_cache=True,
            **condition,
        ).last_hidden_state
        return output


class Pi05Policy(Pi0Policy):
    """pi0.5: the state is part of the text, and the norms of the expert depend on the noise level.

        images, "Task: <task>, State:" " <number>" ... ";\nAction: " --PaliGemma--> keys and values of every layer
        x --expert, whose norms read sigma--> the velocity, which attends to all of these

    Each number of the state is the name of its bin among 256 from -1 to 1. The instruction comes with its own empty
    places, and the tokens of numbers are looked up here, so that what is recorded are the numbers.
    """

    def __init__(
        self, network: PI0ForConditionalGeneration, *, numbers: Tensor, closing: Tensor, padded: bool, **settings: Any
    ) -> None:
        """
        Args:
            numbers: [257, T] the tokens of " -1", " 0", ..., " 255", below 0 where there is none.
            closing: [L] the tokens after the state.
            padded: the text has zeros up to the largest state of the model, as that of lerobot.
            settings: those of `Pi0Policy`.
        """
        super().__init__(network, **settings)
        self.register_buffer("numbers", numbers, persistent=False)
        self.register_buffer("closing", closing, persistent=False)
        self.padded = padded

    @property
    def hidden_size(self) -> int:
        size: int = self.pi0.config.vlm_config.text_config.hidden_size
        return size

    def parameters_of(self, observations: Observations) -> Features:
        """Keys and values [N, 2 L, heads, P, d], bool [N, P] of real tokens, mean output [N, W] of these."""
        prefix, seen, output = self._prefix(observations, self.words(observations))
        weights = seen[..., None].float()
        return prefix, seen, (output.float() * weights).sum(1) / weights.sum(1)

    def words(self, observations: Observations) -> Tensor:
        """[N, T] the tokens of the whole text, below 0 where there is none."""
        state = self.padded_state(observations) if self.padded else self.scaled_state(observations)
        numbers = self.get_buffer("numbers")
        bounds = torch.arange(NUM_BINS, device=state.device) / (NUM_BINS / 2) - 1
        names = numbers[torch.bucketize(state, bounds, right=True)].flatten(1)
        closing = self.get_buffer("closing").expand(len(names), -1)
        return torch.cat([observations[INSTRUCTION], names, closing], dim=1)

    def states(self, parameters: Features) -> Outputs:
        """`HIDDEN` [N, W]: the mean output of PaliGemma, which depends on no action. pi-RL does so for pi0.5."""
        return {HIDDEN: parameters[2]}

    def velocity(self, features: Features, x: Tensor, sigma: Tensor) -> Tensor:
        stored, seen, _ = features
        inputs = self.pi0.embed_action_time.action_in_proj(x.unflatten(1, (self.horizon, self.width)))
        seen = torch.cat([seen, seen.new_ones(len(seen), self.horizon)], dim=1)
        condition = self.pi0.condition(sigma)
        output = self._run(self.pi0.model.dit, inputs, seen, ReadLayers(stored), condition=condition)
        return self.pi0.action_out_proj(output).float().flatten(1)
