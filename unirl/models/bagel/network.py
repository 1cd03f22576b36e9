"""BAGEL's network, a Mixture of Transformers: two Qwen2 experts in one sequence. Deng et al. 2025 (arXiv:2505.14683).

    understanding expert   text, start and end of an image   q_proj, mlp, ...                   --lm_head--> next token
    generation expert      noisy latents of an image         q_proj_moe_gen, mlp_moe_gen, ...   --llm2vae--> velocity

Every token runs through the weights of its expert, and attention joins the tokens of both. Parameters have the names of
the published checkpoint. Text and images both run inside the call of the root module, which FSDP2 hooks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

from unirl.models.bagel.packing import ImageInputs
from unirl.models.denoising.ragged import patches, unpatched
from unirl.models.language.attention import AttentionFn
from unirl.models.language.policy import Outputs, TokenInputs
from unirl.models.unified.layers import Rotations, TimestepEmbedding, rotated, rotations, sinusoid

Config = Mapping[str, Any]
EXPERTS = ("", "_moe_gen")
"""The endings of the names of modules: those of the understanding expert, and those of the generation expert."""
Streams = tuple[Tensor, ...]
"""Hidden states [N, D] of the tokens of each expert. A text without images has only those of the first."""


def position_table(side: int, width: int) -> Tensor:
    """[side^2, width] sine and cosine embeddings of a grid: one half of the width for the column, one for the row."""
    places = torch.arange(side, dtype=torch.float64)
    cosines, sines = sinusoid(places, torch.arange(width // 4, dtype=torch.float64) / (width // 4))
    line = torch.cat([sines, cosines], dim=1)  # [side, width / 2]
    columns, rows = line.repeat(side, 1), line.repeat_interleave(side, dim=0)
    return torch.cat([columns, rows], dim=1).float()


class RMSNorm(nn.RMSNorm):
    """The norm of Qwen2. If the weight is wider than the states, as under autocast, the result is as wide."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] from [..., D]."""
        if x.dtype == self.weight.dtype:
            return super().forward(x)
        return self.weight * rms_norm(x, self.normalized_shape, eps=self.eps)


class PairedModule(nn.Module):
    """A module with two modules of each kind, one for each expert."""

    def add_pair(self, name: str, *modules: nn.Module) -> None:
        """Add the modules of both experts."""
        for expert, module in zip(EXPERTS, modules, strict=True):
            self.add_module(name + expert, module)

    def each(self, name: str, streams: Streams) -> Streams:
        """The outputs of each expert's module `name` for its stream."""
        pairs = zip(EXPERTS, streams, strict=False)  # without latents there is only the first stream
        return tuple(self.get_submodule(name + expert)(stream) for expert, stream in pairs)


class MoTAttention(PairedModule):
    """The attention of a layer. Each expert makes queries, keys and values of its tokens, and reads the result.

    The rotations are those of the tokens of all experts, one expert after the other.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        width, heads = config["hidden_size"], config["num_attention_heads"]
        self.head_width = width // heads
        key_width = config["num_key_value_heads"] * self.head_width
        for name, outputs in (("q_proj", width), ("k_proj", key_width), ("v_proj", key_width)):
            self.add_pair(name, *(nn.Linear(width, outputs) for _ in EXPERTS))
        self.add_pair("o_proj", *(nn.Linear(width, width, bias=False) for _ in EXPERTS))
        for name in ("q_norm", "k_norm"):
            self.add_pair(name, *(RMSNorm(self.head_width, config["rms_norm_eps"]) for _ in EXPERTS))

    def forward(self, streams: Streams, by: Rotations, attention_fn: AttentionFn) -> Streams:
        """The attended states of each stream."""
        query, key = (torch.cat(self.each(f"{name}_norm", self.heads(f"{name}_proj", streams))) for name in "qk")
        value = torch.cat(self.heads("v_proj", streams))
        # The rotations are float32. Attention computes in the dtype of the values.
        query, key = (rotated(states, by).to(value.dtype) for states in (query, key))
        attended = attention_fn(self, query, key, value, self.head_width**-0.5).flatten(1)  # type: ignore[arg-type]
        return self.each("o_proj", attended.split([len(stream) for stream in streams]))

    def heads(self, name: str, streams: Streams) -> Streams:
        """[N, H, d] of each stream."""
        return tuple(states.unflatten(1, (-1, self.head_width)) for states in self.each(name, streams))


class GatedMLP(nn.Module):
    """The feed-forward layer of Qwen2."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[N, D] from [N, D]."""
        result: Tensor = self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
        return result


