"""The model of a fake server of latents: trajectories from a seed, weights by name, adapters, checksums."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unirl.models.denoising.diffusers_pipeline import DiffusersPipeline
from unirl.models.loading.lora import inject_lora
from unirl.rollout.engine.serving.payloads import bytes_of
from unirl.rollout.engine.sglang.families import FAMILIES, ServedFamily
from unirl.rollout.engine.sglang.messages import tensor_hash
from unirl.testing.conformance.served import ServedModel
from unirl.testing.conformance.token_model import adapter_parameter
from unirl.types.facts import LoraSpec
from unirl.types.sampling import DiffusionSamplingParams


@dataclass(frozen=True)
class SampledTrajectory:
    """One trajectory of T steps."""

    latents: Tensor  # [T + 1, *latent]
    sigmas: Tensor  # [T + 1]
    logp: Tensor  # [T] nats, mean over latent elements; 0 at deterministic steps
    pixels: Tensor  # [3, H, W] in [0, 1]


class LatentModel:
    """One network. It is not for several threads at once."""

    def __init__(self, pipeline: DiffusersPipeline[Any]) -> None:
        self.pipeline = pipeline
        self.network: Any = pipeline.bundle.trainable().eval().requires_grad_(False)
        self.has_adapters = False
        self.sign = 1.0
        """A factor of the velocity. -1 is another model."""

    @property
    def family(self) -> ServedFamily:
        """The family as SGLang serves it."""
        return FAMILIES[self.pipeline.facts.family]

    @torch.no_grad()
    def sample(self, prompt: str, params: DiffusionSamplingParams, seed: int | None) -> SampledTrajectory:
        """Sample one trajectory with pinned settings. The noise is drawn in the order of SGLang.

        Args:
            seed: None draws other noise each time.
        """
        facts, stage = self.pipeline.facts, self.pipeline.stage
        assert params.sigmas is not None and params.sde_indices is not None
        generator = torch.Generator()
        _ = generator.seed() if seed is None else generator.manual_seed(seed)
        shape = facts.latent_shape(params)
        conditions, guidance = self.pipeline.encode([prompt], params), facts.guidance_of(params)
        x = torch.randn((1, *shape), generator=generator)
        latents, logp = [x], []
        for i, (level, level_next) in enumerate(zip(params.sigmas, params.sigmas[1:], strict=False)):
            v = self.sign * stage.velocity(x, torch.tensor([level]), conditions, guidance)
            if i in params.sde_indices:
                noise = torch.randn((1, *self.family.packed_shape(shape)), generator=generator)
                step = params.kernel.transition(x, v, level, level_next)
                x = step.sample(self.family.unpacked(noise, shape))
                logp.append(step.log_prob(x))
            else:
                x = x + (level_next - level) * v
                logp.append(torch.zeros(1))
            latents.append(x)
        pixels = self.pipeline.decoder.decode(x)[0]
        return SampledTrajectory(torch.cat(latents), torch.tensor(params.sigmas), torch.cat(logp), pixels)

    # Weights

    def parameters(self) -> dict[str, Tensor]:
        """The parameters by name."""
        return dict(self.network.named_parameters())

    def store(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors into their parameters. An unknown name is ignored, as real servers do."""
        parameters = self.parameters()
        for name, tensor in tensors.items():
            if name in parameters:
                parameters[name].data.copy_(tensor)

    def load_adapter(self, tensors: Mapping[str, Tensor], rank: int, alpha: float) -> int:
        """Replace the adapter. Returns the number of its layers."""
        named = {adapter_parameter(name): tensor for name, tensor in tensors.items()}
        layers = sorted({name.partition(".lora_")[0] for name in tensors})
        if not self.has_adapters:
            inject_lora(self.network, LoraSpec(rank=rank, alpha=alpha, targets=tuple(layers)), seed=0)
            self.network.requires_grad_(False)
            self.has_adapters = True
        self.store(named)
        return len(layers)

    def checksum(self) -> str:
        """The SHA-256 of all parameters, with their names, in the order of the names."""
        digest = hashlib.sha256()
        for name, parameter in sorted(self.parameters().items()):
            digest.update(name.encode())
            digest.update(bytes_of(parameter.data))
        return digest.hexdigest()

    def unequal(self, hashes: Mapping[str, str]) -> tuple[list[str], list[str]]:
        """The names of `hashes` that are no parameters, and those of parameters with another hash."""
        parameters, _ = self.family.joined(self.parameters())
        missing = sorted(name for name in hashes if name not in parameters)
        present = [name for name in hashes if name in parameters]
        return missing, sorted(name for name in present if tensor_hash(parameters[name].data) != hashes[name])


def latent_model(model: ServedModel) -> LatentModel:
    """The network of a model of diffusers."""
    pipeline = model.load()
    assert isinstance(pipeline, DiffusersPipeline), f"{model.pipeline} is no pipeline of diffusers"
    return LatentModel(pipeline)
