"""`unirl plan RECIPE`: prints geometry, devices, parameters, memory and time of a run, without loading a model."""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import yaml

from unirl.cli.arguments import parse_recipe, recipe_parser
from unirl.cli.auto_plan import show_placements
from unirl.cli.check import checked, say_crowded
from unirl.config.errors import IncompatibleError, MemoryShortageError
from unirl.config.failures import Session
from unirl.config.load import Recipe
from unirl.config.recipe import RecipeConfig, keys_of_policy
from unirl.plan import cost, times
from unirl.plan.alternatives import alternatives
from unirl.plan.credit import credit_of_tracks
from unirl.plan.devices import GIB, Device, device_named
from unirl.plan.fit import best_changes, items_text, moment_peaks, usable
from unirl.plan.geometry import count_of, geometry_table
from unirl.plan.held import held_models
from unirl.plan.machine import CERTAIN
from unirl.plan.micro_batch import with_auto_micro
from unirl.plan.placement import PlacementPlan, plan_of
from unirl.plan.preflight import trainer_class
from unirl.plan.saves import copied_for_saves
from unirl.plan.sizes import RecipeSizes, RunSizes, WeightTransfer, resident_parts, sizes_of_policies
from unirl.plan.tiling import leaves_tiling_open, with_auto_tiling
from unirl.tracking.console import duration
from unirl.tracking.run_directory import latest_run
from unirl.tracking.tables import read_rows
from unirl.trainer.resume import changed_keys
from unirl.types.facts import LatentFacts

EXAMPLES = (
    "unirl plan diffusion/sd3_trainside",
    "unirl plan diffusion/sd3_trainside batch_size=24 stack.micro_batch_size=8 --device h100",
    "unirl plan diffusion/quickstart --json",
    "unirl plan diffusion/sd3_replica_lora_separate --auto --seconds generate=4,score=1,train=2,sync=0.1",
)
NOT_MEASURED = "counted, not measured on a GPU"


def run(argv: list[str], session: Session) -> int:
    parser = recipe_parser("plan", "Check a recipe, and print its geometry, devices, memory and time.", EXAMPLES)
    parser.option(
        "--device", help="a device of the table: a100, h100, h200, b200, 4090, l40s (default: this machine's)"
    )
    parser.option("--json", action="store_true", help="as JSON")
    parser.option("--auto", action="store_true", help="print the fastest placements, by simulated steps")
    parser.option("--run", metavar="RUN", help="with --auto: the folder of a run whose phases were measured")
    parser.option(
        "--seconds",
        help="with --auto: seconds of the phases, such as generate=4,score=1,train=2,sync=0.1; "
        "generate=6/2: 6 and 2 s in turns",
    )
    parser.option("--devices", type=int, metavar="N", help="with --auto: devices to place (default: the recipe's)")
    arguments = parse_recipe(parser, argv)
    options = arguments.options
    if options.auto:
        return show_placements(arguments.recipe, arguments.overrides, options)
    return show_plan(arguments.recipe, arguments.overrides, as_json=options.json, device=options.device)


def show_plan(name: str, overrides: Sequence[str], as_json: bool = False, device: str | None = None) -> int:
    """Prints the plan of a recipe. Returns the exit status."""
    chosen, is_assumed = device_named(device)
    recipe = checked(name, overrides)
    if device is None:
        say_crowded(recipe)
    sizes = sizes_of_policies(recipe)
    if not as_json and any(each.run is None for each in sizes.values()):
        print("\n\n".join(_unsized_text(recipe.alone(policy)) for policy in recipe.policies))
        return 0
    total = Total({policy: run_on(chosen, each) for policy, each in sizes.items()}, chosen)
    if as_json:
        facts = {policy: plan_facts(recipe.alone(policy), sizes[policy], chosen) for policy in recipe.policies}
        several = {"policies": facts, "total": total.facts()}
        print(json.dumps(several if len(facts) > 1 else next(iter(facts.values())), indent=1))
    else:
        print(plan_text(recipe, device, sizes))
    if not is_assumed:
        refuse_excess(name, overrides, total)
    return 0


