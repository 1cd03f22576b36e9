"""The loop that post-trains any generative policy: generate samples, score them, learn from the advantages, repeat.

for step in steps:
    weights = publish(step)                   # trained weights to the engine; nothing moves when it shares them
    samples = generate and score              # P prompts x N samples; parts are scored while others are generated
    resp    = credit(samples)                 # rewards to one advantage per sample
    stack.train_track(resp)                   # optimizer updates: unirl/train/stack.py
    evaluate, write the files, checkpoint     # when due
"""

from __future__ import annotations

import signal
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Generic

from unirl.algorithms.shared.critic import explained_variance
from unirl.algorithms.shared.groups import in_pairs
from unirl.algorithms.shared.kl import KLController
from unirl.config.errors import Interrupted, Preempted, SyncError
from unirl.config.recipe import RecipeConfig
from unirl.distributed.group.pool import Pool
from unirl.distributed.weight_sync.base import SyncReport
from unirl.plan.preflight import needs_of
from unirl.reward.failures import DropBudget
from unirl.tracking.tracker import Tracker
from unirl.train.backend.checkpoint import Checkpoint
from unirl.trainer.balance import balanced_track
from unirl.trainer.evaluation import Evaluator
from unirl.trainer.monitoring import Monitor, reward_metrics, sync_metrics
from unirl.trainer.overlap import OverlappedScoring
from unirl.trainer.parity import ParityGate
from unirl.trainer.refill import StepSamples
from unirl.trainer.requests import RequestMaker
from unirl.trainer.residency import Phases
from unirl.trainer.roles import Roles
from unirl.trainer.run_state import RunState
from unirl.types.evaluation import EvalResult
from unirl.types.facts import ModelFacts
from unirl.types.protocols import DataSource, TrainingProgress
from unirl.types.results import values
from unirl.types.rollout_req import RolloutReq
from unirl.types.rollout_resp import AdvantageEstimator, RolloutResp, RolloutTrack
from unirl.types.sampling import SamplingT

BEHAVIOUR = "old"
"""The weight snapshot to sample from, for a loss that does not sample from the trained policy itself."""

PUBLISHED = "rollout"
"""The snapshot that an engine samples from when weights are published less often than every step."""


