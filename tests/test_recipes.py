"""Every recipe that ships: it composes, checks, writes nothing that is a default, stays short, and has a card."""

import copy
import dataclasses
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tests.covering_recipes import COVERED, choices_of
from tests.source_tree import ROOT
from unirl.config.compose import ComposedConfig, compose
from unirl.config.errors import ConfigError
from unirl.config.load import check, load
from unirl.config.merge import get, leaves
from unirl.config.recipe import policy_keys
from unirl.config.recipe_files import CARD_SUFFIX, Card, list_recipes
from unirl.plan.preflight import preflight

RECIPES = list_recipes((ROOT / "examples",))
NAMES = [recipe.name for recipe in RECIPES]

SD3 = {
    "batch_size": 48,
    "num_rollouts": 10000,
    "sampling.samples_per_prompt": 16,
    "stack.num_updates_per_batch": 2,
    "algorithm.clip_range": 1e-4,
    "algorithm.old_logp_source": "replay",
    "advantage.std": "batch",
    "backend.optimizer_cfg.learning_rate": 3e-4,
    "backend.optimizer_cfg.adam_beta1": 0.9,
    "backend.optimizer_cfg.adam_beta2": 0.999,
    "backend.optimizer_cfg.adam_epsilon": 1e-8,
    "backend.lora_cfg.rank": 32,
    "backend.lora_cfg.alpha": 64.0,
    "bundle.dtype": "bf16",
    "stack.max_grad_norm": 1.0,
    "sampling.trajectory_dtype": "bf16",
    "sampling.num_inference_steps": 10,
    "sampling.kernel.eta": 0.7,
    "sampling.guidance_scale": 1.0,
    "sampling.height": 512,
    "sampling.width": 512,
    "sampling.seed": 42,
}
"""What the published runs on SD3.5 Medium share."""

FIRST_HALF = {"sampling.sde_steps.num_steps": 3, "sampling.sde_steps.low": 0.0, "sampling.sde_steps.high": 0.5}
WINDOW = {"sampling.sde_steps.size": 4, "sampling.sde_steps.stride": 3, "sampling.sde_steps.iters_per_window": 25}

LAYOUT = FIRST_HALF | {
    "batch_size": 16,
    "num_devices": 8,
    "runtime": None,
    "stack.micro_batch_size": "auto",
    "sampling.init_same_noise": False,
    "sampling.kernel._target_": "unirl.sde.kernels.FlowSDEStrategy",
    "rollout._target_": "unirl.rollout.engine.replica.engine.ReplicaRolloutEngine",
    "sync._target_": "unirl.distributed.weight_sync.sync.EngineSync",
}
"""What the runs have in common that compare layouts."""
ALL_WEIGHTS = {
    "backend.lora_cfg": None,
    "backend.lora_cfg.rank": None,
    "backend.lora_cfg.alpha": None,
    "backend.optimizer_cfg.learning_rate": 1e-5,
}
SGLANG = {
    "rollout._target_": "unirl.rollout.engine.sglang.engine.SGLangRolloutEngine",
    "sync._target_": "unirl.distributed.weight_sync.sync.EngineSync",
}
OMNI = FIRST_HALF | {
    "num_devices": 8,
    "rollout._target_": "unirl.rollout.engine.vllm_omni.engine.VLLMOmniRolloutEngine",
    "sync._target_": "unirl.distributed.weight_sync.sync.EngineSync",
}
APART = {"placement.train": "0-3", "placement.rollout": "4-7"}

SD3_DPPO = {key: value for key, value in SD3.items() if key != "algorithm.clip_range"} | {
    "algorithm.kl_threshold": 1e-5,
    "algorithm.add_kl_coefficient": True,
}
EVERY_STEP = {
    "sampling.sde_steps._target_": "unirl.sde.steps.AllSteps",
    "sampling.samples_per_prompt": 24,
    "sampling.guidance_scale": 4.5,
}
AVERAGED = {"backend.ema_cfg.target_decay": 0.9, "backend.ema_cfg.every": 8, "evaluation.weights": "ema"}

