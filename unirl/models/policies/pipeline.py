"""Episodes of a policy in its environments: a request in, rows of decisions out.

reset -> observe -> decide -> step -> observe -> ... -> the episode ends, or the row has enough decisions
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from unirl.config.build import build
from unirl.config.errors import EpisodeError, IncompatibleError
from unirl.config.node import Node
from unirl.models.base import response_of
from unirl.models.loading.base_model import OWN_LAYOUT, BaseModel
from unirl.models.policies.bundle import ActionBundle
from unirl.models.policies.stage import ActionCanaryInputs, ActionStage
from unirl.models.policies.videos import Camera, EpisodeVideos, videos_of
from unirl.sde.noise import NoiseSource, key_seed
from unirl.types.batch import bounds_of
from unirl.types.environments import (
    NOT_REPORTED,
    Environment,
    EnvironmentSpaces,
    EnvironmentStep,
    EpisodeStart,
    Expert,
    Observations,
)
from unirl.types.facts import ActionFacts
from unirl.types.primitives import Episodes
from unirl.types.progress import progress
from unirl.types.protocols import Capabilities
from unirl.types.rollout_req import RolloutReq
from unirl.types.rollout_resp import RolloutResp
from unirl.types.sampling import ActionSamplingParams
from unirl.types.segments import ActionSegment, reported

START_OPTIONS = "start"
"""The key of a prompt's metadata with the options of its episodes."""
NOISE_BLOCK = 256
"""Decisions whose noise is drawn at once."""
NUM_CANARIES = 4


@dataclass
class Record:
    """The decisions of some rows, in the order of time. Every entry has the numbers of its rows beside it."""

    rows: list[Tensor] = field(default_factory=list)  # each [n] int64
    columns: dict[str, list[Tensor]] = field(default_factory=dict)  # name -> each [n, ...]
    observations: dict[str, list[Tensor]] = field(default_factory=dict)  # key -> each [n, *shape]

    def add(self, rows: Tensor, observations: Observations, **columns: Tensor) -> None:
        """Append one entry for each of `rows` [n]."""
        self.rows.append(rows)
        for key, value in observations.items():
            self.observations.setdefault(key, []).append(value)
        for name, value in columns.items():
            self.columns.setdefault(name, []).append(value)

    def segment(self, num_rows: int, finished: Tensor) -> ActionSegment:
        """All entries, row by row."""
        rows = torch.cat(self.rows)
        order = rows.argsort(stable=True)
        columns = {name: torch.cat(values)[order] for name, values in self.columns.items()}
        columns["success"] = columns["success"].to(torch.int8)
        observations = {key: torch.cat(values)[order] for key, values in self.observations.items()}
        counts = torch.bincount(rows, minlength=num_rows).tolist()
        return ActionSegment(
            observations=observations, offsets=bounds_of(counts), finished=finished, anchors={}, **columns
        )


