"""Reads LoRA files of other tools, as the values with which the adapters of a run start.

    kohya, musubi     lora_unet_<module>.lora_{down,up}.weight, lora_unet_<module>.alpha
    ComfyUI, BFL      diffusion_model.<module>.lora_{A,B}.weight
    diffusers         transformer.<module>.lora_{A,B}.weight, LoRA settings in the header
    PEFT              base_model.model.<module>.lora_{A,B}.weight, adapter_config.json in the folder

The converters of diffusers and peft map the names and apply the alphas. They drop what they do not know, so this module
proves that every tensor of a file reaches exactly one layer.
"""

from __future__ import annotations

import inspect
import json
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from unirl.config.errors import DataError, InvalidValueError, NotFoundError
from unirl.models.loading.adapter_files import COMPONENT
from unirl.models.loading.completeness import listed_names
from unirl.models.loading.hub import quiet_libraries
from unirl.types.facts import LoraSpec

NAME = "start"
"""The name of the adapter in the networks that are built to read a file."""
PEFT_CONFIG = "adapter_config.json"
PEFT_PREFIX = "base_model.model."
NO_CONFIG = (
    f"there is no {PEFT_CONFIG} beside it, which has the alpha of the adapter. Give the folder that peft's "
    "`save_pretrained` wrote"
)
ENCODERS = ("lora_te", "text_encoder")
_OLD_SIDE = re.compile(r"\.lora[._](down|up)\.")
SAME = 1e-3
"""Relative difference below which two norms count as equal. Alphas may be applied in bf16."""


@dataclass(frozen=True)
class AdapterLayer:
    """The update scale * B A of one layer."""

    a: Tensor  # [rank, inputs]
    b: Tensor  # [outputs, rank]
    scale: float


AdapterLayers = Mapping[str, AdapterLayer]
"""The layers of an adapter, by the name of the module."""


def adapter_file(path: str, name: str | None = None) -> Path:
    """The adapter file at `path`: that file, or the file of a folder. Raises NotFoundError if there is none.

    Args:
        name: the name of the file in a folder. None takes the only file of safetensors.
    """
    place = Path(path).expanduser()
    result = sorted(place.glob(name or "*.safetensors")) if place.is_dir() else [place] if place.is_file() else []
    if len(result) == 1 and result[0].suffix == ".safetensors":
        return result[0]
    wanted = name or "one file of safetensors"
    what = f"a folder with {listed_names([file.name for file in result])}" if len(result) > 1 else f"not {wanted}"
    raise NotFoundError(
        f"backend.lora_cfg.path={path!r} is {what}. Give the .safetensors file of a LoRA, or a folder with {wanted}"
    )


def has_peft_config(file: Path) -> bool:
    """True if peft wrote the folder of an adapter file."""
    return (file.parent / PEFT_CONFIG).is_file()


def read_peft(file: Path, build: Callable[[], nn.Module]) -> AdapterLayers:
    """The layers of an adapter that peft wrote.

    Args:
        build: builds the network.
    """
    from peft import LoraConfig, inject_adapter_in_model, set_peft_model_state_dict

    if not has_peft_config(file):
        raise NotFoundError(f"{file}: {NO_CONFIG}")
    config = LoraConfig.from_pretrained(str(file.parent))
    state = {name.removeprefix(PEFT_PREFIX): tensor for name, tensor in _read(file)[0].items()}
    network = _hollow(build)
    with _errors(file, network):
        inject_adapter_in_model(config, network, adapter_name=NAME, low_cpu_mem_usage=True)
        set_peft_model_state_dict(network, dict(state), adapter_name=NAME, low_cpu_mem_usage=True)
    return _layers(file, network, {name: name for name in state})


