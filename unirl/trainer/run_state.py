"""The state of a run outside its weights: counters, everything `Stateful`, checkpoints, and the environment."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unirl import __version__
from unirl.config.errors import ResumeError
from unirl.tracking.tracker import Tracker
from unirl.train.backend.base import TrainBackend
from unirl.train.backend.checkpoint import Checkpoint, CheckpointStore
from unirl.trainer.resume import ResumePoint
from unirl.types.protocols import State, Stateful

STATE_FILE = "trainer.json"
"""The file of a checkpoint that holds this state."""


@dataclass(kw_only=True)
class RunState:
    """Everything outside the weights that changes between steps, and what it depends on."""

    stateful: Mapping[str, Stateful]
    """The objects that remember something between steps, by name. Nothing else may remember."""
    recipe: Mapping[str, Any]
    """The resolved recipe, every key."""
    environment: dict[str, str]
    """What decides bits outside the recipe: library versions, CPU capability, thread count."""
    checkpoints: CheckpointStore
    resume: ResumePoint
    """Where the run continues; known to fit the recipe."""
    resume_command: str
    """The command that continues this run."""
    write_config: Callable[[], None]
    """Writes the recipe into the run directory; called when the directory is known to be the run's own."""
    step: int = 0
    """Steps finished; the number of the step that runs next."""
    version: int = 0
    """Optimizer updates done."""
    published_version: int = 0
    """Weight version last pushed to the engine. Used only when `weight_sync_interval > 1`."""

    def save(self, backend: TrainBackend, tracker: Tracker) -> None:
        """Publish a checkpoint of this state and of the weights."""
        with self.checkpoints.stage(self.step) as folder:
            backend.save(str(folder / "policy"))
            text = json.dumps(self.state_dict(), indent=1, sort_keys=True, allow_nan=False)
            (folder / STATE_FILE).write_text(text)
        tracker.event("ckpt.commit", step=self.step)

    def restore(self, backend: TrainBackend, tracker: Tracker) -> None:
        """Continue after the last valid checkpoint, with the run's files cut back to it; or start at step 0."""
        for reason in self.resume.skipped:
            tracker.warn(reason)
        if self.resume.checkpoint is not None:
            self.load(self.resume.checkpoint, backend, tracker)
            self.checkpoints.discard_after(self.step)
        tracker.truncate(self.step if self.resume.checkpoint else -1)

    def load(self, checkpoint: Checkpoint, backend: TrainBackend, tracker: Tracker) -> None:
        """Take over a checkpoint's state and weights. Warns if it was written in another environment."""
        state = read_state(checkpoint.path)
        changed = self._changed_environment(state["environment"])
        if changed:
            tracker.warn(
                f"{checkpoint.path.name} was written in another environment ({', '.join(changed)}): the run continues, "
                "but its bits may differ from those of an unbroken run"
            )
        backend.load(str(checkpoint.path / "policy"))
        self.load_state_dict(state)

    def state_dict(self) -> State:
        """This state as JSON values."""
        return {
            "step": self.step,
            "version": self.version,
            "published_version": self.published_version,
            "stateful": {name: item.state_dict() for name, item in self.stateful.items()},
            "recipe": self.recipe,
            "environment": self.environment,
        }

    def load_state_dict(self, state: State) -> None:
        """The inverse of `state_dict`. The recipe and the environment stay those of this run."""
        saved = state["stateful"]
        if saved.keys() != self.stateful.keys():
            raise ResumeError(
                f"the checkpoint holds state of {sorted(saved)}, this recipe has {sorted(self.stateful)}: "
                "resume with the recipe that wrote it, or start anew with resume=none in another run.dir"
            )
        for name, item in self.stateful.items():
            item.load_state_dict(saved[name])
        self.step, self.version = state["step"], state["version"]
        self.published_version = state["published_version"]

    def _changed_environment(self, saved: Mapping[str, str]) -> list[str]:
        """`name before -> after` of everything in the environment that differs from when the checkpoint was saved."""
        names = sorted(saved.keys() | self.environment.keys())
        return [
            f"{name} {saved.get(name)} -> {self.environment.get(name)}"
            for name in names
            if saved.get(name) != self.environment.get(name)
        ]


def read_state(checkpoint: Path) -> Any:
    """The state in a checkpoint's folder, as `RunState.save` wrote it."""
    return json.loads((checkpoint / STATE_FILE).read_text())


def environment(train_ranks: int) -> dict[str, str]:
    """What decides bits outside the recipe, for comparison when a run is resumed."""
    return {
        "unirl": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "train_ranks": str(train_ranks),
    }
