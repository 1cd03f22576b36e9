"""HunyuanImage-3's network: a mixture of experts that writes text and denoises images (arXiv:2509.23951).

    text    tokens --wte--> layers --ln_f, lm_head--> next token
    image   prompt --wte-->           |
            sigma --timestep_emb-->   | layers, of the latents only --final_layer, time_embed_2--> velocity
            latents --patch_embed,    |
                      time_embed-->   |

Text and images run through the same layers and experts. Parameters have the names of the published checkpoint. Both run
inside the call of the root module, which FSDP2 hooks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from unirl.models.hunyuan_image3.packing import PrefixedImages
from unirl.models.language.attention import AttentionFn
from unirl.models.language.experts import ExpertRows
from unirl.models.language.policy import Outputs, TokenInputs
from unirl.models.unified.layers import Rotations, TimestepEmbedding, rotated, rotations
from unirl.types.conditions import PromptImageInputs

Config = Mapping[str, Any]
ValueT = TypeVar("ValueT")
NORM_GROUPS = 32


def of_layer(value: ValueT | list[ValueT], index: int) -> ValueT:
    """The value of a layer. Configurations hold one for all layers, or a list."""
    return value[index] if isinstance(value, list) else value


def places_of(positions: Tensor, width: int) -> Tensor:
    """[N, width / 2] the place by which each frequency of a head turns, from positions [N] or rows and columns [N, 2].

    The frequencies belong to the row and the column in turns: the first to the row, the second to the column.
    """
    places = positions[:, None].expand(-1, 2) if positions.dim() == 1 else positions
    return places.repeat(1, width // 4)


class RoundedRMSNorm(nn.Module):
    """An RMS norm that is computed in float32 and rounded before the weight multiplies it."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] from [..., D]."""
        wide = x.float()
        return self.weight * (wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()).to(x.dtype)


class NormedAttention(nn.Module):
    """Attention with grouped keys. Queries and keys are rotated, and then normed."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_width, self.num_keys = config["attention_head_dim"], config["num_key_value_heads"]
        self.queries_per_key = config["num_attention_heads"] // self.num_keys
        width, bias = config["hidden_size"], config.get("attention_bias", False)
        num_heads = self.num_keys * (self.queries_per_key + 2)
        self.qkv_proj = nn.Linear(width, num_heads * self.head_width, bias=bias)
        self.o_proj = nn.Linear(config["num_attention_heads"] * self.head_width, width, bias=bias)
        self.query_layernorm = RoundedRMSNorm(self.head_width, config["rms_norm_eps"])
        self.key_layernorm = RoundedRMSNorm(self.head_width, config["rms_norm_eps"])

    def forward(self, x: Tensor, by: Rotations, attention_fn: AttentionFn) -> Tensor:
        """[N, D] from [N, D]."""
        # The layer makes, for each head of keys, the queries that read it, the keys and the values.
        heads = self.qkv_proj(x).unflatten(1, (self.num_keys, self.queries_per_key + 2, self.head_width))
        query, key, value = (t.flatten(1, 2) for t in heads.split([self.queries_per_key, 1, 1], dim=2))
        # The rotations are float32. Attention computes in the dtype of the values.
        query = self.query_layernorm(rotated(query, by)).to(value.dtype)
        key = self.key_layernorm(rotated(key, by)).to(value.dtype)
        attended = attention_fn(self, query, key, value, self.head_width**-0.5)  # type: ignore[arg-type]
        result: Tensor = self.o_proj(attended.flatten(1))
        return result


def gated(states: Tensor) -> Tensor:
    """[N, H] from widened states [N, 2 H], whose second half is the gate."""
    up, gate = states.chunk(2, dim=1)
    return up * silu(gate)


class MLP(nn.Module):
    """A gated feed-forward layer."""

    def __init__(self, width: int, hidden: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_and_up_proj = nn.Linear(width, 2 * hidden, bias=bias)
        self.down_proj = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[N, D] from [N, D]."""
        result: Tensor = self.down_proj(gated(self.gate_and_up_proj(x)))
        return result