QWEN_IMAGE = SD3 | {
    "backend.lora_cfg.rank": 64,
    "backend.lora_cfg.alpha": 128.0,
    "backend.optimizer_cfg.weight_decay": 0.0,
    "backend.fsdp_cfg.activation_checkpointing": True,
    "stack.micro_batch_size": "auto",
    "sampling.num_inference_steps": 12,
    "sampling.height": 384,
    "sampling.width": 384,
    "sampling.max_sequence_length": 512,
    "sampling.init_same_noise": False,
    "sampling.kernel._target_": "unirl.sde.kernels.FlowSDEStrategy",
}
"""What the published runs on Qwen-Image share."""
QWEN_IMAGE_CLEAN = {key: value for key, value in QWEN_IMAGE.items() if key.partition(".")[0] != "algorithm"} | {
    "stack.num_updates_per_batch": 1,
    "sampling.kernel.eta": None,
    "sampling.kernel._target_": "unirl.sde.kernels.EulerODE",
}

KLEIN = FIRST_HALF | {
    "batch_size": 64,
    "num_rollouts": 10000,
    "sampling.samples_per_prompt": 16,
    "stack.num_updates_per_batch": 2,
    "stack.micro_batch_size": "auto",
    "stack.max_grad_norm": 1.0,
    "algorithm.clip_range": 5e-3,
    "algorithm.old_logp_source": "replay",
    "advantage.std": "group",
    "backend.optimizer_cfg.learning_rate": 5e-5,
    "backend.optimizer_cfg.weight_decay": 0.0,
    "backend.lora_cfg.rank": 16,
    "backend.lora_cfg.alpha": 32.0,
    "bundle.dtype": "bf16",
    "sampling.trajectory_dtype": "fp32",
    "sampling.num_inference_steps": 10,
    "sampling.kernel._target_": "unirl.sde.kernels.DanceSDEStrategy",
    "sampling.kernel.eta": 0.7,
    "sampling.guidance_scale": 1.0,
    "sampling.height": 512,
    "sampling.width": 512,
    "sampling.max_sequence_length": 512,
    "sampling.init_same_noise": True,
    "sampling.seed": 42,
}
"""What the published runs on FLUX.2-klein share; they keep their trajectories in fp16."""
EDITREWARD = {"reward.backend.config.required_rewards": ["editreward"], "reward.backend.config.sends_sources": True}

CLEAN_SAMPLES = {key: value for key, value in SD3.items() if key.partition(".")[0] != "algorithm"} | {
    "stack.num_updates_per_batch": 1,
    "sampling.kernel.eta": None,
    "sampling.kernel._target_": "unirl.sde.kernels.EulerODE",
}
"""What runs have in common that need no trajectory."""

