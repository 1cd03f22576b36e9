"""The workloads of `unirl bench`: recipes with fixed settings, at two sizes, by rollout engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from unirl.config.recipe_files import search_path
from unirl.models.loading.checkpoint import RANDOM

Size = Literal["toy", "real"]
SEED = 42
TRAINSIDE = "trainside"
FIXED = (
    f"sampling.seed={SEED}",
    "save_interval=0",
    "evaluation.eval_steps=0",
    "tracking={sample_steps: 0}",
    "watch.ignore=[all]",
    "resume=none",
)
"""Settings of every workload: nothing but steps is timed."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Fixed work: a recipe per engine, with settings that need no file of a model and no network."""

    about: str
    model: str
    """The published model whose sizes `real` has, by hub id."""
    recipes: Mapping[str, str]
    """Engine to the recipe that uses it. Every recipe of a workload samples and trains the same work."""
    data: str
    """The prompt set, which is part of the repository."""
    reward: str
    """Class of the reward."""
    settings: Sequence[str] = ()
    """Settings at both sizes."""
    real: Sequence[str] = field(default=())
    """Settings at the size `real`."""

    def recipe(self, engine: str) -> str:
        return self.recipes[engine]

    def _data_path(self) -> str:
        """The prompt set in the working directory, or in the project of the recipes."""
        places = (Path(), *(folder.parent for folder in search_path()))
        return next((str(place / self.data) for place in places if (place / self.data).is_file()), self.data)

    def words(self, size: Size, engine: str) -> list[str]:
        """The settings on the command line, without those of the user."""
        sized = ["scale=toy"] if size == "toy" else [f"bundle.path='{RANDOM}{self.model}'", "num_devices=1", *self.real]
        return [
            *FIXED,
            f"data_source.data_path={self._data_path()}",
            f"reward.backend={self.reward}",
            *self.settings,
            *sized,
        ]


IMAGE_REAL = ("batch_size=4", "sampling.samples_per_prompt=4")
VIDEO_REAL = ("batch_size=2", "sampling.samples_per_prompt=2", "sampling.height=480", "sampling.width=832")
JPEG = "{_target_: unirl.reward.local.image_statistics.JpegIncompressibilityRewardScorer}"
MOTION = "{_target_: unirl.reward.local.temporal_consistency.TemporalConsistencyRewardScorer}"
WORKLOADS: Mapping[str, Workload] = {
    "sd3_image": Workload(
        about="Flow-GRPO on Stable Diffusion 3.5 Medium, LoRA; reward: size of the image as a JPEG",
        model="stabilityai/stable-diffusion-3.5-medium",
        recipes={
            TRAINSIDE: "diffusion/sd3_trainside",
            "sglang": "diffusion/sd3_sglang_native_colocate",
            "vllm_omni": "diffusion/sd3_vllmomni",
        },
        data="datasets/pickscore/train.txt",
        reward=JPEG,
        real=IMAGE_REAL,
    ),
    "qwen_image_ocr": Workload(
        about="Flow-GRPO on Qwen-Image, LoRA; reward: the text that an OCR engine reads (extra `ocr`)",
        model="Qwen/Qwen-Image",
        recipes={TRAINSIDE: "diffusion/qwen_image_trainside"},
        data="datasets/ocr/train.jsonl",
        reward="{_target_: unirl.reward.local.ocr.OCRRewardScorer}",
        real=IMAGE_REAL,
    ),
    "wan22_video": Workload(
        about="Flow-GRPO on Wan 2.2 5B, LoRA; reward: smoothness of the motion",
        model="Wan-AI/Wan2.2-TI2V-5B-Diffusers",
        recipes={TRAINSIDE: "diffusion/wan22_ti2v_5b"},
        data="datasets/pickscore/train.txt",
        reward=MOTION,
        real=VIDEO_REAL,
    ),
    "hunyuan_video": Workload(
        about="DanceGRPO on HunyuanVideo 1.5, LoRA; reward: smoothness of the motion",
        model="hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v",
        recipes={TRAINSIDE: "diffusion/hunyuan_video15_t2v_dancegrpo_trainside"},
        data="datasets/pickscore/train.txt",
        reward=MOTION,
        real=VIDEO_REAL,
    ),
    "llm": Workload(
        about="DRPO on Qwen3-4B, all weights; reward: the right answer of an arithmetic question (extra `math`)",
        model="Qwen/Qwen3-4B-Base",
        recipes={
            TRAINSIDE: "llm/qwen3_ar_drpo_4b_base_dapo",
            "sglang": "llm/qwen3_ar_drpo_4b_base_dpao_sglang",
        },
        data="datasets/arithmetic/train.jsonl",
        reward="{_target_: unirl.reward.local.math_verify.MathVerifyRewardScorer}",
        real=("batch_size=16", "sampling.samples_per_prompt=4", "sampling.max_new_tokens=1024"),
    ),
}
