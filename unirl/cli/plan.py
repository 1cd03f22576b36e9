"""`unirl plan RECIPE`: what a run would do and hold, without loading a model."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from unirl.cli.arguments import parse_recipe, recipe_parser
from unirl.cli.check import checked
from unirl.config.failures import Session
from unirl.plan import memory

EXAMPLES = (
    "unirl plan diffusion/sd3_trainside",
    "unirl plan diffusion/sd3_trainside batch_size=24 stack.micro_batch_size=8",
    "unirl plan diffusion/quickstart --json",
)
DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def run(argv: list[str], session: Session) -> int:
    parser = recipe_parser("plan", "Check a recipe, and say what it would do: geometry, parameters, memory.", EXAMPLES)
    parser.option("--json", action="store_true", help="as JSON")
    arguments = parse_recipe(parser, argv)
    return show_plan(arguments.recipe, arguments.overrides, as_json=arguments.options.json)


def show_plan(recipe: str, overrides: Sequence[str], as_json: bool = False) -> int:
    """Print the plan of a recipe; gives back the exit status."""
    from unirl.plan.geometry import geometry_table
    from unirl.plan.placement import plan_of
    from unirl.trainer.residency import PHASES, home_of, memory_parts, resident

    found = checked(recipe, overrides)
    plan, estimate = plan_of(found.config), _estimate(found)
    sizes = _sizes(found, plan, estimate)
    on_devices: dict[str, tuple[str, ...]] = {phase: resident(plan, phase) for phase in PHASES}
    rows = memory.memory_table(sizes, on_devices)
    travels = _travel(found, plan, estimate, sizes)
    if as_json:
        facts = {
            "recipe": found.file.name,
            "placement": {role: device_set.words for role, device_set in plan.device_sets.items()},
            "relation": plan.relation,
            "sync": asdict(travels),
            "resident": on_devices,
            "parameters": dict(estimate.parameters),
            "sizes": asdict(sizes),
        }
        print(json.dumps(facts | {"memory_gib": [asdict(row) for row in rows]}, indent=1))
        return 0
    print(f"{found.file.name}   {found.file.path}\n{geometry_table(found.config)}")
    print(f"placement  {plan.describe()}\n           {_travel_text(travels)}")
    print(_parameters_text(estimate.parameters, sizes))
    print(_memory_text(rows, {part: home_of(plan, part).words for part in memory_parts(plan)}))
    print(f"time       {_time_text(found)}")
    return 0


@dataclass(frozen=True)
class Travel:
    """What is sent to the engine, and how."""

    payload: str
    """nothing, adapter, merged or full."""
    transport: str
    num_bytes: int
    interval: int  # steps


def _travel(recipe, plan, estimate, sizes: memory.MemoryInputs) -> Travel:
    from unirl.plan.layout import transport_of

    config = recipe.config
    if not plan.is_dedicated:
        return Travel("nothing", "none", 0, 1)
    keys = config.sync.values
    lora = recipe.value("backend.lora_cfg")
    payload = "full" if lora is None else "merged" if keys["merge_adapters"] else "adapter"
    number = _adapted(estimate, lora["target_modules"]) if payload == "merged" else sizes.trainable_parameters
    stored = memory.MASTER_BYTES if payload == "adapter" else sizes.engine_dtype_bytes
    size = DTYPE_BYTES[keys["wire_dtype"]] if keys["wire_dtype"] else stored
    return Travel(payload, transport_of(config, plan), number * size, config.weight_sync_interval)


def _adapted(estimate, targets: Sequence[str] | str) -> int:
    """Parameters of the layers that carry adapters."""
    names = estimate.facts.lora_targets if targets == "model" else targets
    suffixes = tuple(f".{name}" for name in names)
    layers = [shape for name, shape in estimate.linears.items() if f".{name}".endswith(suffixes)]
    return sum(inputs * outputs for inputs, outputs in layers)


def _travel_text(travel: Travel) -> str:
    if travel.payload == "nothing":
        return "the engine has no weights of its own: nothing is sent"
    what = {"adapter": "adapters", "merged": "weights with adapters folded in", "full": "all weights"}[travel.payload]
    when = "every step" if travel.interval == 1 else f"every {travel.interval} steps"
    return f"{what} to the engine, {travel.num_bytes / 2**20:.4g} MiB, {travel.transport}, {when}"


def _time_text(recipe) -> str:
    """What the run will take, from the steps of the newest run with the same settings."""
    from unirl.tracking.console import duration
    from unirl.tracking.run_directory import latest_run

    config = recipe.config
    root = Path(config.run.dir).expanduser() if config.run.dir else latest_run(config.run.project, recipe.file.name)
    seconds = [] if root is None else _step_seconds(recipe, root)
    if not seconds:
        return "known once a step was measured: run with num_rollouts=1, then plan again"
    step = statistics.median(seconds)
    total = duration(step * config.num_rollouts)
    return f"{config.num_rollouts} steps x {step:.2f} s = {total} (median of {len(seconds)} steps in {root})"


def _step_seconds(recipe, root: Path) -> list[float]:
    """Seconds of every step that the run in `root` finished, if its settings are those of the recipe."""
    import yaml

    from unirl.tracking.tables import read_rows
    from unirl.trainer.resume import changed_keys

    resolved, metrics = root / "config" / "resolved.yaml", root / "metrics.jsonl"
    if not (resolved.is_file() and metrics.is_file()):
        return []
    if changed_keys(yaml.safe_load(resolved.read_text()), recipe.resolved()):
        return []
    return [row["time/step"] for row in read_rows(metrics) if "time/step" in row]


def _estimate(recipe):
    """The bundle class's own account of a model that is not loaded."""
    bundle = recipe.config.bundle
    return bundle.schema.owner.estimate(bundle.values["path"], bundle.values["revision"])


