"""GR00T N1.5 as a flow policy over chunks of actions. NVIDIA 2025 (arXiv:2503.14734 describes N1), by published names.

    images, instruction --SigLIP, Qwen3--> tokens --LayerNorm, self-attention--> the context
    state, future tokens, x --DiT, whose norms read sigma--> the velocity

Blocks of the DiT take turns: an even one attends to the context, an odd one to the state, the future tokens and the
points of the chain. The context depends on no point, so it is computed once for each decision. Linear layers of states
and actions have weights of their own for each kind of robot.

The publisher's time t runs from noise at 0 to actions at 1, and its velocity is d x / d t. Here sigma = 1 - t.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, relu, scaled_dot_product_attention, silu

from unirl.models.policies.flow import Features
from unirl.models.policies.networks import HIDDEN, Outputs, resized
from unirl.models.policies.vla import ChunkChain, TrainedPart
from unirl.types.environments import INSTRUCTION, Observations

if TYPE_CHECKING:
    from transformers import Qwen3Config, SiglipVisionConfig

TIME_CHANNELS = 256
"""Channels of the encoding of a time in the DiT."""
TIME_ROUNDING = 1e-3
"""Added to a time in buckets before its fraction is cut off, since 1 - sigma is not exact."""


class CategoryLinear(nn.Module):
    """A linear layer with weights of its own for each kind of robot."""

    def __init__(self, categories: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.empty(categories, inputs, outputs))
        self.b = nn.Parameter(torch.empty(categories, outputs))

    def forward(self, x: Tensor, category: int) -> Tensor:
        return x.to(self.W.dtype) @ self.W[category] + self.b[category]


class CategoryMLP(nn.Module):
    """Two such layers."""

    def __init__(self, categories: int, inputs: int, width: int, outputs: int) -> None:
        super().__init__()
        self.layer1 = CategoryLinear(categories, inputs, width)
        self.layer2 = CategoryLinear(categories, width, outputs)

    def forward(self, x: Tensor, category: int) -> Tensor:
        result: Tensor = self.layer2(relu(self.layer1(x, category)), category)
        return result


class ActionEncoder(nn.Module):
    """Points of a chain and their time as tokens."""

    def __init__(self, categories: int, inputs: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.W1 = CategoryLinear(categories, inputs, width)
        self.W2 = CategoryLinear(categories, 2 * width, width)
        self.W3 = CategoryLinear(categories, width, width)

    def forward(self, points: Tensor, time: Tensor, category: int) -> Tensor:
        """[N, H, W] for points [N, H, D] at times [N], in buckets."""
        embedded = self.W1(points, category)
        half = self.width // 2
        angles = time[:, None] * torch.exp(-math.log(10_000) / half * torch.arange(half, device=time.device))
        waves = torch.cat([angles.sin(), angles.cos()], dim=1)[:, None].expand_as(embedded)
        inner = silu(self.W2(torch.cat([embedded, waves.to(embedded.dtype)], dim=2), category))
        result: Tensor = self.W3(inner, category)
        return result


class HeadAttention(nn.Module):
    """Multi-head attention to x itself, or to a context, by the names of diffusers."""

    def __init__(self, width: int, heads: int, source: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k, self.to_v = nn.Linear(width, width), nn.Linear(source, width), nn.Linear(source, width)
        self.to_out = nn.ModuleList([nn.Linear(width, width)])

    def forward(self, x: Tensor, source: Tensor, seen: Tensor | None) -> Tensor:
        """[N, T, W].

        Args:
            source: [N, P, S] what x attends to.
            seen: bool [N, P], False at its empty places.
        """
        q, k, v = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2)
            for part in (self.to_q(x), self.to_k(source), self.to_v(source))
        )
        mask = None if seen is None else seen[:, None, None, :]
        attended = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        result: Tensor = self.to_out[0](attended.transpose(1, 2).flatten(2))
        return result


class GELULayer(nn.Module):
    """A linear layer and GELU."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, inner)

    def forward(self, x: Tensor) -> Tensor:
        return gelu(self.proj(x), approximate="tanh")


class FeedForward(nn.Module):
    """GELU between two layers. The place between them is that of the publisher's dropout, which never runs here."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.ModuleList([GELULayer(width, 4 * width), nn.Identity(), nn.Linear(4 * width, width)])

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.net[2](self.net[0](x))
        return result


class AdaLayerNorm(nn.Module):
    """LayerNorm whose scale and shift are linear functions of a time embedding."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 2 * width)
        self.norm = nn.LayerNorm(width, elementwise_affine=False)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        scale, shift = self.linear(silu(condition))[:, None].chunk(2, dim=2)
        return self.norm(x) * (1 + scale) + shift