class PolicyPipeline:
    """Acts in environments with one policy. `chunk_size` rows of a request act side by side."""

    capabilities: ClassVar[Capabilities] = Capabilities(modalities=("action",))

    def __init__(
        self,
        bundle: ActionBundle,
        *,
        env: Environment,
        videos: EpisodeVideos | None = None,
        expert: Expert | None = None,
    ) -> None:
        """
        Args:
            env: the environments. Each row of a request acts in one of them.
            videos: which episodes are drawn, by an environment with `render`. null: none.
            expert: labels every decision with its own action, for imitation. null: there is none.
        """
        self.bundle = bundle
        self.facts: ActionFacts = bundle.facts
        self.stage = bundle.stage()
        self.env, self.videos, self.expert = env, videos, expert
        check_spaces(self.facts, env.spaces)

    @classmethod
    def check_recipe(
        cls,
        facts: ActionFacts,
        sampling: ActionSamplingParams,
        evaluation: ActionSamplingParams | None,
        settings: Mapping[str, object],
    ) -> list[str]:
        """Refuses a policy or sampling settings that do not fit the environment, which is made once and closed.

        Args:
            evaluation: the sampling settings of evaluations. None if there are none.
            settings: the block `pipeline` of a recipe.

        Returns:
            Notices about the recipe.

        Raises:
            DependencyError: 3001, a library of the environment is missing.
            ConfigError: 2004 for a setting of the environment, 2020 for parts that do not fit.
        """
        with closing(environment_in(settings)) as env:
            check_spaces(facts, env.spaces)
            check_limit(sampling, env.spaces)
            check_chunk(facts.chunk, sampling.max_steps, env.spaces.most_steps)
            check_expert(facts, sampling, settings["expert"] is not None)
            if evaluation is not None:
                check_limit(evaluation, env.spaces, "in evaluations, ")
            if env.is_keyed:
                return []
            return [
                f"pipeline.env: {type(env).__name__} is not keyed, so equal starts and actions give other episodes. "
                "Determinism class of the run: statistical. A second or a resumed run is equal in distribution only"
            ]

    @classmethod
    def check_installed(cls, settings: Mapping[str, object]) -> None:
        """Raises DependencyError (3001) if a library of the environment is missing."""
        environment_in(settings).close()

    def stage_of(self, track: str) -> ActionStage:
        """The policy, by any name."""
        return self.stage

    def generate(self, req: RolloutReq, chunk_size: int) -> RolloutResp:
        """One row of decisions per row of the request. Rows whose environment failed have weight 0.

        Raises:
            EpisodeError: the environments of all rows failed.
        """
        name, params = req.only_track(ActionSamplingParams)
        drawn = set() if self.videos is None else set(self.videos.rows_of(req))
        parts = []
        for start in range(0, len(req), chunk_size):
            rows = range(start, min(start + chunk_size, len(req)))
            shown = [row - start for row in rows if row in drawn]
            parts.append(EpisodeLoop(self, req.select(rows), params, shown).run())
        segment = ActionSegment.concat([part.segment() for part in parts])
        faults = [part.failed.get(row, "") for part in parts for row in range(part.count)]
        if all(faults):
            raise EpisodeError(f"the environments of all {len(req)} rows failed. The first one: {faults[0]}")
        frames = [part.frames_of(row) for part in parts for row in range(part.count)]
        videos = None if self.videos is None else videos_of(frames, self.videos.fps)
        resp = response_of(req, {}, segment, episodes_of(segment, faults).replace(videos=videos))
        failed = torch.tensor([bool(fault) for fault in faults])
        track = resp.tracks[name]
        return resp.with_track(name, track.replace(weight=track.weight.where(~failed, 0.0)))

    # Export

    lora_formats: ClassVar[tuple[str, ...]] = ()

    @property
    def base_model(self) -> BaseModel:
        """The policy before training."""
        return BaseModel(library=OWN_LAYOUT)

    def write_model(self, tensors: Mapping[str, Tensor], folder: Path) -> Path:
        """Write the policy, with `tensors` in place of its own, as a folder that `bundle.reopened` reads."""
        return self.bundle.write(folder, tensors)

    def verify_model(self, folder: Path, texts: Sequence[str], params: ActionSamplingParams) -> float:
        """Max abs difference between what this policy and the one in `folder` do with fixed observations and noise."""
        inputs, other = self.canary_inputs(), self.bundle.reopened(folder)
        return float((self.stage.canary(inputs).values - other.stage().canary(inputs).values).abs().max())

    def canary_inputs(self) -> ActionCanaryInputs:
        """Fixed observations and noise."""
        generator = torch.Generator().manual_seed(key_seed(0, "canary"))
        observations = self.stage.examples(NUM_CANARIES, generator)
        noise = torch.rand(NUM_CANARIES, *self.stage.policy.noise_shape, generator=generator)
        return ActionCanaryInputs(observations=observations, noise=noise)


def check_expert(facts: ActionFacts, sampling: ActionSamplingParams, has_expert: bool) -> None:
    """Raises IncompatibleError (2020) for an expert without its share of decisions, or the reverse."""
    if has_expert != (sampling.expert_share is not None):
        given, missing = (
            ("pipeline.expert is set", "sampling.expert_share")
            if has_expert
            else (f"sampling.expert_share={sampling.expert_share}", "pipeline.expert")
        )
        raise IncompatibleError(f"{given}, and {missing} is not. Set both, or leave out both")
    if has_expert and facts.chunk > 1:
        raise IncompatibleError(
            f"pipeline.expert says one action for each state, and the policy decides on {facts.chunk} at a time. Set "
            "bundle.chunk=1, or imitate recorded episodes (stack.offline)"
        )


