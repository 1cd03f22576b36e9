"""The loop that post-trains any generative policy: produce samples, score them, learn from them, again."""

from __future__ import annotations

import json
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic

from unirl.algorithms.shared.critic import explained_variance
from unirl.algorithms.shared.groups import in_pairs
from unirl.algorithms.shared.kl import KLController
from unirl.config.errors import Interrupted, Preempted, ResumeError, SyncError
from unirl.config.recipe import RecipeConfig
from unirl.data.data_source import by_size, sizes_of
from unirl.data.datasets import Prompt
from unirl.data.images import check_counts
from unirl.distributed.group.handle import Handle
from unirl.distributed.group.pool import Pool
from unirl.distributed.weight_sync.base import SyncReport, WeightSync
from unirl.plan.preflight import needs_of
from unirl.reward.failures import DropBudget, drop_reasons
from unirl.tracking.media import media_of
from unirl.tracking.samples import SampleTable
from unirl.tracking.tracker import Tracker
from unirl.train.backend.checkpoint import Checkpoint, CheckpointStore
from unirl.train.parity import GAP_METRIC, parity_table
from unirl.trainer.balance import balanced_track
from unirl.trainer.overlap import Overlap
from unirl.trainer.parity import ParityGate
from unirl.trainer.refill import Draws, Settled
from unirl.trainer.report import (
    constant_reward,
    eval_result,
    reward_events,
    reward_metrics,
    sample_rows,
    scored_rows,
    spread_rows,
)
from unirl.trainer.residency import Residency
from unirl.trainer.resume import ResumePoint
from unirl.types.batch import Batch
from unirl.types.evaluation import EvalResult
from unirl.types.facts import ModelFacts
from unirl.types.primitives import PromptImages, Texts
from unirl.types.protocols import DataSource, State, Stateful, TrainingProgress
from unirl.types.results import values
from unirl.types.rollout_req import Purpose, RolloutReq, TrackSpec
from unirl.types.rollout_resp import AdvantageEstimator, RolloutResp, RolloutTrack
from unirl.types.sampling import SamplingT

BEHAVIOUR = "old"
"""The snapshot that samples for a loss whose sampler is not the trained policy itself."""

PUBLISHED = "rollout"
"""The snapshot that an engine samples from, when weights are published less often than every step."""

EVALUATION = -1
"""Stands for the step of columns that an evaluation makes."""


@dataclass(frozen=True, kw_only=True)
class Roles:
    """Handles of the roles that the loop calls."""

    rollout: Handle
    reward: Handle
    stack: Handle
    backend: Handle


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What the driver itself holds."""

    config: RecipeConfig
    data: DataSource
    advantage: AdvantageEstimator
    sync: WeightSync
    tracker: Tracker
    checkpoints: CheckpointStore
    resume: ResumePoint
    """Where the run continues; known to fit the recipe."""
    drops: DropBudget
    """Which samples may go without a reward."""
    pool: Pool
    residency: Residency
    parity: ParityGate | None
    """Absent for a loss without log-probs, and for an engine that records none."""
    kl: KLController | None
    """Feedback on the loss's KL coefficient; absent for a loss that asks for none."""
    sync_interval: int
    """Steps between two publications of the weights to an engine of its own; 1 where they are shared."""
    stateful: dict[str, Stateful]
    recipe: Mapping[str, Any]
    """The resolved recipe, every key."""
    write_config: Callable[[], None]
    """Writes the recipe into the run directory; called when it is known to be the run's own."""
    environment: dict[str, str]
    """What decides bits outside the recipe: library versions, CPU capability, thread count."""


