"""The files of a HunyuanImage-3 checkpoint: one folder, without model_index.json.

config.json              the configuration of the network, which contains that of the VAE
generation_config.json   the template of prompts, and the shift of the noise levels
model*.safetensors       the network, the VAE (`vae.`), and the encoder that reads images (`vision_`)
tokenizer.json, ...
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unirl.config.errors import NotFoundError
from unirl.models.hunyuan_image3.network import MoE
from unirl.models.loading.checkpoint import VAE, Config, ModelConfigs
from unirl.models.loading.estimate import ModelEstimate, parameters_of
from unirl.models.loading.hub import CONFIG, copy_files, read_json, single_folder
from unirl.models.loading.saved_weights import LANGUAGE_WEIGHTS, SafetensorsWeights
from unirl.models.unified.checkpoint import NETWORK, UnifiedFamily, write_weights

GENERATION_CONFIG = "generation_config.json"
EXAMPLE = "a folder with the files of tencent/HunyuanImage-3.0 or -Instruct"
SETTINGS = ("sequence_template", "drop_think")
"""Keys of the generation configuration that decide what the network reads."""
DISTILLED = ("cfg_distilled", "use_meanflow")
"""Keys of the distilled checkpoint, whose network has further inputs."""
DEFAULTS: Config = {"patch_size": 1, "patch_embed_hidden_dim": 1024, "image_base_size": 1024}
"""Values of the published configuration class for keys that the published files leave out."""
FIRST_VERSION = "HunyuanImage-3.0"
"""The value of `model_version` of the first checkpoint, which has fewer tokens for ratios than later ones."""
VISION = "vision_model"
PREFIXES = {NETWORK: "", VAE: "vae.", VISION: "vision_model."}
"""Prefix of the tensors of a component in the files."""


class HunyuanImage3Family(UnifiedFamily):
    """The family of HunyuanImage-3, whose checkpoints have a layout of their own."""

    def directory(self, path: str, revision: str | None, *, configs_only: bool = False) -> Path:
        """The folder of a local model, or of a downloaded copy of a hub id."""
        return single_folder(path, revision, CONFIG, EXAMPLE, configs_only)

    def read(self, root: Path) -> ModelConfigs:
        """The configurations in a folder. Raises NotFoundError (4001) for a model that this family cannot run."""
        config = {**DEFAULTS, **read_json(root / CONFIG)}
        if not {"vae", "moe_topk"} <= set(config):
            raise NotFoundError(
                f"{root}: its {CONFIG} has model_type={config.get('model_type')!r} and no image layers of "
                f"HunyuanImage-3. Give {EXAMPLE}"
            )
        wrong = [f"{key}=true" for key in DISTILLED if config.get(key)]
        if config["patch_size"] != 1:
            wrong.append(f"patch_size={config['patch_size']}")
        if wrong:
            raise NotFoundError(f"{root}: its {CONFIG} has {', '.join(wrong)}, which is not available. Give {EXAMPLE}")
        file = root / GENERATION_CONFIG
        generation = read_json(file) if file.is_file() else {}
        vae = config["vae"]
        network = {**config, "latent_channels": vae["latent_channels"]}
        settings: Config = {key: generation[key] for key in SETTINGS if key in generation}
        return ModelConfigs(
            components={NETWORK: network, VAE: vae},
            scheduler={"shift": generation.get("flow_shift", 3.0)},
            settings=settings,
        )

    def estimate(self, path: str, revision: str | None = None) -> ModelEstimate:
        """Counts all parameters. The layers are those that a token of an image runs, with the experts of one token."""
        estimate = super().estimate(path, revision)
        configs = self.configs(path, revision)
        with torch.device("meta"):
            network = self.build(configs, NETWORK)
        idle, unused, copies = 0, ["lm_head", "vision_aligner."], [0]
        for name, part in network.named_modules():
            if isinstance(part, MoE):
                left = range(part.gate.top_k, len(part.experts))
                idle += sum(parameters_of(part.experts[number]) for number in left)
                copies += [len(part.experts) * parameters_of(layer) for layer in part.experts[0].children()]
                unused += [f"{name}.experts.{number}." for number in left]
        linears = {name: shape for name, shape in estimate.linears.items() if not name.startswith(tuple(unused))}
        convolutions = {
            name: (part.in_channels * part.kernel_size[0] * part.kernel_size[1], part.out_channels)
            for name, part in network.named_modules()
            if isinstance(part, nn.Conv2d)
        }
        return replace(
            estimate,
            linears=linears,
            patches=convolutions,
            idle_parameters=idle,
            copied_parameters=sum(copies),
            copied_at_once=max(copies),
        )

    def weights(self, root: Path, component: str, dtype: torch.dtype) -> SafetensorsWeights:
        return SafetensorsWeights(root, lambda _: dtype, LANGUAGE_WEIGHTS, lambda name: name_in(component, name))

    def check(self, root: Path, component: str, module: nn.Module, saved: Mapping[str, tuple[int, ...]]) -> None:
        """See `DiffusersFamily.check`. The VAE ignores the tensors of the network, which are in the same files."""
        own = module.state_dict()
        known = saved if component == NETWORK else {name: shape for name, shape in saved.items() if name in own}
        super().check(root, component, module, known)

    def write(
        self, folder: Path, components: Mapping[str, nn.Module], configs: ModelConfigs, source: Path | None
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        tensors: dict[str, Tensor] = {}
        for component, module in components.items():
            tensors |= {f"{PREFIXES[component]}{name}": tensor for name, tensor in module.state_dict().items()}
        write_weights(folder / LANGUAGE_WEIGHTS, tensors, source)
        if source is None:
            own = {key: configs.components[part] for key, part in (("vae", VAE), ("vit", VISION)) if part in configs}
            _write_json(folder / CONFIG, {**configs.components[NETWORK], **own})
            shift = {"flow_shift": configs.scheduler["shift"]}
            _write_json(folder / GENERATION_CONFIG, {**configs.settings, **shift})
        else:
            copy_files(source, folder, (CONFIG, GENERATION_CONFIG))


def name_in(component: str, name: str) -> str:
    """The name of a tensor of the files in a component. Those of other components keep names that it does not have."""
    return name.removeprefix(PREFIXES[component])


def _write_json(path: Path, content: Mapping[str, Any] | Config) -> None:
    path.write_text(json.dumps(dict(content), indent=2) + "\n", encoding="utf-8")