def read_with_diffusers(file: Path, pipeline: Any, build: Callable[[], nn.Module]) -> AdapterLayers:
    """The layers of an adapter file in any format that `pipeline.load_lora_weights` of diffusers reads.

    Args:
        pipeline: the pipeline class of the model.
        build: builds the network.
    """
    state, metadata = _read(file)
    encoders = [name for name in state if name.startswith(ENCODERS)]
    if encoders:
        raise DataError(
            f"{file} also adapts text encoders, which are not trained ({len(encoders)} tensors): "
            f"{listed_names(encoders)}. Write a file without these tensors"
        )
    leaves = {name: tensor.clone().requires_grad_(tensor.dim() > 1) for name, tensor in state.items()}
    converted, settings = _converted(file, pipeline, leaves, metadata)
    layers = _bound(file, _hollow(build), converted, settings)
    weights = {name: tensor for name, tensor in leaves.items() if tensor.requires_grad}
    reached = torch.autograd.grad(
        [tensor.sum() for tensor in converted.values()], list(weights.values()), allow_unused=True
    )
    lost = [name for name, gradient in zip(weights, reached, strict=True) if gradient is None]
    alphas = {name for name in state if name.endswith(".alpha")}
    lost += [name for name, tensor in state.items() if tensor.dim() < 2 and name not in alphas]
    _refuse_unknown(file, lost)
    if alphas:
        doubled = {name: 2 * tensor if name in alphas else tensor for name, tensor in state.items()}
        _check_alphas(file, layers, _bound(file, _hollow(build), *_converted(file, pipeline, doubled, metadata)))
    return layers


def starting_weights(layers: AdapterLayers, spec: LoraSpec, path: str) -> dict[str, tuple[Tensor, Tensor]]:
    """A [r, inputs] and B [outputs, r] of each layer in float32, with B such that spec.scale * B A is the update.

    Raises InvalidValueError if the adapters of a run cannot hold the update.
    """
    foreign = [n for n in layers if not any(f".{n}".endswith(f".{target}") for target in spec.targets)]
    ends = sorted({".".join(name.split(".")[-2:]) for name in foreign})
    if foreign:
        raise InvalidValueError(
            f"backend.lora_cfg.path={path!r} adapts {len(foreign)} layers that lora_cfg.target_modules leaves out: "
            f"{listed_names(foreign)}. Add {listed_names(ends)} to lora_cfg.target_modules"
        )
    largest = max((len(layer.a) for layer in layers.values()), default=0)
    if largest > spec.rank:
        first = next(name for name, layer in layers.items() if len(layer.a) == largest)
        raise InvalidValueError(
            f"backend.lora_cfg.rank={spec.rank}: the adapter in {path} has rank {largest} in {first}. Set "
            f"backend.lora_cfg.rank={largest}, or more"
        )
    return {name: (layer.a.float(), layer.b.float() * (layer.scale / spec.scale)) for name, layer in layers.items()}


def _read(file: Path) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """The tensors of an adapter file, and the settings that diffusers writes into its header."""
    try:
        with safe_open(file, "pt") as content:
            settings = (content.metadata() or {}).get("lora_adapter_metadata")
            return {name: content.get_tensor(name) for name in content.keys()}, settings and json.loads(settings)  # noqa: SIM118 (no mapping)
    except (OSError, ValueError, SafetensorError) as error:
        raise NotFoundError(f"cannot read the adapter {file}: {error}. Copy it again") from error