def _sizes(recipe, plan, estimate) -> memory.MemoryInputs:
    from unirl.config.build import build
    from unirl.plan.preflight import needs_of, sizes_of
    from unirl.types.protocols import REFERENCE

    policy = estimate.parameters[estimate.facts.trainable_attr]
    lora = recipe.value("backend.lora_cfg")
    targets = None if lora is None or lora["target_modules"] == "model" else lora["target_modules"]
    sampling = build(recipe.config.sampling)
    sized = [sampling.at_size(*size) for size in sizes_of(recipe.config)]
    tokens = max(estimate.facts.tokens_of(one) for one in sized or [sampling])
    fsdp = recipe.value("backend.fsdp_cfg") or {}
    averages = [recipe.value(f"backend.{name}") for name in ("ema_cfg", "ema_lora_cfg")]
    loaded = recipe.value("backend.snapshots") or {}
    reads_reference = REFERENCE in needs_of(recipe.config).snapshots
    return memory.MemoryInputs(
        policy_parameters=policy,
        other_parameters=sum(estimate.parameters.values()) - policy,
        trainable_parameters=policy if lora is None else estimate.lora_parameters(lora["rank"], targets),
        dtype_bytes=DTYPE_BYTES[recipe.value("bundle.dtype")],
        full_training=lora is None,
        num_snapshots=sum(average is not None for average in averages) + len({*loaded, *[REFERENCE] * reads_reference}),
        tokens=tokens,
        width=estimate.width,
        num_blocks=estimate.num_blocks,
        cache_width=estimate.cache_width,
        rollout_rows=recipe.value("rollout.forward_batch_size") * sampling.rows_per_sample,
        train_rows=_micro_rows(recipe, tokens) * sampling.rows_per_sample,
        recompute=fsdp.get("activation_checkpointing", False),
        keep_resident=recipe.config.pipeline.values.get("keep_resident", True),
        num_shards=fsdp.get("shard_size") or len(plan.train),
        engine_dtype_bytes=DTYPE_BYTES[_engine_dtype(recipe)] if plan.is_dedicated else 0,
    )


def _engine_dtype(recipe) -> str:
    own = recipe.config.rollout.values.get("dtype")
    return recipe.value("bundle.dtype") if own is None else own


def _micro_rows(recipe, tokens: int) -> int:
    """Rows of the longest kind in one micro-batch."""
    budget = recipe.value("stack.micro_batch_tokens")
    return recipe.value("stack.micro_batch_size") if budget is None else max(budget // tokens, 1)


def _parameters_text(parameters: Mapping[str, int], sizes: memory.MemoryInputs) -> str:
    listed = ", ".join(f"{name} {_count(number)}" for name, number in parameters.items())
    return f"parameters {_count(sizes.trainable_parameters)} trained; {listed}"


def _count(number: int) -> str:
    size = next(((scale, unit) for scale, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")) if number >= scale), (1, ""))
    return f"{number / size[0]:.3g}{size[1]}"


def _memory_text(rows: Sequence[memory.MemoryRow], homes: Mapping[str, str]) -> str:
    """One block per device_set; a dash = not on the device in this phase."""
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