class TopKGate(nn.Module):
    """The router: the experts of each token, and their weights."""

    def __init__(self, width: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.wg = nn.Linear(width, num_experts, bias=False)
        self.top_k = top_k

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights [N, k] fp32, which sum to 1, and experts [N, k], of tokens [N, D]."""
        with torch.autocast(x.device.type, enabled=False):
            gates = self.wg(x.to(self.wg.weight.dtype)).float().softmax(1)
        weights, experts = gates.topk(self.top_k, dim=1)
        return weights / weights.sum(1, keepdim=True).clamp(min=torch.finfo(torch.float32).eps), experts


class MoE(nn.Module):
    """A mixture of experts: the feed-forward layers that the router selects, and one that every token runs."""

    def __init__(self, config: Config, index: int) -> None:
        super().__init__()
        width, hidden = config["hidden_size"], of_layer(config["moe_intermediate_size"], index)
        bias, num_experts = config.get("mlp_bias", False), of_layer(config["num_experts"], index)
        self.shared_mlp = MLP(width, hidden * of_layer(config["num_shared_expert"], index), bias)
        self.gate = TopKGate(width, num_experts, of_layer(config["moe_topk"], index))
        self.experts = nn.ModuleList(MLP(width, hidden, bias) for _ in range(num_experts))

    def forward(self, x: Tensor) -> Tensor:
        """[N, D] from [N, D]."""
        # Every expert runs, also on padding alone, so that its gradient is zero on this rank and not absent.
        weights, experts = self.gate(x)
        rows = ExpertRows.of(experts, len(self.experts))
        widen, narrow = zip(*((expert.gate_and_up_proj, expert.down_proj) for expert in self.experts), strict=True)
        outputs = rows.linear(narrow, gated(rows.linear(widen, x.index_select(0, rows.token))))
        by_token = outputs.index_select(0, rows.place.flatten()).unflatten(0, experts.shape)
        mixed = (weights[..., None].to(outputs.dtype) * by_token).sum(1)
        result: Tensor = self.shared_mlp(x) + mixed
        return result


class HunyuanImage3DecoderLayer(nn.Module):
    """A layer: attention, and a mixture of experts. The first layers of a configuration may have no experts."""

    def __init__(self, config: Config, index: int) -> None:
        super().__init__()
        width, eps = config["hidden_size"], config["rms_norm_eps"]
        self.self_attn = NormedAttention(config)
        is_dense = index < config.get("moe_layer_num_skipped", 0)
        dense = MLP(width, config["intermediate_size"], config.get("mlp_bias", False)) if is_dense else None
        self.mlp = MoE(config, index) if dense is None else dense
        self.input_layernorm = RoundedRMSNorm(width, eps)
        self.post_attention_layernorm = RoundedRMSNorm(width, eps)

    def forward(self, x: Tensor, by: Rotations, attention_fn: AttentionFn) -> Tensor:
        """[N, D] from [N, D]."""
        x = x + self.self_attn(self.input_layernorm(x), by, attention_fn)
        result: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return result


class Backbone(nn.Module):
    """The embeddings of tokens, the layers, and the norm before the head."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.rope = (config["attention_head_dim"], float(config["rope_theta"]))
        self.wte = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(HunyuanImage3DecoderLayer(config, i) for i in range(config["num_hidden_layers"]))
        self.ln_f = RoundedRMSNorm(config["hidden_size"], config["rms_norm_eps"])

    def forward(self, x: Tensor, positions: Tensor, attention_fn: AttentionFn) -> Tensor:
        """Hidden states [N, D] after the last layer, without the norm."""
        width, theta = self.rope
        by = rotations(places_of(positions, width), width, theta)
        for layer in self.layers:
            x = layer(x, by, attention_fn)
        return x


class ResBlock(nn.Module):
    """A residual block of convolutions, whose second norm is scaled and shifted by the embedding of the timestep."""

    def __init__(self, inputs: int, outputs: int, embedding: int) -> None:
        super().__init__()
        first, second = (nn.Conv2d(channels, outputs, 3, padding=1) for channels in (inputs, outputs))
        self.in_layers = nn.Sequential(nn.GroupNorm(NORM_GROUPS, inputs), nn.SiLU(), first)
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(embedding, 2 * outputs))
        self.out_layers = nn.Sequential(nn.GroupNorm(NORM_GROUPS, outputs), nn.SiLU(), nn.Dropout(0.0), second)
        self.skip_connection = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        """[B, C', H, W] from x [B, C, H, W] and the embedding [B, D]."""
        scale, shift = self.emb_layers(embedding)[..., None, None].chunk(2, dim=1)
        norm, *rest = self.out_layers
        h = norm(self.in_layers(x)) * (1 + scale) + shift
        for layer in rest:
            h = layer(h)
        result: Tensor = self.skip_connection(x) + h
        return result


