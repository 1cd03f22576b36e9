"""`unirl env`: the facts about this machine for a bug report, without private data."""

import json
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import unirl
from unirl.bench.probe import main_memory_gib
from unirl.cli.arguments import Parser
from unirl.config.failures import Session
from unirl.types.secrets import redact

EXAMPLES = ("unirl env", "unirl env --json", "unirl env > report.md")

PACKAGES = (
    *("torch", "numpy", "diffusers", "transformers", "peft", "accelerate", "safetensors", "hydra-core", "omegaconf"),
    *("pillow", "scipy", "rich", "wandb", "tensorboard", "swanlab", "ray"),
)
SHOWN = (
    *("PRETRAINED_MODEL", "DATA_PATH", "EVAL_DATA_PATH", "OUTPUT_DIR", "WANDB_PROJECT", "WANDB_RUN_NAME"),
    *("WANDB_ENTITY", "WANDB_MODE", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "CUDA_VISIBLE_DEVICES"),
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "MKL_CBWR", "PYTORCH_ALLOC_CONF"),
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
    """Facts by section, without credentials, and with the home directory written as ~."""
    sections = {
        "unirl": {"version": unirl.__version__, "commit": _commit()},
        "machine": {
            "python": platform.python_version(),
            "system": platform.platform(),
            "cpus": str(os.cpu_count()),
            "memory": f"{main_memory_gib():.1f} GiB",
        },
        "torch": _torch(),
        "packages": {name: installed(name) or "absent" for name in PACKAGES},
        "variables": {name: os.environ[name] for name in SHOWN if name in os.environ}
        | {name: "set (not shown)" for name in SECRET if os.environ.get(name)},
    }
    home = str(Path.home())
    return {
        title: {key: redact(value).replace(home, "~") for key, value in facts.items()}
        for title, facts in sections.items()
    }


def markdown(facts: dict[str, dict[str, str]]) -> str:
    sections = ("".join(f"\n- {key}: {value}" for key, value in section.items()) for section in facts.values())
    return "\n\n".join(f"### {title}{lines}" for title, lines in zip(facts, sections, strict=True))


def installed(package: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _torch() -> dict[str, str]:
    if installed("torch") is None:
        return {"torch": "absent"}
    import torch

    from unirl.types.device import accelerator, cuda_version, device_name, num_accelerators

    devices = [device_name(accelerator(i)) for i in range(num_accelerators())]
    return {
        "devices": ", ".join(devices) or "cpu",
        "cuda": cuda_version() or "none",
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
    }


def _commit() -> str:
    folder = Path(unirl.__file__).resolve().parent
    try:
        command = ["git", "-C", str(folder), "describe", "--always", "--dirty"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except FileNotFoundError:
        return "unknown (no git)"
    return done.stdout.strip() or "unknown (not a git checkout)"