class DiTBlock(nn.Module):
    """A block of the DiT, which attends to the context or to its own tokens."""

    def __init__(self, width: int, heads: int, source: int) -> None:
        super().__init__()
        self.norm1 = AdaLayerNorm(width)
        self.attn1 = HeadAttention(width, heads, source)
        self.norm3 = nn.LayerNorm(width, elementwise_affine=False)
        self.ff = FeedForward(width)

    def forward(self, x: Tensor, condition: Tensor, source: Tensor | None, seen: Tensor | None) -> Tensor:
        normed = self.norm1(x, condition)
        x = x + self.attn1(normed, normed if source is None else source, seen)
        result: Tensor = x + self.ff(self.norm3(x))
        return result


class ContextBlock(nn.Module):
    """A block of self-attention over the tokens of images and text."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm3 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn1, self.ff = HeadAttention(width, heads, width), FeedForward(width)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        normed = self.norm1(x)
        x = x + self.attn1(normed, normed, seen)
        result: Tensor = x + self.ff(self.norm3(x))
        return result


class BucketEmbedding(nn.Module):
    """A time in buckets as a vector, through waves and two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.timestep_embedder = nn.ModuleDict({
            "linear_1": nn.Linear(TIME_CHANNELS, width), "linear_2": nn.Linear(width, width),
        })  # fmt: skip

    def forward(self, time: Tensor) -> Tensor:
        """[N, W] for times [N]."""
        half = TIME_CHANNELS // 2
        layers: Any = self.timestep_embedder
        rates = torch.exp(-math.log(10_000) / (half - 1) * torch.arange(half, device=time.device))
        angles = time[:, None] * rates
        waves = torch.cat([angles.cos(), angles.sin()], dim=1).to(layers["linear_1"].weight.dtype)
        result: Tensor = layers["linear_2"](silu(layers["linear_1"](waves)))
        return result


class DiT(nn.Module):
    """The denoising transformer."""

    def __init__(self, *, width: int, heads: int, layers: int, source: int, outputs: int) -> None:
        super().__init__()
        self.timestep_encoder = BucketEmbedding(width)
        self.transformer_blocks = nn.ModuleList(
            DiTBlock(width, heads, width if number % 2 else source) for number in range(layers)
        )
        self.norm_out = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.proj_out_1, self.proj_out_2 = nn.Linear(width, 2 * width), nn.Linear(width, outputs)

    def forward(self, x: Tensor, context: Tensor, seen: Tensor, time: Tensor) -> Tensor:
        """[N, T, outputs] for tokens [N, T, W], a context [N, P, S] with real tokens `seen` [N, P], and times [N]."""
        condition = self.timestep_encoder(time)
        for number, block in enumerate(self.transformer_blocks):
            x = block(x, condition, None, None) if number % 2 else block(x, condition, context, seen)
        shift, scale = self.proj_out_1(silu(condition))[:, None].chunk(2, dim=2)
        result: Tensor = self.proj_out_2(self.norm_out(x) * (1 + scale) + shift)
        return result


class ContextEncoder(nn.Module):
    """The blocks of self-attention over images and text."""

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.transformer_blocks = nn.ModuleList(ContextBlock(width, heads) for _ in range(layers))

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        for block in self.transformer_blocks:
            x = block(x, seen)
        return x


