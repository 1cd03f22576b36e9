"""Segments: what was sampled, its log-probs, and everything that replay needs."""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import TypeVar

from unirl.types.batch import Batch, packed, packed_offsets, row, shared
from unirl.types.device import to_device
from unirl.types.environments import NOT_REPORTED
from unirl.types.primitives import Facts, Videos, levels_of
from unirl.types.protocols import GuidanceLike, Kernel

LogRatio = tuple[Tensor, Tensor]
"""Log-prob now minus recorded log-prob, [K] nats, 0 at elements of weight 0; and the weights [K]."""


TRACE_SIDE, TRACE_FPS = 96, 2.0
"""Pixels along the longer side to which small latents are enlarged at most, and shown positions per second."""


class Segment(Batch):
    """Base class of all segments: what training and reports use of any kind of segment."""

    logp: Tensor  # log-prob under the sampling policy, nats; [B, S] for latents, [sum L] for text
    anchors: dict[str, Tensor]  # name -> outputs of other weights, for the entries of `logp`

    @abstractmethod
    def recorded(self, part: Sequence[int]) -> Tensor:
        """The recorded log-probs of the entries `part`, in the shape in which a policy measures them."""

    @abstractmethod
    def along_rows(self, parts: Sequence[Sequence[int]], values: Sequence[Tensor]) -> list[list[float]]:
        """[B] the values of each row in the order of `series`, on the CPU. NaN at entries that no part covers.

        Args:
            values: those of each of `parts`, in the shape of `recorded`.
        """

    @abstractmethod
    def log_ratios(self, part: Sequence[int], logp: Tensor, weights: Tensor) -> dict[str, LogRatio]:
        """Differences between `logp`, measured for the entries `part`, and the recorded log-probs, by a name for logs.

        Rows are left out if their entry of `weights` [B] is 0.
        """

    def statistics(self) -> dict[str, float]:
        """Metrics of the sampled rows, by name."""
        return {}

    def facts(self) -> list[Facts]:
        """[B] facts about each row, to be shown in reports."""
        return [{}] * len(self)

    def series(self) -> list[dict[str, list[float]]]:
        """[B] values along each row, such as log-probs by token or step, to be shown in reports."""
        return [{} for _ in range(len(self))]

    def written(self) -> list[list[int]]:
        """[B] the tokens of each row that make up a text. Empty for rows that are no texts."""
        return [[] for _ in range(len(self))]

    def context(self) -> list[list[int]]:
        """[B] the positions in `written` that the policy read and did not write, such as answers of tools."""
        return [[] for _ in range(len(self))]

    @property
    def positions(self) -> tuple[int, ...]:
        """The positions of the denoising trajectory that `trace` shows. Empty for samples without one."""
        return ()

    def trace(self) -> Videos:
        """The stored trajectory of each row, a frame for each position. Raises ValueError if it shows no images."""
        raise ValueError(f"a {type(self).__name__} has no trajectory of images")


SegmentT = TypeVar("SegmentT", bound=Segment)
SegmentT_co = TypeVar("SegmentT_co", bound=Segment, covariant=True, default=Segment)
"""The kind of segment that a track holds."""


