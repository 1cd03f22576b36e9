"""`unirl plan RECIPE`: prints geometry, devices, parameters, memory and time of a run, without loading a model."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unirl.cli.arguments import parse_recipe, recipe_parser
from unirl.cli.check import checked
from unirl.config.failures import Session
from unirl.plan import memory
from unirl.plan.geometry import geometry_table
from unirl.plan.placement import PlacementPlan, plan_of
from unirl.trainer.residency import PHASES, home_of, memory_parts, resident

if TYPE_CHECKING:
    from unirl.config.load import Recipe
    from unirl.config.node import Node
    from unirl.models.loading.estimate import ModelEstimate
    from unirl.types.sampling import Sampling

EXAMPLES = (
    "unirl plan diffusion/sd3_trainside",
    "unirl plan diffusion/sd3_trainside batch_size=24 stack.micro_batch_size=8",
    "unirl plan diffusion/quickstart --json",
)
DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def run(argv: list[str], session: Session) -> int:
    parser = recipe_parser("plan", "Check a recipe, and print its geometry, devices, memory and time.", EXAMPLES)
    parser.option("--json", action="store_true", help="as JSON")
    arguments = parse_recipe(parser, argv)
    return show_plan(arguments.recipe, arguments.overrides, as_json=arguments.options.json)


def show_plan(name: str, overrides: Sequence[str], as_json: bool = False) -> int:
    """Prints the plan of a recipe. Returns the exit status."""
    recipe = checked(name, overrides)
    print(json.dumps(plan_facts(recipe), indent=1) if as_json else plan_text(recipe))
    return 0


def plan_facts(recipe: Recipe) -> dict[str, Any]:
    """The plan of a recipe as JSON values."""
    plan = RunPlan.of(recipe)
    return {
        "recipe": recipe.file.name,
        "placement": {role: device_set.words for role, device_set in plan.placement.device_sets.items()},
        "relation": plan.placement.relation,
        "sync": asdict(plan.transfer),
        "resident": plan.resident,
        "parameters": dict(plan.parameters),
        "sizes": asdict(plan.sizes),
        "memory_gib": [asdict(row) for row in plan.memory],
    }


def plan_text(recipe: Recipe) -> str:
    """The plan of a recipe for people."""
    plan = RunPlan.of(recipe)
    homes: dict[str, str] = {part: home_of(plan.placement, part).words for part in memory_parts(plan.placement)}
    return "\n".join(
        [
            f"{recipe.file.name}   {recipe.file.path}",
            geometry_table(recipe.config),
            f"placement  {plan.placement.describe()}\n           {_transfer_text(plan.transfer)}",
            _parameters_text(plan.parameters, plan.sizes),
            _memory_text(plan.memory, homes),
            f"time       {_time_text(recipe)}",
        ]
    )


@dataclass(frozen=True)
class RunPlan:
    """The facts that both forms of a plan show."""

    placement: PlacementPlan
    parameters: Mapping[str, int]
    sizes: memory.MemoryInputs
    resident: Mapping[str, Sequence[str]]
    """Phase to the parts that are on their devices in it."""
    memory: list[memory.MemoryRow]
    transfer: WeightTransfer

    @classmethod
    def of(cls, recipe: Recipe) -> RunPlan:
        """Works it out from configuration files alone."""
        placement, estimate = plan_of(recipe.config), _estimate(recipe)
        sizes = _memory_inputs(recipe, placement, estimate)
        on_devices: dict[str, Sequence[str]] = {phase: resident(placement, phase) for phase in PHASES}
        rows = memory.memory_table(sizes, on_devices)
        transfer = _weight_transfer(recipe, placement, estimate, sizes)
        return cls(placement, estimate.parameters, sizes, on_devices, rows, transfer)


@dataclass(frozen=True)
class WeightTransfer:
    """The weights that are sent to the engine, and how."""

    payload: str  # nothing, adapter, merged or full
    transport: str
    num_bytes: int
    interval: int  # steps


def _weight_transfer(
    recipe: Recipe, plan: PlacementPlan, estimate: ModelEstimate, sizes: memory.MemoryInputs
) -> WeightTransfer:
    from unirl.plan.layout import transport_of

    config = recipe.config
    if config.sync is None:
        return WeightTransfer("nothing", "none", 0, 1)
    payload = "full" if config.lora is None else "merged" if config.merges_adapters else "adapter"
    number = sizes.trainable_parameters
    if config.lora is not None and config.merges_adapters:
        number = _adapted_parameters(estimate, config.lora.values["target_modules"])
    stored = memory.MASTER_BYTES if payload == "adapter" else sizes.engine_dtype_bytes
    wire_dtype = config.sync.get("wire_dtype", str)
    size = stored if wire_dtype is None else DTYPE_BYTES[wire_dtype]
    return WeightTransfer(payload, transport_of(config, plan), number * size, config.weight_sync_interval)


def _adapted_parameters(estimate: ModelEstimate, targets: Sequence[str] | str) -> int:
    """Parameters of the layers that have adapters."""
    names = estimate.facts.lora_targets if targets == "model" else targets
    suffixes = tuple(f".{name}" for name in names)
    layers = [shape for name, shape in estimate.linears.items() if f".{name}".endswith(suffixes)]
    return sum(inputs * outputs for inputs, outputs in layers)


def _transfer_text(transfer: WeightTransfer) -> str:
    if transfer.payload == "nothing":
        return "the engine has no weights of its own: nothing is sent"
    what = {"adapter": "adapters", "merged": "weights with adapters folded in", "full": "all weights"}[transfer.payload]
    when = "every step" if transfer.interval == 1 else f"every {transfer.interval} steps"
    return f"{what} to the engine, {transfer.num_bytes / 2**20:.4g} MiB, {transfer.transport}, {when}"


def _time_text(recipe: Recipe) -> str:
    """The duration of the run, from the steps of the newest run with the same settings."""
    from unirl.tracking.console import duration
    from unirl.tracking.run_directory import latest_run

    config = recipe.config
    root = Path(config.run.dir).expanduser() if config.run.dir else latest_run(config.run.project, recipe.file.name)
    seconds = [] if root is None else _step_seconds(recipe, root)
    if not seconds:
        return "unknown until a step was measured: run with num_rollouts=1, then plan again"
    step = statistics.median(seconds)
    total = duration(step * config.num_rollouts)
    return f"{config.num_rollouts} steps x {step:.2f} s = {total} (median of {len(seconds)} steps in {root})"


def _step_seconds(recipe: Recipe, root: Path) -> list[float]:
    """Seconds of every step of the run in `root`, if its settings are those of the recipe."""
    import yaml

    from unirl.tracking.tables import read_rows
    from unirl.trainer.resume import changed_keys

    resolved, metrics = root / "config" / "resolved.yaml", root / "metrics.jsonl"
    if not (resolved.is_file() and metrics.is_file()):
        return []
    if changed_keys(yaml.safe_load(resolved.read_text()), recipe.resolved()):
        return []
    return [row["time/step"] for row in read_rows(metrics) if "time/step" in row]


def _estimate(recipe: Recipe) -> ModelEstimate:
    """The sizes of the model, from the configuration files that its bundle class reads."""
    config = recipe.config
    estimate: ModelEstimate = config.bundle.schema.owner.estimate(config.model_path, config.model_revision)  # type: ignore[attr-defined]
    return estimate


def _memory_inputs(recipe: Recipe, plan: PlacementPlan, estimate: ModelEstimate) -> memory.MemoryInputs:
    from unirl.config.build import build
    from unirl.config.node import Node
    from unirl.plan.preflight import needs_of, sizes_of
    from unirl.types.protocols import REFERENCE

    policy = estimate.parameters[estimate.facts.trainable_attr]
    config = recipe.config
    sampling: Sampling = build(config.sampling)
    sized = [sampling.at_size(*size) for size in sizes_of(config)]
    tokens = max(estimate.facts.tokens_of(one) for one in sized or [sampling])
    fsdp = config.backend.get("fsdp_cfg", Node)
    averages = [config.backend.get(name, Node) for name in ("ema_cfg", "ema_lora_cfg")]
    snapshots = {*(config.backend.values.get("snapshots") or {})}
    if REFERENCE in needs_of(config).snapshots:
        snapshots.add(REFERENCE)
    return memory.MemoryInputs(
        policy_parameters=policy,
        other_parameters=sum(estimate.parameters.values()) - policy,
        trainable_parameters=policy if config.lora is None else _lora_parameters(config.lora, estimate),
        dtype_bytes=DTYPE_BYTES[config.bundle.require("dtype", str)],
        full_training=config.lora is None,
        num_snapshots=sum(average is not None for average in averages) + len(snapshots),
        tokens=tokens,
        width=estimate.width,
        num_blocks=estimate.num_blocks,
        cache_width=estimate.cache_width,
        rollout_rows=config.rollout.require("forward_batch_size", int) * sampling.rows_per_sample,
        train_rows=_micro_rows(recipe, tokens) * sampling.rows_per_sample,
        recompute=fsdp is not None and fsdp.require("activation_checkpointing", bool),
        keep_resident=config.pipeline.get("keep_resident", bool) is not False,
        num_shards=(fsdp and fsdp.get("shard_size", int)) or len(plan.train),
        engine_dtype_bytes=DTYPE_BYTES[_engine_dtype(recipe)] if plan.is_dedicated else 0,
    )


def _lora_parameters(lora: Node, estimate: ModelEstimate) -> int:
    targets = lora.get("target_modules", tuple)  # None for "model", the model's own list
    return estimate.lora_parameters(lora.require("rank", int), targets)


def _engine_dtype(recipe: Recipe) -> str:
    return recipe.config.rollout.get("dtype", str) or recipe.config.bundle.require("dtype", str)


def _micro_rows(recipe: Recipe, tokens: int) -> int:
    """Rows of a micro-batch of the longest samples."""
    budget = recipe.config.micro_batch_tokens
    return recipe.config.micro_batch_size if budget is None else max(budget // tokens, 1)


def _parameters_text(parameters: Mapping[str, int], sizes: memory.MemoryInputs) -> str:
    listed = ", ".join(f"{name} {_count(number)}" for name, number in parameters.items())
    return f"parameters {_count(sizes.trainable_parameters)} trained; {listed}"


def _count(number: int) -> str:
    size = next(((scale, unit) for scale, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")) if number >= scale), (1, ""))
    return f"{number / size[0]:.3g}{size[1]}"


def _memory_text(rows: Sequence[memory.MemoryRow], homes: Mapping[str, str]) -> str:
    """One block per device set. A dash means that the item is not on the device in this phase."""
    lines = [f"memory     {'GiB per device, estimated':<26}{''.join(f'{phase:>10}' for phase in memory.PHASES)}"]
    device_sets = list(dict.fromkeys(homes[row.part] for row in rows))
    for device_set in device_sets:
        here = [row for row in rows if homes[row.part] == device_set]
        lines += [f"           {device_set}:"] if len(device_sets) > 1 else []
        lines += [_memory_line(row.role, row.gib) for row in here if any(row.gib.values())]
        lines.append(_memory_line("sum", memory.peak(here)))
    lines.append("             (reward models, the decoder's activations and allocator slack come on top)")
    return "\n".join(lines)


def _memory_line(name: str, gib: Mapping[str, float]) -> str:
    cells = [f"{gib[phase]:>10.2f}" if gib[phase] else f"{'-':>10}" for phase in memory.PHASES]
    return f"             {name:<24}{''.join(cells)}"
