"""Injects low-rank adapters (LoRA, arXiv:2106.09685) by peft, and initialises them as a pure function of a seed.

A target layer W becomes W + alpha / rank * B A, with parameters `<layer>.base_layer.weight`,
`<layer>.lora_A.default.weight` [rank, inputs] and `<layer>.lora_B.default.weight` [outputs, rank].
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from unirl.config.errors import IncompatibleError, InvalidValueError, did_you_mean
from unirl.sde.noise import key_seed

ADAPTER = "default"
"""peft's name of the one adapter that is trained."""
_ADAPTER_WEIGHT = re.compile(r"(.+\.)?lora_[AB]\.[^.]+\.weight")


@dataclass(frozen=True)
class LoraSpec:
    """The settings of a module's adapters."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    """Suffixes of the names of linear layers."""

    @property
    def scale(self) -> float:
        """The factor of B A."""
        return self.alpha / self.rank


def inject_lora(module: nn.Module, spec: LoraSpec, seed: int) -> None:
    """Freeze `module` and add a trainable float32 adapter to every target: A is Gaussian with std 1 / rank, B is zero.

    Adapters of a module on the meta device get no values; `initial_adapter_weight` computes them later.
    """
    from peft import LoraConfig as PeftLoraConfig
    from peft import inject_adapter_in_model

    present = adapter_names(module)
    if present:
        raise IncompatibleError(
            f"{type(module).__name__} already has adapters ({present[0]}): a second one would be added to them"
        )
    require_targets(module, spec.targets)
    module.requires_grad_(False)
    on_meta = next(module.parameters()).is_meta
    config = PeftLoraConfig(r=spec.rank, lora_alpha=spec.alpha, target_modules=list(spec.targets), bias="none")
    with torch.random.fork_rng(devices=[]):
        inject_adapter_in_model(config, module, adapter_name=ADAPTER, low_cpu_mem_usage=on_meta)
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
            if not on_meta:
                parameter.data.copy_(initial_adapter_weight(name, tuple(parameter.shape), spec.rank, seed))


def initial_adapter_weight(name: str, shape: tuple[int, ...], rank: int, seed: int) -> Tensor:
    """The initial value of an adapter's parameter, fp32 on the CPU. It depends only on the seed and its name."""
    if ".lora_B." in name:
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(key_seed(seed, f"lora:{name}"))
    return torch.empty(shape).normal_(std=1.0 / rank, generator=generator)


def adapter_names(module: nn.Module) -> list[str]:
    """The parameters of all adapters in `module`, in its order."""
    return [name for name, _ in module.named_parameters() if _ADAPTER_WEIGHT.fullmatch(name)]


def inconsistent_adapters(module: nn.Module, spec: LoraSpec) -> list[str]:
    """Adapted layers whose adapter does not act as `spec` says: disabled, merged, inactive or differently scaled."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [(name, child) for name, child in module.named_modules() if isinstance(child, BaseTunerLayer)]
    return [
        name
        for name, layer in layers
        if layer.disable_adapters
        or layer.merged
        or list(layer.active_adapters) != [ADAPTER]
        or layer.scaling[ADAPTER] != spec.scale
    ]


def choose_targets(
    module: nn.Module, requested: Sequence[str] | Literal["model"], model_targets: Sequence[str]
) -> tuple[str, ...]:
    """The suffixes to adapt: the requested ones, which must all exist, or the existing ones of the model's own list."""
    if requested != "model":
        require_targets(module, tuple(requested))
        return tuple(requested)
    linear = _linear_layers(module)
    matched = tuple(target for target in model_targets if _matches(target, linear))
    if not matched:
        require_targets(module, tuple(model_targets))
    return matched


def require_targets(module: nn.Module, targets: Sequence[str]) -> None:
    """Raise InvalidValueError unless `targets` is not empty and each is the end of a linear layer's name."""
    linear = _linear_layers(module)
    missing = [target for target in targets if not _matches(target, linear)]
    if targets and not missing:
        return
    suffixes = sorted({part for name in linear for part in (name.split(".")[-1], ".".join(name.split(".")[-2:]))})
    first = missing[0] if missing else "nothing"
    raise InvalidValueError(
        f"lora_cfg.target_modules: {first!r} is the end of no linear layer's name in {type(module).__name__}."
        f"{did_you_mean(first, suffixes)} The ends are {', '.join(suffixes[:24])}"
    )


def _linear_layers(module: nn.Module) -> list[str]:
    return [name for name, child in module.named_modules() if isinstance(child, nn.Linear)]


def _matches(target: str, names: Sequence[str]) -> bool:
    return any(name == target or name.endswith(f".{target}") for name in names)