def environment_in(settings: Mapping[str, object]) -> Environment:
    """The environment of the block `pipeline` of a recipe."""
    node = settings["env"]
    assert isinstance(node, Node)
    env: Environment = build(node)
    return env


def check_chunk(chunk: int, limit: int | None, most_steps: int | None) -> None:
    """Raises IncompatibleError (2020) if an episode may end before all actions of a decision are taken.

    Args:
        limit: decisions of a row, at most.
        most_steps: steps of an episode, at most.
    """
    if most_steps is None or most_steps % chunk == 0 or (limit is not None and limit * chunk <= most_steps):
        return
    fitting = most_steps - most_steps % chunk
    raise IncompatibleError(
        f"bundle.chunk={chunk} does not divide the {most_steps} steps of an episode in pipeline.env, so the last "
        "actions of a decision would be trained without being taken. "
        f"Set {f'pipeline.env.max_steps={fitting}, or ' if fitting else ''}a chunk that divides {most_steps}"
    )


def check_spaces(facts: ActionFacts, spaces: EnvironmentSpaces) -> None:
    """Raises IncompatibleError (2020) for a policy that cannot act in an environment."""
    misfit = facts.misfit(spaces)
    if misfit is not None:
        raise IncompatibleError(f"bundle and pipeline.env: {misfit}")
    if facts.chunk % spaces.chunk:
        raise IncompatibleError(
            f"bundle and pipeline.env: the policy decides on {facts.chunk} actions at a time, and the environment "
            f"takes {spaces.chunk}. Set bundle.chunk={spaces.chunk}, or a multiple of it"
        )


def check_limit(sampling: ActionSamplingParams, spaces: EnvironmentSpaces, where: str = "") -> None:
    """Raises IncompatibleError (2020) if an episode might never end."""
    if sampling.max_steps is None and spaces.most_steps is None:
        raise IncompatibleError(
            f"{where}sampling.max_steps is absent, and the environment sets no limit to an episode, which might never "
            "end. Set pipeline.env.max_steps, the limit of the environment, or sampling.max_steps"
        )


