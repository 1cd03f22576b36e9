"""Parameter counts and layer sizes of a model that is not loaded, measured on modules without storage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import nn

from unirl.types.facts import LanguageFacts, ModelFacts


@dataclass(frozen=True, kw_only=True)
class ModelEstimate:
    """Parameter counts and layer sizes of a model that is not loaded."""

    facts: ModelFacts
    parameters: Mapping[str, int]
    """Number of parameters by component."""
    linears: Mapping[str, tuple[int, int]]
    """(inputs, outputs) of every linear layer of the trained module, by name."""
    num_blocks: int
    width: int
    """Width of a token in the trained module."""
    cache_width: int = 0
    """Numbers that sampling caches per token (keys and values of all blocks). 0 for models without a cache."""

    def lora_parameters(self, rank: int, targets: Iterable[str] | None = None) -> int:
        """Number of parameters of adapters of `rank` on `targets` (name suffixes; None takes the model's own)."""
        suffixes = tuple(targets or self.facts.lora_targets)
        chosen = [
            shape for name, shape in self.linears.items() if any(name == s or name.endswith("." + s) for s in suffixes)
        ]
        return sum(rank * (inputs + outputs) for inputs, outputs in chosen)


def linears_of(module: nn.Module) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of every linear layer, by name."""
    layers = [(name, part) for name, part in module.named_modules() if isinstance(part, nn.Linear)]
    return {name: (layer.in_features, layer.out_features) for name, layer in layers}


def parameters_of(module: nn.Module) -> int:
    """Number of parameters. Tied ones count once."""
    return sum(parameter.numel() for parameter in module.parameters())


def language_estimate(facts: LanguageFacts, network: nn.Module) -> ModelEstimate:
    """The estimate of a causal language model on the meta device."""
    linears = linears_of(network)
    cached = [outputs for name, (_, outputs) in linears.items() if name.endswith((".k_proj", ".v_proj"))]
    return ModelEstimate(
        facts=facts,
        parameters={facts.trainable_attr: parameters_of(network)},
        linears=linears,
        num_blocks=sum(type(part).__name__ in facts.block_class_names for part in network.modules()),
        width=facts.hidden_size,
        cache_width=sum(cached),
    )
