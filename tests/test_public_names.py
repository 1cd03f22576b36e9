"""Import paths that recipes, plugins and pages of other projects name do not move."""

import importlib

import pytest

from tests.source_tree import ROOT

NAMES = {
    "unirl.types.rollout_req": "RolloutReq",
    "unirl.types.rollout_resp": "RolloutResp RolloutTrack",
    "unirl.types.sampling": "DiffusionSamplingParams ARSamplingParams",
    "unirl.types.reward": "RewardRequest RewardResponse",
    "unirl.algorithms.base": "StageAlgorithm BaseAlgorithmConfig",
    "unirl.algorithms.diffusion_grpo": "DiffusionGRPO",
    "unirl.algorithms.ar_grpo": "ARGRPO",
    "unirl.algorithms.diffusion_dppo": "DiffusionDPPO",
    "unirl.algorithms.diffusion_nft": "DiffusionNFT",
    "unirl.algorithms.drtune": "DRTune",
    "unirl.train.stack": "TrainStack TrainStepResult",
    "unirl.train.backend.fsdp": "FSDPBackend",
    "unirl.train.backend.base": "OptimizerConfig LrSchedulerConfig",
    "unirl.train.configs": "FSDPConfig LoraConfig EmaLoraConfig EmaFullConfig",
    "unirl.distributed.group": "Remote RankInfo",
    "unirl.reward.service": "RewardService",
    "unirl.reward.base": "LocalRewardBackend",
    "unirl.reward.remote": "RemoteRewardBackend RemoteRewardSpec",
    "unirl.data.data_source": "MultimodalRLDataSource DefaultDataSource",
    "unirl.sde.kernels": "FlowSDEStrategy DanceSDEStrategy",
}
SCORERS = sorted(path.stem for path in (ROOT / "unirl/reward/local").glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("module", NAMES)
def test_names_stand_where_others_look_for_them(module):
    missing = [name for name in NAMES[module].split() if not hasattr(importlib.import_module(module), name)]
    assert missing == []


@pytest.mark.parametrize("name", SCORERS)
def test_a_scorer_and_its_spec_stand_in_one_module(name):
    """`unirl.reward.local.<name>.<Name>RewardScorer`, beside `<Name>Spec` if it has settings."""
    module = importlib.import_module(f"unirl.reward.local.{name}")
    named = name.replace("_", "") + "rewardscorer"
    for key in [key for key in vars(module) if key.lower() == named]:
        has_settings = "config" in vars(module)[key].__init__.__annotations__
        assert not has_settings or hasattr(module, f"{key.removesuffix('RewardScorer')}Spec")
