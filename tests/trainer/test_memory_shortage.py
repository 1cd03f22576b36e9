"""A run that is out of memory says where, what the plan expected, and what to turn; and keeps its last step."""

import pytest
import torch

from tests.run_files import metrics_of
from unirl.config.errors import MemoryShortageError
from unirl.config.failures import failure_of
from unirl.config.load import load
from unirl.rollout.engine.trainside.engine import TrainsideRolloutEngine
from unirl.train.backend.fsdp import FSDPBackend
from unirl.train.stack import TrainStack
from unirl.trainer.assemble import build_trainer

COMMON = ("scale=toy", "num_rollouts=2", "tracking.sample_steps=0", "evaluation.eval_steps=0")


def run(folder, *overrides):
    recipe = load("diffusion/sd3_trainside", [*COMMON, f"run.dir={folder}", *overrides])
    with build_trainer(recipe) as trainer:
        trainer.train()


def failing(method, after):
    """`method`, which runs out of memory in call `after`, counted from 0."""
    calls = []

    def wrapped(self, *arguments, **keywords):
        calls.append(1)
        if len(calls) > after:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return method(self, *arguments, **keywords)

    return wrapped


def checkpoints_of(folder):
    return sorted(path.name for path in (folder / "checkpoints").glob("checkpoint-*"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name", "phase", "role"),
    [(TrainsideRolloutEngine, "generate", "generate", "rollout"), (TrainStack, "_prepare", "train", "train")],
)
def test_the_error_names_phase_role_and_setting_and_the_last_step_is_saved(
    owner, name, phase, role, whole, tmp_path, monkeypatch
):
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing(getattr(owner, name), after=1))
        with pytest.raises(MemoryShortageError) as caught:
            run(folder)
    said = failure_of(caught.value)
    assert said.status == 5
    assert said.message.startswith("error[5002]: out of memory: CUDA out of memory. Tried to allocate 2.00 GiB")
    assert f"phase {phase}, role {role}: the plan's estimate is 0." in said.message
    assert "Next on the ladder: " in said.message
    assert "Step 1 is saved" in said.message
    assert checkpoints_of(folder) == ["checkpoint-000001"]
    run(folder)  # continues
    assert metrics_of(folder) == metrics_of(whole)


def test_a_step_whose_weights_were_updated_is_not_saved_as_the_last_one(tmp_path, monkeypatch):
    """The second of two updates of step 2 fails, so the weights are those of no step."""
    monkeypatch.setattr(FSDPBackend, "step", failing(FSDPBackend.step, after=3))
    with pytest.raises(MemoryShortageError, match="There is no checkpoint"):
        run(tmp_path / "run")
    assert checkpoints_of(tmp_path / "run") == []


def test_other_errors_of_torch_pass_as_they_are(tmp_path, monkeypatch):
    def broken(self, req, **keywords):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(TrainsideRolloutEngine, "generate", broken)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        run(tmp_path / "run")
