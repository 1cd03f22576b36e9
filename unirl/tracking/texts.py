"""Text samples: stored in the manifest itself, and shown on Markdown pages.

Texts on a page are indented by four columns (a Markdown code block), so no fence, heading or HTML in them takes effect.
Invisible characters are spelled out, so they cannot move a cursor or hide anything.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Self

from unirl.tracking.console import printable
from unirl.tracking.measures import text_measures
from unirl.tracking.mirrors import Mirrors
from unirl.tracking.samples import (
    REWRITE,
    Fact,
    Gallery,
    Media,
    MirroredPage,
    SampleGroup,
    SampleRow,
    SampleTable,
    Sides,
    pairs_of,
)
from unirl.tracking.streams import inert
from unirl.tracking.tables import replace_text

PAGE_CHARACTERS = 400_000
"""Approximate length of a page. The manifest has the full texts."""
SHORTEST, LONGEST = 400, 6000
"""Bounds of the number of characters that a page shows of one text."""
MAX_GROUPS = 64
MAX_PER_GROUP = 16
MAX_PAIRS = 4
"""Samples per prompt on a before/after page."""
LONGEST_REWRITE = 600
"""Characters that a page shows of the rewrite from which an image was drawn."""
LONGEST_PATH = 500
"""Characters that a page shows of the path of an image."""
MIRRORED_CHARACTERS = 50_000
MAX_CONSOLE_TEXTS, CONSOLE_TEXT = 32, 160
"""Number of texts that a console shows, and characters of each."""


@dataclass(frozen=True)
class TextMedia(Media):
    """Generated texts."""

    texts: tuple[str, ...]
    kind: ClassVar[str] = "text"

    def __len__(self) -> int:
        return len(self.texts)

    def measures(self) -> dict[str, float]:
        """The mean distance between the texts."""
        return text_measures(self.texts)

    @classmethod
    def read(cls, rows: Sequence[SampleRow], folder: Path) -> TextMedia:
        """Takes the texts from the rows."""
        return cls(tuple(row.text for row in rows))

    def write(self, rows: Sequence[SampleRow], names: Sequence[str], folder: Path) -> list[SampleRow]:
        """Writes no files: the manifest holds any text exactly."""
        return [replace(row, text=text) for row, text in zip(rows, self.texts, strict=True)]

    def compares_with(self, other: Media) -> bool:
        """Returns True for texts."""
        return other.kind == self.kind

    def page(self, table: SampleTable[Self], folder: Path, title: str) -> Path:
        path = folder / "samples.md"
        replace_text(path, samples_page(table, title))
        return path

    def comparison(self, before: SampleTable[Self], after: SampleTable[Self], sides: Sides, folder: Path) -> Path:
        path = folder / "before_after.md"
        replace_text(path, before_after_page(before, after, sides))
        return path

    def gallery(self, drawn: Gallery, folder: Path) -> Path:
        """Writes every text with its prompt and seed as a line of JSON, and a page."""
        drawn.write_manifest(folder / "responses.jsonl", [{"response": text} for text in self.texts])
        columns = drawn.per_prompt
        limit = _characters_per_text(len(drawn.prompts) + len(self.texts))
        parts = [f"# Responses\n\n{inline(drawn.title, LONGEST_PATH)}\n\n"]
        for number, text in enumerate(self.texts):
            if number % columns == 0:
                prompt = drawn.prompts[number // columns]
                parts.append(f"## Prompt {number // columns + 1}\n\n{block(prompt, limit)}")
            parts.append(f"### Response {number % columns + 1}\n\n{block(text, limit)}")
        path = folder / "responses.md"
        replace_text(path, "".join(parts))
        return path

    def console_lines(self) -> list[str]:
        """The beginning of the first texts, one line each."""
        lines = [" ".join(printable(text).split()) for text in self.texts[:MAX_CONSOLE_TEXTS]]
        return [text if len(text) <= CONSOLE_TEXT else f"{text[:CONSOLE_TEXT]} ..." for text in lines]

    def mirror(self, mirrors: Mirrors, page: MirroredPage, rows: Sequence[SampleRow]) -> None:
        """Sends the beginning of the page."""
        text = page.path.read_text(encoding="utf-8")[:MIRRORED_CHARACTERS]
        mirrors.each(lambda mirror: mirror.text(page.step, page.key, text))


def samples_page(table: SampleTable[TextMedia], title: str) -> str:
    """Markdown page of texts, by prompt and highest reward first, with the facts of each."""
    return listing(table, title, lambda row, limit: block(table.media.texts[row], limit))


def listing(table: SampleTable[Media], title: str, shown_as: Callable[[int, int], str]) -> str:
    """Markdown page of samples, by prompt and highest reward first, with the facts of each.

    Args:
        shown_as: returns the Markdown of one medium, given its row number and its approximate number of characters.
    """
    groups = table.best_groups()
    shown = groups[:MAX_GROUPS]
    limit = _characters_per_text(sum(1 + min(len(group.rows), MAX_PER_GROUP) for group in shown))
    summary = f"{_capitalized(table.reward_text())}, for {len(groups)} prompts, highest first"
    parts = [f"# {title}\n\n{summary}{_shown_of(len(shown), len(groups))}.\n\n{_remark(table)}"]
    for number, group in enumerate(shown):
        parts.append(f"## Prompt {number + 1}: mean reward {group.mean_reward:.3f}\n\n{_prompt_block(group, limit)}")
        for place, row in enumerate(group.best_first()[:MAX_PER_GROUP]):
            name = f"Sample {place + 1} of {len(group.rows)}"
            parts.append(_sample(table.rows[row], name, shown_as(row, limit)))
    return "".join(parts)


def before_after_page(before: SampleTable[TextMedia], after: SampleTable[TextMedia], sides: Sides) -> str:
    """Markdown page that compares responses before and after training. Both were sampled with the same noise.

    Prompts whose mean reward changed come first, then those whose texts changed, each in the order of their file.
    """
    pairs = sorted(pairs_of(before, after), key=lambda pair: _rank(before, after, pair))
    shown = pairs[:MAX_GROUPS]
    limit = _characters_per_text(sum(1 + 2 * min(len(old.rows), MAX_PAIRS) for old, _ in shown))
    summary = f"{_rise(pairs)}{_shown_of(len(shown), len(pairs))}"
    parts = [f"# Before and after training\n\n{summary}.\n\n{_remark(after)}"]
    for number, (old, new) in enumerate(shown):
        change = f"mean reward {old.mean_reward:.3f} -> {new.mean_reward:.3f}"
        parts.append(f"## Prompt {number + 1}: {change}\n\n{_prompt_block(new, limit)}")
        for place, rows in enumerate(list(zip(old.rows, new.rows, strict=False))[:MAX_PAIRS]):
            for table, row, side in zip((before, after), rows, sides, strict=True):
                name = f"{_capitalized(side)}, sample {place + 1}"
                parts.append(_sample(table.rows[row], name, block(table.media.texts[row], limit)))
    return "".join(parts)


def _remark(table: SampleTable[Media]) -> str:
    return f"**{_capitalized(table.remark)}.**\n\n" if table.remark else ""


def _rank(before: SampleTable[TextMedia], after: SampleTable[TextMedia], pair: tuple[SampleGroup, SampleGroup]) -> int:
    """0 if the mean reward of a prompt changed, 1 if only texts did, 2 if nothing did."""
    old, new = pair
    if old.mean_reward != new.mean_reward:
        return 0
    return 1 if [before.media.texts[row] for row in old.rows] != [after.media.texts[row] for row in new.rows] else 2


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


def _prompt_block(group: SampleGroup, limit: int) -> str:
    about = ", ".join(inline(image, LONGEST_PATH) for image in group.images)
    return block(group.prompt, limit) + (f"About {about}\n\n" if about else "")


def _sample(row: SampleRow, name: str, shown: str) -> str:
    """One sample on a page. Below its reward is a line such as `advantage +0.58, tokens 17, finished, ...`."""
    facts = [inline(row.sample_id)]
    facts += [] if row.advantage is None else [f"advantage {row.advantage:+.3f}"]
    facts += [] if row.weight else ["not trained"]
    facts += [_fact_text(name, fact) for name, fact in sorted(row.facts.items()) if name != REWRITE]
    facts += [f"{inline(name)} {score:.3f}" for name, score in row.rewards.items()]
    drawn = (
        f"Drawn from the rewrite:\n\n{block(str(row.facts[REWRITE]), LONGEST_REWRITE)}" if REWRITE in row.facts else ""
    )
    return f"### {name}: reward {row.reward:.3f}\n\n{', '.join(facts)}\n\n{drawn}{shown}"


def _fact_text(name: str, fact: Fact) -> str:
    if isinstance(fact, bool):
        return name if fact else f"not {name}"
    if isinstance(fact, str):
        return f"{name} {inline(fact)}" if fact.strip() else f"no {name}"
    return f"{name} {fact:g}"


def _characters_per_text(num_texts: int) -> int:
    return max(SHORTEST, min(LONGEST, PAGE_CHARACTERS // num_texts))


def _shown_of(shown: int, total: int) -> str:
    return f"; {shown} of {total} prompts shown" if shown < total else ""


def _rise(pairs: Sequence[tuple[SampleGroup, SampleGroup]]) -> str:
    before = sum(old.mean_reward for old, _ in pairs) / len(pairs)
    after = sum(new.mean_reward for _, new in pairs) / len(pairs)
    better = sum(new.mean_reward > old.mean_reward for old, new in pairs)
    worse = sum(new.mean_reward < old.mean_reward for old, new in pairs)
    return (
        f"The same prompts and the same random numbers: mean reward {before:.3f} -> {after:.3f} over {len(pairs)} "
        f"prompts, better on {better}, worse on {worse}, equal on {len(pairs) - better - worse}"
    )


MAX_LINES = 120
"""Lines that a page shows of one text. A longer text loses its middle."""
MAX_INLINE = 80


def block(text: str, limit: int) -> str:
    """The text as an indented block of at most about `limit` characters, followed by a blank line."""
    if not text.strip():
        return "*(empty)*\n\n" if not text else f"*({len(text)} characters of white space)*\n\n"
    return "".join(f"    {line}\n" for line in visible(shortened(text, limit)).split("\n")) + "\n"


def shortened(text: str, limit: int) -> str:
    """The text, or its beginning and end if it is longer than `limit` characters or MAX_LINES lines."""
    lines = text.split("\n")
    if len(lines) > MAX_LINES:
        head, tail = "\n".join(lines[: 2 * MAX_LINES // 3]), "\n".join(lines[-MAX_LINES // 3 :])
    else:
        head, tail = text, ""
    room = limit if not tail else limit * len(head) // (len(head) + len(tail))
    if len(head) > room:
        head, tail = head[: 2 * room // 3], tail[-(limit - room) :] if tail else head[-(room // 3) :]
    left_out = len(text) - len(head) - len(tail)
    return text if left_out <= 0 else f"{head}\n[... {left_out} characters left out on this page ...]\n{tail}"


def visible(text: str) -> str:
    """The text with characters that have no glyph (controls, surrogates, direction marks) written as <U+0000>."""
    return inert(text.replace("\r\n", "\n"))


def inline(text: str, limit: int = MAX_INLINE) -> str:
    """A short text as inline code."""
    shown = printable(text).strip()[:limit]
    longest = max((len(run) for run in re.findall("`+", shown)), default=0)
    fence, pad = "`" * (longest + 1), " " if shown[:1] == "`" or shown[-1:] == "`" else ""
    return f"{fence}{pad}{shown}{pad}{fence}" if shown else ""
