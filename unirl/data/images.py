"""Condition images of prompts: all are opened before the run starts, so that none fails in the middle of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import urlsplit

from unirl.config.errors import DataError, UnreadableFileError
from unirl.data.datasets import CONDITION, MEDIA_FORM, Prompt
from unirl.models.images import decode_file, read_file, split_at_images
from unirl.models.loading.remote_files import is_remote
from unirl.tracking.streams import say
from unirl.types.facts import ModelFacts

OPENED_AT_ONCE = 16
"""Images that are opened at once. More than the number of cores, because remote files mostly wait."""


@dataclass(frozen=True)
class ImageInfo:
    """Facts about one image file."""

    height: int
    """In pixels, after the camera's rotation is undone."""
    width: int
    digest: str
    """Hash of the file's content."""
    num_frames: int
    """1 for a still image. Of an animation, only the first frame is read."""


ImageInfos = Mapping[str, ImageInfo]
"""Maps the path or address of an image to its facts."""


def check_images(prompts: Sequence[Prompt]) -> ImageInfos:
    """Facts about all condition images. Raises DataError for the first prompt with an image that cannot be read."""
    results = _open_all(prompts)
    for problem in _problems(prompts, results):
        raise problem
    return {uri: info for uri, info in results.items() if isinstance(info, ImageInfo)}


def image_problems(prompts: Sequence[Prompt]) -> Iterator[DataError]:
    """One error for each prompt whose images cannot be used. It names prompt, file and rule. Files are opened once."""
    return _problems(prompts, _open_all(prompts))


def check_remote(prompts: Sequence[Prompt], allowed: bool, hosts: Sequence[str]) -> None:
    """Raises DataError (4003) for the first prompt with an image at a URL that the data source does not allow.

    Args:
        allowed: False allows no URL.
        hosts: names of hosts (buckets for s3 and gs); empty allows all.
    """
    for prompt in prompts:
        for uri in (ref.uri for ref in prompt.images if is_remote(ref.uri)):
            host = urlsplit(uri).hostname
            if not allowed:
                rule = "data_source.allow_remote=false allows no URL. Fetch the file and give its path"
            elif hosts and host not in hosts:
                rule = (
                    f"data_source.remote_hosts={list(hosts)} lacks {host}. Add it, or fetch the file and give its path"
                )
            else:
                continue
            raise UnreadableFileError(f"{prompt.origin}: prompt {prompt.prompt_id!r}: image {uri}: {rule}")


def check_counts(prompts: Sequence[Prompt], facts: ModelFacts) -> None:
    """Raises DataError, with the way out, for the first prompt with fewer or more images than the model takes."""
    fewest, most = facts.condition_images
    for prompt in prompts:
        count = len(prompt.images)
        if count < fewest or (most is not None and count > most):
            where = f"{prompt.origin}: " if prompt.origin else ""
            raise DataError(
                f"{where}prompt {prompt.prompt_id!r} has {_images(count)} of role {CONDITION!r}, and "
                f"{facts.family} {_taken(fewest, most)}. {_way_out(count, fewest, most)}"
            )


def _taken(fewest: int, most: int | None) -> str:
    if most == 0:
        return "is conditioned on text alone"
    if most is None:
        return f"takes {fewest} or more per prompt"
    return f"takes {_images(most)} per prompt" if fewest == most else f"takes {fewest} to {most} per prompt"


def _way_out(count: int, fewest: int, most: int | None) -> str:
    if most == 0:
        return (
            "Remove media_refs from the data file, or use a model that takes images (to edit them or to animate them)"
        )
    if count < fewest:
        return f'Add "media_refs": [{MEDIA_FORM}] to its entry in the data file, or use a model without images'
    return f"Remove {count - (most or 0)} from its media_refs"


def _images(count: int) -> str:
    return f"{count or 'no'} image{'' if count == 1 else 's'}"


def _open_all(prompts: Sequence[Prompt]) -> Mapping[str, ImageInfo | DataError]:
    """Facts about every condition image, or why it cannot be read."""
    files = list(dict.fromkeys(ref.uri for prompt in prompts for ref in prompt.images))
    with ThreadPoolExecutor(OPENED_AT_ONCE) as threads:  # image decoders release the GIL
        results = dict(zip(files, threads.map(_info_or_error, files), strict=True))
    _say_animations([uri for uri, info in results.items() if isinstance(info, ImageInfo) and info.num_frames > 1])
    return results


def _say_animations(uris: Sequence[str]) -> None:
    """Says on stderr that only the first frame of these images is read."""
    if uris:
        others = f" and {len(uris) - 1} more" if len(uris) > 1 else ""
        say(f"unirl: {uris[0]}{others}: an image of several frames; its first frame is read")


def _info_or_error(uri: str) -> ImageInfo | DataError:
    try:
        return read_image_info(uri)
    except DataError as error:
        return error


def read_image_info(uri: str) -> ImageInfo:
    """Facts about the image at a path or an address. Raises DataError (4003)."""
    file = read_file(uri)
    decoded = decode_file(file)
    return ImageInfo(decoded.image.height, decoded.image.width, hashed(file.content), decoded.num_frames)


def digest_of(uri: str) -> str:
    """Hash of a file's content, 32 characters; the path does not count."""
    return hashed(read_file(uri).content)


def hashed(content: bytes) -> str:
    """A hash of 32 characters."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _problems(prompts: Sequence[Prompt], results: Mapping[str, ImageInfo | DataError]) -> Iterator[DataError]:
    for prompt in prompts:
        errors = [result for ref in prompt.images if isinstance(result := results[ref.uri], DataError)]
        error = errors[0] if errors else _misplaced(prompt)
        if error is not None:
            yield type(error)(f"{prompt.origin}: prompt {prompt.prompt_id!r}: {error}")


def _misplaced(prompt: Prompt) -> DataError | None:
    try:
        split_at_images(prompt.text, len(prompt.images))
    except ValueError as error:
        return DataError(str(error))
    return None
