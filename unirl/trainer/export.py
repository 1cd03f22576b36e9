"""Trained weights as files that other tools load, proven by loading them there and comparing with our sampler."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from unirl.config.build import build
from unirl.config.errors import CheckpointError, InvalidValueError
from unirl.models.loading.adapter_files import Adapter, write_peft_adapter
from unirl.models.loading.base_model import BaseModel
from unirl.plan.threads import in_use, threads_of
from unirl.train.backend.base import TrainBackend
from unirl.train.backend.checkpoint import still_there
from unirl.train.configs import LoraConfig
from unirl.trainer.model_card import write_card
from unirl.trainer.run_folder import SavedRun, check_folder, check_weights
from unirl.types.device import accelerator
from unirl.types.facts import ModelFacts
from unirl.types.sampling import Sampling


class ExportableBundle(Protocol):
    """A bundle that can load the weights of its checkpoint once more."""

    path: str
    dtype: torch.dtype

    @property
    def facts(self) -> ModelFacts: ...

    def untrained(self) -> nn.Module:
        """A second copy of the trained module, with the weights of the checkpoint."""


class ExportablePipeline(Protocol):
    """A pipeline that writes trained weights as files, and verifies them with what loads such files.

    Nobody calls `write_lora` and `verify_lora` without `lora_formats`. `params` are the sampling settings of its
    domain. A difference is in pixels, latents or nats.
    """

    lora_formats: ClassVar[tuple[str, ...]]

    @property
    def bundle(self) -> ExportableBundle: ...

    @property
    def base_model(self) -> BaseModel:
        """The model before training, as its home library loads it."""

    def write_model(self, tensors: Mapping[str, Tensor], folder: Path) -> Path:
        """Write the whole model with `tensors` in place of its own."""

    def write_lora(self, folder: Path, adapter: Adapter) -> Path:
        """Write an adapter in the first of `lora_formats`."""

    def verify_model(self, folder: Path, texts: Sequence[str], params: Any) -> float:
        """Largest difference between the trained model and the one in `folder`."""

    def verify_lora(self, folder: Path, texts: Sequence[str], params: Any) -> float:
        """Largest difference between the trained model and the untrained one with the adapter in `folder`."""


EXPORTS = ("diffusers-lora", "peft", "full")
"""The formats, each of which is written into a folder of its name. Language models do not have `diffusers-lora`."""
TOLERANCE = 1e-4
"""Largest difference that float32 arithmetic explains, in pixel or latent units, or nats of a token's log-prob."""


@dataclass(frozen=True)
class ExportedFile:
    """One export of a checkpoint."""

    format: str
    path: Path
    difference: float | None
    """Largest difference between our sampler and the home library with the file; None where that has no loader."""
    policy: str = ""
    """The policy, in a run of several."""


def export_checkpoint(
    saved: SavedRun,
    texts: Sequence[str],
    formats: Sequence[str] | None = None,
    weights: str = "live",
    folder: Path | None = None,
) -> list[ExportedFile]:
    """Write the weights of a checkpoint in each of `formats`, each verified in its home library and with a model card.

    Args:
        texts: the prompts on which both sides are compared.
        formats: None writes the usual ones: adapters in all formats that the model has, or the whole model.
        weights: `live`, or the name of a snapshot. Policies that were not trained are left out.
        folder: None writes into the run's `export/<checkpoint>`. Any other folder must not hold an export already.

    Raises:
        ConfigError: 2004 for a folder that cannot be used, 2020 for weights that the run does not keep.
        CheckpointError: 7001 for a file that its home library reads as another model, 7003 for a full disk.
    """
    check_weights(saved, weights)
    checkpoint = saved.checkpoint.path
    own = checkpoint.parent.parent / "export" / checkpoint.name
    check_folder(own if folder is None else folder)
    trained, weights_of = set(saved.recipe.trained), saved.recipe.weights
    policies = [policy for policy in saved.policies() if trained & set(weights_of[policy.policy])]
    if folder is not None:
        refuse_replacing([folder / policy.policy for policy in policies])
    folder = own if folder is None else folder
    with in_use(threads_of(saved.recipe.config)):
        files = [file for policy in policies for file in _export_policy(policy, texts, formats, weights, folder)]
    if not files:
        names = " and ".join(policy.pipeline.class_name for policy in saved.recipe.policies.values())
        raise InvalidValueError(f"no model of {names} has the format {' or '.join(formats or ())}")
    return files


def _export_policy(
    saved: SavedRun, texts: Sequence[str], formats: Sequence[str] | None, weights: str, folder: Path
) -> Iterator[ExportedFile]:
    """Write one policy. In a run of several, each has a folder of its own, and the formats that its model has."""
    exporter = build_exporter(saved)
    sampling = build(saved.recipe.config.sampling)
    for name in formats or exporter.usual_formats:
        if saved.policy and name not in exporter.writers:
            continue
        place = folder / saved.policy / name
        with removed_if_unfinished(place):
            path = exporter.write(place, name, weights)
        difference = exporter.verify(place, name, texts, sampling, weights)
        write_card(place, saved, name, difference, exporter.pipeline.base_model, weights)
        yield ExportedFile(f"{saved.policy} {name}".lstrip(), path, difference, saved.policy)


