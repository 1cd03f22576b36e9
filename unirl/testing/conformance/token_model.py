"""The model of a fake server of tokens: logits, weights by the names of a checkpoint, adapters, checksums."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from unirl.models.language.bundle import LanguageBundle
from unirl.models.language.packing import expand_positions, prompts_of
from unirl.models.language.pipeline import TextPipeline
from unirl.models.loading.lora import inject_lora
from unirl.types.conditions import Conditions, PromptTokens
from unirl.types.facts import LoraSpec

ROWS_PER_FORWARD = 64
Row = tuple[Conditions, Sequence[int]]
"""The conditions of one prompt, and the tokens after it."""


class TokenModel:
    """One network. It is not for several threads at once."""

    def __init__(self, pipeline: TextPipeline[Any]) -> None:
        self.pipeline = pipeline
        self.bundle: LanguageBundle = pipeline.bundle
        self.stage = pipeline.stage
        self.network: Any = self.bundle.trainable().eval().requires_grad_(False)
        self.parameters = dict(self.network.named_parameters())
        self.adapters: dict[str, Mapping[str, Tensor]] = {}
        """Name to the tensors of an adapter, by the names of the network."""
        self.lora: LoraSpec | None = None
        """The settings of the adapters. None: the network has none yet."""
        self.active: str | None = None

    @torch.no_grad()
    def logits(self, rows: Sequence[Row], adapter: str | None) -> Tensor:
        """[B, V] fp32 of the token after each row."""
        self._activate(adapter)
        parts = [rows[start : start + ROWS_PER_FORWARD] for start in range(0, len(rows), ROWS_PER_FORWARD)]
        return torch.cat([self.stage.next_logits(continued(part)).float() for part in parts])

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


def continued(rows: Sequence[Row]) -> Conditions:
    """The conditions of prompts that end with the tokens after them."""
    prompts = [longer(prompts_of(conditions), tokens) for conditions, tokens in rows]
    others = {
        name: type(first).concat([conditions[name] for conditions, _ in rows])
        for name, first in rows[0][0].items()
        if name != "prompt"
    }
    return {"prompt": PromptTokens.concat(prompts), **others}


def longer(prompt: PromptTokens, tokens: Sequence[int]) -> PromptTokens:
    """One prompt, followed by tokens of a response."""
    places = expand_positions(prompt.next_position + torch.arange(len(tokens)), prompt.positions)
    return PromptTokens(
        tokens=torch.cat([prompt.tokens, torch.tensor(tokens, dtype=torch.int64)]),
        positions=torch.cat([prompt.positions, places]),
        next_position=prompt.next_position + len(tokens),
        offsets=torch.tensor([0, len(prompt.tokens) + len(tokens)]),
    )


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
