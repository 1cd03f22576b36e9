"""Finds the files of a checkpoint, locally or on the hub, and silences libraries while they load them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from unirl.config.errors import NotFoundError
from unirl.types.progress import progress

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
ModelSource = Annotated[str, "a hub id, or a local file or directory"]
"""Annotation of a recipe key that names a model. `look_up` asks for such models before a run loads anything."""
DEADLINE_S = 10.0
"""Seconds that the hub may take to answer the first request of a process."""
MODEL_INDEX = "model_index.json"
CONFIG = "config.json"
_LANGUAGE_TEXTS = ("*.json", "*.jinja", "*.txt")
_UNUSED_WEIGHTS = ("*.fp16*", "*.bin", "*.msgpack", "*.onnx", "*.ckpt")


def model_directory(path: str, revision: str | None, *, configs_only: bool = False) -> Path:
    """A directory in the diffusers layout for `path`: that directory itself, or the hub repository's files.

    Only the components that model_index.json names are fetched; `configs_only` leaves their weights out.
    Raises NotFoundError if there is no such model, or if the hub cannot be reached.
    """
    root = _local(path, "a directory in the diffusers layout, a hub id such as stabilityai/stable-diffusion-3.5-medium")
    if root is None:
        root = _fetch(path, revision, *_pipeline_patterns(path, revision, configs_only))
    if not (root / MODEL_INDEX).is_file():
        raise NotFoundError(
            f"bundle.path={str(root)!r} has no {MODEL_INDEX}: it is not a diffusers model directory. Give the folder "
            "that `pipeline.save_pretrained` wrote"
        )
    return root


def language_directory(path: str, revision: str | None, *, configs_only: bool = False) -> Path:
    """A directory in the layout of transformers for `path`: that directory itself, or the files of the hub.

    `configs_only` leaves the weights out. Raises NotFoundError if there is no such model.
    """
    root = _local(path, "a directory that `model.save_pretrained` wrote, a hub id such as Qwen/Qwen3-4B-Base")
    if root is None:
        root = _fetch(path, revision, *(_LANGUAGE_TEXTS if configs_only else (*_LANGUAGE_TEXTS, "*.safetensors")))
    if not (root / CONFIG).is_file():
        raise NotFoundError(
            f"bundle.path={str(root)!r} has no {CONFIG}: it is not a model directory of transformers. Give the folder "
            "that `model.save_pretrained` and `tokenizer.save_pretrained` wrote"
        )
    return root


def single_folder(path: str, revision: str | None, config: str, examples: str, configs_only: bool = False) -> Path:
    """A folder that has all files of a model side by side: `path` itself, or the files of the hub.

    `configs_only` leaves the weights out. Raises NotFoundError if there is no such model.

    Args:
        config: the file by which the folder is known.
        examples: what the path may be, for the error.
    """
    root = _local(path, examples)
    if root is None:
        root = _fetch(path, revision, *(_LANGUAGE_TEXTS if configs_only else (*_LANGUAGE_TEXTS, "*.safetensors")))
    if not (root / config).is_file():
        raise NotFoundError(f"bundle.path={str(root)!r} has no {config}. Give {examples}")
    return root


def files_to_fetch(repo: str, revision: str | None) -> dict[str, int]:
    """The sizes in bytes of the files of a hub repository that a run reads, by name."""
    if not HUB_ID.fullmatch(repo):
        raise NotFoundError(f"{repo!r} is no hub id. Give one such as Qwen/Qwen-Image")
    from huggingface_hub import HfApi
    from huggingface_hub.utils import filter_repo_objects

    _refuse_without_hub({"bundle.path": repo})
    with _hub_errors(repo, revision):
        info = HfApi().model_info(repo, revision=revision, files_metadata=True, timeout=DEADLINE_S)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    is_pipeline = MODEL_INDEX in sizes
    patterns = _pipeline_patterns(repo, revision) if is_pipeline else (*_LANGUAGE_TEXTS, "*.safetensors")
    return {
        name: sizes[name]
        for name in filter_repo_objects(sizes, allow_patterns=list(patterns), ignore_patterns=list(_UNUSED_WEIGHTS))
    }


def _pipeline_patterns(repo: str, revision: str | None, configs_only: bool = False) -> list[str]:
    """Patterns of the names of the files of the components that a repository's model_index.json names."""
    named = components(_fetch(repo, revision, MODEL_INDEX))
    return [MODEL_INDEX, *(f"{name}/*.json" if configs_only else f"{name}/*" for name in named)]


def _local(path: str, examples: str) -> Path | None:
    """The directory `path`, or None for a hub id. Raises NotFoundError for any other text."""
    local = Path(path).expanduser()
    if local.is_dir():
        return local
    if local.is_file():
        raise NotFoundError(
            f"bundle.path={path!r} is a single file, without configurations and tokenizers. Convert it: load it "
            "with `from_single_file` of its pipeline in diffusers, and give the directory that `save_pretrained` writes"
        )
    if not HUB_ID.fullmatch(path):
        raise NotFoundError(f"bundle.path={path!r}: no such directory. Give {examples}, or toy")
    return None