class LatentEmbedding(nn.Module):
    """Latents to tokens, one for each latent."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width, hidden = config["hidden_size"], config["patch_embed_hidden_dim"]
        widen = nn.Conv2d(config["latent_channels"], hidden, 3, padding=1)
        self.model = nn.ModuleList([widen, ResBlock(hidden, width, width)])

    def forward(self, latents: Tensor, embedding: Tensor) -> Tensor:
        """[B, H W, D] from latents [B, C, H, W] and the embedding [B, D]."""
        widen, block = self.model
        result: Tensor = block(widen(latents), embedding)
        return result.flatten(2).transpose(1, 2)


class VelocityLayer(nn.Module):
    """Hidden states of the tokens to velocities."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width, hidden = config["hidden_size"], config["patch_embed_hidden_dim"]
        narrow = nn.Conv2d(hidden, config["latent_channels"], 3, padding=1)
        out = nn.Sequential(nn.GroupNorm(NORM_GROUPS, hidden), nn.SiLU(), narrow)
        self.model = nn.ModuleList([ResBlock(width, hidden, width), out])

    def forward(self, states: Tensor, embedding: Tensor, size: torch.Size) -> Tensor:
        """[B, C, H, W] from hidden states [B, H W, D] and the embedding [B, D]; `size` is (H, W)."""
        block, out = self.model
        result: Tensor = out(block(states.transpose(1, 2).unflatten(2, size), embedding))
        return result


class HunyuanImage3Network(nn.Module):
    """Text tokens to outputs of the language model, or prompts and noisy latents to velocities."""

    _keys_to_ignore_on_load_unexpected: ClassVar[tuple[str, ...]] = (
        r"^vae\.",
        r"^vision_model\.",
        r"^vision_aligner\.",
    )
    """Tensors of the checkpoint that belong to the VAE and to the encoder that reads images."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config["hidden_size"]
        self.timestep_emb, self.time_embed, self.time_embed_2 = (TimestepEmbedding(width, nn.GELU) for _ in range(3))
        self.patch_embed = LatentEmbedding(config)
        self.final_layer = VelocityLayer(config)
        self.model = Backbone(config)
        self.lm_head = nn.Linear(width, config["vocab_size"], bias=False)

    @classmethod
    def from_config(cls, config: Config) -> Self:
        """A network with newly initialised weights. Keys that it does not know are ignored."""
        return cls(config)

    def forward(self, inputs: TokenInputs | PrefixedImages) -> Outputs:
        """The outputs that `inputs.output_fn` computes of a text, or the output `velocity` [B, C, H, W] of images."""
        embeds = self.embeds(inputs.tokens, inputs.images)
        if isinstance(inputs, PrefixedImages):
            return {"velocity": self.velocity(embeds, inputs)}
        states = self.model(embeds, inputs.positions, inputs.attention_fn)
        return inputs.output_fn(self.lm_head, self.model.ln_f(states))

    def embeds(self, tokens: Tensor, images: PromptImageInputs | None) -> Tensor:
        """Embeddings [N, D] of tokens [N]. A network without a vision tower reads no images."""
        assert images is None
        embeds: Tensor = self.model.wte(tokens)
        return embeds

    def velocity(self, prefixes: Tensor, inputs: PrefixedImages) -> Tensor:
        """v = eps - x0 [B, C, H, W] at the latents of `inputs`, given the embeddings [N, D] of the prefixes."""
        dtype, times = self.lm_head.weight.dtype, inputs.timesteps
        token = self.timestep_emb(times, dtype).to(prefixes.dtype)
        prefixes = prefixes.index_copy(0, inputs.timestep_index, token)
        images = self.patch_embed(inputs.latents.to(dtype), self.time_embed(times, dtype))  # [B, L, D]
        states = torch.cat([prefixes, images.flatten(0, 1).to(prefixes.dtype)])
        states = self.model(states, inputs.positions, inputs.attention_fn)[len(prefixes) :]
        of_images = states.unflatten(0, images.shape[:2])
        result: Tensor = self.final_layer(of_images, self.time_embed_2(times, dtype), inputs.latents.shape[-2:])
        return result
