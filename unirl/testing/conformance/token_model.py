"""The model of a fake server of tokens: logits, weights by the names of a checkpoint, adapters, checksums."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from unirl.models.language.bundle import LanguageBundle
from unirl.models.language.packing import prompt_tokens
from unirl.models.loading.lora import inject_lora
from unirl.types.facts import LoraSpec

ROWS_PER_FORWARD = 64


class TokenModel:
    """One network. It is not for several threads at once."""

    def __init__(self, bundle: LanguageBundle) -> None:
        self.bundle = bundle
        self.stage = bundle.stage()
        self.network: Any = bundle.trainable().eval().requires_grad_(False)
        self.parameters = dict(self.network.named_parameters())
        self.adapters: dict[str, Mapping[str, Tensor]] = {}
        """Name to the tensors of an adapter, by the names of the network."""
        self.lora: LoraSpec | None = None
        """The settings of the adapters. None: the network has none yet."""
        self.active: str | None = None

    @torch.no_grad()
    def logits(self, rows: Sequence[Sequence[int]], adapter: str | None) -> Tensor:
        """[B, V] fp32 of the token after each row."""
        self._activate(adapter)
        parts = [rows[start : start + ROWS_PER_FORWARD] for start in range(0, len(rows), ROWS_PER_FORWARD)]
        return torch.cat([self.stage.canary(prompt_tokens(part)).values.float() for part in parts])

    # Weights

    def store(self, name: str, tensor: Tensor) -> None:
        """Copy a tensor of the checkpoint into its parameter. An unknown name is ignored, as real servers do."""
        parameter = self.parameters.get(self.bundle.family.parameter_name(name))
        if parameter is not None:
            parameter.data.copy_(tensor)

    def forget(self) -> None:
        """Fill all weights with numbers that mean nothing."""
        for parameter in self.parameters.values():
            parameter.data.fill_(0.123)

    def checksums(self) -> dict[str, str]:
        """The SHA-256 of every tensor as SGLang and vLLM store it.

        They join layers, and pad the vocabulary with zeros to a multiple of 64 tokens.
        """
        joined: dict[str, list[Tensor]] = {}
        for name, parameter in self.parameters.items():
            rows = -len(parameter) % 64 if name.split(".")[-2] in ("embed_tokens", "lm_head") else 0
            stored = torch.nn.functional.pad(parameter.data, (0, 0, 0, rows)) if rows else parameter.data
            joined.setdefault(joined_name(name), []).append(stored)
        return {name: digest(torch.cat(parts) if len(parts) > 1 else parts[0]) for name, parts in joined.items()}

    # Adapters

    def load_adapter(self, name: str, tensors: Mapping[str, Tensor], rank: int, alpha: float) -> None:
        """Keep an adapter. The first one decides the layers, rank and scale of all."""
        named = {adapter_parameter(key.removeprefix("base_model.model.")): tensor for key, tensor in tensors.items()}
        if self.lora is None:
            layers = {".".join(key.split(".lora_")[0].split(".")[-2:]) for key in named}
            self.lora = LoraSpec(rank=rank, alpha=alpha, targets=tuple(sorted(layers)))
            inject_lora(self.network, self.lora, seed=0)
            self.network.requires_grad_(False)
        self.adapters[name] = named

    def _activate(self, name: str | None) -> None:
        if self.lora is None or name == self.active:
            return
        for key, parameter in self.network.named_parameters():
            if ".lora_" in key:
                parameter.data.copy_(self.adapters[name][key] if name is not None else torch.zeros(()))
        self.active = name


def adapter_parameter(name: str) -> str:
    """The parameter of a network with adapters for a tensor `LAYER.lora_A.weight` or `LAYER.lora_B.weight`."""
    return f"{name.removesuffix('.weight')}.default.weight"


def joined_name(name: str) -> str:
    """The name under which SGLang has a tensor: q, k and v are one layer, and gate and up."""
    for layer in ("q_proj", "k_proj", "v_proj"):
        name = name.replace(f".{layer}.", ".qkv_proj.")
    return name.replace(".gate_proj.", ".gate_up_proj.").replace(".up_proj.", ".gate_up_proj.")


def digest(tensor: Tensor) -> str:
    """The SHA-256 of a tensor's bytes."""
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data).hexdigest()