class Trainer(ABC, Generic[SamplingT]):
    """The loop of every domain, which says what track is trained, and how sampling is pinned."""

    def __init__(self, parts: Parts, roles: Roles, sampling: SamplingT) -> None:
        self.parts = parts
        self.roles = roles
        self.config = parts.config
        self.facts: ModelFacts = roles.rollout.facts()
        self.sampling = sampling
        self.eval_sampling = sampling.for_evaluation(self.config.evaluation.settings(sampling.evaluation_keys))
        self.tracker = parts.tracker
        self.step = 0
        """Steps finished; the number of the step that runs next."""
        self.version = 0
        """Optimizer updates done."""
        self.published_version = 0
        """Of the snapshot `rollout`, when weights are published less often than every step."""
        self.parity_known = False
        self.fill_known = False
        self.stop_signal: int | None = None
        self.overlap = Overlap(roles.rollout, roles.reward, parts.config.reward_parts)
        self.needs = needs_of(parts.config)
        self.num_updates: int = parts.config.stack.values["num_updates_per_batch"]
        self.sampled_weights = BEHAVIOUR if self.needs.ema_rollout else "live"
        """What training samples come from."""

    @abstractmethod
    def pinned(self, sampling: SamplingT, step: int) -> SamplingT:
        """The copy that a request of training step `step` carries: everything decided that an engine might decide."""

    @property
    @abstractmethod
    def track(self) -> str:
        """The name of the track that is scored and trained."""

    def primitives(self, prompts: Sequence[Prompt]) -> dict[str, Batch]:
        """What the model is given of each prompt: its text, and its pictures where any of the prompts brings some.

        Raises DataError for a prompt with fewer or more pictures than the model takes.
        """
        check_counts(prompts, self.facts)
        found: dict[str, Batch] = {"text": Texts(texts=[prompt.text for prompt in prompts])}
        if any(prompt.images for prompt in prompts):
            found["images"] = PromptImages(per_prompt=[prompt.images for prompt in prompts])
        return found

    def make_request(self, prompts: Sequence[Prompt], step: int) -> RolloutReq:
        """P prompts of one size x N samples with the training settings; of those that bring their samples, these."""
        req = self._request(prompts, self.sampling, step, "r", self.sampled_weights)
        recorded = [ref for prompt in prompts for ref in prompt.recorded]
        return req.with_recorded(recorded) if recorded else req

    def make_eval_request(self, prompts: Sequence[Prompt]) -> RolloutReq:
        """Held-out prompts with the evaluation's settings, and randomness that does not depend on the step."""
        return self._request(prompts, self.eval_sampling, 0, "eval", self.config.evaluation.weights)

    def _request(
        self, prompts: Sequence[Prompt], sampling: SamplingT, step: int, purpose: Purpose, weights: str
    ) -> RolloutReq:
        groups = [prompt.group_id for prompt in prompts]
        [size] = sizes_of(prompts)
        sampling = sampling if size is None else sampling.at_size(*size)
        return RolloutReq(
            sample_ids=groups,
            group_ids=groups,
            primitives=self.primitives(prompts),
            metadata=[dict(prompt.metadata) for prompt in prompts],
            tracks={self.track: TrackSpec(sampling=self.pinned(sampling, step))},
            purpose=purpose,
            step=step,
            weights=weights,
            weight_version=self.version,
        ).expand(sampling.samples_per_prompt)

    def train(self) -> None:
        """Run the loop from the last checkpoint to the last step."""
        self.restore()
        self._check_prompts()
        self.parts.write_config()
        if self.step == 0 and self.config.evaluation.enabled:
            self.evaluate()
        while self.step < self.config.num_rollouts:
            with self.tracker.timers.phase("step"):
                resp = self.produce(self.step)
                self.learn(self.step, resp)
            self.finish_step()

    def _check_prompts(self) -> None:
        """Whether every prompt of this run can be taken and scored, before an hour of it has passed."""
        prompts = [*self.parts.data.prompts]
        if self.config.evaluation.enabled:
            prompts += self.parts.data.eval_prompts(self.config.evaluation.max_prompts)
        self.primitives(prompts)
        self.roles.reward.check_prompts(
            [prompt.text for prompt in prompts],
            [prompt.metadata for prompt in prompts],
            [prompt.prompt_id for prompt in prompts],
        )

    def produce(self, step: int) -> RolloutResp:
        """Samples of one step, scored and credited."""
        self.parts.pool.begin(step)
        with self.phase("sync"):
            report = self.publish(step)
        draws = self._draws(step, report)
        self.tracker.record(sync_metrics(report) | draws.waits)
        req, resp = draws.everything()
        for name, track in resp.tracks.items():
            self._record(resp, name, track.segment.statistics())
        resp = self.parts.drops.admit(resp)
        settled = draws.settle(req, resp, self.track)
        self._account(step + 1, resp, settled)
        credited = self.credit(step, settled.resp, resp)
        self._keep_samples(step + 1, settled.req, credited.tracks[self.track])
        return credited

    def _draws(self, step: int, report: SyncReport) -> Draws:
        """The samples of one step, scored: those of one draw, or of as many as `refill` needs."""
        draws = Draws(self.config.refill, self.config.batch_size)
        size = None
        while not draws.is_complete:
            prompts = self.parts.data.take(self.config.batch_size, size)
            size = prompts[0].size
            req = self.make_request(prompts, step)
            req = req.replace(weights=report.weights, weight_version=report.version)
            with self.phase("generate"):
                self.overlap.draw(req)
            with self.phase("reward"):
                resp, waits = self.overlap.collect()
            self._check_version(req, resp.tracks[self.track])
            draws.add(req, resp, waits)
        return draws

    def publish(self, step: int) -> SyncReport:
        """Bring the weights that this step samples from to the engine: live, or the snapshot that the loss asks for.

        Published less often than every step, they are the snapshot `rollout`: a checkpoint holds it, so that a resumed
        run samples from the same ones.
        """
        if self.parts.sync_interval == 1:
            return self.parts.sync.push(self.version, self.sampled_weights)
        if step % self.parts.sync_interval == 0:
            self.roles.backend.snapshot(PUBLISHED)
            self.published_version = self.version
        return self.parts.sync.push(self.published_version, PUBLISHED)

    def credit(self, step: int, resp: RolloutResp, scored: RolloutResp | None = None) -> RolloutResp:
        """Rewards up the tree and one advantage per row; a track without rewards takes its parent's advantages.

        Args:
            scored: all that was drawn, of which the rewards are reported; absent = `resp`.
        """
        scored = (resp if scored is None else scored).propagate_rewards()
        resp = resp.propagate_rewards()
        for name in resp.by_depth():
            track = resp.tracks[name]
            if track.rewards is None:
                resp = resp.inherit_advantages(name)
                continue
            credited, metrics = track.compute_advantages(self.parts.advantage, self.moment(step).progress, name)
            resp = resp.with_track(name, credited)
            self._record(resp, name, values(metrics) | reward_metrics(scored.tracks[name]))
        return resp

    def _record(self, resp: RolloutResp, name: str, metrics: Mapping[str, float]) -> None:
        """Metrics of one track, under its name where there are several."""
        prefix = f"{name}/" if len(resp.tracks) > 1 else ""
        self.tracker.record({prefix + key: value for key, value in metrics.items()})

    def moment(self, step: int) -> TrainingProgress:
        """Where the run stands in step `step`."""
        kl_scale = self.parts.kl.scale if self.parts.kl is not None else 1.0
        return TrainingProgress(progress=step / max(self.config.num_rollouts - 1, 1), kl_scale=kl_scale)

    def learn(self, step: int, resp: RolloutResp) -> None:
        """Update the policy on one step's samples."""
        track = resp.tracks[self.track]
        if self.needs.pairs:
            track = in_pairs(track, self.needs.pairs)
        stack = self.roles.stack
        track = balanced_track(track, self.num_updates, stack.num_ranks, self.needs.rows_together)
        with self.phase("train"):
            self._pass_parity_gate(track)
            result = stack.train_track(track, self.moment(step))
        self.version = self.roles.backend.version()
        metrics = values(result.metrics)
        self.tracker.record(metrics | explained_variance(metrics))
        self._watch_parity(metrics)
        if self.parts.kl is not None and "train/kl" in metrics:  # a step whose updates were all skipped has none
            self.parts.kl.observe(metrics["train/kl"], int((track.weight > 0).sum()))
        self.parts.pool.release(step)

    def _check_version(self, req: RolloutReq, track: RolloutTrack) -> None:
        found = sorted(set(track.weight_version.tolist()))
        if found != [req.weight_version]:
            raise SyncError(
                f"the rollout should come from weights after {req.weight_version} updates, and its samples say that "
                f"they come from those after {', '.join(map(str, found))}: the engine did not take over the last sync"
            )

    def _pass_parity_gate(self, track: RolloutTrack) -> None:
        """Before the first update of this process: the ratio of every log-prob that was recorded, judged."""
        gate = self.parts.parity
        if gate is None or self.parity_known:
            return
        warning = gate.judge(parity_table(self.roles.stack.measure_parity(track)))
        if warning is not None:
            self.tracker.warn(warning)
        self.parity_known = True

    def _watch_parity(self, metrics: Mapping[str, float]) -> None:
        """Later rollouts are judged by the gap that their first update measures anyway."""
        gate, gap = self.parts.parity, metrics.get(GAP_METRIC, 0.0)
        if gate is not None and self.parts.sync_interval == 1 and gate.is_suspicious(gap):
            self.tracker.event("alarm.raise", alarm="parity", value=gap)

    def _account(self, done: int, resp: RolloutResp, settled: Settled) -> None:
        """Where all samples of a step went: the ledger, and what is worth an event."""
        track = resp.tracks[self.track]
        reasons = {**drop_reasons(track), **settled.reasons}
        dropped = sum(reasons.values())
        self.tracker.ledger(done, generated=len(track), scored=len(track) - dropped, dropped=dropped, reasons=reasons)
        self.tracker.record(settled.metrics)
        for event, about in reward_events(resp):
            self.tracker.event(event, **about)
        self._watch_rewards(done, track)
        if settled.missing:
            self._tell_of_fill(settled.missing)

    def _tell_of_fill(self, missing: int) -> None:
        """Loudly the first time in this process, and as an event every time."""
        self.tracker.event("alarm.raise", alarm="refill.short", value=missing)
        if not self.fill_known:
            self.tracker.warn(
                f"{missing} of the {self.config.batch_size} groups of a step have equal rewards after "
                f"refill.max_draws={self.config.refill and self.config.refill.max_draws} draws: their samples count "
                "nowhere, and the update is made of the others. Prompts may be too easy or too hard for the policy: "
                "look at rollout/informative_group_ratio and samples/padding"
            )
        self.fill_known = True

    def _watch_rewards(self, done: int, track: RolloutTrack) -> None:
        """Equal rewards teach nothing; at the very start they are rather a mistake than a policy that is done."""
        value = constant_reward(track) if self.needs.advantages else None
        if value is None:
            return
        self.tracker.event("alarm.raise", alarm="reward.constant", value=value)
        if done == 1:
            self.tracker.warn(
                f"all {len(track)} samples of the first step have the reward {value:g}, and equal rewards teach "
                "nothing: check what the reward reads (the keys of its metadata, its weights), and look at the samples"
            )

    def _keep_samples(self, done: int, req: RolloutReq, track: RolloutTrack) -> None:
        """When due, a few samples of a step for people to look at."""
        every = self.config.tracking.sample_steps
        if every and done % every == 0:
            scored = scored_rows(track)
            req, track = req.select(scored), track.select(scored)
            chosen = spread_rows(track.group_ids, self.config.tracking.max_samples)
            assert track.decoded is not None, "an engine decodes what it samples"
            media = media_of(self.roles.rollout.preview(track.decoded.select(chosen)))
            rows = sample_rows(req.select(chosen), track.select(chosen), self.track)
            self.tracker.samples(done, SampleTable(rows, media))

    def finish_step(self) -> None:
        """The end of a step: evaluate, flush the files, checkpoint; then stop if a signal asked for it."""
        self.step += 1
        self.tracker.record(self.parts.pool.memory())
        self.tracker.log_step(self.step)
        last = self.step == self.config.num_rollouts
        every = self.config.evaluation.eval_steps
        if every and (last or self.step % every == 0):
            self.evaluate()
        self.tracker.flush()
        due = self.config.save_interval and self.step % self.config.save_interval == 0
        if due or last or self.stop_signal is not None:
            with self.phase("checkpoint"):
                self.save()
        if self.stop_signal is not None and not last:
            self._stop()

    def request_stop(self, signum: int) -> None:
        """Finish the step that runs, save, and leave (called by signal handlers)."""
        self.stop_signal = signum

    def _stop(self) -> None:
        how = Interrupted if self.stop_signal == signal.SIGINT else Preempted
        raise how(
            f"stopped after step {self.step} by signal {self.stop_signal}; checkpoint saved. Resume with resume=auto"
        )

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase, bring in the roles that it needs, and let none of it hang unseen."""
        with self.tracker.timers.phase(name), self.parts.pool.watch(name):
            self.parts.residency.enter(name)
            yield

    def close(self) -> None:
        """End every role and worker."""
        self.parts.pool.close()

    def evaluate(self) -> EvalResult:
        """Score held-out prompts with fixed seeds, size by size; log under the number of finished steps."""
        prompts = self.parts.data.eval_prompts(self.config.evaluation.max_prompts)
        result = EvalResult.joined([self._evaluated(some) for some in by_size(prompts)])
        self.tracker.eval(self.step, result)
        self.parts.pool.release(EVALUATION)
        return result

    def _evaluated(self, prompts: Sequence[Prompt]) -> EvalResult:
        req, resp = self.draw(prompts)
        with self.phase("eval"):
            track = self.roles.reward.score_and_attach(req, resp).tracks[self.track]
            return eval_result(req, track, self.roles.rollout.preview)

    def draw(self, prompts: Sequence[Prompt]) -> tuple[RolloutReq, RolloutResp]:
        """Samples of one size, as evaluation draws them; their columns live until the next drawing."""
        req = self.make_eval_request(prompts)
        self.parts.pool.release(EVALUATION)
        self.parts.pool.begin(EVALUATION)
        with self.phase("sync"):
            self.parts.sync.push(self.version, req.weights)
        with self.phase("eval"):
            return req, self.roles.rollout.generate(req)

    # Checkpoints

    def save(self) -> None:
        """Publish a checkpoint of everything that changes between steps."""
        with self.parts.checkpoints.stage(self.step) as folder:
            self.roles.backend.save(str(folder / "policy"))
            write_json(folder / "trainer.json", self.state_dict())
        self.tracker.event("ckpt.commit", step=self.step)

    def restore(self) -> None:
        """Continue after the last valid checkpoint, with the files cut back to it; or start at 0."""
        point = self.parts.resume
        for reason in point.skipped:
            self.tracker.warn(reason)
        if point.checkpoint is not None:
            self.load(point.checkpoint)
            self.parts.checkpoints.discard_after(self.step)
        self.tracker.truncate(self.step if point.checkpoint else -1)

    def load(self, checkpoint: Checkpoint) -> None:
        """Take over a checkpoint's state."""
        state = read_json(checkpoint.path / "trainer.json")
        self._compare_environment(state["environment"], checkpoint)
        self.roles.backend.load(str(checkpoint.path / "policy"))
        self.load_state_dict(state)

    def state_dict(self) -> State:
        """Everything outside the weights that changes between steps, and what it depends on."""
        return {
            "step": self.step,
            "version": self.version,
            "published_version": self.published_version,
            "stateful": {name: part.state_dict() for name, part in self.parts.stateful.items()},
            "recipe": self.parts.recipe,
            "environment": self.parts.environment,
        }

    def load_state_dict(self, state: State) -> None:
        """The inverse of `state_dict`."""
        saved, parts = state["stateful"], self.parts.stateful
        if saved.keys() != parts.keys():
            raise ResumeError(
                f"the checkpoint holds state of {sorted(saved)}, this recipe has {sorted(parts)}: "
                "resume with the recipe that wrote it, or start anew with resume=none in another run.dir"
            )
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        self.step, self.version = state["step"], state["version"]
        self.published_version = state["published_version"]

    def _compare_environment(self, saved: dict[str, str], checkpoint: Checkpoint) -> None:
        now = self.parts.environment
        changed = [
            f"{key} {saved.get(key)} -> {now.get(key)}" for key in sorted(saved | now) if saved.get(key) != now.get(key)
        ]
        if changed:
            self.tracker.warn(
                f"{checkpoint.path.name} was written in another environment ({', '.join(changed)}): the run continues, "
                "but its bits may differ from those of an unbroken run"
            )


def write_json(path: Path, state: State) -> None:
    """State as JSON that a person can read; non-finite numbers are a bug."""
    path.write_text(json.dumps(state, indent=1, sort_keys=True, allow_nan=False))


def read_json(path: Path) -> Any:
    """The state that `write_json` wrote."""
    return json.loads(path.read_text())


def sync_metrics(report: SyncReport) -> dict[str, float]:
    """What a publication of weights did."""
    return {
        "sync/version": report.version,
        "sync/bytes": report.num_bytes,
        "sync/canary_absdiff": report.canary_absdiff,
    }
