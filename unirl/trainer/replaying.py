"""Repeats recorded steps of a run from its nearest checkpoint, and compares what they give with the record.

    checkpoint before the step -> steps between, with their updates -> samples and rewards of the step -> compare

Every draw is a function of seed, step and sample, so on the same kind of machine all bits are equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unirl.config.errors import IncompatibleError, InvalidValueError, NotFoundError
from unirl.tracking.media import media_of
from unirl.tracking.metrics import NOT_REPRODUCIBLE
from unirl.tracking.run_files import RunFiles
from unirl.tracking.samples import Gallery
from unirl.tracking.videos import STRIP_FRAMES
from unirl.train.backend.checkpoint import CheckpointStore
from unirl.trainer.assemble import status_of
from unirl.trainer.loop import Trainer
from unirl.trainer.run_folder import SavedRun, saved_run
from unirl.trainer.saved_rollouts import with_saved_rows
from unirl.types.rollout_resp import RolloutResp

EVERY_SAMPLE = 2**20
"""Samples of the repeated step that are kept: all of them."""
TRACED = 8
"""Samples whose trajectories are shown, if none is named."""


@dataclass(frozen=True)
class StartPoint:
    """Where the repetition begins."""

    saved: SavedRun
    """A checkpoint of the run, with its recipe."""
    from_checkpoint: bool
    """False if no checkpoint is old enough: the repetition then begins with the first step."""

    @property
    def step(self) -> int:
        """Steps that are finished at the start."""
        return self.saved.checkpoint.step if self.from_checkpoint else 0

    def __str__(self) -> str:
        return self.saved.checkpoint.path.name if self.from_checkpoint else "the first weights"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A metric or sample of the record that the repetition does not have equally."""

    step: int
    what: str
    recorded: object
    repeated: object

    def __str__(self) -> str:
        return f"step {self.step}: {self.what} was {self.recorded!r}, is {self.repeated!r}"


@dataclass(frozen=True, kw_only=True)
class ReplayReport:
    """The record of a run beside a repetition of some of its steps."""

    metrics: int
    """Metrics that were compared, summed over steps."""
    samples: int
    """Samples that were compared, with their facts, rewards and media."""
    differences: tuple[Difference, ...]


def start_point(root: Path, step: int, overrides: Sequence[str] = ()) -> StartPoint:
    """The newest checkpoint of the run in `root` from which `step` can be repeated.

    Args:
        step: the number of the step, from 1, as in metrics.jsonl.

    Raises:
        NotFoundError: 4001 if the run has no checkpoint, which holds its recipe, or did not record the step.
    """
    last = max((int(row["step"]) for row in RunFiles(root).rows("metrics.jsonl")), default=0)
    if not 1 <= step <= last:
        raise NotFoundError(f"--step {step}: {root} recorded the steps 1 to {last}. Name one of them")
    checkpoints = sorted(CheckpointStore(root / "checkpoints", keep=0).checkpoints(), key=lambda each: each.step)
    if not checkpoints:
        raise NotFoundError(
            f"{root} has no checkpoint, and a step is repeated with the recipe and the weights of one. Train with "
            "save_interval > 0"
        )
    earlier = [each for each in checkpoints if each.step < step]
    chosen = earlier[-1] if earlier else checkpoints[0]
    tracking = {"sample_steps": step, "max_samples": EVERY_SAMPLE, "keep_samples": 0, "save_rollouts": 0}
    saved = saved_run(str(chosen.path), overrides, {"tracking": tracking}, from_start=not earlier)
    return StartPoint(saved, bool(earlier))


def repeat(trainer: Trainer, start: StartPoint, step: int, saved: Path | None = None) -> RolloutResp:
    """Repeat the steps after `start` up to the samples and rewards of `step`, which is not learned from by default.

    The tracker of the trainer gets the metrics of all of them and every sample of the last one. Returns the samples of
    the last one, whose heavy rows can be read until the trainer ends.

    Args:
        saved: the directory of the run. The last step is then learned from, too, on the rows that the run saved.
    """
    state, tracker = trainer.state, trainer.tracker
    if start.from_checkpoint:
        state.load(start.saved.checkpoint)
    else:
        state.choose_as(start.saved.checkpoint)
    for learner in trainer.learners:
        for track in learner.tracks.values():
            track.choose_micro_batch()
    try:
        trainer.generation.generate_again(state.step, trainer.publish)
        with tracker.watching(lambda: f"step {state.step + 1} of {step}, {status_of(trainer.pool)}"):
            while state.step < step:
                with tracker.timers.phase("step"):
                    resp = trainer.produce(state.step)
                    if state.step + 1 < step:
                        trainer.learn(state.step, resp)
                    elif saved is not None:
                        trainer.learn(state.step, with_saved_rows(saved, step, resp))
                state.step += 1
                tracker.log_step(state.step)
    finally:
        trainer.generation.stop()
    tracker.flush()
    return resp


