"""Compares the weight files of a model directory with its networks, from file headers or with all values."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from unirl.config.errors import NotFoundError
from unirl.models.loading.completeness import (
    AGAIN,
    SavedTensor,
    check_dtypes,
    check_files,
    check_tensors,
    check_values,
    loading_info,
    read_headers,
)
from unirl.models.loading.hub import CONFIG, MODEL_INDEX, components, quiet_libraries, read_json
from unirl.models.loading.saved_weights import LANGUAGE_WEIGHTS, WEIGHTS

TRANSFORMERS = "transformers"
OWN_LAYOUT = "For BAGEL, HunyuanImage-3 and NextStep-1: unirl check RECIPE bundle.path={}, with a recipe of the family"
WHOLE_MODEL = "model"
"""The name in reports of a model that is not part of a pipeline."""


@dataclass(frozen=True)
class ComponentReport:
    """The tensors in the weight files of one network, compared with those of its class."""

    component: str
    class_name: str
    num_tensors: int
    num_bytes: int
    dtypes: tuple[str, ...]
    """The dtypes in the files, in the names of safetensors (`BF16`)."""
    unused: tuple[str, ...]
    """Tensors that the network does not have."""
    problem: str
    """Why the network cannot be loaded. Empty if it can."""


def inspect_model(root: Path, values: bool = False) -> list[ComponentReport]:
    """One report for each network in a directory in the layout of diffusers or transformers.

    Args:
        values: read the tensors too, and report those that are not finite.
    """
    with quiet_libraries():
        return [_inspect(name, folder, kind, values) for name, folder, kind in _networks(root)]


def _networks(root: Path) -> Iterator[tuple[str, Path, Any]]:
    """The name, the folder and the class of each network."""
    if (root / MODEL_INDEX).is_file():
        result = [(name, root / name, *place) for name, place in components(root).items()]
    elif (root / CONFIG).is_file():
        config = read_json(root / CONFIG)
        names = config.get("architectures") or []
        if not names or "auto_map" in config:  # the class of the latter is in a file of the model's own
            found = f"names {names[0]}, a class of the model's own code" if names else "names no class"
            raise NotFoundError(
                f"{root}: its {CONFIG} {found}, so {TRANSFORMERS} does not know the layout, and this command cannot "
                f"compare it. {OWN_LAYOUT.format(root)}"
            )
        result = [(WHOLE_MODEL, root, TRANSFORMERS, str(names[0]))]
    else:
        raise NotFoundError(
            f"{root} has neither {MODEL_INDEX} nor {CONFIG}: it is no model directory of diffusers or transformers. "
            f"Give the folder that `save_pretrained` wrote. {OWN_LAYOUT.format(root)}"
        )
    for name, folder, library, class_name in result:
        kind = getattr(importlib.import_module(library), class_name, None)
        if kind is None:
            raise NotFoundError(
                f"{root}: {library} has no class {class_name!r}, which its {name} needs. Install the version of "
                f"{library} that this model was made for"
            )
        if isinstance(kind, type) and issubclass(kind, nn.Module):
            yield name, folder, kind


def _inspect(component: str, folder: Path, kind: Any, values: bool) -> ComponentReport:
    place, is_diffusers = f"{component} in {folder}", not hasattr(kind, "config_class")
    file = WEIGHTS if is_diffusers else LANGUAGE_WEIGHTS
    saved: dict[str, SavedTensor] = {}
    info: Mapping[str, Any] = {"unexpected_keys": ()}
    problem = ""
    try:
        check_files(place, folder, file)
        saved = read_headers(place, folder, file)
        module, info = _empty(folder, kind, saved) if is_diffusers else _empty_of_transformers(folder, kind)
        check_dtypes(place, module, saved, info["unexpected_keys"])
        check_tensors(place, kind.__name__, info, may_have_more=component == "vae" or not is_diffusers)
        if values:
            check_values(place, _not_finite(folder, saved))
    except NotFoundError as error:
        problem = str(error)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        # The libraries raise these four for damaged files and for configurations that they cannot read.
        problem = f"{place}: {str(error).strip().splitlines()[0].rstrip('.')}. {AGAIN}"
    return ComponentReport(
        component=component,
        class_name=kind.__name__,
        num_tensors=len(saved),
        num_bytes=sum((folder / name).stat().st_size for name in {tensor.file for tensor in saved.values()}),
        dtypes=tuple(sorted({tensor.dtype for tensor in saved.values()})),
        unused=tuple(sorted(info["unexpected_keys"])),
        problem=problem,
    )


def _empty(folder: Path, kind: Any, saved: Mapping[str, SavedTensor]) -> tuple[nn.Module, Mapping[str, Any]]:
    """The network without storage, and the report of `from_pretrained` of diffusers, from the headers."""
    with torch.device("meta"):
        module: nn.Module = kind.from_config(read_json(folder / CONFIG))
    unused = kind._keys_to_ignore_on_load_unexpected or ()
    result = {name: t.shape for name, t in saved.items() if not any(re.search(word, name) for word in unused)}
    return module, loading_info(result, {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()})


def _empty_of_transformers(folder: Path, kind: Any) -> tuple[nn.Module, Mapping[str, Any]]:
    """The network without storage, and the report of `from_pretrained` of transformers, which knows older names."""
    options = {"use_safetensors": True, "local_files_only": True, "ignore_mismatched_sizes": True}
    module: nn.Module
    info: Mapping[str, Any]
    module, info = kind.from_pretrained(folder, device_map="meta", dtype="auto", output_loading_info=True, **options)
    return module, info


def _not_finite(folder: Path, saved: Mapping[str, SavedTensor]) -> list[str]:
    """The names of the tensors that have infinite values or values that are not a number. One is read at a time."""
    wrong: list[str] = []
    for file in sorted({tensor.file for tensor in saved.values()}):
        with safe_open(folder / file, "pt") as content:
            names = [name for name, tensor in saved.items() if tensor.file == file]
            wrong += [name for name in names if not torch.isfinite(content.get_tensor(name).float()).all()]
    return wrong
