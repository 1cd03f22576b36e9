"""Models beside the policy: their parameters and bytes are those that a run keeps on its devices."""

import pytest

from unirl.cli.main import main
from unirl.config.build import build
from unirl.config.load import load
from unirl.config.node import Node
from unirl.envs.world_model import WorldModelEnvironment
from unirl.models.loading.estimate import bytes_of, parameters_of
from unirl.models.policies.bundle import SteeredBundle
from unirl.plan.held import held_models
from unirl.plan.sizes import RunSizes
from unirl.types.device import CPU

IN_FRAMES = (
    "pipeline.env={_target_: unirl.envs.world_model.WorldModelEnvironment, path: toy-world, "
    "first: {_target_: unirl.envs.pixel_reach.PixelReachEnvironment}, "
    "reward: {_target_: unirl.envs.pixel_reach.DiscReward}}"
)


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("embodied/libero_pi0_dsrl", ["bundle.frozen.dtype=bf16"]),
        ("embodied/libero_pi0_dsrl", ["bundle.frozen.dtype=fp32"]),
        ("embodied/metaworld_reach_dsrl", []),
        (
            "embodied/metaworld_reach_dsrl",
            ["bundle.frozen={_target_: unirl.models.policies.bundle.FlowBundle, observations: 4, actions: 2}"],
        ),
    ],
)
def test_a_frozen_policy_is_as_large_as_the_one_that_is_loaded(recipe: str, words: list[str]) -> None:
    config = load(recipe, ["scale=toy", *words]).config
    (held,) = held_models(config)
    bundle = build(config.bundle, device=CPU, seed=0, components=None)
    assert isinstance(bundle, SteeredBundle) and held.name == "frozen policy"
    frozen = bundle.inner.trainable()
    assert (held.parameters, held.num_bytes) == (parameters_of(frozen), bytes_of(frozen))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_video_model_of_an_environment_is_as_large_as_the_one_that_is_loaded(dtype: str) -> None:
    config = load("embodied/world_model_pixel_reach_grpo", ["scale=toy", f"pipeline.env.dtype={dtype}"]).config
    (held,) = held_models(config)
    node = config.pipeline.get("env", Node)
    assert node is not None
    environment = build(node)
    assert isinstance(environment, WorldModelEnvironment)
    world = environment._loaded()
    modules = [*world.pipeline.bundle.modules.values(), world.tokens]
    assert (held.parameters, held.num_bytes) == (sum(map(parameters_of, modules)), sum(map(bytes_of, modules)))


def test_the_plan_of_a_policy_of_unknown_size_names_what_is_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    for recipe, line in (
        ("embodied/libero_pi0_dsrl", "untrained  frozen policy: 63.3k parameters, 0.00 GiB, beside the trained policy"),
        (
            "embodied/world_model_pixel_reach_grpo",
            "untrained  video model: 58.8k parameters, 0.00 GiB, beside the trained policy",
        ),
    ):
        assert main(["plan", recipe, "scale=toy"]) == 0
        assert line in capsys.readouterr().out


def test_the_memory_of_a_plan_has_what_is_beside_the_policy_at_every_moment() -> None:
    def beside(*words: str) -> list[set[float]]:
        run = RunSizes.of(load("embodied/libero_pi0_ppo", ["scale=toy", *words]).config)
        return [set(row.gib.values()) for _, row in run.memory if row.name == "models beside the policy"]

    (held,) = held_models(load("embodied/libero_pi0_ppo", ["scale=toy", IN_FRAMES]).config)
    assert beside(IN_FRAMES) == [{held.num_bytes / 2**30}] and beside() in ([], [{0.0}])
