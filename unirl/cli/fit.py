"""`unirl fit RECIPE`: searches the settings that make a step the fastest on given devices and change no result."""

import json
import math
import shlex
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass

from unirl.cli.arguments import parse_recipe, recipe_parser
from unirl.cli.check import checked
from unirl.cli.plan import NOT_MEASURED
from unirl.cli.start import shown_start
from unirl.config.errors import ConfigError, IncompatibleError, InvalidValueError, ResourceError
from unirl.config.failures import Session
from unirl.config.load import Recipe
from unirl.config.merge import leaves
from unirl.plan.devices import Device, device_named
from unirl.plan.fit import (
    FASTER,
    MICRO,
    RUNGS,
    Candidate,
    Fit,
    Saving,
    items_text,
    largest_items,
    overrides,
    savings,
    search,
    usable,
)
from unirl.plan.micro_batch import with_auto_micro
from unirl.plan.placement import plan_of
from unirl.plan.sizes import RunSizes
from unirl.plan.tiling import with_auto_tiling

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
    run: RunSizes
    num_devices: int
    device: Device
    memory_gib: float
    fit: Fit
    kept: Sequence[KeptSetting]
    savings: Sequence[Saving]
    """If nothing fits: what saves memory."""

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
            "best": self._candidate_facts(self.fit.best),
            "next_faster": self._candidate_facts(self.fit.next_faster),
            "smallest": self._candidate_facts(self.fit.smallest),
            "kept": [asdict(each) for each in self.kept],
            "savings": [asdict(each) for each in self.savings],
        }

    def _candidate_facts(self, candidate: Candidate | None) -> dict[str, object] | None:
        if candidate is None:
            return None
        return {
            "command": self._command(candidate),
            "changes": self._changes(candidate),
            "step_seconds": candidate.seconds,
            "samples_per_second": self.run.sizes.num_samples / candidate.seconds,
            "peak_gib": candidate.peak_gib,
            "peak_at": candidate.peak_at,
            "largest": dict(largest_items(self.run, candidate.settings, candidate.peak_at)),
        }

    def _best(self, best: Candidate) -> Iterator[str]:
        yield f"fastest    {self._command(best)}"
        rate = self.run.sizes.num_samples / best.seconds
        yield (
            f"           {best.seconds:.4g} s a step, {rate:.4g} samples per second; "
            f"peak {best.peak_gib:.1f} of {usable(self.memory_gib):.1f} GiB ({best.peak_at})"
        )
        faster = self.fit.next_faster
        if faster is None:
            yield "           no setting is faster, also with more memory; use_torch_compile is left to you"
            return
        yield f"faster     {self._command(faster)}"
        yield f"           does not fit: {faster.seconds:.4g} s a step; {self._excess(faster)}"

    def _nothing_fits(self) -> Iterator[str]:
        """Lists the settings that save memory, the smallest peak that they reach, and the memory that this needs."""
        smallest = self.fit.smallest
        yield "nothing fits"
        if self.savings:
            yield "saves      GiB   at a moment that does not fit"
        for saving in self.savings:
            yield f"           {saving.gib:<8,.2f} {saving.word} ({saving.moment})"
        changes = overrides(self.run, smallest.settings)
        yield f"smallest   {' '.join(changes) if changes else 'no setting saves memory'}"
        yield f"           {self._excess(smallest)}"
        needed = smallest.peak_gib / usable(1.0)
        yield (
            f"           devices with {needed:,.0f} GiB would do; "
            "so might more devices (--devices), smaller samples or LoRA"
        )

    def _kept_lines(self) -> Iterator[str]:
        for kept in self.kept:
            outcome = "no other value is faster"
            if kept.faster is not None:
                word, seconds = kept.faster
                outcome = f"a step would take {seconds:.4g} s with {word}"
            yield f"kept       {kept.key}, as typed; {outcome}"

    def _command(self, candidate: Candidate) -> str:
        """The command line with the settings of a candidate."""
        return shlex.join(["unirl", "train", self.recipe, *self.words, *self._changes(candidate)])

    def _changes(self, candidate: Candidate) -> list[str]:
        """The words that make the candidate of the recipe."""
        changes = overrides(self.run, candidate.settings)
        chosen = self.run.geometry.micro_is_auto and not any(word.startswith(f"{MICRO.key}=") for word in changes)
        # With other settings, `auto` may choose another number.
        return [*changes, f"{MICRO.key}={candidate.settings.micro_rows}"] if chosen and changes else changes

    def _excess(self, candidate: Candidate) -> str:
        """The peak of a candidate, its excess over the memory, and the largest items at that moment."""
        return (
            f"its peak is {candidate.peak_gib:,.1f} GiB ({candidate.peak_at}), "
            f"{candidate.peak_gib - usable(self.memory_gib):,.1f} more than fits: "
            f"{items_text(self.run, candidate.settings, candidate.peak_at)}"
        )


