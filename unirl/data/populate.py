"""Downloads public prompt sets from a hub and writes them as prompt files. None of them is shipped."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from unirl.config.errors import ArgumentError, DataError, NotFoundError, did_you_mean
from unirl.data.datasets import CONDITION, load_prompts
from unirl.data.images import check_images
from unirl.data.readers import parquet_rows
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
    prompt_of: Callable[[Row], str]
    metadata: Mapping[str, str]
    """Key in the prompt file to the column that it is read from."""
    images_of: Callable[[Row], Sequence[bytes]] = lambda row: ()
    """The image files inside a row, which are written beside the prompt files."""

    def line_of(self, row: Row) -> dict[str, object]:
        """The line of the prompt file. Raises KeyError for an absent column."""
        metadata = {key: row[name] for key, name in self.metadata.items()}
        return {"prompt": self.prompt_of(row), "metadata": metadata}


def _geometry(row: Row) -> str:
    problem = row["problem"].replace(IMAGE_MARK, "").strip()
    choices = "".join(f"\n{letter}. {choice}" for letter, choice in zip("ABCD", row["choices"], strict=True))
    return f"{problem}{choices}\n{LETTER}"


SETS: Mapping[str, PublicSet] = {
    "parti_prompts": PublicSet(
        repo="nateraw/parti-prompts",
        files={"test": "PartiPrompts.tsv"},
        about="1,632 prompts for images, by category and challenge",
        licence="Apache-2.0",
        prompt_of=lambda row: row["Prompt"],
        metadata={"category": "Category", "challenge": "Challenge"},
    ),
    "gsm8k": PublicSet(
        repo="openai/gsm8k",
        files={split: f"main/{split}-00000-of-00001.parquet" for split in ("train", "test")},
        about="8,792 word problems of school mathematics; for gsm8k_exact_match",
        licence="MIT",
        prompt_of=lambda row: f"{row['question']} {MARKED}",
        metadata={"answer": "answer"},
    ),
    "math_500": PublicSet(
        repo="HuggingFaceH4/MATH-500",
        files={"test": "test.jsonl"},
        about="500 competition problems; for math_boxed and math_verify",
        licence="MIT (the MATH data set)",
        prompt_of=lambda row: f"{row['problem']} {BOXED}",
        metadata={"answer": "answer", "subject": "subject", "level": "level"},
    ),
    "dapo_math": PublicSet(
        repo="open-r1/DAPO-Math-17k-Processed",
        files={"train": "en/train-00000-of-00001.parquet"},
        about="14,116 competition problems in English; for math_verify",
        licence="Apache-2.0 (DAPO-Math-17k)",
        prompt_of=lambda row: f"{row['prompt']} {BOXED}",
        metadata={"answer": "solution"},
    ),
    "aime_2024": PublicSet(
        repo="HuggingFaceH4/aime_2024",
        files={"test": "data/train-00000-of-00001.parquet"},
        about="30 problems of AIME 2024, which DAPO-Math recipes are evaluated on; for math_verify",
        licence="of the Mathematical Association of America",
        prompt_of=lambda row: f"{row['problem']} {BOXED}",
        metadata={"answer": "answer", "year": "year"},
    ),
    "geometry3k": PublicSet(
        repo="xyliu6/geometry3k",
        files={split: f"data/{split}-00000-of-00001.parquet" for split in ("train", "validation", "test")},
        about="3,002 geometry problems with a diagram and four choices; for mc_exact_match",
        licence="MIT (the Geometry3K data set)",
        prompt_of=_geometry,
        metadata={"answer": "ground_truth"},
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
        _write(target, _lines(public_set, source, folder / IMAGE_FOLDER, split))
    return list(targets.values())


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


def _lines(public_set: PublicSet, source: Path, images: Path, split: str) -> Iterator[str]:
    """The lines of a prompt file, whose images are written to the folder `images`."""
    image_numbers = count()
    for number, row in enumerate(READERS[source.suffix](source), start=1):
        try:
            line = public_set.line_of(row)
            contents = public_set.images_of(row)
        except KeyError as error:
            raise DataError(
                f"{public_set.repo}: row {number} of {source.name} has no key {error} (keys: {sorted(row)}): the "
                "format of the set has changed since this version of unirl. Give an older --revision"
            ) from error
        refs = [_write_image(images, f"{split}-{next(image_numbers):05d}", content) for content in contents]
        yield json.dumps(line | ({"media_refs": refs} if refs else {}), ensure_ascii=False) + "\n"


def _write_image(folder: Path, stem: str, content: bytes) -> dict[str, str]:
    """Writes an image file and returns its media reference."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{stem}{'.png' if content.startswith(PNG) else '.jpg'}"
    (folder / name).write_bytes(content)
    return {"modality": "image", "role": CONDITION, "uri": f"{folder.name}/{name}"}


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


READERS: Mapping[str, Callable[[Path], Iterator[Row]]] = {".jsonl": _jsonl, ".tsv": _tsv, ".parquet": parquet_rows}
