"""The counts of a step: prompts, samples, updates, devices and micro-batches.

P prompts x N samples = B rows. Update u of U trains the rows [uB/U, (u+1)B/U), and the devices divide each update. A
loss on pairs trains two rows per pair and no others, so there B is 2 x pairs x P.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from unirl.config.build import build
from unirl.config.errors import GeometryError, InvalidValueError
from unirl.config.recipe import RecipeConfig
from unirl.plan.placement import PlacementPlan, plan_of
from unirl.types.protocols import Needs
from unirl.types.sampling import Sampling

MOST_SAMPLES = 2**24
"""A step with more samples is a mistake: its requests alone would not fit into memory."""
REACH = 20_000
"""The search for the nearest legal value covers this many values in each direction."""


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The counts of one step."""

    num_prompts: int
    """Prompts of the model; those of a child track are the samples of its parent track."""
    samples_per_prompt: int
    parents: tuple[tuple[str, int], ...] = ()
    """The tracks that this one continues, the first one first, and the samples of each row of the one before it."""
    num_devices: int
    """Devices that train. They divide an update."""
    num_updates: int
    micro_batch_size: int
    """Rows of a micro-batch; the smallest legal number if `micro_is_auto`."""
    micro_is_auto: bool = False
    """The rows of a micro-batch are chosen for the device (stack.micro_batch_size=auto)."""
    micro_batch_tokens: int | None = None
    """Tokens of a micro-batch. None if micro-batches have a fixed number of rows."""
    rows_together: int = 1
    """Adjacent rows that a micro-batch must not split."""
    num_pairs: int = 0
    """The most pairs of a group that are trained; 0 = all samples are trained."""
    placed: bool = False
    """True if the recipe has a placement, so that num_devices alone does not set the devices that train."""

    @property
    def parents_per_prompt(self) -> int:
        """Samples of the parent track for each prompt of the data, which `num_prompts` is a multiple of."""
        return math.prod(count for _, count in self.parents)

    @property
    def num_samples(self) -> int:
        """Samples that a step generates."""
        return self.num_prompts * self.samples_per_prompt

    @property
    def trained_per_prompt(self) -> int:
        """Rows of one group that are trained."""
        return 2 * min(self.num_pairs, self.samples_per_prompt // 2) or self.samples_per_prompt

    @property
    def num_trained(self) -> int:
        """Rows that a step trains, B."""
        return self.num_prompts * self.trained_per_prompt

    @property
    def rows_per_update(self) -> int:
        """Rows of one update, over all devices."""
        return self.num_trained // self.num_updates

    @property
    def rows_per_device(self) -> int:
        """Rows of one update on one device."""
        return self.rows_per_update // self.num_devices

    @property
    def num_micros(self) -> int:
        """Micro-batches of one update on one device, if they have a fixed number of rows. The last may be smaller."""
        return -(-self.rows_per_device // self.micro_batch_size)

    @property
    def micro_sizes(self) -> list[int]:
        """The sizes that cut a device's share of an update into 1, 2, 3, ... micro-batches, in ascending order.

        Each is the smallest with its number of micro-batches, so that these have nearly equal sizes.
        """
        together = self.rows_together
        bundles = max(self.rows_per_device // together, 1)
        return sorted({together * -(-bundles // count) for count in range(1, bundles + 1)})

    @property
    def is_legal(self) -> bool:
        """True if devices and updates divide the samples, and rows that belong together are never split."""
        divides = self.num_trained % (self.num_devices * self.num_updates) == 0
        return divides and self.keeps_together and self.has_enough

    @property
    def has_enough(self) -> bool:
        """True unless pairs are trained and a group has only one sample."""
        return not self.num_pairs or self.samples_per_prompt >= 2

    @property
    def keeps_together(self) -> bool:
        """True if `rows_together` divides groups, device shares and micro-batches."""
        micro = self.micro_batch_size if self.micro_batch_tokens is None else self.rows_together
        return all(size % self.rows_together == 0 for size in (self.trained_per_prompt, micro, self.rows_per_device))


KNOBS = {
    "num_updates": "stack.num_updates_per_batch",
    "num_prompts": "batch_size",
    "samples_per_prompt": "sampling.samples_per_prompt",
    "num_devices": "num_devices",
    "micro_batch_size": "stack.micro_batch_size",
}
"""Field of Geometry to the recipe key that sets it."""


def geometry_of(config: RecipeConfig, plan: PlacementPlan, needs: Needs) -> Geometry:
    """The geometry of a recipe on these devices, for an algorithm with these needs.

    Raises:
        ConfigError: 2004 for a count below 1.
    """
    geometry = Geometry(
        num_prompts=config.batch_size,
        parents=config.parents,
        samples_per_prompt=config.samples_per_prompt,
        num_devices=len(plan.train),
        num_updates=config.num_updates,
        micro_batch_size=needs.rows_together if config.micro_batch_size is None else config.micro_batch_size,
        micro_is_auto=config.micro_batch_size is None,
        micro_batch_tokens=config.micro_batch_tokens,
        rows_together=needs.rows_together,
        num_pairs=needs.pairs,
        placed=config.placement is not None,
    )
    for field, key in KNOBS.items():
        if vars(geometry)[field] < 1:
            raise InvalidValueError(f"{key} must be >= 1, got {vars(geometry)[field]}")
    return geometry


def check_geometry(geometry: Geometry) -> None:
    """Refuses (2010) an illegal geometry, with its equation and the nearest legal values of each key."""
    if geometry.num_samples > MOST_SAMPLES:
        raise GeometryError(
            f"batch_size={_prompts(geometry)} x sampling.samples_per_prompt={geometry.samples_per_prompt} is more than "
            f"{MOST_SAMPLES} samples in one step. Lower one of them; more steps (num_rollouts) train more prompts"
        )
    if not geometry.is_legal:
        ways_out = " or ".join(_ways_out(geometry)) or _joint_way_out(geometry)
        raise GeometryError(f"{_equation(geometry)}. Use {ways_out}")


def geometry_table(config: RecipeConfig) -> str:
    """The counts of a step and of the whole run, as a run prints them at its start."""
    geometry = geometry_of(config, plan_of(config), build(config.algorithm).needs)
    check_geometry(geometry)
    sampling: Sampling = build(config.sampling)
    sized = sampling.at_size(*config.image_sizes[0]) if config.image_sizes else sampling
    others = (f"{height} x {width}" for height, width in config.image_sizes[1:])
    samples = ", ".join([sized.describe(), *others])
    paired = f", {geometry.num_trained} of them trained, in pairs" if geometry.num_pairs else ""
    return (
        f"geometry   {_prompts(geometry, ' prompt')} x {count_of(geometry.samples_per_prompt, 'sample')} "
        f"= {count_of(geometry.num_samples, 'sample')} per step{paired}; "
        f"{count_of(geometry.num_updates, 'update')} of {geometry.rows_per_update} "
        f"= {count_of(geometry.num_devices, 'device')} x {_micros(geometry)}\n"
        f"           {samples}; {count_of(config.num_rollouts, 'step')}, "
        f"{count_of(config.total_updates, 'update')} in all"
    )


def _prompts(geometry: Geometry, noun: str = "") -> str:
    """The number of prompts: `8`, or `8 x 4 think` for a track that continues `think`. With a noun: `8 prompts`."""
    count = geometry.num_prompts // geometry.parents_per_prompt
    counted = count_of(count, noun.strip()) if noun else str(count)
    return " x ".join([counted, *(f"{each} {track}" for track, each in geometry.parents)])


def count_of(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _micros(geometry: Geometry) -> str:
    if geometry.micro_batch_tokens is not None:
        rows_text = count_of(geometry.rows_per_device, "row")
        return f"{rows_text} in micro-batches of at most {geometry.micro_batch_tokens} tokens"
    size, rows = geometry.micro_batch_size, geometry.rows_per_device
    if geometry.micro_is_auto:
        return f"{count_of(rows, 'row')}, cut into micro-batches for the device"
    last = rows % size
    ragged = f" (the last of {last})" if last and rows > size else ""
    return f"{count_of(geometry.num_micros, 'micro-batch').replace('batchs', 'batches')} of {min(size, rows)}{ragged}"


def _equation(geometry: Geometry) -> str:
    """The equation that does not hold, with its numbers and their keys."""
    if not geometry.has_enough:
        return f"the algorithm compares samples of one prompt, and samples_per_prompt is {geometry.samples_per_prompt}"
    each = "paired samples" if geometry.num_pairs else "samples_per_prompt"
    product = f"batch_size {_prompts(geometry)} x {each} {geometry.trained_per_prompt}"
    share = geometry.num_trained // geometry.num_devices
    if geometry.num_trained % geometry.num_devices:
        devices = (
            f"the number of devices that train, {geometry.num_devices} (placement.train),"
            if geometry.placed
            else f"num_devices={geometry.num_devices}"
        )
        return f"{devices} does not divide the {geometry.num_trained} samples ({product})"
    if share % geometry.num_updates:
        return (
            f"stack.num_updates_per_batch={geometry.num_updates} does not divide the {share} samples each worker "
            f"holds ({product} / {'devices of train' if geometry.placed else 'num_devices'} {geometry.num_devices})"
        )
    return (
        f"the algorithm keeps {geometry.rows_together} rows together, which does not divide all of: "
        f"{each} {geometry.trained_per_prompt}, micro_batch_size {geometry.micro_batch_size}, "
        f"{geometry.rows_per_device} rows of an update on a device"
    )


def _ways_out(geometry: Geometry) -> Iterator[str]:
    for field, key in KNOBS.items():
        values = [str(_of_key(geometry, field, value)) for value in nearest_legal(geometry, field)]
        if values and field == "num_devices" and geometry.placed:
            yield f"{'|'.join(values)} devices in placement.train"
        elif values:
            yield f"{key}={'|'.join(values)}"


def _joint_way_out(geometry: Geometry) -> str:
    """The way out if no single count helps: round group and micro-batch up to multiples, and adjust the prompts."""
    bundle = geometry.rows_together
    group, micro = (-(-size // bundle) * bundle for size in (geometry.samples_per_prompt, geometry.micro_batch_size))
    rounded = dataclasses.replace(geometry, samples_per_prompt=group, micro_batch_size=micro)
    legal = [rounded.num_prompts] if rounded.is_legal else nearest_legal(rounded, "num_prompts")
    if not legal:
        return "counts that divide each other: no legal values are near these"
    fixed = dataclasses.replace(rounded, num_prompts=legal[-1])
    changed = [
        f"{key}={_of_key(fixed, field, vars(fixed)[field])}"
        for field, key in KNOBS.items()
        if vars(fixed)[field] != vars(geometry)[field]
    ]
    return f"{', '.join(changed)} together"


def _of_key(geometry: Geometry, field: str, value: int) -> int:
    """The value of a count as its recipe key has it: `batch_size` counts the prompts of the data."""
    return value // geometry.parents_per_prompt if field == "num_prompts" else value


def nearest_legal(geometry: Geometry, field: str) -> list[int]:
    """The closest legal values of one count below and above the present one, with the other counts unchanged."""
    now = vars(geometry)[field]

    def legal(value: int) -> bool:
        changed: dict[str, Any] = {field: value}
        if field == "num_prompts" and value % geometry.parents_per_prompt:
            return False
        return dataclasses.replace(geometry, **changed).is_legal

    enough = geometry.num_devices * geometry.num_updates * geometry.rows_together * geometry.parents_per_prompt
    # More updates or devices than samples are never legal.
    below = min(now - 1, geometry.num_samples) if field in ("num_updates", "num_devices") else now - 1
    directions = range(below, max(below - REACH, 0), -1), range(now + 1, now + min(enough, REACH) + 1)
    return [value for values in directions for value in islice(filter(legal, values), 1)]
