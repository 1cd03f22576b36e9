"""Rewards images of colored shapes by a small network, so that the reward has a gradient.

The detector of `shapes.py` has no gradient. This network estimates the measures of the detector, and its reward is the
detector's decision with soft limits: it increases up to the limits, and little beyond them. The training images include
adversarial ones (`scripts/pretrain_shapes_classifier.py`). The quick start with DRTune optimises this reward, and is
evaluated with the detector.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from unirl.config.errors import InvalidValueError, RewardError
from unirl.reward.base import Device, LocalRewardBackend, single
from unirl.reward.local.shapes import PALETTE, SHAPES, ShapesSpec
from unirl.types.primitives import unit
from unirl.types.protocols import Capabilities
from unirl.types.reward import RewardRequest, RewardResponse

WEIGHTS = Path(__file__).with_name("shapes_classifier.safetensors")
COLORS, KINDS = tuple(PALETTE), tuple(SHAPES)
SIZES = (len(COLORS), len(KINDS), 1)
SPEC = ShapesSpec(max_residual=0.08)
"""The limits of the quick start's detector."""
SOFTNESS = {"distance": 0.1, "defect": 0.1, "residual": 0.02}
"""Width of the soft limit of each measure, in the unit of the measure."""


class ShapesClassifier(nn.Module):
    """Maps images [B, 3, 24, 24] in [0, 1] to estimates of the detector's measures; differentiable.

    The measures are the distance of the paint from each palette entry [B, 6], its defect as each shape [B, 4] and the
    residual [B, 1], in the units of `ShapesSpec`.
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
        """Returns the distances, defects and residuals."""
        distance, defect, residual = self.head(self.features(2 * images - 1)).split(SIZES, dim=1)
        return distance, defect, residual


class ShapesClassifierRewardScorer(LocalRewardBackend[ShapesClassifier]):
    """(log p(color) + log p(shape) + log p(clean)) / 3 in nats, for the color and shape that the prompt names."""

    reads = ("images", "prompts")
    reads_levels = True
    capabilities = Capabilities(modalities=("image",), differentiable=True)

    def __init__(self, *, batch_size: int = 256, device: Device = "auto") -> None:
        """
        Args:
            batch_size: images per forward.
        """
        if batch_size < 1:
            raise InvalidValueError(f"batch_size must be >= 1, got {batch_size}")
        super().__init__(device=device)
        self.batch_size = batch_size

    def load_model(self) -> ShapesClassifier:
        from safetensors.torch import load_file

        model = ShapesClassifier()
        model.load_state_dict(load_file(WEIGHTS))
        return model

    def score(self, request: RewardRequest) -> RewardResponse:
        images, prompts, size = request.images, request.prompts, self.batch_size
        assert images is not None and prompts is not None
        with torch.no_grad():
            parts = [
                self.objective(unit(images[start : start + size].to(self.device)), prompts[start : start + size])
                for start in range(0, len(request), size)
            ]
        return single("log_prob", torch.cat(parts))

    def check_prompt(self, prompt: str, metadata: Mapping[str, object]) -> None:
        color_and_shape(prompt)

    def objective(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        requested = torch.tensor([color_and_shape(prompt) for prompt in prompts], device=self.device)
        small = nn.functional.interpolate(images.to(self.device).float(), (24, 24), mode="bilinear", antialias=True)
        return mean_log_prob(self.model(small), requested)


def mean_log_prob(measures: tuple[Tensor, Tensor, Tensor], requested: Tensor) -> Tensor:
    """Returns the reward [B] for the network's output; `requested` [B, 2] holds the indices of color and shape."""
    distance, defect, residual = measures
    # Logits of colors [B, 7] and shapes [B, 5], both with "none" last, and of a clean image [B, 1].
    color = nn.functional.pad(-distance, (0, 1), value=-SPEC.max_color_distance) / SOFTNESS["distance"]
    shape = nn.functional.pad(-defect, (0, 1), value=-SPEC.max_defect) / SOFTNESS["defect"]
    clean = nn.functional.logsigmoid((SPEC.max_residual - residual) / SOFTNESS["residual"])
    log_probs = color.log_softmax(1).gather(1, requested[:, :1]) + shape.log_softmax(1).gather(1, requested[:, 1:])
    return (log_probs + clean)[:, 0] / 3


def color_and_shape(prompt: str) -> tuple[int, int]:
    """Returns the indices of the color and shape in a prompt. Raises RewardError unless it names one of each."""
    words = prompt.lower().replace(",", " ").replace(".", " ").split()
    colors = [i for i, name in enumerate(COLORS) if name in words]
    kinds = [i for i, name in enumerate(KINDS) if name in words]
    if len(colors) != 1 or len(kinds) != 1:
        raise RewardError(
            f"the prompt {prompt!r} should name one color ({', '.join(COLORS)}) and one shape ({', '.join(KINDS)}): "
            "the shapes classifier knows nothing else"
        )
    return colors[0], kinds[0]
