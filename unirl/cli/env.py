"""`unirl env`: the facts about this machine for a bug report, without private data."""

import json
import os
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import unirl
from unirl.cli.arguments import Parser
from unirl.config.failures import Session

EXAMPLES = ("unirl env", "unirl env --json", "unirl env > report.md")

PACKAGES = (
    *("torch", "numpy", "diffusers", "transformers", "peft", "accelerate", "safetensors", "hydra-core", "omegaconf"),
    *("pillow", "scipy", "rich", "wandb", "tensorboard", "swanlab", "ray"),
)
SHOWN = (
    *("PRETRAINED_MODEL", "DATA_PATH", "EVAL_DATA_PATH", "OUTPUT_DIR", "WANDB_PROJECT", "WANDB_RUN_NAME"),
    *("WANDB_ENTITY", "WANDB_MODE", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "CUDA_VISIBLE_DEVICES"),
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTORCH_ALLOC_CONF"),
)
"""Environment variables whose value is printed. The value of no other variable is printed."""
SECRET = ("HF_TOKEN", "WANDB_API_KEY", "SWANLAB_API_KEY")
"""Environment variables that are only reported as set."""


def run(argv: list[str], session: Session) -> int:
    parser = Parser("env", "Print versions, devices and settings as Markdown, for a bug report.", EXAMPLES)
    parser.option("--json", action="store_true", help="as JSON")
    parser.option("--markdown", action="store_true", help="as Markdown (the default)")
    facts = collect()
    print(json.dumps(facts, indent=1) if parser.parse(argv).json else markdown(facts))
    return 0


def collect() -> dict[str, dict[str, str]]:
    """Facts by section, without private data."""
    sections = {
        "unirl": {"version": unirl.__version__, "commit": _commit()},
        "machine": _machine(),
        "torch": _torch(),
        "packages": {name: installed(name) or "absent" for name in PACKAGES},
        "variables": _variables(),
    }
    return {title: {key: redacted(value) for key, value in facts.items()} for title, facts in sections.items()}


def markdown(facts: dict[str, dict[str, str]]) -> str:
    blocks = [
        "\n".join([f"### {title}", *(f"- {key}: {value}" for key, value in facts[title].items())]) for title in facts
    ]
    return "\n\n".join(blocks)


def installed(package: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def redacted(text: str) -> str:
    """`text` with the home directory written as ~, and without credentials in addresses."""
    without_credentials = re.sub(r"(\w+://)[^/@\s]+@", r"\1***@", text)
    return without_credentials.replace(str(Path.home()), "~")


def memory_gib() -> float:
    """Memory of this machine in GiB."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30


def _machine() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpus": str(os.cpu_count()),
        "memory": f"{memory_gib():.1f} GiB",
    }


def _torch() -> dict[str, str]:
    if installed("torch") is None:
        return {"torch": "absent"}
    import torch

    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "devices": ", ".join(devices) or "cpu",
        "cuda": torch.version.cuda or "none",
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
    }


def _variables() -> dict[str, str]:
    shown = {name: os.environ[name] for name in SHOWN if name in os.environ}
    return shown | {name: "set (not shown)" for name in SECRET if os.environ.get(name)}


def _commit() -> str:
    folder = Path(unirl.__file__).resolve().parent
    try:
        command = ["git", "-C", str(folder), "describe", "--always", "--dirty"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except FileNotFoundError:
        return "unknown (no git)"
    return done.stdout.strip() or "unknown (not a git checkout)"
