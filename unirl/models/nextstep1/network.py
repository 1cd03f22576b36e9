"""The network of NextStep-1: a Qwen2 decoder, two projectors, and a flow-matching head.

    text tokens ------embed_tokens--------+
                                          +--> layers, norm --> image_out_projector --> hidden state of the next token
    finished tokens --image_in_projector--+

    noised token, time, hidden state --image_head--> velocity from noise to data

NextStep Team 2025 (arXiv:2508.10711). Parameters have the published names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from unirl.models.denoising.continuous_tokens import ImageTokenInputs, Reading
from unirl.models.language.attention import ATTENTION, register_attention

if TYPE_CHECKING:
    from transformers import Qwen2Model

NUM_FREQUENCIES = 128
LONGEST_PERIOD = 10000.0
NORM_EPS = 1e-6


class TimeEmbedding(nn.Module):
    """Sines of a time in [0, 1], through two layers."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(2 * NUM_FREQUENCIES, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, time: Tensor) -> Tensor:
        """[..., W] from times [...]."""
        exponents = torch.arange(NUM_FREQUENCIES, dtype=torch.float32, device=time.device) / NUM_FREQUENCIES
        angles = time.float()[..., None] * torch.exp(-math.log(LONGEST_PERIOD) * exponents)
        waves = torch.cat([angles.cos(), angles.sin()], dim=-1)
        output: Tensor = self.mlp(waves.to(time.dtype))
        return output


class FlowBlock(nn.Module):
    """A residual block whose shift, scale and gate depend on the condition (adaLN)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.in_ln = nn.LayerNorm(dim, eps=NORM_EPS)
        self.mlp = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 3 * dim))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """[..., W] from x and condition [..., W]."""
        shift, scale, gate = self.adaLN_modulation(condition).chunk(3, dim=-1)
        output: Tensor = x + gate * self.mlp(self.in_ln(x) * (1 + scale) + shift)
        return output


class FinalLayer(nn.Module):
    """The output layer, shifted and scaled by the condition."""

    def __init__(self, dim: int, outputs: int) -> None:
        super().__init__()
        self.norm_final = nn.LayerNorm(dim, eps=NORM_EPS, elementwise_affine=False)
        self.linear = nn.Linear(dim, outputs)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 2 * dim))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """[..., d] from x and condition [..., W]."""
        shift, scale = self.adaLN_modulation(condition).chunk(2, dim=-1)
        output: Tensor = self.linear(self.norm_final(x) * (1 + scale) + shift)
        return output


class FlowHead(nn.Module):
    """The flow-matching head: a residual MLP on single tokens."""

    def __init__(self, token_width: int, hidden_width: int, dim: int, num_blocks: int) -> None:
        super().__init__()
        self.time_embed = TimeEmbedding(dim)
        self.cond_embed = nn.Linear(hidden_width, dim)
        self.input_proj = nn.Linear(token_width, dim)
        self.res_blocks = nn.ModuleList(FlowBlock(dim) for _ in range(num_blocks))
        self.final_layer = FinalLayer(dim, token_width)

    def forward(self, x: Tensor, time: Tensor, hidden: Tensor) -> Tensor:
        """Velocities [B, S, L, d] from noise to data at x [B, S, L, d], times [B, S] and hidden states [B, L, D]."""
        condition = self.time_embed(time)[:, :, None] + self.cond_embed(hidden)[:, None]
        x = self.input_proj(x)
        for block in self.res_blocks:
            x = block(x, condition)
        output: Tensor = self.final_layer(x, condition)
        return output


class NextStepPolicy(nn.Module):
    """The mixin that `network_class` puts before transformers' Qwen2Model."""

    config: Any  # transformers evaluates this annotation, so it must not name a class that is imported lazily
    embed_tokens: nn.Module

    def __init__(self, config: Any) -> None:
        register_attention()
        super().__init__(config)
        config._attn_implementation = ATTENTION
        width, token_width = config.hidden_size, config.latent_channels * config.latent_patch_size**2
        self.lm_head = nn.Linear(width, config.vocab_size, bias=False)
        self.image_in_projector = nn.Linear(token_width, width)
        self.image_out_projector = nn.Linear(width, width)
        head = FlowHead(token_width, width, config.fm_head_dim, config.fm_head_layers)
        self.image_head = nn.ModuleDict({"net": head})
        if config.use_gen_pos_embed:
            self.register_buffer("gen_pos_embed", grid_embedding(width, grid_side(config)), persistent=False)

    def forward(self, inputs: ImageTokenInputs) -> dict[str, Tensor]:
        """See `ImageTokenInputs`."""
        hidden = inputs.hidden if inputs.reading is None else self.read(inputs.reading)
        assert hidden is not None, "one of reading and hidden is given"
        if inputs.flow is None:
            return {"hidden": hidden}
        x, sigma = inputs.flow.x, inputs.flow.sigma
        # The network's time is 0 at noise and 1 at data, and its velocity points from noise to data.
        v = self.image_head["net"](x.to(hidden.dtype), (1.0 - sigma).to(hidden.dtype), hidden)
        return {"velocity": -v.float()}

    def read(self, reading: Reading) -> Tensor:
        """The hidden states [B, L, D] from which image tokens are denoised."""
        text = self.embed_tokens(reading.text)
        image = self.image_in_projector(reading.image.to(text.dtype))
        embeds = torch.cat([text, image.to(text.dtype)]).index_select(0, reading.order)
        states = (
            super()
            .forward(
                inputs_embeds=embeds[None],
                position_ids=reading.positions[None],
                use_cache=False,
                attention_fn=reading.attention_fn,
            )
            .last_hidden_state[0]
        )
        hidden = states.index_select(0, reading.outputs.flatten()).unflatten(0, reading.outputs.shape)
        if self.config.use_gen_pos_embed:
            hidden = hidden + self.positions_of(reading).to(hidden.dtype)
        output: Tensor = self.image_out_projector(hidden)
        return output

    def positions_of(self, reading: Reading) -> Tensor:
        """The position embeddings [L, D] of the image tokens that are to be denoised."""
        last = reading.first + reading.outputs.shape[1]
        tokens = torch.arange(reading.first, last, device=reading.outputs.device)
        cells = tokens // reading.columns * grid_side(self.config) + tokens % reading.columns
        table = self.get_buffer("gen_pos_embed")
        return table.index_select(0, cells)


@cache
def network_class() -> type[Qwen2Model]:
    """The class of the trained network: Qwen2Model of transformers with the projectors and the head of NextStep-1."""
    from transformers import Qwen2Model

    # transformers reads the source of the class's module to see that its attention can be replaced.
    return type("NextStep", (NextStepPolicy, Qwen2Model), {"__module__": Qwen2Model.__module__})


def grid_side(config: Any) -> int:
    """The number of image tokens along a side for which there are position embeddings."""
    return int(config.base_image_grid_size)


def grid_embedding(width: int, side: int) -> Tensor:
    """[side^2, D] fp32 sines and cosines of the column, then of the row, of each cell of a square grid."""
    columns = torch.arange(side, dtype=torch.float64).expand(side, side)
    frequencies = 1.0 / LONGEST_PERIOD ** (torch.arange(width // 4, dtype=torch.float64) / (width / 4.0))
    angles = [axis.flatten()[:, None] * frequencies for axis in (columns, columns.T)]
    return torch.cat([wave for angle in angles for wave in (angle.sin(), angle.cos())], dim=1).float()


def defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """A published configuration with the values that its file may leave out."""
    return {"use_gen_pos_embed": False, "base_image_grid_size": 32, **config}
