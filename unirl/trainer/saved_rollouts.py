"""The rows that a step trained on, as a safetensors file in the run directory, and read back.

    rollouts/step-000012.safetensors     image.segment.latents, image.segment.logp, image.advantages, ...

A file has every tensor of every track but the decoded samples. Text, ids and what all rows share, such as kernels and
sigmas, are not in it: they come from a repetition of the step, whose tensors the file replaces.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from unirl.config.errors import NotFoundError, UnreadableFileError
from unirl.types.batch import with_named_tensors
from unirl.types.rollout_resp import RolloutResp, RolloutTrack

ReadRows = Callable[[RolloutTrack, str], dict[str, Tensor]]
"""`RolloutEngine.rows`."""


def rollout_file(root: Path, step: int) -> Path:
    """The file of a step of the run in `root`. Steps count from 1, as in metrics.jsonl."""
    return root / "rollouts" / f"step-{step:06d}.safetensors"


def save_rollout(root: Path, step: int, resp: RolloutResp, read: ReadRows) -> Path:
    """Write the rows of a step. An existing file of the step is replaced at once."""
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    for name, track in resp.tracks.items():
        tensors |= read(track.replace(decoded=None), name)
    path = rollout_file(root, step)
    path.parent.mkdir(exist_ok=True)
    partial = path.with_suffix(".partial")
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, partial)
    partial.replace(path)
    return path


def check_saved_rows(root: Path, step: int) -> Path:
    """The file of a step. Raises NotFoundError (4001) if the run in `root` kept no rows of it."""
    path = rollout_file(root, step)
    if not path.is_file():
        kept = [int(each.stem.removeprefix("step-")) for each in sorted(path.parent.glob("step-*.safetensors"))]
        some = f"It kept those of the steps {', '.join(map(str, kept))}" if kept else "Set tracking.save_rollouts=1"
        raise NotFoundError(f"--train: {root} kept no rows of step {step}. {some}")
    return path


def with_saved_rows(root: Path, step: int, resp: RolloutResp) -> RolloutResp:
    """A repetition of a step with the rows that the run recorded.

    Raises:
        NotFoundError: 4001 if the run kept no rows of the step.
        UnreadableFileError: 4003 if the file is damaged, or has other tensors than the step.
    """
    from safetensors.torch import load_file

    path = check_saved_rows(root, step)
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise UnreadableFileError(f"{path} cannot be read: {error}. Repeat the step without --train") from error
    missing = {name for name in resp.tracks if f"{name}.advantages" not in tensors and f"{name}.weight" not in tensors}
    if missing:
        raise UnreadableFileError(
            f"{path} has no rows of the track {min(missing)}: it belongs to another recipe. Leave out --train"
        )
    try:
        for name, track in resp.tracks.items():
            resp = resp.with_track(name, with_named_tensors(track.replace(decoded=None), tensors, name))
    except ValueError as error:
        raise UnreadableFileError(f"{path} does not fit step {step}: {error}. Is it of another run?") from error
    return resp
