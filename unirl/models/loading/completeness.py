"""Refuses weights that are not exactly the tensors of their network, and says what to do."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor, nn

from unirl.config.errors import NotFoundError

AGAIN = "Download the model again"
QUANTIZED = "The weights are quantized. Use a checkpoint in bf16, fp16 or fp32"
NAMED = 20
"""An error names so many tensors or files, and counts the others."""
CONVERT = "Load the model with its own library, and give the directory that its `save_pretrained` writes"


_INTEGER = re.compile(r"[IU]\d+|BOOL")
"""The names of safetensors for dtypes without fractions."""


@dataclass(frozen=True)
class SavedTensor:
    """One tensor in the header of a weight file."""

    file: str
    dtype: str
    shape: tuple[int, ...]


def check_files(place: str, folder: Path, file: str) -> None:
    """Raises NotFoundError unless `folder` has the weight file `file`, or all the files that its index lists.

    Args:
        place: the component and its directory, for the error.
    """
    listed = sorted(set(weight_files(folder, file).values()))
    absent = [name for name in listed if not (folder / name).is_file()]
    if absent:
        raise NotFoundError(
            f"{place}: {len(absent)} of the {len(listed)} weight files that {file}.index.json lists are missing: "
            f"{listed_names(absent)}. {AGAIN}"
        )
    if not listed and not (folder / file).is_file():
        raise NotFoundError(f"{place}: there is no {file}{_instead(folder, file)}")


def weight_files(folder: Path, file: str) -> dict[str, str]:
    """The file of each tensor by the index of the weight file `file`, or nothing if there is no index."""
    index = folder / f"{file}.index.json"
    try:
        return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"]) if index.is_file() else {}
    except (KeyError, TypeError, ValueError) as error:
        raise NotFoundError(f"cannot read {index}: {error}. {AGAIN}") from error


def _instead(folder: Path, file: str) -> str:
    """The weight files that a folder has in place of `file`, and what to do."""
    stem = file.removesuffix(".safetensors")
    others = sorted(path.name for path in folder.glob("*") if path.suffix in (".safetensors", ".bin", ".ckpt", ".pt"))
    variants = {name.removeprefix(f"{stem}.").split(".")[0].split("-")[0] for name in others if name.startswith(stem)}
    variants -= {"safetensors", "bin"}
    if variants:
        variant = sorted(variants)[0]
        return (
            f", only the variant {variant!r} ({listed_names(others)}). Use the full weights of the repository. If it "
            f"has none, load the model with variant={variant!r} in its own library, and give the directory that its "
            "`save_pretrained` writes"
        )
    if others:
        return f", only {listed_names(others)}. {CONVERT}"
    return f". {AGAIN}"


def read_headers(place: str, folder: Path, file: str) -> dict[str, SavedTensor]:
    """The tensors in the weight files. Raises NotFoundError if one stands in two files, or in another than listed."""
    saved: dict[str, SavedTensor] = {}
    listed = weight_files(folder, file)
    for name in sorted(set(listed.values())) or [file]:
        with safe_open(folder / name, "pt") as content:
            for key in content.keys():  # noqa: SIM118 (no mapping)
                if key in saved or listed.get(key, name) != name:
                    other = saved[key].file if key in saved else listed[key]
                    raise NotFoundError(f"{place}: {key} is in {name} and belongs to {other}. {AGAIN}")
                view = content.get_slice(key)
                saved[key] = SavedTensor(name, view.get_dtype(), tuple(view.get_shape()))
    return saved


def check_tensors(place: str, class_name: str, info: Mapping[str, Any], *, may_have_more: bool) -> None:
    """Raises NotFoundError if tensors are missing or have another shape, or if the files have tensors of no use.

    Args:
        info: what `from_pretrained(output_loading_info=True)` reports.
        may_have_more: ignore tensors that the network does not have, such as the decoder of an encoder's model.
    """
    another = "The files belong to another model, or its configuration was edited"
    mismatched = sorted(str(entry) if isinstance(entry, str) else str(entry[0]) for entry in info["mismatched_keys"])
    _refuse(place, f"have another shape than in {class_name}", mismatched, f"{another}. {AGAIN}")
    _refuse(place, f"of {class_name} are missing", info["missing_keys"], f"{AGAIN}, or use a complete checkpoint")
    if not may_have_more:
        _refuse(
            place,
            f"do not belong to {class_name}",
            info["unexpected_keys"],
            f"{another}. If they are adapters, merge them before saving",
        )


def loading_info(saved: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]) -> dict[str, list[str]]:
    """The report that `check_tensors` reads, from shapes by name in the files and in the network."""
    return {
        "missing_keys": [name for name in expected if name not in saved],
        "unexpected_keys": [name for name in saved if name not in expected],
        "mismatched_keys": [name for name in expected if saved.get(name, expected[name]) != expected[name]],
    }


def replace_tensors(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Load `tensors` in place of those of `module`. Raises ValueError for a name that the module does not have."""
    unexpected = module.load_state_dict(dict(tensors), strict=False).unexpected_keys
    if unexpected:
        raise ValueError(
            f"{type(module).__name__} has no parameter {unexpected[0]!r} ({len(unexpected)} unknown names)"
        )


def check_dtypes(place: str, module: nn.Module, saved: Mapping[str, SavedTensor], unused: Collection[str]) -> None:
    """Raises NotFoundError if parameters of `module` are integers in the files. Libraries would read them as weights.

    Buffers such as `position_ids` may be integers. Files may have older names, so a buffer is known by the last part
    of its name.

    Args:
        unused: tensors in the files that the network does not have.
    """
    buffers = {name.split(".")[-1] for name, buffer in module.named_buffers() if not buffer.is_floating_point()}
    _refuse(
        place,
        f"of {type(module).__name__} are integers in the files, where the network has floating-point numbers",
        [
            f"{name} ({tensor.dtype})"
            for name, tensor in saved.items()
            if _INTEGER.fullmatch(tensor.dtype) and name not in unused and name.split(".")[-1] not in buffers
        ],
        QUANTIZED,
    )


def check_values(place: str, not_finite: Iterable[str]) -> None:
    """Raises NotFoundError if there are tensors with infinite values or values that are not a number."""
    _refuse(place, "have values that are infinite or not a number", not_finite, f"{AGAIN}, or use another checkpoint")


def _refuse(place: str, problem: str, names: Iterable[str], way_out: str) -> None:
    wrong = sorted(names)
    if wrong:
        raise NotFoundError(f"{place}: tensors {problem} ({len(wrong)}): {listed_names(wrong)}. {way_out}")


def listed_names(names: Collection[str]) -> str:
    """The first `NAMED` names, and the number of the others: `a, b and 3 more`."""
    first = ", ".join(list(names)[:NAMED])
    return first + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