Z_IMAGE = (
    SD3
    | FIRST_HALF
    | {
        "batch_size": 64,
        "bundle.path": "Tongyi-MAI/Z-Image",
        "advantage.std": "group",
        "backend.fsdp_cfg.activation_checkpointing": True,
        "backend.lora_cfg.rank": 64,
        "backend.lora_cfg.alpha": 128.0,
        "backend.optimizer_cfg.weight_decay": 0.0,
        "stack.micro_batch_size": "auto",
        "sampling.init_same_noise": False,
        "sampling.num_inference_steps": 16,
        "sampling.guidance_scale": 1.0,
        "sampling.max_sequence_length": 512,
        "sampling.kernel._target_": "unirl.sde.kernels.FlowSDEStrategy",
    }
)
"""Guidance is ours: the published run drew at diffusers' 4, a scale of 5, and so ran the network twice."""
HUNYUAN_VIDEO = SD3 | {
    "bundle.path": "hunyuanvideo-community/HunyuanVideo",
    "reward.backend._target_": "unirl.reward.local.video_pickscore.VideoPickScoreRewardScorer",
    "backend.fsdp_cfg.activation_checkpointing": True,
    "backend.lora_cfg.rank": 64,
    "backend.optimizer_cfg.weight_decay": 0.0,
    "stack.micro_batch_size": "auto",
    "sampling.init_same_noise": False,
    "sampling.kernel._target_": "unirl.sde.kernels.FlowSDEStrategy",
    "sampling.sde_steps.num_steps": 8,
    "sampling.sde_steps.low": 0.0,
    "sampling.sde_steps.high": 0.5,
    "sampling.num_inference_steps": 20,
    "sampling.height": 480,
    "sampling.width": 832,
    "sampling.num_frames": 33,
    "sampling.guidance_scale": 6.0,
    "sampling.max_sequence_length": 256,
}
"""Frames and guidance are ours: the published run drew 5 frames at a scale the model was not distilled for."""
WAN21 = {key: value for key, value in HUNYUAN_VIDEO.items() if not key.startswith("sampling.sde_steps")} | {
    "bundle.path": "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
    "backend.lora_cfg.alpha": 128.0,
    "sampling.num_inference_steps": 14,
    "sampling.guidance_scale": 5.0,
    "sampling.max_sequence_length": 512,
    "sampling.trajectory_dtype": "fp16",
}
"""Frames, guidance and the 1.3B model's size are ours: the published runs drew 5 frames at 720 x 1280 unguided."""
WAN22 = WAN21 | {
    "bundle.path": "Wan-AI/Wan2.2-T2V-A14B-Diffusers",
    "sampling.num_inference_steps": 20,
    "sampling.width": 640,
    "sampling.guidance_scale": 4.0,
    "sampling.guidance_scale_2": 3.0,
}
"""Frames, guidance and the part of the steps are ours: the published runs drew one frame, and trained one expert."""
WAN_HALF = {"sampling.sde_steps.num_steps": None, "sampling.sde_steps.low": 0.0, "sampling.sde_steps.high": 0.5}
DANCE = {"sampling.kernel._target_": "unirl.sde.kernels.DanceSDEStrategy", "sampling.kernel.eta": 0.7}
HUNYUAN_VIDEO_15 = HUNYUAN_VIDEO | {
    "bundle.path": "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v",
    "backend.optimizer_cfg.learning_rate": 1e-5,
    "backend.optimizer_cfg.weight_decay": 1e-4,
    "sampling.kernel._target_": "unirl.sde.kernels.DanceSDEStrategy",
    "sampling.kernel.eta": 0.25,
    "sampling.sde_steps.high": 0.6,
    "sampling.samples_per_prompt": 24,
    "sampling.num_inference_steps": 16,
    "sampling.width": 480,
    "sampling.max_sequence_length": 1000,
}
"""Frames, guidance and kernel are ours: the published run drew 5 frames, unguided, and by the Flow kernel."""

DAPO = {
    "batch_size": 64,
    "num_rollouts": 800,
    "stack.num_updates_per_batch": 4,
    "stack.max_grad_norm": 1.0,
    "backend.optimizer_cfg.learning_rate": 1e-6,
    "backend.optimizer_cfg.weight_decay": 0.01,
    "backend.optimizer_cfg.adam_beta1": 0.9,
    "backend.optimizer_cfg.adam_beta2": 0.999,
    "backend.lora_cfg": None,
    "backend.fsdp_cfg.activation_checkpointing": True,
    "bundle.dtype": "bf16",
    "pipeline.system_instruction": None,
    "pipeline.enable_thinking": False,
    "sampling.samples_per_prompt": 8,
    "sampling.max_new_tokens": 8192,
    "sampling.temperature": 1.0,
    "sampling.top_p": 1.0,
    "sampling.top_k": 0,
    "sampling.seed": 42,
    "evaluation.samples_per_prompt": 16,
    "reward.backend.scorer._target_": "unirl.reward.local.math_verify.MathVerifyRewardScorer",
    "advantage.clip": None,
}
"""What the published runs on DAPO-Math share."""
CENTRED = DAPO | {"advantage.std": "none", "advantage.leave_one_out": False}