def refuse_replacing(folders: Sequence[Path]) -> None:
    """Refuses folders that hold an export already, which may be that of another run."""
    for folder in folders:
        taken = [name for name in EXPORTS if (folder / name).exists()]
        if not taken:
            continue
        raise InvalidValueError(
            f"--out {folder} already holds an export ({', '.join(taken)}), which is not replaced. Choose another "
            "folder, or remove it"
        )


@contextmanager
def removed_if_unfinished(folder: Path) -> Iterator[None]:
    """Within the block a folder is written. If that fails, what is new there is removed."""
    is_new = not folder.exists()
    parents = [parent for parent in folder.absolute().parents if not parent.exists()]
    try:
        yield
    except BaseException:
        if is_new:
            shutil.rmtree(parents[-1] if parents else folder, ignore_errors=True)
        raise


def build_exporter(saved: SavedRun) -> Exporter:
    """The model with the checkpoint's weights, without a rollout engine, rewards or data."""
    config = saved.recipe.config
    device = accelerator()
    bundle = build(config.bundle, device=device, seed=config.seed)
    pipeline = build(config.pipeline, device=device, bundle=bundle)
    backend = build(config.backend, device=device, bundle=bundle, seed=config.seed, run_updates=1)
    with still_there(saved.checkpoint):
        backend.load_policy(str(saved.weights_folder))
    return Exporter(pipeline, backend, None if config.lora is None else build(config.lora))


@dataclass(frozen=True)
class Exporter:
    """Writes the weights of a model, and verifies what was written."""

    pipeline: ExportablePipeline
    backend: TrainBackend
    lora: LoraConfig | None

    @property
    def writers(self) -> dict[str, Callable[[Path, Mapping[str, Tensor]], Path]]:
        """By format: those that the model's home library has."""
        pipeline = self.pipeline
        writers: dict[str, Callable[[Path, Mapping[str, Tensor]], Path]] = {
            "peft": lambda folder, tensors: write_peft_adapter(folder, self._adapter(tensors), pipeline.bundle.path),
            "full": self._write_full,
        }
        for name in pipeline.lora_formats[:1]:
            writers[name] = lambda folder, tensors: pipeline.write_lora(folder, self._adapter(tensors))
        return {name: writers[name] for name in (*pipeline.lora_formats, "full")}

    @property
    def usual_formats(self) -> tuple[str, ...]:
        """The formats of what was trained: adapters in all that there are, or the whole model if there are none."""
        return (self.pipeline.lora_formats if self.lora else ()) or ("full",)

    def write(self, folder: Path, format: str, weights: str = "live") -> Path:
        """The weights `live` or of a snapshot, in `format`; gives back what was written."""
        if format not in self.writers:
            raise InvalidValueError(
                f"no export format {format!r} for a model of {type(self.pipeline).__name__}: choose one of "
                f"{', '.join(self.writers)}"
            )
        return self.writers[format](folder, self.backend.gather(weights))

    def verify(
        self, folder: Path, format: str, texts: Sequence[str], params: Sampling, weights: str = "live"
    ) -> float | None:
        """Largest difference between our sampler and the home library with the file; None where that has no loader.

        Raises CheckpointError (7001) when float32 arithmetic cannot explain the difference.
        """
        check: Callable[..., float]
        if format == "full":
            check = self.pipeline.verify_model
        elif format in self.pipeline.lora_formats[:1]:
            check = self.pipeline.verify_lora
        else:
            return None
        with torch.no_grad(), nullcontext() if weights == "live" else self.backend.weights(weights):
            difference = check(folder, texts, params)
        if self.pipeline.bundle.dtype == torch.float32 and not difference <= TOLERANCE:
            raise CheckpointError(
                f"{folder} was written, but what it makes differs from our sampler by {difference:.2g} "
                f"(at most {TOLERANCE:g} is arithmetic): do not use the file, and report it"
            )
        return difference

    def _adapter(self, tensors: Mapping[str, Tensor]) -> Adapter:
        if self.lora is None:
            raise InvalidValueError("this run trained all weights, not adapters: export with format full")
        named = self.lora.target_modules
        targets = self.pipeline.bundle.facts.lora_targets if named == "model" else named
        return Adapter.from_named(tensors, rank=self.lora.rank, alpha=self.lora.alpha, target_modules=tuple(targets))

    def _write_full(self, folder: Path, tensors: Mapping[str, Tensor]) -> Path:
        """The whole model; adapters are added to the weights that they adapt."""
        if self.lora is not None:
            tensors = self._adapter(tensors).merged_into(self.pipeline.bundle.untrained().state_dict())
        return self.pipeline.write_model(tensors, folder)