class EpisodeLoop:
    """The rows of one request, each in the slot of its own number, from the first observation to the last."""

    def __init__(
        self, pipeline: PolicyPipeline, req: RolloutReq, params: ActionSamplingParams, shown: Sequence[int] = ()
    ) -> None:
        """
        Args:
            shown: rows whose first episodes are drawn.
        """
        self.camera = None if pipeline.videos is None else Camera(pipeline.env, pipeline.videos, shown)
        self.env, self.stage, self.req, self.params = pipeline.env, pipeline.stage, req, params
        self.expert = None if params.expert_share is None else pipeline.expert
        self.noise = NoiseSource(params.seed, req.purpose, req.step)
        self.count = len(req)
        self.limit = params.max_steps
        check_limit(params, self.env.spaces)
        self.record = Record()
        self.episodes = [0] * self.count
        """Episodes that each row has begun."""
        self.finished = torch.zeros(self.count, dtype=torch.bool)
        self.failed: dict[int, str] = {}
        """Why the environments of some rows failed, by row."""
        self.block: Tensor | None = None
        self.tasks = req.prompts()
        self.instructions = self.stage.instructions(self.tasks)
        self.take(torch.arange(self.count))

    def run(self) -> EpisodeLoop:
        """Act until every row is done."""
        observations = self.begin(self.slots)
        decision = 0
        while self.slots:
            rows = self.rows
            if self.camera is not None:
                self.camera.before(decision)
            seen = self.seen(rows, observations)
            chosen = self.stage.decide(seen, self.noise_at(decision), self.params.deterministic)
            columns = {"actions": chosen["actions"], "logp": chosen["logp"]}
            executed = chosen["executed"]
            if self.expert is not None:
                columns["labels"] = self.expert.label(observations)
                taken = columns["labels"][:, None]
                acts = self.expert_acts(decision).view(-1, *[1] * (taken.dim() - 1))
                executed = torch.where(acts, taken, executed)
            decision += 1
            after = self.act(executed)
            recorded = {key: chosen[key] if key in chosen else seen[key] for key in self.stage.facts.inputs}
            self.add(recorded, after, columns)
            ended = after.terminated | after.truncated
            is_last = self.limit is not None and decision == self.limit
            if not (is_last or self.failed or bool(ended.any())):  # most decisions
                observations = after.observations
                progress("decision")
                continue
            if self.camera is not None:
                over = ended if not is_last else torch.ones_like(ended)
                self.camera.after([row for row in rows[over].tolist() if row not in self.failed])
            # The observation after a cut is not seen by a decision, but its value counts.
            cut = (after.truncated | (~ended if is_last else torch.zeros_like(ended))) & ~after.terminated
            cut &= torch.tensor([row not in self.failed for row in self.slots])
            self.add_context(rows, cut, after.observations, columns)
            self.finished[rows] = after.terminated
            observations = self.go_on(after, ended, is_last)
            progress("decision")
        return self

    def take(self, rows: Tensor) -> None:
        """Let `rows` [n] be those that act, with the columns that are the same at each of their decisions."""
        self.rows, self.slots = rows, rows.tolist()
        self.decided = torch.ones(len(self.slots), dtype=torch.bool)
        self.sizes = torch.full((len(self.slots),), self.env.spaces.chunk)

    def begin(self, rows: Sequence[int]) -> Observations:
        """Start the next episode of some rows. The first episodes of a group are equal; later ones are not."""
        starts = []
        for row in rows:
            number = self.episodes[row]
            self.episodes[row] += 1
            id = self.req.group_ids[row] if number == 0 else self.req.sample_ids[row]
            seed = start_seed(self.noise, id, number)
            options = self.req.metadata[row].get(START_OPTIONS, {})
            starts.append(EpisodeStart(seed=seed, task=self.tasks[row], options=options))
        return self.env.reset(rows, starts)

    def seen(self, rows: Tensor, observations: Observations) -> Observations:
        """What the policy reads of the observations [n, ...] of some rows, and the instructions of these rows."""
        told = {key: tokens[rows] for key, tokens in self.instructions.items()}
        return {key: observations[key] for key in self.stage.facts.observations if key not in told} | told

    def noise_at(self, decision: int) -> Tensor:
        """[n, *noise_shape] the noise of a decision, which depends on row and decision alone."""
        policy = self.stage.policy
        number, place = divmod(decision, NOISE_BLOCK)
        if place == 0:
            draw = self.noise.normal if policy.noise == "normal" else self.noise.uniform
            self.block = draw(self.req.sample_ids, f"act{number}", (NOISE_BLOCK, *policy.noise_shape))
        assert self.block is not None
        return self.block[:, place] if len(self.slots) == self.count else self.block[self.rows, place]

    def expert_acts(self, decision: int) -> Tensor:
        """[n] bool, the rows in which the expert acts, each with probability beta of the step."""
        ids = [self.req.sample_ids[row] for row in self.slots]
        return self.noise.uniform(ids, f"expert{decision}", ()) < self.params.beta(self.req.step)

    def act(self, executed: Tensor) -> EnvironmentStep:
        """The outcome of a chunk of actions [n, chunk, ...]: rewards are summed, until an episode ends."""
        size = self.env.spaces.chunk
        executed = executed if size == 1 else executed.unflatten(1, (-1, size))
        step = self.env.step(self.slots, executed[:, 0])
        self.note_faults(self.slots, step)
        self.steps = self.sizes
        for place in range(1, executed.shape[1]):
            going = torch.nonzero(~(step.terminated | step.truncated))[:, 0]
            if not len(going):
                break
            slots = self.rows[going].tolist()
            later = self.env.step(slots, executed[going, place])
            self.note_faults(slots, later)
            self.steps = self.steps.index_add(0, going, self.sizes[: len(going)])
            step = joined(step, later, going)
        return step

    def note_faults(self, slots: Sequence[int], step: EnvironmentStep) -> None:
        """Rows whose environment failed do not count, and do not go on."""
        if not step.faults:
            return
        self.failed |= {
            slots[entry]: reason for entry, reason in step.faults.items() if slots[entry] not in self.failed
        }
        if self.camera is not None:
            self.camera.running.difference_update(self.failed)

    def add(self, seen: Observations, after: EnvironmentStep, columns: dict[str, Tensor]) -> None:
        """Record one decision of each row."""
        self.record.add(
            self.rows,
            seen,
            **columns,
            loss_mask=self.decided,
            rewards=after.rewards,
            terminated=after.terminated,
            truncated=after.truncated,
            success=after.success,
            num_steps=self.steps,
        )

    def add_context(self, rows: Tensor, where: Tensor, after: Observations, columns: dict[str, Tensor]) -> None:
        """Record the observations that followed the last decision of an episode that was cut off."""
        if not bool(where.any()):
            return
        count = int(where.sum())
        nothing = torch.zeros(count, dtype=torch.bool)
        self.record.add(
            rows[where],
            self.stage.encode(self.seen(rows[where], {key: value[where] for key, value in after.items()})),
            **{name: torch.zeros_like(value[where]) for name, value in columns.items()},
            loss_mask=nothing,
            rewards=torch.zeros(count),
            terminated=nothing,
            truncated=nothing,
            success=torch.full((count,), NOT_REPORTED, dtype=torch.int8),
            num_steps=torch.zeros(count, dtype=torch.int64),
        )

    def go_on(self, after: EnvironmentStep, ended: Tensor, is_last: bool) -> Observations:
        """Keep the rows that decide again. Returns what they observe."""
        rows, alive = self.rows, torch.tensor([row not in self.failed for row in self.slots])
        if is_last:
            self.take(rows[:0])
            return {}
        observations = dict(after.observations)
        again = ended & alive
        if self.params.continuing and bool(again.any()):
            first = self.begin(rows[again].tolist())
            for key, value in first.items():
                observations[key] = observations[key].index_copy(0, torch.nonzero(again)[:, 0], value)
        stays = alive & (~ended | self.params.continuing)
        if bool(stays.all()):
            return observations
        self.take(rows[stays])
        return {key: value[stays] for key, value in observations.items()}

    def frames_of(self, row: int) -> Sequence[Tensor]:
        """The frames [3, h, w] uint8 of a row; none if it is not drawn."""
        return () if self.camera is None else self.camera.frames.get(row, ())

    def segment(self) -> ActionSegment:
        """The decisions of all rows."""
        return self.record.segment(self.count, self.finished)