GEOMETRY = {
    "num_devices": 32,
    "devices_per_node": 8,
    "placement": None,
    "batch_size": 32,
    "stack.num_updates_per_batch": 1,
    "algorithm._target_": "unirl.algorithms.ar_grpo.ARGRPO",
    "algorithm.clip_range": 0.01,
    "advantage.scope": "global",
    "backend.optimizer_cfg.learning_rate": 5e-6,
    "backend.optimizer_cfg.weight_decay": 0.0,
    "backend.lora_cfg": None,
    "bundle.dtype": "bf16",
    "sampling.samples_per_prompt": 16,
    "sampling.temperature": 0.7,
    "sampling.top_p": 0.9,
    "sampling.top_k": 1024,
    "sampling.max_new_tokens": 512,
    "reward.backend._target_": "unirl.reward.local.mc_exact_match.MCExactMatchRewardScorer",
    "rollout._target_": "unirl.rollout.engine.sglang_llm.engine.SGLangLLMRolloutEngine",
    "sync.merge_adapters": False,
}
"""The published run on Geometry3K with SGLang."""
GEOMETRY_LORA = {name: value for name, value in GEOMETRY.items() if name != "backend.lora_cfg"} | {
    "backend.lora_cfg.rank": 16,
    "backend.lora_cfg.alpha": 32,
    "backend.optimizer_cfg.learning_rate": 1e-4,
}

