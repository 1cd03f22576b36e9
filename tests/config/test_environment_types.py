"""A configuration of RLinf that names a simulator is answered with an environment that exists here."""

from importlib import import_module

import pytest
import yaml

from unirl.config.errors import ConfigError
from unirl.config.foreign_keys import ENVIRONMENTS, NO_ADAPTER
from unirl.config.load import load

OF_RLINF = {
    *("maniskill", "libero", "robotwin", "isaaclab", "metaworld", "behavior", "calvin", "robocasa", "realworld"),
    *("frankasim", "habitat", "mujoco_warp", "opensora_wm", "wan_wm", "embodichain", "roboverse", "d4rl"),
}
"""The values of its enumeration SupportedEnvType."""


def test_every_simulator_of_rlinf_has_an_answer():
    assert ENVIRONMENTS.keys() | set(NO_ADAPTER) == OF_RLINF and not ENVIRONMENTS.keys() & set(NO_ADAPTER)


@pytest.mark.parametrize("answer", ENVIRONMENTS.values())
def test_an_answer_names_a_class_and_keys_that_it_takes(answer):
    settings = yaml.safe_load(answer)
    module, _, name = settings.pop("_target_").rpartition(".")
    keys = getattr(import_module(module), name).__init__.__kwdefaults__ or {}
    signature = getattr(import_module(module), name).__init__.__annotations__
    assert settings.keys() <= keys.keys() | signature.keys()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("libero", r"env\.train\.env_type=libero: .* pipeline\.env=\{_target_: unirl\.envs\.libero\.LiberoEnvironment"),
        ("embodichain", r"env\.train\.env_type=embodichain: there is no adapter .* id: <module>:<id>"),
    ],
)
def test_a_recipe_with_env_type_is_answered(kind, message):
    with pytest.raises(ConfigError, match=message):
        load("embodied/cartpole_ppo", [f"env.train.env_type={kind}"])
