"""Notices about a recipe that a user should see once: values that are unusual, without effect, or from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

from unirl.algorithms.diffusion_grpo import DiffusionGRPO
from unirl.config.build import build
from unirl.config.load import Recipe
from unirl.config.recipe import RecipeConfig
from unirl.plan.compatibility import KEPT_BY, TOKEN_TIS, reads_snapshot
from unirl.plan.geometry import Geometry
from unirl.plan.layout import layout_notices
from unirl.plan.placement import PlacementPlan
from unirl.types.protocols import Needs

HIGH_RATE = 0.1
"""A learning rate of AdamW from which on a run gets a notice: each update moves every weight by about so much."""
HIGH_CLIP_RANGE = 0.05
"""A clip range of denoising steps from which on a run gets a notice; 0.2 is usual for tokens."""
NAMED_ENGINES = {"vllmomni": ("vllm_omni", "vLLM-Omni"), "sglang": ("sglang", "SGLang")}
"""Word in the names of recipes to the package of an engine, and the name of its server."""


def environment_notices(recipe: Recipe) -> Iterator[str]:
    """Values that the environment set."""
    for layer in recipe.composed.layers:
        if layer.source == "environment":
            yield from (f"{path} is set by the environment variable {name}" for path, name in layer.places.items())


def data_notices(recipe: Recipe) -> Iterator[str]:
    """Prompts of evaluations that come from the recipe, while those of training were replaced."""
    evaluation, composed = recipe.config.evaluation, recipe.composed
    keys = ("data_source.data_path", "evaluation.data_path")
    trained, held_out = (next((origin for origin in composed.why(key) if origin.place), None) for key in keys)
    if not evaluation.enabled or evaluation.data_path is None or trained is None or held_out is None:
        return
    is_own = trained.source != "recipe" or not recipe.file.is_listed
    if is_own and held_out.source == "recipe" and trained.file != held_out.file:
        yield (
            f"evaluations still score the prompts of {held_out.value} ({held_out.place}), and training those of "
            f"{trained.value}: set evaluation.data_path to held-out prompts of yours, or evaluation.data_path=null to "
            "score the prompts of training"
        )


def engine_notices(recipe: Recipe) -> Iterator[str]:
    """A recipe that is named after an engine of a server, and samples with another one."""
    for word, (package, label) in NAMED_ENGINES.items():
        owners = [policy.rollout.schema.owner for policy in recipe.policies.values()]
        if word in recipe.file.name.split("_") and not any(package in owner.__module__ for owner in owners):
            yield (
                f"this recipe samples with {owners[0].__name__}, in place of {label}, after which it is named: "
                "docs/engines.md says what that engine samples"
            )


def policy_notices(config: RecipeConfig, plan: PlacementPlan, geometry: Geometry, needs: Needs) -> Iterator[str]:
    """Settings of a policy that are unusual or without effect."""
    yield from layout_notices(config, plan, geometry.num_samples)
    if geometry.samples_per_prompt == 1 and config.advantage.get("scope", str) == "group" and needs.advantages:
        yield "sampling.samples_per_prompt=1: a group of one has no advantage, so nothing is learned"
    fixed_rows = not geometry.micro_is_auto
    if geometry.micro_batch_tokens is not None and config.scale == "full" and fixed_rows:
        yield (
            f"stack.micro_batch_size={geometry.micro_batch_size} has no effect: stack.micro_batch_tokens cuts the rows"
        )
    yield from _stale_samples(config, needs)
    yield from _free_order(config)
    yield from _unusual_values(config, geometry)
    yield from _idle_backend_blocks(config, needs)


def _stale_samples(config: RecipeConfig, needs: Needs) -> Iterator[str]:
    """A loss that takes samples of earlier weights for samples of the weights that it trains."""
    staleness, loss = config.asynchronous.max_staleness, config.algorithm.class_name
    if not staleness or needs.fits_old_samples or not build(config.algorithm).trains_on_rows:
        return
    yield (
        f"asynchronous.max_staleness={staleness}: samples come from weights of {staleness} "
        f"step{'s' * (staleness > 1)} before, and {loss} takes them for samples of the weights that it trains. Set "
        "algorithm.old_logp_source=rollout, whose importance ratio starts from the weights that sampled"
        + (f", or algorithm.mismatch._target_={TOKEN_TIS}" if "mismatch" in config.algorithm.values else "")
    )


def _free_order(config: RecipeConfig) -> Iterator[str]:
    """What a user should know of a run whose order of events is a matter of timing."""
    settings = config.asynchronous
    if not settings.is_free:
        return
    yield (
        "asynchronous.order=free: the ages of samples depend on timing. Determinism class of the run: statistical. A "
        "second or a resumed run is equal in distribution only"
    )
    if settings.too_old != "redraw" and settings.num_ahead <= settings.max_staleness:
        yield (
            f"asynchronous.too_old={settings.too_old} has no effect: with {settings.num_ahead} steps ahead no sample "
            f"is older than max_staleness={settings.max_staleness}. Raise asynchronous.steps_ahead, or leave it out"
        )
    if settings.num_ahead < settings.max_staleness:
        yield (
            f"asynchronous.steps_ahead={settings.steps_ahead} holds fewer steps than max_staleness="
            f"{settings.max_staleness}, so no sample becomes that old. Raise asynchronous.steps_ahead, or leave it out"
        )
    if config.reward_parts == 1:
        yield (
            "asynchronous.order=free with reward_parts=1: the engine takes new weights between two parts of a step, "
            "and a step has one. Raise reward_parts"
        )


def _unusual_values(config: RecipeConfig, geometry: Geometry) -> Iterator[str]:
    rows, micro = geometry.rows_per_device, geometry.micro_batch_size
    if geometry.micro_batch_tokens is None and micro > rows and config.scale == "full":
        yield f"stack.micro_batch_size={micro} is more than the {rows} rows of an update on a device: it has {rows}"
    rate = config.learning_rate
    if rate is not None and rate > HIGH_RATE:
        yield (
            f"backend.optimizer_cfg.learning_rate={rate:g} is far above usual rates of AdamW, 1e-6 to 1e-3: training "
            "will probably diverge"
        )
    clips_steps = issubclass(config.algorithm.schema.owner, DiffusionGRPO)
    clip_range = config.algorithm.get("clip_range", float) if clips_steps else None
    if clip_range is not None and clip_range > HIGH_CLIP_RANGE:
        yield (
            f"algorithm.clip_range={clip_range:g} clips almost nothing, and the parity gate is as much laxer: the "
            "log-prob of a denoising step is a mean over latent elements, so ratios stay near 1. 1e-4 is usual"
        )


def _idle_backend_blocks(config: RecipeConfig, needs: Needs) -> Iterator[str]:
    loss, blocks = config.algorithm.class_name, config.backend.values
    if blocks.get("value_cfg") is not None and not needs.value:
        yield f"backend.value_cfg has no effect: {loss} trains no value head"
    # `ema` may also be evaluated and exported; only the loss reads `old`.
    if blocks.get(KEPT_BY["old"]) is not None and not reads_snapshot(needs, "old"):
        yield (
            f"backend.ema_lora_cfg has no effect on training: {loss} neither reads nor samples from the weight "
            "snapshot 'old'. Write ~backend.ema_lora_cfg"
        )
