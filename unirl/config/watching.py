"""The block `watch` of a recipe: when the metrics of a run raise an alarm, and what an alarm does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

AlarmName = Literal[
    "heldout.falls",
    "component.falls",
    "diversity.collapse",
    "detail.grows",
    "length.drift",
    "kl.runaway",
    "ratio.runaway",
    "groups.equal",
    "reward.saturated",
    "entropy.collapse",
]
Above1 = Annotated[float, Meta(gt=1)]
Below1 = Annotated[float, Meta(gt=0), Meta(lt=1)]
Share = Annotated[float, Meta(gt=0), Meta(le=1)]


@dataclass(frozen=True, kw_only=True)
class WatchConfig:
    """Alarms about a run that dies or that games its reward. `docs/watchdog.md` explains each.

    An alarm compares the newest steps with the first ones. Every threshold is for all tracks of the run.
    """

    on_alarm: Literal["log", "stop", "checkpoint_and_stop"] = "log"
    """`log` writes a warning and an event. `stop` also ends the run, without saving this step. `checkpoint_and_stop`
    saves this step before the run ends."""
    ignore: tuple[AlarmName | Literal["all"], ...] = ()
    """Names of alarms that are never raised; `all` = none is."""
    reference_steps: Annotated[int, Meta(ge=1)] = 5
    """The first steps of the run, whose median or mean is what later steps are compared with."""
    recent_steps: Annotated[int, Meta(ge=1)] = 3
    """The newest steps that are compared."""
    patience: Annotated[int, Meta(ge=1)] = 20
    """Steps in a row for which groups have equal rewards, or rewards no spread, before an alarm."""
    standard_errors: Annotated[float, Meta(gt=0)] = 3.0
    """Standard errors of the difference by which a held-out reward or a component must have fallen."""
    component_drop: Share = 0.25
    """Share of its first value that a component must have lost while the reward rose."""
    diversity_ratio: Below1 = 0.25
    """Diversity of samples over that of the first ones, below which it has collapsed."""
    detail_ratio: Above1 = 1.5
    """Energy of the finest detail of images over that of the first ones, above which it is an artefact."""
    length_ratio: Above1 = 1.1
    """Factor by which the mean length of responses must have grown or shrunk, beside being more than noise."""
    kl_ratio: Above1 = 20.0
    """KL divergence over that of the first steps, above which it runs away."""
    clip_fraction: Share = 0.9
    """Share of elements outside the trust region, above which updates change next to nothing."""
    entropy_ratio: Below1 = 0.05
    """Entropy of the policy over that of the first steps, below which it has collapsed."""
    equal_groups: Share = 0.95
    """Share of groups whose rewards are all equal, from which on there is next to no gradient."""
