"""The network of pi0.5, as far as it differs from pi0 (Physical Intelligence 2025, arXiv:2504.16054; openpi).

The norms of the expert take their scale and shift from the noise level, and the same level gates what each half of a
block adds: AdaLN of DiT (arXiv:2212.09748) with the RMSNorm of Gemma. The state of the robot is text.

Names are those of the published weights, which `PI0ForConditionalGeneration` of transformers reads for pi0.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

if TYPE_CHECKING:
    from transformers import GemmaConfig, PI0Config, PI0ForConditionalGeneration


class AdaptiveNorm(nn.Module):
    """RMSNorm whose scale and shift are linear functions of a condition."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.dense = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        """The normed x [N, T, W], and the gate [N, 1, W] of what is computed from it, given a condition [N, W]."""
        scale, shift, gate = self.dense(condition)[:, None].chunk(3, dim=-1)
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (normed * (1 + scale.float()) + shift.float()).to(x.dtype), gate.to(x.dtype)


class AdaptiveGemmaLayer(nn.Module):
    """A block of Gemma with adaptive norms, and gates before its two additions."""

    def __init__(self, config: GemmaConfig, number: int) -> None:
        from transformers.models.gemma.modeling_gemma import GemmaAttention, GemmaMLP

        super().__init__()
        self.self_attn, self.mlp = GemmaAttention(config, number), GemmaMLP(config)
        self.input_layernorm = AdaptiveNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = AdaptiveNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, condition: Tensor, **attention: Any) -> Tensor:
        """[N, T, W] for x of this shape and a condition [N, W]."""
        normed, gate = self.input_layernorm(x, condition)
        x = x + gate * self.self_attn(hidden_states=normed, **attention)[0]
        normed, gate = self.post_attention_layernorm(x, condition)
        result: Tensor = x + gate * self.mlp(normed)
        return result


class AdaptiveGemma(nn.Module):
    """The expert: a Gemma of such blocks, which reads embeddings. Those of its vocabulary are only saved again."""

    def __init__(self, config: GemmaConfig) -> None:
        from transformers.models.gemma.modeling_gemma import GemmaRotaryEmbedding

        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(AdaptiveGemmaLayer(config, number) for number in range(config.num_hidden_layers))
        self.norm = AdaptiveNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = GemmaRotaryEmbedding(config)

    def forward(
        self, inputs_embeds: Tensor, attention_mask: Tensor, position_ids: Tensor, condition: Tensor, **options: Any
    ) -> SimpleNamespace:
        """`last_hidden_state` [N, T, W] for a condition [N, W].

        Args:
            attention_mask: bool [N, 1, T, P + T].
            options: the cache.
        """
        x, places = inputs_embeds, self.rotary_emb(inputs_embeds, position_ids=position_ids)
        for layer in self.layers:
            x = layer(x, condition, attention_mask=attention_mask, position_embeddings=places, **options)
        return SimpleNamespace(last_hidden_state=self.norm(x, condition)[0])


class ActionEmbedding(nn.Module):
    """Points of a chain as inputs of the expert. Noise levels go another way."""

    def __init__(self, config: PI0Config) -> None:
        from transformers.models.pi0.modeling_pi0 import PI0TimestepEmbeddings

        super().__init__()
        self.sinusoid_embeds = PI0TimestepEmbeddings(config)
        self.action_in_proj = nn.Linear(config.max_action_dim, config.dit_config.hidden_size)


@cache
def network_class() -> type[PI0ForConditionalGeneration]:
    """The class of the network, which is one of transformers."""
    from transformers import PI0ForConditionalGeneration

    class Pi05Network(PI0ForConditionalGeneration):
        """The modules of pi0 with another expert, without a projection of the state."""

        def __init__(self, config: PI0Config) -> None:
            super().__init__(config)
            width = config.dit_config.hidden_size
            self.model.dit = AdaptiveGemma(config.dit_config)
            self.embed_action_time = ActionEmbedding(config)
            self.time_mlp_in, self.time_mlp_out = nn.Linear(width, width), nn.Linear(width, width)
            self.post_init()

        def condition(self, sigma: Tensor) -> Tensor:
            """[N, W] the condition of the norms at noise levels [N]."""
            waves = self.embed_action_time.sinusoid_embeds(sigma).to(self.time_mlp_in.weight.dtype)
            return silu(self.time_mlp_out(silu(self.time_mlp_in(waves))))

    return Pi05Network