PUBLISHED = {
    "vlm/qwen_vl_argrpo_geo3k_mc_sglang_4x8": GEOMETRY,
    "vlm/qwen_vl_argrpo_geo3k_mc_sglang_4x8_lora": GEOMETRY_LORA,
    "llm/qwen3_ar_drpo_4b_base_dapo": CENTRED
    | {"algorithm._target_": "unirl.algorithms.ar_trust_regions.DRPO", "algorithm.drpo_epsilon": 12.5}
    | {"algorithm.penalty_mu_weighted": True, "algorithm.old_logp_source": "rollout"}
    | {"algorithm.loss_agg_mode": "seq-mean-token-sum-norm", "algorithm.horizon": 8192},
    "llm/qwen3_grpo_4b_base_dapo": CENTRED
    | {"algorithm._target_": "unirl.algorithms.ar_grpo.ARGRPO", "algorithm.old_logp_source": "rollout"}
    | {"algorithm.clip_range": 0.2, "algorithm.clip_range_high": 0.28, "algorithm.loss_agg_mode": "token-mean"},
    "llm/qwen3_dapo_4b_base": DAPO
    | {"batch_size": 512, "sampling.samples_per_prompt": 16, "stack.num_updates_per_batch": 16}
    | {"sampling.max_new_tokens": 20480, "refill.max_draws": 10, "advantage.std": "group"}
    | {"algorithm.clip_range": 0.2, "algorithm.clip_range_high": 0.28, "algorithm.loss_agg_mode": "token-mean"}
    | {"reward.backend.config.truncated": "soft", "reward.backend.config.buffer": 4096},
    "llm/qwen3_gspo_4b_base_dapo": DAPO
    | {"algorithm._target_": "unirl.algorithms.ar_grpo.GSPO", "advantage.std": "group"}
    | {"algorithm.clip_range": 3e-4, "algorithm.clip_range_high": 4e-4},
    "llm/qwen3_ppo_4b_base_dapo": DAPO
    | {"algorithm._target_": "unirl.algorithms.ar_ppo.ARPPO", "algorithm.loss_agg_mode": "seq-mean-token-mean"}
    | {"algorithm.clip_range": 0.2, "algorithm.value_clip": 0.2, "algorithm.vf_coef": 0.5}
    | {"algorithm.gamma": 1.0, "algorithm.lam": 0.95, "algorithm.outcome": "rewards"},
    "llm/qwen3_rloo_4b_base_dapo": DAPO
    | {"algorithm._target_": "unirl.algorithms.ar_grpo.ARGRPO", "algorithm.loss_agg_mode": "seq-mean-token-sum"}
    | {"advantage.std": "none", "advantage.leave_one_out": True},
    "diffusion/sd3_replica_lora_colocate": SD3 | LAYOUT | {"placement": None},
    "diffusion/sd3_replica_lora_separate": SD3 | LAYOUT | APART,
    "diffusion/sd3_replica_full_colocate": SD3 | LAYOUT | ALL_WEIGHTS | {"placement": None},
    "diffusion/sd3_replica_full_separate": SD3 | LAYOUT | ALL_WEIGHTS | APART,
    "diffusion/sd3_sglang_native_colocate": SD3
    | LAYOUT
    | SGLANG
    | {"batch_size": 96, "num_devices": 16, "algorithm.old_logp_source": "rollout"}
    | {"sampling.trajectory_dtype": "fp32", "placement": None},
    "diffusion/sd3_sglang_replay_colocate": SD3
    | LAYOUT
    | SGLANG
    | {"batch_size": 96, "num_devices": 16, "placement": None},
    "diffusion/sd3_sglang_full_tensor": SD3 | LAYOUT | SGLANG | {"sync.merge_adapters": True, "placement": None},
    "diffusion/sd3_sglang_full_nccl_separate": SD3 | LAYOUT | SGLANG | APART | {"sync.merge_adapters": True},
    "diffusion/sd3_sglang_lora_separate": SD3 | LAYOUT | SGLANG | APART,
    "diffusion/sd3_vllmomni": SD3 | OMNI | {"algorithm.old_logp_source": "rollout", "placement": None},
    "diffusion/sd3_vllmomni_full_tensor": SD3
    | OMNI
    | {"algorithm.old_logp_source": "rollout", "sync.merge_adapters": True, "rollout.transport": "http"},
    "diffusion/sd3_vllmomni_full_ipc": SD3
    | OMNI
    | {"algorithm.old_logp_source": "rollout", "sync.merge_adapters": True, "rollout.transport": "ipc"},
    "diffusion/sd3_vllmomni_full_nccl_separate": SD3
    | OMNI
    | APART
    | {"algorithm.old_logp_source": "rollout", "sync.merge_adapters": True, "rollout.transport": "ipc"},
    "diffusion/sd3_vllmomni_lora_separate": SD3 | OMNI | APART | {"algorithm.old_logp_source": "rollout"},
    "diffusion/sd3_flowdppo_vllmomni": SD3_DPPO | OMNI | {"placement": None},
    "diffusion/sd3_nft_sglang": CLEAN_SAMPLES
    | SGLANG
    | {"algorithm.beta": 1.0, "backend.optimizer_cfg.weight_decay": 1e-4, "num_devices": 16}
    | {"placement.train": "0-7", "placement.rollout": "8-15", "sync.merge_adapters": True},
    "diffusion/flux2_klein_sglang": KLEIN
    | SGLANG
    | {"num_devices": 8, "sampling.init_same_noise": False}
    | {"sampling.kernel._target_": "unirl.sde.kernels.FlowSDEStrategy"},
    "diffusion/sd3_trainside": SD3
    | FIRST_HALF
    | {"stack.micro_batch_size": "auto", "sampling.init_same_noise": False, "backend.optimizer_cfg.weight_decay": 0.0}
    | {"sampling.kernel._target_": "unirl.sde.kernels.FlowSDEStrategy"},
    "diffusion/sd3_dancegrpo": SD3
    | FIRST_HALF
    | {"stack.micro_batch_size": "auto", "sampling.init_same_noise": False, "backend.optimizer_cfg.weight_decay": 0.0}
    | {"sampling.kernel._target_": "unirl.sde.kernels.DanceSDEStrategy"},
    "diffusion/flux2_klein_trainside": KLEIN,
    "diffusion/flux2_klein_editreward": KLEIN | EDITREWARD | {"batch_size": 48},
    "diffusion/flux2_klein_4b_editreward": KLEIN | EDITREWARD,
    "diffusion/flux1_dev_trainside": SD3
    | FIRST_HALF
    | {"backend.lora_cfg.rank": 64, "backend.lora_cfg.alpha": 128.0, "backend.fsdp_cfg.activation_checkpointing": True}
    | {"sampling.num_inference_steps": 6, "sampling.guidance_scale": 3.5, "sampling.max_sequence_length": 512}
    | {"sampling.kernel.eta": 0.9, "evaluation.num_inference_steps": 28},
    "diffusion/sd3_mixgrpo": SD3
    | WINDOW
    | {"stack.micro_batch_size": "auto", "sampling.init_same_noise": True, "backend.optimizer_cfg.weight_decay": 1e-4}
    | {"sampling.kernel._target_": "unirl.sde.kernels.FlowSDEStrategy"},
    "diffusion/qwen_image_trainside": QWEN_IMAGE | FIRST_HALF,
    "diffusion/qwen_image_dancegrpo": QWEN_IMAGE
    | FIRST_HALF
    | {"sampling.kernel._target_": "unirl.sde.kernels.DanceSDEStrategy"},
    "diffusion/qwen_image_mixgrpo": QWEN_IMAGE | WINDOW | {"sampling.init_same_noise": True},
    "diffusion/qwen_image_nft": QWEN_IMAGE_CLEAN
    | {"algorithm.beta": 1.0, "algorithm.velocity_coef": 0, "backend.ema_lora_cfg.rate": 0.001},
    "diffusion/qwen_image_edit_trainside": QWEN_IMAGE
    | FIRST_HALF
    | {"sampling.height": 512, "sampling.width": 512, "bundle.path": "Qwen/Qwen-Image-Edit"}
    | {"bundle._target_": "unirl.models.qwen_image_edit.family.QwenImageEditBundle"}
    | {"pipeline._target_": "unirl.models.qwen_image_edit.family.QwenImageEditPipeline"},
    "diffusion/z_image_trainside": Z_IMAGE,
    "diffusion/hunyuan_video_t2v_trainside": HUNYUAN_VIDEO,
    "diffusion/hunyuan_video15_t2v_dancegrpo_trainside": HUNYUAN_VIDEO_15,
    "diffusion/hunyuan_video15_t2v_vllmomni_nccl_separate": HUNYUAN_VIDEO_15
    | OMNI
    | {"sampling.sde_steps.num_steps": 8, "sampling.sde_steps.high": 0.6, "batch_size": 16, "num_devices": 16}
    | {"sampling.samples_per_prompt": 16, "sampling.kernel._target_": "unirl.sde.kernels.FlowSDEStrategy"}
    | {"placement.train": "0-7", "placement.rollout": "8-15", "sync.merge_adapters": True},
    "diffusion/wan21_t2v": WAN21 | WAN_HALF,
    "diffusion/wan21_t2v_dancegrpo": WAN21 | WAN_HALF | DANCE,
    "diffusion/wan21_t2v_mixgrpo": WAN21 | WINDOW | {"sampling.init_same_noise": True},
    "diffusion/wan21_i2v": WAN21
    | WAN_HALF
    | {"bundle.path": "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers", "sampling.height": 720, "sampling.width": 1280},
    "diffusion/wan22_t2v_14b": WAN22 | WAN_HALF | {"sampling.sde_steps.num_steps": 4},
    "diffusion/wan22_t2v_14b_dancegrpo": WAN22 | WAN_HALF | {"sampling.sde_steps.num_steps": 4} | DANCE,
    "diffusion/wan22_t2v_14b_mixgrpo": WAN22 | WINDOW | {"sampling.init_same_noise": True},
    "diffusion/wan22_i2v": WAN22
    | WAN_HALF
    | {"bundle.path": "Wan-AI/Wan2.2-I2V-A14B-Diffusers", "sampling.num_inference_steps": 10}
    | {"sampling.sde_steps.num_steps": 2, "sampling.guidance_scale": 3.5, "sampling.guidance_scale_2": None},
    "diffusion/wan22_ti2v_5b": WAN21
    | WAN_HALF
    | {"bundle.path": "Wan-AI/Wan2.2-TI2V-5B-Diffusers", "sampling.height": 704, "sampling.width": 1280},
    "diffusion/lumina2_trainside": SD3
    | FIRST_HALF
    | {"sampling.guidance_scale": 4.0, "bundle.path": "Alpha-VLLM/Lumina-Image-2.0"},
    "unified_model/bagel_trainside_lora": SD3
    | {"batch_size": 16, "bundle.path": "ByteDance-Seed/BAGEL-7B-MoT", "algorithm.clip_range": 1e-5}
    | {"advantage.std": "group", "backend.lora_cfg.rank": 64, "backend.lora_cfg.alpha": 128.0}
    | {"backend.optimizer_cfg.learning_rate": 1e-4, "backend.optimizer_cfg.weight_decay": 1e-4}
    | {"backend.fsdp_cfg.activation_checkpointing": True, "sampling.trajectory_dtype": "fp32"}
    | {"sampling.num_inference_steps": 14, "sampling.kernel.eta": 1.0, "sampling.init_same_noise": False}
    | {"sampling.sde_steps.num_steps": 2, "sampling.sde_steps.low": 0.0, "sampling.sde_steps.high": 0.5},
    "unified_model/hi3_trainside": SD3
    | FIRST_HALF
    | {"batch_size": 2, "num_rollouts": 100, "bundle.path": "tencent/HunyuanImage-3.0-Instruct"}
    | {"advantage.std": "group", "backend.lora_cfg.rank": 8, "backend.lora_cfg.alpha": 16.0}
    | {"backend.optimizer_cfg.learning_rate": 1e-4, "backend.fsdp_cfg.activation_checkpointing": True}
    | {"stack.num_updates_per_batch": 1, "sampling.samples_per_prompt": 4, "sampling.num_inference_steps": 16}
    | {"sampling.kernel.eta": 1.0, "sampling.height": 1024, "sampling.width": 1024, "sampling.init_same_noise": False},
    "diffusion/sd3_flowdppo": SD3_DPPO | FIRST_HALF | {"stack.micro_batch_size": "auto"},
    "diffusion/sd3_flowgrpo": SD3
    | EVERY_STEP
    | {"algorithm.kl_coef": 0.01, "algorithm.kl_form": "flow_grpo"}
    | {"sampling.sigma_grid": "diffusers", "sampling.guidance_gradient": "conditional"}
    | AVERAGED,
    "diffusion/sd3_5_online_grpo_ocr": SD3
    | EVERY_STEP
    | {"batch_size": 8, "sampling.samples_per_prompt": 8, "stack.num_updates_per_batch": 2}
    | {"sampling.num_inference_steps": 10, "sampling.height": 512, "sampling.width": 512}
    | {"evaluation.eval_steps": 60, "evaluation.max_prompts": 16, "evaluation.num_inference_steps": 40}
    | {"evaluation.seed": 20260504, "evaluation.weights": "ema", "run.dir": "outputs/sd3_5_ocr_grpo"}
    | {"reward.backend._target_": "unirl.reward.local.ocr.OCRRewardScorer"},
    "diffusion/sd3_flowgrpo_fast": SD3
    | {"algorithm.clip_range": 1e-5, "batch_size": 64, "sampling.samples_per_prompt": 18}
    | {"sampling.sde_steps.size": 3, "sampling.kernel.eta": 0.8, "evaluation.num_inference_steps": 40}
    | {"sampling.kernel.log_prob_form": "unnormalised"},
    "diffusion/sd3_grpo_guard": SD3
    | EVERY_STEP
    | {"algorithm.clip_range": 4e-6, "backend.optimizer_cfg.learning_rate": 1e-4, "advantage.std": "group"},
    "diffusion/sd3_mixgrpo_flash": SD3
    | {"sampling.sde_steps.size": 4, "sampling.sde_steps.stride": 1, "sampling.sde_steps.iters_per_window": 20}
    | {"sampling.tail_fraction": 0.4, "sampling.num_inference_steps": 25, "sampling.solver.variant": "midpoint"},
    "diffusion/sd3_nft": CLEAN_SAMPLES
    | {"algorithm.beta": 1.0, "algorithm.adv_clip_max": 5.0, "algorithm.velocity_coef": 0, "advantage.clip": 5.0}
    | {"algorithm.times.fraction": 0.99, "backend.optimizer_cfg.weight_decay": 1e-4, "stack.micro_batch_size": "auto"}
    | {"backend.ema_lora_cfg.rate": 0.001, "backend.ema_lora_cfg.ceiling": 0.5, "backend.ema_lora_cfg.flat_updates": 0},
    "diffusion/sd3_awm": CLEAN_SAMPLES
    | {"algorithm.surrogate": "power_huber", "algorithm.huber_power": 0.25, "algorithm.clip_range": None}
    | {"algorithm.velocity_coef": 1e-4, "algorithm.ema_coef": 1.0, "algorithm.times.num_times": 6}
    | {"advantage.clip": 1.0, "backend.ema_lora_cfg.ceiling": 0.3},
    "diffusion/sd3_online_dpo": CLEAN_SAMPLES
    | {"algorithm.beta": 100.0, "algorithm.pairs_per_group": 1, "sampling.samples_per_prompt": 24}
    | {"backend.ema_cfg.every": 40, "backend.ema_cfg.target_decay": 0},
}


