"""The stage of a causal language model that denoises its image tokens one after another.

    sample:  prompt --backbone--> h_0 --T steps of the head--> token 0 --backbone, cache--> h_1 --T steps--> token 1 ...
    replay:  prompt, finished tokens --one forward--> h_0 h_1 ... --head, all tokens and steps at once--> velocities

The hidden state h_l, which the backbone computes from the prompt and the finished tokens before token l, is the only
condition of token l's flow. The trajectory of an image is therefore that of all its tokens side by side, in latents
[C, H, W]; a token is a patch of them. Every loss on denoising steps applies as it is: its replay reads the finished
image from the condition `tokens`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.compiler import set_stance
from torch.nn.functional import layer_norm

from unirl.config.errors import IncompatibleError
from unirl.models.chunks import round_up
from unirl.models.denoising.packing import packed, unpacked
from unirl.models.denoising.stage import (
    NO_GRADIENT,
    DiffusionStage,
    GradientMask,
    Replay,
    Trajectory,
    pinned_schedule,
)
from unirl.models.language.attention import (
    AttentionFn,
    DecodeAttention,
    KVCache,
    PackedAttention,
    PrefillAttention,
    groups_by_length,
    width_of_all,
)
from unirl.models.language.packing import prompts_of
from unirl.sde.noise import NoiseSource
from unirl.types.batch import Batch, bounds_of, row, take_rows
from unirl.types.conditions import Conditions, LatentCondition, PromptTokens
from unirl.types.device import to_device
from unirl.types.facts import LatentFacts
from unirl.types.progress import progress
from unirl.types.protocols import GuidanceLike
from unirl.types.sampling import DiffusionSamplingParams
from unirl.types.segments import LatentSegment, stored_positions

TOKENS = "tokens"
"""Name of the condition with the finished latents of a sample. A replay reads it; sampling does not need it."""
HIDDEN = "hidden"
NORM_EPS = 1e-6


@dataclass(kw_only=True, eq=False)
class HiddenCondition(Batch):
    """The output of the backbone from which image tokens are denoised."""

    hidden: Tensor = row(heavy=True)  # [B, L, D]


@dataclass(frozen=True)
class Reading:
    """The input of the backbone: text tokens and finished image tokens of several rows, laid end to end."""

    text: Tensor  # [M] int64
    image: Tensor  # [I, d] fp32
    order: Tensor  # [N] int64 indices into the text tokens, followed by the image tokens
    positions: Tensor  # [N] int64
    outputs: Tensor  # [B, L] int64 index of the token before each image token that is to be denoised
    first: int
    """Number of the first of the L image tokens, counted row by row of the image."""
    columns: int
    """Number of image tokens in a row of the image."""
    attention_fn: AttentionFn


@dataclass(frozen=True)
class Flow:
    """The input of the head, which computes the velocity of noised image tokens at their noise levels."""

    x: Tensor  # [B, S, L, d] fp32
    sigma: Tensor  # [B, S] fp32


@dataclass(frozen=True)
class ImageTokenInputs:
    """The input of one forward of the trained module. Exactly one of `reading` and `hidden` is given.

    The module outputs `hidden` [B, L, D], or `velocity` [B, S, L, d] fp32 (eps - x0) if there is a `flow`. Everything
    runs inside the module's own call, so FSDP2 wraps it without changes.
    """

    reading: Reading | None = None
    hidden: Tensor | None = None  # [B, L, D]
    flow: Flow | None = None


class ContinuousTokenDenoiser:
    """The trained module as a velocity field over the tokens of an image."""

    def __init__(self, network: nn.Module, facts: LatentFacts, *, norm_tokens: bool) -> None:
        """
        Args:
            norm_tokens: give finished tokens the mean 0 and the variance 1 before the backbone reads them.
        """
        self.network = network
        self.facts = facts
        self.norm_tokens = norm_tokens

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        """v [B S, C, H, W] fp32 at S states of each row, x [B S, C, H, W] and sigma [B S], in one forward.

        Args:
            conditions: of the B rows: prompts, and finished images in the condition `tokens`.
        """
        finished = finished_of(conditions)
        states = (len(finished), len(x) // len(finished))
        flow = Flow(self.tokens(x).unflatten(0, states), sigma.unflatten(0, states))
        reading = self.reading_of(prompts_of(conditions), finished)
        v: Tensor = self.network(ImageTokenInputs(reading=reading, flow=flow))["velocity"]
        return self.latents(v.flatten(0, 1), x.shape)

    def token_velocity(self, x: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        """v [B, 1, 1, d] fp32 of one token of each row at x [B, 1, 1, d] and sigma [B], given its hidden state."""
        condition = conditions[HIDDEN]
        assert isinstance(condition, HiddenCondition)
        v: Tensor = self.network(ImageTokenInputs(hidden=condition.hidden, flow=Flow(x, sigma[:, None])))["velocity"]
        return v

    def tokens(self, latents: Tensor) -> Tensor:
        """The tokens [B, L, d] of latents [B, C, H, W]."""
        return packed(latents, self.facts.patch_size)

    def latents(self, tokens: Tensor, shape: torch.Size) -> Tensor:
        """The latents [B, C, H, W] of tokens [B, L, d]; `shape` ends with (H, W)."""
        return unpacked(tokens, shape, self.facts.patch_size)

    def as_read(self, tokens: Tensor) -> Tensor:
        """Finished tokens [..., d] as the backbone reads them."""
        return normed(tokens) if self.norm_tokens else tokens

    def reading_of(self, prompts: PromptTokens, latents: Tensor) -> Reading:
        """The input of a replay: each prompt, then its finished image without the last token, which no token reads."""
        image = self.as_read(self.tokens(latents.float()))
        count, multiple = image.shape[1], self.facts.batch_multiple
        lengths, device = prompts.lengths.tolist(), image.device
        num_text = sum(lengths)
        starts = bounds_of(lengths)[:-1].tolist()
        order: list[Tensor] = []
        positions: list[Tensor] = []
        outputs: list[Tensor] = []
        for index, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            first_image = num_text + index * (count - 1)
            end = sum(map(len, order)) + length
            order += [torch.arange(start, start + length), torch.arange(first_image, first_image + count - 1)]
            positions.append(torch.arange(length + count - 1))
            outputs.append(torch.arange(end - 1, end - 1 + count))
        padding = _padding(sum(map(len, positions)), multiple)
        zeros = torch.zeros(padding, dtype=torch.int64)
        return Reading(
            text=prompts.tokens,
            image=image[:, :-1].flatten(0, 1),
            order=to_device(torch.cat([*order, zeros]), device),
            positions=to_device(torch.cat([*positions, zeros]), device),
            outputs=to_device(torch.stack(outputs), device),
            first=0,
            columns=latents.shape[-1] // self.facts.patch_size,
            attention_fn=PackedAttention([*(length + count - 1 for length in lengths), padding], device),
        )


class TokenReader:
    """Reads prompts, then one image token of every row at a time, with a key-value cache.

    The number of rows is a multiple of `batch_multiple`, so that the bits of a row depend on its own tokens alone.
    """

    def __init__(self, denoiser: ContinuousTokenDenoiser, prompts: PromptTokens, num_tokens: int, columns: int) -> None:
        self.denoiser = denoiser
        self.prompts = prompts
        self.columns = columns
        self.lengths: list[int] = prompts.lengths.tolist()
        self.num_read = 0
        """Number of image tokens that were read."""
        self.cache = KVCache(len(self.lengths))
        self.cache.reserve(max(self.lengths) + num_tokens)
        self.device = prompts.tokens.device
        self.rows = to_device(torch.arange(len(self.lengths)), self.device)
        self.prompt_lengths = to_device(torch.tensor(self.lengths), self.device)

    def read_prompts(self) -> Tensor:
        """The hidden states [R, 1, D] of the first image tokens."""
        ends = bounds_of(self.lengths)[1:]
        places = [torch.arange(length) + slot * self.cache.capacity for slot, length in enumerate(self.lengths)]
        num_text = len(self.prompts.tokens)
        padding = _padding(num_text, self.denoiser.facts.batch_multiple)
        order = to_device(torch.cat([torch.arange(num_text), torch.zeros(padding, dtype=torch.int64)]), self.device)
        rows = PackedAttention([*self.lengths, padding], self.device)
        attention_fn = PrefillAttention(self.cache, rows, order[:num_text], to_device(torch.cat(places), self.device))
        positions = torch.cat([self.prompts.positions, self.prompts.positions.new_zeros(padding)])
        no_image = torch.zeros(0, self.token_width, device=self.device)
        outputs = to_device(ends - 1, self.device)[:, None]
        with set_stance("force_eager"):  # a compiled block cannot allocate its part of the cache
            return self._hidden(self.prompts.tokens, no_image, order, positions, outputs, attention_fn)

    def read_token(self, tokens: Tensor) -> Tensor:
        """The hidden states [R, 1, D] of the next image tokens, after the finished tokens [R / n, d] of n branches."""
        lengths = self.prompt_lengths + self.num_read
        totals = [length + self.num_read + 1 for length in self.lengths]
        capacity = self.cache.capacity
        on_cpu = self.device.type == "cpu"
        groups = groups_by_length(totals) if on_cpu else {width_of_all(max(totals), capacity): None}
        attention_fn = DecodeAttention(capacity, lengths, groups)
        self.num_read += 1
        no_text = self.prompts.tokens[:0]
        image = self.denoiser.as_read(tokens).repeat(len(self.lengths) // len(tokens), 1)
        return self._hidden(no_text, image, self.rows, lengths, self.rows[:, None], attention_fn)

    def close(self) -> None:
        """Free the memory of the cache."""
        self.cache.release()

    @property
    def token_width(self) -> int:
        """d, the numbers of a token."""
        facts = self.denoiser.facts
        return facts.latent_channels * facts.patch_size**2

    def _hidden(
        self,
        text: Tensor,
        image: Tensor,
        order: Tensor,
        positions: Tensor,
        outputs: Tensor,
        attention_fn: AttentionFn,
    ) -> Tensor:
        reading = Reading(text, image, order, positions, outputs, self.num_read, self.columns, attention_fn)
        hidden: Tensor = self.denoiser.network(ImageTokenInputs(reading=reading))["hidden"]
        return hidden


@dataclass(frozen=True)
class _Sampling:
    """Settings and noise that all tokens of one call of `sample` share. R' is B rounded up to the batch multiple."""

    params: DiffusionSamplingParams
    guidance: GuidanceLike
    levels: list[float]  # [T + 1]
    sigma: Tensor  # [T + 1, R'] the same on the device
    sde_indices: tuple[int, ...]
    noise: dict[int, Tensor]  # step -> [R', L, d]

    def trajectory(self) -> Trajectory:
        """An empty trajectory."""
        return Trajectory(self.params, self.guidance, self.levels, self.positions)

    @property
    def positions(self) -> tuple[int, ...]:
        """The stored positions of a trajectory."""
        return stored_positions(self.sde_indices, len(self.levels) - 1)


