"""Finds the files of a checkpoint, locally or on the hub, and silences libraries while they load them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from unirl.config.errors import DataError, NotFoundError

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
MODEL_INDEX = "model_index.json"
CONFIG = "config.json"
_UNUSED_WEIGHTS = ("*.fp16*", "*.bin", "*.msgpack", "*.onnx", "*.ckpt")


def model_directory(path: str, revision: str | None, *, configs_only: bool = False) -> Path:
    """A directory in the diffusers layout for `path`: that directory itself, or the hub repository's files.

    Only the components that model_index.json names are fetched; `configs_only` leaves their weights out.
    Raises NotFoundError if there is no such model, or if the hub cannot be reached.
    """
    local = Path(path).expanduser()
    if local.is_dir():
        return _with_index(local)
    if not HUB_ID.fullmatch(path):
        raise NotFoundError(
            f"bundle.path={path!r}: no such directory. Give a directory in the diffusers layout, a hub id such as "
            "stabilityai/stable-diffusion-3.5-medium, or toy"
        )
    root = _fetch(path, revision, [MODEL_INDEX])
    patterns = [MODEL_INDEX]
    for name in components(root):
        patterns += [f"{name}/*.json"] if configs_only else [f"{name}/*"]
    return _with_index(_fetch(path, revision, patterns))


def language_directory(path: str, revision: str | None, *, configs_only: bool = False) -> Path:
    """A directory in the layout of transformers for `path`: that directory itself, or the files of the hub.

    `configs_only` leaves the weights out. Raises NotFoundError if there is no such model.
    """
    local = Path(path).expanduser()
    if local.is_dir():
        root = local
    elif HUB_ID.fullmatch(path):
        patterns = ["*.json", "*.jinja", "*.txt"]
        root = _fetch(path, revision, patterns if configs_only else [*patterns, "*.safetensors"])
    else:
        raise NotFoundError(
            f"bundle.path={path!r}: no such directory. Give a directory that `model.save_pretrained` wrote, a hub id "
            "such as Qwen/Qwen3-4B-Base, or toy"
        )
    if not (root / CONFIG).is_file():
        raise NotFoundError(
            f"bundle.path={str(root)!r} has no {CONFIG}: it is not a model directory of transformers. Give the folder "
            "that `model.save_pretrained` and `tokenizer.save_pretrained` wrote"
        )
    return root


def components(root: Path) -> dict[str, tuple[str, str]]:
    """The components in a model directory: name to (library, class), without absent ones."""
    index = read_json(root / MODEL_INDEX)
    pairs = {name: value for name, value in index.items() if not name.startswith("_") and isinstance(value, list)}
    return {name: (str(value[0]), str(value[1])) for name, value in pairs.items() if value[0] is not None}


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a model. Raises NotFoundError if the file is missing or damaged."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise NotFoundError(f"{path} is missing: the model directory is incomplete. Download it again") from None
    except json.JSONDecodeError as error:
        raise NotFoundError(f"{path}:{error.lineno}: not JSON ({error.msg}). Download it again") from None
    if not isinstance(value, dict):
        raise NotFoundError(f"{path} holds a {type(value).__name__}, not an object. Download it again")
    return value


def _with_index(root: Path) -> Path:
    if not (root / MODEL_INDEX).is_file():
        raise NotFoundError(
            f"bundle.path={str(root)!r} has no {MODEL_INDEX}: it is not a diffusers model directory. Give the folder "
            "that `pipeline.save_pretrained` wrote"
        )
    return root


def _fetch(repo: str, revision: str | None, patterns: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        folder = snapshot_download(
            repo, revision=revision, allow_patterns=list(patterns), ignore_patterns=list(_UNUSED_WEIGHTS)
        )
    except GatedRepoError:
        raise _unreachable(
            repo, f"is gated. Accept its licence at https://huggingface.co/{repo}, then run `hf auth login`"
        ) from None
    except RepositoryNotFoundError:
        raise _unreachable(
            repo, "is not on the hub, or is private. Check the spelling; for a private one run `hf auth login`"
        ) from None
    except RevisionNotFoundError:
        raise _unreachable(repo, f"has no revision {revision!r}. Set bundle.revision to one that exists") from None
    except (LocalEntryNotFoundError, HfHubHTTPError, ConnectionError) as error:
        raise _unreachable(
            repo,
            f"is not in the local cache and the hub cannot be reached ({type(error).__name__}). Connect, or set "
            "PRETRAINED_MODEL (bundle.path) to a local directory, or try the recipe with scale=toy",
        ) from None
    return Path(folder)


def _unreachable(repo: str, why: str) -> DataError:
    return NotFoundError(f"model {repo!r} {why}")


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """In this context, diffusers and transformers show no progress bars and log only errors."""
    import diffusers.utils.logging as of_diffusers
    import transformers.utils.logging as of_transformers

    libraries = (of_diffusers, of_transformers)
    before = [(library, library.get_verbosity(), library.is_progress_bar_enabled()) for library in libraries]
    for library in libraries:
        library.set_verbosity_error()
        library.disable_progress_bar()
    try:
        yield
    finally:
        for library, verbosity, bars in before:
            library.set_verbosity(verbosity)
            if bars:
                library.enable_progress_bar()
