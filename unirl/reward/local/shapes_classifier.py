"""Rewards pictures of coloured shapes through a small network, so that the reward has a gradient.

The detector of `shapes.py` looks at pixels and has none. This network was trained on drawn pictures
(`scripts/pretrain_shapes_classifier.py`) to name colour and shape, and to tell flat paint from grain, stains and
mixtures. The quick start of the REFL family climbs it; the detector says whether the climb was honest.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from unirl.config.errors import RewardError
from unirl.reward.base import Device, LocalRewardBackend, single
from unirl.reward.local.shapes import PALETTE, SHAPES
from unirl.types.protocols import Capabilities
from unirl.types.reward import RewardRequest, RewardResponse

WEIGHTS = Path(__file__).with_name("shapes_classifier.safetensors")
COLORS, KINDS = tuple(PALETTE), tuple(SHAPES)
SIZES = (len(COLORS), len(KINDS), 2)
WIDTH = 24


class ShapesClassifier(nn.Module):
    """Pictures [B, 3, 24, 24] in [0, 1] to log-probs: colours [B, 6], shapes [B, 4], clean or not [B, 2]. Smooth."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, WIDTH, 3, padding=1),
            nn.SiLU(),
            nn.Conv2d(WIDTH, WIDTH, 3, stride=2, padding=1),
            nn.SiLU(),
            nn.Conv2d(WIDTH, 2 * WIDTH, 3, stride=2, padding=1),
            nn.SiLU(),
            nn.Conv2d(2 * WIDTH, 2 * WIDTH, 3, stride=2, padding=1),
            nn.SiLU(),
            nn.Flatten(),
        )
        self.head = nn.Linear(2 * WIDTH * 9, sum(SIZES))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The three log-probs."""
        color, shape, clean = self.head(self.features(images - 0.5)).split(SIZES, dim=1)
        return color.log_softmax(1), shape.log_softmax(1), clean.log_softmax(1)


class ShapesClassifierRewardScorer(LocalRewardBackend):
    """(log p(colour) + log p(shape) + log p(clean)) / 3, colour and shape as the prompt names them; nats, at most 0."""

    reads = ("images", "prompts")
    capabilities = Capabilities(modalities=("image",), differentiable=True)

    def __init__(self, *, batch_size: int = 256, device: Device = "auto") -> None:
        """
        Args:
            batch_size: pictures per forward.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size must be >= 1, got {batch_size}")
        super().__init__(device=device)
        self.batch_size = batch_size

    def load_model(self) -> nn.Module:
        from safetensors.torch import load_file

        model = ShapesClassifier()
        model.load_state_dict(load_file(WEIGHTS))
        return model

    def score(self, request: RewardRequest) -> RewardResponse:
        assert request.images is not None and request.prompts is not None
        with torch.no_grad():
            parts = [
                self.objective(images, request.prompts[start : start + self.batch_size])
                for start, images in zip(
                    range(0, len(request.images), self.batch_size),
                    request.images.split(self.batch_size),
                    strict=True,
                )
            ]
        return single("log_prob", torch.cat(parts))

    def objective(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """[B] the reward of pictures [B, 3, H, W] in [0, 1], with its gradient.

        Raises:
            RewardError: a prompt does not name one colour and one shape.
        """
        wanted = torch.tensor([named(prompt) for prompt in prompts], device=self.device)
        pictures = nn.functional.interpolate(images.to(self.device).float(), (24, 24), mode="bilinear", antialias=True)
        color, shape, clean = self.model(pictures)
        return (color.gather(1, wanted[:, :1]) + shape.gather(1, wanted[:, 1:]) + clean[:, 1:])[:, 0] / 3


def named(prompt: str) -> tuple[int, int]:
    """Which colour and which shape a prompt names. Raises RewardError unless it is one of each."""
    words = prompt.lower().replace(",", " ").replace(".", " ").split()
    colors = [i for i, name in enumerate(COLORS) if name in words]
    kinds = [i for i, name in enumerate(KINDS) if name in words]
    if len(colors) != 1 or len(kinds) != 1:
        raise RewardError(
            f"the prompt {prompt!r} should name one colour ({', '.join(COLORS)}) and one shape ({', '.join(KINDS)}): "
            "the shapes classifier knows nothing else"
        )
    return colors[0], kinds[0]
