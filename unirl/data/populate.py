"""Downloads public prompt sets from a hub and writes them as prompt files. None of them is shipped."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unirl.config.dependencies import need
from unirl.config.errors import ArgumentError, DataError, NotFoundError, did_you_mean
from unirl.data.datasets import load_prompts
from unirl.data.images import check_images
from unirl.data.schema import CONDITION
from unirl.models.images import IMAGE_MARK

Row = Mapping[str, Any]
PNG = b"\x89PNG"
BOXED = r"Put the final answer in \boxed{}."
LETTER = "Answer with the letter."
IMAGE_FOLDER = "pictures"
MARKED = "End with #### and the answer as a number."


@dataclass(frozen=True)
class PublicSet:
    """Where a set is published, and how its rows are converted to lines of a prompt file."""

    repo: str
    files: Mapping[str, str]
    """Name of a split to its file in the repository."""
    about: str
    licence: str
    line_of: Callable[[Row], dict[str, Any]]
    images_of: Callable[[Row], Sequence[bytes]] = lambda row: ()
    """The image files inside a row, which are written beside the prompt files."""


def _parti(row: Row) -> dict[str, Any]:
    return {"prompt": row["Prompt"], "metadata": {"category": row["Category"], "challenge": row["Challenge"]}}


def _math(row: Row) -> dict[str, Any]:
    metadata = {"answer": row["answer"], "subject": row["subject"], "level": row["level"]}
    return {"prompt": f"{row['problem']} {BOXED}", "metadata": metadata}


def _gsm8k(row: Row) -> dict[str, Any]:
    return {"prompt": f"{row['question']} {MARKED}", "metadata": {"answer": row["answer"]}}


def _dapo(row: Row) -> dict[str, Any]:
    return {"prompt": f"{row['prompt']} {BOXED}", "metadata": {"answer": row["solution"]}}


def _aime(row: Row) -> dict[str, Any]:
    return {"prompt": f"{row['problem']} {BOXED}", "metadata": {"answer": row["answer"], "year": row["year"]}}


def _geometry(row: Row) -> dict[str, Any]:
    problem = row["problem"].replace(IMAGE_MARK, "").strip()
    choices = "".join(f"\n{letter}. {choice}" for letter, choice in zip("ABCD", row["choices"], strict=True))
    return {"prompt": f"{problem}{choices}\n{LETTER}", "metadata": {"answer": row["ground_truth"]}}


SETS: Mapping[str, PublicSet] = {
    "parti_prompts": PublicSet(
        repo="nateraw/parti-prompts",
        files={"test": "PartiPrompts.tsv"},
        about="1,632 prompts for images, by category and challenge",
        licence="Apache-2.0",
        line_of=_parti,
    ),
    "gsm8k": PublicSet(
        repo="openai/gsm8k",
        files={split: f"main/{split}-00000-of-00001.parquet" for split in ("train", "test")},
        about="8,792 word problems of school mathematics; for gsm8k_exact_match",
        licence="MIT",
        line_of=_gsm8k,
    ),
    "math_500": PublicSet(
        repo="HuggingFaceH4/MATH-500",
        files={"test": "test.jsonl"},
        about="500 competition problems; for math_boxed and math_verify",
        licence="MIT (the MATH data set)",
        line_of=_math,
    ),
    "dapo_math": PublicSet(
        repo="open-r1/DAPO-Math-17k-Processed",
        files={"train": "en/train-00000-of-00001.parquet"},
        about="14,116 competition problems in English; for math_verify",
        licence="Apache-2.0 (DAPO-Math-17k)",
        line_of=_dapo,
    ),
    "aime_2024": PublicSet(
        repo="HuggingFaceH4/aime_2024",
        files={"test": "data/train-00000-of-00001.parquet"},
        about="30 problems of AIME 2024, which DAPO-Math recipes are evaluated on; for math_verify",
        licence="of the Mathematical Association of America",
        line_of=_aime,
    ),
    "geometry3k": PublicSet(
        repo="xyliu6/geometry3k",
        files={split: f"data/{split}-00000-of-00001.parquet" for split in ("train", "validation", "test")},
        about="3,002 geometry problems with a diagram and four choices; for mc_exact_match",
        licence="MIT (the Geometry3K data set)",
        line_of=_geometry,
        images_of=lambda row: [image["bytes"] for image in row["images"]],
    ),
}


def find_set(name: str) -> PublicSet:
    """The set called `name`. Raises ArgumentError, which lists all names."""
    if name not in SETS:
        raise ArgumentError(f"no public set {name!r}.{did_you_mean(name, SETS)} The sets are {', '.join(SETS)}")
    return SETS[name]


def populate(
    name: str, folder: Path, *, endpoint: str | None = None, revision: str | None = None, overwrite: bool = False
) -> list[Path]:
    """Writes `folder`/{split}.jsonl for each split, checks the files, and returns their paths.

    Args:
        endpoint: address of a hub or a mirror; None = HF_ENDPOINT, otherwise the public hub.
        revision: commit, branch or tag of the repository; None = the newest state.

    Raises:
        NotFoundError: a file cannot be downloaded (4001).
        DataError: a file has another form than expected (4002).
        ArgumentError: the set is unknown, or a file exists (2002).
    """
    public_set = find_set(name)
    targets = {split: folder / f"{split}.jsonl" for split in public_set.files}
    for target in targets.values():
        if target.exists() and not overwrite:
            raise ArgumentError(f"{target} exists already. Add --overwrite to replace it, or give another --out")
    for split, target in targets.items():
        source = _fetch(public_set, split, endpoint, revision)
        _write(target, _lines(public_set, source, ImageFolder(folder / IMAGE_FOLDER, split)))
    return list(targets.values())


@dataclass
class ImageFolder:
    """Writes the image files of one split."""

    folder: Path
    split: str
    written: int = 0

    def write(self, contents: Sequence[bytes]) -> list[dict[str, str]]:
        """Writes each image as a file and returns the media references of the line."""
        refs = []
        for content in contents:
            self.folder.mkdir(parents=True, exist_ok=True)
            name = f"{self.split}-{self.written:05d}{'.png' if content.startswith(PNG) else '.jpg'}"
            (self.folder / name).write_bytes(content)
            refs.append({"modality": "image", "role": CONDITION, "uri": f"{self.folder.name}/{name}"})
            self.written += 1
        return refs


def _fetch(public_set: PublicSet, split: str, endpoint: str | None, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

    file = public_set.files[split]
    try:
        return Path(hf_hub_download(public_set.repo, file, repo_type="dataset", endpoint=endpoint, revision=revision))
    except (EntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise NotFoundError(
            f"{public_set.repo}: {file} cannot be downloaded ({type(error).__name__}: {str(error).splitlines()[0]}). "
            "Connect to the network, or name a mirror with --endpoint URL or HF_ENDPOINT"
        ) from error


def _lines(public_set: PublicSet, source: Path, images: ImageFolder) -> Iterator[str]:
    for number, row in enumerate(READERS[source.suffix](source), start=1):
        try:
            line = public_set.line_of(row)
            refs = images.write(public_set.images_of(row))
        except KeyError as error:
            raise DataError(
                f"{public_set.repo}: row {number} of {source.name} has no key {error} (keys: {sorted(row)}): the "
                "format of the set has changed since this version of unirl. Give an older --revision"
            ) from error
        yield json.dumps(line | ({"media_refs": refs} if refs else {}), ensure_ascii=False) + "\n"


def _write(target: Path, lines: Iterable[str]) -> None:
    """Writes all lines or nothing, and checks that the file can be read as prompts."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}")
    try:
        with part.open("w", encoding="utf-8") as file:
            file.writelines(lines)
        check_images(load_prompts(part))
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


def _jsonl(source: Path) -> Iterator[Row]:
    with source.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def _tsv(source: Path) -> Iterator[Row]:
    with source.open(encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file, delimiter="\t")


def _parquet(source: Path) -> Iterator[Row]:
    need("pyarrow", extra="data", by="a parquet file")
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(source) as file:
        for batch in file.iter_batches():
            yield from batch.to_pylist()


READERS: Mapping[str, Callable[[Path], Iterator[Row]]] = {".jsonl": _jsonl, ".tsv": _tsv, ".parquet": _parquet}
