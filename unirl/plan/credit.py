"""Checks rewards and credit: scorers fit the samples, a reward reaches every track, and the rule of credit fits."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence

from unirl.algorithms.base import StageAlgorithm
from unirl.algorithms.shared.advantages import SIBLING_BASELINE, GroupAdvantage
from unirl.config.build import build
from unirl.config.errors import IncompatibleError, InvalidValueError
from unirl.config.load import Recipe
from unirl.config.node import Node, nodes_below
from unirl.config.plugins import is_foreign
from unirl.config.recipe import RecipeConfig, WritesTexts
from unirl.plan.placement import capabilities_of
from unirl.reward.base import RewardScorer
from unirl.reward.combine import without_reward
from unirl.reward.contract import check_capabilities, check_constructor, check_reads, check_scorer
from unirl.reward.service import same_component
from unirl.types.credit import CREDIT_RULES

# Rewards


def scored_by(recipe: Recipe, scored: str) -> dict[str, Node]:
    """Track to the block whose scorers score its samples. The only track of a recipe has the name "".

    Args:
        scored: the track that the reward scores if a recipe names none.
    """
    config = recipe.config
    if len(recipe.policies) == 1:
        return {"": config.reward}
    own = {name: reward.require("backend", Node) for name, reward in config.track_rewards.items()}
    return own | ({} if config.reward_backend is None else {scored: config.reward_backend})


def check_rewards(recipe: Recipe, scored: str) -> None:
    """Checks the scorers of a recipe against the tracks whose samples they score.

    Args:
        scored: the track that the reward scores if a recipe names none.

    Raises:
        IncompatibleError: 2020. InvalidValueError: 2004 for weights.
    """
    if len(recipe.policies) > 1:
        _check_reached(recipe, scored)
    blocks = scored_by(recipe, scored)
    for name, block in blocks.items():
        _check_declared(block)
        _check_modality(recipe, name, block)
        _check_weights(block)
    for name, reward in recipe.config.track_rewards.items():
        if reward.require("weight", float) == 0:
            raise InvalidValueError(
                f"{reward.path}.weight=0: the scores would not count. Write another number, such as 0.1, or "
                f"~{reward.path} to give the track '{name}' no reward of its own"
            )
    _check_components(blocks)


def _check_declared(block: Node) -> None:
    """A scorer must read columns that exist. One whose class leaves them to its settings is built to be asked."""
    for node in nodes_below(block):
        cls = node.schema.owner
        if not is_foreign(cls) or not issubclass(cls, RewardScorer):
            continue
        check_constructor(cls, node.schema.wired)
        check_capabilities(cls, inspect.getattr_static(cls, "capabilities"))
        reads = inspect.getattr_static(cls, "reads", None)
        if isinstance(reads, (tuple, list, str)):
            check_reads(cls, reads)
        else:
            check_scorer(build(node))


def _check_reached(recipe: Recipe, scored: str) -> None:
    """Each track continues the one before it, so the rewards of the last one reach all of them."""
    trainer, last = recipe.config.trainer.class_name, list(recipe.policies)[-1]
    if scored != last:
        raise IncompatibleError(
            f"trainer: {trainer} scores the track '{scored}', and the last track of this recipe is '{last}', which no "
            "reward would reach. Leave the trainer block out, or set `track` of the class to the last track"
        )


def modalities_of(track: str, config: RecipeConfig) -> tuple[str, ...]:
    """The modalities of the samples of a track; () if the pipeline does not say.

    A model of several modalities is trained for those of the trainer.
    """
    pipeline = config.pipeline.schema.owner
    if isinstance(pipeline, WritesTexts) and track in pipeline.text_tracks:
        return ("text",)
    handled = capabilities_of(config.trainer).modalities
    return tuple(each for each in capabilities_of(config.pipeline).modalities if not handled or each in handled)


def scored_modalities(node: Node) -> tuple[str, ...]:
    """The modalities that a scorer scores; () for one that combines others, and for a block that is no scorer.

    An object says it if the class leaves it to its settings.
    """
    declared = capabilities_of(node).modalities
    inner = [each for each in nodes_below(node.values) if issubclass(each.schema.owner, RewardScorer)]
    if declared or inner or not issubclass(node.schema.owner, RewardScorer):
        return declared
    scorer: RewardScorer = build(node)
    return scorer.capabilities.modalities


def _check_modality(recipe: Recipe, track: str, block: Node) -> None:
    """A scorer must be made for what the samples of its track are."""
    config = recipe.policies[track]
    made, pipeline = modalities_of(track, config), config.pipeline.class_name
    for node in nodes_below(block):
        scored = scored_modalities(node)
        if scored and made and not set(scored) & set(made):
            place = f" in track '{track}'" if track else ""
            settings = "" if capabilities_of(node).modalities else ", or the settings with which this one scores it"
            raise IncompatibleError(
                f"{node.path} scores {' and '.join(scored)}, and {pipeline} makes {' and '.join(made)}{place}. "
                f"Write a scorer of {' or '.join(made)} here{settings}{_fitting_place(recipe, scored)}"
            )


def _fitting_place(recipe: Recipe, scored: Sequence[str]) -> str:
    """The end of a refusal: the tracks that a scorer of these modalities could score, and where it would be written."""
    if len(recipe.policies) == 1:
        return ""
    fitting = [name for name, config in recipe.policies.items() if set(scored) & set(modalities_of(name, config))]
    if not fitting:
        return f". No track of this recipe is of {' or '.join(scored)}"
    last = list(recipe.policies)[-1]
    keys = ["reward.backend" if name == last else f"reward.tracks.{name}.backend" for name in fitting]
    return (
        f". A scorer of {' and '.join(scored)} fits the track {' or '.join(fitting)}: write it as {' or '.join(keys)}"
    )


def _check_weights(block: Node) -> None:
    for node in nodes_below(block):
        weights = node.values.get("weights")
        if isinstance(weights, Mapping) and not any(weights.values()):
            raise InvalidValueError(f"{node.path}.weights{without_reward(weights)}")


def _check_components(blocks: Mapping[str, Node]) -> None:
    """No two tracks may have a component of one name, as far as the recipe says the names.

    The reward service checks the names that only the scorers know, at the first samples.
    """
    owner: dict[str, str] = {}
    for track, block in blocks.items():
        scorers = block.values.get("scorers")
        parts = list(scorers) if isinstance(scorers, Mapping) else [str(block.resolved())]
        for part in parts:
            if owner.setdefault(part, track) != track:
                shown = part if isinstance(scorers, Mapping) else block.class_name
                raise IncompatibleError(same_component(shown, owner[part], track))


def credit_notices(recipe: Recipe) -> Iterator[str]:
    """Rewards of tracks that have no effect on training."""
    tracks = list(recipe.policies)
    for name, reward in recipe.config.track_rewards.items():
        upwards = tracks[: tracks.index(name) + 1]
        if not set(upwards) & set(recipe.trained):
            yield (
                f"{reward.path} has no effect on training: {' and '.join(upwards)} only sample"
                f"{'s' * (len(upwards) == 1)}. Its scores are logged"
            )
        if recipe.config.advantage.get("weights", dict) and "weight" in reward.written:
            yield (
                f"{reward.path}.weight has no effect on advantages: advantage.weights has the weight of each component"
            )


def credit_of_tracks(recipe: Recipe, scored: str) -> dict[str, str]:
    """By track, from the last one to the first, the reward of a sample in words. Empty for a recipe of one track."""
    if len(recipe.policies) == 1:
        return {}
    texts = {name: block.class_name for name, block in scored_by(recipe, scored).items()}
    own = recipe.config.track_rewards
    for child, name in recipe.parents.items():
        credit = f"{recipe.credit} over {child}"
        if name in own:
            weight = own[name].require("weight", float)
            text = ("" if weight == 1 else f"{weight:g} x ") + texts[name]
            credit = f"{text} + {credit}" if own[name].require("with_credit", bool) else text
        texts[name] = credit
    return {name: texts[name] for name in reversed(list(recipe.policies)) if name in texts}


# Credit


def check_credit(recipe: Recipe) -> None:
    """Checks the rule of credit of a recipe of several policies.

    Raises:
        IncompatibleError: 2020.
    """
    if len(recipe.policies) == 1:
        return
    rule = CREDIT_RULES[recipe.credit]
    if rule.best_only:
        _check_losses_of_best(recipe)
    if rule.leave_one_out:
        _check_estimator(recipe)


def _check_losses_of_best(recipe: Recipe) -> None:
    for name in recipe.parents:
        algorithm: StageAlgorithm[object] = build(recipe.policies[name].algorithm)
        if algorithm.needs.pairs:
            raise IncompatibleError(
                f"credit={recipe.credit} trains one sample of each group of track '{name}', and {name}.algorithm "
                f"({recipe.policies[name].algorithm.class_name}) trains pairs of a better and a worse one. Write "
                "credit=max, which gives a rewrite the same reward"
            )


def _check_estimator(recipe: Recipe) -> None:
    advantage = recipe.config.advantage
    if not issubclass(advantage.schema.owner, GroupAdvantage):
        raise IncompatibleError(
            f"credit={recipe.credit} compares every sample with its siblings, and {advantage.class_name} has another "
            "baseline. Write ~advantage, or credit=mean"
        )
    for key, value in SIBLING_BASELINE.items():
        written = advantage.values[key]
        if key in advantage.written and written != value:
            raise IncompatibleError(
                f"credit={recipe.credit} takes a reward minus the mean of its siblings', without a divisor or a bound, "
                f"so advantage.{key}={written} would have no effect. Write ~advantage.{key}, or credit=mean"
            )
