"""Searches the settings of all policies of a recipe together.

Policies take turns on their devices, and each keeps a part of its memory there while another one works. Only two
settings decide how large that part is. For each choice of these, the policies are searched one by one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from unirl.config.load import Recipe
from unirl.config.recipe import keys_of_policy
from unirl.plan.devices import Device
from unirl.plan.fit import (
    FASTER,
    MICRO,
    RESIDENT,
    RUNGS,
    SHARDS,
    Candidate,
    Changes,
    Fit,
    Rung,
    Runs,
    Saving,
    changes_of,
    largest_items,
    savings,
    search,
    settings_with,
    usable,
    words_of,
)
from unirl.plan.micro_batch import with_auto_micro
from unirl.plan.sizes import RunSizes, rows_beside, sizes_of_policies
from unirl.plan.tiling import with_auto_tiling

LASTING = (SHARDS, RESIDENT)
"""The settings that decide how much memory a policy keeps on its devices while another one works."""


@dataclass(frozen=True)
class PolicyRuns:
    """The runs of one policy of a recipe, and its keys."""

    recipe: Recipe
    tracks: Sequence[str]
    """Its names in the recipe: those of the tracks of one network, or one name."""
    runs: Runs

    def key(self, rung: Rung) -> str:
        """The key of a setting in the recipe. A key with a name for each track is that of the last one, the image."""
        return self.named(rung.key)

    def words(self, changes: Changes, fixes_micro: bool) -> list[str]:
        """The words that make changes of this policy in the recipe.

        Args:
            fixes_micro: set the micro-batch that `auto` chose, since it may choose another with other settings. Tracks
                of one network share the key and may have different ones, so theirs stay open.
        """
        words = words_of(changes)
        first, *others = self.runs
        if fixes_micro and first.geometry.micro_is_auto and MICRO.field not in changes and not others:
            words.append(f"{MICRO.key}={first.settings.micro_rows}")
        return [self.named(word) for word in words]

    def named(self, word: str) -> str:
        """A word with the key that it has in the recipe."""
        return keys_of_policy(word, self.recipe.policies[self.tracks[-1]])


def policy_runs(recipe: Recipe, device: Device, memory_gib: float) -> dict[str, PolicyRuns] | None:
    """The policies of a recipe by name, as they run on devices with so much memory.

    None if a bundle of the recipe cannot say the sizes of its model without loading it.
    """
    runs: dict[str, RunSizes] = {}
    for name, sizes in sizes_of_policies(recipe).items():
        if sizes.run is None:
            return None
        runs[name] = with_auto_micro(with_auto_tiling(sizes.run, sizes.config, memory_gib), device, memory_gib)
    weights = recipe.weights.items()
    return {name: PolicyRuns(recipe, tracks, tuple(runs[track] for track in tracks)) for name, tracks in weights}


@dataclass(frozen=True)
class PolicySettings:
    """Settings of all policies, and what the cost model says about them."""

    policies: Mapping[str, PolicyRuns]
    """The policies by name, each with what the others keep on its devices."""
    parts: Mapping[str, Candidate]
    """The settings of each policy."""

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return sum(part.seconds for part in self.parts.values())

    @cached_property
    def largest(self) -> str:
        """The policy that needs the most memory."""
        return max(self.parts, key=lambda name: self.parts[name].peak_gib)

    @property
    def peak_gib(self) -> float:
        return self.parts[self.largest].peak_gib

    @property
    def peak_at(self) -> str:
        """The moment of the peak."""
        return self.parts[self.largest].peak_at

    @property
    def at(self) -> str:
        """The moment of the peak for people, with the policy that works then where a recipe has several."""
        return f"{self.peak_at} of {self.largest}" if len(self.parts) > 1 else self.peak_at

    @property
    def items(self) -> list[tuple[str, float]]:
        """The largest items at the peak, each with its GiB."""
        return largest_items(self.policies[self.largest].runs, self.parts[self.largest].changes, self.peak_at)

    @property
    def items_text(self) -> str:
        """The same for people."""
        return ", ".join(f"{name} {gib:.2f}" for name, gib in self.items)

    @property
    def num_changes(self) -> int:
        """The number of settings that differ from the recipe."""
        return sum(len(part.changes) for part in self.parts.values())

    def words(self) -> list[str]:
        """The words that change the recipe to these settings."""
        fixes = self.num_changes > 0
        return [word for name, part in self.parts.items() for word in self.policies[name].words(part.changes, fixes)]


@dataclass(frozen=True)
class JointFit:
    """The outcome of a search over the settings of all policies. See `Fit`."""

    best: PolicySettings | None
    smallest: PolicySettings
    next_faster: PolicySettings | None


Free = Mapping[str, Sequence[Rung]]
"""Policy to its settings that may be changed."""


def search_together(policies: Mapping[str, PolicyRuns], device: Device, memory_gib: float, free: Free) -> JointFit:
    """Evaluates the settings of all policies on devices with so much memory."""
    best, smallest, faster = [], [], []
    for placed in _lasting_choices(policies, free):
        fits = {name: each.fit(device, memory_gib, free[name], len(policies) > 1) for name, each in placed.items()}
        runs = {name: each.policy for name, each in placed.items()}
        least = {name: fit.smallest for name, fit in fits.items()}
        fitting = {name: fit.best for name, fit in fits.items() if fit.best is not None}
        smallest.append(PolicySettings(runs, least))
        if len(fitting) == len(fits):
            best.append(PolicySettings(runs, fitting))
        faster.append(
            PolicySettings(runs, least | fitting | {n: f.next_faster for n, f in fits.items() if f.next_faster})
        )
    least_memory = min(smallest, key=lambda each: (each.peak_gib, each.num_changes, each.seconds))
    if not best:
        return JointFit(None, least_memory, None)
    fastest = min(each.seconds for each in best)
    about = [each for each in best if each.seconds <= fastest / FASTER]
    # Only a choice that does not fit can be faster than the fastest that does.
    more = [each for each in faster if each.seconds < FASTER * fastest and each.peak_gib > usable(memory_gib)]
    return JointFit(
        min(about, key=lambda each: (each.num_changes, each.peak_gib)),
        least_memory,
        min(more, key=lambda each: each.peak_gib, default=None),
    )


@dataclass(frozen=True)
class _Placed:
    """A policy with a choice of its lasting settings, beside the others with a choice of theirs."""

    policy: PolicyRuns
    lasting: Changes

    def fit(self, device: Device, memory_gib: float, free: Sequence[Rung], has_others: bool) -> Fit:
        """The search over the other settings."""
        rest = [rung for rung in free if not has_others or rung not in LASTING]
        fit = search(self.policy.runs, device, memory_gib, rest)
        candidates = [None if each is None else self._whole(each) for each in (fit.best, fit.smallest, fit.next_faster)]
        best, smallest, next_faster = candidates
        assert smallest is not None
        return Fit(best, smallest, next_faster)

    def _whole(self, candidate: Candidate) -> Candidate:
        """A candidate whose changes include the lasting ones."""
        return replace(candidate, changes={**self.lasting, **candidate.changes})


def _lasting_choices(policies: Mapping[str, PolicyRuns], free: Free) -> Iterator[dict[str, _Placed]]:
    """Each choice of the lasting settings of all policies. A single policy has nothing beside it, so has one choice."""
    if len(policies) == 1:
        yield {name: _Placed(policy, {}) for name, policy in policies.items()}
        return
    axes = []
    for name, policy in policies.items():
        options: list[list[Changes]] = [
            changes_of(policy.runs, rung) if rung in free[name] else [{}] for rung in LASTING
        ]
        axes.append([dict(pair for each in choice for pair in each.items()) for choice in product(*options)])
    for choice in product(*axes):
        lasting = dict(zip(policies, choice, strict=True))
        waiting = {
            name: [replace(run, settings=settings_with(run, lasting[name])) for run in policy.runs]
            for name, policy in policies.items()
        }
        placed = {}
        for name, policy in policies.items():
            beside = rows_beside({other: runs[0] for other, runs in waiting.items() if other != name})
            runs = tuple(replace(run, beside=beside) for run in waiting[name])
            placed[name] = _Placed(replace(policy, runs=runs), lasting[name])
        yield placed


def savings_together(policies: Mapping[str, PolicyRuns], memory_gib: float, free: Free) -> list[Saving]:
    """The single changes that save memory at moments that do not fit, in the words of the recipe."""
    result = []
    for name, policy in policies.items():
        result += [replace(each, word=policy.named(each.word)) for each in savings(policy.runs, memory_gib, free[name])]
    return sorted(result, key=lambda saving: -saving.gib)


def free_rungs(policies: Mapping[str, PolicyRuns], kept: Collection[str]) -> dict[str, list[Rung]]:
    """The settings of each policy that may be changed: those whose keys are not `kept`."""
    return {name: [rung for rung in RUNGS if policy.key(rung) not in kept] for name, policy in policies.items()}
