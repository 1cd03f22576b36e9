"""Injects low-rank adapters (LoRA, arXiv:2106.09685) by peft, and initialises them as a pure function of a seed.

A target layer W becomes W + alpha / rank * B A, with parameters `<layer>.base_layer.weight`,
`<layer>.lora_A.default.weight` [rank, inputs] and `<layer>.lora_B.default.weight` [outputs, rank].
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from unirl.config.errors import IncompatibleError, InvalidValueError, did_you_mean
from unirl.models.loading.estimate import linears_of
from unirl.sde.noise import key_seed
from unirl.types.facts import LoraSpec

ADAPTER = "default"
"""peft's name of the one adapter that is trained."""
ADAPTED = "adapted_layers"
"""Attribute of a module that lists its adapted layers."""
_ADAPTER_WEIGHT = re.compile(r"(.+\.)?lora_[AB]\.[^.]+\.weight")


AdapterStart = Mapping[str, tuple[Tensor, Tensor]]
"""A [r, inputs] and B [outputs, r] with which the adapters of some layers start, by the name of the layer."""


def inject_lora(module: nn.Module, spec: LoraSpec, seed: int, start: AdapterStart | None = None) -> None:
    """Freeze `module` and add a trainable float32 adapter to every target: A is Gaussian with std 1 / rank, B is zero.

    Adapters of a module on the meta device get no values; `initial_adapter_weight` computes them later.

    Args:
        start: see `initial_adapter_weight`.
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
                parameter.data.copy_(initial_adapter_weight(name, tuple(parameter.shape), spec.rank, seed, start))
    layers: list[Any] = [child for child in module.modules() if hasattr(child, "lora_A")]
    for layer in layers:
        layer.__class__ = adapted_class(layer.__class__)
    vars(module)[ADAPTED] = layers


@cache
def adapted_class(peft_class: type[nn.Module]) -> type[nn.Module]:
    """A class of adapted layers with another forward. A compiler shares graphs among layers of a class."""
    members = {"forward": adapted_forward, "copies": None, "__getstate__": _state_without_copies}
    return type("AdaptedLinear", (peft_class,), members)


def adapted_forward(layer: Any, x: Tensor) -> Tensor:
    """W x + alpha / rank * B A x, computed in the dtype of x.

    peft's own forward runs the adapter in float32, so that it casts the input of every layer, or under autocast the
    weights of every layer. Those casts are a fifth of all launches of a transformer in bf16.
    """
    output: Tensor
    if layer.disable_adapters or layer.merged:
        output = super(type(layer), layer).forward(x)
        return output
    a, b = layer.copies or masters(layer)
    output = layer.base_layer(x)
    return torch.add(output, linear(linear(x, a.to(x.dtype)), b.to(x.dtype)), alpha=layer.scaling[ADAPTER])


def masters(layer: Any) -> tuple[Tensor, Tensor]:
    """The trained parameters A and B of an adapted layer."""
    return layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight


def _state_without_copies(layer: nn.Module) -> dict[str, object]:
    """The attributes of a layer. A copied module must not share, or differentiate, the copies of adapters."""
    return {**vars(layer), "copies": None}


class AdapterCopies:
    """Copies all adapters of a module to the dtype of its base, at the start of each forward and in one launch.

    Only for a module whose parameters are whole and whose blocks are not compiled. FSDP2 gathers adapters in the dtype
    of the base by itself, and a compiler fuses the casts of each layer.
    """

    def __init__(self, layers: Sequence[Any], dtype: torch.dtype) -> None:
        self.layers = layers
        self.dtype = dtype

    @classmethod
    def attach(cls, module: nn.Module) -> None:
        """Make the copies in every forward of `module`, if its adapters are wider than its base."""
        layers = adapted_layers(module)
        if layers and (dtype := layers[0].base_layer.weight.dtype) != torch.float32:
            module.register_forward_pre_hook(cls(layers, dtype))

    def __call__(self, module: nn.Module, inputs: object) -> None:
        weights = [weight for layer in self.layers for weight in masters(layer)]
        copies = _Copies.apply(self.dtype, *weights)
        for layer, a, b in zip(self.layers, copies[::2], copies[1::2], strict=True):
            layer.copies = a, b


class _Copies(torch.autograd.Function):
    """Copies of tensors in another dtype. Forward and backward launch one kernel each."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return _converted(weights, dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        wide = iter(_converted([gradient for gradient in gradients if gradient is not None], torch.float32))
        return None, *(None if gradient is None else next(wide) for gradient in gradients)


def _converted(tensors: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    if copies:
        torch._foreach_copy_(copies, list(tensors))
    return tuple(copies)


def adapted_layers(module: nn.Module) -> list[Any]:
    """The layers of `module` that `inject_lora` adapted."""
    layers: list[Any] = vars(module).get(ADAPTED, [])
    return layers


def initial_adapter_weight(
    name: str, shape: tuple[int, ...], rank: int, seed: int, start: AdapterStart | None = None
) -> Tensor:
    """The initial value of an adapter's parameter, fp32 on the CPU. It depends only on the seed, its name and `start`.

    Args:
        start: matrices of a rank up to `rank`, which replace the first rows of A and the first columns of B. The other
            rows of A are Gaussian and the other columns of B zero, so they train but do not change the update.
    """
    layer, _, side = name.rpartition(".lora_")
    weight = torch.zeros(shape)
    if side.startswith("A."):
        weight.normal_(std=1.0 / rank, generator=torch.Generator().manual_seed(key_seed(seed, f"lora:{name}")))
    if start is not None and layer in start:
        a, b = start[layer]
        if side.startswith("A."):
            weight[: len(a)] = a
        else:
            weight[:, : b.shape[1]] = b
    return weight


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
    matched = tuple(target for target in model_targets if _matches(target, linears_of(module)))
    if not matched:
        require_targets(module, tuple(model_targets))
    return matched


def require_targets(module: nn.Module, targets: Sequence[str]) -> None:
    """Raise InvalidValueError unless `targets` is not empty and each is the end of a linear layer's name."""
    linear = linears_of(module)
    missing = [target for target in targets if not _matches(target, linear)]
    if targets and not missing:
        return
    suffixes = sorted({part for name in linear for part in (name.split(".")[-1], ".".join(name.split(".")[-2:]))})
    first = missing[0] if missing else "nothing"
    raise InvalidValueError(
        f"lora_cfg.target_modules: {first!r} is the end of no linear layer's name in {type(module).__name__}."
        f"{did_you_mean(first, suffixes)} The ends are {', '.join(suffixes[:24])}"
    )


def _matches(target: str, names: Iterable[str]) -> bool:
    return any(name == target or name.endswith(f".{target}") for name in names)