class Trainer(ABC, Generic[SamplingT]):
    """The loop of every domain. A domain says which track it trains, and how the sampling of a request is pinned."""

    def __init__(
        self,
        config: RecipeConfig,
        roles: Roles,
        data: DataSource,
        sampling: SamplingT,
        advantage: AdvantageEstimator,
        kl: KLController | None,
        drops: DropBudget,
        state: RunState,
        tracker: Tracker,
        parity: ParityGate | None,
        phases: Phases,
    ) -> None:
        """
        Args:
            kl: feedback on the loss's KL coefficient; None for a loss that asks for none.
            drops: which samples may go without a reward.
            parity: None for a loss without log-probs, and for an engine that records none.
        """
        self.config = config
        self.roles = roles
        self.data = data
        self.advantage = advantage
        self.kl = kl
        self.drops = drops
        self.state = state
        self.phase = phases
        self.needs = needs_of(config)
        self.monitor = Monitor(tracker, config, self.track, parity, self.needs.advantages)
        self.requests: RequestMaker[SamplingT] = RequestMaker(
            track=self.track,
            facts=roles.rollout.facts(),
            sampling=sampling,
            eval_sampling=sampling.for_evaluation(config.evaluation.settings(sampling.evaluation_keys)),
            eval_weights=config.evaluation.weights,
            pin=self.pinned,
        )
        self.overlap = OverlappedScoring(roles.rollout, roles.reward, config.reward_parts)
        self.evaluator = Evaluator(self.requests, roles, data, phases, config.evaluation.max_prompts)
        self.stop_signal: int | None = None

    @property
    @abstractmethod
    def track(self) -> str:
        """The name of the track that is scored and trained."""

    @abstractmethod
    def pinned(self, sampling: SamplingT, step: int) -> SamplingT:
        """The sampling settings for the request of training step `step`, with nothing left for the engine to decide."""

    @property
    def facts(self) -> ModelFacts:
        """The facts of the model that generates."""
        return self.requests.facts

    @property
    def pool(self) -> Pool:
        """The devices and the groups of workers on them."""
        return self.phase.pool

    def train(self) -> None:
        """Run the loop from the last checkpoint to the last step."""
        self.restore()
        self._check_prompts()
        self.state.write_config()
        if self.state.step == 0 and self.config.evaluation.enabled:
            self.evaluate()
        while self.state.step < self.config.num_rollouts:
            with self.monitor.tracker.timers.phase("step"):
                resp = self.produce(self.state.step)
                self.learn(self.state.step, resp)
            self._finish_step()
        self.monitor.summarize(self.state.step)

    def produce(self, step: int) -> RolloutResp:
        """The samples of one step, scored and credited."""
        self.pool.begin(step)
        with self.phase("sync"):
            weights = self.publish(step)
        samples = self._generate(step, weights)
        self.monitor.record(sync_metrics(weights) | samples.waits)
        req, resp = samples.everything()
        resp = self.drops.admit(resp)
        selected = samples.select(req, resp, self.track)
        self.monitor.account(step + 1, resp, selected)
        credited = self.credit(step, selected.resp, resp)
        self.monitor.keep_samples(step + 1, selected.req, credited.tracks[self.track], self.roles.rollout.preview)
        return credited

    def publish(self, step: int) -> SyncReport:
        """Bring the weights that this step samples from to the engine: live ones, or the snapshot that the loss needs.

        Weights that are published less often than every step are the snapshot `rollout`. A checkpoint holds it, so a
        resumed run samples from the same weights.
        """
        if self._interval == 1:
            return self.roles.sync.push(self.state.version, BEHAVIOUR if self.needs.ema_rollout else "live")
        if step % self._interval == 0:
            self.roles.backend.snapshot(PUBLISHED)
            self.state.published_version = self.state.version
        return self.roles.sync.push(self.state.published_version, PUBLISHED)

    def _generate(self, step: int, weights: SyncReport) -> StepSamples:
        """Generate and score until the step has the samples that it needs: once, or as often as `refill` asks for."""
        samples = StepSamples(self.config.refill, self.config.batch_size)
        size = None
        while not samples.is_complete:
            prompts = self.data.take(self.config.batch_size, size)
            size = prompts[0].size
            req = self.requests.training(prompts, step, weights)
            with self.phase("generate"):
                self.overlap.generate(req)
            with self.phase("reward"):
                resp, waits = self.overlap.scores()
            check_version(req, resp.tracks[self.track])
            samples.add(req, resp, waits)
        return samples

    def credit(self, step: int, resp: RolloutResp, scored: RolloutResp | None = None) -> RolloutResp:
        """Rewards up the tree and one advantage per row; a track without rewards takes its parent's advantages.

        Args:
            scored: all samples of the step, whose rewards are reported; `resp` when absent.
        """
        scored = (resp if scored is None else scored).propagate_rewards()
        resp = resp.propagate_rewards()
        for name in resp.by_depth():
            track = resp.tracks[name]
            if track.rewards is None:
                resp = resp.inherit_advantages(name)
                continue
            credited, metrics = track.compute_advantages(self.advantage, self.progress(step).progress, name)
            resp = resp.with_track(name, credited)
            self.monitor.record_track(resp, name, values(metrics) | reward_metrics(scored.tracks[name]))
        return resp

    def progress(self, step: int) -> TrainingProgress:
        """Where the run stands in step `step`: what the schedules of a loss read."""
        kl_scale = self.kl.scale if self.kl is not None else 1.0
        return TrainingProgress(progress=step / max(self.config.num_rollouts - 1, 1), kl_scale=kl_scale)

    def learn(self, step: int, resp: RolloutResp) -> None:
        """Update the policy on one step's samples."""
        track = resp.tracks[self.track]
        if self.needs.pairs:
            track = in_pairs(track, self.needs.pairs)
        track = balanced_track(track, self.config.num_updates, self.roles.train_ranks, self.needs.rows_together)
        with self.phase("train"):
            self.monitor.check_parity(track, self.roles.stack.measure_parity)
            result = self.roles.stack.train_track(track, self.progress(step))
        self.state.version = self.roles.backend.version()
        metrics = values(result.metrics)
        self.monitor.record(metrics | explained_variance(metrics))
        self.monitor.watch_parity(metrics, samples_are_fresh=self._interval == 1)
        self._observe_kl(metrics, track)
        self.pool.release(step)

    def _observe_kl(self, metrics: Mapping[str, float], track: RolloutTrack) -> None:
        """Feed the measured divergence back. A step whose updates were all skipped has none."""
        if self.kl is not None and "train/kl" in metrics:
            self.kl.observe(metrics["train/kl"], int((track.weight > 0).sum()))

    @property
    def _interval(self) -> int:
        """Steps between two publications of the weights; 1 where the engine shares them."""
        return self.config.weight_sync_interval if self.roles.has_own_weights else 1

    def restore(self) -> None:
        """Continue after the checkpoint that `resume` names, with the run's files cut back to it; or start at 0."""
        self.state.restore(self.roles.backend, self.monitor.tracker)

    def load(self, checkpoint: Checkpoint) -> None:
        """Take over the weights and the state of a checkpoint."""
        self.state.load(checkpoint, self.roles.backend, self.monitor.tracker)

    def evaluate(self) -> EvalResult:
        """Score held-out prompts with fixed seeds; log under the number of finished steps."""
        result = self.evaluator.evaluate(self.state.version)
        self.monitor.tracker.eval(self.state.step, result)
        return result

    def _check_prompts(self) -> None:
        """Check that every prompt of this run can be taken and scored, before an hour of it has passed."""
        prompts = [*self.data.prompts]
        if self.config.evaluation.enabled:
            prompts += self.data.eval_prompts(self.config.evaluation.max_prompts)
        self.requests.primitives(prompts)
        self.roles.reward.check_prompts(
            [prompt.text for prompt in prompts],
            [prompt.metadata for prompt in prompts],
            [prompt.prompt_id for prompt in prompts],
        )

    def _finish_step(self) -> None:
        """Evaluate, flush the files, checkpoint, each when due; then stop if a signal asked for it."""
        self.state.step += 1
        self.monitor.record(self.pool.memory())
        self.monitor.tracker.log_step(self.state.step)
        last = self.state.step == self.config.num_rollouts
        if self._is_due(self.config.evaluation.eval_steps) or (last and self.config.evaluation.eval_steps):
            self.evaluate()
        self.monitor.tracker.flush()
        if self._is_due(self.config.save_interval) or last or self.stop_signal is not None:
            with self.phase("checkpoint"):
                self.state.save(self.roles.backend, self.monitor.tracker)
        if self.stop_signal is not None and not last:
            self._stop()

    def _is_due(self, every: int) -> bool:
        return every > 0 and self.state.step % every == 0

    def request_stop(self, signum: int) -> None:
        """Finish the step that runs, save, and leave. Signal handlers call this."""
        self.stop_signal = signum

    def _stop(self) -> None:
        kind = Interrupted if self.stop_signal == signal.SIGINT else Preempted
        raise kind(
            f"stopped after step {self.state.step} by signal {self.stop_signal}; checkpoint saved. Continue with:\n"
            f"  {self.state.resume_command}"
        )


def check_version(req: RolloutReq, track: RolloutTrack) -> None:
    """Check that the samples come from the weights that the request asked for. Raises SyncError (10002)."""
    versions = sorted(set(track.weight_version.tolist()))
    if versions != [req.weight_version]:
        raise SyncError(
            f"the rollout should come from weights after {req.weight_version} updates, and its samples say that "
            f"they come from those after {', '.join(map(str, versions))}: the engine did not take over the last sync"
        )
