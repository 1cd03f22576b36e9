"""Generation that does not wait for the loop: the engine gets new weights between two parts of a step.

The loop keeps up to `asynchronous.steps_ahead` steps waiting. Samples that are older than `max_staleness` steps when
their turn comes are sampled again, dropped, or trained with a correction (`asynchronous.too_old`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from unirl.config.recipe import AsynchronousConfig, RecipeConfig
from unirl.reward.service import concat_scored
from unirl.trainer.engine_turns import FreeEngine, Published
from unirl.trainer.generation import GeneratedStep, GenerationAhead, StepSampler
from unirl.types.rollout_resp import RolloutResp
from unirl.types.rows import rows_by_key


@dataclass(kw_only=True)
class FreeGeneration(GenerationAhead):
    """Generates steps in a thread, whose engine gets the weights of every step as soon as they exist."""

    engine: FreeEngine
    config: AsynchronousConfig
    versions: list[dict[str, int]] = field(default_factory=list)
    """By track, updates behind the weights at the beginning of each step of this process."""

    def take_engine(self) -> None:
        """Keep the engine for the loop as soon as the part that is sampled now is done."""
        with self.waiting():
            self.engine.reserve()

    def remember_weights(self, step: int) -> None:
        self.versions.append({name: each.version for each in self.sampler.learners for name in each.tracks})
        self.oldest = self.versions[max(len(self.versions) - 1 - self.config.max_staleness, 0)]

    def needs_weights(self, begun: Sequence[int]) -> bool:
        return True

    def give_engine(self, published: Published, begun: Sequence[int]) -> None:
        self.engine.give(published)
        super().give_engine(published, begun)

    def check_age(self, generated: GeneratedStep) -> None:
        """Do with samples that are too old what the recipe says."""
        samples = generated.samples
        req, resp = samples.everything()
        old = too_old(resp, self.oldest)
        samples.num_too_old = sum(group in old for group in resp.root_groups(list(resp.tracks)[-1]))
        if not old or self.config.too_old == "correct":
            return
        if self.config.too_old == "drop":
            samples.dropped = old
            return
        rows = [row for row, group in enumerate(resp.root_track().group_ids) if group in old]
        kept = [row for row, group in enumerate(resp.root_track().group_ids) if group not in old]
        again = self.sampler.sample_again(generated.step, req.select(rows))
        both = concat_scored([resp.select(kept), again]) if kept else again
        place = {row: number for number, row in enumerate([*kept, *rows])}
        samples.resps = [both.select([place[row] for row in range(len(resp))])]
        samples.num_replaced = samples.num_too_old

    def generate_again(self, first: int, publish: Callable[[int], Published]) -> None:
        """The steps that were under way are generated from the weights of the checkpoint, by `samples`."""
        self.next_step = first

    def stop(self) -> None:
        super().stop()
        self.engine.stop()


def too_old(resp: RolloutResp, oldest: Mapping[str, int]) -> list[str]:
    """The groups of root samples of which a sample comes from weights before `oldest`, updates by track."""
    found: set[str] = set()
    for name, track in resp.tracks.items():
        is_old = (track.weight_version < oldest[name]).tolist()
        found |= {group for group, old in zip(resp.root_groups(name), is_old, strict=True) if old}
    return [group for group in rows_by_key(resp.root_track().group_ids) if group in found]


def generation_of(config: RecipeConfig, sampler: StepSampler) -> GenerationAhead:
    """Generates the steps of a run as its recipe says."""
    settings, pool = config.asynchronous, sampler.phase.pool
    if isinstance(sampler.engine, FreeEngine):
        return FreeGeneration(
            sampler=sampler, pool=pool, is_concurrent=True, num_steps=config.num_rollouts,
            steps_ahead=settings.num_ahead, engine=sampler.engine, config=settings,
        )  # fmt: skip
    return GenerationAhead(sampler, pool, settings.is_concurrent, config.num_rollouts, settings.num_ahead)
