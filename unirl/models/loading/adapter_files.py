"""Writes LoRA adapters as files that other libraries load, and lets peft load them.

A module's low-rank update is W + alpha / rank * B A (LoRA, arXiv:2106.09685). Two layouts of the same tensors:

    diffusers   pytorch_lora_weights.safetensors   transformer.<module>.lora_{A,B}.weight, LoRA settings in the header
    PEFT        adapter_model.safetensors          base_model.model.<module>.lora_{A,B}.weight, adapter_config.json
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from unirl.config.errors import DataError
from unirl.models.loading.hub import quiet_libraries

DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
PEFT_FILE = "adapter_model.safetensors"
COMPONENT = "transformer"
_ADAPTER_TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(?:\.[^.]+)?\.weight")


@dataclass(frozen=True)
class Adapter:
    """The trained low-rank matrices with their settings."""

    layers: Mapping[str, tuple[Tensor, Tensor]]
    """Module name to (A [rank, inputs], B [outputs, rank])."""
    rank: int
    alpha: float
    target_modules: tuple[str, ...]
    """Suffixes of the names of adapted modules."""

    @classmethod
    def from_named(
        cls, tensors: Mapping[str, Tensor], *, rank: int, alpha: float, target_modules: tuple[str, ...]
    ) -> Adapter:
        """The adapter in gathered parameters, under any adapter name. Other tensors are ignored."""
        sides: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            match = _ADAPTER_TENSOR.fullmatch(name)
            if match:
                sides.setdefault(match["module"], {})[match["side"]] = tensor.detach().cpu().contiguous()
        if not sides:
            raise DataError(
                f"no LoRA tensors among the {len(tensors)} trained parameters: this run did not train adapters. "
                "Export its weights instead"
            )
        return cls({module: (pair["A"], pair["B"]) for module, pair in sides.items()}, rank, alpha, target_modules)

    def named(self, prefix: str) -> dict[str, Tensor]:
        """The tensors by key in the file: `{prefix}{module}.lora_A.weight` and `...lora_B.weight`."""
        tensors: dict[str, Tensor] = {}
        for module, (a, b) in self.layers.items():
            tensors[f"{prefix}{module}.lora_A.weight"] = a
            tensors[f"{prefix}{module}.lora_B.weight"] = b
        return tensors

    def merged_into(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`state` with every update added to its weight in fp32, then rounded to the dtype of the weight."""
        merged = dict(state)
        for module, (a, b) in self.layers.items():
            weight = merged[f"{module}.weight"]
            update = (self.alpha / self.rank) * (b.float() @ a.float())
            merged[f"{module}.weight"] = (weight.float() + update).to(weight.dtype)
        return merged


def write_diffusers_lora(folder: Path, adapter: Adapter, file: str = DIFFUSERS_FILE) -> Path:
    """Write the file that `pipeline.load_lora_weights(folder)` of diffusers loads."""
    settings = {
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "target_modules": list(adapter.target_modules),
        "lora_dropout": 0.0,
        "bias": "none",
    }
    header = {f"{COMPONENT}.{name}": value for name, value in settings.items()}
    metadata = {"format": "pt", "lora_adapter_metadata": json.dumps(header, indent=2, sort_keys=True)}
    return _write(folder / file, adapter.named(f"{COMPONENT}."), metadata)


def write_peft_adapter(folder: Path, adapter: Adapter, base_model: str) -> Path:
    """Write the folder that `PeftModel.from_pretrained(network, folder)` of peft loads."""
    from peft import LoraConfig

    written = _write(folder / PEFT_FILE, adapter.named("base_model.model."), {"format": "pt"})
    config = LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        target_modules=list(adapter.target_modules),
        base_model_name_or_path=base_model,
        inference_mode=True,
    )
    config.save_pretrained(str(folder))
    return written


def load_peft_adapter(folder: Path, network: nn.Module) -> nn.Module:
    """`network` with the adapter in `folder`, which peft loads and adds to the layers."""
    from peft import PeftModel

    with quiet_libraries(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft uses a deprecated name of transformers
        return PeftModel.from_pretrained(network, str(folder)).get_base_model()


def _write(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> Path:
    """Write the tensors to `path` atomically."""
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    save_file(dict(tensors), partial, metadata=metadata)
    os.replace(partial, path)
    return path