@dataclass(frozen=True)
class Total:
    """A step of all policies of a recipe on a device. They work one after the other."""

    runs: Mapping[str, RunSizes]
    """The policies by name, each with what the others keep on its devices."""
    device: Device

    @cached_property
    def seconds(self) -> dict[str, float]:
        """Seconds of a step of each policy."""
        return {name: times.step_seconds(run.sizes, run.settings, self.device) for name, run in self.runs.items()}

    @cached_property
    def peaks(self) -> dict[str, tuple[float, str]]:
        """GiB at the peak of each policy, and its moment."""
        return {name: _peak(run) for name, run in self.runs.items()}

    @property
    def largest(self) -> str:
        """The policy with the highest peak."""
        return max(self.peaks, key=lambda name: self.peaks[name][0])

    @property
    def peak_text(self) -> str:
        """The moment of the peak for people."""
        moment = self.peaks[self.largest][1]
        return f"{moment} of {self.largest}" if self.largest else moment

    def facts(self) -> dict[str, object]:
        """The total as JSON values."""
        gib, moment = self.peaks[self.largest]
        return {
            "step_seconds": sum(self.seconds.values()),
            "peak_gib": gib,
            "peak_at": moment,
            "peak_of": self.largest,
            "fits": gib <= usable(self.device.memory_gib),
        }

    def text(self, num_rollouts: int) -> str:
        """The total for people."""
        lines = ["total      all tracks, one after the other"]
        for name, seconds in self.seconds.items():
            gib, moment = self.peaks[name]
            lines.append(f"             {name:<12}{clock(seconds):>9}   peak {gib:,.1f} GiB ({moment})")
        step, (gib, _) = sum(self.seconds.values()), self.peaks[self.largest]
        lines.append(
            f"             {'step':<12}{clock(step):>9}   {num_rollouts:,} steps take {duration(step * num_rollouts)}"
        )
        return "\n".join([*lines, _room_text(gib, self.peak_text, self.device)])


def refuse_excess(name: str, overrides: Sequence[str], total: Total) -> None:
    """Refuses a recipe that does not fit a device, and names the nearest recipes that do.

    Raises:
        MemoryShortageError: 5002 where a run would refuse to start, too.
    """
    device, (gib, moment) = total.device, total.peaks[total.largest]
    if gib <= CERTAIN * device.memory_gib:
        return
    nearest = alternatives(name, overrides, device, device.memory_gib)
    ways = "".join(f"\n  {each.command}\n    {each.describe()}" for each in nearest)
    largest = items_text([total.runs[total.largest]], {}, moment)
    raise MemoryShortageError(
        f"{name} does not fit {device.name}: the plan's peak is {gib:.1f} GiB on a device (at {total.peak_text}: "
        f"{largest}), and {usable(device.memory_gib):.1f} of its {device.memory_gib:.1f} GiB can be planned for. "
        + (f"The nearest that fits:{ways}" if nearest else "Nothing near fits: use larger devices, or smaller samples")
    )


def plan_text(recipe: Recipe, device: str | None = None, sizes: Mapping[str, RecipeSizes] | None = None) -> str:
    """The plan of a recipe for people, on a device of the table. None: this machine's.

    Args:
        sizes: the sizes of its policies, if they are known.
    """
    sizes = sizes_of_policies(recipe) if sizes is None else sizes
    texts = {name: _policy_text(recipe.alone(name), sizes[name], device) for name in recipe.policies}
    if len(texts) == 1:
        return next(iter(texts.values()))
    named = [f"{name}\n{keys_of_policy(text, recipe.policies[name])}" for name, text in texts.items()]
    closing = ["The sums of each track contain what the others keep on its devices while they wait."]
    if recipe.shares_weights:
        closing.append(
            "The tracks share one network: its weights, gradients and optimizer stand in each plan, and exist once."
        )
    chosen, _ = device_named(device)
    total = Total({name: run_on(chosen, each) for name, each in sizes.items()}, chosen)
    rewards = credit_of_tracks(recipe, trainer_class(recipe.config).track)
    table = "\n".join(f"{'' if i else 'rewards':<11}{name}: {text}" for i, (name, text) in enumerate(rewards.items()))
    return "\n\n".join([*named, table, total.text(recipe.config.num_rollouts), "\n".join(closing)])


