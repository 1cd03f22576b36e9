"""A backend's state on disk: safetensors and one JSON file, read back strictly, by any number of ranks.

weights     parameter name -> live value
optimizer   parameter name + ".exp_avg" | ".exp_avg_sq" | ".step"
snapshots   snapshot name + ":" + parameter name
value       parameter name of the value head -> live value; no file without one
backend.json            counters, what the tensors belong to, and the names of the files

One rank writes `weights.safetensors`; rank r of n writes its rows to `weights-0000r-of-0000n.safetensors`, through
torch.distributed.checkpoint, which also reads either kind.
"""

from __future__ import annotations

import json
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from unirl.config.errors import CheckpointError, ResumeError
from unirl.distributed import RankInfo
from unirl.train.configs import LoraConfig

FORMAT = 2
STEMS = ("weights", "optimizer", "snapshots", "value")

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Counters:
    """Everything of a backend that is no tensor. `adapter` and `snapshots` must agree on loading."""

    updates: int
    skipped_in_a_row: int
    adapter: str
    """What is trained: `full`, or the adapters' rank, alpha and targets."""
    snapshots: tuple[str, ...]
    files: tuple[str, ...] = ()
    format: int = FORMAT


def trained_weights(lora: LoraConfig | None) -> str:
    """What is trained, as `Counters.adapter` says it."""
    return "full" if lora is None else ", ".join(f"{key}={value}" for key, value in asdict(lora).items())


def check_trained_weights(found: Counters, lora: LoraConfig | None) -> None:
    """Raises CheckpointError (7002) unless the checkpoint's trained weights are of the kind that this recipe trains."""
    _check_equal("trained weights", found.adapter, trained_weights(lora))


def check_snapshots(found: Counters, names: Sequence[str]) -> None:
    """Raises CheckpointError (7002) unless the checkpoint holds these snapshots."""
    _check_equal("weight snapshots", list(found.snapshots), list(names))


def _check_equal(what: str, theirs: object, ours: object) -> None:
    if theirs != ours:
        raise ResumeError(
            f"the checkpoint's {what} are {theirs!r}, this recipe's are {ours!r}: resume with the recipe that wrote "
            "it, or start anew with resume=none"
        )


# Writing


def write(directory: Path, tensors: Mapping[str, Tensors], counters: Counters, rank: RankInfo) -> None:
    """Write `tensors` (file stem -> name -> tensor) and the counters into an existing or new directory.

    Several ranks come here together, each with its rows as DTensors.
    """
    directory.mkdir(parents=True, exist_ok=True)
    files = _write_whole(directory, tensors) if rank.dp_size == 1 else _write_rows(directory, tensors, rank)
    if rank.dp_rank == 0:
        content = asdict(counters) | {"files": files}
        (directory / "backend.json").write_text(json.dumps(content, indent=1, sort_keys=True))


def _write_whole(directory: Path, tensors: Mapping[str, Tensors]) -> list[str]:
    for stem, entries in tensors.items():
        contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in entries.items()}
        save_file(contiguous, directory / f"{stem}.safetensors")
    return [f"{stem}.safetensors" for stem in tensors]


def _write_rows(directory: Path, tensors: Mapping[str, Tensors], rank: RankInfo) -> list[str]:
    """This rank's rows; the names of all ranks' files."""
    from torch.distributed import all_gather_object
    from torch.distributed.checkpoint import HuggingFaceStorageWriter, save

    numbers = {name: i for i, stem in enumerate(tensors, 1) for name in tensors[stem]}
    flat = {name: tensor.detach() for entries in tensors.values() for name, tensor in entries.items()}
    writer = HuggingFaceStorageWriter(str(directory), fqn_to_index_mapping=numbers, save_distributed=True)
    save(flat, storage_writer=writer, process_group=rank.group)
    mine = []
    for i, stem in enumerate(tensors, 1):
        # A rank whose rows are all held by another, or are none, has no file.
        for found in directory.glob(f"shard-{rank.dp_rank + 1:05}-model-{i:05}-of-*.safetensors"):
            name = f"{stem}-{rank.dp_rank + 1:05}-of-{rank.dp_size:05}.safetensors"
            found.rename(directory / name)
            mine.append(name)
    everyones: list[list[str]] = [[] for _ in range(rank.dp_size)]
    all_gather_object(everyones, mine, group=rank.group)
    return [name for names in everyones for name in names]


# Reading


class SavedTensors(ABC):
    """The tensors of a checkpoint, described at once and read when asked."""

    headers: Mapping[str, Tensors]
    """File stem -> name -> a tensor of that shape and dtype."""

    @abstractmethod
    def read(self, targets: Tensors) -> None:
        """Fill `targets`, by name; several ranks come here together, each for its rows."""


def read_counters(directory: Path) -> Counters:
    """The counters; CheckpointError (7001) if they are missing or damaged."""
    path = directory / "backend.json"
    try:
        raw = json.loads(path.read_text())
        if raw["format"] != FORMAT:
            raise CheckpointError(f"{path} has format {raw['format']}; this version reads {FORMAT}")
        return Counters(**{**raw, "snapshots": tuple(raw["snapshots"]), "files": tuple(raw["files"])})
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise _damaged(path, error) from error


def open_tensors(directory: Path, files: Sequence[str], rank: RankInfo) -> SavedTensors:
    """The tensors of `files`; CheckpointError (7001) if one is missing or damaged."""
    for name in files:
        try:
            with safe_open(directory / name, "pt"):
                pass
        except (OSError, SafetensorError) as error:
            raise _damaged(directory / name, error) from error
    if rank.dp_size == 1 and set(files) <= {f"{stem}.safetensors" for stem in STEMS}:
        return _WholeFiles(directory, files)
    return _RowFiles(directory, rank)


class _WholeFiles(SavedTensors):
    """What one rank wrote and one rank reads."""

    def __init__(self, directory: Path, files: Sequence[str]) -> None:
        self.headers = {name.removesuffix(".safetensors"): load_file(directory / name) for name in files}

    def read(self, targets: Tensors) -> None:
        found = {name: tensor for entries in self.headers.values() for name, tensor in entries.items()}
        for name, target in targets.items():
            target.copy_(found[name])


class _RowFiles(SavedTensors):
    """Any number of files read by any number of ranks: torch.distributed.checkpoint cuts the rows anew."""

    def __init__(self, directory: Path, rank: RankInfo) -> None:
        from torch.distributed.checkpoint import HuggingFaceStorageReader
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        self.reader = HuggingFaceStorageReader(str(directory))
        self.rank = rank
        self.directory = directory
        metadata = self.reader.read_metadata()
        stems = {
            index.fqn: Path(info.relative_path).name.removesuffix(".safetensors").partition("-")[0]
            for index, info in metadata.storage_data.items()
        }
        headers: dict[str, Tensors] = {stem: {} for stem in STEMS}
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata), "a safetensors file holds tensors only"
            headers[stems[name]][name] = torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
        self.headers = headers

    def read(self, targets: Tensors) -> None:
        from torch.distributed.checkpoint import load

        alone = self.rank.dp_size == 1
        with warnings.catch_warnings():
            # That one process reads what several wrote is meant.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            load(dict(targets), storage_reader=self.reader, process_group=self.rank.group, no_dist=alone)


def _damaged(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{path} is missing or damaged ({error}): resume from an earlier one (`unirl ckpt ls` lists them)"
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
        raise ResumeError(
            f"the checkpoint's {what} belong to another model or adapter: {'; '.join(sorted(problems)[:3])} "
            f"({len(problems)} in all). Resume with the recipe that wrote it, or start anew with resume=none"
        )