def idle_lines(composed: ComposedConfig) -> list[str]:
    """Key paths that a recipe's own file writes and without which the resolved configuration is the same."""
    own = composed.layers[-3]
    full = check(composed).resolved()
    return [path for path, _ in leaves(own.tree) if resolved_without(composed, path) == full]


def resolved_without(composed: ComposedConfig, path: str) -> dict | None:
    """The resolved configuration of a recipe that lacks one line; None when it is then refused."""
    *below, own, environment, typed = composed.layers
    tree = copy.deepcopy(own.tree)
    parent, _, key = path.rpartition(".")
    del (get(tree, parent) if parent else tree)[key]
    layers = (*below, replace(own, tree=tree), environment, typed)
    try:
        return check(replace(composed, layers=layers)).resolved()
    except ConfigError:
        return None


@pytest.mark.parametrize("name", NAMES)
def test_the_checked_recipe_travels_to_workers(name):
    """Ray pickles each role's block. What it holds must be found again in another process."""
    config = load(name, ["scale=toy"]).config
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        assert pickle.loads(pickle.dumps(value)) == value, field.name


@pytest.mark.parametrize("name", NAMES)
def test_the_recipe_composes_checks_and_may_start(name):
    preflight(load(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_recipe_writes_no_value_that_would_hold_without_it(name):
    assert idle_lines(compose(name)) == []


def test_an_idle_line_is_found_in_a_recipe_and_in_a_variant(tmp_path):
    base = load("diffusion/sd3_trainside").file.path.read_text()
    (tmp_path / "base.yaml").write_text(base + "tracking: {sample_steps: 10}\n")
    (tmp_path / "same.yaml").write_text(
        "defaults: [base, _self_]\nbatch_size: 48\nsampling: {trajectory_dtype: fp32}\n"
    )
    assert idle_lines(compose(str(tmp_path / "base.yaml"))) == ["tracking.sample_steps"]
    assert idle_lines(compose(str(tmp_path / "same.yaml"))) == ["batch_size"]


@pytest.mark.parametrize("recipe", RECIPES, ids=NAMES)
def test_the_recipe_is_short_and_starts_with_its_package(recipe):
    lines = recipe.path.read_text().splitlines()
    assert lines[0] == "# @package _global_"
    assert lines[1].startswith("# ") and lines[1].endswith(".")
    policies = len(policy_keys(compose(str(recipe.path)).tree, "sampling"))
    assert len([line for line in lines if line.strip()]) <= 25 + 20 * policies
    if any(line.startswith("defaults:") for line in lines):
        assert len(lines) <= 15


@pytest.mark.parametrize("recipe", RECIPES, ids=NAMES)
def test_the_recipe_has_a_card_that_claims_no_more_than_was_run(recipe):
    path = recipe.path.with_suffix(CARD_SUFFIX)
    fields = yaml.safe_load(path.read_text())
    assert set(fields) == set(vars(Card()))
    assert recipe.card.status in ("untested", "toy", "trained")
    said = {name: value for name, value in vars(recipe.card).items() if name != "status"}
    assert all(value == "none" for value in said.values()) == (recipe.card.status == "untested")


@pytest.mark.parametrize("name", [name for name in NAMES if "_4x8" in name])
def test_a_recipe_for_4_nodes_of_8_devices_says_so(name):
    config = load(name).config
    assert (config.num_devices, config.devices_per_node) == (32, 8)


@pytest.mark.parametrize(("name", "settings"), PUBLISHED.items(), ids=PUBLISHED)
def test_the_recipe_has_the_published_hyper_parameters(name, settings):
    resolved = dict(leaves(load(name).resolved()))
    assert {key: resolved.get(key) for key in settings} == settings


def test_prompt_lists_have_no_duplicates_and_nothing_in_common():
    train, test = (Path(ROOT / f"datasets/pickscore/{name}.txt").read_text().splitlines() for name in ("train", "test"))
    assert (len(train), len(test)) == (200, 50)
    assert len(set(train) | set(test)) == 250


@pytest.mark.slow
def test_every_choice_of_a_recipe_is_run():
    chosen = set().union(*map(choices_of, COVERED))
    missing = {recipe: left for recipe in NAMES if (left := choices_of(recipe) - chosen)}
    assert not missing, "add one of these to COVERING of tests/covering_recipes.py"