def components(root: Path) -> dict[str, tuple[str, str]]:
    """The components in a model directory: name to (library, class), without absent ones."""
    index = read_json(root / MODEL_INDEX)
    pairs = {name: value for name, value in index.items() if not name.startswith("_") and isinstance(value, list)}
    return {name: (str(value[0]), str(value[1])) for name, value in pairs.items() if value[0] is not None}


def copy_files(source: Path, folder: Path, names: Iterable[str]) -> None:
    """Copy the files of these names into `folder`. A file that `source` does not have is left out."""
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


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


@cache
def _fetch(repo: str, revision: str | None, *patterns: str) -> Path:
    """The local copy of a repository's files. A process asks the hub once for the same files."""
    from huggingface_hub import snapshot_download

    progress(f"download of {repo}")
    with _hub_errors(repo, revision):
        return Path(
            snapshot_download(
                repo,
                revision=revision,
                allow_patterns=list(patterns),
                ignore_patterns=list(_UNUSED_WEIGHTS),
                local_files_only=unreachable() is not None,
            )
        )


def unreachable() -> str | None:
    """Why the hub cannot be asked. None if it answers. A process asks only once, and waits DEADLINE_S at most.

    Libraries ask for each file and try again, so that an outage takes them minutes. Without the hub they must be told
    to read the local cache only.
    """
    from huggingface_hub import constants

    return "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _outage(constants.ENDPOINT)


@cache
def _outage(endpoint: str) -> str | None:
    from httpx2 import TransportError
    from huggingface_hub import get_session

    try:
        status = get_session().head(endpoint, timeout=DEADLINE_S).status_code
    except (TransportError, OSError) as error:
        return f"{endpoint}: {type(error).__name__}"
    return f"{endpoint} answers {status}" if status >= 500 else None


def only_from_cache(path: str) -> bool:
    """True for a hub id if the hub cannot be reached, so that a library must not ask it."""
    return not Path(path).expanduser().exists() and unreachable() is not None


def look_up(models: Mapping[str, str]) -> None:
    """Refuses models that are neither on this machine nor on the hub, before anything is loaded.

    Nothing is downloaded, and a model of which the cache has any files is not asked for.

    Args:
        models: key of the recipe to the hub id or the path that it names.

    Raises:
        NotFoundError: 4001.
    """
    from huggingface_hub import HfApi

    wanted = {key: path for key, path in models.items() if HUB_ID.fullmatch(path) and not _is_here(path)}
    if not wanted:
        return
    _refuse_without_hub(wanted)
    for key, path in wanted.items():
        with _hub_errors(path, None, key):
            HfApi().model_info(path, timeout=DEADLINE_S)


def _is_here(path: str) -> bool:
    """True if the path exists, or if the cache has a snapshot of this hub id."""
    from huggingface_hub import constants

    snapshots = Path(constants.HF_HUB_CACHE) / f"models--{path.replace('/', '--')}" / "snapshots"
    return Path(path).expanduser().exists() or (snapshots.is_dir() and any(snapshots.iterdir()))


def _refuse_without_hub(models: Mapping[str, str]) -> None:
    """Refuses models by key (4001) if the hub cannot be reached."""
    why = unreachable()
    if why is not None:
        shown = ", ".join(f"{key}={path!r}" for key, path in models.items())
        raise NotFoundError(
            f"{shown}: not in the local cache, and the hub cannot be reached ({why}). Connect, or name local "
            "directories, or try the recipe with scale=toy"
        )


@contextmanager
def _hub_errors(repo: str, revision: str | None, key: str = "bundle.path") -> Iterator[None]:
    """In this context, errors of the hub become a NotFoundError that says what to do.

    Args:
        key: the key of the recipe that names the repository.
    """
    from httpx2 import TransportError
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
        return
    except GatedRepoError:
        why = f"is gated. Accept its licence at https://huggingface.co/{repo}, then run `hf auth login`"
    except RepositoryNotFoundError:
        why = "is not on the hub, or is private. Check the spelling; for a private one run `hf auth login`"
    except HFValidationError:
        why = f"is neither a directory here nor a hub id. Set {key} to one of them"
    except RevisionNotFoundError:
        why = f"has no revision {revision!r}. Set bundle.revision to one that exists"
    except (LocalEntryNotFoundError, HfHubHTTPError, ConnectionError, TransportError) as error:
        why = (
            f"is not in the local cache and the hub cannot be reached ({unreachable() or type(error).__name__}). "
            f"Connect, or set {key} to a local directory, or try the recipe with scale=toy"
        )
    raise NotFoundError(f"model {repo!r} {why}")


@contextmanager
def quiet_downloads() -> Iterator[None]:
    """In this context, downloads show no bars, which a live display would print as a line for each refresh."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    shows_bars = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if shows_bars:
            enable_progress_bars()


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
