"""Trained weights as files that other tools load, proven by loading them there and comparing with our sampler."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from unirl.config.build import build
from unirl.config.errors import CheckpointError, InvalidValueError
from unirl.distributed.group.dispatch import rank0
from unirl.models.loading.adapter_files import Adapter, write_peft_adapter
from unirl.train.backend.base import TrainBackend
from unirl.train.configs import LoraConfig
from unirl.trainer.saved_runs import SavedRun
from unirl.types.facts import ModelFacts
from unirl.types.sampling import Sampling

TOLERANCE = 1e-4
"""Largest difference that float32 arithmetic explains, in pixel or latent units, or nats of a token's log-prob."""


class ExportableBundle(Protocol):
    """A bundle as the exporter uses it."""

    path: str
    dtype: torch.dtype
    facts: ModelFacts

    def untrained(self) -> nn.Module:
        """The trained module with the checkpoint's own weights."""
        ...


class ExportablePipeline(Protocol):
    """A pipeline as the exporter uses it."""

    bundle: ExportableBundle
    lora_formats: ClassVar[tuple[str, ...]]
    """Adapter formats. `write_lora` writes the first one, and `verify_lora` loads it."""

    def write_model(self, tensors: Mapping[str, Tensor], folder: Path) -> Path:
        """The whole model with these parameters, in the layout of its home library."""
        ...

    def write_lora(self, folder: Path, adapter: Adapter) -> Path:
        """The adapter in the first of `lora_formats`."""
        ...

    def verify_lora(self, folder: Path, texts: Sequence[str], params: Any) -> float:
        """Max abs difference between our sampler and the home library with the adapter in `folder`."""
        ...

    def verify_model(self, folder: Path, texts: Sequence[str], params: Any) -> float:
        """Max abs difference between our sampler and the home library with the whole model in `folder`."""
        ...


@dataclass(frozen=True)
class ExportedFile:
    """One export of a checkpoint."""

    format: str
    path: Path
    difference: float | None
    """Largest difference between our sampler and the home library with the file; None where that has no loader."""


def export_checkpoint(
    saved: SavedRun,
    texts: Sequence[str],
    formats: Sequence[str] | None = None,
    weights: str = "live",
    folder: Path | None = None,
) -> list[ExportedFile]:
    """Write the weights of a checkpoint in each of `formats`, and verify each file in its home library.

    Args:
        texts: the prompts on which both sides are compared.
        formats: None writes the usual ones: adapters in all formats that the model has, or the whole model.
        weights: `live`, or the name of a snapshot.
        folder: None writes into the run's `export/<checkpoint>`.
    """
    exporter = build_exporter(saved)
    checkpoint = saved.checkpoint.path
    folder = checkpoint.parent.parent / "export" / checkpoint.name if folder is None else folder
    sampling = build(saved.recipe.config.sampling)
    files = []
    for name in formats or exporter.usual_formats:
        path = exporter.write(str(folder / name), name, weights)
        files.append(ExportedFile(name, path, exporter.verify(str(folder / name), name, texts, sampling, weights)))
    return files


def build_exporter(saved: SavedRun) -> Exporter:
    """The model with the checkpoint's weights, without a rollout engine, rewards or data."""
    config = saved.recipe.config
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bundle = build(config.bundle, device=device)
    pipeline = build(config.pipeline, device=device, bundle=bundle)
    backend = build(config.backend, device=device, bundle=bundle, seed=config.seed, run_updates=1)
    backend.load_policy(str(saved.checkpoint.path / "policy"))
    return Exporter(pipeline, backend, None if config.lora is None else build(config.lora))


class Exporter:
    """The role that writes and verifies, beside the weights."""

    def __init__(self, pipeline: ExportablePipeline, backend: TrainBackend, lora: LoraConfig | None) -> None:
        self.pipeline = pipeline
        self.backend = backend
        self.lora = lora
        writers: dict[str, Callable[[Path, Mapping[str, Tensor]], Path]] = {
            "peft": lambda folder, tensors: write_peft_adapter(
                folder, self._adapter(tensors), self.pipeline.bundle.path
            ),
            pipeline.lora_formats[0]: lambda folder, tensors: self.pipeline.write_lora(folder, self._adapter(tensors)),
            "full": self._write_full,
        }
        self.writers = {name: writers[name] for name in (*pipeline.lora_formats, "full")}
        """By format: those that the model's home library has."""

    @property
    def usual_formats(self) -> tuple[str, ...]:
        """The formats of what was trained: adapters in all that there are, or the whole model."""
        return self.pipeline.lora_formats if self.lora else ("full",)

    @rank0
    def write(self, folder: str, format: str, weights: str = "live") -> Path:
        """The weights `live` or of a snapshot, in `format`; gives back what was written."""
        if format not in self.writers:
            raise InvalidValueError(
                f"no export format {format!r} for a model of {type(self.pipeline).__name__}: choose one of "
                f"{', '.join(self.writers)}"
            )
        return self.writers[format](Path(folder), self.backend.gather(weights))

    @rank0
    def verify(
        self,
        folder: str,
        format: str,
        texts: Sequence[str],
        params: Sampling,
        weights: str = "live",
    ) -> float | None:
        """Largest difference between our sampler and the home library with the file; None where that has no loader.

        Raises CheckpointError (7001) when float32 arithmetic cannot explain the difference.
        """
        checks = {self.pipeline.lora_formats[0]: self.pipeline.verify_lora, "full": self.pipeline.verify_model}
        if format not in checks:
            return None
        check = checks[format]
        with torch.no_grad(), nullcontext() if weights == "live" else self.backend.weights(weights):
            difference = check(Path(folder), texts, params)
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
