"""Rewards pictures of coloured shapes through a small network, so that the reward has a gradient.

The detector of `shapes.py` looks at pixels and has none. This network estimates what the detector measures, and its
reward is the detector's decision with soft limits: it grows towards the limits from afar, and little beyond them. The
network was trained on pictures that had fooled it, too (`scripts/pretrain_shapes_classifier.py`). The quick start by
DRTune climbs it; the detector says whether the climb was honest.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from unirl.config.errors import RewardError
from unirl.reward.base import Device, LocalRewardBackend, single
from unirl.reward.local.shapes import PALETTE, SHAPES, ShapesSpec
from unirl.types.protocols import Capabilities
from unirl.types.reward import RewardRequest, RewardResponse

WEIGHTS = Path(__file__).with_name("shapes_classifier.safetensors")
COLORS, KINDS = tuple(PALETTE), tuple(SHAPES)
SIZES = (len(COLORS), len(KINDS), 1)
SPEC = ShapesSpec(max_residual=0.08)
"""The limits of the quick start's detector."""
SOFTNESS = {"distance": 0.1, "overlap": 0.05, "residual": 0.02}
"""How far beyond a limit, in the measure's own unit, a decision is still open."""


class ShapesClassifier(nn.Module):
    """Pictures [B, 3, 24, 24] in [0, 1] to what the detector measures of them. Smooth.

    They are the paint's distance to each palette entry [B, 6], its overlap with each silhouette [B, 4] and the residual
    [B, 1], in the units of `ShapesSpec`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 24, 5, stride=2, padding=2),
            nn.SiLU(),
            nn.Conv2d(24, 32, 3, padding=1),
            nn.SiLU(),
            nn.Conv2d(32, 48, 3, stride=2, padding=1),
            nn.SiLU(),
            nn.Flatten(),
            nn.Linear(48 * 6 * 6, 40),
            nn.SiLU(),
        )
        self.head = nn.Linear(40, sum(SIZES))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The three measures."""
        distance, overlap, residual = self.head(self.features(2 * images - 1)).split(SIZES, dim=1)
        return distance, overlap, residual


def log_probs(distance: Tensor, overlap: Tensor, residual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of the colours [B, 7] and shapes [B, 5], each with "none" last, and of a clean picture [B, 1]."""
    color = nn.functional.pad(-distance, (0, 1), value=-SPEC.max_color_distance) / SOFTNESS["distance"]
    shape = nn.functional.pad(overlap, (0, 1), value=SPEC.min_overlap) / SOFTNESS["overlap"]
    clean = (SPEC.max_residual - residual) / SOFTNESS["residual"]
    return color.log_softmax(1), shape.log_softmax(1), nn.functional.logsigmoid(clean)


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
        return mean_log_prob(self.model(pictures), wanted)


def mean_log_prob(measures: tuple[Tensor, Tensor, Tensor], wanted: Tensor) -> Tensor:
    """[B] the reward from what the network says; wanted [B, 2] is the colour and the shape asked for."""
    color, shape, clean = log_probs(*measures)
    return (color.gather(1, wanted[:, :1]) + shape.gather(1, wanted[:, 1:]) + clean)[:, 0] / 3


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
