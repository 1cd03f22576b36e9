"""Evaluation: the loop without a learner, on held-out prompts, with settings and randomness of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from unirl.config.errors import RewardError, WeightsLostError
from unirl.config.evaluation import EvaluationConfig
from unirl.data.data_source import by_size
from unirl.data.datasets import Prompt
from unirl.plan.prompts import prompts_of
from unirl.reward.service import RewardService, root_rows
from unirl.rollout.engine.base import RolloutEngine
from unirl.trainer.learner import Learner
from unirl.trainer.monitoring import facts_of, scored_rows
from unirl.trainer.requests import RequestMaker
from unirl.trainer.residency import Phases
from unirl.types.evaluation import EvalResult
from unirl.types.primitives import Decoded, Preview
from unirl.types.protocols import DataSource
from unirl.types.rollout_req import RolloutReq
from unirl.types.rollout_resp import RolloutResp, RolloutTrack

EVALUATION = -1
"""The step number under which workers store the rows of an evaluation."""


@dataclass(frozen=True)
class Evaluator:
    """Generates and scores held-out prompts, size by size."""

    requests: RequestMaker
    rollout: RolloutEngine
    reward: RewardService
    learners: Sequence[Learner]
    track: str
    """The name of the track that is scored."""
    data: DataSource[Prompt]
    phase: Phases
    settings: EvaluationConfig

    def check_prompts(self) -> None:
        """Check that every prompt of this run can be taken and scored, before an hour of it has passed."""
        prompts = prompts_of(self.data, self.settings)
        self.requests.primitives(prompts)
        self.reward.check_prompts(
            [prompt.text for prompt in prompts],
            [prompt.metadata for prompt in prompts],
            [prompt.place for prompt in prompts],
        )

    def evaluate(self) -> EvalResult:
        """The scores of all held-out prompts."""
        prompts = self.data.eval_prompts(self.settings.max_prompts)
        result = EvalResult.joined([self._evaluate_size(same_size) for same_size in by_size(prompts)])
        self.phase.pool.release(EVALUATION)
        return result

    def _evaluate_size(self, prompts: Sequence[Prompt]) -> EvalResult:
        req, resp = self.sample(prompts)
        with self.phase("eval", self.track):
            resp = self.reward.score_and_attach(req, resp)
            track = resp.with_scores_above(self.track)
            return eval_result(req.select(root_rows(req, resp, track)), self.track, track, self.rollout.preview)

    def sample(self, prompts: Sequence[Prompt]) -> tuple[RolloutReq, RolloutResp]:
        """Samples of prompts of one size, with the settings of evaluation. Their rows live until the next call."""
        versions = {track: learner.version for learner in self.learners for track in learner.tracks}
        req = self.requests.evaluation(prompts, versions)
        self.phase.pool.release(EVALUATION)
        self.phase.pool.step = EVALUATION
        while True:  # an engine restarts its server only a few times, and then raises another error
            for learner in self.learners:
                with self.phase("sync", learner.track):
                    learner.roles.sync.push(learner.version, req.tracks[learner.track].weights)
            with suppress(WeightsLostError), self.phase("eval", self.learners[0].track):
                return req, self.rollout.generate(req)


def eval_result(req: RolloutReq, name: str, track: RolloutTrack, preview: Callable[[Decoded], Preview]) -> EvalResult:
    """The scores of an evaluation with its prompts and media. Rows without a reward are counted.

    Args:
        req: the row of the request that each row of the track descends from.
        name: of the track.
        track: the last track, with the scores of the rows above it.

    Raises:
        RewardError: 6002 when no row has a reward.
    """
    rows = scored_rows(track)
    unscored = len(track) - len(rows)
    if not rows:
        failure = next(failures[0] for failures in track.failures or () if failures)
        raise RewardError.of_code(failure.code)(
            f"no sample of the evaluation could be scored. The first: {failure.why}"
        )
    if unscored:
        req, track = req.select(rows), track.select(rows)
    assert track.rewards is not None and track.decoded is not None
    return EvalResult(
        sample_ids=tuple(track.sample_ids),
        group_ids=tuple(req.group_ids),
        prompts=tuple(req.prompts()),
        prompt_image_uris=tuple(req.prompt_image_uris()),
        rewards=track.rewards,
        components=dict(track.component_rewards or {}),
        logged_rewards=dict(track.logged_rewards or {}),
        answers=None if track.answers is None else tuple(track.answers),
        facts=tuple(facts_of(req, track)),
        unscored=unscored,
        media=preview(track.decoded),
        track=name,
    )