def plan_facts(recipe: Recipe, sizes: RecipeSizes, device: Device) -> dict[str, object]:
    """The plan of one policy as JSON values."""
    plan = run_on(device, sizes)
    resident = resident_parts(plan.placement)
    by_phase = times.step_times(plan.sizes, plan.settings, device)
    seconds = times.total_seconds(plan.sizes, by_phase)
    return {
        "recipe": recipe.file.name,
        "placement": {role: device_set.words for role, device_set in plan.placement.device_sets.items()},
        "relation": plan.placement.relation,
        "sync": asdict(plan.transfer),
        "resident": resident,
        "parameters": dict(plan.estimate.parameters),
        "sizes": asdict(plan.sizes),
        "settings": asdict(plan.settings),
        "memory_gib": [asdict(row) for row in (row for _, row in plan.memory)],
        "main_memory_gib": {"saves": copied_for_saves(plan.sizes, plan.settings)},
        "device": asdict(device),
        "fits": _peak(plan)[0] <= usable(device.memory_gib),
        "time": {name: asdict(phase) for name, phase in by_phase.items()},
        "step_seconds": seconds,
        "samples_per_second": plan.sizes.num_samples / seconds,
        "made": made_by(plan),
        "made_per_second": _num_made(plan) / seconds,
        "changes": [asdict(gain) for gain in best_changes([plan], device, device.memory_gib)],
    }


def run_on(device: Device, sizes: RecipeSizes) -> RunSizes:
    """The sizes of a run, with what it chooses for a device."""
    if sizes.run is None:
        raise IncompatibleError(
            f"bundle: {sizes.config.bundle.class_name} cannot say the size of its model without loading it, so nothing "
            "can be planned. A run prints the seconds of each phase and the memory in use"
        )
    run = with_auto_tiling(sizes.run, sizes.config, device.memory_gib)
    return with_auto_micro(run, device, device.memory_gib)


def _unsized_text(recipe: Recipe) -> str:
    """The plan of a policy whose bundle cannot say the size of its model: neither memory nor time."""
    return "\n".join(
        [
            f"{recipe.file.name}   {recipe.file.path}",
            geometry_table(recipe.config),
            f"placement  {plan_of(recipe.config).describe()}",
            *_nodes_text(plan_of(recipe.config)),
            f"parameters not counted: {recipe.config.bundle.class_name} cannot say the size of its model without",
            "           loading it. A run prints the seconds of each phase and the memory in use",
            *_held_text(recipe.config),
        ]
    )


def _held_text(config: RecipeConfig) -> list[str]:
    """A line for each model that lies beside the policy."""
    return [
        f"untrained  {model.name}: {_count(model.parameters)} parameters, {gib_text(model.num_bytes / GIB)} GiB, "
        "beside the trained policy"
        for model in held_models(config)
    ]


def _policy_text(recipe: Recipe, sizes: RecipeSizes, device: str | None) -> str:
    """The plan of one policy for people."""
    chosen, about = device_named(device)
    plan = run_on(chosen, sizes)
    tiled = leaves_tiling_open(recipe.config) and plan.sizes.decoding.tiled
    listed = ", ".join(f"{name} {_count(number)}" for name, number in plan.estimate.parameters.items())
    return "\n".join(
        [
            f"{recipe.file.name}   {recipe.file.path}",
            geometry_table(recipe.config),
            f"placement  {plan.placement.describe()}\n           {_transfer_text(plan.transfer)}",
            *_nodes_text(plan.placement),
            *(f"           {line}" for line in hardware_text(plan.placement, chosen)),
            f"rollout    {_rows_text(plan)}",
            _micro_text(plan, chosen),
            *([f"decode     in tiles, chosen for {chosen.name} (pipeline.vae_tiling)"] if tiled else []),
            f"parameters {_count(plan.sizes.trainable_parameters * plan.sizes.is_trained)} trained; {listed}",
            *_held_text(recipe.config),
            _memory_text([(home.words, row) for home, row in plan.memory]),
            _room_text(*_peak(plan), chosen),
            _saves_text(plan),
            _time_text(plan, chosen, about, recipe.config.num_rollouts),
            f"measured   {_measured_text(recipe)}",
        ]
    )


def _nodes_text(placement: PlacementPlan) -> list[str]:
    """Which role works where in each phase: by groups of nodes, or by device sets. Empty if all roles share theirs."""
    nodes, devices = placement.rows_of_nodes(), placement.rows_of_devices()
    if nodes:
        cells = [["group", "nodes", "devices", *nodes[0][3]]]
        cells += [[label, where, words, *by_phase.values()] for label, where, words, by_phase in nodes]
        return ["nodes      " + _table(cells)]
    if len(devices) == 1:
        return []
    cells = [["devices", *devices[0][1]], *([words, *by_phase.values()] for words, by_phase in devices)]
    return ["phases     " + _table(cells)]


