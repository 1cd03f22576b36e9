"""What was sampled and how likely it was: everything that replay needs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import TypeVar

from unirl.types.batch import Batch, packed, packed_offsets, row, shared
from unirl.types.protocols import GuidanceLike, Kernel

LogRatio = tuple[Tensor, Tensor]
"""log r = log-prob measured - recorded, [K] nats, 0 where nothing counts; and the weights [K]."""


class Segment(Batch):
    """What every kind of segment holds, and the questions that training and reports ask of it."""

    logp: Tensor  # behaviour log-prob, nats; a denoising segment has [B, S], a text segment [sum L]
    anchors: dict[str, Tensor]  # name -> values of other policies, at the entries of `logp`

    @abstractmethod
    def log_ratios(self, part: Sequence[int], logp: Tensor, weights: Tensor) -> dict[str, LogRatio]:
        """By place, how far the log-probs `logp` of a part of the work are from the recorded ones.

        Args:
            weights: [B] float32; a row of weight 0 counts nowhere.
        """

    @abstractmethod
    def statistics(self) -> dict[str, float]:
        """Metrics of what was sampled, by name."""

    @abstractmethod
    def facts(self) -> list[dict[str, Any]]:
        """[B] facts to show beside each sample in reports."""


SegmentT_co = TypeVar("SegmentT_co", bound=Segment, covariant=True, default=Any)
"""The kind of segment that a track holds."""


@dataclass(kw_only=True, eq=False)
class LatentSegment(Segment):
    """A denoising trajectory, stored at {i, i + 1 for each stochastic step i} and the last position."""

    latents: Tensor = row(heavy=True)  # [B, K, *latent], trajectory dtype
    indices: tuple[int, ...] = shared()  # K trajectory positions, sorted; the last is T
    sde_indices: tuple[int, ...] = shared()  # S stochastic steps, sorted
    sigmas: Tensor = shared()  # [T + 1] float32, from 1 (or below) down to 0
    logp: Tensor = row()  # [B, S] behaviour log-prob, nats, mean over latent elements
    kernel: Kernel = shared()
    solver: Kernel | None = shared(optional=True)  # of the deterministic steps; absent = Euler
    init_same_noise: bool = shared()  # siblings of a group start from one x_T
    guidance: GuidanceLike = shared()
    seed: int = shared()  # with `step`, the key of every draw of these rows; training times and noise go on from it
    step: int = shared()
    anchors: dict[str, Tensor] = row(heavy=True)  # name -> [B, S, ...] values of other policies

    @property
    def num_steps(self) -> int:
        """T, the number of denoising steps."""
        return len(self.sigmas) - 1

    def latents_at(self, position: int) -> Tensor:
        """The latents at trajectory position `position` (0 = noise, T = sample): [B, *latent]."""
        if position not in self.indices:
            raise ValueError(f"trajectory position {position} is not stored; stored positions are {self.indices}")
        return self.latents[:, self.indices.index(position)]

    @property
    def final(self) -> Tensor:
        """The sample itself: [B, *latent]."""
        return self.latents[:, -1]

    def columns_of(self, steps: Sequence[int]) -> list[int]:
        """Where the stochastic `steps` stand along S."""
        return [self.sde_indices.index(step) for step in steps]

    def log_ratios(self, part: Sequence[int], logp: Tensor, weights: Tensor) -> dict[str, LogRatio]:
        """By denoising step, how far log-probs [B, len(part)] that were measured again are from the recorded ones."""
        gaps = torch.where(weights[:, None] > 0, logp - self.logp[:, self.columns_of(part)], 0.0)
        return {f"denoising step {step}": (gaps[:, i], weights) for i, step in enumerate(part)}

    def statistics(self) -> dict[str, float]:
        """Numbers to log about what was sampled: none, trajectories are all alike."""
        return {}

    def facts(self) -> list[dict[str, Any]]:
        """[B] what a person who looks at each row may want to know: nothing, trajectories are all alike."""
        return [{} for _ in range(len(self))]

    def costs(self) -> Tensor | None:
        """None: every row is the same work."""
        return None


def stored_positions(sde_indices: Sequence[int], num_steps: int) -> tuple[int, ...]:
    """The trajectory positions that replay needs: both ends of each stochastic step, and the sample."""
    return tuple(sorted({p for i in sde_indices for p in (i, i + 1)} | {num_steps}))


@dataclass(kw_only=True, eq=False)
class TextSegment(Segment):
    """Sampled tokens, packed; the log-prob is that of the tempered, untruncated distribution.

    What stands at tokens that are context only is never read, finite or not.
    """

    tokens: Tensor = packed()  # [sum L] int64
    logp: Tensor = packed()  # [sum L] behaviour log-prob per token, nats
    loss_mask: Tensor = packed()  # [sum L] bool, False at tokens that are context only
    offsets: Tensor = packed_offsets()  # [B + 1]
    finished: Tensor = row()  # [B] bool, True where it ended by itself, False where it was cut at its longest
    temperature: float = shared()
    top_p: float = shared()
    top_k: int = shared()
    anchors: dict[str, Tensor] = packed(heavy=True)  # name -> [sum L, ...] values of other policies

    @property
    def lengths(self) -> Tensor:
        """[B] number of tokens per row."""
        return torch.diff(self.offsets)

    def log_ratios(self, part: Sequence[int], logp: Tensor, weights: Tensor) -> dict[str, LogRatio]:
        """Over all tokens, how far log-probs [sum L] that were measured again are from the recorded ones."""
        lengths = self.lengths.to(logp.device)
        counts = torch.where(self.loss_mask, weights.repeat_interleave(lengths), 0.0)
        return {"tokens": (torch.where(counts > 0, logp - self.logp, 0.0), counts)}

    def statistics(self) -> dict[str, float]:
        """Numbers to log about what was sampled: lengths in tokens, and the share that was cut."""
        lengths = self.lengths.double()
        return {
            "rollout/response_len_mean": float(lengths.mean()),
            "rollout/response_len_max": float(lengths.max()),
            "rollout/response_len_min": float(lengths.min()),
            "rollout/truncated_fraction": float((~self.finished).double().mean()),
            "samples/tokens": float(self.loss_mask.sum()),
        }

    def facts(self) -> list[dict[str, Any]]:
        """[B] what a person who looks at each row may want to know: how long it is, and whether it was cut."""
        rows = zip(self.lengths.tolist(), self.finished.tolist(), strict=True)
        return [{"tokens": tokens, "finished": finished} for tokens, finished in rows]

    def costs(self) -> Tensor | None:
        """[B] how much work each row is beside the others: its tokens."""
        return self.lengths
