"""UniRL from Python: a recipe as an object that is checked, planned, trained and exported.

    import unirl

    run = unirl.Run("diffusion/sd3_trainside", scale="toy", num_rollouts=3)
    print(run.plan())
    result = run.train()
    result.metrics[-1]["rollout/reward_mean"]
    run.export()

The command line does the same: `unirl train diffusion/sd3_trainside scale=toy num_rollouts=3`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unirl.cli.plan import plan_text
from unirl.config.errors import UsageError
from unirl.config.failures import Session
from unirl.config.load import Recipe, load
from unirl.plan.preflight import preflight
from unirl.tracking.record import RunRecord
from unirl.tracking.tables import read_rows
from unirl.trainer.assemble import build_trainer
from unirl.trainer.export import ExportedFile, export_checkpoint
from unirl.trainer.run_folder import saved_run

EXPORT_PROMPTS = ("a red circle", "a blue square")
"""The prompts on which an exported file is compared with our sampler."""

PLAIN_WORD = re.compile(r"[A-Za-z_/.][\w/.-]*")
"""Text that needs no quotes in a setting."""


@dataclass(frozen=True)
class TrainingResult:
    """The files of a finished run, read back."""

    directory: Path

    @property
    def metrics(self) -> list[dict[str, float]]:
        """The metrics of every step, in order. docs/metrics.md explains each name."""
        return list(read_rows(self.directory / "metrics.jsonl"))

    @property
    def evaluations(self) -> list[dict[str, float]]:
        """The metrics of every evaluation, in order, with the number of finished steps as `step`."""
        return [{**row, "step": int(row["step"])} for row in RunRecord(self.directory).evaluations]

    @property
    def samples(self) -> list[dict[str, Any]]:
        """The samples that `tracking.sample_steps` saved: prompt, rewards, advantage, and the path of the `file`."""
        manifests = sorted(self.directory.glob("samples/step-*/manifest.jsonl"))
        return [
            row | {"file": manifest.parent / row["file"]}
            for manifest in manifests
            for row in map(json.loads, manifest.read_text().splitlines())
        ]


class Run:
    """One recipe with its settings.

    The recipe is checked when the object is made, without loading a model.
    """

    def __init__(self, recipe: str | Path, *overrides: str, **settings: Any) -> None:
        """
        Args:
            recipe: a name of `unirl recipes`, or a YAML file.
            overrides: settings as on the command line, `"stack.micro_batch_size=4"`.
            settings: settings by name. Keys with dots are passed as `**{"sampling.seed": 1}`.

        Raises:
            UniRLError: the recipe breaks a rule. The message names the key, its value, the rule and the way out.
        """
        self.settings = (*overrides, *(f"{key}={spell(value)}" for key, value in settings.items()))
        self.recipe: Recipe = load(str(recipe), self.settings)
        self.notices: tuple[str, ...] = preflight(self.recipe).notices
        """Settings without effect and values from the environment."""
        self.directory: Path | None = None
        """The run directory, once the run has been trained."""

    def plan(self) -> str:
        """Geometry, placement, parameters, memory and time of the run, as text. No model is loaded."""
        return plan_text(self.recipe)

    def train(self) -> TrainingResult:
        """Train to the last step. A run directory that holds checkpoints of this recipe is continued."""
        session = Session(argv=("train", self.recipe.file.name, *self.settings))
        with build_trainer(self.recipe, session) as trainer:
            trainer.train()
        assert session.run_dir is not None
        self.directory = session.run_dir
        return TrainingResult(session.run_dir)

    def export(
        self, formats: Sequence[str] | None = None, weights: str = "live", folder: str | Path | None = None
    ) -> list[ExportedFile]:
        """Write the trained weights for other libraries, and verify each file there.

        Args:
            formats: such as `diffusers-lora`, `peft` or `full`; None writes the usual ones.
            weights: `live`, or the name of a snapshot such as `ema`.
            folder: None writes into the run directory.
        """
        if self.directory is None:
            raise UsageError("this run has no weights to export yet: call train() first")
        saved = saved_run(str(self.directory))
        return export_checkpoint(saved, EXPORT_PROMPTS, formats, weights, None if folder is None else Path(folder))


def spell(value: Any) -> str:
    """A Python value in the grammar of command-line settings: None is null, text is quoted."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {spell(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(spell(item) for item in value) + "]"
    if isinstance(value, (str, Path)):
        if PLAIN_WORD.fullmatch(str(value)) and str(value).lower() not in ("null", "true", "false"):
            return str(value)
        return "'" + str(value).replace("\\", "\\\\").replace("'", "\\'") + "'"
    return json.dumps(value)
