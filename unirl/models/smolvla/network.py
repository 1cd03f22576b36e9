"""SmolVLA as a flow policy over chunks of actions. Shukor et al. 2025 (arXiv:2506.01844), with the names of lerobot.

    images, instruction, state --SmolVLM, its first L layers--> keys and values of every layer, the prefix
    x, sigma --expert--> the velocity

The state is one token at the end of the prefix, to which images and instruction do not attend. Layers of the expert
take turns: an even one attends to the prefix and, causally, to the points of the chain; an odd one to the prefix alone,
through projections of its keys and values. The prefix depends on no point, so it is computed once for each decision.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, scaled_dot_product_attention, silu

from unirl.models.policies.flow import Features
from unirl.models.policies.networks import HIDDEN, Outputs
from unirl.models.policies.stored_layers import WrittenLayers
from unirl.models.policies.vla import ChunkChain, TrainedPart
from unirl.types.environments import INSTRUCTION, Observations

if TYPE_CHECKING:
    from transformers import LlamaConfig, SmolVLMConfig

THETA = 10_000.0
"""Base of the rotary embedding in all layers, whatever the configuration of SmolVLM says, as in lerobot."""
SELF_EVERY = 2
"""Each layer of the expert with such a number attends to the points of the chain, too."""


class ExpertAttention(nn.Module):
    """The projections of a layer of the expert. Those of `is_cross` layers read keys and values of the prefix."""

    def __init__(self, config: LlamaConfig, prefix: int, is_cross: bool) -> None:
        super().__init__()
        self.head_dim, self.is_cross = config.head_dim, is_cross
        heads, pairs = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        source = prefix if is_cross else config.hidden_size
        self.q_proj = nn.Linear(config.hidden_size, heads, bias=False)
        self.k_proj = nn.Linear(source, pairs, bias=False)
        self.v_proj = nn.Linear(source, pairs, bias=False)
        self.o_proj = nn.Linear(heads, config.hidden_size, bias=False)

    def forward(self, x: Tensor, stored: tuple[Tensor, Tensor], seen: Tensor, start: Tensor) -> Tensor:
        """[N, H, W] for normed points of this shape.

        Args:
            stored: keys and values [N, heads, P, d] of the prefix.
            seen: bool [N, P] of real tokens of the prefix.
            start: [N] the position of the first point.
        """
        count = x.shape[1]
        queries = self._heads(self.q_proj(x))
        places = torch.arange(count, device=x.device).expand(len(x), -1)
        allowed = seen[:, None, None, :].expand(-1, 1, count, -1)
        if self.is_cross:
            keys, values = (
                self._heads(projection(part.transpose(1, 2).flatten(2)))
                for projection, part in zip((self.k_proj, self.v_proj), stored, strict=True)
            )
        else:
            places = places + start[:, None]
            keys = torch.cat([stored[0], rotated(self._heads(self.k_proj(x)), places)], dim=2)
            values = torch.cat([stored[1], self._heads(self.v_proj(x))], dim=2)
            causal = torch.ones(count, count, dtype=torch.bool, device=x.device).tril().expand(len(x), 1, -1, -1)
            allowed = torch.cat([allowed, causal], dim=3)
        keys, values = keys.to(queries.dtype), values.to(queries.dtype)
        found = scaled_dot_product_attention(rotated(queries, places), keys, values, attn_mask=allowed, enable_gqa=True)
        result: Tensor = self.o_proj(found.transpose(1, 2).flatten(2))
        return result

    def _heads(self, x: Tensor) -> Tensor:
        """[N, heads, T, d] of [N, T, heads d]."""
        return x.unflatten(2, (-1, self.head_dim)).transpose(1, 2)


class SmolVLAExpertLayer(nn.Module):
    """A block of Llama with such an attention."""

    def __init__(self, config: LlamaConfig, prefix: int, is_cross: bool) -> None:
        from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

        super().__init__()
        self.self_attn = ExpertAttention(config, prefix, is_cross)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, seen: Tensor, start: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), (keys, values), seen, start)
        result: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return result


class SmolVLAExpert(nn.Module):
    """The layers of the expert and their last norm."""

    def __init__(self, config: LlamaConfig, prefix: int) -> None:
        from transformers.models.llama.modeling_llama import LlamaRMSNorm

        super().__init__()
        self.layers = nn.ModuleList(
            SmolVLAExpertLayer(config, prefix, number % SELF_EVERY != 0) for number in range(config.num_hidden_layers)
        )
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, x: Tensor, stored: Tensor, seen: Tensor) -> Tensor:
        """[N, H, W] for points of this shape, beside keys and values [N, 2 L, heads, P, d] of the prefix."""
        start = seen.sum(1)
        for number, layer in enumerate(self.layers):
            x = layer(x, stored[:, 2 * number], stored[:, 2 * number + 1], seen, start)
        result: Tensor = self.norm(x)
        return result


class SmolVLANetwork(nn.Module):
    """All modules, by the names of the published weights after `model`."""

    def __init__(self, vlm: SmolVLMConfig, expert: LlamaConfig, state_width: int, action_width: int) -> None:
        from transformers import SmolVLMModel

        super().__init__()
        text, width = vlm.text_config, expert.hidden_size
        self.vlm_with_expert = nn.ModuleDict({
            "vlm": nn.ModuleDict({"model": SmolVLMModel(vlm)}),
            "lm_expert": SmolVLAExpert(expert, text.num_key_value_heads * text.head_dim),
        })  # fmt: skip
        self.state_proj = nn.Linear(state_width, text.hidden_size)
        self.action_in_proj, self.action_out_proj = nn.Linear(action_width, width), nn.Linear(width, action_width)
        self.action_time_mlp_in, self.action_time_mlp_out = nn.Linear(2 * width, width), nn.Linear(width, width)

    @property
    def vlm(self) -> Any:
        """SmolVLM of transformers, without its head."""
        return self.vlm_with_expert["vlm"]["model"]  # type: ignore[index]


class SmolVLAPolicy(ChunkChain):
    """SmolVLA. Its features are keys and values of the prefix, its real tokens, and the output at the state."""

    def __init__(
        self, network: SmolVLANetwork, *, image_size: int, min_period: float, max_period: float, **settings: Any
    ) -> None:
        """
        Args:
            image_size: the side of an image as the network reads it, pixels.
            min_period, max_period: of the waves that encode a noise level.
            settings: further ones of `ChunkChain`.
        """
        super().__init__(**settings)
        self.image_size, self.periods = image_size, (min_period, max_period)
        self.model = network

    def freeze(self, train: TrainedPart) -> None:
        """Leave what is trained with a gradient: the expert with all projections, or SmolVLM, too."""
        vlm = self.model.vlm
        vlm.requires_grad_(train == "all")

    @property
    def hidden_size(self) -> int:
        """W of the states."""
        size: int = self.model.vlm.config.text_config.hidden_size
        return size

    def parameters_of(self, observations: Observations) -> Features:
        """Keys and values [N, 2 L, heads, P, d], bool [N, P] of real tokens, output [N, W] at the state."""
        vlm, words = self.model.vlm, observations[INSTRUCTION]
        text = vlm.text_model.get_input_embeddings()(words.clamp(min=0))
        state = self.model.state_proj(self.padded_state(observations).to(self.model.state_proj.weight.dtype))
        scale = math.sqrt(text.shape[2])
        shown = [self._image(observations[key]) * scale for key in self.cameras]
        parts = [*shown, text * scale, state[:, None]]
        inputs = torch.cat([part.to(text.dtype) for part in parts], dim=1)
        seen = torch.ones(inputs.shape[:2], dtype=torch.bool, device=inputs.device)
        seen[:, -1 - words.shape[1] : -1] = words >= 0
        allowed = seen[:, None, None, :].repeat(1, 1, inputs.shape[1], 1)
        allowed[:, :, :-1, -1] = False
        layers = WrittenLayers()
        output = vlm.text_model(
            inputs_embeds=inputs,
            attention_mask=allowed,
            position_ids=(seen.cumsum(1) - 1).clamp(min=0),
            cache=layers,
            use_cache=True,
        ).last_hidden_state
        return layers.stacked(output), seen, output[:, -1].float()

    def states(self, parameters: Features) -> Outputs:
        """`HIDDEN` [N, W]: the output of SmolVLM at the state, which reads all of the observation and no action."""
        return {HIDDEN: parameters[2]}

    def velocity(self, features: Features, x: Tensor, sigma: Tensor) -> Tensor:
        stored, seen, _ = features
        model = self.model
        points = model.action_in_proj(x.unflatten(1, (self.horizon, self.width)))
        levels = self._waves(sigma, points.shape[2])[:, None].expand_as(points).to(points.dtype)
        inputs = model.action_time_mlp_out(silu(model.action_time_mlp_in(torch.cat([points, levels], dim=2))))
        output = model.vlm_with_expert["lm_expert"](inputs, stored, seen)
        velocity: Tensor = model.action_out_proj(output)
        return velocity.float().flatten(1)

    def prepared(self, images: Tensor) -> Tensor:
        """[N, 3, side, side] in [-1, 1] from levels [N, 3, H, H] from 0 to 255, bilinear as in lerobot."""
        side = (self.image_size, self.image_size)
        levels = images.float()
        if levels.shape[-2:] != side:
            levels = interpolate(levels, side, mode="bilinear", align_corners=False)
        return levels / 127.5 - 1

    def _image(self, images: Tensor) -> Tensor:
        """[N, P, W] the tokens of images."""
        vlm = self.model.vlm
        pixels = self.prepared(images).to(vlm.vision_model.embeddings.patch_embedding.weight.dtype)
        tokens: Tensor = vlm.connector(vlm.vision_model(pixel_values=pixels).last_hidden_state)
        return tokens

    def _waves(self, sigma: Tensor, width: int) -> Tensor:
        """[N, width] sines and cosines of noise levels [N], at periods from the shortest to the longest."""
        first, last = self.periods
        periods = first * (last / first) ** torch.linspace(0, 1, width // 2, device=sigma.device)
        angles = 2 * math.pi * sigma[:, None] / periods
        return torch.cat([angles.sin(), angles.cos()], dim=1)


def rotated(x: Tensor, places: Tensor) -> Tensor:
    """Queries or keys [N, heads, T, d] at positions [N, T], by halves of the head."""
    half = x.shape[-1] // 2
    angles = places[:, None, :, None] / THETA ** (torch.arange(half, device=x.device) / half)
    first, second = x.float().chunk(2, dim=-1)
    turned = [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()]
    return torch.cat(turned, dim=-1).to(x.dtype)
