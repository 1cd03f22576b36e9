"""A run that is killed anywhere and resumed equals one that never was: metrics, ledger and weights, bit for bit."""

from __future__ import annotations

import pytest

from tests.source_tree import ROOT
from tests.trainer.halting import HALTS_AT
from tests.trainer.killing import Run, Unkilled, steps_in

COMMON = ("keep_checkpoints=2", "evaluation.eval_steps=5", "tracking.sample_steps=4", "save_interval=2")
PICTURES = Run(
    "diffusion/sd3_trainside",
    15,
    (*COMMON, "scale=toy", "stack.micro_batch_size=4", "backend.ema_cfg={target_decay: 0.9}"),
)
TEXT = Run(str(ROOT / "tests/trainer/text_loop.yaml"), 10, (*COMMON, "plugins=[tests]"))
CRITIC = Run(
    TEXT.recipe,
    10,
    (
        *TEXT.overrides,
        "algorithm._target_=unirl.algorithms.ar_ppo.ARPPO",
        "backend.value_cfg={}",
        "backend.lora_cfg={rank: 4}",
    ),
)

REWRITES = Run("pe/pe_trainside_pickscore", 6, (*COMMON, "scale=toy"))
REPLAY = Run("embodied/pendulum_sac", 8, (*COMMON, "scale=toy", "stack.store.capacity=40"))
BACKGROUND = Run(PICTURES.recipe, 15, (*PICTURES.overrides, "checkpoint.asynchronous=true", "save_interval=1"))
ELASTIC = (*COMMON, "scale=toy", "runtime=local", "asynchronous.max_staleness=1", "reward_parts=2")


@pytest.fixture(autouse=True, scope="module")
def in_the_checkout():
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        yield


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Unkilled:
    return Unkilled.of(PICTURES, tmp_path_factory.mktemp("unkilled") / "run")


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Unkilled:
    return Unkilled.of(TEXT, tmp_path_factory.mktemp("unkilled") / "text")


def test_killed_runs_resume_bit_for_bit(pictures, tmp_path) -> None:
    assert pictures.broken_cases(range(3), tmp_path) == []


def test_killed_runs_of_text_resume_bit_for_bit(text, tmp_path) -> None:
    assert text.broken_cases(range(2), tmp_path) == []


@pytest.mark.slow
def test_more_killed_runs_resume_bit_for_bit(pictures, tmp_path, pytestconfig) -> None:
    """Up to the number of `--kills`: 24 are the evidence, 6 the everyday check."""
    assert pictures.broken_cases(range(3, pytestconfig.getoption("kills")), tmp_path) == []


@pytest.mark.slow
def test_killed_runs_that_save_in_the_background_resume_bit_for_bit(pictures, tmp_path, pytestconfig) -> None:
    unkilled = Unkilled(BACKGROUND, pictures.outcome, pictures.duration)
    assert unkilled.broken_cases(range(pytestconfig.getoption("kills") // 2), tmp_path) == []


@pytest.mark.slow
def test_more_killed_runs_of_text_resume_bit_for_bit(text, tmp_path, pytestconfig) -> None:
    assert text.broken_cases(range(2, pytestconfig.getoption("kills") // 2), tmp_path) == []


@pytest.mark.slow
def test_a_killed_run_resumes_its_critic_bit_for_bit(tmp_path, pytestconfig) -> None:
    unkilled = Unkilled.of(CRITIC, tmp_path / "unkilled")
    assert any("value" in name for name in unkilled.outcome["metrics"][-1])  # type: ignore[index]
    assert unkilled.broken_cases(range(pytestconfig.getoption("kills") // 2), tmp_path) == []


@pytest.mark.slow
def test_a_killed_run_resumes_both_of_its_policies_bit_for_bit(tmp_path) -> None:
    """Case 1 is killed while it saves a checkpoint, and case 2 at a random time."""
    unkilled = Unkilled.of(REWRITES, tmp_path / "unkilled")
    weights = unkilled.outcome["weights"]
    assert {name.partition("/")[0] for name in weights} == {"policy-ar", "policy-diffusion"}  # type: ignore[attr-defined]
    assert unkilled.broken_cases(range(1, 3), tmp_path) == []


def test_a_run_that_is_killed_while_training_devices_sample_resumes_as_if_they_had_not(tmp_path) -> None:
    marker = tmp_path / "halted"
    engine = f"rollout={{_target_: tests.trainer.halting.HaltingEngine, marker: {marker}}}"
    settings = (*ELASTIC, "placement.reward=cpu", "plugins=[tests]", engine)
    elastic = Run("diffusion/sd3_replica_lora_separate", 5, (*settings, "asynchronous.elastic=true"))
    static = Run(elastic.recipe, elastic.num_steps, settings)
    assert elastic.kill_once(tmp_path / "killed", marker.exists)
    assert 0 < steps_in(tmp_path / "killed") <= HALTS_AT
    assert elastic.finish(tmp_path / "killed") == static.finish(tmp_path / "static")


def test_a_killed_run_resumes_its_replay_store_bit_for_bit(tmp_path) -> None:
    assert Unkilled.of(REPLAY, tmp_path / "unkilled").broken_cases(range(1, 3), tmp_path) == []