class ActionHead(nn.Module):
    """Everything after the backbone."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        dit, around = config["diffusion_model_cfg"], config["vl_self_attention_cfg"]
        categories, width = config["max_num_embodiments"], config["input_embedding_dim"]
        context, inner = config["backbone_embedding_dim"], config["hidden_size"]
        self.model = DiT(
            width=width,
            heads=dit["num_attention_heads"],
            layers=dit["num_layers"],
            source=context,
            outputs=dit["output_dim"],
        )
        self.state_encoder = CategoryMLP(categories, config["max_state_dim"], inner, width)
        self.action_encoder = ActionEncoder(categories, config["action_dim"], width)
        self.action_decoder = CategoryMLP(categories, inner, inner, config["action_dim"])
        self.future_tokens = nn.Embedding(config["num_target_vision_tokens"], width)
        self.vlln = nn.LayerNorm(context)
        self.vl_self_attention = ContextEncoder(context, around["num_attention_heads"], around["num_layers"])
        self.position_embedding = nn.Embedding(config["max_seq_len"], width)


class GR00TPolicy(ChunkChain):
    """GR00T N1.5. Its features are the context, its real tokens, the token of the state, and what values read."""

    def __init__(
        self,
        vision: SiglipVisionConfig,
        text: Qwen3Config,
        head: Mapping[str, Any],
        *,
        openings: Sequence[Tensor],
        category: int,
        **settings: Any,
    ) -> None:
        """
        Args:
            head: the configuration of the action head.
            openings: the tokens before each image.
            category: the number of the kind of robot.
            settings: further ones of `ChunkChain`.
        """
        from transformers import Qwen3Model, SiglipVisionModel

        sizes = {
            "horizon": head["action_horizon"], "width": head["action_dim"], "state_width": head["max_state_dim"],
        }  # fmt: skip
        super().__init__(**sizes, **settings)
        self.image_size, self.category = vision.image_size, category
        self.buckets = head["num_timestep_buckets"]
        for number, tokens in enumerate(openings):
            self.register_buffer(f"opening{number}", tokens, persistent=False)
        self.backbone = nn.ModuleDict({
            "eagle_model": nn.ModuleDict({
                "vision_model": nn.ModuleDict({"vision_model": SiglipVisionModel(vision)}),
                "mlp1": nn.Sequential(nn.Linear(vision.hidden_size, text.hidden_size)),
                "language_model": nn.ModuleDict({"model": Qwen3Model(text)}),
            }),
        })  # fmt: skip
        self.action_head = ActionHead(head)

    def freeze(self, train: TrainedPart) -> None:
        """Leave what is trained with a gradient: the action head, or the vision-language model, too."""
        self.backbone.requires_grad_(train == "all")

    @property
    def hidden_size(self) -> int:
        """W of the states."""
        head = self.action_head
        return head.vlln.normalized_shape[0] + head.future_tokens.embedding_dim

    def parameters_of(self, observations: Observations) -> Features:
        """Context [N, P, W], bool [N, P] of real tokens, token of the state [N, 1, D], and numbers [N, W + D]."""
        context, seen = self._context(observations)
        state = self.action_head.state_encoder(self.padded_state(observations)[:, None], self.category)
        weights = seen[..., None].float()
        mean = (context.float() * weights).sum(1) / weights.sum(1)
        return context, seen, state, torch.cat([mean, state[:, 0].float()], dim=1)

    def states(self, parameters: Features) -> Outputs:
        """`HIDDEN` [N, W + D]: the mean of the context and the token of the state, which depend on no action."""
        return {HIDDEN: parameters[3]}

    def velocity(self, features: Features, x: Tensor, sigma: Tensor) -> Tensor:
        context, seen, state, _ = features
        head, count = self.action_head, len(x)
        time = ((1 - sigma.float()) * self.buckets + TIME_ROUNDING).floor()
        points = head.action_encoder(x.unflatten(1, (self.horizon, self.width)), time, self.category)
        points = points + head.position_embedding.weight[: self.horizon]
        future = head.future_tokens.weight.expand(count, -1, -1)
        tokens = torch.cat([part.to(state.dtype) for part in (state, future, points)], dim=1)
        output = head.action_decoder(head.model(tokens, context, seen, time), self.category)
        return -output[:, -self.horizon :].float().flatten(1)

    def prepared(self, images: Tensor) -> Tensor:
        """[N, 3, side, side] in [-1, 1] from levels [N, 3, H, H] from 0 to 255."""
        return resized(images, self.image_size) / 127.5 - 1

    def _context(self, observations: Observations) -> tuple[Tensor, Tensor]:
        """The context [N, P, W] and bool [N, P] of its real tokens.

        The text after the images is the instruction with its ends, and has empty places behind it.
        """
        eagle: Any = self.backbone["eagle_model"]
        tower, model = eagle["vision_model"]["vision_model"], eagle["language_model"]["model"]
        after = observations[INSTRUCTION]
        dtype = model.embed_tokens.weight.dtype
        parts = []
        for number, key in enumerate(self.cameras):
            opening = self.get_buffer(f"opening{number}").expand(len(after), -1)
            pixels = self.prepared(observations[key]).to(dtype)
            parts += [model.embed_tokens(opening), eagle["mlp1"](tower(pixel_values=pixels).last_hidden_state)]
        parts.append(model.embed_tokens(after.clamp(min=0)))
        inputs = torch.cat([part.to(dtype) for part in parts], dim=1)
        seen = torch.ones(inputs.shape[:2], dtype=torch.bool, device=inputs.device)
        seen[:, -after.shape[1] :] = after >= 0
        places = torch.arange(inputs.shape[1], device=inputs.device)
        allowed = seen[:, None, None, :] & (places <= places[:, None])
        output = model(
            inputs_embeds=inputs,
            # An empty place looks at itself, since a softmax over nothing is not a number.
            attention_mask=allowed | (places == places[:, None]),
            position_ids=(seen.cumsum(1) - 1).clamp(min=0),
            use_cache=False,
        ).last_hidden_state
        return self.action_head.vl_self_attention(self.action_head.vlln(output), seen), seen
