"""A backend's state on disk: safetensors and one JSON file, read back strictly.

weights.safetensors     parameter name -> live value
optimizer.safetensors   parameter name + ".exp_avg" | ".exp_avg_sq" | ".step"
snapshots.safetensors   snapshot name + ":" + parameter name
backend.json            counters, and what the tensors belong to
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from unirl.config.errors import CheckpointError

FORMAT = 1
MOMENTS = ("exp_avg", "exp_avg_sq", "step")

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Counters:
    """Everything of a backend that is no tensor. `adapter` and `snapshots` must agree on loading."""

    updates: int
    skipped_in_a_row: int
    adapter: str
    """What is trained: `full`, or the adapters' rank, alpha and targets."""
    snapshots: tuple[str, ...]
    format: int = FORMAT


def write(directory: Path, tensors: Mapping[str, Tensors], counters: Counters) -> None:
    """Write `tensors` (file stem -> name -> tensor) and the counters into an existing or new directory."""
    directory.mkdir(parents=True, exist_ok=True)
    for stem, entries in tensors.items():
        contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in entries.items()}
        save_file(contiguous, directory / f"{stem}.safetensors")
    (directory / "backend.json").write_text(json.dumps(asdict(counters), indent=1, sort_keys=True))


def read_counters(directory: Path) -> Counters:
    """The counters; CheckpointError (7001) if they are missing or damaged."""
    path = directory / "backend.json"
    try:
        raw = json.loads(path.read_text())
        counters = Counters(**{**raw, "snapshots": tuple(raw["snapshots"])})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(path, error) from error
    if counters.format != FORMAT:
        raise CheckpointError(f"{path} has format {counters.format}; this version reads {FORMAT}", code=7001)
    return counters


def read_tensors(directory: Path, stem: str) -> Tensors:
    """The tensors of one file; CheckpointError (7001) if it is missing or damaged."""
    path = directory / f"{stem}.safetensors"
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{path} is missing or damaged ({error}): resume from an earlier one (`unirl ckpt ls` lists them)",
        code=7001,
    )


def check_match(what: str, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raises CheckpointError (7002) unless both hold the same names, shapes and dtypes."""
    problems = [f"{name} is missing" for name in expected if name not in found]
    problems += [f"{name} is unknown here" for name in found if name not in expected]
    for name in found.keys() & expected.keys():
        have, want = found[name], expected[name]
        if have.shape != want.shape or have.dtype != want.dtype:
            problems.append(f"{name} is {tuple(have.shape)} {have.dtype}, not {tuple(want.shape)} {want.dtype}")
    if problems:
        raise CheckpointError(
            f"the checkpoint's {what} belong to another model or adapter: {'; '.join(sorted(problems)[:3])} "
            f"({len(problems)} in all). Resume with the recipe that wrote it, or start anew with resume=none",
            code=7002,
        )


def optimizer_tensors(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> Tensors:
    """AdamW's moments and counts by parameter name; a parameter that never had a gradient has none."""
    return {
        f"{name}.{key}": optimizer.state[parameter][key]
        for name, parameter in parameters.items()
        if parameter in optimizer.state
        for key in MOMENTS
    }


def check_optimizer(found: Tensors, parameters: Mapping[str, nn.Parameter]) -> None:
    """Raises CheckpointError (7002) unless `found` is AdamW's state of some of the parameters, complete for each."""
    count = torch.zeros((), dtype=torch.float32)
    expected = {
        f"{name}.{key}": count if key == "step" else parameters[name]
        for name in _owners(found, parameters)
        for key in MOMENTS
    }
    check_match("optimizer states", found, expected)


def load_optimizer(optimizer: Optimizer, found: Tensors, parameters: Mapping[str, nn.Parameter]) -> None:
    """Replace AdamW's state by checked tensors, through its own loading (which places them as it wants them)."""
    position = {name: i for i, name in enumerate(parameters)}
    state = {position[name]: {key: found[f"{name}.{key}"] for key in MOMENTS} for name in _owners(found, parameters)}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _owners(found: Iterable[str], parameters: Mapping[str, nn.Parameter]) -> Sequence[str]:
    owners = {name.rpartition(".")[0] for name in found}
    return [name for name in parameters if name in owners]
