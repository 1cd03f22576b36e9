"""What may be written about the machine, and what must not: environment by allow-list, secrets masked in texts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

ALLOWED = (
    "CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONHASHSEED",
    "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_ENDPOINT", "PRETRAINED_MODEL", "DATA_PATH", "EVAL_DATA_PATH",
    "OUTPUT_DIR", "RANK", "WORLD_SIZE", "LOCAL_RANK", "RAY_ADDRESS", "WANDB_PROJECT", "WANDB_ENTITY", "WANDB_MODE",
    "WANDB_RUN_NAME", "SWANLAB_MODE", "CI", "SLURM_JOB_ID", "SLURM_NNODES",
)  # fmt: skip
"""Variables that are recorded; every other one is not."""
ALLOWED_STARTS = ("NCCL_", "TORCH_", "PYTORCH_", "GLOO_")
SECRET_WORD = r"(?:token|secret|password|passwd|api[_-]?key|access[_-]?key|credentials?|authorization)"
SECRET_NAME = rf"(?:[\w.-]*[_.-])?{SECRET_WORD}"
VALUE = r"""(?!\s|null\b|None\b)("[^"]*"|'[^']*'|[^\s,}]+)"""
ASSIGNMENT = re.compile(rf"""(?im)((?:^|[\s,{{"'+]){SECRET_NAME}["']?\s*[:=][ \t]*){VALUE}""")
USER_INFO = re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://)[^\s/@]+@")
KEY_SHAPES = re.compile(r"\b(?:hf_\w{16,}|sk-[\w-]{16,}|gh[pousr]_\w{16,}|AKIA[A-Z0-9]{16})\b")
MASK = "***"


def redact(text: str) -> str:
    """`text` without passwords in addresses, values of keys that sound secret, and strings shaped like access keys."""
    text = USER_INFO.sub(rf"\1{MASK}@", text)
    text = ASSIGNMENT.sub(rf"\1{MASK}", text)
    return KEY_SHAPES.sub(MASK, text)


def redact_tree(value: Any) -> Any:
    """The same for JSON data: values below keys that sound secret, and every text."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {key: MASK if _is_secret(key, entry) else redact_tree(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact_tree(entry) for entry in value]
    return value


def _is_secret(key: object, value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(SECRET_NAME, str(key), re.IGNORECASE) is not None


def allowed_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that help to repeat a run, sorted by name."""
    names = [name for name in environment if name in ALLOWED or name.startswith(ALLOWED_STARTS)]
    return {name: redact(environment[name]) for name in sorted(names)}