def start_seed(noise: NoiseSource, id: str, number: int = 0) -> int:
    """The seed of the start of an episode.

    Args:
        id: of the group, for the first episode of a row; of the row, for later ones.
        number: of the episode in its row.
    """
    return key_seed(noise.seed, noise.key(id, f"start{number}"))


def joined(step: EnvironmentStep, later: EnvironmentStep, going: Tensor) -> EnvironmentStep:
    """A step of all rows, and a later one of the rows `going` [m], as one."""
    return EnvironmentStep(
        observations={
            key: value.index_copy(0, going, later.observations[key]) for key, value in step.observations.items()
        },
        rewards=step.rewards.index_add(0, going, later.rewards),
        terminated=step.terminated.index_copy(0, going, later.terminated),
        truncated=step.truncated.index_copy(0, going, later.truncated),
        success=step.success.index_copy(0, going, step.success[going].maximum(later.success)),
    )


def episodes_of(segment: ActionSegment, faults: list[str]) -> Episodes:
    """Mean return, success and length of the episodes of each row. Without a decision they are 0, NaN and 0.

    Args:
        faults: [B] why the environment of a row failed.
    """
    totals = segment.totals()

    def means(rows: Sequence[Sequence[float]], without: float) -> Tensor:
        return torch.tensor([sum(row) / len(row) if row else without for row in rows])

    return Episodes(
        returns=means(totals["returns"], 0.0),
        lengths=means(totals["steps"], 0.0),
        success=means([reported(row) for row in totals["success"]], torch.nan),
        faults=faults,
    )