def report_of(recipe: str, words: Sequence[str], device: Device, memory_gib: float) -> FitReport:
    """Searches the settings of a recipe over all legal placements.

    Args:
        words: the settings of the command line, which are kept.
    """
    loaded = checked(recipe, words)
    if len(loaded.policies) > 1:
        raise IncompatibleError(
            f"{recipe} trains {' and '.join(loaded.policies)}, and fit searches the settings of one policy. See the "
            "sizes of both with `unirl plan`"
        )
    typed = typed_keys(loaded)
    kept = [rung.key for rung in RUNGS if rung.key in typed]
    result = []
    for placed, sizes in placements(recipe, words, loaded, typed):
        run = with_auto_micro(with_auto_tiling(sizes, loaded.config, memory_gib), device, memory_gib)
        result.append((placed, run, search(run, device, memory_gib, kept)))
    placed, run, fit = min(result, key=lambda item: _rank(item[2]))
    return FitReport(
        recipe=recipe,
        words=[*words, *placed],
        run=run,
        num_devices=loaded.config.num_devices,
        device=device,
        memory_gib=memory_gib,
        fit=fit,
        kept=[_kept(run, device, memory_gib, kept, key, fit) for key in kept],
        savings=savings(run, memory_gib, kept) if fit.best is None else (),
    )


def _rank(fit: Fit) -> tuple[bool, float]:
    """The order of placements: first those that fit, the fastest first; then by the smallest peak."""
    return (True, fit.smallest.peak_gib) if fit.best is None else (False, fit.best.seconds)


def typed_keys(recipe: Recipe) -> set[str]:
    """The keys of the settings on the command line."""
    return {key for key, _ in leaves(recipe.composed.layers[-1].tree)}


def _kept(run: RunSizes, device: Device, memory_gib: float, kept: Sequence[str], key: str, fit: Fit) -> KeptSetting:
    """A kept setting, and what a search that may change it finds."""
    freed = search(run, device, memory_gib, [each for each in kept if each != key]).best
    if freed is None or (fit.best is not None and freed.seconds >= FASTER * fit.best.seconds):
        return KeptSetting(key, None)
    word = next((each for each in overrides(run, freed.settings) if each.startswith(f"{key}=")), None)
    return KeptSetting(key, None if word is None else (word, freed.seconds))


def placements(
    recipe: str, words: Sequence[str], loaded: Recipe, typed: Collection[str]
) -> Iterator[tuple[list[str], RunSizes]]:
    """The recipe as it is written and, if its engine has weights of its own, its other placements.

    Yields the words that make each placement, and the sizes of the run. A placement of the command line is kept.
    """
    config = loaded.config
    yield [], RunSizes.of(config)
    is_typed = any(key.partition(".")[0] == "placement" for key in typed)
    if is_typed or not plan_of(config).is_dedicated or config.num_devices < 2:
        return
    last, half = config.num_devices - 1, config.num_devices // 2
    for train, rollout in ((f"0-{last}", f"0-{last}"), (f"0-{half - 1}", f"{half}-{last}")):
        word = f"placement={{train: {train}, rollout: {rollout}}}"
        try:
            yield [word], RunSizes.of(checked(recipe, [*words, word]).config)
        except ConfigError:
            continue  # this recipe cannot be placed like that