class ContinuousTokenStage(DiffusionStage):
    """Samples images token by token, and replays all tokens of recorded steps at once."""

    denoiser: ContinuousTokenDenoiser

    @torch.no_grad()
    def sample(
        self,
        conditions: Conditions,
        x_T: Tensor,  # noqa: N803
        params: DiffusionSamplingParams,
        noise: NoiseSource,
        ids: Sequence[str],
        gradient: GradientMask = NO_GRADIENT,
        guidance: GuidanceLike | None = None,
    ) -> LatentSegment:
        """Trajectories from x_T [B, C, H, W], fp32 on the network's device, to x_0. See `DiffusionStage.sample`.

            for token l in 0 ... L - 1:
                h = backbone(prompt, finished tokens before l), for both branches of guidance
                for i in 0 ... T - 1:
                    v = guided velocity of the head at (x_i[l], sigma_i, h), then one step of the kernel or the solver

        The noise of stochastic step i is that of all tokens, keyed by the row's id and `s{i}`; a token takes its patch
        of it. Raises IncompatibleError if steps are to be differentiated.
        """
        if gradient.steps:
            raise IncompatibleError(
                f"{self.facts.family} samples its image tokens one after another, and these steps are not "
                "differentiated: use a loss on replayed steps, such as DiffusionGRPO or DiffusionNFT"
            )
        self._step_cache(params.cache_threshold)  # refuses a threshold
        sigmas, sde_indices = pinned_schedule(params)
        rows = self._rows(len(ids))
        guidance = guidance or self.facts.guidance_of(params)
        prompts: Conditions = {name: c for name, c in conditions.items() if isinstance(c, PromptTokens)}
        feeds = [prompts_of(feed) for feed in self._feeds(prompts, rows, guidance)]
        row_ids, shape = [ids[row] for row in rows], x_T.shape[1:]
        run = _Sampling(
            params=params,
            guidance=guidance,
            levels=sigmas.tolist(),
            sigma=to_device(sigmas, x_T.device)[:, None].expand(-1, len(rows)),
            sde_indices=sde_indices,
            noise={
                i: self.denoiser.tokens(to_device(noise.normal(row_ids, f"s{i}", shape), x_T.device))
                for i in sde_indices
            },
        )
        x = self.denoiser.tokens(take_rows(x_T, rows).float())
        columns = shape[-1] // self.facts.patch_size
        reader = TokenReader(self.denoiser, PromptTokens.concat(feeds), x.shape[1], columns)
        walks: list[tuple[Trajectory, list[Tensor]]] = []
        with closing(reader):
            for token in range(x.shape[1]):
                hidden = reader.read_token(walks[-1][0].latents[-1].float()) if walks else reader.read_prompts()
                parts = hidden.split([len(feed) for feed in feeds])
                walks.append(self._denoise(run, token, x[:, token], tuple(parts)))
                progress("image token", x.shape[1])
        whole = self._joined(run, walks, shape)
        return whole.segment(len(ids), sigmas, sde_indices, noise)

    def replay(self, conditions: Conditions, segment: LatentSegment, steps: Sequence[int]) -> Replay:
        """See `DiffusionStage.replay`. The backbone reads each row once, whatever the number of steps."""
        rows, guidance = self._rows(len(segment)), segment.guidance
        x = torch.stack([segment.latents_at(step) for step in steps], dim=1).float()  # [B, S', C, H, W]
        states = take_rows(x, rows).flatten(0, 1)
        sigma = to_device(segment.sigmas[list(steps)], x.device).repeat(len(rows))
        v = self._forward(states, sigma, guidance, self._feeds(conditions, rows, guidance), self.denoiser.velocity)
        v = v.unflatten(0, (len(rows), len(steps)))[: len(segment)]
        return Replay.of(segment, steps, x.transpose(0, 1), v.transpose(0, 1))

    def _denoise(
        self, run: _Sampling, token: int, x: Tensor, hidden: tuple[Tensor, ...]
    ) -> tuple[Trajectory, list[Tensor]]:
        """The trajectory of one token of each row from noise x [R', d], and the velocities of its stochastic steps."""
        trajectory, velocities = run.trajectory(), []
        feeds: tuple[Conditions, ...] = tuple({HIDDEN: HiddenCondition(hidden=part)} for part in hidden)
        forward = partial(self._forward, guidance=run.guidance, feeds=feeds, network=self.denoiser.token_velocity)
        x = trajectory.store(0, x)
        for i in range(run.params.num_inference_steps):
            v = forward(x[:, None, None], run.sigma[i])[:, 0, 0]
            if i in run.sde_indices:
                x = trajectory.stochastic(i, x, v, run.noise[i][:, token])
                velocities.append(v)
            else:
                x = trajectory.deterministic(i, x, v)
        return trajectory, velocities

    def _joined(self, run: _Sampling, walks: list[tuple[Trajectory, list[Tensor]]], shape: torch.Size) -> Trajectory:
        """One trajectory of all tokens. Its log-probs are computed from whole latents, as a replay computes them."""
        whole = run.trajectory()
        by_position = zip(*(trajectory.latents for trajectory, _ in walks), strict=True)
        whole.latents = [self.denoiser.latents(torch.stack(x, 1), shape) for x in by_position]
        by_step = zip(*(velocities for _, velocities in walks), strict=True)
        velocities = [self.denoiser.latents(torch.stack(v, 1), shape) for v in by_step]
        states = {position: x.float() for position, x in zip(run.positions, whole.latents, strict=True)}
        for i, v in zip(run.sde_indices, velocities, strict=True):
            step = run.params.kernel.transition(states[i], v, run.levels[i], run.levels[i + 1])
            whole.logp.append(step.log_prob(states[i + 1]))
        return whole


def normed(tokens: Tensor) -> Tensor:
    """Tokens [..., d] with mean 0 and variance 1."""
    return layer_norm(tokens, tokens.shape[-1:], eps=NORM_EPS)


def finished_of(conditions: Conditions) -> Tensor:
    """The finished latents [B, C, H, W] of the samples that are replayed."""
    if TOKENS not in conditions:
        raise ValueError(
            f"the velocity of an image token depends on the finished tokens before it: give the condition {TOKENS!r}, "
            f"as the pipeline's response has it; there are {sorted(conditions)}"
        )
    condition = conditions[TOKENS]
    assert isinstance(condition, LatentCondition)
    return condition.latents


def _padding(count: int, multiple: int) -> int:
    """The number of tokens that bring `count` to the next multiple of `multiple`."""
    return round_up(count, multiple) - count
