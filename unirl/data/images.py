"""Pictures that prompts are about: opened before the run, so that none fails in the middle of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from unirl.config.errors import DataError
from unirl.data.datasets import Prompt
from unirl.data.schema import CONDITION, MEDIA_FORM
from unirl.models.images import read_image, split_at_images
from unirl.models.loading.remote_files import fetch, is_remote
from unirl.types.facts import ModelFacts

OPENED_AT_ONCE = 16
"""Pictures; more than there are cores, since those that lie elsewhere are waited for."""


@dataclass(frozen=True)
class Look:
    """What is known of a picture that was opened."""

    height: int
    """Pixels, the right way up."""
    width: int
    digest: str
    """What the file holds."""


Looks = Mapping[str, Look]
"""By path or address."""


def check_images(prompts: Sequence[Prompt]) -> Looks:
    """All pictures that prompts are about. Raises DataError for the first prompt with one that cannot be read."""
    found = _opened(prompts)
    for problem in _problems(prompts, found):
        raise problem
    return {uri: look for uri, look in found.items() if isinstance(look, Look)}


def image_problems(prompts: Sequence[Prompt]) -> Iterator[DataError]:
    """What is wrong with the pictures of prompts, naming prompt, file and rule; each file is opened once."""
    return _problems(prompts, _opened(prompts))


def check_counts(prompts: Sequence[Prompt], facts: ModelFacts) -> None:
    """Raises DataError for the first prompt that brings fewer or more pictures than a model takes."""
    for problem in count_problems(prompts, facts):
        raise problem


def count_problems(prompts: Sequence[Prompt], facts: ModelFacts) -> Iterator[DataError]:
    """The prompts whose number of pictures a model does not take, naming prompt, line, model and the way out."""
    fewest, most = facts.images_per_prompt()
    for prompt in prompts:
        count = len(prompt.images)
        if count < fewest or (most is not None and count > most):
            where = f"{prompt.origin}: " if prompt.origin else ""
            yield DataError(
                f"{where}prompt {prompt.prompt_id!r} brings {_pictures(count)} of role {CONDITION!r}, and "
                f"{facts.family} {_taken(fewest, most)}. {_way_out(count, fewest, most)}"
            )


def _taken(fewest: int, most: int | None) -> str:
    if most == 0:
        return "is conditioned on text alone"
    if most is None:
        return f"takes {fewest} or more a prompt"
    return f"takes {_pictures(most)} a prompt" if fewest == most else f"takes {fewest} to {most} a prompt"


def _way_out(count: int, fewest: int, most: int | None) -> str:
    if most == 0:
        return "Remove media_refs from the data file, or use a model that takes pictures (for editing, for videos)"
    if count < fewest:
        return (
            f'Add "media_refs": [{MEDIA_FORM}] to its entry of the data file, or use a model that draws from text alone'
        )
    return f"Remove {count - (most or 0)} from its media_refs"


def _pictures(count: int) -> str:
    return f"{count or 'no'} picture{'' if count == 1 else 's'}"


def _opened(prompts: Sequence[Prompt]) -> Mapping[str, Look | DataError]:
    """Every picture of prompts, or why it cannot be read."""
    files = list(dict.fromkeys(ref.uri for prompt in prompts for ref in prompt.images))
    with ThreadPoolExecutor(OPENED_AT_ONCE) as threads:  # decoders of picture files leave Python's lock
        return dict(zip(files, threads.map(_looked, files), strict=True))


def _looked(uri: str) -> Look | DataError:
    try:
        return look_at(uri)
    except DataError as error:
        return error


def look_at(uri: str) -> Look:
    """What is known of the picture at a path or an address. Raises DataError (4003)."""
    width, height = read_image(uri).size
    return Look(height, width, digest_of(uri))


def digest_of(uri: str) -> str:
    """What a file holds, in 32 letters: the same wherever it lies."""
    if is_remote(uri):
        return hashlib.blake2b(fetch(uri), digest_size=16).hexdigest()
    with open(uri, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _problems(prompts: Sequence[Prompt], found: Mapping[str, Look | DataError]) -> Iterator[DataError]:
    for prompt in prompts:
        looks = [found[ref.uri] for ref in prompt.images]
        why = next((look for look in looks if isinstance(look, DataError)), None) or _misplaced(prompt)
        if why is not None:
            yield type(why)(f"{prompt.origin}: prompt {prompt.prompt_id!r}: {why}")


def _misplaced(prompt: Prompt) -> DataError | None:
    try:
        split_at_images(prompt.text, len(prompt.images))
    except ValueError as error:
        return DataError(str(error))
    return None
