"""The state of a run outside its weights: counters, everything `Stateful`, checkpoints, and the environment."""

from __future__ import annotations

import json
import platform
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from unirl import __version__
from unirl.config.errors import DivergenceError, Interrupted, Preempted, ResumeError, UniRLError
from unirl.config.merge import Tree
from unirl.plan.threads import Recorded
from unirl.train.backend.base import TrainBackend
from unirl.train.backend.checkpoint import Checkpoint, CheckpointStore, ResumePoint, checkpoint_name, still_there
from unirl.train.backend.health import STATE_FILE, listed
from unirl.train.backend.remote import RemoteCheckpoints
from unirl.train.backend.signing import is_signed
from unirl.trainer.saving import BackgroundSave
from unirl.types.device import accelerator, device_name
from unirl.types.protocols import State, Stateful
from unirl.types.secrets import without_values

if TYPE_CHECKING:
    from unirl.tracking.tracker import Tracker


class Policy(Protocol):
    """A policy as a checkpoint saves it: its weights, and how many updates they have had."""

    version: int

    @property
    def track(self) -> str:
        """The track by which phases call the policy."""

    @property
    def backend(self) -> TrainBackend:
        """Keeps the weights and the optimizer."""


@dataclass(kw_only=True)
class RunState:
    """Everything that changes between steps, and what it depends on. The backends keep the weights."""

    policies: Mapping[str, Policy]
    """By name; the only policy of a run has the name ""."""
    tracker: Tracker
    stateful: Mapping[str, Stateful]
    """The objects that remember something between steps, by name. Nothing else may remember."""
    recipe: Tree
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
    saves_in_background: bool = False
    """Write and publish checkpoints while the run goes on (checkpoint.asynchronous)."""
    saving: BackgroundSave | None = None
    """The save that is under way."""
    copies: RemoteCheckpoints | None = None
    """Where published checkpoints are copied (checkpoint.copy_to)."""
    uncopied: UniRLError | None = None
    """The error of the last copy, if it failed. Training goes on; the run ends with it unless a later copy works."""
    step: int = 0
    """Steps finished; the number of the step that runs next."""
    chosen: dict[str, Any] = field(default_factory=dict)
    """What the run chose for the settings that its recipe leaves open, by key. None: not chosen yet."""

    def remembered(self) -> dict[str, State]:
        """A copy of what the objects remember now, by name."""
        return {name: deepcopy(item.state_dict()) for name, item in self.stateful.items()}

    def save(
        self, remembered: Mapping[str, State] | None = None, turn: Callable[[str], None] = lambda track: None
    ) -> None:
        """Save a checkpoint of this state and of the weights: publish it, or start to, if that is done in background.

        Args:
            remembered: what the objects remembered after the last step, if they have moved on since.
            turn: called with the track of each policy before its weights are saved, so that policies on the same
                devices can take turns.
        """
        self.finish_saving()
        with ExitStack() as staged:
            folder = staged.enter_context(self.checkpoints.stage(self.step))
            folders = {name: policy_folder(folder, name) for name in self.policies}
            for name, policy in self.policies.items():
                turn(policy.track)
                self._check_finite(name, policy.backend)
                policy.backend.save(str(folders[name]), self.saves_in_background)
            state = {
                "step": self.step,
                "versions": {name: policy.version for name, policy in self.policies.items()},
                "chosen": self.chosen,
                "stateful": self.remembered() if remembered is None else dict(remembered),
                "recipe": self.recipe,
                "environment": self.environment,
            }
            text = json.dumps(state, indent=1, sort_keys=True, allow_nan=False)
            (folder / STATE_FILE).write_text(without_values(text))
            if self.saves_in_background:
                backends = [policy.backend for policy in self.policies.values()]
                copy = partial(self._copy, self.step)
                self.saving = BackgroundSave(
                    self.step, staged.pop_all(), list(folders.values()), backends, copy
                ).start()
                return
        self._note_published(self.step, self._copy(self.step))

    def _copy(self, step: int) -> UniRLError | None:
        """Copy a published checkpoint. Returns the error if that failed."""
        if self.copies is not None:
            try:
                self.checkpoints.check_writer()
                self.copies.copy(self.checkpoints.directory / checkpoint_name(step))
            except UniRLError as error:
                return error
        return None

    def _check_finite(self, policy: str, backend: TrainBackend) -> None:
        """Refuse to publish weights, moments or snapshots with NaN or infinite elements.

        Raises DivergenceError (9001), which names the tensors, the step and the way out.
        """
        bad = backend.nonfinite()
        if not bad:
            return
        of_policy = f" of policy {policy}" if policy else ""
        newest = next((each.path for each in self.checkpoints.checkpoints() if each.step < self.step), None)
        way_out = (
            "There is no earlier checkpoint. Start again in another run.dir with a lower learning rate, and with a "
            "smaller save_interval"
            if newest is None
            else f"{newest.name} stays the latest. Continue from it with:\n  {self.resume_command}\n"
            f"or, with a lower learning rate, in another folder: resume={newest} run.dir=<new folder>"
        )
        raise DivergenceError(
            f"after step {self.step} the state{of_policy} is not finite, so no checkpoint of it was published "
            f"({listed(bad)}). {way_out}"
        )

    def check_saving(self) -> None:
        """Note a save that was published in the background. Raises the error of one that failed."""
        if self.saving is not None and self.saving.is_published():
            self.finish_saving()

    def finish_saving(self) -> None:
        """Wait until the save under way is published and copied. Raises its error if it could not be published."""
        if self.saving is not None:
            saving, self.saving = self.saving, None
            self._note_published(saving.step, saving.finish())

    def _note_published(self, step: int, failure: UniRLError | None) -> None:
        self.tracker.event("ckpt.commit", step=step)
        self.uncopied = failure
        if failure is not None:
            self.tracker.warn(f"{checkpoint_name(step)} was not copied: {failure}")

    @contextmanager
    def saved_at_the_end(self) -> Iterator[None]:
        """When the block ends, also by an error, a save that is under way is finished first."""
        try:
            yield
        except BaseException as error:
            if self.saving is not None:
                self.saving.leave(error)
            raise
        self.finish_saving()
        if self.uncopied is not None:
            raise self.uncopied

    def stopped_by(self, signum: int) -> UniRLError:
        """The error that ends the run after a signal: Ctrl-C, or the signal of a scheduler."""
        kind = Interrupted if signum == signal.SIGINT else Preempted
        return kind(
            f"stopped after step {self.step} by {signal.Signals(signum).name}; checkpoint saved. Continue with:\n"
            f"  {self.resume_command}"
        )

    def restore(self) -> None:
        """Continue after the last valid checkpoint, with the run's files cut back to it; or start at step 0."""
        for reason in self.resume.skipped:
            self.tracker.warn(str(reason))
        if self.resume.checkpoint is not None:
            if self.checkpoints.key is None and is_signed(self.resume.checkpoint.path):
                self.tracker.warn(
                    f"the signature of {self.resume.checkpoint.path} is not checked, because this recipe has no "
                    "checkpoint.signing_key: whoever can write to that folder can have changed the checkpoint"
                )
            self.load(self.resume.checkpoint)
            self.checkpoints.discard_after(self.step)
            self.tracker.note(f"resumed from {self.resume.checkpoint.path.name} (step {self.step})")
        self.tracker.truncate(self.step if self.resume.checkpoint else -1)

    def load(self, checkpoint: Checkpoint) -> None:
        """Take over a checkpoint's state and weights. Warns if it was written in another environment."""
        with still_there(checkpoint):
            self._load(checkpoint)

    def _load(self, checkpoint: Checkpoint) -> None:
        state = read_state(checkpoint.path)
        written = state["environment"]
        changed = [
            f"{name} {written.get(name)} -> {self.environment.get(name)}"
            for name in sorted(written.keys() | self.environment.keys())
            if written.get(name) != self.environment.get(name)
        ]
        if changed:
            self.tracker.warn(
                f"{checkpoint.path.name} was written in another environment ({', '.join(changed)}): the run continues, "
                "but its bits may differ from those of an unbroken run"
            )
        for name, policy in self.policies.items():
            policy.backend.load(str(policy_folder(checkpoint.path, name)))
            policy.version = state["versions"][name] if "versions" in state else state["version"]
        stateful = state["stateful"]
        if stateful.keys() != self.stateful.keys():
            raise ResumeError(
                f"the checkpoint holds state of {sorted(stateful)}, this recipe has {sorted(self.stateful)}: "
                "resume with the recipe that wrote it, or start anew with resume=none in another run.dir"
            )
        for name, item in self.stateful.items():
            item.load_state_dict(stateful[name])
        self.step = state["step"]
        self.choose_as(checkpoint)

    def choose_as(self, checkpoint: Checkpoint) -> None:
        """Take over what the run chose for open settings, by the record in one of its checkpoints."""
        saved = saved_choices(checkpoint.path)
        self.chosen.update({key: saved[key] for key in self.chosen.keys() & saved.keys()})


