"""`unirl plan RECIPE`: what a run would do and hold, without loading a model."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from unirl.cli import memory
from unirl.cli.arguments import parse_recipe, recipe_parser
from unirl.cli.check import checked
from unirl.cli.failures import Session

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
    from unirl.config.geometry import geometry_table

    found = checked(recipe, overrides)
    estimate = _estimate(found)
    sizes = _sizes(found, estimate)
    rows = memory.table(sizes)
    if as_json:
        facts = {"recipe": found.file.name, "parameters": dict(estimate.parameters), "sizes": asdict(sizes)}
        print(json.dumps(facts | {"memory_gib": [asdict(row) for row in rows]}, indent=1))
        return 0
    print(f"{found.file.name}   {found.file.path}\n{geometry_table(found.config)}")
    print(_parameters_text(estimate.parameters, sizes))
    print(_memory_text(rows))
    print(f"time       {_time_text(found)}")
    return 0


def _time_text(recipe) -> str:
    """What the run will take, from the steps of the newest run with the same settings."""
    from unirl.tracking.lines import duration
    from unirl.tracking.run import latest_run

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


def _sizes(recipe, estimate) -> memory.Sizes:
    policy = estimate.parameters[estimate.facts.trainable_attr]
    lora = recipe.value("backend.lora_cfg")
    targets = None if lora is None or lora["target_modules"] == "model" else lora["target_modules"]
    sampling = recipe.value("sampling")
    guidance_rows = 2 if sampling["guidance_scale"] != 1 and sampling["guidance_passes"] == 1 else 1
    fsdp = recipe.value("backend.fsdp_cfg") or {}
    averages = [recipe.value(f"backend.{name}") for name in ("ema_cfg", "ema_lora_cfg")]
    return memory.Sizes(
        policy_parameters=policy,
        other_parameters=sum(estimate.parameters.values()) - policy,
        trainable_parameters=policy if lora is None else estimate.lora_parameters(lora["rank"], targets),
        dtype_bytes=DTYPE_BYTES[recipe.value("bundle.dtype")],
        full_training=lora is None,
        num_snapshots=sum(average is not None for average in averages),
        tokens=_tokens(estimate, sampling),
        width=estimate.width,
        num_blocks=estimate.num_blocks,
        rollout_rows=recipe.value("rollout.forward_batch_size") * guidance_rows,
        train_rows=recipe.value("stack.micro_batch_size") * guidance_rows,
        recompute=fsdp.get("activation_checkpointing", False),
        keep_resident=recipe.value("pipeline.keep_resident"),
    )


def _tokens(estimate, sampling: Mapping[str, int]) -> int:
    image = estimate.facts.image_seq_len(sampling["height"], sampling["width"])
    return image + sampling["max_sequence_length"]


def _parameters_text(parameters: Mapping[str, int], sizes: memory.Sizes) -> str:
    listed = ", ".join(f"{name} {_count(number)}" for name, number in parameters.items())
    return f"parameters {_count(sizes.trainable_parameters)} trained; {listed}"


def _count(number: int) -> str:
    size = next(((scale, unit) for scale, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")) if number >= scale), (1, ""))
    return f"{number / size[0]:.3g}{size[1]}"


def _memory_text(rows: Sequence[memory.Row]) -> str:
    total = memory.peak(list(rows))
    lines = ["memory     GiB per device, estimated         rollout     train"]
    lines += [f"             {row.role:<26}{row.rollout:>13.2f}{row.train:>10.2f}" for row in rows]
    lines.append(f"             {'sum':<26}{total['rollout']:>13.2f}{total['train']:>10.2f}")
    lines.append("             (reward models, the decoder's activations and allocator slack come on top)")
    return "\n".join(lines)
