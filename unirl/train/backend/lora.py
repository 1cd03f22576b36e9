"""Low-rank adapters, injected by peft and initialised as a pure function of a seed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from unirl.config.errors import ConfigError, did_you_mean
from unirl.sde.noise import key_seed
from unirl.train.configs import LoraConfig

ADAPTER = "default"
"""peft's name of the one adapter that is trained."""


def inject_lora(module: nn.Module, config: LoraConfig, model_targets: Sequence[str], seed: int) -> None:
    """Freeze `module` and give every target a trainable float32 adapter: A gaussian with std 1 / rank, B zero.

    The draw of each A depends on the seed and its parameter's name alone; the global generator is not touched.
    """
    from peft import LoraConfig as PeftLoraConfig
    from peft import inject_adapter_in_model

    targets = check_targets(module, config, model_targets)
    module.requires_grad_(False)
    peft_config = PeftLoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=list(targets), bias="none")
    with torch.random.fork_rng(devices=[]):
        inject_adapter_in_model(peft_config, module, adapter_name=ADAPTER)
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
            _initialise(name, parameter, config.rank, seed)


@torch.no_grad()
def _initialise(name: str, parameter: nn.Parameter, rank: int, seed: int) -> None:
    if ".lora_B." in name:
        parameter.zero_()
        return
    generator = torch.Generator().manual_seed(key_seed(seed, f"lora:{name}"))
    parameter.copy_(torch.empty(parameter.shape).normal_(std=1.0 / rank, generator=generator))


def check_targets(module: nn.Module, config: LoraConfig, model_targets: Sequence[str]) -> tuple[str, ...]:
    """The suffixes to adapt. Raises ConfigError if one that the recipe names, or all of the model's, match nothing."""
    linear = [name for name, m in module.named_modules() if isinstance(m, nn.Linear)]
    asked = tuple(model_targets) if config.target_modules == "model" else tuple(config.target_modules)
    matched = [t for t in asked if any(name == t or name.endswith(f".{t}") for name in linear)]
    missing = [t for t in asked if t not in matched]
    if not matched or (missing and config.target_modules != "model"):
        suffixes = sorted({part for name in linear for part in (name.split(".")[-1], ".".join(name.split(".")[-2:]))})
        first = missing[0] if missing else "nothing"
        raise ConfigError(
            f"lora_cfg.target_modules: {first!r} is the end of no linear layer's name in {type(module).__name__}."
            f"{did_you_mean(first, suffixes)} The ends are {', '.join(suffixes[:24])}",
            code=2004,
        )
    return tuple(matched)
