"""`unirl fit RECIPE`: searches the settings that make a step the fastest on given devices and change no result."""

import json
import math
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from unirl.cli.arguments import parse_recipe, recipe_parser
from unirl.cli.check import checked
from unirl.cli.plan import NOT_MEASURED
from unirl.cli.start import shown_start
from unirl.config.errors import ConfigError, IncompatibleError, InvalidValueError, ResourceError
from unirl.config.failures import Session
from unirl.config.load import Recipe
from unirl.config.merge import leaves
from unirl.plan.alternatives import FittingRecipe, alternatives
from unirl.plan.devices import Device, device_named
from unirl.plan.fit import FASTER, RUNGS, Saving, usable
from unirl.plan.fit_together import (
    JointFit,
    PolicyRuns,
    PolicySettings,
    free_rungs,
    policy_runs,
    savings_together,
    search_together,
)
from unirl.plan.placement import plan_of
from unirl.plan.sizes import sizes_of_policies

EXAMPLES = (
    "unirl fit diffusion/sd3_trainside --devices 8 --memory 80",
    "unirl fit diffusion/sd3_trainside stack.micro_batch_size=4 --device 4090",
    "unirl fit llm/qwen3_grpo_4b_base_dapo --devices 8 --device h100 --json",
)


def run(argv: list[str], session: Session) -> int:
    about = (
        "Find the fastest settings of a recipe that fit into memory and change results by rounding alone. "
        "Settings on the command line are kept."
    )
    parser = recipe_parser("fit", about, EXAMPLES)
    parser.option("--devices", type=int, help="number of devices (default: that of the recipe)")
    parser.option("--memory", type=float, help="GiB of a device (default: that of --device)")
    parser.option(
        "--device", help="a device of the table: a100, h100, h200, b200, 4090, l40s (default: this machine's)"
    )
    parser.option("--json", action="store_true", help="as JSON")
    arguments = parse_recipe(parser, argv)
    options = arguments.options
    words = [*arguments.overrides, *([] if options.devices is None else [f"num_devices={options.devices}"])]
    device, about_device = device_named(options.device)
    if options.memory is not None and not 0 < options.memory < math.inf:
        raise InvalidValueError(f"--memory {options.memory:g}: give the GiB of a device, more than 0")
    memory = device.memory_gib if options.memory is None else options.memory
    with shown_start(Session(), "fitting"):
        report = report_of(arguments.recipe, words, device, memory)
    print(json.dumps(report.facts(), indent=1) if options.json else report.text(about_device))
    return 0 if report.fit.best is not None else ResourceError.exit_status


@dataclass(frozen=True)
class KeptSetting:
    """A setting of the command line that the search did not change."""

    key: str
    faster: tuple[str, float] | None
    """The word that would replace it, and the seconds of a step with it. None if no value is faster."""


@dataclass(frozen=True)
class FitReport:
    """The outcome of a search over the settings and the legal placements of a recipe."""

    recipe: str
    words: Sequence[str]
    """The settings of the command line, and the placement that was chosen."""
    num_samples: int
    """Samples of a step that are scored."""
    num_devices: int
    device: Device
    memory_gib: float
    fit: JointFit
    kept: Sequence[KeptSetting]
    savings: Sequence[Saving]
    """If nothing fits: what saves memory."""
    alternatives: Sequence[FittingRecipe]
    """If nothing fits: the nearest recipes that do."""

    def text(self, about_device: str) -> str:
        """The report for people."""
        about = f" ({about_device})" if about_device else ""
        devices = f"{self.num_devices} x {self.device.name}, {self.memory_gib:.4g} GiB each"
        result = self._nothing_fits() if self.fit.best is None else self._best(self.fit.best)
        return "\n".join([f"{self.recipe} on {devices}; {NOT_MEASURED}{about}", *result, *self._kept_lines()])

    def facts(self) -> dict[str, object]:
        """The report as JSON values."""
        return {
            "recipe": self.recipe,
            "device": asdict(self.device),
            "num_devices": self.num_devices,
            "memory_gib": self.memory_gib,
            "usable_gib": usable(self.memory_gib),
            "fits": self.fit.best is not None,
            "best": self._choice_facts(self.fit.best),
            "next_faster": self._choice_facts(self.fit.next_faster),
            "smallest": self._choice_facts(self.fit.smallest),
            "kept": [asdict(each) for each in self.kept],
            "savings": [asdict(each) for each in self.savings],
            "alternatives": [each.facts() for each in self.alternatives],
        }

    def _choice_facts(self, choice: PolicySettings | None) -> dict[str, object] | None:
        if choice is None:
            return None
        return {
            "command": self._command(choice),
            "changes": choice.words(),
            "step_seconds": choice.seconds,
            "samples_per_second": self.num_samples / choice.seconds,
            "peak_gib": choice.peak_gib,
            "peak_at": choice.peak_at,
            "largest": dict(choice.items),
        }

    def _best(self, best: PolicySettings) -> Iterator[str]:
        yield f"fastest    {self._command(best)}"
        rate = self.num_samples / best.seconds
        yield (
            f"           {best.seconds:.4g} s a step, {rate:.4g} samples per second; "
            f"peak {best.peak_gib:.1f} of {usable(self.memory_gib):.1f} GiB ({best.at})"
        )
        faster = self.fit.next_faster
        if faster is None:
            yield "           no setting is faster, also with more memory; use_torch_compile is left to you"
            return
        yield f"faster     {self._command(faster)}"
        yield f"           does not fit: {faster.seconds:.4g} s a step; {self._excess(faster)}"

    def _nothing_fits(self) -> Iterator[str]:
        """Lists what saves memory, the smallest peak, the memory that this needs, and the nearest recipes that fit."""
        smallest = self.fit.smallest
        yield "nothing fits"
        if self.savings:
            yield "saves      GiB   at a moment that does not fit"
        for saving in self.savings:
            yield f"           {saving.gib:<8,.2f} {saving.word} ({saving.moment})"
        changes = smallest.words()
        yield f"smallest   {' '.join(changes) if changes else 'no setting saves memory'}"
        yield f"           {self._excess(smallest)}"
        yield f"           devices with {smallest.peak_gib / usable(1.0):,.0f} GiB would do"
        yield from alternative_lines(self.alternatives)

    def _kept_lines(self) -> Iterator[str]:
        for kept in self.kept:
            outcome = "no other value is faster"
            if kept.faster is not None:
                word, seconds = kept.faster
                outcome = f"a step would take {seconds:.4g} s with {word}"
            yield f"kept       {kept.key}, as typed; {outcome}"

    def _command(self, choice: PolicySettings) -> str:
        """The command line with these settings."""
        return shlex.join(["unirl", "train", self.recipe, *self.words, *choice.words()])

    def _excess(self, choice: PolicySettings) -> str:
        """The peak of a choice, its excess over the memory, and the largest items at that moment."""
        return (
            f"its peak is {choice.peak_gib:,.1f} GiB ({choice.at}), "
            f"{choice.peak_gib - usable(self.memory_gib):,.1f} more than fits: {choice.items_text}"
        )