@dataclass(kw_only=True, eq=False)
class LatentSegment(Segment):
    """Denoising trajectories. Stored positions are i and i + 1 of every stochastic step i, and the last one."""

    latents: Tensor = row(heavy=True)  # [B, K, *latent], in the trajectory dtype
    indices: tuple[int, ...] = shared()  # K stored positions, sorted; the last is T
    sde_indices: tuple[int, ...] = shared()  # S stochastic steps, sorted
    sigmas: Tensor = shared()  # [T + 1] float32, from 1 (or below) down to 0
    logp: Tensor = row()  # [B, S] behaviour log-prob, nats, mean over latent elements
    kernel: Kernel = shared()
    solver: Kernel | None = shared(default=None)  # kernel of the deterministic steps; None = Euler
    init_same_noise: bool = shared()  # True if all samples of a group start from the same x_T
    guidance: GuidanceLike = shared()
    seed: int = shared()  # with `step`, the key of the noise of these rows, also of noise drawn in training
    step: int = shared()
    anchors: dict[str, Tensor] = row(heavy=True)  # name -> [B, S, ...] outputs of other weights
    skipped: Tensor | None = row(optional=True)  # [B] share of the calls of blocks that a step cache left out

    @property
    def num_steps(self) -> int:
        """T, the number of denoising steps."""
        return len(self.sigmas) - 1

    def latents_at(self, position: int) -> Tensor:
        """[B, *latent] the latents at trajectory position `position`, from 0 (noise) to T (sample)."""
        if position not in self.indices:
            raise ValueError(f"trajectory position {position} is not stored; stored positions are {self.indices}")
        return self.latents[:, self.indices.index(position)]

    def series(self) -> list[dict[str, list[float]]]:
        """[B] sigma and log-prob at each stochastic step."""
        sigmas = self.sigmas[list(self.sde_indices)].tolist()
        return [{"sigma": sigmas, "logp": logp} for logp in self.logp.tolist()]

    @property
    def positions(self) -> tuple[int, ...]:
        """The stored positions."""
        return self.indices

    def trace(self) -> Videos:
        """The first three channels of the latents [B, K, C, H, W] or [B, K, C, F, H, W], of a video its middle frame.

        Mid-grey is 0, and black and white are three standard deviations of the initial noise away from it.
        """
        latents = self.latents
        if latents.ndim == 6:
            latents = latents[:, :, :, latents.shape[3] // 2]
        if latents.ndim != 5:
            raise ValueError(f"latents of the shape {tuple(self.latents.shape)} are no images [B, K, C, H, W]")
        latents = latents[:, :, :3] if latents.shape[2] >= 3 else latents[:, :, :1].expand(-1, -1, 3, -1, -1)
        times = max(1, TRACE_SIDE // max(latents.shape[-2:]))
        pixels = (0.5 + latents.float() / 6).clamp(0, 1)
        large = pixels.repeat_interleave(times, dim=-1).repeat_interleave(times, dim=-2)
        return Videos.of_frames(levels_of(large), fps=TRACE_FPS)

    @property
    def final(self) -> Tensor:
        """[B, *latent] the latents of the finished sample."""
        return self.latents[:, -1]

    def columns(self, values: Tensor, steps: Sequence[int]) -> Tensor:
        """[B, len(steps)] the entries of stochastic `steps` in `values` [B, S]. They are picked without a wait."""
        return torch.stack([values[:, self.sde_indices.index(step)] for step in steps], dim=1)

    def recorded(self, part: Sequence[int]) -> Tensor:
        """[B, len(part)]"""
        return self.columns(self.logp, part)

    def along_rows(self, parts: Sequence[Sequence[int]], values: Sequence[Tensor]) -> list[list[float]]:
        steps = torch.full((len(self), len(self.sde_indices)), torch.nan)
        covered = [self.sde_indices.index(step) for part in parts for step in part]
        steps[:, covered] = torch.cat(list(values), dim=1).float().cpu()
        return steps.tolist()

    def log_ratios(self, part: Sequence[int], logp: Tensor, weights: Tensor) -> dict[str, LogRatio]:
        """Differences between `logp` [B, len(part)] and the recorded log-probs, by denoising step."""
        gaps = torch.where(weights[:, None] > 0, logp - self.recorded(part), 0.0)
        return {f"denoising step {step}": (gaps[:, i], weights) for i, step in enumerate(part)}

    def statistics(self) -> dict[str, float]:
        """The mean share of blocks that a step cache left out, if there is one."""
        return {} if self.skipped is None else {"rollout/skipped_blocks": float(self.skipped.double().mean())}


def stored_positions(sde_indices: Sequence[int], num_steps: int) -> tuple[int, ...]:
    """The trajectory positions that replay needs: both ends of each stochastic step, and the finished sample."""
    return tuple(sorted({p for i in sde_indices for p in (i, i + 1)} | {num_steps}))


@dataclass(kw_only=True, eq=False)
class PackedSegment(Segment):
    """Rows of different lengths, end to end: the tokens of responses, or the decisions of episodes.

    Values at elements that are context only are never read; they need not be finite.
    """

    elements: ClassVar[str]
    """What one element is, in the plural, for logs."""

    logp: Tensor = packed()  # [sum L] log-prob per element under the sampling policy, nats
    loss_mask: Tensor = packed()  # [sum L] bool, False at elements that are context only
    offsets: Tensor = packed_offsets()  # [B + 1]
    finished: Tensor = row()  # [B] bool, True if the row ended by itself, False if it was cut off
    anchors: dict[str, Tensor] = packed(heavy=True)  # name -> [sum L, ...] outputs of other weights

    @property
    def lengths(self) -> Tensor:
        """[B] number of elements per row."""
        return torch.diff(self.offsets)

    def recorded(self, part: Sequence[int]) -> Tensor:
        """[sum L]"""
        return self.logp

    def along_rows(self, parts: Sequence[Sequence[int]], values: Sequence[Tensor]) -> list[list[float]]:
        """[B] the values of the elements that count."""
        [packed], mask = (each.float().cpu() for each in values), self.loss_mask.cpu()
        bounds = pairwise(self.offsets.tolist())
        return [packed[start:end][mask[start:end]].tolist() for start, end in bounds]

    def log_ratios(self, part: Sequence[int], logp: Tensor, weights: Tensor) -> dict[str, LogRatio]:
        """Differences between `logp` [sum L] and the recorded log-probs, over all elements."""
        lengths = to_device(self.lengths, logp.device)
        counts = torch.where(self.loss_mask, weights.repeat_interleave(lengths, output_size=len(logp)), 0.0)
        return {self.elements: (torch.where(counts > 0, logp - self.logp, 0.0), counts)}

    def series(self) -> list[dict[str, list[float]]]:
        """[B] the log-probs of each row that count, in order."""
        return [{"logp": row} for row in self.along_rows([(0,)], [self.logp])]

    def context(self) -> list[list[int]]:
        masks = torch.split(self.loss_mask, self.lengths.tolist())
        return [torch.nonzero(~mask)[:, 0].tolist() for mask in masks]

    def costs(self) -> Tensor | None:
        """[B] number of elements per row."""
        return self.lengths


@dataclass(kw_only=True, eq=False)
class TextSegment(PackedSegment):
    """Sampled tokens. Log-probs are those of the tempered distribution before top_k and top_p.

    Log-probs are NaN if the engine reports none (`Capabilities.old_logp`).
    """

    elements: ClassVar[str] = "tokens"

    tokens: Tensor = packed()  # [sum L] int64
    versions: Tensor | None = packed(
        optional=True
    )  # [sum L] int64 updates behind the weights of each token; None = one
    temperature: float = shared()
    top_p: float = shared()
    top_k: int = shared()

    def statistics(self) -> dict[str, float]:
        """Lengths of the responses in tokens, and the fractions that were truncated or come from several weights."""
        lengths = self.lengths.double()
        return self._mixture() | {
            "rollout/response_len_mean": float(lengths.mean()),
            "rollout/response_len_max": float(lengths.max()),
            "rollout/response_len_min": float(lengths.min()),
            "rollout/truncated_fraction": float((~self.finished).double().mean()),
            "samples/tokens": float(self.loss_mask.sum()),
        }

    def _mixture(self) -> dict[str, float]:
        if self.versions is None:
            return {}
        rows = torch.split(self.versions, self.lengths.tolist())
        return {"rollout/mixed_versions": sum(bool((row != row[0]).any()) for row in rows) / len(self)}

    def facts(self) -> list[Facts]:
        """[B] number of tokens of each response, and whether it ended by itself."""
        rows = zip(self.lengths.tolist(), self.finished.tolist(), strict=True)
        return [{"tokens": tokens, "finished": finished} for tokens, finished in rows]

    def written(self) -> list[list[int]]:
        return [row.tolist() for row in torch.split(self.tokens, self.lengths.tolist())]


@dataclass(kw_only=True, eq=False)
class ImageTokenSegment(TextSegment):
    """Images as sampled tokens: entries of a codebook, the same number in every row. Log-probs are of guided logits."""

    guidance_scale: float = shared()  # w in l_uncond + w (l_cond - l_uncond); 1 = no unconditional branch

    @property
    def is_guided(self) -> bool:
        """True if the logits combine a conditional and an unconditional branch."""
        return self.guidance_scale != 1

    def statistics(self) -> dict[str, float]:
        """The number of sampled tokens. All images have the same length, and none is truncated."""
        return {"samples/tokens": float(self.loss_mask.sum())}

    def facts(self) -> list[Facts]:
        """No facts: the number of tokens says nothing about an image."""
        return [{}] * len(self)

    def written(self) -> list[list[int]]:
        """No text."""
        return [[] for _ in range(len(self))]

    def costs(self) -> Tensor | None:
        """[B] number of tokens per row, those of the unconditional branch included."""
        return self.lengths * (2 if self.is_guided else 1)


@dataclass(kw_only=True, eq=False)
class ActionSegment(PackedSegment):
    """What a policy did in environments. An element is one decision: an action, or a chunk of actions in one go.

    A row is one episode, or several in turn. Where an episode was cut off, a further element with loss_mask False has
    the observation that followed, so what comes after a decision that did not terminate is always the next element.
    """

    elements: ClassVar[str] = "decisions"

    observations: dict[str, Tensor] = packed(heavy=True)  # key -> [sum L, ...] what the policy saw
    actions: Tensor = packed(heavy=True)  # [sum L, ...] what the policy drew, in the form in which it replays it
    rewards: Tensor = packed()  # [sum L] float32, of the environment; summed over a chunk
    terminated: Tensor = packed()  # [sum L] bool, the episode reached an end of the task with this decision
    truncated: Tensor = packed()  # [sum L] bool, the environment cut the episode off after this decision
    success: Tensor = packed()  # [sum L] int8, 1 = success, 0 = none, NOT_REPORTED = the environment did not say
    num_steps: Tensor = packed()  # [sum L] int64 steps of the environment; more than 1 for a chunk, 0 at context
    labels: Tensor | None = packed(heavy=True, optional=True)  # [sum L, *action] what an expert would do there

    @property
    def ends(self) -> Tensor:
        """[sum L] bool, nothing follows this decision in its episode: it ended, or the row did."""
        follows = torch.zeros_like(self.loss_mask)
        follows[:-1] = self.loss_mask[1:]
        follows[to_device(self.offsets[1:] - 1, follows.device)] = False
        return self.loss_mask & (self.terminated | self.truncated | ~follows)

    def episodes(self) -> list[list[slice]]:
        """[B] the decisions of each episode of a row, in order, as slices of the packed fields.

        The last one is left out if the row ended before it, unless the row has no other.
        """
        bounds = self.offsets.tolist()
        decided, last = (torch.nonzero(mask)[:, 0] for mask in (self.loss_mask, self.ends))
        # An episode starts at the first decision after the end of the one before it.
        before = torch.cat([last.new_tensor([-1])[: len(last)], last[:-1]])
        starts = decided[torch.searchsorted(decided, before, right=True)]
        complete = (self.terminated | self.truncated)[last]
        found: list[list[slice]] = [[] for _ in range(len(self))]
        for start, stop, is_complete in zip(starts.tolist(), last.tolist(), complete.tolist(), strict=True):
            row = bisect_right(bounds, start) - 1
            if is_complete or not found[row]:
                found[row].append(slice(start, stop + 1))
        return found

    def totals(self) -> dict[str, list[list[float]]]:
        """[B] `returns`, `steps` and `success` of each episode of a row. Success is NOT_REPORTED if no step says it."""
        rows = self.episodes()
        return {
            "returns": [[float(self.rewards[each].double().sum()) for each in row] for row in rows],
            "steps": [[float(self.num_steps[each].sum()) for each in row] for row in rows],
            "success": [[float(self.success[each].max()) for each in row] for row in rows],
        }

    def statistics(self) -> dict[str, float]:
        """Return and length of the episodes, and the share with a success of those that report one."""
        flat = {name: [value for row in rows for value in row] for name, rows in self.totals().items()}
        count, success = len(flat["returns"]), reported(flat["success"])
        return {
            "env/return": sum(flat["returns"]) / count,
            "env/length": sum(flat["steps"]) / count,
            **({"env/success_once": sum(success) / len(success)} if success else {}),
            "env/episodes": float(count),
            "samples/env_steps": float(self.num_steps.sum()),
        }

    def facts(self) -> list[Facts]:
        """[B] number of episodes of each row, their steps, and if one of them reports it, whether one succeeded."""
        totals = self.totals()
        rows = zip(totals["steps"], map(reported, totals["success"]), strict=True)
        return [
            {"episodes": len(steps), "steps": int(sum(steps)), **({"success": any(success)} if success else {})}
            for steps, success in rows
        ]


def reported(success: Sequence[float]) -> list[bool]:
    """The successes of those episodes that report one."""
    return [value > 0 for value in success if value != NOT_REPORTED]