class Qwen2MoTDecoderLayer(PairedModule):
    """A layer: attention among all tokens, and a feed-forward layer of each expert."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width, eps = config["hidden_size"], config["rms_norm_eps"]
        self.self_attn = MoTAttention(config)
        self.add_pair("mlp", *(GatedMLP(width, config["intermediate_size"]) for _ in EXPERTS))
        for name in ("input_layernorm", "post_attention_layernorm"):
            self.add_pair(name, *(RMSNorm(width, eps) for _ in EXPERTS))

    def forward(self, streams: Streams, by: Rotations, attention_fn: AttentionFn) -> Streams:
        """The streams after this layer."""
        attended = self.self_attn(self.each("input_layernorm", streams), by, attention_fn)
        streams = tuple(x + y for x, y in zip(streams, attended, strict=True))
        widened = self.each("mlp", self.each("post_attention_layernorm", streams))
        return tuple(x + y for x, y in zip(streams, widened, strict=True))


class MoTModel(PairedModule):
    """Embeddings of tokens, layers, and the norms at their end."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config["hidden_size"]
        self.rope = (width // config["num_attention_heads"], float(config["rope_theta"]))
        self.embed_tokens = nn.Embedding(config["vocab_size"], width)
        self.layers = nn.ModuleList(Qwen2MoTDecoderLayer(config) for _ in range(config["num_hidden_layers"]))
        self.add_pair("norm", *(RMSNorm(width, config["rms_norm_eps"]) for _ in EXPERTS))

    def forward(self, streams: Streams, positions: Tensor, attention_fn: AttentionFn) -> Streams:
        """The normed hidden states of streams, at positions [N] of the tokens of all streams."""
        by = rotations(positions[:, None], *self.rope)
        for layer in self.layers:
            streams = layer(streams, by, attention_fn)
        return self.each("norm", streams)


class LanguageModel(nn.Module):
    """The transformer and the head of its understanding expert."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.model = MoTModel(config)
        self.lm_head = nn.Linear(config["hidden_size"], config["vocab_size"], bias=False)


class PositionEmbedding(nn.Module):
    """A fixed table of the places of latent tokens."""

    def __init__(self, side: int, width: int) -> None:
        super().__init__()
        self.side = side
        self.pos_embed = nn.Parameter(position_table(side, width), requires_grad=False)

    def forward(self, rows: int, columns: int) -> Tensor:
        """[rows * columns, D] of the places in the upper left corner of the grid."""
        return self.pos_embed.unflatten(0, (self.side, self.side))[:rows, :columns].flatten(0, 1)


class BagelNetwork(nn.Module):
    """Text tokens to outputs of the language model, or prompts and noisy latents to velocities."""

    _keys_to_ignore_on_load_unexpected: ClassVar = (r"^vit_model\.", r"^connector\.", r"^vit_pos_embed\.")
    """Tensors of the checkpoint for understanding images, which neither text nor the generation of images uses."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width, self.patch_size = config["hidden_size"], config["latent_patch_size"]
        token_width = config["latent_channels"] * self.patch_size**2
        self.language_model = LanguageModel(config)
        self.time_embedder = TimestepEmbedding(width, nn.SiLU)
        self.vae2llm = nn.Linear(token_width, width)
        self.llm2vae = nn.Linear(width, token_width)
        self.latent_pos_embed = PositionEmbedding(config["max_latent_size"], width)

    @classmethod
    def from_config(cls, config: Config) -> Self:
        """A network with newly initialised weights. Keys that it does not know are ignored."""
        return cls(config)

    def forward(self, inputs: TokenInputs | ImageInputs) -> Outputs:
        """The outputs that `inputs.output_fn` computes of a text, or the output `velocity` [B, C, H, W] of images."""
        text = self.language_model.model.embed_tokens(inputs.tokens)
        if isinstance(inputs, ImageInputs):
            return {"velocity": self.velocity(text, inputs)}
        [states] = self.language_model.model((text,), inputs.positions, inputs.attention_fn)
        return inputs.output_fn(self.language_model.lm_head, states)

    def velocity(self, text: Tensor, inputs: ImageInputs) -> Tensor:
        """v = eps - x0 [B, C, H, W] at the latents of `inputs`, given the embeddings `text` [N, D] of its tokens."""
        dtype, size = self.vae2llm.weight.dtype, self.patch_size
        latents = self.vae2llm(patches(inputs.latents, size).to(dtype))  # [B, L, D]
        rows, columns = (side // size for side in inputs.latents.shape[-2:])
        times = self.time_embedder(inputs.sigma, dtype)[:, None]
        latents = latents + times + self.latent_pos_embed(rows, columns)
        streams = (text, latents.flatten(0, 1).to(text.dtype))
        _, states = self.language_model.model(streams, inputs.positions, inputs.attention_fn)
        tokens = self.llm2vae(states.unflatten(0, (-1, rows * columns)))
        return unpatched(tokens, inputs.latents.shape, size)
