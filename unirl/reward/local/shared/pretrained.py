"""Loads the networks of scorers from a hub repository, a directory or a file, and seeds those of toy scale."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from unirl.config.errors import NotFoundError
from unirl.models.loading.hub import HUB_ID, only_from_cache, quiet_libraries, unreachable

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


class Pretrained(Protocol):
    """A class of transformers: a model, configuration, tokenizer or processor."""

    @classmethod
    def from_pretrained(cls, path: str, /, *, local_files_only: bool) -> Self: ...


PretrainedT = TypeVar("PretrainedT", bound=Pretrained)

DAMAGED = (OSError, RuntimeError, ValueError, EOFError, UnpicklingError, SafetensorError)
"""The errors of the libraries for files that are truncated, have another format or hold more than tensors."""
WAY_OUT = "Give a local directory, a hub id that can be reached, or `toy`"


def load(cls: type[PretrainedT], path: str, key: str) -> PretrainedT:
    """Returns a pretrained object of transformers from a hub id or a local directory.

    Raises DataError (4001), which names `key` of the recipe, when there is no such object.
    """
    try:
        with quiet_libraries():
            return cls.from_pretrained(path, local_files_only=only_from_cache(path))
    except OSError as error:
        where = "the directory lacks its files" if Path(path).is_dir() else _no_file_of(path)
        raise NotFoundError(f"{key}={path!r}: {where} ({cls.__name__}). {WAY_OUT}") from error


def read_weights(path: str, file: str, key: str) -> dict[str, Tensor]:
    """Returns the tensors of a published checkpoint by name.

    The checkpoint is the file `path`, or `file` in the directory or hub repository `path`. A pickled checkpoint is read
    with `weights_only`, and may hold its weights under `state_dict` or `model`.

    Raises:
        DataError: 4001 when there is no such file, or it holds something else.
    """
    checkpoint = _weights_file(path, file, key)
    try:
        return _tensors_of(checkpoint)
    except DAMAGED as error:
        raise NotFoundError(
            f"{key}={path!r}: {checkpoint.name} is not a checkpoint of weights ({type(error).__name__}). Download it "
            "again"
        ) from error


def _weights_file(path: str, file: str, key: str) -> Path:
    local = Path(path).expanduser()
    if local.is_file():
        return local
    if local.is_dir():
        if (local / file).is_file():
            return local / file
        raise NotFoundError(f"{key}={path!r}: the directory holds no {file}. {WAY_OUT}")
    if not HUB_ID.fullmatch(path):
        raise NotFoundError(f"{key}={path!r}: no such file or directory. {WAY_OUT}")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        return Path(hf_hub_download(path, file, local_files_only=only_from_cache(path)))
    except (OSError, EntryNotFoundError) as error:
        raise NotFoundError(f"{key}={path!r}: {_no_file_of(path)} ({file}). {WAY_OUT}") from error


def _no_file_of(path: str) -> str:
    """Why a file of a hub id is missing."""
    if only_from_cache(path):
        return f"not in the local cache, and the hub cannot be reached: {unreachable()}"
    return "no such directory, and the hub did not give it"


def _tensors_of(file: Path) -> dict[str, Tensor]:
    if file.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(file)
    content = torch.load(file, map_location="cpu", weights_only=True)
    weights = content.get("state_dict", content.get("model", content)) if isinstance(content, dict) else None
    if not isinstance(weights, dict) or not all(isinstance(tensor, Tensor) for tensor in weights.values()):
        raise ValueError("a checkpoint must hold tensors by name")
    return weights


def assemble(
    cls: type[PreTrainedModel],
    config: PretrainedConfig,
    weights: Mapping[str, Tensor],
    key: str,
    dtype: torch.dtype,
    **arguments: object,
) -> PreTrainedModel:
    """Returns a model of transformers from its configuration, further `arguments` and exactly these weights.

    Raises DataError (4001) if names or shapes do not fit.
    """
    options = {"output_loading_info": True, "ignore_mismatched_sizes": True, **arguments}
    with quiet_libraries():
        model, info = cls.from_pretrained(None, config=config, state_dict=dict(weights), dtype=dtype, **options)
    wrong = {word: sorted(map(str, info[f"{word}_keys"])) for word in ("missing", "unexpected", "mismatched")}
    _refuse_wrong(wrong, cls.__name__, key)
    return model


def fill(module: nn.Module, weights: Mapping[str, Tensor], key: str) -> None:
    """Loads exactly these weights into a module. Raises DataError (4001) if names or shapes do not fit."""
    own = module.state_dict()
    wrong = {
        "missing": sorted(own.keys() - weights.keys()),
        "unexpected": sorted(weights.keys() - own.keys()),
        "mismatched": sorted(n for n in own.keys() & weights.keys() if own[n].shape != weights[n].shape),
    }
    _refuse_wrong(wrong, type(module).__name__, key)
    module.load_state_dict(weights)


def _refuse_wrong(wrong: Mapping[str, list[str]], name: str, key: str) -> None:
    reasons = [f"{len(names)} {word} ({', '.join(names[:3])}, ...)" for word, names in wrong.items() if names]
    if reasons:
        raise NotFoundError(
            f"{key}: the checkpoint does not fit {name}: {'; '.join(reasons)}. Give the published file of this model"
        )


def part(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Returns the weights whose names begin with `prefix`, with the prefix removed."""
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


def renamed(name: str, patterns: Mapping[str, str]) -> str:
    """Returns the name of a weight in transformers: every regular expression in the name is replaced."""
    for pattern, new in patterns.items():
        name = re.sub(pattern, new, name)
    return name


@contextmanager
def fixed_seed() -> Iterator[None]:
    """Gives networks that are built inside the same random weights every time. The global generator is restored."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
