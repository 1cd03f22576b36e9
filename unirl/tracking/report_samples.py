"""The samples of a report: which ones it shows, and their images as parts of the page, within a number of bytes."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from PIL import Image

from unirl.tracking.record import RunRecord, StoredSamples
from unirl.tracking.samples import REWRITE, SampleGroup, SampleRow, groups_of

MAX_PROMPTS = 12
"""Prompts that are shown before and after. Of more, those that rose most and least are."""
MAX_PAIRS = {"image": 4, "video": 3, "text": 2}
"""Samples that are shown of a prompt on each side, by medium."""
MAX_SAMPLES = 6
"""Training samples with the highest, and with the lowest reward."""
LONGEST_TEXT = 1200
"""Characters that are shown of a text. The middle of a longer one is left out."""
MAX_FRAMES = 33
FRAME_MS = 100
SIDES = (384, 256, 160, 96)
"""Longest side of the images, which is reduced until they fit."""
LOSSLESS_UP_TO = 160
"""Longest side of an image that is stored without loss, if it is not reduced."""
QUALITY = 82
SHOWN_SIDE = 112
"""Pixels of an image on the page. Smaller images are enlarged by repeating pixels."""


@dataclass(frozen=True)
class ShownSample:
    """One sample on the page."""

    prompt: str
    reward: float
    text: str = ""
    """A text, or the rewrite from which an image was drawn."""
    file: str = ""
    """Path of the image within the run; empty for a text, and where none is stored."""
    facts: str = ""
    is_text: bool = False
    is_wide: bool = False
    """True for videos, which are shown larger."""


@dataclass(frozen=True)
class ShownPrompt:
    """The samples of a prompt on both sides, or on one."""

    prompt: str
    """The text, or the id of the group if it has none."""
    images: tuple[str, ...]
    rewards: tuple[float, ...]
    """Mean reward of all samples of the prompt on each side."""
    sides: tuple[tuple[ShownSample, ...], ...]
    num_samples: int
    """Number of samples of the prompt on a side."""


class Pictures(Protocol):
    """Gives the address of an image, for the template."""

    def __call__(self, sample: ShownSample) -> str: ...


@dataclass
class EmbeddedImages:
    """Images of a run as data addresses that need at most `budget` bytes together."""

    run: RunRecord
    files: tuple[str, ...]
    budget: int
    side: int = 0
    """Longest side of the images in pixels; smaller images keep theirs."""
    omitted: int = 0
    """Number of images that did not fit, even reduced."""
    _uris: dict[str, str] = field(default_factory=dict)
    _small: set[str] = field(default_factory=set)

    @classmethod
    def within(cls, run: RunRecord, files: Iterable[str], budget: int) -> EmbeddedImages:
        """The images at the largest of SIDES at which all fit; at the smallest one, as many as fit."""
        names = tuple(dict.fromkeys(files))
        frames = {name: reduced(run.files.frames(name, MAX_FRAMES), SIDES[0]) for name in names}
        made = cls(run, names, budget)
        made._small = {name for name, shown in frames.items() if shown and max(shown[0].size) < SHOWN_SIDE}
        for side in SIDES:
            made.side = side
            made._uris = {name: data_uri(shown, side) for name, shown in frames.items() if shown}
            if sum(map(len, made._uris.values())) <= budget:
                return made
        room = budget
        for name, uri in list(made._uris.items()):
            if len(uri) > room:
                del made._uris[name]
                made.omitted += 1
            else:
                room -= len(uri)
        return made

    def __call__(self, sample: ShownSample) -> str:
        """The address of the image of a sample. Empty if it could not be read, or did not fit."""
        return self._uris.get(sample.file, "")

    def is_small(self, sample: ShownSample) -> bool:
        """Returns True if the page enlarges the image of a sample."""
        return sample.file in self._small


def reduced(frames: Sequence[Image.Image], side: int) -> list[Image.Image]:
    """Copies of the frames of which no side exceeds `side`."""
    copies = [frame.copy() for frame in frames]
    for copy in copies:
        copy.thumbnail((side, side), Image.Resampling.LANCZOS)
    return copies


def data_uri(frames: Sequence[Image.Image], side: int) -> str:
    """The frames as a WebP image in a data address, reduced so that no side exceeds `side`. Metadata is left out."""
    first, *others = reduced(frames, side)
    exact = first.size == frames[0].size and max(first.size) <= LOSSLESS_UP_TO and not others
    content = io.BytesIO()
    animation = {"save_all": True, "append_images": others, "duration": FRAME_MS, "loop": 0} if others else {}
    first.save(content, format="WEBP", lossless=exact, quality=QUALITY, **animation)
    return f"data:image/webp;base64,{base64.b64encode(content.getvalue()).decode('ascii')}"


def before_and_after(before: StoredSamples, after: StoredSamples) -> tuple[list[ShownPrompt], int]:
    """The prompts of two evaluations side by side, the largest rise first, and the number of all common prompts.

    Prompts of which no sample is stored are left out, as those of episodes without a video. The samples of a prompt are
    its first ones, not the best. Samples of equal number have equal noise.
    """
    later = {(group.group_id, group.prompt): group for group in groups_of(after.rows)}
    pairs = [(old, later[key]) for old in groups_of(before.rows) if (key := (old.group_id, old.prompt)) in later]
    drawn = [pair for pair in pairs if any(is_drawn(after.rows[row]) for row in pair[1].rows)]
    pairs = drawn or pairs
    pairs.sort(key=lambda pair: -_rise(*pair))
    half = MAX_PROMPTS // 2
    shown = pairs if len(pairs) <= MAX_PROMPTS else [*pairs[:half], *pairs[-half:]]
    return [_prompt((before, after), pair) for pair in shown], len(pairs)


def is_drawn(row: SampleRow) -> bool:
    """Returns False for a sample without a video. Texts are stored in the row."""
    return row.facts.get("frames") != 0


def one_side(samples: StoredSamples) -> list[ShownPrompt]:
    """The first prompts of an evaluation."""
    groups = groups_of(samples.rows)
    drawn = [group for group in groups if any(is_drawn(samples.rows[row]) for row in group.rows)]
    return [_prompt((samples,), (group,)) for group in (drawn or groups)[:MAX_PROMPTS]]


def extremes(samples: StoredSamples) -> tuple[list[ShownSample], list[ShownSample]]:
    """The samples of a training step with the highest and with the lowest reward; none is in both."""
    rows = [row for row in samples.rows if math.isfinite(row.reward)]
    ranked = sorted([row for row in rows if is_drawn(row)] or rows, key=lambda row: -row.reward)
    count = min(MAX_SAMPLES, (len(ranked) + 1) // 2)
    best, worst = ranked[:count], ranked[count:][-count:]
    return [_shown(samples.folder, row) for row in best], [_shown(samples.folder, row) for row in worst]


def files_of(prompts: Iterable[ShownPrompt], samples: Iterable[ShownSample]) -> Iterator[str]:
    """The image files of everything that is shown."""
    every = [sample for prompt in prompts for side in prompt.sides for sample in side]
    yield from (sample.file for sample in [*every, *samples] if sample.file)


def _rise(old: SampleGroup, new: SampleGroup) -> float:
    """How much the mean reward of a prompt rose; 0 where a sample has no finite reward."""
    rise = new.mean_reward - old.mean_reward
    return rise if math.isfinite(rise) else 0.0


def _prompt(sides: Sequence[StoredSamples], groups: Sequence[SampleGroup]) -> ShownPrompt:
    medium = sides[-1].rows[groups[-1].rows[0]].medium
    count = MAX_PAIRS.get(medium, 1)
    shown = tuple(
        tuple(_shown(samples.folder, samples.rows[row]) for row in group.rows[:count])
        for samples, group in zip(sides, groups, strict=True)
    )
    last = groups[-1]
    rewards = tuple(group.mean_reward for group in groups)
    return ShownPrompt(last.prompt or last.group_id, last.images, rewards, shown, len(last.rows))


def _shown(folder: str, row: SampleRow) -> ShownSample:
    facts = ", ".join(f"{name} {_fact(value)}" for name, value in row.facts.items() if name not in HIDDEN_FACTS)
    if not row.file:
        return ShownSample(row.prompt, row.reward, shortened(row.text), facts=facts, is_text=True)
    rewrite = row.facts.get(REWRITE, "")
    file = f"{folder}/{row.file}" if is_drawn(row) else ""
    return ShownSample(row.prompt, row.reward, shortened(str(rewrite)), file, facts, is_wide="frames" in row.facts)


HIDDEN_FACTS = (REWRITE, "fps", "frames", "shown", "size")
"""Facts that are shown in another way, or are about the file."""


def _fact(value: float | bool | str) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return shortened(value, 60) if isinstance(value, str) else f"{value:g}"


def shortened(text: str, most: int = LONGEST_TEXT) -> str:
    """`text`, without its middle if it is longer than `most` characters."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2]} [... {len(text) - most} characters ...] {text[-(most // 2) :]}"