def policy_folder(checkpoint: Path, policy: str = "") -> Path:
    """The folder of a checkpoint that holds the weights of a policy; the only policy of a run has the name ""."""
    return checkpoint / "-".join(filter(None, ("policy", policy)))


def read_state(checkpoint: Path) -> State:
    """The state in a checkpoint's folder, as `RunState.save` wrote it."""
    state: State = json.loads((checkpoint / STATE_FILE).read_text())
    return state


def recorded_threads(point: ResumePoint, own: Path) -> Recorded | None:
    """The threads of the run that continues at `point`. None for a new run, and for one that began on an accelerator.

    Args:
        own: the folder of this run's checkpoints. A run that branches off from another one chooses anew.
    """
    checkpoint = point.checkpoint
    if checkpoint is None or checkpoint.path.parent != own:
        return None
    return threads_in(checkpoint)


def threads_in(checkpoint: Checkpoint) -> Recorded | None:
    """The threads with which a checkpoint was computed. None if an accelerator computed it."""
    with still_there(checkpoint):
        saved = read_state(checkpoint.path)["environment"]
    return Recorded(int(saved["threads"]), checkpoint.path.name) if saved["device"] == "cpu" else None


def saved_choices(checkpoint: Path) -> dict[str, Any]:
    """What the run that wrote a checkpoint chose for the settings that its recipe leaves open, by key."""
    choices: dict[str, Any] = read_state(checkpoint).get("chosen", {})
    return choices


def environment(train_ranks: int) -> dict[str, str]:
    """What decides bits outside the recipe, for comparison when a run is resumed."""
    return {
        "unirl": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "device": device_name(accelerator()),
        "train_ranks": str(train_ranks),
    }