def write_trace(trainer: Trainer, resp: RolloutResp, folder: Path, sample: str | None = None) -> Path:
    """Write the trajectories of samples as strips, a picture of the latents per stored position. Returns the page.

    Stored positions are both ends of each stochastic step, and the finished sample.

    Args:
        sample: the id of the only sample. None: the first ones of the step.

    Raises:
        ConfigError: 2020 if the scored track has no latents that are images.
    """
    track = resp.tracks[trainer.track]
    if not track.segment.positions:
        raise IncompatibleError(f"--trace: the samples of {trainer.track} are no images or videos made of latents")
    rows = [row for row, name in enumerate(track.sample_ids) if sample in (None, name)][:TRACED]
    try:
        media = media_of(trainer.rollout.trace(track.select(rows)))
    except ValueError as error:
        raise IncompatibleError(f"--trace: {error}") from error
    positions = track.segment.positions
    facts = {"positions": ", ".join(map(str, positions))}
    if len(positions) > STRIP_FRAMES:
        facts["shown"] = f"{STRIP_FRAMES} of {len(positions)}; the animation has all"
    folder.mkdir(parents=True, exist_ok=True)
    return media.gallery(Gallery(tuple(track.sample_ids[row] for row in rows), 1, facts), folder)


def compare(recorded: Path, repeated: Path, step: int, sample: str | None = None) -> ReplayReport:
    """Compare a repetition with the record of the run: metrics of each repeated step, and samples of the last one.

    Args:
        recorded: the directory of the run.
        repeated: the directory of the tracker that `repeat` reported to.
        sample: the id of the only sample to compare. None: all that the run kept.

    Raises:
        ConfigError: 2004 if the step has no sample with this id.
    """
    again = {int(row["step"]): row for row in RunFiles(repeated).rows("metrics.jsonl")}
    before = {int(row["step"]): row for row in RunFiles(recorded).rows("metrics.jsonl") if int(row["step"]) in again}
    pairs = [(number, before.get(number, {}), row) for number, row in again.items()]
    differences = [each for number, old, new in pairs for each in _metrics(number, old, new)]
    num_metrics = sum(len(_names(old, new)) for _, old, new in pairs)
    folder = Path("samples") / f"step-{step:06d}"
    old_rows, new_rows = (_manifest(root / folder) for root in (recorded, repeated))
    if sample is not None and sample not in new_rows:
        some = ", ".join(list(new_rows)[:4])
        raise InvalidValueError(f"--sample {sample}: step {step} has no such sample. Its ids are {some}, ...")
    chosen = [name for name in old_rows if sample in (None, name)]
    for name in chosen:
        differences += _sample(step, name, old_rows[name], new_rows.get(name), recorded / folder, repeated / folder)
    return ReplayReport(metrics=num_metrics, samples=len(chosen), differences=tuple(differences))


def _names(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The metrics that both rows have and that depend on neither clock nor machine."""
    return [name for name in old if name in new and name != "step" and not name.startswith(NOT_REPRODUCIBLE)]


def _metrics(step: int, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Difference]:
    for name in _names(old, new):
        if old[name] != new[name]:
            yield Difference(step=step, what=name, recorded=old[name], repeated=new[name])


def _manifest(folder: Path) -> dict[str, dict[str, Any]]:
    """The rows of the samples in a folder, by id. Empty if the run kept none of this step."""
    return {str(row["sample_id"]): row for row in RunFiles(folder).rows("manifest.jsonl") if "sample_id" in row}


def _sample(
    step: int, name: str, old: Mapping[str, Any], new: Mapping[str, Any] | None, before: Path, again: Path
) -> Iterator[Difference]:
    if new is None:
        yield Difference(step=step, what=f"sample {name}", recorded="there", repeated="absent")
        return
    # A repetition that does not train has no values of training along its samples.
    series = {value: old.get("series", {}).get(value) for value in new.get("series", {})}
    old = {**old, **({"series": series} if "series" in old else {})}
    for key in old:
        if key != "file" and old[key] != new.get(key):
            yield Difference(step=step, what=f"{key} of {name}", recorded=old[key], repeated=new.get(key))
    if old.get("file"):
        one, other = RunFiles(before).data(str(old["file"])), RunFiles(again).data(str(new["file"]))
        if one is None or one != other:
            seen = "unreadable" if one is None else "other bytes"
            yield Difference(step=step, what=f"the file of {name}", recorded=old["file"], repeated=seen)
