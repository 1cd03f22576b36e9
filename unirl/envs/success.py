"""A classifier of images that show success, and the reward that it gives."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Self

import msgspec
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, one_hot

from unirl.config.errors import InvalidValueError, NotFoundError, did_you_mean
from unirl.models.chunks import padded_chunks
from unirl.models.policies.networks import image_layers, unit_scaled
from unirl.types.device import accelerator

WIDTH = 128
"""Units of the layer after the convolutions."""
FORWARD_IMAGES = 32
"""Images of a forward. The last one is filled up with copies, so the bits of an image do not depend on the others."""


class SuccessClassifier(nn.Module):
    """A network that says how likely an image shows that a task is done.

    Convolutions read the image; two layers read their features and which task it is.
    """

    def __init__(self, size: tuple[int, int], tasks: Sequence[str]) -> None:
        """
        Args:
            size: height and width of the images.
            tasks: the instructions that it knows; "" for images without one.
        """
        super().__init__()
        self.size, self.tasks = tuple(size), tuple(tasks)
        self.images = image_layers((3, *size))
        with torch.no_grad():
            features = self.images(torch.zeros(1, 3, *size)).shape[1]
        self.layers = nn.Sequential(nn.Linear(features + len(self.tasks), WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))

    def forward(self, images: Tensor, tasks: Tensor) -> Tensor:
        """[N] logits of success of images [N, 3, H, W] uint8, for the tasks with the numbers `tasks` [N] int64."""
        told = one_hot(tasks, len(self.tasks)).float()
        logits: Tensor = self.layers(torch.cat([self.images(unit_scaled(images)), told], 1))
        return logits[:, 0]

    def numbers(self, tasks: Sequence[str]) -> Tensor:
        """[N] int64 the numbers of tasks. Raises InvalidValueError (2004) for a task that it does not know."""
        for task in tasks:
            if task not in self.tasks:
                raise InvalidValueError(
                    f"the success classifier knows the tasks {', '.join(map(repr, self.tasks))}, and not {task!r}."
                    f"{did_you_mean(task, self.tasks)} Train it on this task, too, or change data_source.tasks"
                )
        return torch.tensor([self.tasks.index(task) for task in tasks], dtype=torch.int64)

    @torch.no_grad()
    def probabilities(self, images: Tensor, tasks: Sequence[str]) -> Tensor:
        """[N] float32 on the CPU: the probability of success of each image [3, H, W] uint8 for its task.

        The bits of a row depend on its own image and task alone.
        """
        numbers, device = self.numbers(tasks), next(self.parameters()).device
        found = []
        for chunk in padded_chunks(len(images), FORWARD_IMAGES, FORWARD_IMAGES):
            rows = list(chunk.rows)
            logits = self(images[rows].to(device), numbers[rows].to(device))
            found.append(logits.sigmoid()[: chunk.num_real].cpu())
        return torch.cat(found)

    def fit(
        self,
        images: Tensor,
        tasks: Tensor,
        success: Tensor,
        *,
        updates: int = 1000,
        batch_size: int = 128,
        learning_rate: float = 1e-3,
        seed: int = 0,
    ) -> None:
        """Minimise the cross-entropy of labelled images with AdamW.

        Args:
            images: [N, 3, H, W] uint8.
            tasks: [N] int64, the numbers of their tasks.
            success: [N] bool.
            updates: number of updates.
            batch_size: images of an update, drawn with replacement.
            learning_rate: of the first update; it falls to zero along a cosine.
            seed: decides which images are drawn.
        """
        optimizer = torch.optim.AdamW(self.parameters(), lr=learning_rate, weight_decay=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates)
        generator = torch.Generator().manual_seed(seed)
        for _ in range(updates):
            rows = torch.randint(len(images), (batch_size,), generator=generator)
            loss = binary_cross_entropy_with_logits(self(images[rows], tasks[rows]), success[rows].float())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()

    def write(self, file: Path) -> None:
        """Write weights, size and tasks as one safetensors file."""
        from safetensors.torch import save_file

        about = json.dumps({"size": self.size, "tasks": self.tasks})
        save_file(self.state_dict(), file, metadata={"success_classifier": about})

    @classmethod
    def read(cls, file: Path) -> Self:
        """Read a file that `write` made.

        Raises:
            NotFoundError: 4001, there is no such file, or it holds something else.
        """
        from safetensors import SafetensorError, safe_open

        way_out = "Set `path` to the file of one, which scripts/train_success_classifier.py writes"
        if not file.is_file():
            raise NotFoundError(f"there is no file {file} with a success classifier. {way_out}")
        try:
            with safe_open(file, "pt") as opened:
                about = json.loads((opened.metadata() or {})["success_classifier"])
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no dict
        except (SafetensorError, KeyError) as error:
            raise NotFoundError(
                f"{file} is no success classifier ({type(error).__name__}: {error}). {way_out}"
            ) from error
        classifier = cls(tuple(about["size"]), about["tasks"])
        classifier.load_state_dict(tensors)
        return classifier.requires_grad_(False)


class SuccessReward:
    """1 for an image that shows success, by a classifier that `scripts/train_success_classifier.py` trained.

    With `progress`, the change of the probability of success since the image before is added.
    """

    def __init__(
        self, *, path: str, threshold: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 0.5, progress: bool = False
    ) -> None:
        """
        Args:
            path: file of the classifier.
            threshold: the probability from which an image shows success.
            progress: add p(image) - p(image before) to the reward.

        Raises:
            NotFoundError: 4001, `path` holds no classifier.
        """
        self.classifier = SuccessClassifier.read(Path(path).expanduser())
        self.size = self.classifier.size
        self.threshold, self.progress = threshold, progress

    def score(self, before: Tensor, frames: Tensor, tasks: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Rewards and success of frames. `unirl.types.environments.FrameReward.score` has the contract."""
        self.classifier.to(accelerator())  # after the first call, nothing moves
        rows, count = frames.shape[:2]
        images = torch.cat([before[:, None], frames], 1).flatten(0, 1)
        told = [task for task in tasks for _ in range(count + 1)]
        found = self.classifier.probabilities(images, told).view(rows, count + 1)
        success = found[:, 1:] >= self.threshold
        return success.float() + self.progress * found.diff(dim=1), success
