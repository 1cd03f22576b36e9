"""Pictures that prompts are about: opened before the run, so that none fails in the middle of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from unirl.config.errors import DataError
from unirl.data.datasets import Prompt
from unirl.data.schema import REMOTE_SCHEMES
from unirl.models.pictures import parts_of, read_picture
from unirl.types.primitives import MediaRef


def check_images(prompts: Sequence[Prompt]) -> None:
    """Raises DataError for the first prompt whose pictures cannot be read, naming prompt, file and rule."""
    for problem in image_problems(prompts):
        raise problem


def image_problems(prompts: Sequence[Prompt]) -> Iterator[DataError]:
    """What is wrong with the pictures of prompts; each file is opened once."""
    files = list(dict.fromkeys(ref.uri for prompt in prompts for ref in prompt.images))
    with ThreadPoolExecutor() as threads:  # decoders of picture files leave Python's lock
        found = dict(zip(files, threads.map(_problem, files), strict=True))
    for prompt in prompts:
        why = next((found[ref.uri] for ref in prompt.images if found[ref.uri]), None) or _misplaced(prompt)
        if why is not None:
            yield DataError(f"{prompt.origin}: prompt {prompt.prompt_id!r}: {why}", why.code)


def _problem(uri: str) -> DataError | None:
    if uri.split(":", 1)[0].lower() in REMOTE_SCHEMES:
        return DataError(f"picture {uri} is elsewhere; pictures of prompts are files of this machine, fetch it", 4003)
    try:
        read_picture(uri)
    except DataError as error:
        return error
    return None


def _misplaced(prompt: Prompt) -> DataError | None:
    try:
        parts_of(prompt.text, len(prompt.images))
    except ValueError as error:
        return DataError(str(error))
    return None


def digest_of(ref: MediaRef) -> str:
    """What a picture shows, in 32 letters: the same wherever the file lies. An address stands for what is there."""
    try:
        with open(ref.uri, "rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    except OSError:
        return f"unread {ref.uri}"
