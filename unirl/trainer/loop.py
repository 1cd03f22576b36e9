"""The loop that post-trains any generative policy: generate samples, score them, learn from the advantages, repeat.

for step in steps:
    samples = _samples_of(step)                # publish weights, generate P prompts x N samples, score them
    resp = drops.admit(samples)                # weight 0 for a sample without a reward, within the budget for failures
    selected = samples.select(resp)            # with `refill`: the groups whose rewards differ
    credited = credit(step, selected)          # rewards to one advantage per sample of every track
    learn(step, credited)                      # each policy learns from its track: unirl/trainer/learner.py
    _finish_step()                             # write the files, look for alarms; evaluate, checkpoint, when due

With `asynchronous.max_staleness`, later steps are generated while the weights learn: unirl/trainer/generation.py, and
unirl/trainer/free_generation.py for an engine that does not wait for the end of a step.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from traceback import clear_frames
from typing import ClassVar, Literal

from unirl.config.errors import AlarmError, MemoryShortageError, UniRLError
from unirl.config.recipe import RecipeConfig
from unirl.distributed.weight_sync.base import SyncReport
from unirl.reward.failures import DropBudget
from unirl.reward.service import RewardService
from unirl.rollout.engine.base import RolloutEngine
from unirl.trainer.engine_turns import FreeEngine, StepEngine
from unirl.trainer.evaluation import Evaluator
from unirl.trainer.free_generation import generation_of
from unirl.trainer.generation import PromptsAhead, StepSampler
from unirl.trainer.learner import Learner, fraction_done
from unirl.trainer.monitoring import (
    Monitor,
    busy_shares,
    reward_metrics,
    selection_metrics,
    staleness_metrics,
    sync_metrics,
)
from unirl.trainer.overlap import OverlappedScoring
from unirl.trainer.part_sampling import JoiningEngine, PartSampling
from unirl.trainer.profiling import profiled
from unirl.trainer.refill import StepSamples
from unirl.trainer.requests import RequestMaker
from unirl.trainer.residency import Phases
from unirl.trainer.run_state import RunState
from unirl.trainer.watchdog import Watchdog
from unirl.types.credit import CREDIT_RULES, CreditName
from unirl.types.evaluation import EvalResult
from unirl.types.protocols import State
from unirl.types.results import values
from unirl.types.rollout_req import RolloutReq
from unirl.types.rollout_resp import AdvantageEstimator, RolloutResp


def joining_engine(learners: Sequence[Learner]) -> JoiningEngine | None:
    """The engine on the training devices, if the run has one. Only runs of one policy have."""
    engines = [each.roles.joining for each in learners if each.roles.joining is not None]
    return JoiningEngine(engines[0]) if engines else None


@contextmanager
def libraries_not_collected() -> Iterator[None]:
    """Within the block, the garbage collector leaves out what exists at its beginning: imported libraries and models.

    They are most of the objects of a process, and looking through them can take a tenth of a run of tiny networks.
    """
    if gc.get_freeze_count():  # the process that calls this has done it already
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class Trainer:
    """The loop of every domain. A domain names its tracks."""

    track: ClassVar[str]
    """The name of the track that is scored. In a recipe of several tracks it is the last one."""
    num_tracks: ClassVar[Literal["one", "several", "any"]] = "one"
    """The number of tracks of the recipes of this domain."""

    def __init__(
        self,
        config: RecipeConfig,
        learners: Sequence[Learner],
        rollout: RolloutEngine,
        reward: RewardService,
        requests: RequestMaker,
        prompts: PromptsAhead,
        advantage: AdvantageEstimator,
        drops: DropBudget,
        state: RunState,
        phases: Phases,
        credit_rule: CreditName = "mean",
    ) -> None:
        """
        Args:
            learners: the policies, that of the first track first.
            rollout: the engine that samples all tracks.
            advantage: for the rule `leave_one_out`, an estimator that leaves one out.
            credit_rule: the reward of a row of a parent track, and which of its children are trained.
        """
        self.config = config
        self.learners = learners
        self.rollout = rollout
        self.requests = requests
        self.credit_rule = credit_rule
        self.prompts = prompts
        self.data = prompts.source
        self.advantage = advantage
        self.drops = drops
        self.state = state
        self.tracker = state.tracker
        self.phase = phases
        self.pool = phases.pool
        tracks = [each for learner in learners for each in learner.tracks.values()]
        compares = any(each.needs.advantages for each in tracks if each.is_trained)
        self.monitor = Monitor(state.tracker, config, self.track, len(tracks) > 1, compares)
        self.watchdog = Watchdog(config.watch, state.tracker)
        self.max_staleness = config.asynchronous.max_staleness
        sampler = StepSampler(
            prompts=prompts,
            requests=requests,
            scoring=OverlappedScoring(
                sampling=PartSampling(pool=self.pool, rollout=rollout, joining=joining_engine(learners)),
                reward=reward,
                parts=config.reward_parts,
                scores_at_once=config.asynchronous.is_concurrent,
                slice_tokens=config.asynchronous.slice_tokens,
            ),
            phase=phases,
            learners=learners,
            refill=config.refill,
            batch_size=config.batch_size,
            note=state.tracker.note,
            engine=FreeEngine(self.publish_live) if config.asynchronous.is_free else StepEngine(self.publish_again),
        )
        self.generation = generation_of(config, sampler)
        self.evaluator = Evaluator(
            requests, rollout, reward, learners, self.track, prompts.source, phases, config.evaluation
        )
        self.stop_signal: int | None = None

    @property
    def policy(self) -> Learner:
        """The only policy. Raises ValueError if there are several."""
        if len(self.learners) != 1:
            raise ValueError(f"this run trains {', '.join(each.track for each in self.learners)}: name one of them")
        return self.learners[0]

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
        for learner in self.learners:
            for track in learner.tracks.values():
                track.choose_micro_batch()
        if self.state.step == 0 and self.config.evaluation.enabled:
            self.evaluate()
        try:
            with self.state.saved_at_the_end(), libraries_not_collected():
                self.generation.generate_again(self.state.step, self.publish)
                self._steps()
        finally:
            self.generation.stop()
        self.state.checkpoints.publish_final(self.state.step)
        self.monitor.summarize(self.state.step)

    def _steps(self) -> None:
        while self.state.step < self.config.num_rollouts:
            self.state.check_saving()
            remembered = self.state.remembered()
            try:
                with self._profiled(), self.tracker.timers.phase("step"):
                    resp = self.produce(self.state.step)
                    self.learn(self.state.step, resp)
            except MemoryShortageError as error:
                clear_frames(error.__cause__.__traceback__ if error.__cause__ else None)
                raise MemoryShortageError(f"{error}\n  {self._rescue(remembered)}") from error.__cause__
            if self.max_staleness:
                self.tracker.record(busy_shares(self.tracker.timers))
            self._finish_step()

    def _profiled(self) -> AbstractContextManager[None]:
        """Profiles the next step if the recipe asks for it."""
        return profiled(self.config.profile, self.state.step + 1, self.tracker.timers, self.tracker.run.root)

    def produce(self, step: int) -> RolloutResp:
        """The samples of one step, scored and credited."""
        self.pool.step = step
        samples = self._samples_of(step)
        req, resp = samples.everything()
        resp = self.drops.admit(resp)
        selected = samples.select(req, resp, self.track)
        self.monitor.account(step + 1, req, resp, selected)
        credited = self.credit(step, selected.resp, resp)
        self.monitor.keep_samples(step + 1, selected.req, credited, self.rollout)
        self.monitor.keep_rows(step + 1, credited, self.rollout.rows)
        return credited

    def _samples_of(self, step: int) -> StepSamples:
        """The scored samples of a step. Begins to generate the steps whose weights are those of this one."""
        generated = self.generation.samples(step, self.publish)
        samples = generated.samples
        for learner in self.learners:
            self.monitor.record(learner.label, sync_metrics(generated.published[learner.track]))
            if self.max_staleness:
                track = samples.everything()[1].tracks[learner.track]
                self.monitor.record(learner.label, staleness_metrics(learner.version - track.weight_version))
        if self.max_staleness:
            self.tracker.record({"queue/steps_ahead": self.generation.ahead})
        self.tracker.record(samples.waits)
        return samples

    def publish(self, step: int) -> dict[str, SyncReport]:
        """Bring the weights at the beginning of `step` to the engines. Returns the reports by track."""
        published: dict[str, SyncReport] = {}
        for learner in self.learners:
            with self.phase("sync", learner.track):
                published |= dict.fromkeys(learner.tracks, learner.publish(step))
        return published

    def publish_live(self) -> dict[str, SyncReport]:
        """Bring the live weights to the engines."""
        return self.publish(self.state.step)

    def publish_again(self, req: RolloutReq) -> None:
        """Bring the weights of a request to engines that lost them."""
        for learner in self.learners:
            with self.phase("sync", learner.track):
                spec = req.tracks[learner.track]
                learner.roles.sync.push(spec.weight_version, spec.weights)

    def credit(self, step: int, resp: RolloutResp, scored: RolloutResp | None = None) -> RolloutResp:
        """Rewards up the tree and one advantage per row; a track without rewards takes its parent's advantages.

        The reward of a row above the last track is its own, if the recipe scores its track, plus that of its children.

        A rule that trains only the best child of a parent sets the weight of the others to 0 after their advantages are
        known, so that the best one is compared with them.

        Args:
            scored: all samples of the step, whose rewards are reported; `resp` when absent.
        """
        scored = (resp if scored is None else scored).propagate_rewards(self.credit_rule)
        resp = resp.propagate_rewards(self.credit_rule)
        components = {part for track in resp.tracks.values() for part in track.component_rewards or {}}
        for name in resp.by_depth():
            track = resp.tracks[name]
            if track.rewards is None:
                resp = resp.inherit_advantages(name)
                continue
            progress = fraction_done(step, self.config.num_rollouts)
            credited, metrics = track.compute_advantages(self.advantage, progress, name, components)
            resp = resp.with_track(name, credited)
            self.monitor.record(name, values(metrics) | reward_metrics(scored.tracks[name]))
            if CREDIT_RULES[self.credit_rule].best_only:
                resp = resp.only_best(name)
                self.monitor.record(name, selection_metrics(track, resp.tracks[name]))
        return resp

    def learn(self, step: int, resp: RolloutResp) -> None:
        """Update the weights of every policy on one step's samples."""
        for learner in self.learners:
            if not learner.is_trained:
                continue
            with self.phase("train", learner.track), self.generation.learning():
                metrics = learner.learn(step, resp, self.monitor)
            for track, values_of_track in metrics.items():
                self.monitor.watch_updates(values_of_track)
                self.monitor.record(track, values_of_track)
        self.pool.release(step)
        self.prompts.learned(step)

    def evaluate(self) -> EvalResult:
        """Score held-out prompts with fixed seeds; log under the number of finished steps."""
        self.generation.take_engine()  # evaluations sample from other weights
        result = self.evaluator.evaluate()
        self.tracker.eval(self.state.step, result)
        return result

    def _finish_step(self) -> None:
        """Evaluate, flush the files, checkpoint, each when due; then stop if a signal asked for it."""
        self.state.step += 1
        self.tracker.record(self.pool.memory())
        metrics = self.tracker.log_step(self.state.step)
        last = self.state.step == self.config.num_rollouts
        if self._is_due(self.config.evaluation.eval_steps) or (last and self.config.evaluation.eval_steps):
            self.evaluate()
        self.tracker.flush()
        alarm = self.watchdog.look(self.state.step, metrics)
        if alarm is not None and last:  # nothing is left to be ended
            self.tracker.warn(str(alarm))
            alarm = None
        if alarm is not None and self.config.watch.on_alarm == "stop":
            raise alarm
        if self._is_due(self.config.save_interval) or last or self.stop_signal is not None or alarm is not None:
            self._save()
        if alarm is not None:
            self.state.finish_saving()
            raise AlarmError(f"{alarm}.\nStep {self.state.step} is saved. Go on with:\n  {self.state.resume_command}")
        if self.stop_signal is not None and not last:
            self.state.finish_saving()
            raise self.state.stopped_by(self.stop_signal)

    def _save(self, remembered: Mapping[str, State] | None = None) -> None:
        with self.phase("checkpoint", self.learners[0].track):
            self.state.save(remembered, self.phase.turn)

    def _rescue(self, remembered: Mapping[str, State]) -> str:
        """Save the last finished step after memory ran out in the next one, and say which checkpoint there is.

        Ranks that wait for each other cannot save, and weights that were updated are not those of the last step.
        """
        try:
            self.state.finish_saving()
        except UniRLError as error:
            return f"Saving an earlier step failed, too: {error}"
        state, saved = self.state, [each.step for each in self.state.checkpoints.checkpoints()]
        can_save = all(each.roles.train_ranks == 1 and each.is_unchanged() for each in self.learners)
        if state.step not in saved and state.step > 0 and can_save:
            try:
                self._save(remembered)
                self.state.finish_saving()
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
