"""Critic heads: small networks that estimate the value of a denoising state, or of a state within a response."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, silu

from unirl.sde.noise import key_seed
from unirl.types.conditions import Conditions, TextEmbedCondition
from unirl.types.facts import LatentFacts

NUM_FREQUENCIES = 4
NUM_LEVELS = 3
"""Convolutions that halve the sides."""


class ValueHead(nn.Module):
    """V(x, sigma, text) in fp32. It starts at 0 everywhere, since its last layer is initialised to zero.

        x -> 3 strided convolutions, the first shifted by sigma and text -> mean over positions
          -> convolution over frames -> mean over frames, beside sigma and text -> 2 layers -> V

    Images, videos and flat latents go through the same weights: an image is a video of one frame.
    """

    def __init__(self, channels: int, text_width: int | None, width: int) -> None:
        super().__init__()
        sizes = [channels] + NUM_LEVELS * [width]
        self.levels = nn.ModuleList(
            nn.Conv2d(sizes[i], sizes[i + 1], 3, stride=2, padding=1) for i in range(NUM_LEVELS)
        )
        self.frames = nn.Conv1d(width, width, 3, padding=1)
        self.sigma = nn.Linear(1 + 2 * NUM_FREQUENCIES, width)
        self.text = None if text_width is None else nn.Linear(text_width, width)
        self.hidden = nn.Linear(2 * width, width)
        self.output_layer = nn.Linear(width, 1)
        initialise_to_zero(self)

    @staticmethod
    def of(facts: LatentFacts, width: int, seed: int) -> ValueHead:
        """A new head for the latents and prompts of a model. Its weights depend only on the seed."""
        with seeded(seed):
            return ValueHead(facts.latent_channels, facts.text_width, width)

    def forward(self, x: Tensor, sigma: Tensor, text: Tensor | None) -> Tensor:
        """Values [B] from x [B, C], [B, C, H, W] or [B, C, F, H, W], sigma [B] and text [B, D]."""
        context = self._context(sigma, text)  # [B, W]
        frames = _frames(x)  # [B, F, C, H, W]
        hidden = frames.flatten(0, 1)
        for i, level in enumerate(self.levels):
            hidden = level(hidden)
            if i == 0:
                hidden = hidden + context.repeat_interleave(frames.shape[1], 0)[:, :, None, None]
            hidden = silu(hidden)
        per_frame = hidden.mean((2, 3)).unflatten(0, frames.shape[:2])  # [B, F, W]
        pooled = silu(self.frames(per_frame.transpose(1, 2))).mean(2)
        value = self.output_layer(silu(self.hidden(torch.cat([pooled, context], dim=1))))
        return value.sum(1)  # not squeezed: FSDP2 hooks the root module's output, and warns about views

    def _context(self, sigma: Tensor, text: Tensor | None) -> Tensor:
        waves = sigma[:, None] * torch.pi * 2.0 ** torch.arange(NUM_FREQUENCIES, device=sigma.device)
        context = self.sigma(torch.cat([sigma[:, None], waves.sin(), waves.cos()], dim=1))
        given = None if text is None else text.shape[1]
        expected = None if self.text is None else self.text.in_features
        if given != expected:
            raise ValueError(
                f"the value head was built for pooled text of width {expected}, but the prompts have width {given}: "
                "correct LatentFacts.text_width of the model"
            )
        if self.text is not None and text is not None:
            # Encoders differ in scale by orders of magnitude.
            context = context + self.text(layer_norm(text, text.shape[1:]))
        return silu(context)


class TokenValueHead(nn.Module):
    """V of the state before a token, in fp32. It starts at 0 everywhere, since its last layer is initialised to zero.

    h -> layer norm -> 2 layers -> V,  h = the hidden state from which the token's logits are computed
    """

    def __init__(self, hidden_width: int, width: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(hidden_width, width)
        self.output_layer = nn.Linear(width, 1)
        initialise_to_zero(self)

    @staticmethod
    def of(hidden_width: int, width: int, seed: int) -> TokenValueHead:
        """A new head for hidden states of `hidden_width`. Its weights depend only on the seed."""
        with seeded(seed):
            return TokenValueHead(hidden_width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Values [N] from hidden states [N, D] of any dtype."""
        # Hidden states differ in scale by orders of magnitude between models.
        normed = layer_norm(hidden.to(self.hidden.weight.dtype), hidden.shape[1:])
        value = self.output_layer(silu(self.hidden(normed)))
        return value.sum(1)  # not squeezed, as in ValueHead


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Weights created in this context depend only on `seed`. The global generator is restored afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(key_seed(seed, "value_head"))
        yield


def initialise_to_zero(head: nn.Module) -> None:
    """Set `output_layer` and all biases to zero. The other weights keep the scale of the signal (He et al. 2015)."""
    for name, parameter in head.named_parameters():
        if name.startswith("output_layer") or parameter.dim() == 1:
            nn.init.zeros_(parameter)
        else:
            # PyTorch's default initialisation halves the signal per layer.
            nn.init.kaiming_normal_(parameter, nonlinearity="relu")


def pooled_text(conditions: Conditions) -> Tensor | None:
    """[B, D] fp32, one vector per prompt: the pooled embedding, or the mean over real tokens. None without text."""
    text = conditions.get("text")
    if not isinstance(text, TextEmbedCondition):
        return None
    if text.pooled is not None:
        return text.pooled.float()
    embeds = text.embeds.float()
    if text.mask is None:
        return embeds.mean(1)
    is_real = text.mask[:, :, None]
    return torch.where(is_real, embeds, 0.0).sum(1) / is_real.sum(1).clamp(min=1)


def _frames(x: Tensor) -> Tensor:
    """[B, F, C, H, W] from [B, C], [B, C, H, W] or [B, C, F, H, W]."""
    if x.dim() == 5:
        return x.transpose(1, 2)
    return x[(..., *(None,) * (4 - x.dim()))][:, None]
