"""A backend's state on disk: safetensors files and one JSON file. Any number of ranks can read it.

weights       parameter name -> live value
optimizer     parameter name + ".exp_avg" | ".exp_avg_sq" | ".step" -> AdamW's state
snapshots     snapshot name + ":" + parameter name -> value in the snapshot
value         parameter name of the value head -> live value; absent without a value head
kept          rank ":" name of the object ":" tensor -> state of other objects on a rank (`TrainBackend.keep`)
backend.json  counters, a description of the trained weights and snapshots, and the names of the files

A single rank writes `weights.safetensors`. Rank r of n writes its rows to `weights-0000r-of-0000n.safetensors`.
torch.distributed.checkpoint reads both kinds.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from unirl.config.errors import CheckpointError, ResumeError
from unirl.distributed import RankInfo
from unirl.train.backend.manifest import has_receipt
from unirl.train.backend.writer import FileWriter, Pieces
from unirl.train.configs import LoraConfig

FORMAT = 2
COUNTERS = "backend.json"
STEMS = ("weights", "optimizer", "snapshots", "value", "kept")

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Counters:
    """The state of a backend that is not a tensor. `adapter` and `snapshots` must match those of the loading recipe."""

    updates: int
    skipped_in_a_row: int
    adapter: str
    """The trained weights: `full`, or the adapters' rank, alpha and targets."""
    snapshots: tuple[str, ...]
    files: tuple[str, ...] = ()
    format: int = FORMAT


def trained_weights(lora: LoraConfig | None) -> str:
    """The description of the trained weights that `Counters.adapter` stores: their shapes, and not where they began."""
    settings = {} if lora is None else asdict(lora)
    return ", ".join(f"{key}={value}" for key, value in settings.items() if key != "path") or "full"


def check_trained_weights(counters: Counters, lora: LoraConfig | None) -> None:
    """Raises CheckpointError (7002) unless the checkpoint's trained weights are of the kind that this recipe trains."""
    check_equal("trained weights", counters.adapter, trained_weights(lora))


def check_equal(subject: str, saved: object, expected: object) -> None:
    """Raises CheckpointError (7002) unless a property of the checkpoint is the one that this recipe has."""
    if saved != expected:
        raise ResumeError(
            f"the checkpoint's {subject} are {saved!r}, this recipe's are {expected!r}. Resume with the recipe that "
            "wrote it, or start again with resume=none"
        )


# Writing


def write(
    directory: Path,
    pieces: Mapping[str, Pieces],
    counters: Counters,
    rank: RankInfo,
    writer: FileWriter,
    in_background: bool,
) -> None:
    """Write `pieces` (file stem -> name -> this rank's rows) and the counters into an existing or new directory.

    On several ranks this is a collective.

    Args:
        in_background: return as soon as the rows are copied. The counters name the files that are being written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    alone = rank.dp_size == 1
    suffix = "" if alone else f"-{rank.dp_rank + 1:05}-of-{rank.dp_size:05}"
    # On several ranks, a rank writes no file if it has no rows, or if another rank writes the same rows.
    files = {f"{stem}{suffix}.safetensors": entries for stem, entries in pieces.items() if entries or alone}
    if in_background:
        writer.begin(directory, files)
    else:
        writer.write(directory, files)
    names = _of_all_ranks(list(files), rank)
    if rank.dp_rank == 0:
        content = asdict(counters) | {"files": names}
        (directory / COUNTERS).write_text(json.dumps(content, indent=1, sort_keys=True))


def _of_all_ranks(names: list[str], rank: RankInfo) -> list[str]:
    if rank.dp_size == 1:
        return names
    names_by_rank: list[list[str]] = [[] for _ in range(rank.dp_size)]
    torch.distributed.all_gather_object(names_by_rank, names, group=rank.group)
    return [name for own in names_by_rank for name in own]


def is_written(directory: Path) -> bool:
    """True if every file that is written in the background by any rank is whole."""
    return (directory / COUNTERS).exists() and all(
        has_receipt(directory / name) for name in read_counters(directory).files
    )


# Reading


def read_counters(directory: Path) -> Counters:
    """Read the counters. Raises CheckpointError (7001) if they are missing or damaged."""
    path = directory / COUNTERS
    try:
        raw = json.loads(path.read_text())
        if raw["format"] != FORMAT:
            raise CheckpointError(
                f"{path} has format {raw['format']}, and this version of UniRL reads only format {FORMAT}. Use the "
                "version that wrote the checkpoint"
            )
        counters = Counters(**{**raw, "snapshots": tuple(raw["snapshots"]), "files": tuple(raw["files"])})
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise _damaged(path, error) from error
    for name in counters.files:
        # The manifest lists every file of the checkpoint's folders, so a plain name is one that it lists.
        if Path(name).name != name or (directory / name).is_symlink():
            raise CheckpointError(
                f"{path} names the file {name!r}, which the checkpoint's manifest does not list: a checkpoint reads "
                "only its own files. Resume from one that UniRL wrote (`unirl ckpt ls` lists them)"
            )
    return counters


def open_tensors(directory: Path, files: Sequence[str], rank: RankInfo) -> SavedTensors:
    """Open the tensors of `files`. Raises CheckpointError (7001) if a file is missing or damaged."""
    for name in files:
        try:
            with safe_open(directory / name, "pt"):
                pass
        except (OSError, SafetensorError) as error:
            raise _damaged(directory / name, error) from error
    return SavedTensors(directory, rank)


class SavedTensors:
    """Files of any number of ranks, read by any number of ranks. torch.distributed.checkpoint assigns the rows.

    `headers` (stem -> name -> tensor) holds shapes and dtypes; `read` reads the values.
    """

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
        """Fill `targets` by name. On several ranks this is a collective: each rank reads its rows."""
        from torch.distributed.checkpoint import load

        alone = self.rank.dp_size == 1
        with warnings.catch_warnings():
            # It is intended that one process reads files that several wrote.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            load(dict(targets), storage_reader=self.reader, process_group=self.rank.group, no_dist=alone)


def _damaged(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{path} is missing or damaged ({error}). Resume from an earlier checkpoint (`unirl ckpt ls` lists them)"
    )


def check_match(subject: str, saved: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raises CheckpointError (7002) unless `saved` and `expected` have the same names, shapes and dtypes."""
    problems = [f"{name} is missing" for name in expected if name not in saved]
    problems += [f"{name} is not in this model" for name in saved if name not in expected]
    for name in saved.keys() & expected.keys():
        ours, theirs = expected[name], saved[name]
        if theirs.shape != ours.shape or theirs.dtype != ours.dtype:
            problems.append(f"{name} is {tuple(theirs.shape)} {theirs.dtype}, not {tuple(ours.shape)} {ours.dtype}")
    if problems:
        raise ResumeError(
            f"the checkpoint's {subject} belong to another model or adapter: {'; '.join(sorted(problems)[:3])} "
            f"({len(problems)} problems in total). Resume with the recipe that wrote it, or start again with "
            "resume=none"
        )