def report_of(recipe: str, words: Sequence[str], device: Device, memory_gib: float) -> FitReport:
    """Searches the settings of a recipe over all legal placements.

    Args:
        words: the settings of the command line, which are kept.
    """
    loaded = checked(recipe, words)
    typed = typed_keys(loaded)
    result = []
    for placed, each in placements(recipe, words, loaded, typed):
        policies = policy_runs(each, device, memory_gib)
        if policies is None:
            raise IncompatibleError(
                f"{recipe}: {_without_sizes(loaded)} cannot say the size of its model without loading it, so nothing "
                "can be searched. Try a run with memory_check=warn"
            )
        result.append((placed, policies, search_together(policies, device, memory_gib, free_rungs(policies, typed))))
    placed, policies, fit = min(result, key=lambda item: _rank(item[2]))
    kept = [policy.key(rung) for policy in policies.values() for rung in RUNGS if policy.key(rung) in typed]
    free = free_rungs(policies, kept)
    last = list(policies.values())[-1].runs[-1]
    return FitReport(
        recipe=recipe,
        words=[*words, *placed],
        num_samples=last.sizes.num_samples,
        num_devices=loaded.config.num_devices,
        device=device,
        memory_gib=memory_gib,
        fit=fit,
        kept=[_kept(policies, device, memory_gib, kept, key, fit) for key in kept],
        savings=savings_together(policies, memory_gib, free) if fit.best is None else (),
        alternatives=alternatives(recipe, words, device, memory_gib) if fit.best is None else (),
    )


def alternative_lines(found: Sequence[FittingRecipe]) -> Iterator[str]:
    """The nearest recipes that fit, for people."""
    if not found:
        yield "nearest    nothing near fits: use larger devices, or smaller samples"
    for number, each in enumerate(found):
        yield f"{'nearest    ' if number == 0 else 'or         '}{each.command}"
        yield f"           {each.describe()}"


def _without_sizes(recipe: Recipe) -> str:
    """The name of a bundle class that cannot say the sizes of its model."""
    unknown = (sizes.config.bundle for sizes in sizes_of_policies(recipe).values() if sizes.run is None)
    return next(unknown).class_name


def _rank(fit: JointFit) -> tuple[bool, float]:
    """The order of placements: first those that fit, the fastest first; then by the smallest peak."""
    return (True, fit.smallest.peak_gib) if fit.best is None else (False, fit.best.seconds)


def typed_keys(recipe: Recipe) -> set[str]:
    """The keys of the settings on the command line."""
    return {key for key, _ in leaves(recipe.composed.layers[-1].tree)}


def _kept(
    policies: Mapping[str, PolicyRuns],
    device: Device,
    memory_gib: float,
    kept: Sequence[str],
    key: str,
    fit: JointFit,
) -> KeptSetting:
    """A kept setting, and what a search that may change it finds."""
    free = free_rungs(policies, [each for each in kept if each != key])
    freed = search_together(policies, device, memory_gib, free).best
    if freed is None or (fit.best is not None and freed.seconds >= FASTER * fit.best.seconds):
        return KeptSetting(key, None)
    word = next((each for each in freed.words() if each.startswith(f"{key}=")), None)
    return KeptSetting(key, None if word is None else (word, freed.seconds))


def placements(
    recipe: str, words: Sequence[str], loaded: Recipe, typed: Collection[str]
) -> Iterator[tuple[list[str], Recipe]]:
    """The recipe as it is written and, if an engine has weights of its own, its other placements.

    Yields the words that make each placement, and the recipe. A placement of the command line is kept.
    """
    yield [], loaded
    num_devices = loaded.config.num_devices
    is_typed = any(key.partition(".")[0] == "placement" for key in typed)
    is_dedicated = any(plan_of(policy).is_dedicated for policy in loaded.policies.values())
    if is_typed or not is_dedicated or num_devices < 2:
        return
    last, half = num_devices - 1, num_devices // 2
    for train, rollout in ((f"0-{last}", f"0-{last}"), (f"0-{half - 1}", f"{half}-{last}")):
        word = f"placement={{train: {train}, rollout: {rollout}}}"
        try:
            yield [word], checked(recipe, [*words, word])
        except ConfigError:
            continue  # this recipe cannot be placed like that
