"""Meta-World and ManiSkill keep the contract, where they are installed."""

import pytest

from unirl.config.dependencies import is_installed
from unirl.config.errors import DependencyError, InvalidValueError
from unirl.envs.maniskill import ManiSkillEnvironment
from unirl.envs.metaworld import MetaWorldEnvironment
from unirl.testing import check_environment

HAS = {name: is_installed(name) for name in ("metaworld", "mani_skill")}


@pytest.mark.skipif(not HAS["metaworld"], reason="needs metaworld")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("task", ["reach-v3", "push-v3"])
def test_tasks_of_meta_world_keep_the_contract(task):
    environment = MetaWorldEnvironment(task=task, max_steps=10)
    assert environment.spaces.observations == {"state": (39,)} and environment.spaces.most_steps == 10
    check_environment(environment)


@pytest.mark.skipif(not HAS["metaworld"], reason="needs metaworld")
def test_an_unknown_task_of_meta_world_is_named():
    with pytest.raises(InvalidValueError, match="Did you mean 'reach-v3'"):
        MetaWorldEnvironment(task="reech-v3")


@pytest.mark.skipif(not HAS["mani_skill"], reason="needs mani_skill")
@pytest.mark.filterwarnings("ignore")
def test_a_task_of_maniskill_keeps_the_contract():
    environment = ManiSkillEnvironment(id="PickCube-v1")
    assert environment.spaces.observations == {"state": (42,)}
    check_environment(environment, steps=5)


@pytest.mark.skipif(HAS["metaworld"] or HAS["mani_skill"], reason="both are missing in a plain set-up")
def test_a_missing_library_is_named_with_its_extra():
    with pytest.raises(DependencyError, match=r"pip install 'unirl\[metaworld\]'"):
        MetaWorldEnvironment(task="reach-v3")
    with pytest.raises(DependencyError, match=r"pip install 'unirl\[maniskill\]'"):
        ManiSkillEnvironment(id="PickCube-v1")
