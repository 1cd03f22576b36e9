"""The nearest recipes that fit, where one does not.

They have other settings, sample with the trained weights, or have more devices, adapters or fewer prompts.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from unirl.config.errors import ConfigError
from unirl.config.load import Recipe, load
from unirl.plan.devices import Device
from unirl.plan.fit_together import PolicySettings, free_rungs, policy_runs, search_together
from unirl.plan.placement import plan_of
from unirl.plan.preflight import preflight

MORE_DEVICES = (2, 4, 8)
"""Multiples of the devices of a recipe that are tried."""
FEWER_PROMPTS = (2, 4, 8)
"""Parts of the prompts of a step that are tried."""


@dataclass(frozen=True)
class FittingRecipe:
    """A recipe that fits, by its plan."""

    what: str
    """The difference, for people."""
    recipe: str
    words: tuple[str, ...]
    """The settings of its command line."""
    num_devices: int
    choice: PolicySettings

    @property
    def command(self) -> str:
        """The command line that trains it."""
        return shlex.join(["unirl", "train", self.recipe, *self.words])

    def describe(self) -> str:
        """The difference, and what the plan says about it, for people."""
        devices = f"{self.num_devices} device{'s' if self.num_devices > 1 else ''}"
        return (
            f"{self.what}: {devices}, peak {self.choice.peak_gib:.1f} GiB ({self.choice.at}), "
            f"{self.choice.seconds:.4g} s a step"
        )

    def facts(self) -> dict[str, object]:
        """The alternative as JSON values."""
        return {
            "what": self.what,
            "command": self.command,
            "num_devices": self.num_devices,
            "step_seconds": self.choice.seconds,
            "peak_gib": self.choice.peak_gib,
            "peak_at": self.choice.peak_at,
        }


def alternatives(recipe: str, words: Sequence[str], device: Device, memory_gib: float) -> list[FittingRecipe]:
    """Recipes that fit on devices with so much memory, the nearest first.

    Settings that change results by rounding alone are tried first. Only if they do not suffice, other recipes are: an
    engine without a copy of the weights, the fewest devices that do, adapters, and the most prompts. All may change the
    settings of the command line.
    """
    own = load(recipe, words)
    alone = _fitting(recipe, words, [[]], "other settings", device, memory_gib)
    if alone is not None:
        return [alone]
    borrowed, adapters, prompts = _borrowed(own), _adapters(own), own.config.batch_size
    more = list(_more_devices(own))
    fewer = [[f"batch_size={prompts // part}"] for part in FEWER_PROMPTS if prompts % part == 0]
    tried = [
        _fitting(
            recipe, words, [borrowed] if borrowed else [], "sampling with the trained weights", device, memory_gib
        ),
        _fitting(recipe, words, more, "more devices", device, memory_gib),
        _fitting(recipe, words, [adapters] if adapters else [], "adapters", device, memory_gib),
        _fitting(recipe, words, fewer, "fewer prompts", device, memory_gib),
    ]
    found = [each for each in tried if each is not None]
    if not found and adapters:
        both = [[*adapters, *each] for each in more]
        last = _fitting(recipe, words, both, "adapters and more devices", device, memory_gib)
        found = [] if last is None else [last]
    return found


def _more_devices(own: Recipe) -> Iterator[list[str]]:
    """The words for more devices: with the prompts of the recipe, or with as many prompts on each device."""
    for factor in MORE_DEVICES:
        devices = f"num_devices={own.config.num_devices * factor}"
        yield [devices]
        yield [devices, f"batch_size={own.config.batch_size * factor}"]


def _borrowed(own: Recipe) -> list[str]:
    """The words with which engines that have a copy of the weights sample with the trained ones."""
    paths = {policy.rollout.path for policy in own.policies.values() if plan_of(policy).is_dedicated}
    return [f"{path}=trainside" for path in sorted(paths)]


def _adapters(own: Recipe) -> list[str]:
    """The words that train adapters where all weights are trained."""
    blocks = {
        policy.backend.path: policy for name, policy in own.policies.items() if name in own.trained and not policy.lora
    }
    return [f"{path}.lora_cfg={{}}" for path in blocks]


def _fitting(
    recipe: str, words: Sequence[str], tries: Sequence[Sequence[str]], what: str, device: Device, memory_gib: float
) -> FittingRecipe | None:
    """The first of some additions to the command line with which the recipe is legal and fits."""
    for added in tries:
        together = with_words(words, added)
        try:
            changed = load(recipe, together)
            preflight(changed)
        except ConfigError:
            continue
        policies = policy_runs(changed, device, memory_gib)
        if policies is None:
            return None
        best = search_together(policies, device, memory_gib, free_rungs(policies, ())).best
        if best is not None:
            final = with_words(together, best.words())
            return FittingRecipe(what, recipe, tuple(final), changed.config.num_devices, best)
    return None


def with_words(words: Sequence[str], added: Sequence[str]) -> list[str]:
    """The settings of a command line with others. A new value replaces that of the same key."""
    keys = {word.partition("=")[0] for word in added}
    return [*(word for word in words if word.partition("=")[0].lstrip("+") not in keys), *added]
