"""Keys of other frameworks and of older recipes, and what to write here instead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from unirl.config.device_sets import everywhere, example
from unirl.config.errors import ConfigError, GeometryError
from unirl.config.recipe import MAX_DEVICES

FOREIGN_KEYS: Mapping[str, Sequence[str]] = {
    "batch_size=<prompts per step>": ("prompts_per_rollout", "prompts_per_step", "rollout_batch_size"),
    "sampling.samples_per_prompt=<N>": ("num_samples_per_prompt", "group_size", "num_generations"),
    "placement, such as placement={train: 0-3, rollout: 4-7}; leave it out if all roles share all devices": ("layout",),
    "placement, such as placement={train: 0-3, rollout: 4-7}": ("train_fraction",),
    "pipeline.keep_resident=false: encoders and VAE leave the device while idle": ("enable_fsdp_offload",),
    "advantage.std=batch (or group)": ("adv_use_global_std", "adv_normalization_scope", "global_std"),
    "advantage.std=none (or group, batch)": ("normalize_adv_by_std", "scale_rewards", "norm_adv_by_std_in_grpo"),
    "advantage.std=none": ("no_advantage_std_norm",),
    "the keys of advantage, such as advantage.std, advantage.scope, advantage.leave_one_out": (
        "adv_estimator",
        "advantage_estimator",
    ),
    "advantage.clip=<bound>": ("adv_clip_max",),
    "advantage.trim=<share>": ("trimmed_ratio",),
    "advantage={_target_: unirl.algorithms.shared.advantages.RunningAdvantage}": ("per_prompt_stat_tracking",),
    "advantage.weights={<component>: <weight>}": ("reward_weights",),
    "advantage.combine=advantages (or rewards) and advantage.weights": (
        "multi_rewards_mix",
        "multi_objective_aggregation",
    ),
    "advantage.select.keep=<rows per group>": ("bestofn", "best_of_n"),
    "advantage.select.drop_dead=true": ("filter_groups", "dynamic_sampling"),
    "advantage.select.mean_range=[<low>, <high>]": ("dynamic_filtering_reward_range",),
    "sampling.kernel.eta=<noise level>": ("eta",),
    "sampling.kernel._target_=unirl.sde.kernels.FlowSDEStrategy": ("sde_strategy", "strategy"),
    "sampling.sde_steps._target_=unirl.sde.steps.FractionSteps": ("scheduler",),
    "sampling.trajectory_dtype=<fp32|bf16|fp16>": ("trajectory_precision",),
    "backend.optimizer_cfg.learning_rate=<rate>": ("lr", "learning_rate"),
    "sampling.seed=<integer>": ("seed",),
    "num_rollouts=<steps>": ("max_steps", "total_steps"),
    "run.dir=<folder>": ("save_dir", "output_dir"),
    "resume=<checkpoint folder>": ("load_dir",),
    "nothing: a checkpoint always holds all that is needed to continue": ("save_mode",),
    "evaluation.data_path=<file>": ("eval_data_path",),
    "evaluation.eval_steps=<steps>": ("eval_interval", "val_check_interval"),
    "evaluation.max_prompts=<prompts>": ("eval_num_prompts",),
    "evaluation.samples_per_prompt=<samples>": ("eval_samples_per_prompt",),
    "tracking (mirrors) and run (project, name, dir)": ("logging",),
    "tracking.mirrors=[wandb]": ("report_to_wandb",),
    "run.project=<name>": ("project_name",),
    "run.name=<name>": ("run_name",),
    "its keys one level up: data_source.data_path=<file>": ("args",),
    "backend (optimizer, LoRA) and stack (updates, micro-batches)": ("train",),
    "pipeline.env={_target_: <class of unirl.envs>, id: <environment>}": ("env", "env_type", "init_params"),
    "algorithm._target_=unirl.algorithms.action_ppo.ActionPPO (gae), .ActionGRPO (grpo) or unirl.algorithms.sac.SAC": (
        "adv_type",
        "loss_type",
    ),
    "batch_size=<starts per step>; there are batch_size x sampling.samples_per_prompt rows": (
        "total_num_envs",
        "num_envs",
        "rollout_epoch",
    ),
    "sampling.max_steps=<decisions of a row>": ("max_steps_per_rollout_epoch",),
    "pipeline.env.max_steps=<steps of an episode>": ("max_episode_steps",),
    "sampling.continuing=true": ("auto_reset",),
    "bundle.chunk=<actions of a decision>": ("num_action_chunks",),
    "stack.epochs=<passes> of unirl.train.transition_stack.TransitionStack": ("update_epoch",),
    "stack.minibatch_size=<decisions of an update>": ("global_batch_size",),
    "algorithm.clip_range=<bound>": ("clip_ratio_low",),
    "algorithm.clip_range_high=<bound>": ("clip_ratio_high",),
    "algorithm.value_huber=<threshold>": ("huber_delta",),
    "algorithm.entropy_coef=<factor>": ("entropy_bonus",),
    "algorithm.norm=batch and algorithm.target=live (CrossQ)": ("q_head_type",),
    "a wrapper of the environment, registered with Gymnasium": ("reward_coef", "use_rel_reward"),
    "pipeline.env={_target_: unirl.envs.scored.ScoredEnvironment, env: <environment>, reward: <class with score>, "
    "env_weight: <factor>}": ("env_reward_weight",),
    "bundle.path=<folder or hub id>": ("model", "pretrained_model_ckpt_path"),
    "row_transport=object_store|collective, or +transfer_queue=simple|mooncake": ("transport_kind",),
    "nothing: values that are no tensors travel with the answer of the worker that made them": (
        "bytes_buffer_size_gb",
        "manager_merge_to_tensordict",
    ),
    "nothing: the driver holds no rows": (
        "single_controller_tensor_buffer_size_gb",
        "single_controller_bytes_buffer_size_gb",
    ),
    "nothing: a client has the name of its worker": ("client_name",),
}
"""A key of a recipe -> the names that other frameworks and older recipes have for it."""

WRITE_INSTEAD = {name: instead for instead, names in FOREIGN_KEYS.items() for name in names}
"""A name of another framework, or of older recipes -> the key to write instead."""

ENVIRONMENTS: Mapping[str, str] = {
    "maniskill": "{_target_: unirl.envs.maniskill.ManiSkillImageEnvironment, id: PickCube-v1}",
    "libero": "{_target_: unirl.envs.libero.LiberoEnvironment, suite: libero_spatial}",
    "metaworld": "{_target_: unirl.envs.metaworld.MetaWorldEnvironment, task: reach-v3}",
    "frankasim": "{_target_: unirl.envs.franka_sim.FrankaSimEnvironment}",
    "robocasa": "{_target_: unirl.envs.gymnasium.GymnasiumEnvironment, "
    "id: robocasa.wrappers.gym_wrapper:robocasa/<task>, max_steps: 500}",
    **{
        kind: f"{{_target_: unirl.envs.simulators.{name}Environment, task: <task>, observations: {{<key>: <part>}}, "
        "actions: <count>, config: <file>}"
        for kind, name in (
            ("calvin", "Calvin"),
            ("habitat", "Habitat"),
            ("isaaclab", "IsaacLab"),
            ("behavior", "Behavior"),
            ("robotwin", "RoboTwin"),
        )
    },
    "wan_wm": "{_target_: unirl.envs.world_model.WorldModelEnvironment, path: <folder>, "
    "first: <environment>, reward: <class with score>}",
    "d4rl": "{_target_: unirl.envs.gymnasium.GymnasiumEnvironment, id: gymnasium_robotics:AntMaze_UMaze-v5}",
}
"""An `env_type` of RLinf -> an environment here."""
NO_ADAPTER = (
    "mujoco_warp",
    "opensora_wm",
    "embodichain",
    "roboverse",
    "realworld",
)
"""The `env_type` values of RLinf for which no environment is here."""


def refuse_environment_types(tree: Mapping[str, object]) -> None:
    """Refuses `env_type` of RLinf, such as `env.train.env_type: libero`, and names the environment to write instead.

    Raises:
        ConfigError: 2003.
    """
    for path, kind in _environment_types(tree.get("env"), "env"):
        if kind in ENVIRONMENTS:
            raise ConfigError(
                f"{path}={kind}: the pipeline has the environment. Write pipeline.env={ENVIRONMENTS[kind]}"
            )
        if kind in NO_ADAPTER:
            raise ConfigError(
                f"{path}={kind}: there is no adapter for this simulator. Register a gymnasium.Env around it, and write "
                "pipeline.env={_target_: unirl.envs.gymnasium.GymnasiumEnvironment, id: <module>:<id>}"
            )


def _environment_types(value: object, path: str) -> Iterator[tuple[str, str]]:
    """Each `env_type` below a key, with its path."""
    if isinstance(value, Mapping):
        for key, below in value.items():
            if key == "env_type" and isinstance(below, str):
                yield f"{path}.env_type", below
            yield from _environment_types(below, f"{path}.{key}")


def refuse_layout_keys(tree: Mapping[str, object]) -> None:
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


def _whole_devices(fraction: object, num_devices: int) -> int | None:
    """The devices that a fraction of the pool gives. None without a fraction, which means half."""
    if fraction is None:
        return None
    devices = fraction * num_devices if isinstance(fraction, (int, float)) else 0.0
    if not 0 < devices < num_devices or devices != round(devices):
        raise GeometryError(
            f"train_fraction={fraction} of num_devices={num_devices} is no whole number of devices that leaves some "
            f"for rollout. Write a placement instead, such as {example(num_devices)}"
        )
    return int(devices)
