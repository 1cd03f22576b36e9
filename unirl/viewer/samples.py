"""What the gallery, the page of a sample and the before/after page show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from unirl.media.files import ImageLimits, UnreadableMedia
from unirl.media.images import PLAIN_PIXELS, is_plain, open_header
from unirl.tracking.record import RunRecord, StoredSamples
from unirl.tracking.sample_index import IndexedSample, Kind, SampleIndex, SampleQuery
from unirl.tracking.samples import REWRITE, SampleGroup, SampleRow, groups_of
from unirl.types.secrets import redact
from unirl.viewer.library import RunLibrary

MAX_PAGE = 200
"""Samples that one request can ask for."""
SHORT_TEXT = 400
"""Characters of a text in the gallery."""
LONG_TEXT = 200_000
"""Characters of a text on the page of its sample."""
MAX_RELATED = 64
"""Samples of the same prompt, and of the same place in other evaluations, that the page of a sample lists."""


class NoSuchSample(LookupError):
    """A sample, or its file, is not in the run."""


@dataclass(frozen=True)
class SamplesRequest(SampleQuery):
    """A part of the samples that a query finds."""

    offset: int = 0
    limit: int = 60
    size: int | None = None
    """Number of indexed samples among which the first part was found, so that later parts follow it."""


@dataclass(frozen=True)
class PlaceRequest:
    """The place of one sample."""

    kind: Kind
    step: int
    row: int


@dataclass(frozen=True)
class PairsRequest:
    """A part of the prompts that two evaluations have. By default they are the first and the last evaluation."""

    before: int | None = None
    after: int | None = None
    offset: int = 0
    limit: int = 20


@dataclass(frozen=True)
class SampleTile:
    """A sample as a gallery shows it."""

    kind: Kind
    step: int
    row: int
    sample_id: str
    group_id: str
    prompt: str
    reward: float
    rewards: Mapping[str, float]
    advantage: float | None
    weight: float
    weight_version: int | None
    track: str
    medium: str
    text: str
    rewrite: str
    facts: Mapping[str, object]
    images: tuple[str, ...]
    has_file: bool
    has_mp4: bool


def samples(library: RunLibrary, id: str, request: SamplesRequest) -> dict[str, object]:
    """A part of the samples that a filter finds, and how many it finds."""
    run = library.open(id)
    with run.reading(tables=False, index=request.size is None) as record:
        size = len(run.index) if request.size is None else request.size
        query = SampleQuery(
            kind=request.kind,
            first_step=request.first_step,
            last_step=request.last_step,
            prompt=request.prompt,
            score=request.score,
            low=request.low,
            high=request.high,
            order=request.order,
        )
        numbers = run.index.find(query, size)
        start = max(request.offset, 0)
        part = numbers[start : start + min(max(request.limit, 0), MAX_PAGE)].tolist()
        return {
            "total": len(numbers),
            "size": size,
            "indexed": len(run.index),
            "complete": run.index_is_complete,
            "scores": run.index.scores,
            "steps": {"samples": record.sampled, "eval": record.evaluated},
            "offset": start,
            "rows": [tile(record, each) for each in run.index.samples(record, part)],
            "problems": record.problems,
        }


def sample(library: RunLibrary, id: str, request: PlaceRequest) -> dict[str, object]:
    """One sample, the others of its prompt, the same one in other evaluations, and what it was made from."""
    run = library.open(id)
    with run.reading(tables=False) as record:
        place = request.kind, request.step, request.row
        found = run.index.sample(record, *place)
        if found is None:
            raise NoSuchSample(f"there is no sample {request.row} of step {request.step}")
        stored = run.index.step(record, request.kind, request.step)
        group = [n for n, row in enumerate(stored.rows) if row.group_id == found.facts.group_id]
        siblings = [IndexedSample(request.kind, request.step, n, stored.rows[n]) for n in group[:MAX_RELATED]]
        return {
            "sample": tile(record, found, LONG_TEXT),
            "siblings": [tile(record, each) for each in siblings],
            "history": [tile(record, each) for each in _in_other_evaluations(run.index, record, found)],
            "lineage": _lineage(found, stored),
            "series": found.facts.series,
            "tokens": tokens_of(found.facts),
            "folder": stored.folder,
            "file": found.facts.file,
            "problems": record.problems,
        }


def tokens_of(row: SampleRow) -> dict[str, object]:
    """The texts of the tokens of a sample, and which of them the policy did not write.

    Tokens are masked one by one, and a secret has several, so those of a text with a secret are left out.
    """
    text = "".join(row.pieces)
    has_secret = redact(text) != text
    return {
        "pieces": () if has_secret else row.pieces,
        "context": () if has_secret else row.context,
        "has_secret": has_secret,
    }


def pairs(library: RunLibrary, id: str, request: PairsRequest) -> dict[str, object]:
    """Prompts of two evaluations. Their k-th samples have the same noise."""
    run = library.open(id)
    with run.reading(tables=False) as record:
        steps = record.evaluated
        if not steps:
            return {"steps": steps, "before": None, "after": None, "total": 0, "rows": [], "problems": record.problems}
        before = steps[0] if request.before is None else request.before
        after = steps[-1] if request.after is None else request.after
        first, second = (run.index.step(record, "eval", step) for step in (before, after))
        later = {(group.group_id, group.prompt): group for group in groups_of(second.rows)}
        both = [(old, later.get((old.group_id, old.prompt))) for old in groups_of(first.rows)]
        common = [(old, new) for old, new in both if new is not None]
        start = max(request.offset, 0)
        part = common[start : start + min(max(request.limit, 0), MAX_PAGE)]
        return {
            "steps": steps,
            "before": before,
            "after": after,
            "total": len(common),
            "offset": start,
            "rows": [
                {
                    "prompt": old.prompt or old.group_id,
                    "images": old.images,
                    "rewards": (old.mean_reward, new.mean_reward),
                    "pairs": list(zip(_tiles(record, first, old), _tiles(record, second, new), strict=False)),
                }
                for old, new in part
            ],
            "problems": record.problems,
        }


def media(library: RunLibrary, id: str, place: PlaceRequest, is_mp4: bool) -> tuple[bytes, str]:
    """The file of a sample and its content type, by its content.

    Raises NoSuchSample if there is none, or if it is no image of the formats that UniRL writes and no MP4.
    """
    run = library.open(id)
    with run.reading(tables=False) as record:
        found = run.index.sample(record, place.kind, place.step, place.row)
        name = "" if found is None else found.facts.file
        if not name or name != PurePath(name).name:
            raise NoSuchSample("this sample has no file")
        if is_mp4:
            name = str(PurePath(name).with_suffix(".mp4"))
        content = record.files.data(f"{place.kind}/step-{place.step:06d}/{name}")
    if content is None:
        raise NoSuchSample("the file of this sample cannot be read")
    return content, content_type(content)


def content_type(content: bytes) -> str:
    """The type of an image or MP4 that is shown. Raises NoSuchSample for anything else, such as SVG."""
    if content[4:8] == b"ftyp":
        return "video/mp4"
    try:
        image = open_header(content, ImageLimits(pixels=PLAIN_PIXELS))
    except UnreadableMedia as error:
        raise NoSuchSample(f"the file of this sample is not shown: {error}") from error
    if image.format is None or not is_plain(image, content):
        raise NoSuchSample("the file of this sample takes too long to decode")
    return {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp"}[image.format]


def tile(record: RunRecord, found: IndexedSample, length: int = SHORT_TEXT) -> SampleTile:
    """What is shown of a sample, with at most `length` characters of its text."""
    row = found.facts
    mp4 = f"{found.kind}/step-{found.step:06d}/{PurePath(row.file or 'absent').stem}.mp4"
    facts = {name: value for name, value in row.facts.items() if name != REWRITE}
    return SampleTile(
        kind=found.kind,
        step=found.step,
        row=found.row,
        sample_id=row.sample_id,
        group_id=row.group_id,
        prompt=row.prompt[:length],
        reward=row.reward,
        rewards=row.rewards,
        advantage=row.advantage,
        weight=row.weight,
        weight_version=row.weight_version,
        track=row.track,
        medium=row.medium,
        text=row.text[:length],
        rewrite=str(row.facts.get(REWRITE, ""))[:length],
        facts=facts,
        images=row.images,
        has_file=bool(row.file),
        has_mp4=row.medium == "video" and record.files.exists(mp4),
    )


def _tiles(record: RunRecord, stored: StoredSamples, group: SampleGroup) -> list[SampleTile]:
    return [tile(record, IndexedSample("eval", stored.step, n, stored.rows[n]), 4 * SHORT_TEXT) for n in group.rows]


def _in_other_evaluations(index: SampleIndex, record: RunRecord, found: IndexedSample) -> list[IndexedSample]:
    """The samples of the same prompt and noise in all evaluations. None of a training sample."""
    if found.kind != "eval":
        return []
    same = []
    for step in record.evaluated[-MAX_RELATED:]:
        stored = index.step(record, "eval", step)
        rows = [n for n, row in enumerate(stored.rows) if row.sample_id == found.facts.sample_id]
        same += [IndexedSample("eval", step, n, stored.rows[n]) for n in rows[:1]]
    return same


def _lineage(found: IndexedSample, stored: StoredSamples) -> list[dict[str, object]]:
    """The tree from the prompt to the sample and to what was made from it: depth, label, text and row of each node."""
    by_id = {row.sample_id: (n, row) for n, row in enumerate(stored.rows)}
    if found.facts.parent_id is not None and found.facts.parent_id not in by_id:
        return _tree(found, stored)
    line = [(found.row, found.facts)]
    while (parent := by_id.get(line[0][1].parent_id or "")) is not None and parent not in line:
        line.insert(0, parent)
    nodes = [_root(line[0][1])]
    depth = 1
    for n, row in line:
        if REWRITE in row.facts:
            nodes.append(_node(depth, "rewrite", str(row.facts[REWRITE])))
            depth += 1
        nodes.append(_node(depth, _label(row, stored), _summary(row), n))
        depth += 1
    children = [(n, row) for n, row in enumerate(stored.rows) if row.parent_id == found.facts.sample_id]
    nodes += [_node(depth, _label(row, stored), _summary(row), n) for n, row in children[:MAX_RELATED]]
    return nodes


def _tree(found: IndexedSample, stored: StoredSamples) -> list[dict[str, object]]:
    """The prompt, each parent of its samples, and below it the samples that were made from it.

    For parents that are not stored themselves, such as rewrites: a sample has the id of its parent and its text.
    """
    own = found.facts
    group = [(n, row) for n, row in enumerate(stored.rows) if row.group_id == own.group_id and row.track == own.track]
    nodes = [_root(own)]
    for parent in dict.fromkeys(row.parent_id for _, row in group):
        children = [(n, row) for n, row in group if row.parent_id == parent]
        rewrite = children[0][1].facts.get(REWRITE)
        nodes.append(_node(1, "parent", str(parent)) if rewrite is None else _node(1, "rewrite", str(rewrite)))
        nodes += [_node(2, _label(row, stored), f"{_summary(row)}, reward {row.reward:.3g}", n) for n, row in children]
    return nodes[: 2 * MAX_RELATED]


def _node(depth: int, label: str, text: str, row: int | None = None) -> dict[str, object]:
    return {"depth": depth, "label": label, "text": text[:SHORT_TEXT], "row": row}


def _root(row: SampleRow) -> dict[str, object]:
    """The prompt, or the group of a sample without one."""
    return _node(0, "prompt", row.prompt) if row.prompt else _node(0, "group", row.group_id)


def _label(row: SampleRow, stored: StoredSamples) -> str:
    """The track of a row, where there are several, else its medium."""
    return row.track if any(each.track != row.track for each in stored.rows) else row.medium


def _summary(row: SampleRow) -> str:
    return row.text or row.sample_id


def common_prompts(evaluations: Sequence[StoredSamples]) -> list[tuple[SampleGroup, ...]]:
    """The groups of the prompts that all evaluations have, in the order of the first one."""
    tables = [{(group.group_id, group.prompt): group for group in groups_of(each.rows)} for each in evaluations]
    return [tuple(table[key] for table in tables) for key in tables[0] if all(key in table for table in tables)]