def _table(cells: Sequence[Sequence[str]]) -> str:
    """Lines of cells in columns, indented as a section of the plan."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n           ".join(lines)


def hardware_text(placement: PlacementPlan, device: Device) -> list[str]:
    """A sentence about groups whose devices are others than the one that the figures are for."""
    others = [
        f"{label} ({group.hardware})"
        for label, group in placement.node_groups.items()
        if group.hardware not in (None, "gpu") and str(group.hardware).lower() != device.name
    ]
    if not others:
        return []
    return [f"memory and time count every device as {device.name}, also those of {', '.join(others)}"]


def _rows_text(plan: RunSizes) -> str:
    if not plan.chooses_rows:
        return f"about {count_of(plan.settings.forward_rows, 'row')} in one forward, which the server chooses"
    return f"{count_of(plan.settings.forward_rows, 'row')} in one forward (rollout.forward_batch_size)"


def _micro_text(plan: RunSizes, device: Device) -> str:
    """The rows of a micro-batch, and who chose them."""
    if plan.geometry.micro_batch_tokens is not None:
        return (
            f"train      at most {plan.geometry.micro_batch_tokens} tokens in a micro-batch (stack.micro_batch_tokens)"
        )
    auto = f", chosen for {device.name}" if plan.geometry.micro_is_auto else ""
    return f"train      {count_of(plan.settings.micro_rows, 'row')} in a micro-batch (stack.micro_batch_size{auto})"


def _room_text(gib: float, at: str, device: Device) -> str:
    """One line that compares a peak with the memory of a device."""
    room = usable(device.memory_gib)
    fits = f"fits {device.name}" if gib <= room else f"does not fit {device.name}. `unirl fit` searches settings"
    return f"             peak {gib:,.1f} of {room:.1f} GiB ({at}): {fits}"


def _saves_text(plan: RunSizes) -> str:
    """One line about the main memory that saves need."""
    copied = copied_for_saves(plan.sizes, plan.settings)
    listed = ", ".join(f"{stem} {gib_text(gib)}" for stem, gib in copied.items())
    kept = "pinned and kept, checkpoint.asynchronous" if plan.sizes.saves_in_background else "one file at a time"
    total = gib_text(sum(copied.values()))
    return f"saves      {total} GiB of main memory in each training process for copies of {listed} ({kept})"


def _peak(plan: RunSizes) -> tuple[float, str]:
    """GiB at the peak of a run, and its moment."""
    peaks = moment_peaks(plan, plan.settings)
    at = max(peaks, key=lambda moment: peaks[moment])
    return peaks[at], at


def _time_text(plan: RunSizes, device: Device, about: str, num_rollouts: int) -> str:
    """The expected time of a step by phase, and what would make it faster."""
    sizes, by_phase = plan.sizes, times.step_times(plan.sizes, plan.settings, device)
    seconds = times.total_seconds(sizes, by_phase)
    lines = [f"time       {device.name}, {NOT_MEASURED}{f' ({about})' if about else ''}"]
    lines.append(f"             {'phase':<12}{'time':>9}   {'bound by':<10}{'MFU':>7}   " + _resources("alone:"))
    for name, phase in by_phase.items():
        if phase.seconds:
            parts = _resources("", phase.parts)
            lines.append(
                f"             {name:<12}{clock(phase.seconds):>9}   {phase.bound_by:<10}{phase.mfu:>7.1%}   {parts}"
            )
    lines.append(
        f"             step        {clock(seconds):>9}   {rate_text(plan, seconds)}; "
        f"{num_rollouts:,} steps take {duration(seconds * num_rollouts)}"
    )
    lines += [f"             {what}" for what in _not_predicted(sizes)]
    for gain in best_changes([plan], device, device.memory_gib):
        fits = "" if gain.peak_gib <= usable(device.memory_gib) else ", which does not fit"
        lines.append(f"           {clock(gain.seconds)} a step with {gain.word}; peak {gain.peak_gib:,.1f} GiB{fits}")
    return "\n".join(lines)


def _not_predicted(sizes: cost.Sizes) -> Iterator[str]:
    """What the times leave out, a line each."""
    if sizes.reward.unknown:
        yield f"without the time and the memory of {', '.join(sizes.reward.unknown)}"
    if sizes.caches_steps:
        yield "generate runs all blocks: what sampling.cache_threshold leaves out is known after a step"
    if sizes.engine_eight_bit:
        yield "generate multiplies at the rate of bf16: what rollout.weight_dtype=fp8 gains is not predicted"


def made_by(plan: RunSizes) -> str:
    """The noun for what a step generates."""
    facts = plan.estimate.facts
    if isinstance(facts, LatentFacts):
        return "images" if facts.frame_scale is None else "videos"
    return "tokens"


def _num_made(plan: RunSizes) -> int:
    """Tokens of a step, at their greatest number, or its images or videos."""
    return plan.sizes.num_samples * (plan.sizes.num_steps if plan.sizes.network.cache_width else 1)


def rate_text(plan: RunSizes, seconds: float) -> str:
    """Tokens, images or videos per second in a step of so many seconds, or per hour if they are few."""
    rate, unit = _num_made(plan) / seconds, "second"
    if rate < 1:
        rate, unit = 3600 * rate, "hour"
    return f"{rate:,.0f} {made_by(plan)} per {unit}" if rate >= 100 else f"{rate:.3g} {made_by(plan)} per {unit}"


def clock(seconds: float) -> str:
    """`0.12s`, `12.3s`, `3m20s`, `2h05m`; a dash for no time."""
    if not seconds:
        return "-"
    return duration(seconds) if seconds >= 99.95 else f"{seconds:.3g}s"


def _resources(first: str, parts: Mapping[str, float] | None = None) -> str:
    names = ("compute", "bytes", "launches", "gathers", "network", "host")
    cells = [f"{name:>9}" if parts is None else f"{clock(parts[name]):>9}" for name in names]
    return f"{first:<10}{''.join(cells)}"


def _transfer_text(transfer: WeightTransfer) -> str:
    if transfer.payload == "nothing":
        return "samples with the trained weights; no weight sync"
    what = {"adapter": "adapters", "merged": "weights with adapters folded in", "full": "all weights"}[transfer.payload]
    when = "every step" if transfer.interval == 1 else f"every {transfer.interval} steps"
    size, unit = (2**30, "GiB") if transfer.num_bytes >= 2**30 else (2**20, "MiB")
    return f"{what} to the engine, {transfer.num_bytes / size:.4g} {unit}, {transfer.transport}, {when}"


def _measured_text(recipe: Recipe) -> str:
    """The duration of the run, from the steps of the newest run with the same settings."""
    config = recipe.config
    root = Path(config.run.dir).expanduser() if config.run.dir else latest_run(config.run.project, recipe.file.name)
    seconds = [] if root is None else _step_seconds(recipe, root)
    if not seconds:
        return "unknown. Run one step (num_rollouts=1), then plan again"
    step = statistics.median(seconds)
    total = duration(step * config.num_rollouts)
    return f"{config.num_rollouts} steps x {step:.2f} s = {total} (median of {len(seconds)} steps in {root})"


def _step_seconds(recipe: Recipe, root: Path) -> list[float]:
    """Seconds of every step of the run in `root`, if its settings are those of the recipe."""
    resolved, metrics = root / "config" / "resolved.yaml", root / "metrics.jsonl"
    if not (resolved.is_file() and metrics.is_file()):
        return []
    if changed_keys(yaml.safe_load(resolved.read_text()), recipe.public()):
        return []
    return [row["time/step"] for row in read_rows(metrics) if "time/step" in row]


def gib_text(gib: float) -> str:
    """GiB in at most seven characters, with separators."""
    return f"{gib:.2f}" if gib < 1000 else f"{gib:,.1f}" if gib < 10_000 else f"{gib:,.0f}"


def _count(number: int) -> str:
    size = next(((scale, unit) for scale, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")) if number >= scale), (1, ""))
    return f"{number / size[0]:.3g}{size[1]}"


def _memory_text(rows: Sequence[tuple[str, cost.MemoryRow]]) -> str:
    """One block per device set. A dash means that the item is not on the device at this moment."""
    lines = [f"memory     {'GiB per device, estimated':<33}{''.join(f'{moment:>8}' for moment in cost.MOMENTS)}"]
    device_sets = list(dict.fromkeys(home for home, _ in rows))
    for device_set in device_sets:
        here = [row for home, row in rows if home == device_set]
        lines += [f"           {device_set}:"] if len(device_sets) > 1 else []
        lines += [_memory_line(row.name, row.gib) for row in here if any(row.gib.values())]
        lines.append(_memory_line("sum", {moment: sum(row.gib[moment] for row in here) for moment in cost.MOMENTS}))
    return "\n".join(lines)


def _memory_line(name: str, gib: Mapping[str, float]) -> str:
    cells = [f"{gib_text(gib[moment]):>8}" if gib[moment] else f"{'-':>8}" for moment in cost.MOMENTS]
    return f"             {name:<31}{''.join(cells)}"
