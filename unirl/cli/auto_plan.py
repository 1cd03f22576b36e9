"""`unirl plan RECIPE --auto`: the fastest placements, from measured seconds of the phases of a step."""

from __future__ import annotations

import json
import shlex
import statistics
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import yaml

from unirl.cli.check import checked
from unirl.config.errors import ArgumentError, IncompatibleError, NotFoundError
from unirl.config.merge import get
from unirl.config.recipe import RecipeConfig
from unirl.plan.auto_placement import MeasuredStep, PlacementCandidate, best_placements, measured_on
from unirl.plan.devices import device_named
from unirl.plan.simulate import PhaseSeconds
from unirl.tracking.tables import read_rows

PHASES = {"generate": "time/generate", "score": "time/reward", "train": "time/train", "sync": "time/sync"}
"""A phase of --seconds to its metric in a run."""
IN_TURNS = {"asynchronous.max_staleness": 0, "reward_parts": 1}
"""The settings of a run whose phases do not overlap, so that their times can be told apart."""
LENGTHS = 24
"""The last steps of a run, whose times of generation are repeated in the simulation."""
SAME = ("batch_size", "sampling.samples_per_prompt")
"""The settings that a run shares with the recipe that is planned from it."""


def show_placements(name: str, overrides: Sequence[str], options: Namespace) -> int:
    """Prints the best placements of a recipe. Returns the exit status."""
    recipe = checked(name, overrides)
    measured = _measured(recipe.config, recipe.public(), options)
    num_devices = options.devices or recipe.config.num_devices
    device, _ = device_named(options.device)
    found = best_placements(recipe, overrides, measured, num_devices, device)
    if options.json:
        print(json.dumps({"recipe": recipe.file.name, "placements": [each.facts() for each in found]}, indent=1))
        return 0
    print(f"{recipe.file.name} on {num_devices} devices ({device.name}), from seconds of a step: {_text(measured)}")
    for rank, each in enumerate(found, 1):
        print(f"{rank}. {line_of(each)}")
    print("Times scale with the rows of a device. max_staleness > 0 trains on older samples: docs/asynchronous.md")
    return 0


def line_of(candidate: PlacementCandidate) -> str:
    """A placement on two lines: its step, and its settings."""
    peak = "" if candidate.peak_gib is None else f"; peak {candidate.peak_gib:,.1f} GiB"
    step = candidate.prediction.step_seconds
    determinism = "" if candidate.determinism == "bitwise" else f"; determinism class {candidate.determinism}"
    return f"{step:.3g} s a step: {candidate.reason}{peak}{determinism}\n   {shlex.join(candidate.words)}"


def _text(measured: MeasuredStep) -> str:
    return ", ".join(f"{phase} {seconds:.3g}" for phase, seconds in vars(measured.seconds).items())


def _measured(config: RecipeConfig, tree: dict[str, object], options: Namespace) -> MeasuredStep:
    """The measured step: that of a run on its own devices, or the seconds of the command line on the recipe's."""
    if options.run is None and options.seconds is None:
        raise ArgumentError(
            "unirl plan --auto: give the seconds of the phases by --run RUN, or by --seconds "
            "generate=4,score=1,train=2,sync=0.1"
        )
    if options.seconds is not None:
        return measured_on(config, *seconds_of(options.seconds))
    return measured_in_run(config, tree, Path(options.run))


def seconds_of(text: str) -> tuple[PhaseSeconds, list[float]]:
    """The seconds in `generate=4,score=1,train=2,sync=0.1`. A phase that is left out takes no time.

    `generate=6/2` says that generation takes 6 and 2 seconds in turns.

    Returns:
        The mean seconds of each phase, and the time of generation in one step after another over its mean.

    Raises:
        ArgumentError: 2002 for an unknown phase, or no number.
    """
    seconds = {phase: [0.0] for phase in PHASES}
    for item in text.split(","):
        phase, _, value = item.partition("=")
        numbers = value.split("/") if phase == "generate" else [value]
        if phase not in PHASES or not all(_is_number(each) for each in numbers):
            raise ArgumentError(
                f"--seconds: '{item}' is not PHASE=SECONDS. Phases: {', '.join(PHASES)}; such as "
                "generate=4,train=2.5, or generate=6/2 for steps of 6 and 2 seconds in turns"
            )
        seconds[phase] = [float(each) for each in numbers]
    means = PhaseSeconds(**{phase: statistics.fmean(each) for phase, each in seconds.items()})
    return means, _over_mean(seconds["generate"])


def _is_number(text: str) -> bool:
    number = text.replace(".", "", 1)
    return number.isascii() and number.isdigit()


def _over_mean(seconds: Sequence[float]) -> list[float]:
    """Seconds in relation to their mean; 1 if all of them are 0."""
    mean = statistics.fmean(seconds)
    return [each / mean if mean else 1.0 for each in seconds]


def measured_in_run(config: RecipeConfig, tree: dict[str, object], root: Path) -> MeasuredStep:
    """The median seconds of the phases of a run, without its first step; of generation also each of the last steps.

    Raises:
        DataError: 4001 when the folder holds no run of two steps.
        ConfigError: 2020 when its phases overlap, or its steps have other samples.
    """
    settings, metrics = root / "config" / "resolved.yaml", root / "metrics.jsonl"
    rows = [row for row in read_rows(metrics) if "time/step" in row][1:]
    if not rows or not settings.is_file():
        raise NotFoundError(f"--run {root}: there is no run of at least two steps. Name the folder of a run")
    own = yaml.safe_load(settings.read_text())
    for key, value in (IN_TURNS | {key: get(tree, key) for key in SAME}).items():
        if get(own, key) != value:
            raise IncompatibleError(
                f"--run {root}: {key}={get(own, key)} in the run, and {value} is needed to tell its phases apart and "
                f"to compare its steps. Run a few steps with {key}={value}, or give --seconds"
            )
    seconds = {
        phase: statistics.median(float(row.get(metric, 0.0)) for row in rows) for phase, metric in PHASES.items()
    }
    generated = [float(row[PHASES["generate"]]) for row in rows[-LENGTHS:]]
    seconds["generate"] = statistics.fmean(generated)
    placed = replace(config, num_devices=own["num_devices"], placement=own["placement"])
    return measured_on(placed, PhaseSeconds(**seconds), _over_mean(generated))
