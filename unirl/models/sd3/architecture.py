"""What a Stable Diffusion 3 checkpoint is made of, known from its configuration files alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unirl.config.errors import DataError
from unirl.models.estimate import ModelEstimate, linears_of, parameters_of
from unirl.models.hub import NOT_FOUND, components, model_directory, read_json
from unirl.models.sd3.published import PUBLISHED
from unirl.models.sd3.toy import TOY
from unirl.sde.schedule import SigmaSchedule
from unirl.types.facts import LatentFacts

if TYPE_CHECKING:
    from torch import nn

Config = Mapping[str, Any]

SHIPPED = {name: Path(__file__).parent / name for name in ("quickstart", "quickstart_letters")}
"""Directories of the small models that are shipped, by the path that names them."""
ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")
LORA_TARGETS = tuple(
    f"attn.{name}"
    for name in ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
)


@dataclass(frozen=True)
class Architecture:
    """The configurations of a checkpoint's components."""

    transformer: Config
    scheduler: Config
    vae: Config | None
    """Absent = the transformer works on pixels in [-1, 1]."""
    encoders: Mapping[str, Config]
    """By component name, in order."""

    @staticmethod
    def of(path: str, revision: str | None = None) -> Architecture:
        """The architecture of `toy`, a shipped model, a directory or a hub id, without reading weights.

        A hub id whose configuration is built in needs no connection.
        """
        if path == "toy":
            return Architecture(**TOY)
        if path in PUBLISHED and revision is None:
            return Architecture(**PUBLISHED[path])
        return Architecture.read(directory_of(path, revision, configs_only=True))

    @staticmethod
    def read(root: Path) -> Architecture:
        """The architecture of a model directory."""
        present = components(root)
        if present.get("transformer", ("", ""))[1] != "SD3Transformer2DModel":
            raise DataError(
                f"{root}: its transformer is {present.get('transformer', ('', 'absent'))[1]}, but SD3Bundle reads "
                "SD3Transformer2DModel. Use the bundle of that family, or another path",
                code=NOT_FOUND,
            )
        return Architecture(
            transformer=read_json(root / "transformer" / "config.json"),
            scheduler=read_json(root / "scheduler" / "scheduler_config.json"),
            vae=read_json(root / "vae" / "config.json") if "vae" in present else None,
            encoders={name: read_json(root / name / "config.json") for name in ENCODERS if name in present},
        )

    @property
    def vae_scale(self) -> int:
        """Pixels per latent element along a side."""
        return 1 if self.vae is None else 2 ** (len(self.vae["block_out_channels"]) - 1)

    def facts(self, batch_multiple: int) -> LatentFacts:
        """What the rest of the system needs to know."""
        return LatentFacts(
            family="sd3",
            trainable_attr="transformer",
            block_class_names=("JointTransformerBlock",),
            lora_targets=LORA_TARGETS,
            latent_channels=self.transformer["in_channels"],
            vae_scale=self.vae_scale,
            patch_size=self.transformer["patch_size"],
            schedule=SigmaSchedule.from_diffusers(self.scheduler),
            timestep_scale=1000.0,
            batch_multiple=batch_multiple,
            text_width=self.transformer["pooled_projection_dim"],
        )

    def build(self, component: str) -> nn.Module:
        """A module of this architecture with fresh weights (on the meta device: with none)."""
        import diffusers
        import transformers

        if component == "transformer":
            return diffusers.SD3Transformer2DModel(**_public(self.transformer))
        if component == "vae":
            assert self.vae is not None
            return diffusers.AutoencoderKL(**_public(self.vae))
        if component == "text_encoder_3":
            return transformers.T5EncoderModel(transformers.T5Config(**self.encoders[component]))
        config = transformers.CLIPTextConfig(**self.encoders[component])
        return transformers.CLIPTextModelWithProjection(config)

    def build_empty(self, component: str) -> nn.Module:
        """A module of this architecture whose parameters have no storage; its computed buffers have theirs."""
        from accelerate import init_empty_weights

        with init_empty_weights(include_buffers=False):
            return self.build(component)

    @property
    def component_names(self) -> tuple[str, ...]:
        """Components with weights."""
        return ("transformer", *self.encoders, *(() if self.vae is None else ("vae",)))


def directory_of(path: str, revision: str | None, *, configs_only: bool = False) -> Path:
    """The directory behind `path`: a shipped one, or what the user has or fetches."""
    return model_directory(str(SHIPPED.get(path, path)), revision, configs_only=configs_only)


def _public(config: Config) -> dict[str, Any]:
    return {name: value for name, value in config.items() if not name.startswith("_")}


def estimate(architecture: Architecture) -> ModelEstimate:
    """Parameter counts by component, from modules that are built without storage."""
    import torch

    with torch.device("meta"):
        modules = {name: architecture.build(name) for name in architecture.component_names}
    config = architecture.transformer
    return ModelEstimate(
        facts=architecture.facts(batch_multiple=1),
        parameters={name: parameters_of(module) for name, module in modules.items()},
        linears=linears_of(modules["transformer"]),
        num_blocks=config["num_layers"],
        width=config["num_attention_heads"] * config["attention_head_dim"],
    )
