"""The server of an engine of latents: its requests, its answers, and checks of settings that need no server."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from unirl.config.errors import IncompatibleError
from unirl.distributed.weight_sync.base import WeightLayout
from unirl.models.denoising.diffusers_pipeline import DiffusersPipeline
from unirl.rollout.engine.serving.http_server import HttpServer
from unirl.rollout.engine.serving.payloads import ADAPTER_TENSOR
from unirl.rollout.engine.serving.settings import InstalledServerSettings
from unirl.rollout.engine.serving.sigma_verify import UsedSettings
from unirl.sde.kernels import CPSSDEStrategy
from unirl.types.facts import LatentFacts, ModelFacts
from unirl.types.protocols import Kernel
from unirl.types.sampling import DiffusionSamplingParams

FamilyT = TypeVar("FamilyT", bound="LatentFamily")


@dataclass(frozen=True)
class LatentRequest:
    """One trajectory to be sampled."""

    id: str
    prompt: str
    seed: int
    """The seed of its random numbers, in [0, 2^31)."""


@dataclass(frozen=True)
class LatentAnswer:
    """One sampled trajectory, as the server reports it."""

    used: UsedSettings
    latents: Tensor  # [K, *latent] at the positions that were asked for, in their order
    logp: Tensor | None  # [S] log-probs of the stochastic steps, nats, mean over latent elements; None: not reported
    weights: str | None
    """The name of the weights that it was sampled from. None: answers do not have it; see `current_weights`."""


@dataclass(frozen=True, kw_only=True)
class LatentFamily:
    """A model family at a server."""

    sequence_length: int | None = None
    """The number of text tokens that the server always encodes. None: that of the request."""
    blank: str = ""
    """The text that it gets in place of an empty prompt."""
    token_side: int | None = None
    """Its latents are tokens [H W / p^2, C p^2] with this p. None: they are [C, H, W], or [C, F, H, W]."""


class LatentServer(HttpServer):
    """A server that samples latents."""

    families: ClassVar[Mapping[str, LatentFamily]]
    """The families that it samples, by `ModelFacts.family`."""
    pipeline: DiffusersPipeline[Any]
    settings: InstalledServerSettings

    def __init__(
        self, pipeline: DiffusersPipeline[Any], folder: Path, log: Path, settings: InstalledServerSettings
    ) -> None:
        super().__init__(pipeline, folder, log, settings)
        self.concurrency = settings.concurrency
        family = served_family(self.name, self.families, pipeline.facts.family)
        self.sequence_length = None if settings.is_fake else family.sequence_length
        """The number of text tokens that it always encodes. None: that of the request."""
        self.layout: WeightLayout | None = None
        self.root = folder
        self.wire: Mapping[str, str] = {}
        """Tensor of the layout to its name in requests."""

    def prepare(self, layout: WeightLayout) -> None:
        self.root = model_folder(self.pipeline, self.folder / "base")
        self.layout = layout
        self.wire = wire_names(layout)

    @abstractmethod
    def served(self, facts: LatentFacts) -> LatentFacts:
        """The facts of a model as the server samples it: with its own schedule, if it takes no noise levels."""

    @classmethod
    @abstractmethod
    def check_kernel(cls, kernel: Kernel) -> None:
        """Raises IncompatibleError for a kernel that the server does not have."""

    @classmethod
    def check_levels(cls, params: DiffusionSamplingParams) -> None:
        """Raises IncompatibleError, naming the key, for noise levels of a recipe that the server does not take."""

    @abstractmethod
    def sample(self, request: LatentRequest, params: DiffusionSamplingParams, positions: Sequence[int]) -> LatentAnswer:
        """Sample one trajectory, in one attempt, and return its latents at `positions`.

        Args:
            params: pinned. Its sigmas are those that the server is expected to use.

        Raises:
            RequestFailed, ServerBusy: another attempt may succeed.
            EngineError: the server refuses the request, or its answer cannot be read.
        """

    @abstractmethod
    def draws(self, seed: int, shape: Sequence[int], count: int) -> Tensor:
        """[count, *shape] fp32 on the CPU: the noise of a seed, first x_T, then that of each stochastic step."""

    @abstractmethod
    def current_weights(self) -> str:
        """The name of the weights that the server has now. Another text if it has other ones."""


def served_family(name: str, families: Mapping[str, FamilyT], family: str) -> FamilyT:
    """The family at a server. Raises IncompatibleError if the engine does not sample it.

    Args:
        name: the name of the server in messages.
    """
    if family not in families:
        raise IncompatibleError(
            f"the engine for {name} has no family {family}: it knows {', '.join(families)}. Use rollout=replica"
        )
    return families[family]


def check_density(name: str, kernel: Kernel) -> None:
    """Raises IncompatibleError for a kernel whose log-probs are not those of its density, which servers compute."""
    if isinstance(kernel, CPSSDEStrategy) and kernel.log_prob_form != "gaussian":
        raise IncompatibleError(
            f"sampling.kernel.log_prob_form={kernel.log_prob_form}: log-probs of {name} are those of the density. Set "
            "log_prob_form=gaussian"
        )


def check_noise(name: str, params: DiffusionSamplingParams) -> None:
    """Raises IncompatibleError, naming the key, for settings that no server has whose seeds determine all noise."""
    if params.init_same_noise:
        raise IncompatibleError(
            f"sampling.init_same_noise=true: a seed of {name} determines the noise of all steps, so that samples "
            "with the same x_T would be equal. Set sampling.init_same_noise=false"
        )
    if params.solver is not None or params.cache_threshold is not None:
        key = "solver" if params.solver is not None else "cache_threshold"
        raise IncompatibleError(f"sampling.{key}: {name} takes Euler steps, and computes all of them. Remove it")


def check_images(name: str, facts: ModelFacts) -> None:
    """Raises IncompatibleError for a model that needs condition images, which are not sent to servers."""
    if facts.condition_images[0] > 0:
        raise IncompatibleError(
            f"{name} gets prompts without images here, and this model ({facts.family}) needs them. Use another engine: "
            "rollout=replica"
        )


def check_length(name: str, params: DiffusionSamplingParams, length: int | None) -> None:
    """Raises IncompatibleError if a server that always encodes `length` text tokens is to encode another number."""
    if length is not None and params.max_sequence_length != length:
        raise IncompatibleError(
            f"sampling.max_sequence_length={params.max_sequence_length}: {name} always encodes {length} tokens of "
            f"this model. Set sampling.max_sequence_length={length}"
        )


def model_folder(pipeline: DiffusersPipeline[Any], folder: Path) -> Path:
    """The folder of the pipeline's checkpoint. A tiny model, which has none, is written to `folder`."""
    bundle = pipeline.bundle
    if bundle.root is not None:
        return bundle.root
    if not folder.exists():
        bundle.offload(bundle.frozen)
        pipeline.write_model({}, folder)
        bundle.onload(bundle.frozen)
    return folder


def wire_names(layout: WeightLayout) -> dict[str, str]:
    """Tensor of a layout to its name in requests: that of diffusers, and for adapters `LAYER.lora_A.weight`."""
    wire: dict[str, str] = {}
    for name in layout.tensors:
        match = ADAPTER_TENSOR.fullmatch(name) if layout.payload == "adapter" else None
        wire[name] = name if match is None else f"{match['layer']}.{match['side']}.weight"
    return wire
