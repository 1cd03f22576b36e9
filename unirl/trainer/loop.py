"""The loop that post-trains any generative policy: generate samples, score them, learn from the advantages, repeat.

for step in steps:
    published = publisher.publish(step)        # trained weights to the engine; nothing moves when it shares them
    samples = _generate(step, published)       # P prompts x N samples, scored; several batches with `refill`
    resp = drops.admit(samples)                # weight 0 for a sample without a reward, within the budget for failures
    selected = samples.select(resp)            # with `refill`: the groups whose rewards differ
    credited = credit(step, selected)          # rewards to one advantage per sample
    learn(step, credited)                      # optimizer updates: unirl/train/stack.py
    _finish_step()                             # evaluate, write the files, checkpoint, when due
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from traceback import clear_frames
from typing import ClassVar, Generic

from unirl.algorithms.shared.critic import explained_variance
from unirl.algorithms.shared.groups import in_pairs
from unirl.algorithms.shared.kl import KLController
from unirl.config.errors import MemoryShortageError, UniRLError
from unirl.config.recipe import RecipeConfig
from unirl.data.datasets import Prompt
from unirl.distributed.weight_sync.base import SyncReport
from unirl.plan.preflight import needs_of
from unirl.reward.failures import DropBudget
from unirl.train.parity import ParityGate
from unirl.trainer.balance import balanced_track
from unirl.trainer.evaluation import Evaluator
from unirl.trainer.micro_batch import MICRO_BATCH, MicroBatch
from unirl.trainer.monitoring import Monitor, reward_metrics, sync_metrics
from unirl.trainer.overlap import OverlappedScoring
from unirl.trainer.publishing import Publisher
from unirl.trainer.refill import StepSamples
from unirl.trainer.requests import RequestMaker, check_version
from unirl.trainer.residency import Phases, Roles
from unirl.trainer.run_state import RunState
from unirl.types.evaluation import EvalResult
from unirl.types.facts import ModelFacts
from unirl.types.protocols import DataSource, State, TrainingProgress
from unirl.types.results import values
from unirl.types.rollout_resp import AdvantageEstimator, RolloutResp
from unirl.types.sampling import SamplingT


class Trainer(ABC, Generic[SamplingT]):
    """The loop of every domain. A domain says which track it trains, and how the sampling of a request is pinned."""

    track: ClassVar[str]
    """The name of the track that is scored and trained."""

    def __init__(
        self,
        config: RecipeConfig,
        roles: Roles,
        data: DataSource[Prompt],
        sampling: SamplingT,
        advantage: AdvantageEstimator,
        kl: KLController | None,
        drops: DropBudget,
        state: RunState,
        publisher: Publisher,
        parity: ParityGate | None,
        phases: Phases,
        micro_batch: MicroBatch | None,
    ) -> None:
        """
        Args:
            kl: feedback on the loss's KL coefficient; None for a loss that asks for none.
            micro_batch: chooses the micro-batch; None for a recipe that sets it.
        """
        self.config = config
        self.roles = roles
        self.data = data
        self.publisher = publisher
        self.advantage = advantage
        self.kl = kl
        self.drops = drops
        self.state = state
        self.tracker = state.tracker
        self.phase = phases
        self.micro_batch = micro_batch
        self.pool = phases.pool
        self.needs = needs_of(config)
        self.monitor = Monitor(state.tracker, config, self.track, parity, self.needs.advantages)
        self.requests: RequestMaker[SamplingT] = RequestMaker(
            track=self.track,
            facts=roles.rollout.facts(),
            sampling=sampling,
            eval_sampling=sampling.for_evaluation(config.evaluation.settings(sampling.evaluation_keys)),
            eval_weights=config.evaluation.weights,
            pin=self.pinned,
        )
        self.overlap = OverlappedScoring(roles.rollout, roles.reward, config.reward_parts)
        self.evaluator = Evaluator(self.requests, roles, data, phases, config.evaluation)
        self.stop_signal: int | None = None

    @abstractmethod
    def pinned(self, sampling: SamplingT, step: int) -> SamplingT:
        """The sampling settings for the request of training step `step`, with nothing left for the engine to decide."""

    @property
    def facts(self) -> ModelFacts:
        """The facts of the model that generates."""
        return self.requests.facts

    def train(self) -> None:
        """Run the loop from the last checkpoint to the last step."""
        self.state.restore()
        if self.state.step >= self.config.num_rollouts:
            self.tracker.note(
                f"the {self.state.step} steps of this run are done, so nothing is left to train; set a larger "
                "num_rollouts to train on"
            )
        self.evaluator.check_prompts()
        self.state.write_config()
        chosen = self.state.chosen
        if self.micro_batch is not None:
            chosen[MICRO_BATCH] = self.micro_batch.choose(chosen[MICRO_BATCH])
        if self.state.step == 0 and self.config.evaluation.enabled:
            self.evaluate()
        while self.state.step < self.config.num_rollouts:
            remembered = self.state.remembered()
            try:
                with self.tracker.timers.phase("step"):
                    resp = self.produce(self.state.step)
                    self.learn(self.state.step, resp)
            except MemoryShortageError as error:
                clear_frames(error.__cause__.__traceback__ if error.__cause__ else None)
                raise MemoryShortageError(f"{error}\n  {self._rescue(remembered)}") from error.__cause__
            self._finish_step()
        self.state.checkpoints.publish_final(self.state.step)
        self.monitor.summarize(self.state.step)

    def produce(self, step: int) -> RolloutResp:
        """The samples of one step, scored and credited."""
        self.pool.step = step
        with self.phase("sync"):
            published = self.publisher.publish(step, self.state.version)
        samples = self._generate(step, published)
        self.tracker.record(sync_metrics(published) | samples.waits)
        req, resp = samples.everything()
        resp = self.drops.admit(resp)
        selected = samples.select(req, resp, self.track)
        self.monitor.account(step + 1, resp, selected)
        credited = self.credit(step, selected.resp, resp)
        self.monitor.keep_samples(step + 1, selected.req, credited.tracks[self.track], self.roles.rollout.preview)
        return credited

    def _generate(self, step: int, published: SyncReport) -> StepSamples:
        """Generate and score until the step has the samples that it needs: once, or as often as `refill` asks for."""
        samples = StepSamples(self.config.refill, self.config.batch_size)
        size = None
        while not samples.is_complete:
            prompts = self.data.take(self.config.batch_size, size)
            size = prompts[0].size
            req = self.requests.training(prompts, step, published)
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
            if self.micro_batch is not None:
                self.state.chosen[MICRO_BATCH] = self.micro_batch.measure(track, self.progress(step))
            self.monitor.check_parity(track, self.roles.stack.measure_parity)
            result = self.roles.stack.train_track(track, self.progress(step))
        self.state.version = self.roles.backend.version()
        metrics = values(result.metrics)
        self.tracker.record(metrics | explained_variance(metrics))
        self.monitor.watch_parity(metrics, samples_are_fresh=self.publisher.interval == 1)
        if self.kl is not None and "train/kl" in metrics:  # absent if all updates of the step were skipped
            self.kl.observe(metrics["train/kl"], int((track.weight > 0).sum()))
        self.pool.release(step)

    def evaluate(self) -> EvalResult:
        """Score held-out prompts with fixed seeds; log under the number of finished steps."""
        result = self.evaluator.evaluate(self.state.version)
        self.tracker.eval(self.state.step, result)
        return result

    def _finish_step(self) -> None:
        """Evaluate, flush the files, checkpoint, each when due; then stop if a signal asked for it."""
        self.state.step += 1
        self.tracker.record(self.pool.memory())
        self.tracker.log_step(self.state.step)
        last = self.state.step == self.config.num_rollouts
        if self._is_due(self.config.evaluation.eval_steps) or (last and self.config.evaluation.eval_steps):
            self.evaluate()
        self.tracker.flush()
        if self._is_due(self.config.save_interval) or last or self.stop_signal is not None:
            with self.phase("checkpoint"):
                self.state.save()
        if self.stop_signal is not None and not last:
            raise self.state.stopped_by(self.stop_signal)

    def _rescue(self, remembered: Mapping[str, State]) -> str:
        """Save the last finished step after memory ran out in the next one, and say which checkpoint there is.

        Ranks that wait for each other cannot save, and weights that were updated are not those of the last step.
        """
        state, saved = self.state, [each.step for each in self.state.checkpoints.checkpoints()]
        is_unchanged = self.roles.backend.version() == state.version
        if state.step not in saved and state.step > 0 and self.roles.train_ranks == 1 and is_unchanged:
            try:
                with self.phase("checkpoint"):
                    state.save(remembered)
                saved.append(state.step)
            except UniRLError as error:
                return f"Saving step {state.step} failed, too: {error}"
        if not saved:
            return "There is no checkpoint. Lower save_interval, so that a later failure loses less"
        return f"Step {max(saved)} is saved. Continue, with the setting above, with:\n  {state.resume_command}"

    def _is_due(self, every: int) -> bool:
        return every > 0 and self.state.step % every == 0

    def request_stop(self, signum: int) -> None:
        """Finish the step that runs, save, and leave. Signal handlers call this."""
        self.stop_signal = signum
