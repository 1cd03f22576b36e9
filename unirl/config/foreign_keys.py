"""Keys of other frameworks and of older recipes, and what to write here instead."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from unirl.config.device_sets import everywhere, example
from unirl.config.errors import ConfigError, GeometryError
from unirl.config.recipe import MAX_DEVICES

WRITE_INSTEAD: dict[str, str] = {
    "prompts_per_rollout": "batch_size=<prompts per step>",
    "prompts_per_step": "batch_size=<prompts per step>",
    "rollout_batch_size": "batch_size=<prompts per step>",
    "num_samples_per_prompt": "sampling.samples_per_prompt=<N>",
    "group_size": "sampling.samples_per_prompt=<N>",
    "num_generations": "sampling.samples_per_prompt=<N>",
    "layout": "placement, such as placement={train: 0-3, rollout: 4-7}; leave it out if all roles share all devices",
    "train_fraction": "placement, such as placement={train: 0-3, rollout: 4-7}",
    "enable_fsdp_offload": "pipeline.keep_resident=false: encoders and VAE leave the device while idle",
    "adv_use_global_std": "advantage.std=batch (or group)",
    "adv_normalization_scope": "advantage.std=batch (or group)",
    "normalize_adv_by_std": "advantage.std=none (or group, batch)",
    "global_std": "advantage.std=batch (or group)",
    "scale_rewards": "advantage.std=none (or group, batch)",
    "norm_adv_by_std_in_grpo": "advantage.std=none (or group, batch)",
    "no_advantage_std_norm": "advantage.std=none",
    "adv_estimator": "the keys of advantage, such as advantage.std, advantage.scope, advantage.leave_one_out",
    "advantage_estimator": "the keys of advantage, such as advantage.std, advantage.scope, advantage.leave_one_out",
    "adv_clip_max": "advantage.clip=<bound>",
    "trimmed_ratio": "advantage.trim=<share>",
    "per_prompt_stat_tracking": "advantage={_target_: unirl.algorithms.shared.advantages.RunningAdvantage}",
    "reward_weights": "advantage.weights={<component>: <weight>}",
    "multi_rewards_mix": "advantage.combine=advantages (or rewards) and advantage.weights",
    "multi_objective_aggregation": "advantage.combine=advantages (or rewards) and advantage.weights",
    "bestofn": "advantage.select.keep=<rows per group>",
    "best_of_n": "advantage.select.keep=<rows per group>",
    "filter_groups": "advantage.select.drop_dead=true",
    "dynamic_sampling": "advantage.select.drop_dead=true",
    "dynamic_filtering_reward_range": "advantage.select.mean_range=[<low>, <high>]",
    "eta": "sampling.kernel.eta=<noise level>",
    "sde_strategy": "sampling.kernel._target_=unirl.sde.kernels.FlowSDEStrategy",
    "strategy": "sampling.kernel._target_=unirl.sde.kernels.FlowSDEStrategy",
    "scheduler": "sampling.sde_steps._target_=unirl.sde.steps.FractionSteps",
    "trajectory_precision": "sampling.trajectory_dtype=<fp32|bf16|fp16>",
    "lr": "backend.optimizer_cfg.learning_rate=<rate>",
    "learning_rate": "backend.optimizer_cfg.learning_rate=<rate>",
    "seed": "sampling.seed=<integer>",
    "max_steps": "num_rollouts=<steps>",
    "total_steps": "num_rollouts=<steps>",
    "save_dir": "run.dir=<folder>",
    "output_dir": "run.dir=<folder>",
    "load_dir": "resume=<checkpoint folder>",
    "save_mode": "nothing: a checkpoint always holds all that is needed to continue",
    "eval_data_path": "evaluation.data_path=<file>",
    "eval_interval": "evaluation.eval_steps=<steps>",
    "eval_num_prompts": "evaluation.max_prompts=<prompts>",
    "eval_samples_per_prompt": "evaluation.samples_per_prompt=<samples>",
    "logging": "tracking (mirrors) and run (project, name, dir)",
    "report_to_wandb": "tracking.mirrors=[wandb]",
    "project_name": "run.project=<name>",
    "run_name": "run.name=<name>",
    "args": "its keys one level up: data_source.data_path=<file>",
    "train": "backend (optimizer, LoRA) and stack (updates, micro-batches)",
    "model": "bundle.path=<folder or hub id>",
    "pretrained_model_ckpt_path": "bundle.path=<folder or hub id>",
}
"""Key of another framework, or of older recipes, to what to write here instead."""


def refuse_layout_keys(tree: Mapping[str, Any]) -> None:
    """Refuses `layout: colocate|separate` and `train_fraction: 0.5`, and names the placement to write instead.

    Raises:
        ConfigError: 2003, or 2010 for a fraction that does not give a whole number of devices.
    """
    layout, fraction = tree.get("layout"), tree.get("train_fraction")
    if layout not in (None, "colocate", "separate") or (layout is None and fraction is None):
        return
    total = tree.get("num_devices", 1)
    num_devices = total if type(total) is int and 0 < total <= MAX_DEVICES else 1
    written = ", ".join(f"{key}={tree[key]}" for key in ("layout", "train_fraction") if tree.get(key) is not None)
    if layout == "colocate":
        everything = everywhere(num_devices)
        line = f"placement={{train: {everything}, rollout: {everything}}}, or nothing, which means the same"
    elif num_devices == 1:
        line = f"{example(2)} and num_devices=2"
    else:
        line = example(num_devices, _whole_devices(fraction, num_devices))
    raise ConfigError(f"{written}: the placement of the roles determines this. Write {line}")


def _whole_devices(fraction: Any, num_devices: int) -> int | None:
    """The devices that a fraction of the pool gives. None without a fraction, which means half."""
    if fraction is None:
        return None
    numeric = isinstance(fraction, (int, float)) and not isinstance(fraction, bool) and math.isfinite(fraction)
    devices = fraction * num_devices if numeric else 0
    if devices != round(devices) or not 0 < devices < num_devices:
        raise GeometryError(
            f"train_fraction={fraction} of num_devices={num_devices} is no whole number of devices that leaves some "
            f"for rollout. Write a placement instead, such as {example(num_devices)}"
        )
    return int(devices)
