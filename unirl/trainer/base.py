"""The loop that post-trains any generative policy: produce samples, score them, learn from them, again."""

from __future__ import annotations

import json
import math
import signal
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unirl.config.errors import CheckpointError, Interrupted, Preempted
from unirl.config.recipe import RecipeConfig
from unirl.data.datasets import Prompt
from unirl.distributed.group.handle import Handle
from unirl.distributed.tensor.transport import ColumnStore
from unirl.distributed.weight_sync.base import WeightSync
from unirl.tracking.tracker import Tracker
from unirl.train.backend.checkpoint import Checkpoint, CheckpointStore
from unirl.trainer.evaluation import EvalResult, score_table
from unirl.trainer.residency import Residency
from unirl.types.protocols import DataSource, State, Stateful
from unirl.types.results import Metrics, values
from unirl.types.rollout_req import RolloutReq
from unirl.types.rollout_resp import AdvantageEstimator, RolloutResp, RolloutTrack


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
    columns: ColumnStore
    stateful: dict[str, Stateful]
    environment: dict[str, str]
    """What decides bits outside the recipe: library versions, CPU capability, thread count."""


class Trainer(ABC):
    """The loop of every domain. A domain says how a request is made and which track is which."""

    def __init__(self, parts: Parts, roles: Roles) -> None:
        self.parts = parts
        self.roles = roles
        self.config = parts.config
        self.tracker = parts.tracker
        self.residency = Residency(roles.rollout, roles.reward, roles.backend, enabled=parts.config.offload_idle)
        self.step = 0
        """Steps finished; the number of the step that runs next."""
        self.cursor = 0
        """Prompts drawn."""
        self.version = 0
        """Optimizer updates done."""
        self.stop_signal: int | None = None

    @abstractmethod
    def make_request(self, prompts: Sequence[Prompt], step: int) -> RolloutReq:
        """The rows and the tree of tracks of training step `step`, with sampling pinned."""

    @abstractmethod
    def make_eval_request(self, prompts: Sequence[Prompt]) -> RolloutReq:
        """The rows of an evaluation: own sampling settings, randomness that does not depend on the step."""

    @property
    @abstractmethod
    def track(self) -> str:
        """The name of the track that is scored and trained."""

    def train(self) -> None:
        """Run the loop from the last checkpoint to the last step."""
        self.restore()
        if self.step == 0 and self.config.evaluation.enabled:
            self.evaluate()
        while self.step < self.config.num_rollouts:
            with self.tracker.timers.phase("step"):
                resp = self.produce(self.step)
                self.learn(self.step, resp)
            self.finish_step()
        self.tracker.finish()

    def produce(self, step: int) -> RolloutResp:
        """Samples of one step, scored and credited."""
        self.parts.columns.begin(step)
        prompts = self.parts.data.take(self.cursor, self.config.batch_size)
        req = self.make_request(prompts, step)
        with self.phase("sync"):
            report = self.parts.sync.push(step, self.version)
        with self.phase("generate"):
            resp = self.roles.rollout.generate(req)
        with self.phase("reward"):
            resp = self.roles.reward.score_and_attach(req, resp)
        self.cursor += len(prompts)
        self.tracker.record({"sync/version": report.version, "sync/bytes": report.num_bytes})
        return self.credit(resp)

    def credit(self, resp: RolloutResp) -> RolloutResp:
        """Rewards to one advantage per row."""
        resp = resp.propagate_rewards()
        for name, track in resp.tracks.items():
            credited, metrics = track.compute_advantages(self.parts.advantage)
            resp = resp.with_track(name, credited)
            self.tracker.record(values(metrics) | reward_metrics(credited))
        return resp

    def learn(self, step: int, resp: RolloutResp) -> None:
        """Update the policy on one step's samples."""
        track = resp.tracks[self.track]
        self._check_version(track)
        progress = step / max(self.config.num_rollouts - 1, 1)
        with self.phase("train"):
            result = self.roles.stack.train_track(track, progress)
        self.version = self.roles.backend.version()
        self._log(step, track, result.metrics)
        self.parts.columns.release(step)

    def _check_version(self, track: RolloutTrack) -> None:
        stale = int(self.version - track.weight_version.min())
        assert stale == 0, f"the engine sampled from weights {stale} updates old, and the synchronous loop allows none"

    def _log(self, step: int, track: RolloutTrack, metrics: Metrics) -> None:
        done = step + 1
        self.tracker.record(values(metrics))
        self.tracker.ledger(done, generated=len(track), scored=int((track.weight > 0).sum()))
        if self.config.tracking.sample_steps and done % self.config.tracking.sample_steps == 0:
            self.log_samples(done, track)

    def log_samples(self, done: int, track: RolloutTrack) -> None:
        """A few samples of a step, for people to look at."""
        shown = track.slice(0, min(len(track), self.config.tracking.max_samples))
        self.tracker.samples(
            done, self.roles.rollout.preview(shown.decoded), sample_rows(shown, self.prompts_of(shown))
        )

    def prompts_of(self, track: RolloutTrack) -> list[str]:
        """The prompt of every row, for captions."""
        return [self._prompt_of_group[group] for group in track.group_ids]

    def finish_step(self) -> None:
        """The end of a step: evaluate, flush the files, checkpoint; then stop if a signal asked for it."""
        self.step += 1
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
        """Time a phase and keep on the device only what it needs."""
        with self.tracker.timers.phase(name):
            self.residency.enter(name)
            yield

    def evaluate(self) -> EvalResult:
        """Score held-out prompts with fixed seeds; log under the number of finished steps."""
        block = self.config.evaluation
        prompts = self.parts.data.eval_prompts(block.max_prompts)
        with self.phase("eval"):
            req = self.make_eval_request(prompts)
            track = self.roles.reward.score_and_attach(req, self.roles.rollout.generate(req)).tracks[self.track]
            result = score_table(req, track, self.roles.rollout.preview(track.decoded))
        self.tracker.eval(self.step, result)
        self.parts.columns.release(self.parts.columns.step)
        return result

    # Checkpoints

    def save(self) -> None:
        """Publish a checkpoint of everything that changes between steps."""
        with self.parts.checkpoints.stage(self.step) as folder:
            self.roles.backend.save(str(folder / "policy"))
            write_json(folder / "trainer.json", self.state_dict())
        self.tracker.event("ckpt.commit", step=self.step)

    def restore(self) -> None:
        """Continue after the last valid checkpoint, with the files cut back to it; or start at 0."""
        found = self.parts.checkpoints.resume_point(self.config.resume)
        for reason in found.skipped:
            self.tracker.event("ckpt.skip", reason=reason)
        if found.checkpoint is None:
            self.tracker.truncate(-1)
            return
        self.load(found.checkpoint)
        self.tracker.truncate(self.step)

    def load(self, checkpoint: Checkpoint) -> None:
        """Take over a checkpoint's state."""
        state = read_json(checkpoint.path / "trainer.json")
        self._check_environment(state["environment"], checkpoint.path)
        self.roles.backend.load(str(checkpoint.path / "policy"))
        self.load_state_dict(state)

    def state_dict(self) -> State:
        """Everything outside the weights that changes between steps."""
        return {
            "step": self.step,
            "cursor": self.cursor,
            "version": self.version,
            "environment": self.parts.environment,
            "stateful": {name: part.state_dict() for name, part in self.parts.stateful.items()},
        }

    def load_state_dict(self, state: State) -> None:
        """The inverse of `state_dict`."""
        self.step, self.cursor, self.version = state["step"], state["cursor"], state["version"]
        if state["stateful"].keys() != self.parts.stateful.keys():
            raise CheckpointError(
                f"the checkpoint holds state of {sorted(state['stateful'])}, this recipe has {sorted(self.parts.stateful)}: "
                "resume with the recipe that wrote it, or start anew with resume=none",
                code=7002,
            )
        for name, part in self.parts.stateful.items():
            part.load_state_dict(state["stateful"][name])

    def _check_environment(self, saved: dict[str, str], path: Path) -> None:
        now = self.parts.environment
        changed = [
            f"{key}: {saved.get(key)} -> {now.get(key)}"
            for key in sorted(saved | now)
            if saved.get(key) != now.get(key)
        ]
        if changed:
            self.tracker.warn(
                f"{path.name} was written in another environment ({'; '.join(changed)}): "
                "the run continues, but its bits may differ from those of an unbroken run"
            )


def reward_metrics(track: RolloutTrack) -> dict[str, float]:
    """Reward statistics over rows of weight > 0."""
    assert track.rewards is not None and track.advantages is not None
    alive = track.weight > 0
    rewards = track.rewards[alive].double()
    metrics = {
        "rollout/reward_mean": float(rewards.mean()),
        "rollout/reward_std": float(rewards.std(correction=0)),
        "rollout/reward_min": float(rewards.min()),
        "rollout/reward_max": float(rewards.max()),
        "rollout/adv_abs_mean": float(track.advantages[alive].abs().mean()),
    }
    for name, scores in (track.component_rewards or {}).items():
        chosen = scores[alive].double()
        metrics |= {f"reward/{name}_mean": float(chosen.mean()), f"reward/{name}_std": float(chosen.std(correction=0))}
    return metrics


def write_json(path: Path, state: State) -> None:
    """State as JSON that a person can read; non-finite numbers are a bug."""
    path.write_text(json.dumps(state, indent=1, sort_keys=True, allow_nan=False))


def read_json(path: Path) -> Any:
    """The state that `write_json` wrote."""
    return json.loads(path.read_text())
