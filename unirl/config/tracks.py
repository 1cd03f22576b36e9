"""Checks the names of the tracks in a recipe of several, before the blocks under these names are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from unirl.config.errors import IncompatibleError, did_you_mean
from unirl.config.merge import Tree, get
from unirl.config.recipe import OF_TRACK, POLICIES, EnhancerConfig, UnifiedConfig, WritesTexts, in_chain, recipe_class
from unirl.config.schema import Schema


def check_track_names(tree: Tree, pipeline: Schema | None, where: Callable[[str], str]) -> None:
    """Checks the names of tracks in `sampling`, `algorithm` and `reward.tracks`.

    Args:
        tree: the recipe, resolved.
        pipeline: the schema of the recipe's pipeline. None if the recipe has none, or one that cannot be read.
        where: the place that set a key, in parentheses.

    Raises:
        IncompatibleError: 2020.
    """
    family: object = None if pipeline is None else pipeline.owner
    known: tuple[str, ...] = ()
    if recipe_class(tree) is UnifiedConfig and pipeline is not None and isinstance(family, WritesTexts):
        known = family.tracks()
        for block in OF_TRACK:
            for name in _names(tree, block):
                if name not in known:
                    raise IncompatibleError(
                        f"{block}.{name}{where(f'{block}.{name}')}: {pipeline.owner.__name__} has no track '{name}'."
                        f"{did_you_mean(name, known)} Its tracks are {', '.join(known)}. Name some of these"
                    )
    tracks = _sampled(tree, family)
    for name in _names(tree, "reward.tracks"):
        _check_rewarded(name, tracks, known)


def _names(tree: Tree, path: str) -> list[str]:
    """The names of a mapping of names to blocks."""
    block = get(tree, path)
    return list(block) if isinstance(block, dict) else []


def _sampled(tree: Tree, pipeline: object) -> list[str]:
    """The tracks that a recipe samples, each before the one that continues it. Empty for a recipe of one track."""
    kind = recipe_class(tree)
    if kind is UnifiedConfig:
        return in_chain(_names(tree, "sampling"), pipeline)
    return list(POLICIES) if kind is EnhancerConfig else []


def _check_rewarded(name: str, tracks: Sequence[str], known: Sequence[str]) -> None:
    """`reward.tracks` may name the tracks that another one continues.

    Args:
        tracks: those that the recipe samples.
        known: those that its pipeline can sample.
    """
    adds = "unirl.reward.combine.WeightedRewards adds up several"
    if not tracks:
        raise IncompatibleError(
            f"reward.tracks.{name}: this recipe has one track, which reward.backend scores. Write ~reward.tracks; "
            f"{adds} scorers"
        )
    if name not in tracks:
        text = no_such_track(name, tracks)
        raise IncompatibleError(
            f"{text}. To sample {name} as well, write sampling.{name} and algorithm.{name}" if name in known else text
        )
    if name == tracks[-1]:
        raise IncompatibleError(
            f"reward.tracks.{name}: reward.backend scores the track '{name}', which is the last one. Write the scorer "
            f"there; {adds}"
        )


def no_such_track(name: str, tracks: Sequence[str]) -> str:
    """The message for a reward of a track that is not sampled."""
    return (
        f"reward.tracks.{name} names no track that is sampled.{did_you_mean(name, tracks)} The tracks are "
        f"{', '.join(tracks)}"
    )