def _converted(
    file: Path, pipeline: Any, state: Mapping[str, Tensor], metadata: Mapping[str, Any] | None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors by diffusers' own names, and the settings with which they are loaded."""
    names = inspect.signature(pipeline.lora_state_dict).parameters if hasattr(pipeline, "lora_state_dict") else ()
    if not names:  # a pipeline without converters reads the names of diffusers
        return dict(state), {"metadata": metadata}
    try:
        with quiet_libraries():
            if "return_alphas" in names:
                tensors, alphas = pipeline.lora_state_dict(dict(state), return_alphas=True)
                return dict(tensors), {"network_alphas": alphas or None, "metadata": metadata}
            return dict(pipeline.lora_state_dict(dict(state))), {"metadata": metadata}
    except (KeyError, RuntimeError, ValueError) as error:
        # The converters raise these three for names and shapes that they do not know.
        reason = str(error).strip().splitlines()[0] or type(error).__name__
        raise DataError(f"{file}: diffusers cannot convert this LoRA for {pipeline.__name__}: {reason}") from error


def _hollow(build: Callable[[], nn.Module]) -> nn.Module:
    """The network on the CPU without memory for its weights. peft puts adapters on the device of the weights."""
    with quiet_libraries(), torch.device("meta"):
        network = build()
    for module in network.modules():
        for name, parameter in module.named_parameters(recurse=False):
            zeros = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
            setattr(module, name, nn.Parameter(zeros, requires_grad=False))
    return network


@contextmanager
def _errors(file: Path, network: nn.Module) -> Iterator[None]:
    """In this context, what diffusers and peft say about a LoRA that does not fit becomes a DataError."""
    try:
        with quiet_libraries(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # tensors and settings without a layer are refused below, by name
            yield
    except (KeyError, RuntimeError, ValueError) as error:
        # The libraries raise these three for layers that the network lacks and for other shapes.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
        raise DataError(f"{file} does not fit {type(network).__name__}: {reason}. Use a LoRA of this model") from error


def _bound(
    file: Path, network: nn.Module, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]
) -> dict[str, AdapterLayer]:
    """The layers that diffusers loads into `network`."""
    _refuse_unknown(file, [name for name in tensors if not name.startswith(f"{COMPONENT}.")])
    loader: Any = network
    plain = {name: tensor.detach() for name, tensor in tensors.items()}
    with _errors(file, network):
        loader.load_lora_adapter(plain, prefix=COMPONENT, adapter_name=NAME, low_cpu_mem_usage=True, **settings)
    return _layers(file, network, {_OLD_SIDE.sub(_side, name.removeprefix(f"{COMPONENT}.")): name for name in tensors})


def _side(match: re.Match[str]) -> str:
    return f".lora_{'A' if match[1] == 'down' else 'B'}."


def _layers(file: Path, network: nn.Module, names: Mapping[str, str]) -> dict[str, AdapterLayer]:
    """The adapter `start` of every layer of `network`.

    Args:
        names: the tensors in the file, by the name that they have in the adapter.
    """
    from peft.tuners.lora import Linear as LoraLinear
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapted = {name: layer for name, layer in network.named_modules() if isinstance(layer, BaseTunerLayer)}
    _refuse_unknown(file, [own for name, own in names.items() if name not in _names(adapted)])
    result: dict[str, AdapterLayer] = {}
    for name, layer in adapted.items():
        missing = sorted(_names([name]) - set(names))
        if missing:
            raise DataError(f"{file} lacks {missing[0]}. Use a file with A and B of every layer")
        if not isinstance(layer, LoraLinear) or layer.use_dora.get(NAME, False):
            raise DataError(f"{file}: {name} is not adapted by LoRA on a linear layer alone. Use a plain LoRA")
        a, b = layer.lora_A[NAME].weight.detach(), layer.lora_B[NAME].weight.detach()
        result[name] = AdapterLayer(a, b, float(layer.scaling[NAME]))
    if not result:
        raise DataError(f"{file} has no LoRA tensors. Use a LoRA of this model")
    return result


def _names(layers: Iterable[str]) -> set[str]:
    return {f"{name}.lora_{side}.weight" for name in layers for side in "AB"}


def _refuse_unknown(file: Path, names: Collection[str]) -> None:
    """Raises DataError if there are tensors that reach no layer."""
    if any(name.startswith(PEFT_PREFIX) for name in names):
        raise NotFoundError(f"{file}: {NO_CONFIG}")
    if names:
        raise DataError(
            f"{file}: {len(names)} tensors belong to no layer of the trained network: {listed_names(sorted(names))}. "
            "Use a LoRA of this model, with the tensors A and B of linear layers and their alphas alone"
        )


def _check_alphas(file: Path, layers: AdapterLayers, doubled: AdapterLayers) -> None:
    """Raises DataError unless doubling all alphas of a file doubles every update."""

    def size(layer: AdapterLayer) -> float:
        return float(layer.a.float().norm() * layer.b.float().norm()) * layer.scale

    wrong = [n for n, layer in layers.items() if abs(size(doubled[n]) - 2 * size(layer)) > SAME * size(layer)]
    if wrong:
        raise DataError(
            f"{file}: {len(wrong)} layers do not depend on an alpha, though the file has some: {listed_names(wrong)}. "
            "Write a file in which every module has an alpha, or multiply the alphas into the weights"
        )
